# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Re-planning: from the running plan to one that takes less time over the remaining steps, moving included.

What runs is read as what the ranks that are left hold of each table. Tables that are new, or were cut for other ranks,
have to go somewhere; all others may stay. :mod:`dreamshard_planner.search.few_moves` makes the curve.

Shapes: S shards of a table, N shards held of it, D ranks, H pods, L ranks of a pod, U units, P positions.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.cost.problem import Change, Sharding
from dreamshard_planner.planning.given_plans import as_option, enumerated_as, sharding_of, tables_of
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.plans.comparison import stale_differences
from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableInputs, TableSharding
from dreamshard_planner.plans.replan import Move, Replan
from dreamshard_planner.problem.parts import positions_of
from dreamshard_planner.search.few_moves import few_moves
from dreamshard_planner.search_space.options import fqn_of, hot_rows_of, places_of, type_of
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.formatting import ranks_in_words, some_of
from dreamshard_planner.support.torch_state import neutral, single_thread

FORBIDDEN = 1e18
"""Bytes for the name of a rank with other memory: more than any."""


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
    bytes_per_s: float,
    restart_seconds: float,
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
        walked = few_moves(ways.cost, ways.starts, ways.kept, ways.fresh, ways.received_UP, max_bytes_moved, effort)
        found = [point.sharding for point in walked if ways.runs(point.sharding)] or [ways.fresh]
        now, step_ms = (ways.starts or found)[0], ways.cost.overall_ms
        points = [now, *(sharding for sharding in found if step_ms(sharding) < step_ms(now))]

    def move(sharding: Sharding) -> Move:
        tables, to_rank_D = ways.moved(sharding)
        return Move(
            tables=tables,
            bytes_moved=int(to_rank_D.sum()),
            bytes_to_one_rank=int(to_rank_D.max()),
            step_ms=step_ms(sharding),
            moving_seconds=restart_seconds + int(to_rank_D.max()) / bytes_per_s if tables or ways.forced else 0.0,
        )

    @neutral()
    @torch.no_grad()
    def saved(index: int) -> SavedPlan:
        return model.saved(ways.read.assign(points[index]), "plan")

    return Replan(
        before=held.name,
        curve=tuple(map(move, points)),
        make=saved,
        afresh=move(ways.fresh),
        steps=steps,
        max_bytes_moved=max_bytes_moved,
        forced=ways.forced,
        stale=held.stale,
    )


@dataclass(frozen=True)
class Held:
    """Shards that the remaining ranks hold of the model's tables."""

    name: str
    shards: Mapping[str, tuple[ShardPlace, ...]]
    """Shards of tables that the plan has with the same shape and data type."""
    whole: Mapping[str, TableSharding]
    """Tables of these of which no shard is lost, as they are sharded."""
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
            return cls("the plan", shards, whole, tuple(forced))
        was, now = current.inputs.topology, model.inputs.topology
        shape = attrgetter("world_size", "local_world_size", "pod_size")
        if shape(was) != shape(now) and not gone:
            more_or_less = f"{was.all_ranks} -> {now.all_ranks} ranks"
            forced.append(f"{was} -> {now}" if was.all_ranks == now.all_ranks else more_or_less)
        stale = tuple(stale_differences(current.inputs, model.inputs))
        return cls(current.name, shards, whole, tuple(forced), stale)


class _Ways:
    """The problem whose tables may take what the search space has, what they are sharded as, or the fresh plan's way.

    Args:
        model: the planned one.
        held: what ranks hold.
        fresh: with ranks.
    """

    def __init__(self, model: ModelProblem, held: Held, fresh: Sequence[ShardingOption]) -> None:
        self._model, self._held, saved = model, held, model.saved(fresh, "plan")
        named = model.options(renamed(saved, names_that_keep_most(held.shards, saved)))
        guessed = any(map(model.context.is_guess, named))
        searched = model.searched if guessed else model.context.certain_options(model.searched)
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
        _, chosen, positions = zip(*sorted(map(self._change, named)), strict=True)
        self.fresh = mixed = Sharding(chosen, positions)
        self.kept: list[Change] = []
        for option in now:
            with suppress(PlannerError):  # its ranks do not lie as TorchRec needs them
                self.kept.append(self._change(option))
        for change in self.kept:
            mixed = mixed.changed(*change)
        self.starts = [mixed] if bool(self.cost.problem.fits(mixed)) else []
        self._received_SD = cache(self._received)

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

    def received_UP(self, table: int, option: int) -> np.ndarray:
        """See :data:`~dreamshard_planner.search.few_moves.Received`."""
        received_SD = self._received_SD(table, option)
        span = self.cost.problem.tables[table][option].span
        units, positions = len(received_SD) // span, received_SD.shape[1] // span
        return received_SD.reshape(units, span, positions, span).diagonal(axis1=1, axis2=3).sum(-1)

    def _received(self, table: int, option: int) -> np.ndarray:
        sharded, ranks = self.read.options[table][option], self.cost.problem.num_ranks
        fqn = fqn_of(sharded)
        return received_SD(self._model.inputs.tables[fqn], places_of(sharded), self._held.shards.get(fqn), ranks)

    def moved(self, sharding: Sharding) -> tuple[int, np.ndarray]:
        """Return the number of tables that change, and the bytes that each rank gets."""
        to_rank_D = np.zeros(self.cost.problem.num_ranks, dtype=np.int64)
        tables = self.cost.problem.tables
        chosen = [*zip(range(len(tables)), sharding.options, sharding.positions, strict=True)]
        for table, option, positions in chosen:
            ranks = tables[table][option].ranks(positions)
            np.add.at(to_rank_D, ranks, self._received_SD(table, option)[range(len(ranks)), ranks])
        return len(self._held.shards) - len({*chosen} & {*self.kept}), to_rank_D

    def _change(self, option: ShardingOption) -> Change:
        table, index = self._index[_way(option)]
        return table, index, positions_of(option, self.cost.problem.tables[table][index].span)


