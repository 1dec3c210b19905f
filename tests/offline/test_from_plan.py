# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Jobs read back from plan files: as large, as dear and as full as when the plan was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from dreamshard_planner import SavedPlan, TaskError
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline.from_plan import check_statistics, job_of
from dreamshard_planner.offline.jobs import Job, OfflineModel
from dreamshard_planner.offline.table_list import OPTIMIZERS, TableSpec
from dreamshard_planner.workload.tables import FeatureStatistics

GB = 10**9
MACHINES = {
    "gpu": Machine(ranks_per_host=2, gpu="h100"),
    "less memory": Machine(ranks_per_host=2, gpu="h100", memory_bytes=40 * GB),
    "cpu": Machine(ranks_per_host=2, device="cpu", memory_bytes=8 * GB),
}


def spec(name: str, optimizer: str = "sgd", features: dict[str, float | None] | None = None) -> TableSpec:
    told = {
        feature: None if factor is None else FeatureStatistics(factor)
        for feature, factor in (features or {name: 20.0}).items()
    }
    return TableSpec(name=name, num_embeddings=500_000, embedding_dim=32, features=told, optimizer=optimizer)


def made(specs: list[TableSpec], machine: str, path: Path, **given) -> tuple[SavedPlan, SavedPlan]:
    """A plan, and the same as the job of its file rates it."""
    settings = {"search_seconds": 0.3}
    job = Job(model=OfflineModel.of_specs(specs), machine=MACHINES[machine], batch_size=256, settings=settings, **given)
    job.plan().planner.save_plan(path)
    saved = SavedPlan.load(path)
    again = job_of(saved)
    assert check_statistics(saved, again, given=False) is None
    return saved, again.read().saved_plan(saved)


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_and_cost_are_the_plans(machine: str, tmp_path: Path) -> None:
    specs = [spec(name, name) for name in OPTIMIZERS]
    saved, again = made(specs, machine, tmp_path / "plan.json", reserve=0.3)
    assert again.predicted.memory == saved.predicted.memory
    assert again.predicted.total_ms == pytest.approx(saved.predicted.total_ms, rel=1e-6)
    own = "DDR" if machine == "cpu" else "HBM"
    (limits,) = [entry.limit_bytes for entry in saved.predicted.memory if entry.kind == own]
    assert limits == tuple(round(0.7 * size) for size in saved.inputs.topology.memory_bytes[own])


def test_tables_of_which_nobody_told_lookups_are_read_back(tmp_path: Path) -> None:
    saved, again = made([spec("a", features={"a": None})], "gpu", tmp_path / "plan.json")
    assert saved.inputs.statistics is None and again.predicted.total_ms == pytest.approx(saved.predicted.total_ms)


def test_a_shared_feature_has_one_number_of_lookups() -> None:
    one, other = spec("a", features={"f": 40.0}), spec("b", features={"f": 1.0})
    with pytest.raises(TaskError, match=r"list\.json: tables 'a' and 'b' .* feature 'f' .*40 and 1"):
        OfflineModel.of_specs([one, other], "list.json")
    assert OfflineModel.of_specs([one, spec("b", features={"f": None})]).statistics["f"].pooling_factor == 40


@pytest.mark.parametrize("name", ["a.b", "keys", "training"])
def test_names_that_no_module_has_are_refused(name: str) -> None:
    with pytest.raises(TaskError, match=name):
        spec(name)
