# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Effort counts candidates: it bounds every part of planning, and the clock decides no plan."""

import itertools
import time
from functools import cache
from typing import Any

import pytest
from small_models import SHARDERS, collection, planner, table, topology
from torch import nn

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.search.effort import EFFORTS

READ = (40.0, 25.0, 9.0, 4.0, 2.0)


def model() -> nn.Module:
    return nn.ModuleDict({"sparse": collection(*(table(f"t{i}", 2000 * (i + 1), 64) for i in range(len(READ))))})


def planned(read: tuple[float, ...] = READ, **arguments: Any) -> DreamShardPlanner:
    statistics = TableStatistics({f"t{i}_f0": FeatureStatistics(factor) for i, factor in enumerate(read)})
    made = planner(topology=topology(3), statistics=statistics, cost_source="roofline", **arguments)
    made.plan(model(), SHARDERS)
    return made


@cache
def usual(effort: str) -> DreamShardPlanner:
    """Plan once by each effort."""
    return planned(effort=effort)


def ranks(made: DreamShardPlanner) -> list[tuple[Any, ...]]:
    return [(name, t.sharding_type, [s.rank for s in t.shards]) for name, t in made.saved_plan().tables()]


@pytest.mark.parametrize("effort", ["quick", "default"])
def test_the_clock_decides_no_plan(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where each look at a clock finds another hour gone."""
    before, hours = usual(effort), itertools.count(step=3600)
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    slow = planned(effort=effort)
    assert ranks(slow) == ranks(before) and slow.report().candidates == before.report().candidates
    if effort == "quick":
        curves = [made.replan(before.saved_plan(), steps=10**6).curve for made in (slow, before)]
        assert [move.step_ms for move in curves[0]] == [move.step_ms for move in curves[1]]


def test_effort_bounds_moves_and_reshards_but_searches_for_torchrecs_plan_in_full() -> None:
    quick, default, thorough = map(usual, EFFORTS)
    for one, other in itertools.pairwise((quick, default, thorough)):
        assert one.report().candidates < other.report().candidates
        assert one.report().reshards < other.report().reshards
    proposals = [made._loop.found.torchrec.proposals for made in (quick, default, thorough)]
    assert proposals[0] == proposals[1] <= proposals[2]
    for made in (quick, default, thorough):
        assert all(made.report().chosen.total_ms <= rival.total_ms * (1 + 1e-6) for rival in made.report().rivals)
