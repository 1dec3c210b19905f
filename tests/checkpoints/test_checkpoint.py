# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints: whole on disk or refused, and which of a user's own ``auto`` takes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import planned

from dreamshard_planner import Checkpoint, CheckpointError, FileError, devices
from dreamshard_planner.checkpoints import choice
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.devices import UNKNOWN_CARD
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.workload.tables import FEATURE_NAMES, NETWORK_FEATURES
from tests.cli.test_commands import run_json
from tests.planning.test_context import model
from tests.pretended import H100

DEFAULT = (Policy(PolicyConfig(hidden=8)), CostNetwork(CostNetworkConfig(members=2, context=3), seed=5))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    Checkpoint(DEFAULT[0], DEFAULT[1], {"hardware_name": "a machine"}).save(path)
    return path


@pytest.mark.parametrize("policy, cost", [DEFAULT, (DEFAULT[0], None)])
def test_round_trip(tmp_path: Path, policy, cost) -> None:
    path = tmp_path / "some.safetensors"
    Checkpoint(policy, cost, {"hardware_name": "a machine", "extra": [1, 2]}).save(path)
    loaded = Checkpoint.load(path)
    assert loaded.metadata["extra"] == [1, 2] and loaded.name == path.name
    pairs = [(policy, loaded.policy), *([] if cost is None else [(cost, loaded.cost)])]
    for ours, theirs in pairs:
        assert ours.config == theirs.config
        torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=0, atol=0)
    if cost is None:
        assert loaded.cost is None
    else:
        assert str(loaded.cost.source) == "network (some.safetensors, measured on a machine)"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def rewrite(path: Path, **changes: str) -> None:
    save_file(load_file(path), path, metadata=header_of(path) | changes)


RATES = [1.0, 0.0, 0.0, 0.0, 0.0]
DAMAGED = "not a safetensors file, or a damaged one"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "no such checkpoint"),
        *((lambda path, keep=keep: path.write_bytes(path.read_bytes()[:keep]), DAMAGED) for keep in (0, 5, 100, -1)),
        (lambda path: path.write_text("{}"), DAMAGED),
        (lambda path: torch.save({"format": "dreamshard_planner"}, path), DAMAGED),  # nothing is unpickled
        (lambda path: save_file({"weight": torch.zeros(3)}, path), "not a checkpoint of dreamshard_planner"),
        (lambda path: rewrite(path, version="99"), "version 99 is newer .* upgrade"),
        (lambda path: rewrite(path, version="3"), "version 3 is older .* make it again with dreamshard train"),
        (lambda path: rewrite(path, description="{"), "description is missing or damaged"),
        (lambda path: rewrite(path, description=json.dumps({"features": ["dim"]})), "other features"),
    ],
)
def test_a_wrong_file_is_named_with_the_reason(saved: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=f"some.safetensors: .*{said}"):
        Checkpoint.load(saved)


@pytest.mark.parametrize(
    ("wrong", "mistake"),
    [
        ({"validation": {"network_mape": [0.1, "a"]}}, "validation.network_mape.1: .* got 'a'"),
        ({"validation": None}, "validation"),
        ({"calibration": []}, "calibration"),
        ({"learned": {"runs": "two"}}, "learned.runs: .* got 'two'"),
        ({"collectives": {"backend": "gloo"}}, "collectives: lacks 'world_size'"),
        ({"corrections": {"adam": [RATES, RATES]}}, "corrections.adam.*: must be one of sgd, .* got 'adam'"),
        ({"corrections": {"sgd": [RATES, RATES[:3]]}}, "corrections.sgd.1"),
        ({"corrections": {"sgd": [RATES, [1.0, -1.0, 0.0, 0.0, 0.0]]}}, "corrections.sgd.1"),
    ],
)
def test_what_is_shown_of_a_description_is_checked(tmp_path: Path, wrong: dict[str, Any], mistake: str) -> None:
    Checkpoint(*DEFAULT, wrong).save(path := tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=f"x.safetensors: .*{mistake}"):
        Checkpoint.load(path)


