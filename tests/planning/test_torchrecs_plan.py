# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's plan beside ours: kept if little is gained over it, and predicted if exact training excludes it."""

from typing import Any

import pytest
import small_models
from small_models import MB, SHARDERS, collection, table
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import SGD, RowWiseAdagrad

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.plans.report import Report
from dreamshard_planner.search.effort import EFFORTS

SIZES = ((900, 64), (50_000, 16), (7_000, 128), (30_000, 32), (400, 16), (100_000, 64), (12_000, 8), (2_000, 32))


def model(*sizes: tuple[int, int]) -> Any:
    return collection(*(table(f"t{index}", *size) for index, size in enumerate(sizes)), optimizer=SGD)


def ranks(plan: Any) -> dict[str, Any]:
    return {name: (sharding.sharding_type, sharding.ranks) for name, sharding in plan.plan[""].items()}


GIVEN = {"topology": Topology(2, "cpu", ddr_cap=2**35), "batch_size": 256, "stats": [], "debug": False}


def planned(sizes: Any = SIZES, **settings: Any) -> tuple[DreamShardPlanner, dict[str, Any]]:
    made = DreamShardPlanner(**GIVEN, effort="quick", **settings)
    return made, ranks(made.plan(model(*sizes), get_default_sharders()))


def test_a_plan_by_guessed_lookups_has_to_gain() -> None:
    searched, others = planned(least_gain=0.0)
    kept, plan = planned()
    theirs = EmbeddingShardingPlanner(**GIVEN).plan(model(*SIZES), get_default_sharders())
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
    assert {name: (sharding.sharding_type, [shard.rank for shard in sharding.shards])
            for name, sharding in kept.saved_plan().tables()} == plan  # fmt: skip


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
        return small_models.planned(model(*sizes), get_default_sharders(), **given, **settings)

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
