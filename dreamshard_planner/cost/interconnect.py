# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What collectives take over links of which only the bandwidth is known.

Between GPUs they reach a share of it, which ``benchmarks/collectives_prior.py`` fits to times of NCCL that others
published. In an all-to-all between hosts each rank has its own part of the network, as NVIDIA's nccl-tests say
(issue 130). Reduce-scatters, all-gathers and all-reduces send each byte to another host once or twice, whatever the
number of ranks there, over the network of all of a host's ranks at once.

CPU ranks of one host have no link of their own: what any of them sends passes the memory that all of them share, also
on its way to another host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchrec.distributed.planner.types import Topology

from dreamshard_planner.cost.collectives import LATENCY_MS, LOOKUP_EXCHANGES, MAX_BYTES_PER_MS, CollectiveModel


@dataclass(frozen=True)
class Reached:
    """Shares of a bandwidth, and what a collective takes however little it moves."""

    inside: float
    """Of a rank's link to the others of its host."""
    all_to_all: float
    """Of a rank's network, in an all-to-all."""
    rings: float
    """Of the network of a whole host, where data passes from rank to rank: in rings and trees."""
    inside_ms: float
    between_ms: float


NCCL = Reached(inside=0.8, all_to_all=0.78, rings=0.72, inside_ms=0.02, between_ms=0.14)
"""Fitted by ``benchmarks/collectives_prior.py``."""
IN_FULL = Reached(inside=1.0, all_to_all=1.0, rings=1.0, inside_ms=LATENCY_MS, between_ms=LATENCY_MS)
"""Of backends that nothing is known of."""


@dataclass(frozen=True)
class Interconnect:
    """Hosts of alike ranks.

    All its models take the bytes that each rank sends to each peer, see
    :class:`~dreamshard_planner.cost.collectives.Collective`.
    """

    hosts: int
    ranks_per_host: int
    inside_bytes_per_ms: float
    """Of a rank's link to its host, to all peers together, one direction."""
    between_bytes_per_ms: float
    """Of a rank's part of the network."""
    reached: Reached = NCCL
    memory_bytes_per_ms: float = math.inf
    """Of a host, which all that its ranks exchange passes; infinite where each has a link past it."""

    @classmethod
    def of(cls, topology: Topology) -> Interconnect:
        """Of a topology's bandwidths."""
        per_host = min(topology.intra_group_size, topology.world_size)
        bandwidths, has_links = topology.comms_bandwidths, topology.compute_device == "cuda"
        return cls(
            -(-topology.world_size // per_host),
            per_host,
            bandwidths.intra_host_bw,
            bandwidths.inter_host_bw,
            NCCL if has_links else IN_FULL,
            math.inf if has_links else topology.ddr_mem_bw,
        )

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def all_to_all(self) -> CollectiveModel:
        """Between all ranks: as long as what each sends to its host, or to other hosts."""
        peers, others = max(1, self.ranks - 1), self.ranks - self.ranks_per_host
        inside = self._inside * peers / max(1, peers - others)
        return self._world(inside, self._all_to_all * peers / max(1, others))

    def lookups(self) -> CollectiveModel:
        """One all-to-all after the other; GPUs are taken to sort ids in no time."""
        model = self.all_to_all()
        return replace(model, latency_ms=LOOKUP_EXCHANGES * model.latency_ms)

    def reduce_scatter(self) -> CollectiveModel:
        """Between all ranks; an all-gather takes as long."""
        return self._world(self._inside, self._rings)

    def all_reduce(self) -> CollectiveModel:
        """Between all ranks; an n-th of the tensor counts as what a rank sends to each peer. A tree sends it to each
        other host once and back, where a ring does for each other rank."""
        once = (1 - 1 / self.ranks) / max(0.5, 1 - 1 / self.hosts)
        return self._world(self._inside / 2, self._rings / 2 * once, passes=2)

    def host_reduce_scatter(self) -> CollectiveModel:
        """Between the ranks of one host; an all-gather takes as long."""
        return self._model(self.ranks_per_host, self._inside, self.memory_bytes_per_ms, between=False)

    def across(self) -> CollectiveModel:
        """An all-to-all between the ranks of the same place on every host."""
        # As many go on side by side as a host has ranks.
        shared_bytes_per_ms = self.hosts * self.memory_bytes_per_ms / self.ranks_per_host
        return self._model(self.hosts, self._all_to_all, shared_bytes_per_ms, between=True)

    def all_to_one(self) -> CollectiveModel:
        """From all ranks to one, over its link to those of its host and over that to other hosts, one after the other;
        all are taken to send alike, itself among them."""
        if self.ranks == 1:
            return self._model(1, self.inside_bytes_per_ms, math.inf, between=False)
        inside = (self.ranks_per_host - 1) / self.inside_bytes_per_ms
        links = inside + (self.ranks - self.ranks_per_host) / self.between_bytes_per_ms
        ms_per_byte = (links + (self.ranks - 1) / self.memory_bytes_per_ms) / self.ranks
        # Of two ends, so that nothing counts but the bytes of all ranks together.
        model = self._model(2, MAX_BYTES_PER_MS, 1 / ms_per_byte, between=self.ranks_per_host == 1)
        return replace(model, latency_ms=LATENCY_MS)

    @property
    def _inside(self) -> float:
        return self.inside_bytes_per_ms * self.reached.inside

    @property
    def _all_to_all(self) -> float:
        return self.between_bytes_per_ms * self.reached.all_to_all

    @property
    def _rings(self) -> float:
        return self.ranks_per_host * self.between_bytes_per_ms * self.reached.rings

    def _world(self, inside: float, between: float, passes: int = 1) -> CollectiveModel:
        """Between all ranks, at the speed of the slower link among those that it needs; each byte passes memory so many
        times."""
        shared_bytes_per_ms = self.hosts * self.memory_bytes_per_ms / passes
        if self.hosts == 1:
            return self._model(self.ranks, inside, shared_bytes_per_ms, between=False)
        slowest = between if self.ranks_per_host == 1 else min(inside, between)
        return self._model(self.ranks, slowest, shared_bytes_per_ms, between=True)

    def _model(self, ranks: int, bytes_per_ms: float, shared_bytes_per_ms: float, between: bool) -> CollectiveModel:
        given = self.between_bytes_per_ms if between else min(self.inside_bytes_per_ms, self.memory_bytes_per_ms)
        latency_ms = self.reached.between_ms if between else self.reached.inside_ms
        prior = "prior from published times of NCCL, " if self.reached is NCCL else ""
        source = f"{prior}topology's {given * 1e3 / 1e9:.0f} GB/s, nothing measured"
        return CollectiveModel(ranks, bytes_per_ms, latency_ms, source, shared_bytes_per_ms)
