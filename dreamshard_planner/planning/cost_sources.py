# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Whose costs a plan is made by: the checkpoint's network, bandwidths, or the estimates that TorchRec's options bring.

Shapes: P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torchrec.distributed.planner.types import CollectiveType, ShardingOption, Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.notes import checkpoint_notes
from dreamshard_planner.cost.collectives import MAX_BYTES_PER_MS, OPERATIONS, CollectiveModel, fits_of
from dreamshard_planner.cost.compute import ComputeCost, CostSource, GivenCost, WithExtras, WithServing
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.roofline import RooflineCost, dense_ms
from dreamshard_planner.devices import default_notes
from dreamshard_planner.planning.training_notes import costed_optimizers
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.problem.exchanges import Links
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.problem.reader import OptionReader

FREE = CollectiveModel(1, 1.0, 0.0, "part of TorchRec's estimates")
"""Exchanges that cost nothing of their own."""


@dataclass(frozen=True)
class NetworkCosts:
    """The checkpoint's network, where it has one for the device, else bandwidths; exchanges as the checkpoint measured
    them, else over the topology's bandwidths."""

    topology: Topology
    checkpoint: Checkpoint
    sync_ms_per_byte: float = 0.0
    """Of averaging the replicas of other sharding groups."""
    takes_estimates = False
    """Whether costs are the perf that options come with."""
    uses_network = True

    def compute(self) -> ComputeCost:
        """What sets of parts cost."""
        return self.checkpoint.compute_cost(self.topology)

    def links(self) -> Links:
        """What exchanges cost."""
        return links_of(self.topology, self.checkpoint)

    def cost(self, read: ReadProblem, compute: ComputeCost) -> Cost:
        """The cost of a problem's shardings."""
        problem = read.problem
        compute = WithServing.of(compute, RooflineCost.of_topology(self.topology), problem.features_PF)
        sync_ms_P = read.synced_bytes_P * self.sync_ms_per_byte
        if not bool(read.dense_elements_P.any() or read.ssd_bytes_P.any() or sync_ms_P.any()):
            return Cost(problem, compute)
        dense_ms_P = dense_ms(read.dense_elements_P, read.dense_passes_P, self.topology)
        # The forward reads rows from the SSD, the backward reads and writes them.
        ssd_ms_P = read.ssd_bytes_P / self.topology.ssd_mem_bw
        with_extras = WithExtras(compute)
        # A rank waits for its replicas, and for no other rank of its group.
        extra_ms_P2 = torch.stack([ssd_ms_P, dense_ms_P + 2 * ssd_ms_P + sync_ms_P], -1)
        return Cost(problem, with_extras, with_extras.latents(problem.features_PF, extra_ms_P2))

    def notes(self, plan: Sequence[ShardingOption], reader: OptionReader) -> tuple[Note, ...]:
        """What a reader of a plan's cost should know of where it came from."""
        measured = not self.takes_estimates and _measured(self.topology, self.checkpoint, "all_to_all") is not None
        # Networks tell Adagrad from row-wise Adagrad where calibration did.
        told_apart = not self.uses_network or "adagrad" in self.checkpoint.metadata.get("corrections", {})
        unknown = () if self.takes_estimates else ("other",) if told_apart else ("other", "adagrad")
        return (
            *noted("assumption", default_notes(self.topology, links_measured=measured)),
            *noted("source", checkpoint_notes(self.checkpoint, self.topology, uses_network=self.uses_network)),
            *noted("optimizer", costed_optimizers(plan, reader, self.topology, unknown)),
        )


class BandwidthCosts(NetworkCosts):
    """Bandwidths, even where there is a network."""

    uses_network = False

    def compute(self) -> ComputeCost:
        """Rooflines of the topology."""
        return RooflineCost.of_topology(self.topology)


class TorchRecCosts(NetworkCosts):
    """The perf of the options, by whatever estimator: compute and exchanges in one."""

    takes_estimates = True
    uses_network = False

    def compute(self) -> ComputeCost:
        """The estimates, added up."""
        return GivenCost(CostSource("torchrec", "TorchRec's estimates, nothing measured"))

    def links(self) -> Links:
        """None of their own."""
        return Links(*[FREE] * len(fields(Links)))

    def cost(self, read: ReadProblem, compute: ComputeCost) -> Cost:
        """Forward is everything but the backward."""
        perfs = [shard.perf for shard in read.shard_P]
        backward = [perf.bwd_compute + perf.bwd_comms for perf in perfs]
        sync_ms_P = (read.synced_bytes_P * self.sync_ms_per_byte).tolist()
        latents = [
            [1.0, perf.total - later, later + sync]
            for perf, later, sync in zip(perfs, backward, sync_ms_P, strict=True)
        ]
        return Cost(read.problem, compute, torch.tensor(latents, dtype=torch.float64).view(-1, 3))


