# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Exchanges of a topology: measured where they hold, else over its bandwidths."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import kendalltau
from torchrec.distributed.planner.types import Topology

import collectives_prior
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cost.collectives import NCCL, CollectiveFit, CollectiveModel
from dreamshard_planner.planning.cost_sources import links_of


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
    """Two hosts of eight: eight peers of fifteen are on the other host, which all ranks of a host reach at once where
    data passes from rank to rank."""
    made = Topology(16, "cuda", local_world_size=8, intra_host_bw=400e6, inter_host_bw=10e6)
    links = links_of(made, resolve("auto", "cuda"))
    alone, rings = 10e6 * NCCL.all_to_all, 80e6 * NCCL.rings

    def ms(link: CollectiveModel) -> float:
        return float(link.all_to_all_ms(torch.full((link.world_size,), 1e6)))

    assert ms(links.all_to_all) == pytest.approx(8e6 / alone + NCCL.between_ms)
    assert ms(links.across) == pytest.approx(1e6 / alone + NCCL.between_ms)
    assert ms(links.host_all_gather) == pytest.approx(7e6 / (400e6 * NCCL.inside) + NCCL.inside_ms)
    assert ms(links.reduce_scatter) == ms(links.all_gather) == pytest.approx(15e6 / rings + NCCL.between_ms)
    # Half of the tensor, 16e6 bytes, goes to the other host, and comes back.
    assert ms(links.all_reduce) == pytest.approx(16e6 / rings + NCCL.between_ms)


def test_what_cpu_ranks_of_a_host_exchange_passes_its_memory() -> None:
    made = Topology(4, "cpu", local_world_size=4, intra_host_bw=400e6, ddr_mem_bw=50e6)
    links = links_of(made, resolve("roofline", "cpu"))
    sent = torch.tensor([[1e6, 1e6, 1e6, 1e6], [4e6, 0, 0, 0]])
    # The slowest rank sends four times as much, all together the same.
    both = (links.all_to_all, links.all_reduce)
    all_to_all, all_reduce = (link.all_to_all_ms(sent) - link.latency_ms for link in both)
    assert all_to_all.tolist() == pytest.approx([3e6 / 400e6 + 12e6 / 50e6, 12e6 / 400e6 + 12e6 / 50e6])
    assert all_reduce.tolist() == pytest.approx((2 * all_to_all).tolist())
    assert "topology's 50 GB/s" in links.all_to_all.source and not links.all_to_all.is_measured
    # Of two hosts each has its memory, also where rows are added up inside first.
    two = links_of(
        Topology(8, "cpu", local_world_size=4, inter_host_bw=10e9, ddr_mem_bw=50e6), resolve("roofline", "cpu")
    )
    alike = torch.full((8,), 1e6)
    assert (two.reduce_scatter.all_to_all_ms(alike) - 0.02).item() == pytest.approx(56e6 / 100e6, rel=0.1)
    inside, across = (
        link.all_to_all_ms(alike[: link.world_size]) - 0.02 for link in (two.host_reduce_scatter, two.across)
    )
    assert inside.item() == pytest.approx(12e6 / 50e6, rel=0.1) and across.item() == pytest.approx(2e6 / 25e6, rel=0.1)


def test_the_prior_agrees_with_published_collectives() -> None:
    """Large exchanges agree in level, all in order; latencies differ by a factor of four between clouds."""
    rows = collectives_prior.published()
    pairs = [(row.predicted_ms(NCCL), row.ms) for row in rows]
    assert len(pairs) == 61 and kendalltau(*zip(*pairs, strict=True)).statistic > 0.85
    large = [(mine, ms) for row, (mine, ms) in zip(rows, pairs, strict=True) if row.size_bytes >= 2**28]
    assert len(large) == 28 and all(1 / 1.4 < mine / ms < 1.4 for mine, ms in large)


def test_lookups_are_exchanged_as_measured_and_else_like_other_all_to_alls() -> None:
    one_host, two_hosts = Topology(4, "cpu", local_world_size=4), Topology(16, "cpu", local_world_size=8)
    checkpoint = resolve("auto", "cpu")
    measured, given = links_of(one_host, checkpoint), links_of(two_hosts, checkpoint)
    assert measured.lookups.source == measured.all_to_all.source and measured.lookups.world_size == 4
    # A rank sorts its own ids, whatever others do.
    id_bytes = torch.full((4,), 1e6)
    alone = CollectiveFit(**checkpoint.metadata["collectives"]["fits"]["bucketing"])
    assert float(measured.bucketing.all_to_all_ms(id_bytes / 4)) == pytest.approx(
        1e6 / alone.shared_bytes_per_ms, rel=1e-6
    )
    # Splits, lengths and ids.
    assert given.lookups == replace(given.all_to_all, latency_ms=3 * given.all_to_all.latency_ms)
    assert given.bucketing is None
