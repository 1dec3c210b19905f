# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Re-planning: from the running plan to one that takes less time over the remaining steps, moving included.

What runs is read as what the ranks that are left hold of each table. Tables that are new, or were cut for other ranks,
have to go somewhere; all others may stay. :mod:`dreamshard_planner.search.few_moves` makes the curve.

Shapes: S shards of an option, D ranks, U units, N positions.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.given_plans import as_option, enumerated_as, sharding_of, shardings, tables_of
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.plans.comparison import stale_differences
from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableInputs, TableSharding
from dreamshard_planner.plans.replan import Move, Moving, Replan, names_that_keep_most, renamed
from dreamshard_planner.problem.parts import positions_of
from dreamshard_planner.search.few_moves import Waypoint, few_moves
from dreamshard_planner.search.states import Change
from dreamshard_planner.search_space.options import fqn_of, hot_rows_of, places_of, type_of
from dreamshard_planner.support.formatting import ranks_in_words, some_of
from dreamshard_planner.support.torch_state import neutral, single_thread


def link_bytes_per_s(topology: Topology) -> float:
    """Return the rate of a topology's slowest link."""
    links, one_host = topology.comms_bandwidths, topology.world_size <= topology.intra_group_size
    return 1e3 * float(links.intra_host_bw if one_host else min(links.intra_host_bw, links.inter_host_bw))


@torch.no_grad()
def replanned(
    model: ModelProblem,
    current: ShardingPlan | SavedPlan,
    fresh: Sequence[ShardingOption],
    steps: int,
    moving: Moving,
    max_bytes_moved: int | None,
    lost: Sequence[int],
) -> Replan:
    """The plan that takes least time over so many steps; arguments and errors as of
    :meth:`~dreamshard_planner.planner.DreamShardPlanner.replan`.

    Args:
        model: the planned one.
        current: what runs.
        fresh: a plan made without a thought of moving, with ranks.
    """
    held = Held.of(model, current, lost)
    with single_thread():
        ways = _Ways(model, held, fresh)
        effort = model.settings.candidates
        walked = few_moves(ways.cost, ways.starts, ways.kept, ways.fresh, ways.received_UN, max_bytes_moved, effort)
        found = [point for point in walked if ways.runs(point.sharding)] or [ways.waypoint(ways.fresh)]
        now, afresh = (
            ways.waypoint(sharding) for sharding in (ways.starts[0] if ways.starts else found[0].sharding, ways.fresh)
        )
    points = [now, *(point for point in found if point.overall_ms < now.overall_ms)]

    @neutral()
    @torch.no_grad()
    def saved(index: int) -> SavedPlan:
        return model.saved(ways.plan(points[index].sharding), "plan")

    return Replan(
        before=held.name,
        curve=tuple(ways.move(point, moving) for point in points),
        make=saved,
        afresh=ways.move(afresh, moving),
        steps=steps,
        max_bytes_moved=max_bytes_moved,
        forced=ways.forced,
        stale=held.stale,
    )


