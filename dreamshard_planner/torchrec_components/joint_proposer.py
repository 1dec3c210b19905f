# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Proposer`` for all sharding types: how tables are split, searched together with where shards go."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torchrec.distributed.planner.types import (
    Enumerator,
    PlannerError,
    Proposer,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import reset_shard_rank

from dreamshard_planner.cost.sharding import Sharding
from dreamshard_planner.planning.baseline import TorchRecPlan, torchrec_plan
from dreamshard_planner.planning.context import PlanningContext, identity, ranks_by_choice
from dreamshard_planner.plans.report import Report
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.search.joint import DEFAULT_JOINT, JointConfig, JointResult, joint_search
from dreamshard_planner.search.local_search import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.search.place import Contender
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.search_space.slices import is_torchrecs
from dreamshard_planner.search_space.towers import pinned_options
from dreamshard_planner.search_space.usable_options import as_constrained, usable_options
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.torchrec_components.partitioner import Outcome, place_proposal
from dreamshard_planner.torchrec_components.proposer import TableWiseProposer


class JointProposer(Proposer):
    """Proposes what the joint search makes of all options.

    TorchRec tells a proposer what the storage reservation left only with the feedback on its first proposal. Where that
    is not given beforehand, whole tables are proposed first, and the search follows. Where every table can only be
    placed whole, this is :class:`~dreamshard_planner.torchrec_components.proposer.TableWiseProposer`.

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


def _smallest(read: ReadProblem) -> list[ShardingOption]:
    """Every table as the option that asks least of any rank: where not even that fits, the partitioner says what is
    missing."""
    storage_PM = read.problem.storage_PM
    proposal = []
    for options, choices in zip(read.options, read.problem.tables, strict=True):
        largest = [max(int(storage_PM[part].sum()) for part in choice.parts) for choice in choices]
        proposal.append(options[largest.index(min(largest))])
    return proposal
