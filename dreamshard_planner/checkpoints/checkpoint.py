# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints: versioned safetensors files with JSON metadata that training writes and planning reads.

Nothing in a file is executable, and all of it is checked before use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dreamshard_planner import driver
from dreamshard_planner.checkpoints import user_folder
from dreamshard_planner.cost.collectives import fits_of
from dreamshard_planner.cost.compute import AdjustedCost, ComputeCost, CostSource, check_corrections
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.devices import card_of
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.support.documents import check_version, parsed
from dreamshard_planner.support.files import brief, check_readable, parse_json, write_whole
from dreamshard_planner.support.fingerprint import digest
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.features import NETWORK_FEATURES, covers, feature_matrix
from dreamshard_planner.workload.tables import Workload

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

SHIPPED = Path(__file__).parent
FORMAT = "dreamshard_planner"
VERSION = 4
"""Files of version 1 have no corrections."""
SWEEPING_POLICY = 4
"""First version whose policies play today's estimated MDP; the policy that ships takes the place of earlier ones."""
MAX_SIZE = 4096  # of any number in a network's configuration
UNBOUNDED = ("_low", "_high")
"""Ends of the names of buffers that may be infinite: ranges of untrained networks."""
Network = TypeVar("Network", bound=nn.Module)
ORDINARY = tuple(Workload(f"{dim}", 10_000, dim, 512, 4.0, 1024.0, (1.0,) + (0.0,) * 16) for dim in (16, 128))


@dataclass(frozen=True)
class Checkpoint:
    """A policy, and the cost network that it was trained on; None for the roofline model."""

    policy: Policy
    cost: CostNetwork | None
    """Fitted network; :meth:`compute_cost` adds the corrections in the metadata."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Hardware, library versions, dataset digest, validation errors and more."""
    name: str = "unsaved"
    why: str = ""
    """Reason why ``auto`` took it, if the user keeps checkpoints."""

    def compute_cost(self, topology: Topology) -> ComputeCost:
        """Return the cost model for planning on a ``torchrec.distributed.planner.Topology``."""
        learned, corrections = self.metadata.get("learned"), self.metadata.get("corrections")
        compute: ComputeCost = self.cost or RooflineCost.of_topology(topology)
        # Corrections are of these bandwidths, whatever the topology says.
        if self.cost is None and learned and corrections:
            hardware, (memory, link) = self.metadata["hardware"], learned["bytes_per_ms"]
            compute = RooflineCost.of_bandwidths(hardware["device"], memory, link, hardware.get("name"))
        return AdjustedCost(compute, corrections, (learned or {}).get("title", "")) if corrections else compute

    @property
    def measured_on(self) -> str:
        """Hardware that its network was measured on, before any correction."""
        return re.split(", (?:calibrated|learned) on ", self.metadata.get("hardware_name", "?"))[0]

    @neutral()
    def digest(self) -> str:
        """Return the SHA-256 of networks and metadata in hexadecimal, without ``name`` and ``why``."""
        networks = [
            None if network is None else (network.config, network.state_dict()) for network in (self.policy, self.cost)
        ]
        return digest((networks, self.metadata))

    @neutral()
    def save(self, path: str | Path) -> None:
        """Write or replace the file; raises FileError if that fails."""
        tensors = _state("policy", self.policy) | (_state("cost", self.cost) if self.cost is not None else {})
        description = {
            **self.metadata,
            "features": list(NETWORK_FEATURES),
            "policy": asdict(self.policy.config),
            "cost": None if self.cost is None else asdict(self.cost.config),
        }
        header = {"format": FORMAT, "version": str(VERSION), "description": json.dumps(description, sort_keys=True)}
        write_whole(path, serialize(tensors, metadata=header))

    @classmethod
    @neutral()
    def load(cls, path: str | Path) -> Checkpoint:
        """Read a checkpoint. Files before version 4 hold a policy of another estimated MDP; :func:`prior_policy` takes
        its place.

        Raises:
            CheckpointError: the file is missing, damaged, of a newer version, or does not fit this package; names the
                file and the reason.
        """
        path = Path(path)
        with _opened(path) as file:
            description = _description_of(path, file)
            if int(file.metadata()["version"]) < SWEEPING_POLICY:
                policy = prior_policy()
            else:
                policy = _network_of(path, "policy", Policy, PolicyConfig, description.get("policy"), file)
            cost = None
            if description.get("cost") is not None:
                prior = RooflineCost.of_gpu("h100") if "cost.prior" in file.keys() else None  # its figures are read
                make = partial(CostNetwork, prior=prior)
                cost = _network_of(path, "cost", make, CostNetworkConfig, description["cost"], file)
        _check_sense(path, policy, cost)
        metadata = {key: value for key, value in description.items() if key not in ("features", "policy", "cost")}
        policy.requires_grad_(False)
        checkpoint = cls(policy, cost, metadata, path.name)
        if cost is not None:
            cost.requires_grad_(False)
            # The title of a learned checkpoint names its hardware.
            hardware = checkpoint.measured_on if "learned" in metadata else metadata.get("hardware_name", "?")
            cost.source = CostSource("network", f"{path.name}, measured on {hardware}")
        return checkpoint


