# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reading and rating of plans, shared by all components of one planner, and the sources of their costs: the
checkpoint's network, bandwidths, or TorchRec's estimates.

Shapes: P parts, H latent channels, C collectives, 2 (forward, backward).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import ClassVar

import torch
from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import Perf, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.collectives import OPERATIONS, CollectiveModel, Interconnect
from dreamshard_planner.cost.correction import AdjustedCost
from dreamshard_planner.cost.problem import (
    ComputeCost,
    Cost,
    CostSource,
    GivenCost,
    Option,
    PlacementCosts,
    Sharding,
    SharedCores,
)
from dreamshard_planner.cost.roofline import RooflineCost, dense_ms
from dreamshard_planner.devices import cores_of
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.problem.enumeration import (
    FastEnumerator,
    PerfEstimator,
    StorageEstimator,
    equal_lengths,
    estimate_all,
    own_lengths,
    unpriced,
)
from dreamshard_planner.problem.parts import Links, Part, ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.search import SearchResult
from dreamshard_planner.search_space.constraints import PlanningConstraints
from dreamshard_planner.search_space.options import by_table, counted, perf_of, total_ms
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, is_known
from dreamshard_planner.search_space.variants import as_constrained, own_slices, usable_options, without_idle_halves
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FEATURE_INDEX

FREE = CollectiveModel(1, 1.0, 0.0, "part of TorchRec's estimates")
"""An exchange that costs nothing of its own."""


@dataclass(frozen=True)
class RatedPlan:
    """A plan with its ranks and costs."""

    read: ReadProblem
    cost: Cost
    sharding: Sharding
    rivals: tuple[ReportEntry, ...] = ()
    """Plans that its search started from, feasible or not."""
    result: SearchResult | None = None
    """Outcome of the search for its ranks; None if it came with ranks."""

    @cached_property
    def costs(self) -> PlacementCosts:
        """Costs of the plan (B = 1)."""
        return self.cost.rate(self.sharding)

    @property
    def total_ms(self) -> float:
        """Overall cost."""
        return float(self.costs.overall_ms_B[0])

    @property
    def placed(self) -> Iterator[tuple[str, Option, list[int]]]:
        """Name, option and ranks of each table."""
        problem, chosen = self.read.problem, zip(self.sharding.options, self.sharding.positions, strict=True)
        for name, options, (index, positions) in zip(problem.names, problem.tables, chosen, strict=True):
            yield name, options[index], options[index].ranks(positions)

    @property
    def options(self) -> list[ShardingOption]:
        """One option for every table."""
        return [options[index] for options, index in zip(self.read.options, self.sharding.options, strict=True)]


