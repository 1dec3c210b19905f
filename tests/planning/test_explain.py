# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Why a rank is slow: the figures are those of whole plans, and the words are right."""

import copy
import json

import numpy as np
import pytest
import small_models
from small_models import SHARDERS, collection, table, topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology

from dreamshard_planner import DreamShardError, DreamShardPlanner, FeatureStatistics, TableStatistics

TWO_GPUS = topology(device="cuda")
"""Whose exchanges cost little beside kernels, whatever checkpoint there is."""


def planner(hot: float = 5.0, **changes) -> DreamShardPlanner:
    statistics = TableStatistics({f"t{i}_f0": FeatureStatistics(hot if i == 2 else 5.0) for i in range(8)})
    return small_models.planner(**({"batch_size": 512, "statistics": statistics} | changes))


def model(hot_dim: int = 32):
    return collection(*(table(f"t{i}", 5000 + i, hot_dim if i == 2 else 32) for i in range(8)))


def test_gains_are_those_of_the_plans_that_the_changes_make() -> None:
    given = {"hot": 120.0, "topology": TWO_GPUS, "batch_size": 4096}
    one, whole = planner(**given, exact_training=False), planner(**given, sharding_types=("table_wise",))
    for each in (one, whole):
        each.plan(model(), SHARDERS)
    options = copy.deepcopy(whole.options)
    for option in options:
        option.shards[0].rank = 0
    now_ms = one.predict(options).total_ms
    found = one.explain(plan=options)
    assert found.rank == 0 and found.total_ms == pytest.approx(now_ms)
    assert found.tables[0].table == "t2" and len(found.tables) == 5 and found.other_tables == 3
    assert "t2" in found.headline and f"moved: {found.tables[1].moved.how}" in str(found)
    for entry in found.tables:
        moved = copy.deepcopy(options)
        option = next(option for option in moved if option.name == entry.table)
        assert entry.bytes == option.shards[0].storage.hbm and 0 < entry.alone_ms
        option.shards[0].rank = 1
        assert entry.moved.how == "table_wise on rank 1" and entry.moved.gain_ms > 0
        assert entry.moved.gain_ms == pytest.approx(now_ms - one.predict(moved).total_ms, abs=1e-6)
        assert entry.sharding == "table_wise on rank 0" and entry.split is not None
    on_rank = sum(group.forward_ms + group.backward_ms for group in found.groups)
    assert on_rank == pytest.approx(found.rank_ms[found.rank])
    other = one.explain(np.int64(1), options)
    assert other.waiting_ms == pytest.approx(found.rank_ms[0] - other.rank_ms[1])
    assert json.loads(json.dumps(other.to_dict()))["rank"] == 1 and other.headline == found.headline


def test_splitting_the_table_that_is_the_bottleneck_gains() -> None:
    whole = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(8)}
    split = whole | {"t2": ParameterConstraints(sharding_types=["table_wise", "column_wise"], min_partition=256)}
    one = planner(hot=900.0, constraints=split, topology=TWO_GPUS)
    one.plan(model(512), SHARDERS)
    theirs = planner(hot=900.0, constraints=whole, topology=TWO_GPUS)
    plan = theirs.plan(model(512), SHARDERS)
    found = one.explain(plan=plan)
    assert found.headline.startswith("Bottleneck: table 't2' (table_wise)") and found.tables[0].table == "t2"
    best = found.tables[0].split
    assert best.how.startswith("column_wise on ranks 0-1") and best.gain_ms > 0
    assert found.total_ms - best.gain_ms >= one.report().chosen.total_ms * (1 - 1e-5)
    assert theirs.explain().tables[0].split is None and "split further: not possible" in str(theirs.explain())


def test_collectives_come_first_where_they_dominate_and_assumptions_are_told() -> None:
    one = planner(statistics=None, topology=Topology(4, "cuda", local_world_size=1, inter_host_bw=1e3))
    one.plan(model(), SHARDERS)
    found = one.explain()
    assert found.headline == one.report().verdict and found.headline.startswith("Bottleneck: collectives, ")
    assumed = [note.text for note in one.report().notes if note.code == "assumption"]
    assert sorted(found.assumptions) == sorted(assumed) != [] and assumed[0] in str(found)


def test_plans_are_explained_without_planning() -> None:
    one, other = planner(), planner()
    plan = one.plan(model(), SHARDERS)
    other.read(model(), SHARDERS)
    assert other.explain(plan=plan) == one.explain(plan=plan)
    assert other.predict(plan).total_ms == one.predict(plan).total_ms
    assert other.lookups_per_sample() == one.lookups_per_sample() != {}
    with pytest.raises(DreamShardError, match="the last module was read, and not planned"):
        other.report()


def test_a_change_that_gains_nothing_and_ranks_and_plans_that_there_are_not() -> None:
    one = planner(topology=TWO_GPUS)
    with pytest.raises(DreamShardError, match="plan first"):
        one.explain()
    one.plan(collection(table("t2", 5000, 32)), SHARDERS)
    found = one.explain()
    assert found.tables[0].moved.gain_ms == pytest.approx(0) and "moved: no gain" in str(found)
    for rank in (2, -1, 0.5, 1.0, True, "1"):
        with pytest.raises(PlannerError, match=f"there is no rank {rank!r}: the plan has ranks 0 to 1"):
            one.explain(rank)
