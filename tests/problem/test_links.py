# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Exchanges of a topology: measured where they hold, else over its bandwidths."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.planner.types import Topology

from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.planning.cost_sources import links_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize(
    ("made", "source"),
    [
        (Topology(4, "cpu", local_world_size=4), "measured with gloo on 2 ranks"),
        (Topology(16, "cpu", local_world_size=8), "nothing measured"),
        (Topology(4, "cuda", local_world_size=4), "nothing measured"),
    ],
    ids=["one host", "two hosts", "another device"],
)
def test_measured_collectives_hold_for_what_they_were_measured_on(made: Topology, source: str) -> None:
    links = links_of(made, resolve("auto", "cpu"))
    known = (links.all_to_all, links.reduce_scatter, links.all_gather, links.all_reduce)
    assert all(source in model.source for model in known)
    assert (
        links.all_to_all.world_size == made.world_size
        and links.across.world_size == made.world_size // links.host_reduce_scatter.world_size
    )


def test_what_passes_between_hosts_is_what_takes_long() -> None:
    """Two hosts of eight: eight peers of fifteen are on the other host."""
    made = Topology(16, "cuda", local_world_size=8, intra_host_bw=400e6, inter_host_bw=10e6)
    links = links_of(made, resolve("auto", "cuda"))
    sent = torch.full((16,), 1e6)
    assert float(links.all_to_all.all_to_all_ms(sent)[0]) == pytest.approx(8e6 / 10e6 + 0.02, rel=1e-3)
    assert float(links.host_all_gather.all_to_all_ms(sent[:8])[0]) == pytest.approx(7e6 / 400e6 + 0.02, rel=1e-3)
    assert float(links.across.all_to_all_ms(sent[:2])[0]) == pytest.approx(1e6 / 10e6 + 0.02, rel=1e-3)
    assert float(links.all_reduce.all_to_all_ms(sent)[0]) == pytest.approx(2 * (8e6 / 10e6 + 0.02), rel=1e-3)
