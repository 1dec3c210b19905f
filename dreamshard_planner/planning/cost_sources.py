# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost sources of a plan: the checkpoint's network, bandwidths, or TorchRec's estimates.

Shapes: P parts.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace

import torch
from torchrec.distributed.planner.types import Perf, ShardingOption, Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import checkpoint_notes, confidence
from dreamshard_planner.cost.collectives import OPERATIONS, CollectiveModel, Interconnect
from dreamshard_planner.cost.compute import AdjustedCost, ComputeCost, CostSource, GivenCost, SharedCores
from dreamshard_planner.cost.problem import Cost
from dreamshard_planner.cost.roofline import RooflineCost, dense_ms
from dreamshard_planner.devices import cores_of, default_notes
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.plans.report import ESTIMATE_PARTS, Note, noted
from dreamshard_planner.problem.parts import Links, Part, ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.options import fqn_of, perf_of, ranks_of
from dreamshard_planner.search_space.sharding_types import serves
from dreamshard_planner.support.formatting import first_of
from dreamshard_planner.workload.tables import FEATURE_INDEX, OPTIMIZERS

FREE = CollectiveModel(1, 1.0, 0.0, "part of TorchRec's estimates")
"""An exchange that costs nothing of its own."""
_UNCOUNTED = (
    "the exchange of lookups is not counted: collectives of {} were measured without it "
    "(python -m dreamshard_planner.measure.collectives measures it)"
)
_QUANTIZED = (
    "the model has quantized tables, whose kernels were not measured: bandwidths give the costs of all its tables"
)


@dataclass(frozen=True)
class CheckpointCosts:
    """Costs by the checkpoint's network and measured exchanges, else by the topology's bandwidths."""

    ranks: PlannedRanks
    takes_estimates = False
    """True if costs are the perf of the options."""
    uses_network = True

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
        problem, topology = replace(read.problem, shared_cores=self._shared_cores()), self.ranks.topology
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

    def _shared_cores(self) -> SharedCores | None:
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

    def _cores_notes(self) -> list[str]:
        if (shared := self._shared_cores()) is None:
            return []
        ranks = f"{shared.at_once:g} of {shared.on_host} ranks"
        hosts = " of a host" * (shared.on_host < self.ranks.topology.world_size)
        return [f"{ranks}{hosts} can compute at once, since they share cores: the work of all counts"]

    def confidence(self, plan: Sequence[ShardingOption]) -> str:
        """Tell how far to trust the milliseconds of a plan."""
        return confidence(self.ranks.checkpoint, self.ranks.topology, self.uses_network and not _is_quantized(plan))

    def estimate_ms(self, plan: Sequence[ShardingOption]) -> dict[str, float]:
        """Return the parts of TorchRec's estimate of the slowest rank; empty for other costs, or without estimates."""
        return {}

    def notes(self, plan: Sequence[ShardingOption], reader: OptionReader) -> tuple[Note, ...]:
        """Return notes on the sources of a plan's cost."""
        topology, checkpoint = self.ranks.topology, self.ranks.checkpoint
        measured = not self.takes_estimates and _measured(topology, checkpoint).keys() >= {*OPERATIONS}
        uncounted = "lookups" not in self.links() and topology.world_size > 1 and not self.takes_estimates
        quantized = self.uses_network and _is_quantized(plan)
        uses_network = self.uses_network and not quantized
        return (
            *noted("assumption", default_notes(topology, links_measured=measured)),
            *noted("source", [_UNCOUNTED.format(checkpoint.name)] if uncounted else []),
            *noted("source", [_QUANTIZED] if quantized else []),
            *noted("source", checkpoint_notes(checkpoint, topology, uses_network=uses_network)),
            *noted("source", self._cores_notes()),
            *noted("optimizer", _costed_optimizers(plan, reader, topology, self._unknown(uses_network))),
        )

    def _unknown(self, uses_network: bool) -> Collection[str]:
        """Return the optimizers that are costed as row-wise Adagrad."""
        if self.takes_estimates:
            return ()
        network = self.ranks.checkpoint.cost if uses_network else None
        if network is None:
            return ("other",)
        return OPTIMIZERS.keys() - {*network.optimizers, *self.ranks.checkpoint.known.corrections}


class BandwidthCosts(CheckpointCosts):
    """Costs by bandwidths, even if there is a network."""

    uses_network = False


class TorchRecCosts(CheckpointCosts):
    """The perf of the options, by any estimator: compute and exchanges in one."""

    takes_estimates = True
    uses_network = False

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

    def confidence(self, plan: Sequence[ShardingOption]) -> str:
        """Tell how far to trust the milliseconds of a plan."""
        return "TorchRec's estimates, nothing measured: trust the order of plans, not their milliseconds"

    def estimate_ms(self, plan: Sequence[ShardingOption]) -> dict[str, float]:
        """Return the parts of TorchRec's estimate of the slowest rank; empty without estimates."""
        of_rank: dict[int, list[Perf]] = {}
        for option in plan:
            for rank, perf in zip(ranks_of(option), perf_of(option), strict=True):
                if rank is None or perf is None:
                    return {}
                of_rank.setdefault(rank, []).append(perf)
        slowest = max(of_rank.values(), key=lambda perfs: sum(perf.total for perf in perfs), default=[])
        return {name: sum(getattr(perf, name) for perf in slowest) for name in ESTIMATE_PARTS if slowest}


def _is_quantized(plan: Sequence[ShardingOption]) -> bool:
    return any(serves(option.compute_kernel) for option in plan)


COST_SOURCES = {"auto": CheckpointCosts, "roofline": BandwidthCosts, "torchrec": TorchRecCosts}
"""Cost sources by the name that users give."""


def _costed_optimizers(
    plan: Sequence[ShardingOption], reader: OptionReader, topology: Topology, unknown: Container[str]
) -> tuple[str, ...]:
    """Return a sentence on tables whose optimizer is ``unknown`` to the costs, if there are any."""
    optimizers = {fqn_of(option): reader.table(option, topology).optimizer for option in plan}
    others = {name: optimizer for name, optimizer in optimizers.items() if optimizer in unknown}
    if not others:
        return ()
    return (
        f"{first_of(sorted(others))}: costed as with row-wise Adagrad, since no kernels of their optimizer are "
        "known" + ("; dreamshard calibrate measures Adagrad's" if "adagrad" in others.values() else ""),
    )


def links_of(topology: Topology, checkpoint: Checkpoint) -> Links:
    """Return exchanges as the checkpoint measured them on as many hosts, else over the topology's bandwidths.

    Measurements without lookups leave the exchange of lookups out.
    """
    given, measured, known = Interconnect.of(topology), _measured(topology, checkpoint), checkpoint.known.collectives
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


def _measured(topology: Topology, checkpoint: Checkpoint) -> dict[str, CollectiveModel]:
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