@dataclass(frozen=True)
class CheckpointCosts:
    """Costs by the checkpoint's network and measured exchanges, else by the topology's bandwidths."""

    ranks: PlannedRanks
    uses_network: bool = True
    """False for bandwidths, even if there is a network."""
    takes_estimates: ClassVar = False
    """True if costs are the perf of the options."""

    def compute(self) -> ComputeCost:
        """Return the cost of fused groups."""
        checkpoint, topology = self.ranks.checkpoint, self.ranks.topology
        return checkpoint.compute_cost(topology) if self.uses_network else RooflineCost.of_topology(topology)

    def links(self) -> Links:
        """Return the cost of exchanges. All ranks of all groups reduce the gradients of data-parallel tables."""
        links, all_ranks = links_of(self.ranks.topology, self.ranks.checkpoint), self.ranks.all_ranks
        if all_ranks is None:
            return links
        all_reduce = links_of(all_ranks, self.ranks.checkpoint)["all_reduce"]
        shared = all_reduce.shared_bytes_per_ms * self.ranks.topology.world_size / all_ranks.world_size
        return {**links, "all_reduce": replace(all_reduce, shared_bytes_per_ms=shared)}

    def cost(self, read: ReadProblem, compute: ComputeCost) -> Cost:
        """Return the cost of a problem's shardings.

        Bandwidths cost a problem with quantized tables as a whole. No network has learned their kernels, and costs of
        two sources do not compare.
        """
        problem, topology = replace(read.problem, shared_cores=self.shared_cores()), self.ranks.topology
        if bool(problem.features_PF[:, FEATURE_INDEX["served"]].any()):
            compute = RooflineCost.of_topology(topology)
        if isinstance(compute, AdjustedCost):
            compute = compute.needed_by(problem.features_PF)
        extra_ms_P2 = torch.tensor([*map(self._extra_ms, read.parts)], dtype=torch.float64)
        estimated = [index for index, part in enumerate(read.parts) if part.is_estimated]
        if not estimated and not extra_ms_P2.any():
            return Cost(problem, compute)
        adjusted = compute if isinstance(compute, AdjustedCost) else AdjustedCost(compute)
        latent_PH = adjusted.encode(problem.features_PF).double()
        latent_PH[estimated] = 0.0
        latent_PH[:, adjusted.EXTRA_MS] = extra_ms_P2
        return Cost(problem, adjusted, latent_PH)

    def _extra_ms(self, part: Part) -> tuple[float, float]:
        """Return what a part adds to the forward and to the backward, beside measured kernels."""
        if part.is_estimated:
            perf = part.estimate
            return perf.fwd_compute + perf.prefetch_compute, perf.bwd_compute
        topology = self.ranks.topology
        # The forward reads rows from the SSD, the backward reads and writes them.
        ssd_ms = part.ssd_bytes / topology.ssd_mem_bw if part.ssd_bytes else 0.0
        # CPU ranks share the memory of their host.
        shared = topology.ddr_mem_bw / topology.local_world_size
        hot_ms = part.hot_bytes / (shared if topology.compute_device == "cpu" else topology.hbm_mem_bw)
        # A rank waits for its replicas, and for no other rank of its group.
        sync_ms = part.synced_bytes * self.ranks.sync_ms_per_byte
        return ssd_ms, dense_ms(part.dense_elements, part.dense_passes, topology) + hot_ms + 2 * ssd_ms + sync_ms

    def shared_cores(self) -> SharedCores | None:
        """Return the cores that the CPU ranks of a host share, if fewer than all can compute at once: as the topology
        was read, or as the training was observed that costs were learned from."""
        topology, known = self.ranks.topology, self.ranks.checkpoint.known
        cores = known.hardware.cores if known.learned.runs else None
        if self.takes_estimates or topology.compute_device != "cpu":
            return None
        at_once = cores_of(topology)
        if at_once is None and cores is not None:
            at_once = cores / known.hardware.threads
        # The ranks of all sharding groups compute at the same time.
        every, on_host = (
            min(one.local_world_size, one.world_size) for one in (self.ranks.all_ranks or topology, topology)
        )
        if at_once is None or at_once >= every:
            return None
        return SharedCores(at_once / every * on_host, on_host)


class TorchRecCosts(CheckpointCosts):
    """The perf of the options, by any estimator: compute and exchanges in one."""

    takes_estimates = True

    def compute(self) -> ComputeCost:
        """Return the sum of estimates."""
        return GivenCost(CostSource("torchrec", "TorchRec's estimates, nothing measured"))

    def links(self) -> Links:
        """Return free exchanges, and none of lookups."""
        return dict.fromkeys((*OPERATIONS, "host_reduce_scatter", "host_all_gather", "across", "all_to_one"), FREE)

    def cost(self, read: ReadProblem, compute: ComputeCost) -> Cost:
        """Return the sum of estimates; the forward is everything but the backward."""
        latents = []
        for part in read.parts:
            perf = part.estimate
            backward = perf.bwd_compute + perf.bwd_comms
            sync_ms = part.synced_bytes * self.ranks.sync_ms_per_byte
            latents.append([1.0, perf.total - backward, backward + sync_ms])
        return Cost(read.problem, compute, torch.tensor(latents, dtype=torch.float64).view(-1, 3))


COST_SOURCES: dict[str, Callable[[PlannedRanks], CheckpointCosts]] = {
    "auto": CheckpointCosts,
    "roofline": partial(CheckpointCosts, uses_network=False),
    "torchrec": partial(TorchRecCosts, uses_network=False),
}
"""Cost sources by the name that users give."""


