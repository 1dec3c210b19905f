# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What all seams of one planner share, resolved once: checkpoint, cost source, exchanges, and the reader of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.checkpoints.checkpoint import Checkpoint, resolve
from dreamshard_planner.checkpoints.notes import checkpoint_notes
from dreamshard_planner.cost.collectives import OPERATIONS, CollectiveModel, fits_of
from dreamshard_planner.cost.compute import ComputeCost, CostSource, GivenCost, WithExtras
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.roofline import RooflineCost, dense_ms
from dreamshard_planner.devices import default_notes
from dreamshard_planner.planning.training_notes import costed_optimizers
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.problem.exchanges import Links
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.enumeration import FastEnumerator, estimate_all, torchrec_estimators
from dreamshard_planner.search_space.slices import wider_slices
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.statistics import TableStatistics

COST_SOURCES = ("auto", "roofline", "torchrec")
"""``auto``: the checkpoint's network, where it has one, else the roofline model; ``torchrec``: the estimates that the
options come with."""

FREE = CollectiveModel(1, 1.0, 0.0, "part of TorchRec's estimates")
"""Exchanges that cost nothing of their own."""


@dataclass
class PlanningContext:
    """How the plans of one topology are read and rated.

    Args:
        topology: the ranks, before any reservation.
        reader: of options.
        checkpoint: policy, and the cost network where it has one.
        cost_source: one of :data:`COST_SOURCES`.
    """

    topology: Topology
    reader: OptionReader
    checkpoint: Checkpoint
    cost_source: str = "auto"
    constraints: dict[str, ParameterConstraints] | None = None
    """As TorchRec's estimators take them."""
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None
    """Of the model, where options are to be estimated as TorchRec does; None: they are estimated already."""

    @classmethod
    @neutral()
    def of(
        cls,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        cost_source: str = "auto",
    ) -> PlanningContext:
        """For a seam that is used alone."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = resolve(checkpoint, topology.compute_device)
        return cls(topology, OptionReader(constraints, statistics), checkpoint, cost_source)

    def with_constraints(self, constraints: dict[str, ParameterConstraints]) -> PlanningContext:
        """The same with other sharding types allowed."""
        return replace(self, constraints=constraints)

    def with_statistics(self, statistics: TableStatistics) -> PlanningContext:
        """The same by other statistics, for costs alone: no rule of placement is kept."""
        return replace(self, reader=OptionReader(self.constraints, statistics, self.sharders or ()))

    def __post_init__(self) -> None:
        if self.cost_source not in COST_SOURCES:
            raise ValueError(f"cost_source must be one of {', '.join(COST_SOURCES)}, got {self.cost_source!r}")
        self.compute: ComputeCost = self._compute()
        if self.cost_source == "torchrec":
            self.links = Links(*[FREE] * len(fields(Links)))
        else:
            self.links = links_of(self.topology, self.checkpoint)
        # Perf and storage.
        self._torchrec = [] if self.sharders is None else torchrec_estimators(self.topology, self.constraints)

    def estimate_as_torchrec(self, options: list[ShardingOption]) -> None:
        """Set the perf of every shard by TorchRec's own estimator, in place. Where TorchRec's estimates are the cost
        source, options keep those that they come with, which may be a user's."""
        if self.cost_source == "torchrec":
            options = [option for option in options if any(shard.perf is None for shard in option.shards)]
        estimate_all(self._torchrec[:1], options, self.sharders or ())

    def complete(self, options: list[ShardingOption]) -> None:
        """Estimate, in place and as TorchRec does, what costs and memory are read from and nobody has estimated."""
        bare = [option for option in options if any(shard.storage is None for shard in option.shards)]
        estimate_all(self._torchrec[1:], bare, self.sharders or ())
        if self.cost_source == "torchrec":
            self.estimate_as_torchrec(options)

    def enumerator(self, batch_size: int, perf: ShardEstimator) -> FastEnumerator:
        """TorchRec's enumerator for a planner's model, with pooling factors per feature before anything is estimated.

        Args:
            batch_size: local.
            perf: estimator of perf where the cost source is ours.
        """
        estimators = [self._torchrec[0] if self.cost_source == "torchrec" else perf, self._torchrec[1]]
        return FastEnumerator(
            self.topology, batch_size, self.constraints, estimators, variants=wider_slices, prepare=self._prepare
        )

    def _prepare(self, option: ShardingOption) -> None:
        option.input_lengths = self.reader.pooling_factors(option)

    def _compute(self) -> ComputeCost:
        if self.cost_source == "torchrec":
            return GivenCost(CostSource("torchrec", "TorchRec's estimates, nothing measured"))
        if self.cost_source == "roofline":
            return RooflineCost.of_topology(self.topology)
        return self.checkpoint.compute_cost(self.topology)

    def notes(self, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
        """What a reader of a plan's cost should know of where it came from, and of how its tables were read."""
        ours = self.cost_source != "torchrec"
        measured = ours and _measured(self.topology, self.checkpoint, "all_to_all") is not None
        source = checkpoint_notes(self.checkpoint, self.topology, uses_network=self.cost_source == "auto")
        return (
            *noted("assumption", default_notes(self.topology, links_measured=measured)),
            *noted("source", source),
            *noted("optimizer", costed_optimizers(plan, self.reader, self.topology) if ours else ()),
            *noted("table", self.reader.notes(plan)),
        )

    def read(
        self, options: Sequence[ShardingOption], topology: Topology | None = None, with_storage: bool = True
    ) -> ReadProblem:
        """The sharding problem of some options; ``topology`` is what the storage reservation left."""
        return self.reader.read(options, topology or self.topology, self.links, with_storage)

    def cost(self, read: ReadProblem) -> Cost:
        """The cost of its shardings."""
        problem = read.problem
        if self.cost_source == "torchrec":
            return Cost(problem, self.compute, estimates(read))
        if not bool(read.dense_elements_P.any() or read.ssd_bytes_P.any()):
            return Cost(problem, self.compute)
        dense_ms_P = dense_ms(read.dense_elements_P, self.topology)
        # The forward reads rows from the SSD, the backward reads and writes them.
        ssd_ms_P = read.ssd_bytes_P / self.topology.ssd_mem_bw
        with_extras = WithExtras(self.compute)
        extra_ms_P2 = torch.stack([ssd_ms_P, dense_ms_P + 2 * ssd_ms_P], -1)
        return Cost(problem, with_extras, with_extras.latents(problem.features_PF, extra_ms_P2))


def estimates(read: ReadProblem) -> Tensor:
    """TorchRec's estimate of each part as latents of a :class:`GivenCost`, [P, 3]: one, and milliseconds of forward
    (everything but the backward) and backward."""
    perfs = [shard.perf for shard in read.shard_P]
    backward = [perf.bwd_compute + perf.bwd_comms for perf in perfs]
    return torch.tensor(
        [[1.0, perf.total - later, later] for perf, later in zip(perfs, backward, strict=True)], dtype=torch.float64
    ).view(-1, 3)


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