@dataclass(frozen=True)
class Held:
    """Shards that the remaining ranks hold of the model's tables."""

    name: str
    tables: Mapping[str, TableInputs]
    """As the model declares them, by fully qualified name."""
    shards: Mapping[str, tuple[ShardPlace, ...]]
    """Shards of tables that the plan has with the same shape and data type."""
    whole: Mapping[str, TableSharding]
    """Tables of these of which no shard is lost, as they are sharded."""
    same_ranks: bool
    """True if it was made for as many ranks and hosts, and none is lost."""
    forced: tuple[str, ...]
    """Why not all can stay as it is."""
    stale: tuple[str, ...] = ()
    """Other differences of the plan's inputs, for which its file does not load."""

    @classmethod
    def of(cls, model: ModelProblem, current: ShardingPlan | SavedPlan, lost: Sequence[int]) -> Held:
        """Ranks that are left take the numbers from 0 on, in their order; those past the planned model's are lost.
        ValueError for lost ranks that there are not."""
        world_size, given, lost = model.left.world_size, tables_of(current), sorted(set(lost))
        ranks_now = current.inputs.topology.world_size if isinstance(current, SavedPlan) else None
        if odd := [rank for rank in lost if rank < 0 or (ranks_now is not None and rank >= ranks_now)]:
            of = f": the plan that runs is for {ranks_now} ranks" if ranks_now else ""
            raise ValueError(f"there is no rank {odd[0]} to be lost{of}")
        before = current.inputs.tables if isinstance(current, SavedPlan) else {}
        shards, whole, gone = {}, {}, set(lost)
        new: list[str] = []
        changed: list[str] = []
        for fqn, declared in model.inputs.tables.items():
            if fqn not in given or before.get(fqn, declared).weights != declared.weights:
                (changed if fqn in given else new).append(fqn)
                continue
            table = sharding_of(fqn, given[fqn], (declared.rows, declared.dim))
            ranks = {shard.rank: shard.rank - sum(rank < shard.rank for rank in lost) for shard in table.shards}
            gone |= {rank for rank, now in ranks.items() if now >= world_size}
            left = [replace(shard, rank=ranks[shard.rank]) for shard in table.shards if shard.rank not in gone]
            shards[fqn] = tuple(left)
            if len(left) == len(table.shards):
                whole[fqn] = replace(table, shards=tuple(left))
        forced = [f"{what}: {some_of(of, ())}" for what, of in (("new", new), ("changed", changed)) if of]
        forced += [f"{ranks_in_words(gone)} lost"] * bool(gone)
        if not isinstance(current, SavedPlan):
            return cls("the plan", model.inputs.tables, shards, whole, not gone, tuple(forced))
        was, now = current.inputs.topology, model.inputs.topology
        shape = attrgetter("world_size", "local_world_size", "pod_size")
        same = shape(was) == shape(now)
        if not same and not gone:
            more_or_less = f"{was.all_ranks} -> {now.all_ranks} ranks"
            forced.append(f"{was} -> {now}" if was.all_ranks == now.all_ranks else more_or_less)
        stale = tuple(stale_differences(current.inputs, model.inputs))
        return cls(current.name, model.inputs.tables, shards, whole, same and not gone, tuple(forced), stale)

    def received_SD(self, option: ShardingOption, ranks: int) -> np.ndarray:
        """Bytes of each shard of an option, optimizer states with them, that each rank does not hold, were the shard
        there; none of new tables."""
        held = self.shards.get(fqn_of(option))
        start_S2, size_S2 = np.array(places_of(option), dtype=np.int64).swapaxes(0, 1)
        if held is None:
            return np.zeros((len(start_S2), ranks), dtype=np.int64)
        new_SD = size_S2.prod(-1, keepdims=True).repeat(ranks, 1)
        for shard in held:
            start_2, end_2 = np.array(shard.offset), np.add(shard.offset, shard.size)
            sides_S2 = np.minimum(start_S2 + size_S2, end_2) - np.maximum(start_S2, start_2)
            new_SD[:, shard.rank] -= sides_S2.clip(0).prod(-1)
        return self.tables[fqn_of(option)].trained_bytes(new_SD, size_S2[:, 1:].clip(1))


