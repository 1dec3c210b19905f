# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One versioned file for what was learned: safetensors with JSON metadata, where both flows meet.

Learning writes it, planning reads it. Nothing in it is executable.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from dreamshard_planner.ambient import neutral
from dreamshard_planner.canonical import digest
from dreamshard_planner.cost.model import ComputeCost, CostSource
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.paper import PaperCostConfig, PaperCostNetwork
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.placement.paper import PaperPolicy, PaperPolicyConfig
from dreamshard_planner.placement.policy import AnyPolicy, Policy, PolicyConfig
from dreamshard_planner.placement.recurrent import RecurrentPolicy, RecurrentPolicyConfig
from dreamshard_planner.workload.features import FEATURE_NAMES, covers

FORMAT = "dreamshard_planner"
VERSION = 1
RECIPES: dict[str, tuple[type, type, type, type]] = {
    "default": (Policy, PolicyConfig, CostNetwork, CostNetworkConfig),
    "paper": (PaperPolicy, PaperPolicyConfig, PaperCostNetwork, PaperCostConfig),
    "autoshard": (RecurrentPolicy, RecurrentPolicyConfig, CostNetwork, CostNetworkConfig),
}
"""Policy, its configuration, cost network and its configuration, by recipe. ``default`` is ours, ``paper`` is
DreamShard as published, ``autoshard`` the recurrent policy of AutoShard on our cost network, for comparison."""

SHIPPED = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True)
class Checkpoint:
    """A cost network (or none, where costs come from the roofline model) and a policy trained on it."""

    policy: AnyPolicy
    cost: CostNetwork | PaperCostNetwork | None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Hardware, library versions, dataset digest, validation errors and the like."""
    name: str = "unsaved"

    def compute_cost(self, topology) -> ComputeCost:
        """The cost model for planning on a ``torchrec.distributed.planner.Topology``."""
        return RooflineCost.of_topology(topology) if self.cost is None else self.cost

    @property
    def recipe(self) -> str:
        return self.metadata.get("recipe", "default")

    @neutral()
    def digest(self) -> str:
        """SHA-256 of networks and metadata, in hexadecimal; the name does not count."""
        networks = [
            None if network is None else (network.config, network.state_dict()) for network in (self.policy, self.cost)
        ]
        return digest((networks, self.metadata))

    @neutral()
    def save(self, path: str | Path) -> None:
        """Write the file; an existing one is replaced as a whole."""
        path = Path(path)
        tensors = _state("policy", self.policy) | (_state("cost", self.cost) if self.cost is not None else {})
        description = {
            **self.metadata,
            "features": list(FEATURE_NAMES),
            "policy": asdict(self.policy.config),
            "cost": None if self.cost is None else asdict(self.cost.config),
        }
        header = {"format": FORMAT, "version": str(VERSION), "description": json.dumps(description, sort_keys=True)}
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_bytes(serialize(tensors, metadata=header))
        partial.replace(path)

    @classmethod
    @neutral()
    def load(cls, path: str | Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            CheckpointError: missing, truncated, foreign, of a newer version, or not fitting this package;
                the message names the file and the reason.
        """
        path = Path(path)
        if not path.is_file():
            raise CheckpointError(f"{path}: no such checkpoint")
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a safetensors file, or a damaged one ({error})") from error
        description = _description(path, header)
        try:
            make_policy, policy_config, make_cost, cost_config = RECIPES[description.get("recipe", "default")]
            policy = make_policy(policy_config(**description["policy"]))
            cost = None if description["cost"] is None else make_cost(cost_config(**description["cost"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its description does not fit this package ({error})") from error
        _restore(path, "policy", policy, tensors)
        if cost is not None:
            _restore(path, "cost", cost, tensors)
            cost.requires_grad_(False)
            cost.source = CostSource("network", f"{path.name}, measured on {description.get('hardware_name', '?')}")
        metadata = {key: value for key, value in description.items() if key not in ("features", "policy", "cost")}
        return cls(policy, cost, metadata, path.name)


def resolve(checkpoint: str | Path | Checkpoint, compute_device: str, recipe: str = "default") -> Checkpoint:
    """The checkpoint to plan with: a :class:`Checkpoint`, a path, or ``"auto"``.

    ``"auto"`` takes the one that was measured on this type of device (for CUDA: on the card that this process sees),
    and the roofline model with the policy trained on it where nothing was measured.

    Raises:
        CheckpointError: where it can't be read, or is of another recipe.
    """
    if checkpoint == "auto":
        checkpoint = shipped(SHIPPED, compute_device, recipe, _card(SHIPPED, compute_device))
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.load(checkpoint)
    if checkpoint.recipe != recipe:
        raise CheckpointError(f"{checkpoint.name}: made by recipe {checkpoint.recipe!r}, asked for {recipe!r}")
    return checkpoint


def _card(folder: Path, compute_device: str) -> str | None:
    """Name of the card that this process sees. Asking starts CUDA, so nobody asks where no card's checkpoint ships."""
    if compute_device != "cuda" or not torch.cuda.device_count():
        return None
    sources = {path.stem.partition("-")[0] for path in folder.glob("*.safetensors")}
    return None if sources <= {"cpu", "roofline"} else torch.cuda.get_device_name()


def measured_name(compute_device: str, card: str) -> str:
    """What a checkpoint is called that was measured on a device: ``cpu``, or the card's name as in file names."""
    return "cpu" if compute_device == "cpu" else re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


@cache
def shipped(folder: Path, compute_device: str, recipe: str, card: str | None = None) -> Checkpoint:
    """The best checkpoint in ``folder`` for a device: ``cpu``, or the card's name (``NVIDIA H200``:
    ``nvidia-h200.safetensors``), else ``roofline``; with ``-<recipe>`` behind it, if not the default one.

    Raises:
        CheckpointError: none of them is there.
    """
    measured = measured_name(compute_device, card) if card else compute_device
    suffix = "" if recipe == "default" else f"-{recipe}"
    for source in (measured, "roofline"):
        if (path := folder / f"{source}{suffix}.safetensors").is_file():
            return Checkpoint.load(path)
    raise CheckpointError(f"no checkpoint of recipe {recipe!r} ships: make one with dreamshard train --recipe {recipe}")


def _description(path: Path, header: dict[str, str]) -> dict[str, Any]:
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: a safetensors file, but not a checkpoint of dreamshard_planner")
    version = header.get("version", "")
    if not version.isdecimal():
        raise CheckpointError(f"{path}: unreadable version {version!r}")
    if int(version) > VERSION:
        raise CheckpointError(
            f"{path}: checkpoint version {version} is newer than this package reads ({VERSION}); upgrade the package"
        )
    try:
        description = json.loads(header["description"])
    except (KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: its description is missing or damaged ({error})") from error
    features = description.get("features")
    if not isinstance(features, list) or not covers(features):
        raise CheckpointError(f"{path}: made for other features than this package computes; train it again")
    return description


def _state(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor.detach().contiguous() for name, tensor in module.state_dict().items()}


def _restore(path: Path, prefix: str, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    state = {
        name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")
    }
    if any(torch.isnan(tensor).any() for tensor in state.values()):
        raise CheckpointError(f"{path}: the {prefix} network holds NaN")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: the {prefix} network does not fit this package ({error})") from error
    module.eval()
