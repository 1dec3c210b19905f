# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Why a rank is slow: the figures are those of whole plans, and the words are right."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from small_models import SHARDERS, collection, table, topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner import DreamShardError, DreamShardPlanner, FeatureStatistics, SavedPlan, TableStatistics
from dreamshard_planner.workload.sketch import IdSketch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TWO_GPUS = topology(device="cuda")
"""Whose exchanges cost little beside kernels, whatever checkpoint there is."""


def planner(hot: float = 5.0, **changes) -> DreamShardPlanner:
    statistics = TableStatistics({f"t{i}_f0": FeatureStatistics(hot if i == 2 else 5.0) for i in range(8)})
    arguments = {"topology": topology(), "batch_size": 512, "statistics": statistics, "effort": "quick"}
    return DreamShardPlanner(stats=[], debug=False, **(arguments | changes))


def model(hot_dim: int = 32):
    return collection(*(table(f"t{i}", 5000 + i, hot_dim if i == 2 else 32) for i in range(8)))


def test_gains_are_those_of_the_plans_that_the_changes_make() -> None:
    one = planner(hot=20.0, exact_training=False)
    one.plan(model(), SHARDERS)
    found = one.explain()
    now_ms = one.report().chosen.total_ms
    assert found.rank == max(range(2), key=lambda rank: found.rank_ms[rank]) and found.total_ms == pytest.approx(now_ms)
    assert found.tables
    for entry in found.tables:
        options = copy.deepcopy(one.options)
        option = next(option for option in options if option.name == entry.table)
        if entry.leaving is None or option.sharding_type != "table_wise":
            continue
        option.shards[0].rank = 1 - found.rank
        moved_ms = one.predict(options).total_ms
        assert entry.leaving.total_ms == pytest.approx(moved_ms, rel=1e-6)
        assert entry.leaving.gain_ms == pytest.approx(now_ms - moved_ms, abs=1e-6)
        assert entry.leaving.how == f"table_wise on rank {1 - found.rank}"
        assert 0 < entry.marginal_ms <= found.rank_ms[found.rank] and entry.bytes == option.shards[0].storage.ddr
    on_rank = sum(group.forward_ms + group.backward_ms for group in found.groups)
    assert on_rank == pytest.approx(found.rank_ms[found.rank])
    assert json.loads(json.dumps(found.to_dict()))["rank"] == found.rank


def test_one_table_that_is_the_bottleneck_is_named_first_and_splitting_it_gains() -> None:
    whole = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(8)}
    split = whole | {"t2": ParameterConstraints(sharding_types=["table_wise", "column_wise"], min_partition=256)}
    one = planner(hot=900.0, constraints=split, topology=TWO_GPUS)
    one.plan(model(512), SHARDERS)
    theirs = planner(hot=900.0, constraints=whole, topology=TWO_GPUS)
    plan = theirs.plan(model(512), SHARDERS)
    found = one.explain(plan=plan)
    assert found.bottleneck == "t2" and found.tables[0].table == "t2"
    assert str(found).startswith("One table is the bottleneck: table 't2' takes ")
    best = found.tables[0].splitting
    assert best is not None and best.how.startswith("column_wise on ranks 0-1") and best.gain_ms > 0
    assert best.total_ms >= one.report().chosen.total_ms * (1 - 1e-5)
    assert f"Sharding it {best.how} would gain {best.gain_ms:.3f} ms." in found.headline
    other = one.explain(1 - found.rank, plan)
    assert other.headline.startswith(f"Rank {1 - found.rank} is not the slowest") and other.bottleneck is None
    assert other.waiting_ms == pytest.approx(found.rank_ms[found.rank] - other.rank_ms[other.rank])


def test_what_exact_training_leaves_out_is_named_where_it_would_split_the_bottleneck() -> None:
    module = model(512)
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    types = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(8)}
    one = planner(hot=900.0, topology=TWO_GPUS, sharding_types=("table_wise", "column_wise"))
    one.plan(module, SHARDERS)
    found = one.explain()
    assert found.bottleneck == "t2"
    assert "It is not split further: exact_training=False would allow column_wise." in found.headline
    fixed = planner(hot=900.0, topology=TWO_GPUS, constraints=types)
    fixed.plan(module, SHARDERS)
    told = str(fixed.explain())
    assert "exact_training=False" not in told
    left_out = "column_wise, row_wise, table_row_wise: its constraint's sharding_types leave it out"
    assert f"split further: not possible, {left_out}" in told


def test_collectives_come_first_where_they_dominate_and_assumptions_are_told() -> None:
    one = planner(statistics=None, topology=Topology(4, "cuda", local_world_size=1, inter_host_bw=1e3))
    one.plan(model(), SHARDERS)
    found = one.explain()
    assert found.headline.startswith(one.report().verdict) and found.headline.startswith("Bottleneck: collectives, ")
    assumed = [note.text for note in one.report().notes if note.code == "assumption"]
    assert list(found.assumptions) == assumed != [] and assumed[0] in str(found)


def test_plans_are_explained_without_planning() -> None:
    one, other = planner(), planner()
    plan = one.plan(model(), SHARDERS)
    other.read(model(), SHARDERS)
    assert other.explain(plan=plan) == one.explain(plan=plan)
    assert other.predict(plan).total_ms == one.predict(plan).total_ms
    assert other.lookups_per_sample() == one.lookups_per_sample() != {}
    with pytest.raises(DreamShardError, match="the last module was read, and not planned"):
        other.report()