def test_features_that_no_network_reads_may_be_any(saved: Path) -> None:
    description = json.loads(header_of(saved)["description"])
    assert description["features"] == list(NETWORK_FEATURES)
    for names in (FEATURE_NAMES, [*NETWORK_FEATURES, "uvm", "of another version"]):
        rewrite(saved, description=json.dumps({**description, "features": list(names)}))
        assert Checkpoint.load(saved).metadata["hardware_name"] == "a machine"
    for names in (NETWORK_FEATURES[:-1], NETWORK_FEATURES[::-1], []):
        rewrite(saved, description=json.dumps({**description, "features": list(names)}))
        with pytest.raises(CheckpointError, match="other features"):
            Checkpoint.load(saved)


def test_unfitting_tensors(saved: Path) -> None:
    header, tensors = header_of(saved), load_file(saved)
    name = next(name for name in tensors if name.startswith("policy."))
    for wrong, said in (
        ({**tensors, name: torch.full_like(tensors[name], torch.nan)}, "holds NaN"),
        ({key: value for key, value in tensors.items() if key != name}, "does not fit"),
    ):
        save_file(wrong, saved, metadata=header)
        with pytest.raises(CheckpointError, match=f"policy network {said}"):
            Checkpoint.load(saved)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DREAMSHARD_HOME", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def keep(path: Path, seed: int = 0, **metadata) -> Path:
    """A small checkpoint, measured on this machine unless the metadata say otherwise."""
    hardware = describe_hardware("cpu", torch.get_num_threads()) | metadata.pop("hardware", {})
    network = CostNetwork(CostNetworkConfig(members=2, context=3), seed=seed)
    told = {"hardware": hardware, "hardware_name": "here", **metadata}
    Checkpoint(Policy(PolicyConfig(hidden=8)), network, told).save(path)
    return path


def test_auto_takes_the_one_measured_on_this_machine_with_as_many_threads(folder: Path) -> None:
    assert resolve("auto", "cpu").name == "cpu.safetensors" and resolve("auto", "cpu").why == ""
    keep(folder / "other.safetensors", hardware={"name": "another processor"})
    shipped = resolve("auto", "cpu")
    assert shipped.name == "cpu.safetensors" and f"none of your own in {folder} was measured on" in shipped.why
    for threads in (2, 8):
        keep(folder / f"{threads}.safetensors", hardware={"threads": threads})
    assert [resolve("auto", "cpu", threads=n).name[0] for n in (1, 3, 5, 64)] == ["2", "2", "8", "8"]
    taken = resolve("auto", "cpu", threads=2)
    assert f"2.safetensors is one of your own checkpoints, in {folder}" in taken.why
    assert resolve("auto", "cuda").name == "roofline.safetensors"
    assert resolve("auto", "cuda").why == ""  # and no card is asked for


def test_auto_goes_by_the_card_that_is_planned_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h100, shipped = "NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3.safetensors"
    assert resolve("auto", "cuda", card=h100).name == shipped
    for card in ("NVIDIA H200", UNKNOWN_CARD):
        assert resolve("auto", "cuda", card=card).name == "roofline.safetensors"
    keep(folder / "mine.safetensors", hardware={"device": "cuda", "name": h100})
    assert resolve("auto", "cuda", card=h100).name == "mine.safetensors"
    assert resolve("auto", "cuda", card=UNKNOWN_CARD).name == "roofline.safetensors"
    # Where the topology does not tell, the card that is here counts.
    monkeypatch.setattr(devices, "read_card", lambda: H100)
    assert resolve("auto", "cuda").name == "mine.safetensors"
    assert resolve("auto", "cuda", card="NVIDIA H200").name == "roofline.safetensors"
    (folder / "mine.safetensors").unlink()
    assert resolve("auto", "cuda").name == shipped


