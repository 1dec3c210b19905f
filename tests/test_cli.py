# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ``dreamshard`` command, run as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamshard_planner import training
from dreamshard_planner.checkpoint import SHIPPED, Checkpoint
from dreamshard_planner.cli import _with_updates, app
from dreamshard_planner.cost.collectives import OPERATIONS, CollectiveFit
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.training import QUICK, TrainingConfig, calibrate


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("train", "--out", "nowhere/x.safetensors"), "nowhere"),
        (("train", "--out", "x.safetensors", "--recipe", "foo"), "foo"),
        (("train", "--out", "x.safetensors", "--seconds", "-1"), "--seconds"),
        (("train", "--out", "x.safetensors", "--updates", "0"), "--updates"),
        (("collect", "--out", "x.npz", "--device", "tpu"), "tpu"),
        (("collect", "--out", "x.npz", "--batch-sizes", "12,many"), "many"),
    ],
)
def test_wrong_options_are_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and reason in result.output
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A tiny training from nothing on real kernels."""
    out = tmp_path_factory.mktemp("trained") / "tiny.safetensors"
    result = dreamshard("train", "--out", str(out), "--quick")
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) >= {"network_mape", "linear_mape", "policy_over_rule"}
    return out


def test_train_makes_a_checkpoint_from_nothing(trained: Path) -> None:
    checkpoint = Checkpoint.load(trained)
    assert checkpoint.metadata["dataset"]["sets"] >= 8
    assert checkpoint.metadata["hardware"]["torch"]
    assert checkpoint.metadata["batch_sizes"] == [256]
    names = {path.name for path in trained.parent.iterdir()}
    assert names == {"tiny.safetensors", "tiny.dataset.npz", "tiny.test.npz"}


def test_an_interrupted_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out, measure = replace(QUICK, rounds=2, seconds=4.0), tmp_path / "x.safetensors", training._measure

    def interrupted(config: TrainingConfig, sets: list, journal: Path, *arguments) -> CostDataset:
        dataset = measure(config, sets, journal, *arguments)
        if "round1" in journal.name:
            raise KeyboardInterrupt
        return dataset

    monkeypatch.setattr(training, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.train(config, out, progress=False)
    monkeypatch.undo()
    journals = {path.name: path.read_bytes() for path in tmp_path.glob("*.journal")}
    assert set(journals) == {"x.test.journal", "x.round0.journal", "x.round1.journal"}
    checkpoint = training.train(config, out, progress=False)
    measured = CostDataset.load(out.with_suffix(".dataset.npz"))
    # What was measured before is all there: round 0 as it was, round 1 and what the second run added to it.
    lines = {name: content.count(b"\n") - 1 for name, content in journals.items()}
    assert checkpoint.metadata["dataset"]["sets"] == len(measured)
    assert len(measured) >= lines["x.round0.journal"] + lines["x.round1.journal"]


def test_updates_are_those_asked_for_in_every_recipe() -> None:
    config = _with_updates(TrainingConfig(), 3)
    assert config.reinforce.updates == config.paper_reinforce.updates == 3


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
    made = Checkpoint.load(out).metadata
    assert "calibrated on" in made["hardware_name"] and made["collectives"] is None
    assert [path.name for path in tmp_path.iterdir()] == [out.name]  # no journal that a later one would continue


@pytest.mark.parametrize("same", [True, False], ids=["this machine", "another machine"])
def test_calibration_keeps_collectives_of_this_machine_only(same: bool, trained: Path, tmp_path: Path) -> None:
    start = Checkpoint.load(trained)
    name = describe_hardware("cpu", 1)["name"] if same else "another processor"
    start.metadata["collectives"] = {
        "backend": "gloo",
        "world_size": 2,
        "hardware": {"device": "cpu", "name": name},
        "fits": {operation: asdict(CollectiveFit(0.1, 1e6, 1e6, 0.1)) for operation in OPERATIONS},
    }
    kept = calibrate(start, tmp_path / "here.safetensors", seconds=4, progress=False).metadata["collectives"]
    assert kept == (start.metadata["collectives"] if same else None)


def test_collect_continues_and_refuses_other_sets(tmp_path: Path) -> None:
    out = tmp_path / "sets.npz"
    command = ["collect", "--out", str(out), "--pools", "merlin_tiny", "--batch-sizes", "64", "--repeats", "2"]
    first = dreamshard(*command, "--sets", "16", "--seconds", "0.01")
    assert first.returncode == 0 and "8 of 16 sets" in first.stdout, first.stderr
    second = dreamshard(*command, "--sets", "16")
    assert second.returncode == 0 and "16 of 16 sets" in second.stdout, second.stderr
    other = dreamshard(*command, "--sets", "16", "--held-out")
    assert other.returncode == 1 and "sets.journal" in other.stderr and "Traceback" not in other.stderr
