# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Partitioner``: where ranks are chosen, by policy and search or by a greedy rule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)

from dreamshard_planner.ambient import neutral
from dreamshard_planner.checkpoint import Checkpoint, resolve
from dreamshard_planner.cost.model import PlacementCost, PlacementProblem
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.sets import SetClock
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.placement.packing import shortage, total_room
from dreamshard_planner.placement.place import Contender, InfeasibleError, Placement, place
from dreamshard_planner.placement.refine import ShardSet, refine
from dreamshard_planner.placement.rules import RULES, place_by_rule
from dreamshard_planner.placement.search import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.plugin.limits import MEMORY_KINDS, checked_seed
from dreamshard_planner.plugin.options import OptionReader, collective_model
from dreamshard_planner.workload.statistics import TableStatistics


class DreamShardPartitioner(Partitioner):
    """Places table-wise options with the policy network and search over the cost network.

    Usable alone: ``EmbeddingShardingPlanner(partitioner=DreamShardPartitioner())``.

    Args:
        constraints: per table, for ``num_poolings``, ``batch_sizes`` and ``is_weighted``.
        statistics: workload statistics per feature.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoint.Checkpoint`.
        search: search settings; None for one policy roll-out alone (the paper's procedure).
        seed: of the sampled roll-outs and the search.
        search_seconds: cap on the search, on top of its budget of candidates.
        refine_seconds: time for measuring plans on this machine's device, see
            :func:`~dreamshard_planner.placement.refine.refine`; 0 for none. Spent once, on the first plan.
        reader: shared by the seams of one planner; made from the other arguments by default.
        torchrec_estimate: fills in TorchRec's own perf, for the rival that is TorchRec's plan; without it
            the options are taken to hold that already.

    Attributes:
        placement: what the last call chose, and from what.
        cost: the problem of the last call, with its costs.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        search: SearchConfig | None = DEFAULT_SEARCH,
        seed: int = 0,
        search_seconds: float | None = None,
        refine_seconds: float = 0.0,
        reader: OptionReader | None = None,
        torchrec_estimate: Callable[[list[ShardingOption]], None] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._search = search
        self._seed = checked_seed(seed)
        self._search_seconds = search_seconds
        self._refine_seconds = refine_seconds
        self._reader = reader or OptionReader(constraints, statistics)
        self._torchrec_estimate = torchrec_estimate
        self._outcomes: dict[Hashable, tuple[Placement, PlacementCost]] = {}

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank`` of every shard of ``proposal`` and return it, as TorchRec's contract has it.

        Raises:
            PlannerError: where the tables do not fit, naming table and missing bytes.
        """
        require_device_partition(proposal)
        checkpoint = self._checkpoint
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = resolve(checkpoint, storage_constraint.compute_device)
        threads = torch.get_num_threads()
        with single_thread():
            problem = self._reader.problem(proposal, storage_constraint)
            compute = checkpoint.compute_cost(storage_constraint)
            cost = PlacementCost(problem, compute, collective_model(storage_constraint, checkpoint))
            ranks_S = torchrec_ranks(proposal, storage_constraint, self._torchrec_estimate)
            try:
                placement = place(
                    cost,
                    checkpoint.policy,
                    self._search,
                    seed=self._seed,
                    given={"torchrec": ranks_S},
                    seconds=self._search_seconds,
                )
            except InfeasibleError as error:
                raise infeasible(problem, error.proven) from error
            if self._refine_seconds > 0:
                placement = self._refined(placement, proposal, cost, storage_constraint, threads)
        self._outcomes[frozenset(ranks_by_choice(proposal))] = placement, cost
        _assign(proposal, placement.chosen.assignment_S)
        return proposal

    def outcome(self, choices: Iterable[Hashable]) -> tuple[Placement, PlacementCost] | None:
        """How the proposal with these tables and kernels, as keys of :func:`ranks_by_choice`, was placed, of those that
        TorchRec's planner asked for; it takes the one that its perf model rates best. None where there was none."""
        return self._outcomes.get(frozenset(choices))

    def _refined(
        self,
        placement: Placement,
        proposal: Sequence[ShardingOption],
        cost: PlacementCost,
        topology: Topology,
        threads: int,
    ) -> Placement:
        """The placement that measuring chooses; kernels run with ``threads`` intra-op threads."""
        device = topology.compute_device
        if device == "cuda" and not torch.cuda.is_available():
            raise DreamShardError("refine measures fused kernels on this machine, which has no CUDA device")
        workloads = self._reader.workloads(proposal, topology)
        elsewhere = [workload.name for workload in workloads if workload.memory != "device"]
        if elsewhere:
            note = (
                f"nothing was measured: {len(elsewhere)} table(s) outside of device memory, {elsewhere[0]!r} the first"
            )
            return replace(placement, notes=(*placement.notes, note))
        clock = SetClock(workloads, device, seed=self._seed)

        def measure(sets: Sequence[ShardSet], repeats: int) -> Tensor:
            with pinned(threads):
                return clock(sets, repeats)

        # A second proposal finds no time left.
        seconds, self._refine_seconds = self._refine_seconds, 0.0
        search = self._search or DEFAULT_SEARCH
        result = refine(cost, placement.distinct(), measure, seconds, search=search, seed=self._seed)
        chosen = Contender("chosen", result.assignment_S, cost.rate(result.assignment_S[None]))
        notes = placement.notes
        if device == "cpu":
            notes = (*notes, f"kernels were measured with {threads} thread(s)")
        return replace(placement, chosen=chosen, refined=result, notes=notes)