def received_SD(
    table: TableInputs,
    places: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    held: Sequence[ShardPlace] | None,
    ranks: int,
) -> np.ndarray:
    """Return the bytes of each shard, optimizer states with them, that each rank does not hold, were the shard there.

    Args:
        table: of the shards.
        places: offset and size of each.
        held: shards that ranks have; None for a new table, which gets no bytes.
        ranks: number of ranks.
    """
    start_S2, size_S2 = np.array(places, dtype=np.int64).swapaxes(0, 1)
    if held is None:
        return np.zeros((len(places), ranks), dtype=np.int64)
    new_SD = size_S2.prod(-1, keepdims=True).repeat(ranks, 1)
    for shard in held:
        start_2, end_2 = np.array(shard.offset), np.add(shard.offset, shard.size)
        sides_S2 = np.minimum(start_S2 + size_S2, end_2) - np.maximum(start_S2, start_2)
        new_SD[:, shard.rank] -= sides_S2.clip(0).prod(-1)
    return table.trained_bytes(new_SD, size_S2[:, 1:].clip(1))


def names_that_keep_most(held: Mapping[str, Sequence[ShardPlace]], after: SavedPlan) -> tuple[int, ...]:
    """Name each rank of ``after`` so that most bytes of weights and optimizer states stay where they are.

    Ranks of one pod (by default of one host) remain in one pod. Ranks of other memory, and all ranks if placement rules
    name some, keep their names.

    Args:
        held: shards that ranks hold, by fully qualified name of the table.
        after: the other plan.
    """
    other = after.inputs.topology
    ranks, per_pod = other.world_size, other.pod_ranks
    if ranks % per_pod or after.inputs.placement_rules.get("on_ranks"):
        return tuple(range(ranks))
    # Bytes to receive under each name; half a byte less under the own one.
    rank_DD, pod_HH = -np.eye(ranks) / 2, -np.eye(ranks // per_pod) / 2
    for fqn, table in after.tables():
        span = _span(table)
        if span == "world" or not held.get(fqn):
            continue
        places = [(shard.offset, shard.size) for shard in table.shards]
        bytes_SD = received_SD(after.inputs.tables[fqn], places, held[fqn], ranks)
        for shard, bytes_D in zip(table.shards, bytes_SD, strict=True):
            if span == "rank":
                rank_DD[shard.rank] += bytes_D
            else:  # its place within the pod stays
                pod_HH[shard.rank // per_pod] += bytes_D[shard.rank % per_pod :: per_pod]
    memory_D = list(zip(*(sizes for _, sizes in sorted(other.memory_bytes.items())), strict=True))
    rank_DD[np.array([[mine != its for its in memory_D] for mine in memory_D])] = FORBIDDEN
    blocks_HHLL = rank_DD.reshape(len(pod_HH), per_pod, len(pod_HH), per_pod).swapaxes(1, 2)
    pairs = [[_assigned(block_LL) for block_LL in row_HLL] for row_HLL in blocks_HHLL]
    pod_HH += [[received for _, received in row] for row in pairs]
    pod_names, _ = _assigned(pod_HH)
    return tuple(name * per_pod + place for pod, name in enumerate(pod_names) for place in pairs[pod][name][0])


def _assigned(received: np.ndarray) -> tuple[list[int], float]:
    """The column of each row for the least in all, and that."""
    rows, columns = linear_sum_assignment(received)
    return columns.tolist(), float(received[rows, columns].sum())


def renamed(plan: SavedPlan, names: Sequence[int]) -> SavedPlan:
    """Return the plan with its shards on ranks of other names; its predicted costs stay as they are.

    Tables on all ranks, or on all ranks of a pod, keep the order of ranks, which TorchRec needs.
    """
    if list(names) == list(range(len(names))):
        return plan
    per_pod = plan.inputs.topology.pod_ranks
    # Ranks of a pod get names in one pod.
    in_order = [names[rank - rank % per_pod] // per_pod * per_pod + rank % per_pod for rank in range(len(names))]
    new = {"rank": names, "host": in_order, "world": range(len(names))}

    def moved(table: TableSharding) -> TableSharding:
        ranks = new[_span(table)]
        return replace(table, shards=tuple(replace(shard, rank=ranks[shard.rank]) for shard in table.shards))

    sharding = {path: {name: moved(table) for name, table in of.items()} for path, of in plan.sharding.items()}
    return replace(plan, sharding=sharding)


def _span(table: TableSharding) -> str:
    known = SHARDING_TYPES.get(table.sharding_type)
    return "world" if known is None else known.span


def _may_stay(option: ShardingOption, searched: Collection[Hashable]) -> bool:
    """Unless an EmbeddingCollection could come to have column slices of two widths, which TorchRec cannot mix."""
    mixes = type_of(option).splits_columns and isinstance(option.module[1], EmbeddingCollection)
    return not mixes or _way(option) in searched


def _way(option: ShardingOption) -> Hashable:
    """Return a key that is equal for options that shard a table alike, shard by shard."""
    way = option.sharding_type, option.compute_kernel, option.cache_load_factor, hot_rows_of(option)
    return fqn_of(option), *way, tuple(places_of(option))
