# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The folder of a user's own checkpoints: which of them ``auto`` takes, and what it says of that."""

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dreamshard_planner import Checkpoint, CheckpointError, DreamShardPlanner, FileError, driver
from dreamshard_planner.checkpoints import choice
from dreamshard_planner.checkpoints.choice import SHIPPED, resolve, shipped
from dreamshard_planner.cli import app
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.devices import UNKNOWN_CARD
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.policy.network import Policy, PolicyConfig
from tests.planning.test_context import model
from tests.pretended import H100
from tests.torchrec_components.test_plugin import SHARDERS, topology


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
    monkeypatch.setattr(driver, "read_card", lambda: H100)
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


def test_a_plan_tells_of_it_and_its_context_covers_it(folder: Path) -> None:
    def planned() -> DreamShardPlanner:
        planner = DreamShardPlanner(topology=topology(), batch_size=64, stats=[], debug=False)
        planner.plan(model(), SHARDERS)
        return planner

    shipped = planned()
    path = keep(folder / "mine.safetensors")
    one = planned()
    keep(path, seed=1)
    other = planned()
    contexts = {planner.hash_planner_context_inputs_str() for planner in (shipped, one, other)}
    settings = {planner.saved_plan().inputs.settings["checkpoint"] for planner in (shipped, one, other)}
    assert len(contexts) == len(settings) == 3
    assert not [note for note in shipped.report().notes if "your own" in note.text]
    assert "mine.safetensors" in one.report().cost_source
    assert any(note.text.startswith("mine.safetensors is one of your own") for note in one.report().notes)


def test_doctor_and_info_say_which_is_taken_and_why(folder: Path) -> None:
    keep(folder / "mine.safetensors")
    findings = json.loads(CliRunner().invoke(app, ["doctor", "--format", "json"]).stdout)
    found = {finding["subject"]: finding for finding in findings}
    assert found["your checkpoints"]["found"] == f"mine.safetensors, in {folder}"
    assert "mine.safetensors" in found["costs on cpu"]["found"] and "your own" in found["costs on cpu"]["advice"]
    told = json.loads(CliRunner().invoke(app, ["info", "auto", "--format", "json"]).stdout)
    assert told["file"] == "mine.safetensors" and str(folder) in told["why"]


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
    doctor = CliRunner().invoke(app, ["doctor", "--format", "json"])
    assert doctor.exit_code == 1 and "bad.safetensors" in doctor.stdout


def test_a_folder_that_cannot_be_read_is_told_and_one_that_cannot_be_made_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "file"
    file.write_text("")
    monkeypatch.setenv("DREAMSHARD_HOME", str(file))
    assert f"{file}/checkpoints, for your own, cannot be read (Not a directory)" in resolve("auto", "cpu").why
    with pytest.raises(FileError, match="cannot be made: Not a directory; set DREAMSHARD_HOME"):
        choice.new_file(describe_hardware("cpu", 1))


def test_files_are_named_by_hardware(folder: Path) -> None:
    epyc = {"device": "cpu", "name": "AMD EPYC (family 25 model 17)", "threads": 1}
    h100 = {"device": "cuda", "name": "NVIDIA H100 80GB HBM3", "threads": 1}
    assert choice.new_file(epyc).name == "cpu-amd-epyc-family-25-model-17-1-threads.safetensors"
    assert choice.new_file(h100, "calibrated").name == "cuda-nvidia-h100-80gb-hbm3-calibrated.safetensors"
    with pytest.raises(FileError, match="hardware that is not told"):
        choice.new_file({"device": "cpu"})


def test_without_the_variable_it_is_in_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DREAMSHARD_HOME", "~/mine")
    assert choice.folder() == tmp_path / "mine" / "checkpoints"
    monkeypatch.delenv("DREAMSHARD_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert choice.folder() == tmp_path / "dreamshard_planner" / "checkpoints" and choice.files() == []


def test_what_ships() -> None:
    measured, roofline = resolve("auto", "cpu"), resolve("auto", "cuda")
    assert measured.cost is not None and measured.metadata["hardware"]["device"] == "cpu"
    assert roofline.cost is None and "roofline" in roofline.name
    for checkpoint in (measured, roofline):
        assert (SHIPPED / checkpoint.name).stat().st_size < 2**20


def test_a_card_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    for name in ("nvidia-h200", "roofline"):
        keep(tmp_path / f"{name}.safetensors")
    assert shipped(tmp_path, "cuda", "NVIDIA H200").name == "nvidia-h200.safetensors"
    for card in ("NVIDIA A100-SXM4-80GB", None):
        assert shipped(tmp_path, "cuda", card).name == "roofline.safetensors"
