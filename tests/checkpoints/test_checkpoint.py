# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints: nothing is lost on the way to disk and back, and a wrong file is a clear error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dreamshard_planner import Checkpoint, CheckpointError
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


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def rewrite(path: Path, **changes: str) -> None:
    """Change the header of a checkpoint."""
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
        ({"collectives": {"backend": "gloo"}}, "collectives: world_size must be of type int"),
        ({"corrections": {"adam": [RATES, RATES]}}, "corrections.adam.*: must be one of sgd, .* got 'adam'"),
        *(
            ({"corrections": {"sgd": [RATES, wrong]}}, r"corrections.sgd.1")
            for wrong in (RATES[:3], [1.0, -1.0, 0.0, 0.0, 0.0])
        ),
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
