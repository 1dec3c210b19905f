# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding problem beside the TorchRec options that it was made from: parts, units, ranks, and fused groups.

Shards of one option that cost and need the same are one part. Shards that lie on consecutive ranks are a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torchrec.distributed.planner.types import Shard, ShardingOption, Topology
from torchrec.distributed.types import CacheParams

from dreamshard_planner.cost.collectives import Collective
from dreamshard_planner.cost.problem import Problem, Sharding, Unit
from dreamshard_planner.cost.roofline import DENSE_PASSES
from dreamshard_planner.search_space.kernels import FUSED, fuses_as, is_known, kernel_of
from dreamshard_planner.search_space.options import (
    cannot_lie_so,
    fqn_of,
    ranks_of,
    refused,
    runs_of,
    same_option,
    set_ranks,
    type_of,
)
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, Ranks
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Table, Workload


@dataclass(frozen=True)
class Part:
    """Shards of one option that cost and need the same."""

    option: ShardingOption
    shard: Shard
    """One of the shards."""
    workload: Workload
    group: int
    """Index of the fused group."""
    exchanges: tuple[tuple[Collective, float], ...]
    """Collectives that carry lookups and outputs, and bytes to each peer."""

    @property
    def is_estimated(self) -> bool:
        """True if the kernel is unknown, so that the shard's perf is its cost."""
        return not is_known(self.option.compute_kernel)

    @property
    def dense_elements(self) -> float:
        """Elements of the shard-sized gradient of a dense kernel; 0 for fused kernels."""
        work = self.workload
        return work.rows * work.dim if kernel_of(self.option.compute_kernel).dense else 0.0

    @property
    def dense_passes(self) -> float:
        """Times that a dense gradient's size passes through memory beside the kernels."""
        return DENSE_PASSES[self.workload.optimizer]

    @property
    def ssd_bytes(self) -> float:
        """Bytes of the distinct rows that a batch reads from SSDs."""
        work = self.workload
        return work.distinct_rows * work.dim * work.weight_bytes if work.memory == "ssd" else 0.0

    @property
    def synced_bytes(self) -> float:
        """Bytes that ``DMPCollection.sync`` averages with replicas in other sharding groups: weights and optimizer
        states of fused kernels."""
        work = self.workload
        if fuses_as(self.option.compute_kernel) != FUSED:
            return 0.0
        states = {"sgd": 0, "adagrad": work.dim}.get(work.optimizer, 1)
        return work.rows * (work.dim * work.weight_bytes + states * OUTPUT_BYTES)


@dataclass(frozen=True)
class ReadProblem:
    """A sharding problem and the TorchRec options that it was made from."""

    problem: Problem
    options: tuple[tuple[ShardingOption, ...], ...]
    """Options by table, in the problem's order."""
    parts: tuple[Part, ...]

    @property
    def workload_P(self) -> tuple[Workload, ...]:
        """Work of each part on its rank."""
        return tuple(part.workload for part in self.parts)

    def column(self, name: str) -> torch.Tensor:
        """Return a property of all parts, float64 [P]."""
        return torch.tensor([getattr(part, name) for part in self.parts], dtype=torch.float64)

    def assign(self, sharding: Sharding) -> list[ShardingOption]:
        """Return the chosen options after setting the ranks of their shards."""
        chosen = []
        for options, units, option, positions in zip(
            self.options, self.problem.tables, sharding.options, sharding.positions, strict=True
        ):
            set_ranks(options[option], units[option].ranks(positions))
            chosen.append(options[option])
        return chosen

    def sharding(self, plan: Sequence[ShardingOption]) -> Sharding:
        """Return a plan with ranks as a sharding.

        Raises:
            PlannerError: a table is missing, or is sharded as no option of this problem.
        """
        given = {option.fqn: option for option in plan}
        options, positions = [], []
        for choices, units in zip(self.options, self.problem.tables, strict=True):
            option = given.get(choices[0].fqn)
            index = next(
                (i for i, choice in enumerate(choices) if option is not None and same_option(choice, option)), None
            )
            if option is None or index is None:
                raise refused(f"the plan has no sharding of table {fqn_of(choices[0])!r} that could be rated")
            options.append(index)
            positions.append(positions_of(option, units[index].units))
        return Sharding(tuple(options), tuple(positions))


def parts_of(
    option: ShardingOption,
    whole: Workload,
    group: int,
    exchanges: Callable[[Workload], Iterable[tuple[Collective, float]]],
    with_storage: bool,
) -> tuple[list[Part], list[int]]:
    """Return the parts of an option, and the index of the part of each of its shards.

    Args:
        option: with its shards.
        whole: work of the whole table.
        group: fused group of the parts.
        exchanges: makes the exchanges of a part.
        with_storage: whether storage is estimated already.
    """
    index_of: dict[tuple[object, ...], int] = {}
    parts: list[Part] = []
    indices: list[int] = []
    for run in runs_of(option):
        shard = run.first
        # Row blocks differ by their place if the looked-up ids are known.
        differ = whole.ids is not None and shard.size[0] < whole.rows
        for first_row in [run.offset(index)[0] for index in range(run.count)] if differ else [shard.offset[0]]:
            price = None if is_known(option.compute_kernel) else shard.perf
            key = (*shard.size, shard.storage if with_storage else None, first_row if differ else None, price)
            if key not in index_of:
                # Columns of a quantized table's tensor may be bytes.
                columns = shard.size[1] * whole.dim // max(1, option.tensor.shape[1])
                workload = whole.part(shard.size[0], columns, first_row)
                index_of[key] = len(parts)
                parts.append(Part(option, shard, workload, group, tuple(exchanges(workload))))
            indices += [index_of[key]] * (1 if differ else run.count)
    return parts, indices


