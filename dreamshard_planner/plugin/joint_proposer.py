# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Proposer`` for all sharding types: how tables are split, searched together with where shards go."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import reset_shard_rank
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.ambient import neutral, single_thread
from dreamshard_planner.cost.sharding import Sharding
from dreamshard_planner.placement.joint import DEFAULT_JOINT, JointConfig, JointResult, joint_search
from dreamshard_planner.placement.place import Contender
from dreamshard_planner.placement.search import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.plugin.baseline import TorchRecPlan, torchrec_plan
from dreamshard_planner.plugin.context import PlanningContext, identity, ranks_by_choice
from dreamshard_planner.plugin.dependencies import pinned_options
from dreamshard_planner.plugin.grouping import known_kernels
from dreamshard_planner.plugin.legal import CW, GRID, TW, TWCW
from dreamshard_planner.plugin.options import by_table
from dreamshard_planner.plugin.partitioner import Outcome, place_proposal
from dreamshard_planner.plugin.proposer import TableWiseProposer
from dreamshard_planner.plugin.read_problem import ReadProblem
from dreamshard_planner.plugin.slices import is_torchrecs
from dreamshard_planner.report import Report


class JointProposer(Proposer):
    """Proposes what the joint search makes of all options.

    TorchRec tells a proposer what the storage reservation left only with the feedback on its first proposal. Where that
    is not given beforehand, whole tables are proposed first, and the search follows. Where every table can only be
    placed whole, this is :class:`~dreamshard_planner.plugin.proposer.TableWiseProposer`.

    Args:
        context: shared with the partitioner, which takes the positions found here.
        topology: what the storage reservation leaves, where that is known.
        config: of the joint search.
        search: of its moves and swaps.
        seed: of the search.
        seconds: cap on it, on top of its budget of candidates: a third for whole tables, a third for the joint search,
            and a third left for the partitioner.

    Attributes:
        rivals: what the sharding found was compared with.
        result: of the last search; None where there was none.
        torchrec: TorchRec's plan over the same options; None where it found none.
    """

    def __init__(
        self,
        context: PlanningContext,
        topology: Topology | None = None,
        config: JointConfig = DEFAULT_JOINT,
        search: SearchConfig = DEFAULT_SEARCH,
        seed: int = 0,
        seconds: float | None = None,
    ) -> None:
        self._context = context
        self._topology = topology
        self._config = config
        self._search = search
        self._seed = seed
        self._third = None if seconds is None else seconds / 3
        self._table_wise = TableWiseProposer()
        self._only_whole = False
        self._searched = False
        self._pending: list[ShardingOption] | None = None
        self._options: list[ShardingOption] = []
        self.rivals: list[Contender] = []
        self.result: JointResult | None = None
        self.torchrec: TorchRecPlan | None = None

    def load(self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """See ``Proposer.load``; raises ``PlannerError`` where a table has no option of a known kernel, or none of a
        type that the context's constraints leave it."""
        self.rivals, self.result, self.torchrec = [], None, None
        allowed = as_constrained(search_space, self._context.constraints or {})
        self._options = usable_options(allowed, self._context.topology.compute_device)
        self._only_whole = all(option.sharding_type == TW for option in self._options)
        if self._only_whole:
            self._table_wise.load(self._options, enumerator)
            return
        self._searched = self._topology is not None
        self._pending = self._search_all(self._topology) if self._searched else self._whole()

    def _whole(self) -> list[ShardingOption]:
        """Every table whole where it may be, by its fastest kernel; else its fastest option."""
        best: dict[str, ShardingOption] = {}
        for option in self._options:
            known = best.get(option.fqn)
            key = (option.sharding_type != TW, option.total_perf)
            if known is None or key < (known.sharding_type != TW, known.total_perf):
                best[option.fqn] = option
        return list(best.values())

    def propose(self) -> list[ShardingOption] | None:
        """See ``Proposer.propose``; None when done."""
        return self._table_wise.propose() if self._only_whole else self._pending

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """See ``Proposer.feedback``: the joint search, where it has not been."""
        if self._only_whole:
            self._table_wise.feedback(partitionable, plan, perf_rating, storage_constraint)
            return
        self._pending = None
        if not self._searched and storage_constraint is not None:
            self._searched = True
            self._pending = self._search_all(storage_constraint)

    def report(self, outcome: Outcome) -> Report:
        """On a proposal of this proposer that was placed."""
        joint, notes = self.result, []
        if joint is not None and joint.cut_short:
            notes.append(
                "the joint search was cut short (search_seconds, timeout_seconds); more time may give another plan"
            )
        if self.torchrec is not None and not self.torchrec.finished:
            notes.append(f"TorchRec's plan is the best of its first {self.torchrec.proposals} proposals")
        return Report.of(
            outcome.cost,
            outcome.sharding,
            outcome.placement,
            self.rivals or None,
            candidates=joint.candidates if joint else 0,
            reshards=joint.reshards if joint else 0,
            notes=notes,
        )

    @neutral()
    @torch.no_grad()
    def _search_all(self, topology: Topology) -> list[ShardingOption]:
        """The options that the joint search chooses; those that ask least of any rank where it finds no room."""
        with single_thread():
            plans, rated, best = self._known_plans(topology), {}, None
            for options in pinned_options(self._options, topology, plans.get("torchrec")):
                read = self._context.read(options, topology)
                cost = self._context.cost(read)
                within = {name: _within(read, plan) for name, plan in plans.items()}
                plans_here = {name: sharding for name, sharding in within.items() if sharding is not None}
                # TorchRec's, which does not reckon with dense gradients, may need more memory than there is.
                starts = {name: sharding for name, sharding in plans_here.items() if cost.fits(sharding)}
                rated.update({name: cost.rate(starts[name]) if name in starts else None for name in plans_here})
                result = joint_search(cost, starts.values(), self._config, self._search, self._seed, self._third)
                if result is not None and (best is None or result.overall_ms < best[1].overall_ms):
                    best = read, result
                reset_shard_rank(options)
            self.rivals += [Contender(name, None, costs) for name, costs in rated.items()]
        if best is None:
            self.result = None
            return _smallest(self._context.read(self._options, topology))
        read, self.result = best
        chosen = self.result.sharding
        proposal = [options[option] for options, option in zip(read.options, chosen.options, strict=True)]
        places = zip(proposal, chosen.positions, strict=True)
        self._context.found[identity(ranks_by_choice(proposal))] = {
            option.fqn: positions for option, positions in places
        }
        return proposal

    def _known_plans(self, topology: Topology) -> dict[str, list[ShardingOption]]:
        """Plans with ranks, rivals and starts, by name: ours of whole tables, whose own rivals are rivals as well, and
        TorchRec's of all options."""
        plans, whole = {}, copy.deepcopy(self._whole())
        try:
            outcome = place_proposal(
                self._context,
                whole,
                topology,
                self._search,
                seed=self._seed,
                seconds=self._third,
                packing_seconds=0.0,
            )
        except PlannerError:
            pass  # no room for whole tables: others may have some
        else:
            plans["whole_tables"] = outcome.read.assign(outcome.sharding)
            if all(option.sharding_type == TW for option in whole):
                named = {"torchrec": "torchrec_whole"}
                self.rivals += [replace(r, name=named.get(r.name, r.name)) for r in outcome.placement.rivals]
        theirs = [option for option in self._options if is_torchrecs(option)]
        self.torchrec = torchrec_plan(theirs, topology, self._context.estimate_as_torchrec)
        if self.torchrec is not None:
            plans["torchrec"] = self.torchrec.options
        return plans


def _within(read: ReadProblem, plan: list[ShardingOption]) -> Sharding | None:
    """A plan as a sharding of the problem; None where it has dependent tables elsewhere than these are pinned."""
    try:
        return read.sharding(plan)
    except PlannerError:
        if any(option.dependency for option in plan):
            return None
        raise


def as_constrained(
    search_space: Sequence[ShardingOption], constraints: Mapping[str, ParameterConstraints]
) -> list[ShardingOption]:
    """Options of the sharding types that the constraints leave: an enumerator that was given knows neither them nor
    what exact training leaves out.

    Raises:
        PlannerError: a table has none.
    """
    types: dict[str, Collection[str]] = {}
    for name, constraint in constraints.items():
        if constraint.sharding_types:
            also = {TWCW} if CW in constraint.sharding_types else set()  # at run time the same
            types[name] = {*constraint.sharding_types, *also}
    kept = [
        option for option in search_space if option.sharding_type in types.get(option.name, (option.sharding_type,))
    ]
    left = {option.fqn for option in kept}
    for option in search_space:
        if option.fqn not in left:
            offered = sorted({other.sharding_type for other in search_space if other.fqn == option.fqn})
            raise PlannerError(
                f"the enumerator offers table {option.fqn.removeprefix('.')!r} only {', '.join(offered)}, and "
                f"DreamShardPlanner may shard it {', '.join(sorted(constraints[option.name].sharding_types))}: give "
                "the planner the enumerator's constraints as well",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
    return kept


def usable_options(search_space: Sequence[ShardingOption], compute_device: str) -> list[ShardingOption]:
    """Options whose cost is known, and of those that amount to the same only one.

    Raises:
        PlannerError: where a table has none, or column widths that one EmbeddingCollection can't mix.
    """
    usable: dict[str, list[ShardingOption]] = {}
    for fqn, options in by_table(search_space).items():
        kernels = set(known_kernels(fqn, [option.compute_kernel for option in options]))
        known = [option for option in options if option.compute_kernel in kernels and not _shares_a_store(option)]
        if not known:
            raise PlannerError(
                f"table {fqn!r} may only be split by columns with compute kernel 'key_value', whose "
                "slices TorchRec wants on one rank each, which DreamShardPlanner cannot promise: allow another "
                "sharding type or kernel, or raise min_partition to the table's dim.",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        # One slice, or one block, is the whole table in a kernel and an exchange of its own.
        whole = {option.compute_kernel for option in known if option.sharding_type == TW}
        known = [o for o in known if o.sharding_type == TW or o.num_shards > 1 or o.compute_kernel not in whole]
        # FBGEMM's CPU kernels crash on blocks without rows, now and then, and always on ranks with nothing else.
        usable[fqn] = [o for o in known if compute_device != "cpu" or all(shard.size[0] for shard in o.shards)]
        if not usable[fqn]:
            raise PlannerError(
                f"table {fqn!r} has {options[0].tensor.shape[0]} rows, which leave some rank without "
                f"any where it is sharded {sorted({o.sharding_type for o in known})}, and FBGEMM's CPU kernels crash "
                "on that: allow another type in its ParameterConstraints.sharding_types.",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
    return _one_width_per_collection(usable)


def _shares_a_store(option: ShardingOption) -> bool:
    """Whether two slices of one table in key-value stores could meet on a rank, which TorchRec rules out."""
    return option.compute_kernel == "key_value" and option.sharding_type in (CW, TWCW, GRID) and option.num_shards > 1


def _one_width_per_collection(tables: dict[str, list[ShardingOption]]) -> list[ShardingOption]:
    """TorchRec wants all column slices of one EmbeddingCollection of one width: the one that splits most bytes, of
    tables that can only be split by columns where there are such."""
    widths: dict[str, Counter[int]] = {}
    forced: dict[str, Counter[int]] = {}
    for options in tables.values():
        only = all(option.sharding_type == CW for option in options)
        for option in options:
            if option.sharding_type == CW and isinstance(option.module[1], EmbeddingCollection):
                width = option.shards[0].size[1]
                for counter in (widths, forced) if only else (widths,):
                    counter.setdefault(option.path, Counter())[width] += option.tensor.numel()
    common = {path: _common(forced.get(path, counter)) for path, counter in widths.items()}
    kept = []
    for fqn, options in tables.items():
        fitting = [
            option
            for option in options
            if option.sharding_type != CW
            or option.path not in common
            or {shard.size[1] for shard in option.shards} == {common[option.path]}
        ]
        if not fitting:
            raise PlannerError(
                f"table {fqn!r} may only be sharded column_wise, in slices of another width than "
                f"the {common[options[0].path]} of other tables of its EmbeddingCollection, which TorchRec "
                "can't mix: give them the same min_partition, or allow another sharding type.",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        kept += fitting
    return kept


def _common(widths: Counter[int]) -> int:
    return max(widths, key=lambda width: (widths[width], -width))


def _smallest(read: ReadProblem) -> list[ShardingOption]:
    """Every table as the option that asks least of any rank: where not even that fits, the partitioner says what is
    missing."""
    storage_PM = read.problem.storage_PM
    proposal = []
    for options, choices in zip(read.options, read.problem.tables, strict=True):
        largest = [max(int(storage_PM[part].sum()) for part in choice.parts) for choice in choices]
        proposal.append(options[largest.index(min(largest))])
    return proposal
