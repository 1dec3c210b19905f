# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints: versioned safetensors files with JSON metadata that training writes and planning reads.

Nothing in a file is executable, and all of it is checked before use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dreamshard_planner.cost.collectives import MeasuredCollectives, MeasuredOn
from dreamshard_planner.cost.correction import LEAST_SCALE, OPTIMIZERS, AdjustedCost
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.problem import ComputeCost, CostSource
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.support.documents import Amount, Count, Several, check_version, one_of, parsed
from dreamshard_planner.support.files import check_readable, parse_json, write_whole
from dreamshard_planner.support.formatting import brief
from dreamshard_planner.support.reproducible import digest, neutral
from dreamshard_planner.workload.tables import NETWORK_FEATURES, Workload, feature_matrix

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

FORMAT = "dreamshard_planner"
VERSION = 4
MAX_SIZE = 4096  # of any number in a network's configuration
UNBOUNDED = ("_low", "_high")
"""Ends of the names of buffers that may be infinite: ranges of untrained networks."""
Network = TypeVar("Network", bound=nn.Module)
ORDINARY = tuple(Workload(f"{dim}", 10_000, dim, 512, 4.0, 1024.0, (1.0,) + (0.0,) * 16) for dim in (16, 128))
_Scale = Annotated[float, Field(ge=LEAST_SCALE, allow_inf_nan=False)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rates = tuple[_Scale, Amount, Amount, Amount, Amount]


@dataclass(frozen=True)
class Check:
    """Mean error of the costs of one optimizer and direction on held-out sets."""

    after: Amount
    sets: Several = 1


@dataclass(frozen=True)
class Correction:
    """A calibration, or costs learned from training steps."""

    source: Annotated[str, Field(validation_alias="from")] = ""
    """Name of the corrected checkpoint."""
    digest: str = ""
    """Its digest; files of earlier releases lack it."""
    runs: Count = 0
    """Observed trainings that costs were learned from; 0 for none."""
    title: str = ""
    said: str = ""
    checked: str = ""
    checks: tuple[Check, ...] = ()
    bytes_per_ms: tuple[_Rate, _Rate] | None = None
    """Bandwidths of memory and of the link to the host whose costs were corrected."""
    embedding_share: Amount | None = None
    never_observed: tuple[str, ...] | None = None

    @property
    def error(self) -> float | None:
        """Mean error on held-out sets; None if none were held out."""
        sets = sum(check.sets for check in self.checks)
        return sum(check.after * check.sets for check in self.checks) / sets if sets else None


@dataclass(frozen=True)
class Validation:
    """Number of the policy's tasks, and errors of the network, on held-out tables."""

    tasks: Count | None = None
    network_mape: tuple[float, float] | None = None


@dataclass(frozen=True)
class Known:
    """The metadata of a checkpoint that planning reads; the others are for people."""

    hardware_name: str = "?"
    hardware: MeasuredOn = MeasuredOn()
    calibration: Correction = Correction()
    learned: Correction = Correction()
    validation: Validation = Validation()
    collectives: MeasuredCollectives | None = None
    corrections: dict[Annotated[str, one_of(OPTIMIZERS)], tuple[_Rates, _Rates]] = field(default_factory=dict)


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
        known, compute = self.known, self.cost or RooflineCost.of_topology(topology)
        if not known.corrections:
            return compute
        # Corrections are of these bandwidths, whatever the topology says.
        if self.cost is None and (rates := known.learned.bytes_per_ms) is not None:
            compute = RooflineCost.of_bandwidths(known.hardware.device, *rates, known.hardware.name)
        return AdjustedCost(compute, known.corrections, known.learned.title)

    @cached_property
    def known(self) -> Known:
        """The metadata that planning reads; raises CheckpointError if they cannot be."""
        return parsed(Known, self.metadata, self.name, CheckpointError)

    @property
    def has_costs(self) -> bool:
        """True if kernels were measured or observed; False if bandwidths give the costs."""
        return self.cost is not None or self.known.learned.runs > 0

    @property
    def measured_on(self) -> str:
        """Hardware that its network was measured on, before any correction."""
        return re.split(", (?:calibrated|learned) on ", self.known.hardware_name)[0]

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
        """Read a checkpoint.

        Raises:
            CheckpointError: the file is missing, damaged, of another version, or does not fit this package; names the
                file and the reason.
        """
        path = Path(path)
        check_readable(path, CheckpointError, "checkpoint")
        try:
            with safe_open(path, framework="pt") as file:
                description = _description_of(path, file.metadata() or {})
                policy = _network_of(path, "policy", Policy, PolicyConfig, description.get("policy"), file)
                cost = None
                if description.get("cost") is not None:
                    prior = RooflineCost.of_card("any") if "cost.prior" in file.keys() else None  # its figures are read
                    make = partial(CostNetwork, prior=prior)
                    cost = _network_of(path, "cost", make, CostNetworkConfig, description["cost"], file)
        except (SafetensorError, OSError) as error:
            hint = "" if path.suffix == ".safetensors" else "; cost checkpoints are .safetensors files"
            raise CheckpointError(f"{path}: not a safetensors file, or a damaged one ({brief(error)}){hint}") from error
        _check_sense(path, policy, cost)
        metadata = {key: value for key, value in description.items() if key not in ("features", "policy", "cost")}
        policy.requires_grad_(False)
        checkpoint = cls(policy, cost, metadata, path.name)
        if cost is not None:
            cost.requires_grad_(False)
            # The title of a learned checkpoint names its hardware.
            known = checkpoint.known
            hardware = checkpoint.measured_on if known.learned.runs else known.hardware_name
            cost.source = CostSource("network", f"{path.name}, measured on {hardware}")
        return checkpoint


def _description_of(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Return the checked metadata of an open file."""
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: a safetensors file, but not a checkpoint of dreamshard_planner")
    version = header.get("version", "")
    number = int(version) if version.isascii() and version.isdecimal() and len(version) < 10 else version
    remedy = "make it again with dreamshard train, or dreamshard calibrate or learn for corrections"
    check_version(path, number, VERSION, remedy, CheckpointError)
    try:
        description = parse_json(header["description"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: its description is missing or damaged ({brief(error)})") from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{path}: its description must be a mapping, got {brief(description)}")
    features = description.get("features")
    if not isinstance(features, list) or tuple(features[: len(NETWORK_FEATURES)]) != NETWORK_FEATURES:
        raise CheckpointError(f"{path}: made for other features than this package computes; train it again")
    parsed(Known, description, path, CheckpointError)
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
        dtype, bounded = expected[name].dtype, not name.endswith(UNBOUNDED)
        if tensor.dtype != dtype or tensor.isnan().any() or (bounded and tensor.isinf().any()):
            raise CheckpointError(f"{path}: the {what} network holds NaN, infinite values or no {dtype} in {name}")
    try:
        network.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(f"{path}: the {what} network: {error}") from error
    return network.eval()


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