@cache
def prior_policy() -> Policy:
    """Return the policy that ships: trained on costs by bandwidths, and the start of every other training."""
    return Checkpoint.load(SHIPPED / "roofline.safetensors").policy


def resolve(
    checkpoint: str | Path | Checkpoint,
    compute_device: str,
    threads: int | None = None,
    card: str | None = None,
) -> Checkpoint:
    """Return the checkpoint to plan with.

    ``"auto"`` takes the user's own (:mod:`dreamshard_planner.checkpoints.user_folder`) measured on the processor or
    card that is planned for. Else it takes the one that ships for that card or for CPUs; without any, the roofline
    model.

    Args:
        checkpoint: a :class:`Checkpoint`, a path, ``"roofline"`` or ``"auto"``.
        compute_device: ``cpu`` or ``cuda``.
        threads: of a rank, to choose among the user's own. Default: this process's.
        card: the driver's name of the GPU, or the processor's name. Default: the one that this process sees.

    Raises:
        CheckpointError: the file cannot be read; for ``"auto"``, any of the user's own cannot, since plans would use
            other costs than the user measured.
    """
    if checkpoint == "auto":
        checkpoint = _auto(compute_device, threads, card)
    elif checkpoint == "roofline":
        checkpoint = shipped(SHIPPED, "roofline")
    return checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.load(checkpoint)


def resolve_for(topology: Topology, checkpoint: str | Path | Checkpoint) -> Checkpoint:
    """Return the checkpoint for the devices of a topology; see :func:`resolve`."""
    return resolve(checkpoint, topology.compute_device, card=card_of(topology))


def _auto(compute_device: str, threads: int | None, card: str | None) -> Checkpoint:
    """Return one of the user's own, else the one that ships."""
    try:
        described = {path: describe(path) for path in user_folder.files()}
    except OSError as error:  # such as another user's home, in which this one cannot have kept anything
        made = _shipped(compute_device, card)
        return replace(
            made, why=f"{made.name} ships: {user_folder.folder()}, for your own, cannot be read ({error.strerror})"
        )
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; checkpoint='auto' looks at all that you keep there: remove the file, or name a checkpoint"
        ) from error
    alike = {
        path: metadata
        for path, metadata in described.items()
        if metadata.get("hardware", {}).get("device") == compute_device
    }
    if not alike:
        return _shipped(compute_device, card)
    here = card or user_folder.hardware_here(compute_device)  # may ask for the card, which starts CUDA
    best = user_folder.nearest(alike, here, threads or torch.get_num_threads())
    if best is None:
        made = _shipped(compute_device, card)
        which = f"was measured on {here or 'a card that is here'}"
        return replace(made, why=f"{made.name} ships: none of your own in {user_folder.folder()} {which}")
    found = best.stat()
    why = f"{best.name} is one of your own checkpoints, in {best.parent}, and was measured on what is here, {here}"
    return replace(_loaded(best, found.st_mtime_ns, found.st_size, found.st_ino), why=why)


@cache
def _loaded(path: Path, modified_ns: int, size: int, inode: int) -> Checkpoint:
    """Load a file once for each of its states."""
    return Checkpoint.load(path)


def _shipped(compute_device: str, card: str | None) -> Checkpoint:
    """Return the checkpoint that ships for a card, by default the one that this process sees."""
    if card is None and compute_device == "cuda" and (found := driver.read_card()) is not None:
        card = found.name
    return shipped(SHIPPED, compute_device, card)


def measured_name(compute_device: str, card: str) -> str:
    """Return the file name of a device's measured checkpoint: ``cpu``, or the card's name."""
    return "cpu" if compute_device == "cpu" else user_folder.slug(card)


