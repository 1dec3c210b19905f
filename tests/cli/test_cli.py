# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The commands that measure and learn, on real kernels; the others are in test_commands.py."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import table_list

import gpu
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import SHIPPED, checkpoint_notes, resolve
from dreamshard_planner.cli import costs
from dreamshard_planner.cost.correction import OPTIMIZERS
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import FitConfig, predict_ms
from dreamshard_planner.devices import Machine
from dreamshard_planner.measure import kernels
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.training import QUICK, calibration, rounds
from tests.cli.test_commands import ON_CPU, run, run_json
from tests.torchrun import forked

FEW = replace(QUICK.reinforce, updates=1, looks=0, tasks_per_update=1, episodes_per_task=2)
HASTY = replace(QUICK, num_tasks=2, validation_tasks=1, fit=FitConfig(epochs=1), reinforce=FEW)
"""Settings of trainings whose networks and policies nothing asks."""


@pytest.fixture(autouse=True)
def _small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much memory as ``--quick`` takes: filling more takes longer than what is measured in it here."""
    monkeypatch.setattr(calibration, "_ARENA_BYTES", {"cpu": QUICK.arena_bytes})
    monkeypatch.setattr(kernels, "_ARENA_BYTES", QUICK.arena_bytes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Collectives of two ranks and a tiny training from nothing on real kernels, by the commands of ``make gpu``."""
    out = tmp_path_factory.mktemp("trained")
    lines = gpu.commands("cpu", 2, out, "cpu", 0.1, quick=True)
    launcher, module, options = re.split(r" -m (\S+measure\S+) ", lines["collectives"])
    done = forked(gpu.ROOT / f"{module.replace('.', '/')}.py", *shlex.split(options))
    assert launcher and done.returncode == 0, done.stdout + done.stderr
    command = lines["checkpoint"].partition(" -m dreamshard_planner ")[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dreamshard_planner.training.QUICK", HASTY)
        assert set(run_json(*shlex.split(command))) >= {"network_mape", "policy_over_rule"}
    return out / "cpu.safetensors"


def test_train_makes_a_checkpoint_from_nothing(trained: Path) -> None:
    checkpoint = Checkpoint.load(trained)
    assert checkpoint.cost is not None
    assert checkpoint.metadata["dataset"]["sets"] >= 8 and checkpoint.metadata["collectives"]["world_size"] == 2
    assert checkpoint.metadata["hardware"]["torch"]
    assert checkpoint.metadata["batch_sizes"] == [256]
    names = {path.name for path in trained.parent.iterdir()}
    assert names == {"collectives.json", "cpu.safetensors", "cpu.dataset.npz", "cpu.test.npz"}
    (made_in_a_hurry,) = checkpoint_notes(checkpoint, Machine(ranks_per_host=1, device="cpu").topology())
    assert "--quick" in made_in_a_hurry


def test_an_interrupted_training_from_what_ships_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured collectives stay those of the checkpoint in use."""
    out, collect = tmp_path / "x.safetensors", rounds.collect
    held: dict[str, int] = {}

    def interrupted(sets: list, folder: Path, *given, **options) -> CostDataset:
        dataset = collect(sets, folder, *given, **options)
        first_time = folder.name not in held
        held[folder.name] = len(dataset)
        if "round1" in folder.name and first_time:
            raise KeyboardInterrupt
        return dataset

    monkeypatch.setattr(costs, "_config", lambda *_: replace(HASTY, rounds=2))
    monkeypatch.setattr(rounds, "collect", interrupted)
    run("train", "--out", out, "--seconds", "1", status=130)
    before = dict(held)
    assert set(before) == {"x.test.blocks", "x.round0.blocks", "x.round1.blocks"}
    assert set(before) == {path.name for path in tmp_path.iterdir()}
    run("train", "--out", out, "--seconds", "1")
    # What had come to its end is only read; what was under way goes on.
    for name in ("x.test.blocks", "x.round0.blocks"):
        assert held[name] == before[name]
    assert held["x.round1.blocks"] >= before["x.round1.blocks"]
    made, measured = Checkpoint.load(out).metadata, CostDataset.load(out.with_suffix(".dataset.npz"))
    assert made["dataset"]["sets"] == len(measured) == held["x.round0.blocks"] + held["x.round1.blocks"]
    assert made["collectives"] == resolve("auto", "cpu").metadata["collectives"]
    assert "cpu.safetensors, measured on" in made["started_from"]
    assert "network starts from" in run("info", out).stdout


def test_fit_makes_a_checkpoint_from_measured_sets(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets of another machine are fitted anywhere, and the checkpoint is kept by that machine's name."""
    monkeypatch.setenv("DREAMSHARD_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "_config", lambda *_: HASTY)
    measured, once, few = (tmp_path / f"{name}.npz" for name in ("measured", "once", "few"))
    sets = CostDataset.load(trained.with_suffix(".dataset.npz"))
    sets = replace(sets, hardware={**sets.hardware, "name": "abacus"})
    sets.save(measured)
    told = run("fit", "--dataset", measured, "--test-dataset", measured).stderr
    (kept,) = (tmp_path / "checkpoints").iterdir()
    assert f"kept in {kept}; dreamshard info auto tells" in told
    assert Checkpoint.load(kept).cost is not None and Checkpoint.load(kept).metadata["hardware"]["name"] == "abacus"
    assert sets.reference_ms is not None
    replace(sets, samples_ms=sets.samples_ms[:, :1], reference_ms=sets.reference_ms[:, :1]).save(once)
    replace(sets, sets=sets.sets[:5], samples_ms=sets.samples_ms[:5], reference_ms=sets.reference_ms[:5]).save(few)
    with_test = ("fit", "--test-dataset", measured, "--out", tmp_path / "none.safetensors", "--dataset")
    refused = run(*with_test, measured, "--dataset", once, status=1).stderr
    assert f"{once} does not go with {measured}: 1 timed runs of each set, and 2 in the first" in refused
    assert "at least 8 measured sets, got 5" in run(*with_test, few, status=1).stderr
    refused = run(*with_test, trained.with_suffix(".dataset.npz"), status=1).stderr
    assert "the held-out sets were measured on " in refused and "abacus" in refused


def test_calibrate_corrects_a_checkpoint_and_plans_take_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else this machine does just now: --force."""
    monkeypatch.setenv("DREAMSHARD_HOME", str(tmp_path))
    result = run("calibrate", "--costs", trained, "--seconds", "1", "--force", "--format", "json")
    told, (out,) = json.loads(result.stdout), (tmp_path / "checkpoints").iterdir()  # nothing that a later one continues
    assert f"kept in {out}" in result.stderr and out.name.endswith("-1-threads-calibrated.safetensors")
    assert told["from"] == trained.name and told["clock"] == "processor time" and 0 <= told["others_share"] <= 1
    stages = [(check["optimizer"], check["direction"]) for check in told["checks"]]
    assert stages == [(name, way) for name in OPTIMIZERS for way in ("forward", "backward")]
    assert all(check["after"] <= check["before"] for check in told["checks"])
    made = Checkpoint.load(out).metadata
    assert "calibrated on" in made["hardware_name"] and made["collectives"]["world_size"] == 2
    assert set(made["corrections"]) <= set(OPTIMIZERS)
    tables = table_list(tmp_path, {"name": "t", "num_embeddings": 1000, "embedding_dim": 16})
    report = run_json("plan", "--tables", tables, *ON_CPU)["report"]
    said = " ".join(note["text"] for note in report["notes"])
    assert out.name in report["cost_source"]
    assert f"{out.name} is one of your own" in said and made["calibration"]["checked"] in said


def test_calibration_measures_the_optimizers_and_batches_of_a_plan(trained: Path, tmp_path: Path) -> None:
    tables = (
        {"name": f"t{rows}", "num_embeddings": rows, "embedding_dim": 16, "optimizer": name, "pooling_factor": 3.0}
        for rows, name in ((1000, "adagrad"), (5000, "adagrad"), (3000, "adam"))
    )
    plan, out = tmp_path / "plan.json", tmp_path / "x.safetensors"
    run("plan", "--tables", table_list(tmp_path, *tables), *ON_CPU, "--out", plan)
    run("calibrate", "--costs", trained, "--seconds", "1", "--force", "--out", out, "--plan", plan)
    told = Checkpoint.load(out).metadata["calibration"]
    # Adam goes with row-wise Adagrad.
    assert {check["optimizer"] for check in told["checks"]} == {"rowwise_adagrad", "adagrad"}
    assert "dims 16 to 16, batches 128 to 128" in told["checked"]


def test_calibration_refuses_what_tells_too_little_and_leaves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On invented measurements of kernels that take twice what the network says."""

    shipped, out = Checkpoint.load(SHIPPED / "cpu.safetensors"), tmp_path / "x.safetensors"

    def invent(others_share: float = 0.0, sets: int = 60) -> None:
        def measured(drawn: list, *_given, **_options) -> CostDataset:
            drawn = drawn[:sets]
            ms_X2 = 2 * predict_ms(shipped.cost, LabelledSets.of(drawn, torch.ones(len(drawn), 2)))
            return CostDataset.from_sets(drawn, ms_X2[:, None].double(), describe_hardware("cpu", 1))

        monkeypatch.setattr(calibration, "collect", measured)
        used_ns = iter(np.array([[0, 0], [100 * (1 - others_share), 100 * others_share]]))
        monkeypatch.setattr(calibration, "core_use_ns", lambda: next(used_ns))

    out.write_bytes(b"what is there")
    command = ("calibrate", "--costs", SHIPPED / "cpu.safetensors", "--out", out, "--seconds", "6")
    for invented, reason in (
        ({"others_share": 0.6}, "others had the core for 60 % of the time"),
        ({"sets": 12}, "fewer than 6 tell nothing: --seconds 18"),
    ):
        invent(**invented)
        said = " ".join(run(*command, status=1).stderr.split())
        assert reason in said and f"{out} stays as it was" in said and "--force" in said
        assert "backward of row-wise Adagrad" in said and out.read_bytes() == b"what is there"
    invent()
    said = run(*command).stdout.splitlines()
    assert said[3] == "backward of row-wise Adagrad was 50 % too low, is now 0 % off: good" and len(said) == 6


def test_collect_continues_and_refuses_other_sets(tmp_path: Path) -> None:
    out = tmp_path / "sets.npz"
    command = ["collect", "--out", str(out), "--pools", "merlin_tiny", "--batch-sizes", "64", "--repeats", "2"]
    first = run(*command, "--sets", "16", "--seconds", "0.01")
    assert "8 of 16 sets" in first.stdout
    second = run_json(*command, "--sets", "16")
    assert second["sets"] == 16 and second["spread_of_repeats"] > 0
    other = run(*command, "--sets", "16", "--held-out", status=1)
    assert "sets.blocks" in other.stderr and other.stdout == ""
