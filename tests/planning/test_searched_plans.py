# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Searches, and what they tell: effort bounds them, and no clock does; TorchRec's plan is kept if little is gained over
it, and predicted if exact training excludes it; and why a rank is slow."""

import copy
import itertools
import json
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import small_models
from small_models import MB, SHARDERS, collection, table, topology
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import SGD, RowWiseAdagrad

from dreamshard_planner import DreamShardError, DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.plans.report import Report
from dreamshard_planner.search.effort import EFFORTS

SIZES = ((900, 64), (50_000, 16), (7_000, 128), (30_000, 32), (400, 16), (100_000, 64), (12_000, 8), (2_000, 32))


def model(*sizes: tuple[int, int]) -> nn.Module:
    return collection(*(table(f"t{index}", *size) for index, size in enumerate(sizes)), optimizer=SGD)


def ranks(plan: Any) -> dict[str, Any]:
    return {name: (sharding.sharding_type, sharding.ranks) for name, sharding in plan.plan[""].items()}


def saved_ranks(made: DreamShardPlanner) -> dict[str, Any]:
    return {name: (one.sharding_type, [shard.rank for shard in one.shards]) for name, one in made.saved_plan().tables()}


GIVEN = {"topology": Topology(2, "cpu", ddr_cap=2**35), "batch_size": 256, "stats": [], "debug": False}


def planned(sizes: Any = SIZES, **settings: Any) -> tuple[DreamShardPlanner, dict[str, Any]]:
    made = DreamShardPlanner(**GIVEN, effort="quick", **settings)
    return made, ranks(made.plan(model(*sizes), SHARDERS))


def test_a_plan_by_guessed_lookups_has_to_gain() -> None:
    searched, others = planned(least_gain=0.0)
    kept, plan = planned()
    theirs = EmbeddingShardingPlanner(**GIVEN).plan(model(*SIZES), SHARDERS)
    assert plan == ranks(theirs) != others
    gain = 1 - searched.report().chosen.total_ms / kept.report().chosen.total_ms
    assert 0 <= gain < 0.03
    rivals = {rival.name: rival.total_ms for rival in kept.report().rivals}
    assert rivals["searched"] == pytest.approx(searched.report().chosen.total_ms)
    assert rivals["torchrec"] == pytest.approx(kept.report().chosen.total_ms)
    notes = [str(note) for note in kept.report().notes if "least_gain" in str(note)]
    assert len(notes) == 1 and f"{100 * gain:.2f} %" in notes[0] and "statistics" in notes[0]
    assert not any("least_gain" in str(note) for note in searched.report().notes)
    assert all(searched.report().chosen.total_ms <= total_ms * (1 + 1e-6) for total_ms in rivals.values())
    assert saved_ranks(kept) == plan


@pytest.mark.parametrize(
    "told",
    [
        {"statistics": TableStatistics({"t3_f0": FeatureStatistics(4.0)})},
        {"constraints": {"t3": ParameterConstraints(pooling_factors=[4.0])}},
        {"cost_source": "torchrec"},
    ],
)
def test_costs_decide_where_more_is_known(told: dict[str, Any]) -> None:
    made, _ = planned(**told)
    report = made.report()
    assert report.chosen.total_ms <= min(rival.total_ms for rival in report.rivals) * (1 + 1e-6)
    assert not any("least_gain" in str(note) for note in report.notes)


def test_what_gains_more_is_taken() -> None:
    made, plan = planned([(300, 16)] * 6, optimizers_attached=True)
    rivals = {rival.name: rival.total_ms for rival in made.report().rivals}
    assert made.report().chosen.total_ms < 0.97 * rivals["torchrec"]
    assert {kind for kind, _ in plan.values()} == {"data_parallel"}
    kept, plan = planned([(300, 16)] * 6, optimizers_attached=True, least_gain=0.99)
    assert {kind for kind, _ in plan.values()} == {"table_wise"}
    assert kept.report().chosen.total_ms == pytest.approx(rivals["torchrec"])


def test_estimates_of_a_kept_plan_are_by_our_costs() -> None:
    """TorchRec's statistics print them, and callbacks read them."""
    sizes = [(2_000_000, 64), (5_000_000, 128), (100_000, 32), (3_000, 64), (700_000, 64), (9_000_000, 32)]

    def made(**settings: Any) -> DreamShardPlanner:
        topology, left = Topology(8, "cuda", local_world_size=4), FixedPercentageStorageReservation(0.0)
        given = {"topology": topology, "batch_size": 256, "storage_reservation": left}
        return small_models.planned(model(*sizes), SHARDERS, **given, **settings)

    kept = made(least_gain=0.9)
    assert any("least_gain" in str(note) for note in kept.report().notes)
    alike = {one.name: ParameterConstraints(sharding_types=[one.sharding_type]) for one in kept.options}
    searched = {one.name: one.total_perf for one in made(least_gain=0.0, constraints=alike).options}
    assert {one.name: one.total_perf for one in kept.options} == pytest.approx(searched)


