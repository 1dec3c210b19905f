# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ranks that a plan is for: their hardware, their sharding groups, and one plan for all of them."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size, get_topology_domain_multiple, get_topology_group_world_size
from torchrec.distributed.planner.types import DeviceHardware, PlannerError, Storage, Topology
from torchrec.distributed.types import ShardingPlan

from dreamshard_planner import devices
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import resolve_for
from dreamshard_planner.devices import GB, Card, cores_of, gpu_of, listed_like, make_topology, speed_of
from dreamshard_planner.errors import DreamShardError, InputWarning
from dreamshard_planner.measure.hardware import total_bytes, usable_cores
from dreamshard_planner.search_space.modules import table_configs
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.formatting import checked, first_of, gb_per_s
from dreamshard_planner.support.reproducible import neutral
from dreamshard_planner.torchrec_components.compat import place_shard, resize_topology

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class RankHardware:
    """One rank's GPU, and the memory of its host."""

    card: Card | None
    """None on CPUs."""
    host_memory_bytes: int
    """Memory of the whole host, as far as the rank's cgroup may have it."""
    cores: float = math.inf
    """Ranks that the cores of the host can serve at once, with as many threads as this one."""

    @classmethod
    def here(cls, compute_device: str) -> RankHardware:
        """Read this process's hardware."""
        card = devices.read_card() if compute_device == "cuda" else None
        return cls(card, total_bytes(), usable_cores() / torch.get_num_threads())


def gathered(pg: dist.ProcessGroup, compute_device: Callable[[], str | None]) -> tuple[str, list[RankHardware]] | None:
    """Read the hardware of all ranks of a group, each its own; all ranks call this.

    Args:
        pg: the group.
        compute_device: called on rank 0 alone. Returns ``cuda``, ``cpu`` or ``mtia``, or None to read nothing.

    Returns:
        The kind of device, and the hardware of each rank; None if nothing was read.
    """
    with neutral():
        device = from_first(pg, compute_device)
        return None if device is None else (device, from_all(pg, lambda: RankHardware.here(device)))


def from_all(pg: dist.ProcessGroup, make: Callable[[], Thing]) -> list[Thing]:
    """Call ``make`` on all ranks, and return all results by rank on each of them; none waits for a rank that failed.

    Raises:
        Exception: the error of ``make``, on the rank where it failed.
        DreamShardError: on the other ranks, with rank and text; or a rank has ended.
    """
    if pg.size() == 1:
        return [make()]
    made, failed = None, None
    try:
        made = make()
    except Exception as error:
        failed = error
    results: list[Any] = [None] * pg.size()
    try:
        dist.all_gather_object(results, (made, failed and f"{type(failed).__name__}: {failed}"), group=pg)
    except RuntimeError as error:
        raise DreamShardError("another rank has ended") from (failed or error)
    if failed is not None:
        raise failed
    for rank, (_, text) in enumerate(results):
        if text is not None:
            raise DreamShardError(f"rank {rank} failed: {text}")
    return [thing for thing, _ in results]


def from_first(pg: dist.ProcessGroup, make: Callable[[], Thing]) -> Thing:
    """Call ``make`` on rank 0, and return its result on all ranks. Raises as :func:`from_all`."""
    return cast("Thing", from_all(pg, make if pg.rank() == 0 else lambda: None)[0])