@cache
def shipped(folder: Path, compute_device: str, card: str | None = None) -> Checkpoint:
    """Return the checkpoint in ``folder`` for a device, such as ``nvidia-h200.safetensors``, else ``roofline``."""
    measured = folder / f"{measured_name(compute_device, card) if card else compute_device}.safetensors"
    return Checkpoint.load(measured if measured.is_file() else folder / "roofline.safetensors")


@dataclass(frozen=True)
class _Hardware:
    threads: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True)
class _Counts:
    sets: int = 0
    test_sets: int = 0
    tasks: int = 0
    network_mape: tuple[float, float] | None = None
    linear_mape: tuple[float, float] | None = None
    """Errors of a linear model, in old files."""
    policy_over_rule: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Description:
    """Checked fields of a description; the others are for people."""

    recipe: str = "default"
    hardware_name: str = ""
    hardware: _Hardware = _Hardware()
    pools: tuple[str, ...] = ()
    extra_pools: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    dataset: _Counts = _Counts()
    calibration: _Counts = _Counts()
    validation: _Counts = _Counts()
    collectives: dict[str, Any] | None = None
    learned: dict[str, Any] | None = None
    corrections: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.recipe != "default":
            raise ValueError(
                f"its networks are of recipe {brief(self.recipe)}, which this package no longer has: dreamshard train "
                "or dreamshard fit make others from the same dataset"
            )
        if self.collectives is not None:
            fits_of(self.collectives)
        check_corrections(self.corrections)


def describe(path: Path) -> dict[str, Any]:
    """Return a file's metadata without reading its networks; raises CheckpointError as :meth:`Checkpoint.load`."""
    with _opened(path) as file:
        return _description_of(path, file)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; errors while it is read name it."""
    check_readable(path, CheckpointError, "checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or a damaged one ({brief(error)})") from error


def _description_of(path: Path, file: Any) -> dict[str, Any]:
    """Return the checked metadata of an open file."""
    header = file.metadata() or {}
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: a safetensors file, but not a checkpoint of dreamshard_planner")
    version = header.get("version", "")
    number = int(version) if version.isascii() and version.isdecimal() and len(version) < 10 else version
    check_version(path, number, range(1, VERSION + 1), "", CheckpointError)
    try:
        description = parse_json(header["description"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: its description is missing or damaged ({brief(error)})") from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{path}: its description must be a mapping, got {brief(description)}")
    features = description.get("features")
    if not isinstance(features, list) or not covers(features):
        raise CheckpointError(f"{path}: made for other features than this package computes; train it again")
    parsed(_Description, description, path, CheckpointError)
    return description


def _network_of(
    path: Path, what: str, make: Callable[[Any], Network], config_type: type[Any], values: Any, file: Any
) -> Network:
    """Return a network with its weights; sizes are checked before memory is allocated."""
    config = parsed(config_type, values, f"{path}: the {what} network", CheckpointError)
    if not all(1 <= size <= MAX_SIZE for size in asdict(config).values()):
        raise CheckpointError(f"{path}: sizes of the {what} network must be from 1 to {MAX_SIZE}, got {brief(values)}")
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
    try:
        network.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(f"{path}: the {what} network: {error}") from error
    return network.eval()


def _check_values(path: Path, network: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise CheckpointError(f"{path}: the {network} holds {tensor.dtype} in {name}, not {dtype}")
    if tensor.isnan().any():
        raise CheckpointError(f"{path}: the {network} holds NaN in {name}")
    if tensor.isinf().any() and not name.endswith(UNBOUNDED):
        raise CheckpointError(f"{path}: the {network} holds infinite values in {name}")


def _check_sense(path: Path, policy: Policy, cost: ComputeCost | None) -> None:
    """Raise CheckpointError unless the networks compute finite results: weights may be too large, scales zero."""
    features_SF = feature_matrix(ORDINARY)
    with torch.no_grad():
        if not policy.is_finite():
            raise CheckpointError(f"{path}: the policy network computes no finite scores")
        if cost is None:
            return
        cost_ms = cost.group_cost_ms(cost.encode(features_SF).sum(0, keepdim=True))[0]
    if not bool((cost_ms.isfinite() & (cost_ms >= 0)).all()):
        raise CheckpointError(f"{path}: the cost network predicts {cost_ms.tolist()} ms for two ordinary tables")


def _state(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