def report_on(memory_mb: int, **arguments) -> Report:
    """On three tables of 61 MB on two GPUs. They are mean-pooled, hence in no blocks of rows."""
    tables = (table(f"t{i}", 125_000, 128, pooling=PoolingType.MEAN) for i in range(3))
    model = collection(*tables, optimizer=RowWiseAdagrad)
    gpus, left = Topology(2, "cuda", hbm_cap=memory_mb * MB, ddr_cap=2**36), FixedPercentageStorageReservation(0.0)
    read = {f"t{i}": ParameterConstraints(min_partition=64, pooling_factors=[50.0]) for i in range(3)}
    given = {"topology": gpus, "batch_size": 1024, "constraints": read, "storage_reservation": left}
    return small_models.planned(model, **given, **arguments).report()


def test_tables_that_exact_training_keeps_out_of_device_memory_come_first() -> None:
    report = report_on(110)
    assert [entry.kernel for entry in report.tables if entry.kernel != "fused"]
    first, second = str(report).splitlines()[:2]
    (note,) = [note for note in report.notes if note.code == "forced_out"]
    assert first == f"{note}." and second.startswith("Predicted: ")
    free = report_on(110, exact_training=False)
    assert all(entry.kernel == "fused" for entry in free.tables)
    for untouched in (free, report_on(200)):
        assert not [note for note in untouched.notes if note.code == "forced_out"]
        assert str(untouched).startswith("Predicted: ")
    assert 0 < note.figures["lost_ms"] <= report.chosen.total_ms - free.chosen.total_ms + 1e-3
    lost = f"{note.figures['lost_ms']:.3f} of {report.chosen.total_ms:.3f} ms"
    assert first.startswith(f"Exact training keeps 1 table(s) out of device memory, which is predicted to cost {lost}")


