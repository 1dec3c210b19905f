# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``DreamShardPlanner()`` on gloo ranks that pretend to have GPUs; only plans know of these."""

from __future__ import annotations

import re
from pathlib import Path

from tests.torchrun import forked

JOB = Path(__file__).parent / "pretended_job.py"
TORCHREC_WARNS = "TopologyFactory|HeuristicalStorageReservation|dense tensor size"


def test_mixed_cards_on_two_hosts() -> None:
    done = forked(JOB, "1", "H100", "A100")
    assert done.returncode == 0, done.stderr
    named = "1 x NVIDIA H100 80GB HBM3 and 1 x NVIDIA A100-SXM4-40GB on 2 hosts, read from the driver"
    assert f"Planned for {named}: 42.4 to 85.0 GB each at 1,555 GB/s (the slowest card's)" in done.stdout
    assert "25 GB/s between hosts" in done.stdout and not re.search(TORCHREC_WARNS, done.stderr)
    assert re.findall(r"placed on .*", done.stdout)[0].count("/cpu") > 0 and "/cuda" not in done.stdout
