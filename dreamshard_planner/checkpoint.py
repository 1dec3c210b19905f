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
from torch._subclasses.fake_tensor import FakeTensorMode

from dreamshard_planner.ambient import neutral
from dreamshard_planner.canonical import digest
from dreamshard_planner.cost.collectives import fits_of
from dreamshard_planner.cost.model import ComputeCost, CostSource
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.paper import PaperCostConfig, PaperCostNetwork
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.files import brief, check_readable, parse_json, write_whole
from dreamshard_planner.placement.paper import PaperPolicy, PaperPolicyConfig
from dreamshard_planner.placement.policy import AnyPolicy, Policy, PolicyConfig
from dreamshard_planner.placement.recurrent import RecurrentPolicy, RecurrentPolicyConfig
from dreamshard_planner.workload.features import FEATURE_NAMES, covers, feature_matrix
from dreamshard_planner.workload.tables import Workload

FORMAT = "dreamshard_planner"
VERSION = 1
RECIPES: dict[str, tuple[type, type, type, type]] = {
    "default": (Policy, PolicyConfig, CostNetwork, CostNetworkConfig),
    "paper": (PaperPolicy, PaperPolicyConfig, PaperCostNetwork, PaperCostConfig),
    "autoshard": (RecurrentPolicy, RecurrentPolicyConfig, CostNetwork, CostNetworkConfig),
}
"""Policy, its configuration, cost network and its configuration, by recipe. ``default`` is ours, ``paper`` is
DreamShard as published, ``autoshard`` the recurrent policy of AutoShard on our cost network, for comparison."""

METADATA: dict[str, tuple[type, type]] = {
    "recipe": (str, str),
    "hardware_name": (str, str),
    "hardware": (dict, str),
    "pools": (list, str),
    "extra_pools": (list, str),
    "batch_sizes": (list, int),
}
"""What else of the description is read again: its type, and that of its elements."""

MAX_SIZE = 4096
"""Widest layer of a network, and most of anything that its configuration counts."""
UNBOUNDED = ("_low", "_high")
"""Ends of the names of buffers that may be infinite: ranges of networks that have seen nothing."""
ORDINARY = tuple(Workload(f"{dim}", 10_000, dim, 512, 4.0, 1024.0, (1.0,) + (0.0,) * 16) for dim in (16, 128))

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
        """Write the file; an existing one is replaced as a whole.

        Raises:
            FileError: where that fails; says where the checkpoint is kept instead.
        """
        tensors = _state("policy", self.policy) | (_state("cost", self.cost) if self.cost is not None else {})
        description = {
            **self.metadata,
            "features": list(FEATURE_NAMES),
            "policy": asdict(self.policy.config),
            "cost": None if self.cost is None else asdict(self.cost.config),
        }
        header = {"format": FORMAT, "version": str(VERSION), "description": json.dumps(description, sort_keys=True)}
        write_whole(path, serialize(tensors, metadata=header), keep=True)

    @classmethod
    @neutral()
    def load(cls, path: str | Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            CheckpointError: missing, truncated, foreign, of a newer version, or not fitting this package;
                the message names the file and the reason.
        """
        path = Path(path)
        check_readable(path, CheckpointError, "checkpoint")
        try:
            with safe_open(path, framework="pt") as file:
                description = _description(path, file.metadata() or {})
                recipe = RECIPES[description.get("recipe", "default")]
                policy = _network(path, "policy", *recipe[:2], description.get("policy"), file)
                cost = None
                if description.get("cost") is not None:
                    cost = _network(path, "cost", *recipe[2:], description["cost"], file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a safetensors file, or a damaged one ({brief(error)})") from error
        _check_sense(path, policy, cost)
        if cost is not None:
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
    if not (version.isascii() and version.isdecimal() and len(version) < 10):
        raise CheckpointError(f"{path}: unreadable version {brief(version)}")
    if int(version) > VERSION:
        raise CheckpointError(
            f"{path}: checkpoint version {version} is newer than this package reads ({VERSION}); upgrade the package"
        )
    try:
        description = parse_json(header["description"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: its description is missing or damaged ({brief(error)})") from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{path}: its description must be a mapping, got {brief(description)}")
    features = description.get("features")
    if not isinstance(features, list) or not covers(features):
        raise CheckpointError(f"{path}: made for other features than this package computes; train it again")
    for name, (kind, of) in METADATA.items():
        value = description.get(name)
        if name in description and not (type(value) is kind and all(type(part) is of for part in value)):
            raise CheckpointError(f"{path}: its {name} must be a {kind.__name__} of {of.__name__}, got {brief(value)}")
    if description.get("recipe", "default") not in RECIPES:
        raise CheckpointError(
            f"{path}: its recipe must be one of {', '.join(RECIPES)}, got {brief(description['recipe'])}"
        )
    if description.get("collectives") is not None:
        try:
            fits_of(description["collectives"])
        except ValueError as error:
            raise CheckpointError(f"{path}: its collectives are no measurement ({brief(error)})") from error
    return description


def _state(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor.detach().contiguous() for name, tensor in module.state_dict().items()}


def _network(path: Path, what: str, make: type, config_type: type, values: Any, file: Any) -> nn.Module:
    """One network with its weights. Its sizes are compared with what the file holds before memory is asked for."""
    sizes = list(values.values()) if isinstance(values, dict) else [values]
    if not all(type(size) is int and 1 <= size <= MAX_SIZE for size in sizes):
        raise CheckpointError(f"{path}: sizes of the {what} network must be from 1 to {MAX_SIZE}, got {brief(values)}")
    try:
        config = config_type(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its description does not fit this package ({brief(error)})") from error
    prefix = f"{what}."
    held = {name.removeprefix(prefix): file.get_slice(name) for name in file.keys() if name.startswith(prefix)}
    with FakeTensorMode():
        expected = make(config).state_dict()
    wrong = sorted(expected.keys() ^ held.keys()) or [
        name for name in expected if list(expected[name].shape) != held[name].get_shape()
    ]
    if wrong:
        raise CheckpointError(f"{path}: the {what} network does not fit this package (see {brief(wrong)})")
    network, state = make(config), {name: file.get_tensor(prefix + name) for name in held}
    for name, tensor in state.items():
        _check_values(path, f"{what} network", name, tensor, expected[name].dtype)
    network.load_state_dict(state)
    return network.eval()


def _check_values(path: Path, network: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise CheckpointError(f"{path}: the {network} holds {tensor.dtype} in {name}, not {dtype}")
    if tensor.isnan().any():
        raise CheckpointError(f"{path}: the {network} holds NaN in {name}")
    if tensor.isinf().any() and not name.endswith(UNBOUNDED):
        raise CheckpointError(f"{path}: the {network} holds infinite values in {name}")


def _check_sense(path: Path, policy: AnyPolicy, cost: CostNetwork | PaperCostNetwork | None) -> None:
    """Finite weights may still be none to compute with: too large, or scales of zero."""
    features_SF = feature_matrix(ORDINARY)
    with torch.no_grad():
        if not bool(policy.represent(features_SF).isfinite().all()):
            raise CheckpointError(f"{path}: the policy network computes no finite numbers for two ordinary tables")
        if cost is None:
            return
        cost_ms = cost.group_cost_ms(cost.encode(features_SF).sum(0, keepdim=True))[0]
    if not bool((cost_ms.isfinite() & (cost_ms >= 0)).all()):
        raise CheckpointError(f"{path}: the cost network predicts {cost_ms.tolist()} ms for two ordinary tables")