def test_torchrecs_plan_over_all_options_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec replicates small tables in half precision, which trains them otherwise."""
    monkeypatch.setitem(EFFORTS, "default", EFFORTS["quick"])
    small = (table(f"t{i}", 200, 64, data_type=DataType.FP16) for i in range(8))
    model = collection(*small, table("large", 10_000_000, 64), optimizer=RowWiseAdagrad)
    gpus = Topology(16, "cuda", local_world_size=8)
    given = {"topology": gpus, "batch_size": 512, "debug": False, "stats": []}
    given["storage_reservation"] = FixedPercentageStorageReservation(0.1)
    made = DreamShardPlanner(**given)
    made.plan(model, SHARDERS)
    (note,) = [note for note in made.report().notes if note.code == "beyond_exact_training"]
    theirs = EmbeddingShardingPlanner(**given).plan(model, SHARDERS)
    kinds = {sharding.sharding_type for sharding in theirs.plan[""].values()}
    assert "data_parallel" in kinds and "data_parallel for 9 table(s)" in note.text
    assert note.figures["torchrec_ms"] == pytest.approx(made.predict(theirs).total_ms, rel=1e-6)
    assert note.figures["exact_ms"] == pytest.approx(made.report().chosen.total_ms, rel=1e-6)
    assert f"predicted at {note.figures['torchrec_ms']:.3f} ms" in str(made.report())


def test_quick_plans_have_no_prediction_of_torchrecs() -> None:
    model, gpus = collection(table("a", 200, 64), table("b", 300, 64), optimizer=RowWiseAdagrad), Topology(2, "cuda")
    made = small_models.planned(model, topology=gpus)
    (note,) = [note for note in made.report().notes if note.code == "beyond_exact_training"]
    assert "exact training leaves out" in note.text and "TorchRec's plan" not in note.text and not note.figures


def by(effort: str) -> DreamShardPlanner:
    read = {f"t{i}_f0": FeatureStatistics(factor) for i, factor in enumerate((40.0, 25.0, 9.0, 4.0, 2.0))}
    given = {"topology": topology(3), "statistics": TableStatistics(read), "cost_source": "roofline"}
    return small_models.planned(model(*((2000 * (i + 1), 64) for i in range(5))), effort=effort, **given)


usual = cache(by)


@pytest.mark.parametrize("effort", ["quick", "default"])
def test_the_clock_decides_no_plan(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where each look at a clock finds another hour gone."""
    before, hours = usual(effort), itertools.count(step=3600)
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    slow = by(effort)
    assert saved_ranks(slow) == saved_ranks(before) and slow.report().candidates == before.report().candidates
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


TWO_GPUS = topology(device="cuda")
"""Whose exchanges cost little beside kernels, whatever checkpoint there is."""


def planner(hot: float = 5.0, **changes) -> DreamShardPlanner:
    statistics = TableStatistics({f"t{i}_f0": FeatureStatistics(hot if i == 2 else 5.0) for i in range(8)})
    return small_models.planner(**({"batch_size": 512, "statistics": statistics} | changes))


def eight_tables(dim: int = 32) -> nn.Module:
    """Tables of which the third may be hot, and of another width."""
    return collection(*(table(f"t{i}", 5000 + i, dim if i == 2 else 32) for i in range(8)))


def test_gains_are_those_of_the_plans_that_the_changes_make() -> None:
    given = {"hot": 120.0, "topology": TWO_GPUS, "batch_size": 4096}
    one, whole = planner(**given, exact_training=False), planner(**given, sharding_types=("table_wise",))
    for each in (one, whole):
        each.plan(eight_tables(), SHARDERS)
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
    one.plan(eight_tables(512), SHARDERS)
    theirs = planner(hot=900.0, constraints=whole, topology=TWO_GPUS)
    plan = theirs.plan(eight_tables(512), SHARDERS)
    found = one.explain(plan=plan)
    assert found.headline.startswith("Bottleneck: table 't2' (table_wise)") and found.tables[0].table == "t2"
    best = found.tables[0].split
    assert best.how.startswith("column_wise on ranks 0-1") and best.gain_ms > 0
    assert found.total_ms - best.gain_ms >= one.report().chosen.total_ms * (1 - 1e-5)
    assert theirs.explain().tables[0].split is None and "split further: not possible" in str(theirs.explain())


def test_collectives_come_first_where_they_dominate_and_assumptions_are_told() -> None:
    one = planner(statistics=None, topology=Topology(4, "cuda", local_world_size=1, inter_host_bw=1e3))
    one.plan(eight_tables(), SHARDERS)
    found = one.explain()
    assert found.headline == one.report().verdict and found.headline.startswith("Bottleneck: collectives, ")
    assumed = [note.text for note in one.report().notes if note.code == "assumption"]
    assert sorted(found.assumptions) == sorted(assumed) != [] and assumed[0] in str(found)


def test_plans_are_explained_without_planning() -> None:
    one, other = planner(), planner()
    plan = one.plan(eight_tables(), SHARDERS)
    other.read(eight_tables(), SHARDERS)
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
