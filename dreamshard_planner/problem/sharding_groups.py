# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""2D parallelism, TorchRec's ``DMPCollection``: tables are sharded over groups of ranks, every group holds all of them,
and replicas are averaged every few batches. A plan is for the ranks of one group; all groups follow it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torchrec.distributed.planner.types import DeviceHardware, Storage, Topology

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.torchrec_components.compat import resize_topology


@dataclass(frozen=True, kw_only=True)
class ShardingGroups:
    """How ranks form sharding groups; arguments of TorchRec's ``DMPCollection`` and of its train pipelines.

    Raises:
        ValueError: ranks of a group, or batches, that are no whole number above 0.
    """

    size: int
    """Ranks of a group (``sharding_group_size``)."""
    sync_interval: int = 1
    """Batches from one averaging of the replicas to the next (``dmp_collection_sync_interval_batches``)."""
    use_inter_host_allreduce: bool = False
    """Whether ranks that follow on each other form a group, and replicas lie on other hosts. By default the replicas of
    a shard are such ranks, and a group takes every n-th."""

    def __post_init__(self) -> None:
        for name in ("size", "sync_interval"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of sharding groups must be a whole number above 0, got {value!r}")

    def replicas(self, world: Topology) -> int:
        """Groups, and so replicas of each shard.

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
        """The ranks of one group, out of those of all: on every host as many as it has there, each with the memory of
        the least of its replicas."""
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
        local, host = (self._on_host(ranks, replicas) for ranks in (world.local_world_size, world.intra_group_size))
        resize_topology(one, self.size, local, host, devices)
        return one

    def sync_ms_per_byte(self, world: Topology) -> float:
        """Milliseconds of a batch that averaging one byte of a rank's shards with its replicas takes: the bandwidth of
        an all-reduce, within a host where all replicas of a shard are on one."""
        replicas, host = self.replicas(world), world.intra_group_size
        reach = self.size * (replicas - 1) + 1 if self.use_inter_host_allreduce else replicas
        bandwidths = world.comms_bandwidths
        inside = host % reach == 0 or world.world_size <= host
        bytes_per_ms = bandwidths.intra_host_bw if inside else bandwidths.inter_host_bw
        return 2 * (replicas - 1) / replicas / bytes_per_ms / self.sync_interval

    def _on_host(self, host: int, replicas: int) -> int:
        return min(self.size, max(1, host if self.use_inter_host_allreduce else host // replicas))
