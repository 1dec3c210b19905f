# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes of reports on the options that exact training excludes."""

import pytest
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.planning import exact_training
from dreamshard_planner.plans.report import Report
from tests.small_models import MB, SHARDERS, collection, planner, table


def report_on(memory_mb: int, **arguments) -> Report:
    """On three tables of 61 MB on two GPUs. They are mean-pooled, hence in no blocks of rows."""
    tables = (table(f"t{i}", 125_000, 128, pooling=PoolingType.MEAN) for i in range(3))
    model = collection(*tables, optimizer=RowWiseAdagrad)
    made = planner(
        topology=Topology(2, "cuda", hbm_cap=memory_mb * MB, ddr_cap=2**36),
        batch_size=1024,
        constraints={f"t{i}": ParameterConstraints(min_partition=64, pooling_factors=[50.0]) for i in range(3)},
        storage_reservation=FixedPercentageStorageReservation(0.0),
        effort="default",
        **arguments,
    )
    made.plan(model, SHARDERS)
    return made.report()


def test_tables_that_exact_training_keeps_out_of_device_memory_come_first() -> None:
    report = report_on(110)
    assert [entry.kernel for entry in report.tables if entry.kernel != "fused"]
    first, second = str(report).splitlines()[:2]
    (note,) = [note for note in report.notes if note.code == "forced_out"]
    assert first == f"{note}." and second.startswith("Predicted: ")
    free = report_on(110, exact_training=False)
    assert all(entry.kernel == "fused" for entry in free.tables)
    assert 0 < note.figures["lost_ms"] <= report.chosen.total_ms - free.chosen.total_ms + 1e-3
    lost = f"{note.figures['lost_ms']:.3f} of {report.chosen.total_ms:.3f} ms"
    assert first.startswith(f"Exact training keeps 1 table(s) out of device memory, which is predicted to cost {lost}")


@pytest.mark.parametrize("arguments", [{"memory_mb": 200}, {"memory_mb": 110, "exact_training": False}])
def test_nothing_is_said_of_tables_that_exact_training_does_not_move(arguments) -> None:
    report = report_on(**arguments)
    assert not [note for note in report.notes if note.code == "forced_out"]
    assert str(report).startswith("Predicted: ")


@pytest.mark.parametrize("cost_source", ["auto", "torchrec"])
def test_torchrecs_plan_over_all_options_is_predicted(cost_source: str) -> None:
    """TorchRec replicates small tables in half precision, which trains them otherwise."""
    small = (table(f"t{i}", 200, 64, data_type=DataType.FP16) for i in range(8))
    model = collection(*small, table("large", 10_000_000, 64), optimizer=RowWiseAdagrad)
    gpus = Topology(16, "cuda", local_world_size=8)
    given = {"topology": gpus, "batch_size": 512, "debug": False, "stats": []}
    given["storage_reservation"] = FixedPercentageStorageReservation(0.1)
    made = DreamShardPlanner(cost_source=cost_source, **given)
    made.plan(model, SHARDERS)
    (note,) = [note for note in made.report().notes if note.code == "beyond_exact_training"]
    theirs = EmbeddingShardingPlanner(**given).plan(model, SHARDERS)
    kinds = {sharding.sharding_type for sharding in theirs.plan[""].values()}
    assert "data_parallel" in kinds and "data_parallel for 9 table(s)" in note.text
    assert note.figures["torchrec_ms"] == pytest.approx(made.predict(theirs).total_ms, rel=1e-6)
    assert note.figures["exact_ms"] == pytest.approx(made.report().chosen.total_ms, rel=1e-6)
    assert f"predicted at {note.figures['torchrec_ms']:.3f} ms" in str(made.report())


def test_large_models_have_no_prediction_of_torchrecs_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_training, "MAX_SHARDS", 1)
    made = planner(topology=Topology(2, "cuda"))
    made.plan(collection(table("a", 200, 64), table("b", 300, 64), optimizer=RowWiseAdagrad), SHARDERS)
    (note,) = [note for note in made.report().notes if note.code == "beyond_exact_training"]
    assert "exact training leaves out" in note.text and "TorchRec's plan" not in note.text and not note.figures
