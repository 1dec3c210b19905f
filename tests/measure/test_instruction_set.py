# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""FBGEMM's instruction set: found, recorded, restored, and never measured without."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dreamshard_planner import Checkpoint, DreamShardError
from dreamshard_planner.checkpoints.choice import SHIPPED, checkpoint_notes
from dreamshard_planner.cli import diagnosis
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.devices import Machine
from dreamshard_planner.environment import torch_library
from dreamshard_planner.errors import DatasetError
from dreamshard_planner.measure import hardware
from dreamshard_planner.measure.collect import REFERENCE_SETS, collect
from dreamshard_planner.measure.hardware import REFERENCE, check_kernels, describe_hardware, instruction_set
from dreamshard_planner.measure.kernels import FusedKernel
from dreamshard_planner.measure.timing import time_groups


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that FBGEMM found no instruction set in this process."""
    monkeypatch.setattr(hardware, "instruction_set", lambda: REFERENCE)


def test_commands_and_preloading_give_every_torch_the_fast_kernels() -> None:
    """Commands load the library first, as these tests do; the linker preloads it for a Python that does not."""
    code = "import torch; from dreamshard_planner.measure.hardware import instruction_set; print(instruction_set())"
    environment = {**os.environ, "LD_PRELOAD": str(torch_library("libc10.so"))}
    preloaded = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert instruction_set() == preloaded.stdout.strip() == describe_hardware("cpu", 1).get("instruction_set", "")
    assert instruction_set() != REFERENCE


def test_doctor_asks_a_python_that_ignores_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libtorch.so").write_bytes(b"cpuinfo_initialize")
    (tmp_path / "platform.py").write_text("raise RuntimeError")
    monkeypatch.setattr(diagnosis, "torch_library", lambda name: tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert diagnosis._cpu_kernels().subject == "FBGEMM on CPU"


def test_reference_kernels_are_not_measured(reference: None, tmp_path: Path) -> None:
    with pytest.raises(DreamShardError, match="slow reference kernels.*LD_PRELOAD=.*libc10.so"):
        collect([REFERENCE_SETS["cpu"]], tmp_path / "sets.journal", repeats=1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(DreamShardError, match="nothing was measured"):
        time_groups([FusedKernel(REFERENCE_SETS["cpu"], "cpu", 0)], 1)
    check_kernels("cuda")


def test_plans_for_cpus_tell_of_reference_kernels_and_other_releases(
    reference: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.load(SHIPPED / "cpu.safetensors")
    cpu, cuda = (Machine(ranks_per_host=1, device=device).topology() for device in ("cpu", "cuda"))
    assert "slow reference kernels" in checkpoint_notes(checkpoint, cpu, uses_network=False)[0]
    assert checkpoint_notes(checkpoint, cuda, uses_network=False) == ()
    monkeypatch.setattr(hardware, "instruction_set", lambda: "avx2")
    here = describe_hardware("cpu", 1)
    assert here["instruction_set"] == "avx2"

    def notes(**measured: str | int) -> list[str]:
        made = replace(checkpoint, metadata={**checkpoint.metadata, "hardware": {**here, **measured}})
        return [note for note in checkpoint_notes(made, cpu) if note.startswith("costs were measured with")]

    assert notes() == []
    (note,) = notes(torch="2.1.0", instruction_set="avx512")
    assert note == (
        "costs were measured with torch 2.1.0, instruction set avx512; "
        f"this environment has torch {here['torch']}, instruction set avx2"
    )
    del here["instruction_set"]  # as in older files
    assert notes() == []


def test_files_of_different_instruction_sets_are_kept_apart_and_older_files_go_with_any() -> None:
    here = {**describe_hardware("cpu", 1), "instruction_set": "avx2"}
    old = {name: value for name, value in here.items() if name != "instruction_set"}
    sets = [REFERENCE_SETS["cpu"]]
    of = [
        CostDataset.from_sets(sets, [[[1.0, 2.0]]], one) for one in (here, old, {**here, "instruction_set": "avx512"})
    ]
    assert len(CostDataset.concatenate(of[:2])) == 2
    with pytest.raises(DatasetError, match="avx512"):
        CostDataset.concatenate([of[0], of[2]])