def test_no_bottleneck_where_tables_are_alike_and_memory_is_told() -> None:
    one = planner()
    one.plan(model(), SHARDERS)
    found = one.explain(0)
    assert found.bottleneck is None
    (memory,) = found.memory
    assert (memory.kind, memory.limit + memory.reserved) == ("DDR", 2**34) and 0 < memory.used < memory.limit
    assert memory.used == one.report().memory[0].used_bytes[0]


def test_caching_is_rated_where_it_is_allowed() -> None:
    kernels = {f"t{i}": ParameterConstraints(compute_kernels=["fused", "fused_uvm_caching"]) for i in range(8)}
    one = planner(hot=300.0, topology=Topology(2, "cuda"), constraints=kernels, sharding_types=("table_wise",))
    one.plan(model(), SHARDERS)
    cached = one.explain().tables[0].caching
    assert cached is not None and cached.how.startswith("table_wise fused_uvm_caching on rank ")


def test_ranks_and_plans_that_there_are_not() -> None:
    one = planner()
    with pytest.raises(DreamShardError, match="plan first"):
        one.explain()
    one.plan(model(), SHARDERS)
    for rank in (2, -1, 0.5, 1.0, True, "1"):
        with pytest.raises(PlannerError, match=f"there is no rank {rank!r}: the plan has ranks 0 to 1"):
            one.explain(rank)


@pytest.mark.parametrize(
    ("optimizer", "types", "remedy"),
    [
        (torch.optim.Adagrad, ["table_wise", "column_wise"], "min_partition=32) would gain"),
        (RowWiseAdagrad, ["table_wise"], "column_wise: its constraint's sharding_types leave it out. A smaller table"),
    ],
)
def test_the_headline_says_what_would_split_the_table_or_why_nothing_does(optimizer, types, remedy: str) -> None:
    tables = [table("hot", 100_000, 128), *(table(f"t{i}", 10_000, 32) for i in range(4))]
    module = collection(*tables)
    apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})
    pooling = {config.feature_names[0]: FeatureStatistics(300.0 if config.name == "hot" else 2.0) for config in tables}
    constraints = {"hot": ParameterConstraints(sharding_types=types)}
    arguments = {"topology": topology(4), "statistics": TableStatistics(pooling), "constraints": constraints}
    one = planner(**arguments)
    one.plan(module, SHARDERS)
    found = one.explain()
    assert found.bottleneck == "hot" and remedy in found.headline
    if "min_partition=16" in remedy:
        gain_ms = max(entry.splitting.gain_ms for entry in found.tables if entry.table == "hot")
        narrow = {"hot": ParameterConstraints(sharding_types=["column_wise"], min_partition=16)}
        other = planner(**(arguments | {"constraints": narrow}))
        other.plan(module, SHARDERS)
        assert other.report().chosen.total_ms <= found.total_ms - gain_ms + 1e-6


def test_why_a_table_stays_whole_counts_no_replicas_as_its_parts_and_level_ranks_are_told_as_such() -> None:
    module = model()
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    types = ("table_wise", "column_wise", "data_parallel")
    one = planner(batch_size=4096, topology=TWO_GPUS, sharding_types=types)
    one.plan(module, SHARDERS)
    found = one.explain(1)
    assert all("exact_training=False" in entry.why_whole for entry in found.tables), found
    assert found.headline.startswith(f"{one.report().verdict}. ") and "Bottleneck: compute" in found.headline


def hot_block(**changes) -> DreamShardPlanner:
    """All lookups of one table are of its first rows."""
    pooling = {f"t{i}_f0": FeatureStatistics(5.0) for i in range(4)}
    hot = FeatureStatistics(200.0, ids=IdSketch.even(8_000), batch_size=512)
    given = {"topology": topology(4, device="cuda"), "statistics": TableStatistics({**pooling, "hot_f0": hot})}
    return planner(**(given | changes))


def test_a_table_of_which_one_block_is_read_is_the_bottleneck_in_reports_as_well(tmp_path: Path) -> None:
    module = collection(table("hot", 400_000, 128), *(table(f"t{i}", 5000, 32) for i in range(4)))
    one = hot_block(constraints={"hot": ParameterConstraints(sharding_types=["row_wise"])})
    plan = one.plan(module, SHARDERS)
    report, found = one.report(), one.explain()
    (entry,) = [entry for entry in report.tables if entry.name == "hot"]
    assert entry.on_rank_ms(found.rank) == entry.most_ms > 2 * entry.alone_ms / 4
    assert found.bottleneck == "hot" and report.verdict.startswith("Bottleneck: table 'hot' (row_wise), ")
    assert "shuffled ids would spread" in found.headline
    one.save_plan(tmp_path / "plan.json")
    assert SavedPlan.load(tmp_path / "plan.json").report().verdict == report.verdict
    types = ["row_wise", "column_wise"]
    either = hot_block(constraints={"hot": ParameterConstraints(sharding_types=types, min_partition=32)})
    either.read(module, SHARDERS)
    best = either.explain(plan=plan).tables[0].splitting
    assert best.how == "column_wise on ranks 0-3"  # as many parts, each of which is read by all


def test_what_another_table_would_gain_is_told_beside_the_bottleneck() -> None:
    whole = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(8)}
    one = planner(hot=120.0, constraints=whole, topology=TWO_GPUS, batch_size=4096)
    one.plan(model(), SHARDERS)
    options = copy.deepcopy(one.options)
    for option in options:
        option.shards[0].rank = 0 if option.name in ("t2", "t3") else 1
    found = one.explain(plan=options)
    leaving = next(entry.leaving for entry in found.tables if entry.table == "t3")
    assert found.bottleneck == "t2" and leaving.gain_ms > 0
    assert found.headline.endswith(f"Of table 't3', {leaving.how} would gain {leaving.gain_ms:.3f} ms.")