def read_topology(compute_device: str, ranks: Sequence[RankHardware], on_host: int | None = None) -> Topology:
    """Make the topology of ranks: the bandwidths of the slowest card, and the memory of each rank's own.

    Args:
        compute_device: ``cuda``, ``cpu`` or ``mtia``.
        ranks: hardware of each rank.
        on_host: ranks of a host, or None to take those that TorchRec finds.
    """
    on_host = on_host or get_local_size(len(ranks))
    cores = min(rank.cores for rank in ranks)
    cards = {rank.card for rank in ranks if rank.card is not None}
    by_speed = sorted(cards, key=lambda card: (speed_of(card), card.name))
    bytes_per_ms: dict[str, Any] = {}
    if by_speed:
        like = [listed_like(card) for card in by_speed]
        networks = [gpu.network_bytes_per_s for gpu in like if gpu.network_bytes_per_s is not None]
        bytes_per_ms = {
            "hbm_mem_bw": speed_of(by_speed[0]) / 1e3,
            "hbm_to_ddr_mem_bw": min(gpu.host_bytes_per_s for gpu in like) / 1e3,
            "intra_host_bw": min(gpu.link_bytes_per_s for gpu in like) / 1e3,
            # A card without a published network has TorchRec's default.
            "inter_host_bw": min(networks) / 1e3 if len(networks) == len(like) else None,
        }
    return make_topology(
        len(ranks),
        compute_device,
        on_host,
        cards=dict.fromkeys(card.name for card in by_speed),
        pod_size=get_topology_domain_multiple(),
        cores=cores if compute_device == "cpu" and cores < min(on_host, len(ranks)) else None,
        rank_memory_bytes={
            "DDR": [rank.host_memory_bytes // on_host for rank in ranks],
            **({"HBM": [(rank.card or by_speed[0]).memory_bytes for rank in ranks]} if by_speed else {}),
        },
        **bytes_per_ms,
    )


def topology_here() -> tuple[Topology, str]:
    """Return the topology of the default process group, all of whose ranks are taken for alike, and its description.

    Raises:
        DreamShardError: there is no process group.
    """
    if not dist.is_initialized():
        raise DreamShardError(
            "there is no process group to take the topology from: give topology=Topology(world_size=..., "
            "compute_device=...), or call torch.distributed.init_process_group() first"
        )
    device = devices.device_of_ranks()
    alike = [RankHardware.here(device)] * dist.get_world_size()
    topology = read_topology(device, alike)
    return topology, hardware_in_words(topology, alike, "the driver of this rank")


def hardware_in_words(topology: Topology, ranks: Sequence[RankHardware], whose: str = "the driver") -> str:
    """Describe a topology that :func:`read_topology` made, in a sentence without its full stop.

    Args:
        topology: of all ranks.
        ranks: hardware of each rank.
        whose: driver that told it.
    """
    on_host = topology.local_world_size
    hosts = f" on {topology.world_size // on_host} hosts" if topology.world_size > on_host else ""
    host_memory = _sizes([device.storage.ddr for device in topology.devices])
    cards = [rank.card for rank in ranks if rank.card is not None]
    if not cards:
        kind = "CPU" if topology.compute_device == "cpu" else topology.compute_device
        cores = cores_of(topology)
        shared = "" if cores is None else f"; the ranks of a host share cores for {cores:g} of them"
        memory = f"{host_memory} of host memory each"
        return f"{topology.world_size} x {kind} rank{hosts}, read from the system: {memory}{shared}"
    counts = Counter(card.name for card in cards)
    named = " and ".join(f"{count} x {name}" for name, count in counts.items())
    slowest = " (the slowest card's)" if len(counts) > 1 else ""
    bandwidths = topology.comms_bandwidths
    links = [f"{gb_per_s(bandwidths.intra_host_bw)} within a host"] * (min(on_host, topology.world_size) > 1)
    links += [f"{gb_per_s(bandwidths.inter_host_bw)} between hosts"] * bool(hosts)
    text = (
        f"{named}{hosts}, read from {whose}: {_sizes([card.memory_bytes for card in cards])} each at "
        f"{gb_per_s(topology.hbm_mem_bw)}{slowest}, {gb_per_s(topology.hbm_to_ddr_mem_bw)} to {host_memory} of host "
        f"memory{''.join(f', {link}' for link in links)}"
    )
    for card in {card.name: card for card in cards if gpu_of(card.name) is None}.values():
        like, own = listed_like(card).title, card.memory_bytes_per_s is not None
        taken = "links are" if own else "bandwidth and links are"
        text += f"; {card.name} is not listed, and its {taken} those of {like}, the closest listed card"
    return text


def _sizes(sizes_bytes: Sequence[int]) -> str:
    least, most = min(sizes_bytes) / GB, max(sizes_bytes) / GB
    return f"{most:,.1f} GB" if f"{least:,.1f}" == f"{most:,.1f}" else f"{least:,.1f} to {most:,.1f} GB"


@dataclass(frozen=True, kw_only=True)
class ShardingGroups:
    """Sharding groups of ranks, the arguments of TorchRec's ``DMPCollection`` (2D parallelism).

    Every group holds all tables, sharded over its ranks. Replicas are averaged every few batches. A plan is for the
    ranks of one group; all groups follow it.
    """

    size: int
    """Ranks per group (``sharding_group_size``)."""
    sync_interval: int = 1
    """Batches from one averaging of the replicas to the next (``dmp_collection_sync_interval_batches``)."""
    use_inter_host_allreduce: bool = False
    """True if consecutive ranks form a group. By default a group takes every n-th rank, and consecutive ranks hold the
    replicas of a shard."""

    def __post_init__(self) -> None:
        for name in ("size", "sync_interval"):
            object.__setattr__(self, name, checked(f"{name} of sharding groups", getattr(self, name)))

    def replicas(self, world: Topology) -> int:
        """Return the number of groups, which is the number of replicas of each shard.

        Raises:
            DreamShardError: the ranks are no whole number of groups.
        """
        if world.world_size % self.size:
            raise DreamShardError(
                f"the topology's {world.world_size} ranks are no whole number of sharding groups of {self.size}: give "
                "the ranks of all groups together as world_size, and groups of a size that divides them"
            )
        return world.world_size // self.size

    def topology(self, world: Topology) -> Topology:
        """Return the topology of one group, each rank with the memory of its smallest replica."""
        replicas = self.replicas(world)
        one = copy.deepcopy(world)
        step, stride = (1, self.size) if self.use_inter_host_allreduce else (replicas, 1)
        storages = [
            [world.devices[place * step + replica * stride].storage for replica in range(replicas)]
            for place in range(self.size)
        ]
        devices = [
            DeviceHardware(
                rank=place,
                storage=Storage(*(min(getattr(s, kind) for s in alike) for kind in ("hbm", "ddr", "ssd"))),
                perf=world.devices[0].perf,
            )
            for place, alike in enumerate(storages)
        ]
        local, host = (
            min(self.size, max(1, ranks if self.use_inter_host_allreduce else ranks // replicas))
            for ranks in (world.local_world_size, world.intra_group_size)
        )
        resize_topology(one, self.size, local, host, devices)
        return one

    def sync_ms_per_byte(self, world: Topology) -> float:
        """Return the milliseconds per batch of averaging one byte of a rank's shards with its replicas.

        An all-reduce takes them, within a host if all replicas of a shard are on one.
        """
        replicas, host = self.replicas(world), world.intra_group_size
        reach = self.size * (replicas - 1) + 1 if self.use_inter_host_allreduce else replicas
        bandwidths = world.comms_bandwidths
        inside = host % reach == 0 or world.world_size <= host
        bytes_per_ms = bandwidths.intra_host_bw if inside else bandwidths.inter_host_bw
        return 2 * (replicas - 1) / replicas / bytes_per_ms / self.sync_interval


@dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """The ranks that a plan is for, and what is known of them."""

    topology: Topology
    """The ranks of one sharding group."""
    checkpoint: Checkpoint
    """Costs and policy for them."""
    sync_ms_per_byte: float = 0.0
    """Milliseconds of averaging the replicas of other sharding groups."""
    all_ranks: Topology | None = None
    """The ranks of all sharding groups; None without ``sharding_groups``."""
    hardware: str = ""
    """Description of the hardware that the topology was read from; empty if the topology was given."""

    @classmethod
    def of(
        cls,
        topology: Topology,
        checkpoint: str | Path | Checkpoint = "auto",
        groups: ShardingGroups | None = None,
        hardware: str = "",
    ) -> PlannedRanks:
        """Divide all ranks into sharding groups, if there are any.

        Raises:
            CheckpointError: the checkpoint can't be read.
            DreamShardError: the ranks are no whole number of sharding groups.
        """
        one, sync_ms_per_byte = topology, 0.0
        if groups is not None:
            one, sync_ms_per_byte = groups.topology(topology), groups.sync_ms_per_byte(topology)
        return cls(
            topology=one,
            checkpoint=resolve_for(one, checkpoint),
            sync_ms_per_byte=sync_ms_per_byte,
            all_ranks=None if groups is None else topology,
            hardware=hardware,
        )

    @property
    def groups(self) -> int:
        """Number of sharding groups, and so of replicas of each shard."""
        return 1 if self.all_ranks is None else self.all_ranks.world_size // self.topology.world_size


def plan_on_rank_0(make: Callable[[], ShardingPlan], pg: dist.ProcessGroup) -> ShardingPlan:
    """Call ``make`` on rank 0 of the group, and return its plan on every rank.

    Raises:
        BaseException: the error of ``make``, on rank 0.
        PlannerError, DreamShardError: on the other ranks, if ``make`` raised one of these, with its text.
        DreamShardError: on the other ranks, if ``make`` raised another error; names its type and text.
    """
    if pg.size() == 1:
        return make()
    message: list[Any] = [None, None]
    """The plan, and the error of the other ranks."""
    failed: BaseException | None = None
    try:
        if pg.rank() == 0:
            try:
                message[0] = make()
            except BaseException as error:  # an interrupt as well: the other ranks are waiting
                failed, message[1] = error, _elsewhere(error)
        with neutral():
            dist.broadcast_object_list(message, group_src=0, group=pg)
        if failed is not None:
            raise failed
        if message[1] is not None:
            raise message[1]
        return cast("ShardingPlan", message[0])
    finally:
        # An error holds this frame: without this it would keep itself, and the group, whose threads must not outlive
        # Python.
        del failed, message, pg


def _elsewhere(error: BaseException) -> Exception:
    """Return the error of the other ranks for one of rank 0, which need not pickle."""
    if isinstance(error, PlannerError):
        return PlannerError(str(error), error.error_type)
    text = f"planning on rank 0 ended with {type(error).__name__}: {error}"
    return DreamShardError(str(error) if isinstance(error, DreamShardError) else text)


def check_ranks(planned: int, all_ranks: Topology | None, ranks: int, in_groups: bool) -> None:
    """Check that a plan serves a process group.

    Args:
        planned: number of ranks that the plan is for.
        all_ranks: topology of all sharding groups; None without ``sharding_groups``.
        ranks: number of ranks in the process group.
        in_groups: whether these may form several sharding groups.

    Raises:
        DreamShardError: the plan is for other ranks.
    """
    if not in_groups and planned != ranks:
        raise DreamShardError(
            f"the planner's topology has {planned} ranks, and there are {ranks} to shard over: plan for all of them "
            "(sharding groups are for TorchRec's DMPCollection)"
        )
    if all_ranks is not None and ranks not in (all_ranks.world_size, planned):
        raise DreamShardError(
            f"the process group has {ranks} ranks, and the planner's topology {all_ranks.world_size} in sharding "
            f"groups of {planned}: give the topology of all ranks"
        )
    if ranks % planned:
        raise DreamShardError(
            f"the process group has {ranks} ranks, which are no whole number of sharding groups of the {planned} ranks "
            "that the planner's topology has"
        )


def check_tables(module: nn.Module, pg: dist.ProcessGroup) -> None:
    """Raise DreamShardError on all ranks, naming the table, if a rank has other tables than rank 0, which plans.

    All ranks call this.
    """

    @cache
    def sizes() -> dict[str, list[int]]:
        return {
            f"{path}.{name}".removeprefix("."): [config.num_embeddings, config.embedding_dim]
            for path, child in module.named_modules()
            for name, config in table_configs(child, deep=False).items()
        }

    def difference(first: dict[str, list[int]]) -> str | None:
        here = sizes()
        name = next((name for name in first | here if first.get(name) != here.get(name)), None)
        if name is None:
            return None
        there, own = (f"of {of[name]} rows and columns" if name in of else "missing" for of in (first, here))
        return f"table {name!r} is {there} on rank 0 and {own} on rank {pg.rank()}: build one model on all ranks"

    with neutral():
        first = from_first(pg, sizes)
        if told := next(filter(None, from_all(pg, lambda: difference(first))), None):
            raise DreamShardError(told)


def place_on_hosts(plan: ShardingPlan, topology: Topology) -> None:
    """Give shards the GPU that their rank has on the hosts of ``LOCAL_WORLD_SIZE``, in place.

    Topologies without ``local_world_size`` have one host. TorchRec then takes rank 8 to be on its ninth GPU, and its
    ``DistributedModelParallel`` ends in an error.

    Warns:
        InputWarning: the topology has other hosts.
    """
    planned = min(topology.local_world_size, topology.world_size)
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", planned))
    if topology.compute_device == "cpu" or on_host == planned:
        return
    warnings.warn(
        f"the topology has {planned} ranks on a host, and LOCAL_WORLD_SIZE is {on_host}: tables are "
        f"placed by that, and costs go by the topology; give Topology local_world_size={on_host}",
        InputWarning,
        stacklevel=4,
    )
    for module in plan.plan.values():
        for table in module.values():
            for shard in getattr(table.sharding_spec, "shards", ()):
                place_shard(shard, topology.compute_device, on_host)


def check_hosts(plan: ShardingPlan, topology: Topology) -> None:
    """Raise DreamShardError if tables lie over hosts, or pods, that are not the groups of ranks that TorchRec forms."""
    tables = {name: one.sharding_type for module in plan.plan.values() for name, one in module.items()}
    spread = [name for name, kind in tables.items() if kind in SHARDING_TYPES and SHARDING_TYPES[kind].span == "host"]
    if not spread or (formed := get_topology_group_world_size(topology.world_size)) == topology.intra_group_size:
        return
    pods = topology.intra_group_size // topology.local_world_size
    raise DreamShardError(
        f"{first_of(spread)} lie over {topology.intra_group_size} ranks each (the topology's local_world_size and "
        f"pod_size), and TorchRec forms groups of {formed} here: give the topology the ranks of a host that "
        "LOCAL_WORLD_SIZE says"
        + (f", and set TORCHREC_RESOLVED_POD_SIZE={pods} (before TorchRec 1.8, TOPOLOGY_DOMAIN_MULTIPLE)" * (pods > 1))
    )