def links_of(topology: Topology, checkpoint: Checkpoint) -> Links:
    """Return exchanges as the checkpoint measured them on as many hosts, else over the topology's bandwidths.

    Measurements without lookups leave the exchange of lookups out.
    """
    given, measured, known = (
        Interconnect.of(topology),
        measured_exchanges(topology, checkpoint),
        checkpoint.known.collectives,
    )
    of_host = measured if given.hosts == 1 else {}
    links = {
        "all_to_all": given.all_to_all(),
        "reduce_scatter": given.reduce_scatter(),
        "all_gather": given.reduce_scatter(),
        "all_reduce": given.all_reduce(),
        "host_reduce_scatter": of_host.get("reduce_scatter") or given.host_reduce_scatter(),
        "host_all_gather": of_host.get("all_gather") or given.host_reduce_scatter(),
        "across": given.across(),
        "all_to_one": given.all_to_one(),
        **measured,
    }
    if not measured or (known is not None and "lookups" in known.fits):
        links.setdefault("lookups", given.lookups())
    if "bucketing" in links:  # each rank sorts its own ids, however many ranks there are: as if one of two got them
        links["bucketing"] = replace(links["bucketing"], world_size=2)
    return links


def measured_exchanges(topology: Topology, checkpoint: Checkpoint) -> dict[str, CollectiveModel]:
    """Return exchanges between all ranks as the checkpoint measured them, by operation; empty for another device or
    number of hosts."""
    measured, hosts = checkpoint.known.collectives, -(-topology.world_size // topology.local_world_size)
    if measured is None or (measured.hardware.device, measured.hosts) != (topology.compute_device, hosts):
        return {}
    ranks = f"{measured.world_size} ranks of {'one' if hosts == 1 else f'{hosts} x'} {measured.hardware.name}"
    source = f"measured with {measured.backend} on {ranks}, {checkpoint.name}"
    models = {operation: fit.model(topology.world_size, source) for operation, fit in measured.known.items()}
    for operation in {*measured.assumed} & models.keys():
        taken = f"not observed, taken to be as much slower than predicted as what was {source}"
        models[operation] = replace(models[operation], source=taken, is_measured=False)
    return models


@dataclass(frozen=True)
class PlanRater:
    """Reads and rates the plans of one topology.

    Args:
        ranks: with their memory before any reservation, and the checkpoint of their costs and policy.
        reader: of options.
        cost_source: one of :data:`~dreamshard_planner.planning.rater.COST_SOURCES`.
    """

    ranks: PlannedRanks
    reader: OptionReader
    cost_source: str = "auto"
    constraints: PlanningConstraints = field(default_factory=PlanningConstraints)
    """Constraints for TorchRec's estimators."""
    sharders: Sequence[ModuleSharder[nn.Module]] = ()
    """Sharders of the model; none if its options are estimated already."""

    def with_statistics(self, statistics: TableStatistics) -> PlanRater:
        """Return a rater by other statistics, for costs alone: it keeps no placement rule."""
        return replace(self, reader=OptionReader(self.constraints, statistics, self.sharders))

    @cached_property
    def costs(self) -> CheckpointCosts:
        """Costs by the cost source."""
        return COST_SOURCES[self.cost_source](self.ranks)

    @cached_property
    def compute(self) -> ComputeCost:
        """Cost of fused groups."""
        return self.costs.compute()

    @cached_property
    def links(self) -> Links:
        """Cost of exchanges."""
        return self.costs.links()

    @cached_property
    def _torchrec(self) -> list[ShardEstimator]:
        """TorchRec's estimators of perf and storage; empty without sharders."""
        if not self.sharders:
            return []
        # If costs are TorchRec's, memory alone is for the actual lookups.
        lengths = self.constraints.lengths_of_torchrec if self.costs.takes_estimates else own_lengths
        return [
            PerfEstimator(self.ranks.topology, self.constraints, lengths),
            StorageEstimator(self.ranks.topology, self.constraints, self.reader),
        ]

    @torch.no_grad()
    def alone(self, options: Sequence[ShardingOption]) -> list[list[Perf]]:
        """Return the milliseconds of each option's shards, each alone on its rank. If estimates are the cost source, or
        price an unknown kernel, they are those of the option."""
        if not options or self.costs.takes_estimates:
            return [*map(perf_of, options)]
        read = self.read(options, with_storage=False)
        cost, rates_2C = self.cost(read), read.problem.collectives.alone_ms_per_byte()
        compute_P2 = cost.compute.group_cost_ms(cost.latent_PH)
        comms_P2 = torch.stack([read.problem.bytes_PC @ rate_C for rate_C in rates_2C], dim=-1)
        perf_P = [
            Perf(fwd_compute=forward, fwd_comms=forward_comms, bwd_compute=backward, bwd_comms=backward_comms)
            for forward, backward, forward_comms, backward_comms in torch.cat([compute_P2, comms_P2], dim=-1).tolist()
        ]
        choices = zip(chain.from_iterable(read.options), chain.from_iterable(read.problem.tables), strict=True)
        alone = {id(option): [perf_P[part] for part in choice.parts] for option, choice in choices}
        return [alone[id(one)] if is_known(one.compute_kernel) else perf_of(one) for one in options]

    def alone_ms(self, options: Sequence[ShardingOption]) -> list[float]:
        """Return the sum of :meth:`alone` for each option."""
        return [*map(total_ms, self.alone(options))]

    def with_one_lookup(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return copies with TorchRec's estimates for one lookup per sample; none if these are the options' estimates,
        or estimates are costs."""
        given = any({*option.input_lengths} != {POOLING_FACTOR} for option in options)
        if self.costs.takes_estimates or not given or not all(is_known(option.compute_kernel) for option in options):
            return []
        copies = [copy.deepcopy(option) for option in options]
        estimator = PerfEstimator(self.ranks.topology, lengths=equal_lengths(POOLING_FACTOR))
        estimate_all([estimator], copies, self.sharders)
        return copies

    def estimate_missing(self, options: list[ShardingOption], with_perf: bool = False) -> None:
        """Estimate missing storage in place, as TorchRec does, and missing perf if asked for or the cost source."""
        bare = [option for option in options if any(shard.storage is None for shard, _ in counted(option))]
        estimate_all(self._torchrec[1:], bare, self.sharders)
        if with_perf or self.costs.takes_estimates:
            bare = [option for option in options if None in perf_of(option)]
            estimate_all(self._torchrec[:1], bare, self.sharders)

    def enumerator(self, batch_size: int) -> FastEnumerator:
        """Make TorchRec's enumerator for a planner's model and a local batch, with pooling factors per feature."""
        asked = {name for name, constraint in self.constraints.items() if constraint.min_partition}
        return FastEnumerator(
            self.ranks.topology,
            batch_size,
            self.constraints,
            self._torchrec,
            variants=partial(own_slices, asked=asked),
            lengths=self.reader.pooling_factors,
        )

    def searched_options(self, search_space: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options of a model that planning searches; raises PlannerError if a table has none."""
        allowed = as_constrained(search_space, self.constraints)
        return self.usable_options(without_idle_halves(allowed, self.alone_ms, self.ranks.topology.world_size))

    def usable_options(self, search_space: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options of :func:`~dreamshard_planner.search_space.variants.usable_options`."""
        return usable_options(search_space, self.ranks.topology.compute_device)

    def certain_options(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options whose cost is no guess, and all options of tables that have no others."""
        tables = by_table(options).values()
        return [option for choices in tables for option in ([o for o in choices if not self.is_guess(o)] or choices)]

    def is_guess(self, option: ShardingOption) -> bool:
        """See :meth:`OptionReader.is_guess`; TorchRec's estimates assume no popularity of rows."""
        return not self.costs.takes_estimates and self.reader.is_guess(option)

    def splitting_left_out(self, table: str) -> dict[str, str]:
        """Return the types in several parts that a table may not take, with reasons, by fully qualified name."""
        left_out = self.constraints.left_out.get(table, {})
        return {
            kind: left_out[kind] for kind, spec in SHARDING_TYPES.items() if spec.splits_unasked and kind in left_out
        }

    def read(
        self, options: Sequence[ShardingOption], topology: Topology | None = None, with_storage: bool = True
    ) -> ReadProblem:
        """Return the sharding problem of some options; ``topology`` has the memory that the reservation left.

        Raises:
            PlannerError: an option's kernel is unknown and unpriced, or as of :meth:`OptionReader.read`.
        """
        bare = [option for option in options if not is_known(option.compute_kernel) and None in perf_of(option)]
        if bare and not self._torchrec:
            raise unpriced(bare[0], "its options come without perf")
        if bare:
            estimate_all(self._torchrec[:1], bare, self.sharders)
        return self.reader.read(options, topology or self.ranks.topology, self.links, with_storage)

    def cost(self, read: ReadProblem) -> Cost:
        """Return the cost of a problem's shardings."""
        return self.costs.cost(read, self.compute)

    def rated(self, plan: Sequence[ShardingOption], left: Topology | None = None) -> RatedPlan:
        """Rate a plan whose shards have ranks.

        Args:
            plan: one option for every table.
            left: topology with the memory that the reservation left; None if memory does not matter.
        """
        read = self.read(plan, left, with_storage=left is not None)
        return RatedPlan(read, self.cost(read), read.sharding(plan))