class RulePartitioner(Partitioner):
    """Places table-wise options by one of the greedy rules of :mod:`dreamshard_planner.placement.rules`.

    Args:
        rule: ``size_greedy``, ``dim_greedy``, ``lookup_greedy`` or ``size_lookup_greedy``.
        constraints: per table, as in :class:`DreamShardPartitioner`.
        statistics: workload statistics per feature.
    """

    def __init__(
        self,
        rule: str,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; known are {', '.join(RULES)}")
        self._rule = rule
        self._reader = OptionReader(constraints, statistics)

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank``; raises ``PlannerError`` where the rule dead-ends on memory."""
        require_device_partition(proposal)
        problem = self._reader.problem(proposal, storage_constraint)
        assignment_S = place_by_rule(problem, self._rule)
        if assignment_S is None:
            raise infeasible(problem, proven=False)
        _assign(proposal, assignment_S)
        return proposal


def ranks_by_choice(options: Sequence[ShardingOption]) -> dict[Hashable, list[int | None]]:
    """The ranks of every option's shards, by table, sharding type and kernel."""
    return {
        (option.fqn, option.sharding_type, option.compute_kernel): [shard.rank for shard in option.shards]
        for option in options
    }


def require_device_partition(proposal: Sequence[ShardingOption]) -> None:
    """Options that TorchRec spreads over hosts or all ranks are not ours to place alone."""
    for option in proposal:
        if get_partition_by_type(option.sharding_type) != PartitionByType.DEVICE.value or option.dependency:
            raise PlannerError(
                f"table {option.fqn.removeprefix('.')!r} is to be sharded {option.sharding_type}"
                f"{' together with ' + option.dependency if option.dependency else ''}; only independent table-wise "
                "shards can be placed so far",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )


def torchrec_ranks(
    proposal: Sequence[ShardingOption],
    storage_constraint: Topology,
    estimate: Callable[[list[ShardingOption]], None] | None,
) -> Tensor | None:
    """Ranks [S] that TorchRec's default partitioner chooses for the same options, None where it dead-ends."""
    # On the options themselves, restored afterwards: copies of a thousand take longer than the plan.
    shards = [option.shards[0] for option in proposal]
    before = [(shard.perf, shard.rank) for shard in shards]
    try:
        if estimate is not None:
            estimate(list(proposal))
        GreedyPerfPartitioner().partition(list(proposal), storage_constraint)
        return torch.tensor([shard.rank for shard in shards], dtype=torch.int64)
    except PlannerError:
        return None
    finally:
        for shard, (perf, rank) in zip(shards, before, strict=True):
            shard.perf, shard.rank = perf, rank


def infeasible(problem: PlacementProblem, proven: bool) -> PlannerError:
    """TorchRec's error for tables that do not fit, saying which and by how much."""
    reason = shortage(problem, MEMORY_KINDS)
    if not reason:
        largest = int(problem.storage_SM.double().sum(-1).argmax())
        need = problem.storage_SM[largest]
        free = [room - int(used) for room, used in zip(total_room(problem), problem.storage_SM.sum(0), strict=True)]
        how = "No placement of whole tables fits (proven)" if proven else "No placement of whole tables was found"
        kinds = [
            f"{free[kind]:,} bytes of {name} would be left over all ranks"
            for kind, name in enumerate(MEMORY_KINDS)
            if need[kind] > 0
        ]
        reason = (
            f"{how}, although {' and '.join(kinds)}; the largest table, {problem.names[largest]!r}, needs "
            f"{int(need.sum()):,} bytes on one rank"
        )
    return PlannerError(
        f"Tables do not fit: {reason}. More or larger devices, a smaller storage reservation, or smaller tables "
        "would help.",
        PlannerErrorType.INSUFFICIENT_STORAGE,
    )


@contextmanager
def single_thread() -> Iterator[None]:
    """One intra-op thread: tiny matrices gain nothing from more, and rounding must not depend on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _assign(proposal: Sequence[ShardingOption], assignment_S: Tensor) -> None:
    for option, rank in zip(proposal, assignment_S.tolist(), strict=True):
        option.shards[0].rank = rank
