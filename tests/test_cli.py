# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ``dreamshard`` command, run as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dreamshard_planner.checkpoint import SHIPPED, Checkpoint


def dreamshard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from dreamshard_planner.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_info_prints_json() -> None:
    result = dreamshard("info", str(SHIPPED / "cpu.safetensors"))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["hardware"]["device"] == "cpu"


def test_errors_are_one_line_and_a_status(tmp_path: Path) -> None:
    result = dreamshard("info", str(tmp_path / "gone.safetensors"))
    assert result.returncode == 1
    assert result.stdout == "" and "gone.safetensors: no such checkpoint" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A tiny training from nothing on real kernels."""
    out = tmp_path_factory.mktemp("trained") / "tiny.safetensors"
    result = dreamshard("train", "--out", str(out), "--seconds", "8", "--quick")
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) >= {"network_mape", "linear_mape", "policy_over_rule"}
    return out


def test_train_makes_a_checkpoint_from_nothing(trained: Path) -> None:
    checkpoint = Checkpoint.load(trained)
    assert checkpoint.metadata["dataset"]["sets"] >= 8
    assert checkpoint.metadata["hardware"]["torch"]


def test_fit_makes_a_checkpoint_from_measured_sets(trained: Path, tmp_path: Path) -> None:
    for recipe in ("default", "paper", "autoshard"):
        out = tmp_path / f"{recipe}.safetensors"
        result = dreamshard(
            "fit", "--dataset", str(trained.with_suffix(".dataset.npz")), "--test-dataset",
            str(trained.with_suffix(".test.npz")), "--out", str(out), "--recipe", recipe, "--quick",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert Checkpoint.load(out).recipe == recipe


def test_calibrate_fits_a_checkpoint_on(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "here.safetensors"
    result = dreamshard("calibrate", "--checkpoint", str(trained), "--out", str(out), "--seconds", "6")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["from"] == trained.name and told["sets"] >= 8 and len(told["after_mape"]) == 2
    assert "calibrated on" in Checkpoint.load(out).metadata["hardware_name"]


def test_collect_continues_and_refuses_other_sets(tmp_path: Path) -> None:
    out = tmp_path / "sets.npz"
    command = ["collect", "--out", str(out), "--pools", "merlin_tiny", "--batch-sizes", "64", "--repeats", "2"]
    first = dreamshard(*command, "--sets", "16", "--seconds", "0.01")
    assert first.returncode == 0 and "8 of 16 sets" in first.stdout, first.stderr
    second = dreamshard(*command, "--sets", "16")
    assert second.returncode == 0 and "16 of 16 sets" in second.stdout, second.stderr
    other = dreamshard(*command, "--sets", "16", "--held-out")
    assert other.returncode == 1 and "sets.journal" in other.stderr and "Traceback" not in other.stderr