def sent_bytes(parts: Sequence[Part]) -> tuple[list[Collective], torch.Tensor]:
    """Return the collectives of parts, and the bytes that each part sends to each peer, float64 [P, C]; one column of
    zeros if nothing is exchanged."""
    columns: dict[Collective, int] = {}
    for part in parts:
        for collective, _ in part.exchanges:
            columns.setdefault(collective, len(columns))
    bytes_PC = torch.zeros(len(parts), max(1, len(columns)), dtype=torch.float64)
    for row, part in enumerate(parts):
        for collective, sent in part.exchanges:
            bytes_PC[row, columns[collective]] = sent
    return list(columns), bytes_PC


_of_option = attrgetter("stochastic_rounding", "bounds_check_mode", "enforce_hbm")
_of_cache = attrgetter("algorithm", "reserved_memory", "precision", "prefetch_pipeline", "multipass_prefetch_config")
_NO_CACHE = CacheParams()
_SET = (
    "stochastic_rounding",
    "bounds_check_mode",
    "enforce_hbm",
    "cache_algorithm",
    "cache_reserved_memory",
    "cache_precision",
    "prefetch_pipeline",
    "multipass_prefetch_config",
)
"""Fused parameters that options set. The load factor is none of them: a kernel has the mean of its tables'."""


def set_fused_params(option: ShardingOption, of_sharder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fused parameters of an option, else of its sharder, as
    ``torchrec.distributed.utils.add_params_from_parameter_sharding`` sets them."""
    own = _of_option(option) + _of_cache(option.cache_params or _NO_CACHE)
    return {name: of_sharder.get(name) if value is None else value for name, value in zip(_SET, own, strict=True)}


def group_key(option: ShardingOption, table: Table, config: Any, fused_params: dict[str, Any]) -> Hashable:
    """Return the fields that must agree for TorchRec to fuse two shards of a rank into one kernel
    (``torchrec.distributed.embedding_sharding.group_tables``, once per module and sharding type)."""
    tensor = option.tensor
    key_value = kernel_of(option.compute_kernel).store
    return (
        option.path,
        option.sharding_type,
        fuses_as(option.compute_kernel),
        str(tensor.dtype),
        str(getattr(config, "data_type", None)),
        str(getattr(config, "pooling", None)),
        table.weighted,
        getattr(option, "has_feature_processor", False),
        table.optimizer,
        repr(compat.optimizer_classes(tensor)),
        repr(compat.optimizer_arguments(tensor)),
        table.pooled,
        option.name if fused_params.get("use_one_tbe_per_table") or not is_known(option.compute_kernel) else None,
        fused_params.get("output_dtype"),
        tuple(set_fused_params(option, fused_params).values()),
        repr(getattr(option, "key_value_params", None)) if key_value else None,
        option.shards[0].size[1] if table.prefetched or key_value else None,
    )


def impossible_types(topology: Topology) -> dict[str, str]:
    """Return the sharding types that the topology rules out, and why: TorchRec forms groups of whole hosts only."""
    ranks, host = topology.world_size, topology.intra_group_size
    of_hosts = [kind for kind, spec in SHARDING_TYPES.items() if spec.span == "host"]
    return dict.fromkeys(of_hosts, f"{ranks} ranks are no whole number of hosts of {host}") if ranks % host else {}


def num_ranks(ranks: Ranks, topology: Topology) -> int:
    """Return the number of these ranks in the topology."""
    return {"rank": 1, "host": topology.intra_group_size, "world": topology.world_size}[ranks]


def units_of(option: ShardingOption, parts: Sequence[int], topology: Topology) -> tuple[Unit, ...]:
    """Group the option's shards, given by their parts, into units.

    Raises:
        PlannerError: the shards do not fill units, or the topology has incomplete hosts.
    """
    span, impossible = num_ranks(type_of(option).span, topology), impossible_types(topology)
    if why := impossible.get(option.sharding_type):
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} belongs on one host, and {why}: give Topology "
            "a local_world_size (and pod_size) that divides its world_size"
        )
    if not parts or len(parts) % span:
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} is to be sharded {option.sharding_type} in {len(parts)} shards, "
            f"which do not fill units of {span} ranks"
        )
    return tuple(Unit(tuple(parts[first : first + span])) for first in range(0, len(parts), span))


def positions_of(option: ShardingOption, units: Sequence[Unit]) -> tuple[int, ...]:
    """Return the position of each of an option's units, from the ranks of its shards.

    Raises:
        PlannerError: TorchRec would not run the shards on these ranks.
    """
    positions, ranks = [], iter(ranks_of(option))
    for unit in units:
        here = [next(ranks) for _ in range(unit.span)]
        position = (here[0] or 0) // unit.span
        if here != list(unit.ranks(position)):
            raise cannot_lie_so(
                f"table {fqn_of(option)!r} is sharded {option.sharding_type} on ranks {here}, which "
                "TorchRec would not run so"
            )
        positions.append(position)
    return tuple(positions)