class _Ways:
    """The problem whose tables may take what the search space has, what they are sharded as, or the fresh plan's way.

    Args:
        model: the planned one.
        held: what ranks hold.
        fresh: with ranks.
    """

    def __init__(self, model: ModelProblem, held: Held, fresh: Sequence[ShardingOption]) -> None:
        self._held, self._saved = held, model.saved(fresh, "plan")
        named = model.options(renamed(self._saved, names_that_keep_most(held.shards, self._saved)))
        searched = _searched(model, named)
        known = {fqn: table for fqn, table in held.whole.items() if enumerated_as(model.by_table[fqn], table)}
        ranks = model.left.world_size
        now = [as_option(fqn, table, model.by_table[fqn], ranks) for fqn, table in known.items()]
        ways = set(map(_way, searched))
        now = [option for option in now if _may_stay(option, ways)]
        options = list({_way(option): option for option in [*now, *named, *searched]}.values())
        model.context.complete(options)
        self.read = model.context.read(options, model.left)
        self.cost = model.context.cost(self.read)
        self._index = {_way(option): (table, index) for table, choices in enumerate(self.read.options)
                       for index, option in enumerate(choices)}  # fmt: skip
        changes = {change[0]: change for change in map(self._change, named)}
        self.fresh = _sharding(changes)
        self.kept = [change for option in now if (change := self._staying(option))]
        mixed = _sharding(changes | {change[0]: change for change in self.kept})
        self.starts = [mixed] if bool(self.cost.problem.fits(mixed)) else []
        self._received: dict[tuple[int, int], np.ndarray] = {}
        self._model = model

    def runs(self, sharding: Sharding) -> bool:
        """Return whether ranks can exchange the outputs of its tables."""
        return not self._model.mixed_exchanges(self.read.assign(sharding))

    @property
    def forced(self) -> tuple[str, ...]:
        """Why the current plan cannot stay."""
        kept = {self.cost.problem.names[table] for table, *_ in self.kept}
        cut = [fqn for fqn in self._held.whole if fqn not in kept]
        forced = [*self._held.forced, *([f"may not be sharded as they are: {some_of(cut, ())}"] if cut else ())]
        return tuple(forced or ([] if self.starts else ["it does not keep within memory and rules"]))

    def received_UN(self, table: int, option: int) -> np.ndarray:
        """See :data:`~dreamshard_planner.search.few_moves.Received`."""
        received_SD = self._received_SD(table, option)
        span = self.cost.problem.tables[table][option].units[0].span
        units, positions = len(received_SD) // span, received_SD.shape[1] // span
        return received_SD.reshape(units, span, positions, span).diagonal(axis1=1, axis2=3).sum(-1)

    def _received_SD(self, table: int, option: int) -> np.ndarray:
        key = table, option
        if key not in self._received:
            ranks = self.cost.problem.num_ranks
            self._received[key] = self._held.received_SD(self.read.options[table][option], ranks)
        return self._received[key]

    def waypoint(self, sharding: Sharding) -> Waypoint:
        """Its bytes are not counted."""
        return Waypoint(0, self.cost.overall_ms(sharding), sharding)

    def move(self, point: Waypoint, moving: Moving) -> Move:
        """Return what it takes to go there."""
        to_rank_D = np.zeros(self.cost.problem.num_ranks, dtype=np.int64)
        chosen = zip(self.cost.problem.tables, point.sharding.options, point.sharding.positions, strict=True)
        for table, (options, option, positions) in enumerate(chosen):
            ranks = options[option].ranks(positions)
            to_rank_D += np.bincount(
                ranks, self._received_SD(table, option)[range(len(ranks)), ranks], len(to_rank_D)
            ).astype(np.int64)
        sharding = point.sharding
        changed = [change for change in self.kept
                   if change != (change[0], sharding.options[change[0]], sharding.positions[change[0]])]  # fmt: skip
        tables = len(self._held.shards) - len(self.kept) + len(changed)
        stays = not (tables or self.forced)
        return Move(
            tables=tables,
            bytes_moved=int(to_rank_D.sum()),
            bytes_to_one_rank=int(to_rank_D.max()),
            step_ms=point.overall_ms,
            moving_seconds=0.0 if stays else moving.seconds(int(to_rank_D.max())),
        )

    def plan(self, sharding: Sharding) -> SavedPlan:
        """Return the plan with its inputs; costs are still those of the fresh plan, without those of its shards."""
        return replace(self._saved, sharding=shardings(self.read.assign(sharding)), alone_ms={})

    def _change(self, option: ShardingOption) -> Change:
        table, index = self._index[_way(option)]
        return table, index, positions_of(option, self.cost.problem.tables[table][index].units)

    def _staying(self, option: ShardingOption) -> Change | None:
        """None where the ranks that are left no longer lie as TorchRec needs them."""
        try:
            return self._change(option)
        except PlannerError:
            if self._held.same_ranks:
                raise
            return None


def _searched(model: ModelProblem, fresh: Sequence[ShardingOption]) -> list[ShardingOption]:
    """The options that planning searches."""
    guessed = any(map(model.context.is_guess, fresh))
    return model.searched if guessed else model.context.certain_options(model.searched)


def _may_stay(option: ShardingOption, searched: Collection[Hashable]) -> bool:
    """Unless an EmbeddingCollection could come to have column slices of two widths, which TorchRec cannot mix."""
    mixes = type_of(option).splits_columns and isinstance(option.module[1], EmbeddingCollection)
    return not mixes or _way(option) in searched


def _way(option: ShardingOption) -> Hashable:
    """Return a key that is equal for options that shard a table alike, shard by shard."""
    cut = tuple(places_of(option))
    way = option.sharding_type, option.compute_kernel, option.cache_load_factor, hot_rows_of(option)
    return fqn_of(option), *way, cut


def _sharding(changes: Mapping[int, Change]) -> Sharding:
    """Join the changes of all tables."""
    ordered = [changes[table] for table in range(len(changes))]
    return Sharding(tuple(option for _, option, _ in ordered), tuple(positions for *_, positions in ordered))