COST_SOURCES = {"auto": NetworkCosts, "roofline": BandwidthCosts, "torchrec": TorchRecCosts}
"""By the name that users give."""


def links_of(topology: Topology, checkpoint: Checkpoint) -> Links:
    """Exchanges as the checkpoint measured them, for ranks of as many hosts of that kind; else over the topology's
    bandwidths, within hosts and between them."""
    world_size, host = topology.world_size, min(topology.intra_group_size, topology.world_size)
    inside, between = topology.comms_bandwidths.intra_host_bw, topology.comms_bandwidths.inter_host_bw
    given = _given_world(topology)
    # A reduce-scatter and an all-gather, each of an n-th of the tensor to each peer.
    twice = replace(given, bytes_per_ms=given.bytes_per_ms / 2, latency_ms=2 * given.latency_ms)
    measured = {operation: _measured(topology, checkpoint, operation) for operation in OPERATIONS}
    of_host = measured if _hosts(topology) == 1 else dict.fromkeys(OPERATIONS)
    given_host = CollectiveModel(host, inside, source=_given(inside))
    return Links(
        all_to_all=measured["all_to_all"] or given,
        reduce_scatter=measured["reduce_scatter"] or given,
        all_gather=measured["all_gather"] or given,
        all_reduce=measured["all_reduce"] or twice,
        host_reduce_scatter=of_host["reduce_scatter"] or given_host,
        host_all_gather=of_host["all_gather"] or given_host,
        across=CollectiveModel(max(1, world_size // host), between, source=_given(between)),
        all_to_one=_all_to_one(world_size, host, inside, between),
    )


def _all_to_one(ranks: int, host: int, inside: float, between: float) -> CollectiveModel:
    """What all ranks send to one, over its link to those of its host and over that to other hosts, one after the other;
    all are taken to send alike, itself among them."""
    if ranks == 1:
        return CollectiveModel(1, inside, source=_given(inside))
    ms_per_byte = ((host - 1) / inside + (ranks - host) / between) / ranks
    # Of two ends, so that nothing counts but the bytes of all ranks together.
    return CollectiveModel(
        2, MAX_BYTES_PER_MS, source=_given(inside if host > 1 else between), shared_bytes_per_ms=1 / ms_per_byte
    )


def _hosts(topology: Topology) -> int:
    return -(-topology.world_size // topology.local_world_size)


def _measured(topology: Topology, checkpoint: Checkpoint, operation: str) -> CollectiveModel | None:
    """The exchange between all ranks as the checkpoint measured it; None where it was not, or elsewhere. What one host
    does says nothing of two, nor two of three."""
    measured = checkpoint.metadata.get("collectives")
    if measured is None or measured["hardware"]["device"] != topology.compute_device:
        return None
    hosts = measured.get("hosts", 1)
    if hosts != _hosts(topology):
        return None
    fit = fits_of(measured)[operation]
    ranks = f"{measured['world_size']} ranks of {'one' if hosts == 1 else f'{hosts} x'} {measured['hardware']['name']}"
    return fit.model(topology.world_size, f"measured with {measured['backend']} on {ranks}, {checkpoint.name}")


def _given_world(topology: Topology) -> CollectiveModel:
    """An exchange of equal parts between all ranks over the topology's bandwidth: on several hosts it takes as long as
    what goes to the ranks of other hosts."""
    bytes_per_ms = topology.comms_bandwidths.get_bw(
        local_world_size=topology.intra_group_size,
        world_size=topology.world_size,
        collective_type=CollectiveType.ALL_TO_ALL,
    )
    model = CollectiveModel(topology.world_size, bytes_per_ms, source=_given(bytes_per_ms))
    others = topology.world_size - topology.intra_group_size
    return model if others <= 0 else replace(model, bytes_per_ms=bytes_per_ms * (topology.world_size - 1) / others)


def _given(bytes_per_ms: float) -> str:
    return f"topology's {bytes_per_ms * 1e3 / 1e9:.0f} GB/s, nothing measured"
