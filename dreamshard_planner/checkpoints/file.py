# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What must be so in a checkpoint's file before any of it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dreamshard_planner.cost.collectives import fits_of
from dreamshard_planner.cost.compute import ComputeCost, check_corrections
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.policy.network import Policy
from dreamshard_planner.support.documents import check_version, parsed
from dreamshard_planner.support.files import brief, check_readable, parse_json
from dreamshard_planner.workload.features import covers, feature_matrix
from dreamshard_planner.workload.tables import Workload

FORMAT = "dreamshard_planner"
VERSION = 3
"""Files of version 1 have no corrections."""
SHARDING_POLICY = 3
"""First version whose policies split tables; earlier ones only placed whole tables."""
MAX_SIZE = 4096
"""Widest layer of a network, and most of anything that its configuration counts."""
UNBOUNDED = ("_low", "_high")
"""Ends of the names of buffers that may be infinite: ranges of networks that have seen nothing."""
Network = TypeVar("Network", bound=nn.Module)
ORDINARY = tuple(Workload(f"{dim}", 10_000, dim, 512, 4.0, 1024.0, (1.0,) + (0.0,) * 16) for dim in (16, 128))


@dataclass(frozen=True)
class _Hardware:
    threads: Annotated[int, Field(ge=1)] = 1


@dataclass(frozen=True)
class _Counts:
    sets: int = 0
    test_sets: int = 0
    tasks: int = 0
    network_mape: tuple[float, float] | None = None
    """Of a validation, as the next two."""
    linear_mape: tuple[float, float] | None = None
    """Errors of a linear model, in files of earlier versions."""
    policy_over_rule: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Description:
    """What of a description is read again; the rest is for people."""

    recipe: str = "default"
    """Earlier versions had others."""
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
    """The metadata of a file, and how large its networks are; without reading them.

    Raises:
        CheckpointError: as :meth:`Checkpoint.load`, as far as that can be told.
    """
    with opened(path) as file:
        return description_of(path, file)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file, if it is one of safetensors; also what goes wrong while it is read names it."""
    check_readable(path, CheckpointError, "checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or a damaged one ({brief(error)})") from error


def description_of(path: Path, file: Any) -> dict[str, Any]:
    """The metadata of an open file, checked."""
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


def network_of(
    path: Path, what: str, make: Callable[[Any], Network], config_type: type[Any], values: Any, file: Any
) -> Network:
    """One network with its weights. Its sizes are compared with what the file holds before memory is asked for."""
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


def check_sense(path: Path, policy: Policy, cost: ComputeCost | None) -> None:
    """Finite weights may still be none to compute with: too large, or scales of zero."""
    features_SF = feature_matrix(ORDINARY)
    with torch.no_grad():
        if not policy.is_finite():
            raise CheckpointError(f"{path}: the policy network computes no finite scores")
        if cost is None:
            return
        cost_ms = cost.group_cost_ms(cost.encode(features_SF).sum(0, keepdim=True))[0]
    if not bool((cost_ms.isfinite() & (cost_ms >= 0)).all()):
        raise CheckpointError(f"{path}: the cost network predicts {cost_ms.tolist()} ms for two ordinary tables")
