# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints: nothing is lost on the way to disk and back, and a wrong file is a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dreamshard_planner import Checkpoint, CheckpointError
from dreamshard_planner.checkpoints.checkpoint import SHIPPED, resolve, shipped
from dreamshard_planner.checkpoints.file import describe
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.workload.features import FEATURE_NAMES, NETWORK_FEATURES

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
    for ours, theirs in ((policy, loaded.policy), (cost, loaded.cost)):
        if ours is None:
            assert theirs is None
            continue
        assert ours.config == theirs.config
        state, expected = theirs.state_dict(), ours.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)
    if cost is not None:
        assert str(loaded.cost.source) == "network (some.safetensors, measured on a machine)"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def rewrite(path: Path, **changes: str) -> None:
    """Change the header of a checkpoint."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
    header.update(changes)
    save_file(load_file(path), path, metadata=header)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere.safetensors: no such checkpoint"):
        Checkpoint.load(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="some.safetensors: not a safetensors file, or a damaged one"):
        Checkpoint.load(saved)


def test_foreign(saved: Path) -> None:
    save_file({"weight": torch.zeros(3)}, saved)
    with pytest.raises(CheckpointError, match="not a checkpoint of dreamshard_planner"):
        Checkpoint.load(saved)
    saved.write_text("{}")
    with pytest.raises(CheckpointError, match="some.safetensors"):
        Checkpoint.load(saved)


def test_newer(saved: Path) -> None:
    rewrite(saved, version="99")
    with pytest.raises(CheckpointError, match="version 99 is newer .* upgrade"):
        Checkpoint.load(saved)


def test_damaged_description(saved: Path) -> None:
    rewrite(saved, description="{")
    with pytest.raises(CheckpointError, match="description is missing or damaged"):
        Checkpoint.load(saved)
    for features in (["dim"], [], None, 3, list(NETWORK_FEATURES[::-1])):
        rewrite(saved, description=json.dumps({"features": features}))
        with pytest.raises(CheckpointError, match="other features"):
            Checkpoint.load(saved)


@pytest.mark.parametrize(
    ("wrong", "mistake"),
    [
        ({"validation": {"network_mape": [0.1, "a"]}}, "validation.network_mape.1: .* got 'a'"),
        ({"validation": {"linear_mape": [0.1]}}, "validation.linear_mape"),
        ({"validation": {"policy_over_rule": [1]}}, "validation.policy_over_rule"),
        ({"dataset": {"test_sets": "many"}}, "dataset.test_sets: .* got 'many'"),
        ({"learned": 3}, "learned: .* got 3"),
    ],
)
def test_what_is_shown_of_a_description_is_checked(tmp_path: Path, wrong: dict[str, Any], mistake: str) -> None:
    Checkpoint(DEFAULT[0], DEFAULT[1], {**wrong}).save(path := tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=f"x.safetensors: {mistake}"):
        describe(path)


def test_features_that_no_network_reads_may_be_any(saved: Path) -> None:
    from safetensors import safe_open

    with safe_open(saved, framework="pt") as file:
        description = json.loads(file.metadata()["description"])
    assert description["features"] == list(NETWORK_FEATURES)
    for names in (FEATURE_NAMES, [*NETWORK_FEATURES, "uvm", "of another version"]):
        description["features"] = list(names)
        rewrite(saved, description=json.dumps(description))
        assert Checkpoint.load(saved).metadata["hardware_name"] == "a machine"
    description["features"] = list(NETWORK_FEATURES[:-1])
    rewrite(saved, description=json.dumps(description))
    with pytest.raises(CheckpointError, match="other features"):
        Checkpoint.load(saved)


def test_unfitting_tensors(saved: Path) -> None:
    from safetensors import safe_open

    with safe_open(saved, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(saved)
    name = next(name for name in tensors if name.startswith("policy."))
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, saved, metadata=header)
    with pytest.raises(CheckpointError, match="policy network holds NaN"):
        Checkpoint.load(saved)
    save_file({key: value for key, value in tensors.items() if key != name}, saved, metadata=header)
    with pytest.raises(CheckpointError, match="policy network does not fit"):
        Checkpoint.load(saved)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "evil.safetensors"
    torch.save({"format": "dreamshard_planner"}, path)
    with pytest.raises(CheckpointError, match="evil.safetensors"):
        Checkpoint.load(path)


@pytest.mark.parametrize("section", [None, [], {"sets": []}, {"sets": "1"}, {"sets": True}])
def test_counts_that_are_none_are_refused(tmp_path: Path, section) -> None:
    path = tmp_path / "some.safetensors"
    Checkpoint(DEFAULT[0], DEFAULT[1], {"dataset": section}).save(path)
    with pytest.raises(CheckpointError, match="some.safetensors: dataset"):
        Checkpoint.load(path)


def test_what_ships() -> None:
    measured, roofline = resolve("auto", "cpu"), resolve("auto", "cuda")
    assert measured.cost is not None and measured.metadata["hardware"]["device"] == "cpu"
    assert roofline.cost is None and "roofline" in roofline.name
    for checkpoint in (measured, roofline):
        assert (SHIPPED / checkpoint.name).stat().st_size < 2**20


def test_a_card_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    for name in ("nvidia-h200", "roofline"):
        Checkpoint(*DEFAULT).save(tmp_path / f"{name}.safetensors")
    assert shipped(tmp_path, "cuda", "NVIDIA H200").name == "nvidia-h200.safetensors"
    for card in ("NVIDIA A100-SXM4-80GB", None):
        assert shipped(tmp_path, "cuda", card).name == "roofline.safetensors"


def test_networks_of_other_recipes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    Checkpoint(*DEFAULT, {"recipe": "paper"}).save(path)
    with pytest.raises(CheckpointError, match="old.safetensors: .*recipe 'paper', which this package no longer has"):
        Checkpoint.load(path)