def test_of_several_the_newest_counts(folder: Path) -> None:
    trained, calibrated = keep(folder / "b.safetensors"), keep(folder / "a.safetensors", calibration={"sets": 90})
    for order in ((trained, calibrated), (calibrated, trained)):
        for seconds, path in enumerate(order):
            os.utime(path, (seconds, seconds))
        assert resolve("auto", "cpu").name == order[-1].name
    before = resolve("auto", "cpu").digest()
    keep(trained, seed=1)
    assert resolve("auto", "cpu").digest() != before  # a file that was replaced meanwhile


def test_plans_doctor_and_info_tell_of_it_and_the_context_of_a_plan_covers_it(folder: Path) -> None:
    shipped = planned(model())
    path = keep(folder / "mine.safetensors")
    found = {finding["subject"]: finding for finding in run_json("doctor")}
    assert found["your checkpoints"]["found"] == f"mine.safetensors, in {folder}"
    assert "mine.safetensors" in found["costs on cpu"]["found"] and "your own" in found["costs on cpu"]["advice"]
    told = run_json("info", "auto")
    assert told["file"] == "mine.safetensors" and str(folder) in told["why"]
    one = planned(model())
    keep(path, seed=1)
    other = planned(model())
    contexts = {planner.hash_planner_context_inputs_str() for planner in (shipped, one, other)}
    settings = {planner.saved_plan().inputs.settings["checkpoint"] for planner in (shipped, one, other)}
    assert len(contexts) == len(settings) == 3
    assert not [note for note in shipped.report().notes if "your own" in note.text]
    assert "mine.safetensors" in one.report().cost_source
    assert any(note.text.startswith("mine.safetensors is one of your own") for note in one.report().notes)


def test_a_damaged_one_is_an_error_that_names_it(folder: Path) -> None:
    keep(folder / "good.safetensors")
    (folder / "bad.safetensors").write_bytes(b"\x00" * 40)
    (folder / ".bad.safetensors").write_bytes(b"not looked at")
    with pytest.raises(CheckpointError, match=r"bad.safetensors: not a safetensors.*remove the file, or name a check"):
        resolve("auto", "cpu")
    assert resolve(folder / "good.safetensors", "cpu").name == "good.safetensors"
    for threads in (0, "many", None, 2.5, True):
        keep(folder / "bad.safetensors", hardware={"threads": threads})
        with pytest.raises(CheckpointError, match="bad.safetensors: hardware.threads: .* got"):
            resolve("auto", "cpu")
    assert "bad.safetensors" in str(run_json("doctor", status=1))


def test_files_are_named_by_hardware_and_folders_that_cannot_be_are_told(folder: Path, monkeypatch) -> None:
    epyc = {"device": "cpu", "name": "AMD EPYC (family 25 model 17)", "threads": 1}
    h100 = {"device": "cuda", "name": "NVIDIA H100 80GB HBM3", "threads": 1}
    assert choice.new_file(epyc).name == "cpu-amd-epyc-family-25-model-17-1-threads.safetensors"
    assert choice.new_file(h100, "calibrated").name == "cuda-nvidia-h100-80gb-hbm3-calibrated.safetensors"
    with pytest.raises(FileError, match="hardware that is not told"):
        choice.new_file({"device": "cpu"})
    file = folder / "file"
    file.write_text("")
    monkeypatch.setenv("DREAMSHARD_HOME", str(file))
    assert f"{file}/checkpoints, for your own, cannot be read (Not a directory)" in resolve("auto", "cpu").why
    with pytest.raises(FileError, match="cannot be made: Not a directory; set DREAMSHARD_HOME"):
        choice.new_file(describe_hardware("cpu", 1))


def test_without_the_variable_it_is_in_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DREAMSHARD_HOME", "~/mine")
    assert choice.folder() == tmp_path / "mine" / "checkpoints"
    monkeypatch.delenv("DREAMSHARD_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert choice.folder() == tmp_path / "dreamshard_planner" / "checkpoints" and choice.files() == []
