# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP: an action says how the next table is split, and where its units go.

A rank has *heights*: its compute, and of every collective the milliseconds of what it sends. The cost of a plan is the
sum, over compute and collectives, of the highest rank's height, and the start-up of the collectives that carry
anything. Heights are relative to the level height, which ranks would have if every table took its cheapest option and
all of it spread evenly, so that tasks of any size look alike.

Tables come in descending order of what their cheapest option costs. The actions of a table are its options times
:data:`RULES`, each of which lays all units of an option down side by side, where they raise one measure of the heights
least. Options whose units find no room are masked, as are sharding types that an episode does without. A table that
finds no room at all ends its episode as infeasible. Reward: minus the cost of the finished plan.

Many episodes of one task advance together; the only Python loop is over tables. States are running sums, so that a step
costs O(options x ranks).

Shapes: E episodes, T tables, O options of the table at hand, K rules, A = O x K actions, U units of an option (padded),
D ranks, C collectives, J of them that an option sends in (padded), R = 1 + J heights that it raises, H latent channels,
G fused groups, M limits, Y channels of actions, N types of sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.compute import both_passes
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding, has_room
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.search_space.kernels import in_host_memory
from dreamshard_planner.search_space.sharding_types import CW, DP, GRID, RW, SHARDING_TYPES, TW, TWCW, TWRW

TYPES = (TW, CW, TWCW, RW, TWRW, GRID, DP)
"""That actions know, in the order of the network's channels; a type that is added later is no action."""
RULES = ("mean_8", "mean_2", "highest")
"""What a rule's positions raise least: the power mean of the heights of all ranks, of exponent 8 or 2, or the highest
one; among equals, the first."""
TIES = 1e-3
"""Weight of the mean of exponent 8 beside the highest rank: many positions do not raise that."""
RISES = ("mean", "mean_2", "mean_8", "highest")
CHANNELS = tuple(f"{rise}_{of}" for rise in RISES for of in ("compute", "exchanges")) + ("start_up",)
"""What an action raises, of compute and of exchanges: the heights' mean, power means and maximum; and what collectives
take that nothing was sent in before."""
AMPLE = 0.5
"""Share of the device memory up to which all tables may fill it before options in host memory become actions."""
DESCRIBED = len(TYPES) + 7
"""Channels that say what an option is."""


@dataclass(frozen=True)
class TableActions:
    """The options of one table, as actions take them."""

    table: int
    option_O: tuple[int, ...]
    span_O: Tensor
    part_OUD: Tensor
    """Part of each unit that a rank gets, were the unit to lie there, int64."""
    exists_OU: Tensor
    """Which units an option has, bool."""
    pinned_OU: Tensor
    """First rank of units that must lie somewhere; -1 for others."""
    group_O: Tensor
    collective_OJ: Tensor
    """Those that an option sends in; C, which has no bytes, where padded."""
    type_O: Tensor
    level: float
    """What the cheapest option adds to the level height."""
    described_OY: Tensor
    """What the options are, float32 [O, DESCRIBED]."""


class ShardingTask:
    """A problem whose tables are sharded one after the other.

    Args:
        cost: the problem and its cost.
        asked: what its options ask of all ranks together.
    """

    def __init__(self, cost: Cost, asked: OptionTotals) -> None:
        problem = cost.problem
        self.cost, self.problem, self._asked = cost, problem, asked
        self.level_ms = max(1e-9, asked.least_ms / problem.num_ranks)
        collectives = problem.collectives.collectives
        per_byte_C = sum(problem.collectives.alone_ms_per_byte()) / self.level_ms
        self.start_up_C = torch.tensor(
            [sum(model.latency_ms for model in each.passes if model.world_size > 1) for each in collectives] + [0.0],
            dtype=torch.float64,
        ).div(self.level_ms)
        """What each collective takes to start; and nothing, for padding."""
        self.sent_PC = torch.nn.functional.pad(problem.bytes_PC * per_byte_C, (0, 1))
        """What each part adds to the height of its rank in each collective; and nothing, for padding."""
        self._kept_TO = self._kept()
        total_TO = np.where(self._kept_TO, asked.total_ms_TO, np.inf)
        self._order_T = np.argsort(-total_TO.min(1), kind="stable")
        cheapest_T = total_TO.min(1)[self._order_T]
        self.share_T = cheapest_T / max(1e-30, cheapest_T.sum())
        """Of the cost of all tables, in the order in which they are sharded."""
        self.left_T = 1 - np.concatenate([[0.0], self.share_T.cumsum()[:-1]])
        """The same of each table and all that follow."""
        self._ahead_TNY = self._ahead(total_TO[self._order_T])

    @property
    def num_tables(self) -> int:
        return self.problem.num_tables

    def _kept(self) -> np.ndarray:
        """Options that are actions, bool [T, O]: of :data:`TYPES`; and where tables in device memory would fill little
        of it, none in host memory, unless a table has no others."""
        problem, finite_TO = self.problem, np.isfinite(self._asked.total_ms_TO)
        room_TO = np.zeros_like(finite_TO)
        is_host_TO, is_replica_TO = np.zeros_like(finite_TO), np.zeros_like(finite_TO)
        for table, options in enumerate(problem.tables):
            for index, option in enumerate(options):
                fits = len(option.units) * option.units[0].span <= problem.num_ranks
                room_TO[table, index] = fits and option.sharding_type in TYPES
                is_host_TO[table, index] = in_host_memory(option.kernel)
                is_replica_TO[table, index] = SHARDING_TYPES[option.sharding_type].is_replicated
        kept_TO = finite_TO & room_TO
        most_T = np.where(kept_TO & ~is_host_TO & ~is_replica_TO, self._asked.needs_TOM[..., 0], 0.0).max(1)
        if most_T.sum() <= AMPLE * self._asked.limits_M[0]:
            fast_TO = kept_TO & ~is_host_TO
            kept_TO = np.where(fast_TO.any(1, keepdims=True), fast_TO, kept_TO)
        self.may_be_played = bool(kept_TO.any(1).all())
        """Whether every table has an option of these whose units find ranks of their own."""
        return np.where(kept_TO.any(1, keepdims=True), kept_TO, finite_TO)

    def _ahead(self, total_TO: np.ndarray) -> np.ndarray:
        """If a table and all that follow took one type, as far as they may: the logarithm of what they would cost over
        their cheapest options, and of the largest part over what is left for a rank, [T, N, 2]."""
        kind_TO, largest_TO = self._asked.kind_TO[self._order_T], self._asked.largest_ms_TO[self._order_T]
        each_T, ahead = np.arange(len(total_TO)), []
        rest_T = total_TO.min(1)[::-1].cumsum()[::-1].clip(1e-30)
        for kind in TYPES:
            own_TO = np.where(kind_TO == kind, total_TO, np.inf)
            choice_T = np.where(np.isfinite(own_TO.min(1)), own_TO.argmin(1), total_TO.argmin(1))
            cost_T = total_TO[each_T, choice_T][::-1].cumsum()[::-1]
            largest_T = np.maximum.accumulate(largest_TO[each_T, choice_T][::-1])[::-1]
            lumps_T = np.log10(largest_T.clip(1e-30) * self.problem.num_ranks / rest_T).clip(-3, 3)
            ahead.append(np.stack([np.log(cost_T.clip(1e-30) / rest_T).clip(0, 5), lumps_T], -1))
        return np.stack(ahead, 1)

    def actions(self, step: int) -> TableActions:
        """Of the table that comes at a step."""
        problem, table = self.problem, int(self._order_T[step])
        all_options, ranks = problem.tables[table], problem.num_ranks
        chosen = sorted(np.flatnonzero(self._kept_TO[table]).tolist(), key=lambda o: all_options[o].units[0].span)
        options = [all_options[index] for index in chosen]
        most = max(len(option.units) for option in options)
        part_OUD = np.zeros((len(options), most, ranks), dtype=np.int64)
        pinned_OU = np.full((len(options), most), -1)
        sends: list[list[int]] = []
        for row, option in enumerate(options):
            parts_UL = np.array([unit.parts for unit in option.units])
            span = parts_UL.shape[1]
            part_OUD[row, : len(parts_UL)] = np.tile(parts_UL, ranks // span)
            if option.pinned is not None:
                pinned_OU[row, : len(parts_UL)] = np.array(option.pinned) * span
            sends.append(np.flatnonzero(self._sends_PC[parts_UL.ravel()].any(0)).tolist())
        width, none = max(1, *map(len, sends)), len(problem.collectives.collectives)
        type_O = torch.tensor([TYPES.index(option.sharding_type) for option in options])
        total_O = self._asked.total_ms_TO[table, chosen] / problem.num_ranks / self.level_ms
        return TableActions(
            table=table,
            option_O=tuple(chosen),
            span_O=torch.tensor([option.units[0].span for option in options]),
            part_OUD=torch.from_numpy(part_OUD),
            exists_OU=torch.tensor([[unit < len(option.units) for unit in range(most)] for option in options]),
            pinned_OU=torch.from_numpy(pinned_OU),
            group_O=torch.tensor([problem.group_of(table, index) for index in chosen]),
            collective_OJ=torch.tensor([columns + [none] * (width - len(columns)) for columns in sends]),
            type_O=type_O,
            level=max(1e-9, float(total_O.min())),
            described_OY=self._described(step, chosen, type_O, torch.from_numpy(total_O)),
        )

    @cached_property
    def _sends_PC(self) -> np.ndarray:
        return self.problem.bytes_PC.numpy() > 0

    def _described(self, step: int, chosen: Sequence[int], type_O: Tensor, total_O: Tensor) -> Tensor:
        """Type; whether in host memory; units and their span; how the tables that follow would do with this type; and
        what it costs over the cheapest option, [O, DESCRIBED]."""
        options = [self.problem.tables[int(self._order_T[step])][index] for index in chosen]
        is_host_O = [float(in_host_memory(option.kernel)) for option in options]
        sizes_O2 = torch.tensor([[len(option.units), option.units[0].span] for option in options]).log2()
        times_O1 = (total_O / total_O.min().clamp_min(1e-30))[:, None]
        columns = [
            torch.nn.functional.one_hot(type_O, len(TYPES)),
            torch.tensor(is_host_O)[:, None],
            sizes_O2 / torch.tensor([3.0, 8.0]),
            torch.from_numpy(self._ahead_TNY[step])[type_O],
            (times_O1 - 1).clamp(0, 10),
            times_O1.log().clamp(0, 5),
        ]
        return torch.cat([column.float() for column in columns], -1)


@dataclass(frozen=True)
class Choices:
    """What a policy sees of the next table's actions."""

    actions: TableActions
    rise_EAY: Tensor
    """:data:`CHANNELS` of each action, over what the table adds to the level height, float32."""
    free_EA: Tensor
    """Share of a rank's memory that stays free where it is scarcest, float32."""
    legal_EA: Tensor


class EstimatedMDP:
    """Episodes of one task side by side.

    Args:
        task: tables and ranks.
        episodes: how many.
        types_EN: sharding types that each episode may use, bool; where a table has no other, it takes what it has.
        option_ET: the option that each table takes in each episode, which then only chooses rules; -1: any. Where that
            finds no room, the table takes another one.
    """

    def __init__(
        self, task: ShardingTask, episodes: int, types_EN: Tensor | None = None, option_ET: Tensor | None = None
    ) -> None:
        problem, ranks = task.problem, task.problem.num_ranks
        self.task, self.types_EN, self.option_ET, self.step_index = task, types_EN, option_ET, 0
        groups, channels = problem.num_groups, task.cost.latent_PH.shape[1]
        self.latent_EGDH = torch.zeros(episodes, groups, ranks, channels, dtype=torch.float64)
        self.group_ms_EGD = torch.zeros(episodes, groups, ranks, dtype=torch.float64)
        self.height_ERD = torch.zeros(episodes, 1 + task.sent_PC.shape[1], ranks, dtype=torch.float64)
        """Of compute, of every collective, and of none."""
        self.free_EDM = problem.limits_DM.repeat(episodes, 1, 1)
        self.alive_E = torch.ones(episodes, dtype=torch.bool)
        self._limits_DM = problem.limits_DM.double().clamp_min(1)
        self._episode_E = torch.arange(episodes)
        self._taken: list[tuple[TableActions, list[int], list[list[int]]]] = []
        compute = task.cost.compute
        self._group_cost = compute.approximate_ms if compute.approximates else compute.group_cost_ms

    def observe(self) -> Choices:
        """The next table's actions."""
        actions = self.task.actions(self.step_index)
        self._actions, part_OD = actions, actions.part_OUD[:, 0]
        rises = _Rises.of(self._before(actions), self._added(actions, part_OD), actions.span_O)
        need_ODM = self.task.problem.needs_PM[part_OD]
        room_EOD = has_room(need_ODM, self.free_EDM[:, None])
        fits_EOD = _over_spans(room_EOD[:, :, None], actions.span_O, torch.all)[:, :, 0]
        self._rank_EOKU, legal_EOK = _positions(rises.keys(), fits_EOD, actions)
        rise_EOKY = self._channels(rises, actions)
        left_EOD = ((self.free_EDM[:, None] - need_ODM) / self._limits_DM).amin(-1)
        free_EOK = _at(left_EOD[:, :, None], self._rank_EOKU)[:, :, 0].amin(-1)
        return Choices(
            actions,
            (rise_EOKY / actions.level).flatten(1, 2).float(),
            free_EOK.flatten(1).float(),
            self._legal(actions, legal_EOK).flatten(1),
        )

    def _before(self, actions: TableActions) -> Tensor:
        """Heights that each option would raise, as they are, [E, O, R, D]."""
        compute_O1 = torch.zeros(len(actions.option_O), 1, dtype=torch.int64)
        return self.height_ERD[:, torch.cat([compute_O1, actions.collective_OJ + 1], 1)]

    def _added(self, actions: TableActions, part_OD: Tensor) -> Tensor:
        """What the first unit of each option would add to them on each rank, [E, O, R, D]."""
        latent_EODH = self.latent_EGDH[:, actions.group_O] + self.task.cost.latent_PH[part_OD]
        self._after_ms_EOD = both_passes(self._group_cost(latent_EODH)).double()
        compute_EOD = (self._after_ms_EOD - self.group_ms_EGD[:, actions.group_O]) / self.task.level_ms
        column_ODJ = actions.collective_OJ[:, None].expand(-1, part_OD.shape[1], -1)
        sent_OJD = self.task.sent_PC[part_OD].gather(-1, column_ODJ).transpose(1, 2)
        return torch.cat([compute_EOD[:, :, None], sent_OJD.expand(len(compute_EOD), -1, -1, -1)], 2)

    def _channels(self, rises: _Rises, actions: TableActions) -> Tensor:
        """:data:`CHANNELS` of all units of each action together, [E, O, K, Y]."""
        risen = rises.together(self._rank_EOKU, actions.exists_OU)
        columns = [part for rise_EORK in risen for part in (rise_EORK[:, :, 0], rise_EORK[:, :, 1:].sum(2))]
        start_up_OJ = self.task.start_up_C[actions.collective_OJ]
        opened_EO = ((rises.highest_EOR[:, :, 1:] <= 0) * start_up_OJ).sum(-1)
        return torch.stack([*columns, opened_EO[..., None].expand_as(columns[0])], -1)

    def _legal(self, actions: TableActions, legal_EOK: Tensor) -> Tensor:
        """Actions of the types and options that an episode may use, where there are any. Dead episodes keep one legal
        action, so that a softmax stays defined."""
        if self.types_EN is not None:
            legal_EOK = _narrowed(legal_EOK, self.types_EN[:, actions.type_O])
        if self.option_ET is not None:
            option_E1 = self.option_ET[:, [actions.table]]
            legal_EOK = _narrowed(legal_EOK, option_E1 == torch.tensor(actions.option_O))
        dead_E = ~legal_EOK.flatten(1).any(-1)
        self.alive_E = self.alive_E & ~dead_E
        legal_EOK[dead_E, 0, 0] = True
        return legal_EOK

    def step(self, action_E: Tensor) -> None:
        """Shard the table at hand in every episode; call :meth:`observe` first."""
        actions, each_E = self._actions, self._episode_E
        option_E, rule_E = action_E // len(RULES), action_E % len(RULES)
        rank_EU, span_E11 = self._rank_EOKU[each_E, option_E, rule_E], actions.span_O[option_E][:, None, None]
        exists_EU1 = actions.exists_OU[option_E][..., None]
        rank_D = torch.arange(self.task.problem.num_ranks)
        here_EUD = (rank_D // span_E11 == rank_EU[..., None] // span_E11) & exists_EU1
        part_EUD, weight_EUD1 = actions.part_OUD[option_E], here_EUD.double()[..., None]
        group_E = actions.group_O[option_E]
        self.latent_EGDH[each_E, group_E] += (self.task.cost.latent_PH[part_EUD] * weight_EUD1).sum(1)
        self.height_ERD[:, 1:] += (self.task.sent_PC[part_EUD] * weight_EUD1).sum(1).transpose(1, 2)
        self.free_EDM -= (self.task.problem.needs_PM[part_EUD] * here_EUD[..., None]).sum(1)
        before_ED = self.group_ms_EGD[each_E, group_E]
        after_ED = torch.where(here_EUD.any(1), self._after_ms_EOD[each_E, option_E], before_ED)
        self.height_ERD[:, 0] += (after_ED - before_ED) / self.task.level_ms
        self.group_ms_EGD[each_E, group_E] = after_ED
        positions = (rank_EU // span_E11[..., 0]).tolist()
        self._taken.append((actions, option_E.tolist(), positions))
        self.step_index += 1

    def relative_cost(self) -> Tensor:
        """Cost over the level height of what is laid down, [E]; infinite where infeasible."""
        highest_ER = self.height_ERD.amax(-1)
        started_E = ((highest_ER[:, 1:] > 0) * self.task.start_up_C).sum(-1)
        return (highest_ER.sum(-1) + started_E).masked_fill(~self.alive_E, torch.inf)

    def shardings(self) -> list[Sharding | None]:
        """Of the finished episodes; None where infeasible."""
        return [self._sharding(episode) if alive else None for episode, alive in enumerate(self.alive_E.tolist())]

    def _sharding(self, episode: int) -> Sharding:
        tables = self.task.num_tables
        chosen = [0] * tables
        placed: list[tuple[int, ...]] = [()] * tables
        for actions, option_E, position_EU in self._taken:
            option = option_E[episode]
            units = int(actions.exists_OU[option].sum())
            chosen[actions.table] = actions.option_O[option]
            placed[actions.table] = tuple(position_EU[episode][:units])
        return Sharding(tuple(chosen), tuple(placed))


@dataclass(frozen=True)
class _Rises:
    """What a unit of each option would raise at each position: values at its first rank, [E, O, R, D]. Sums of powers
    of several units on ranks of their own add up."""

    sums: tuple[Tensor, Tensor, Tensor]
    """What it adds to the sums, over ranks, of heights, and of their powers 2 and 8."""
    highest_rise: Tensor
    highest_EOR: Tensor
    """The highest rank's height before."""
    power_2_EOR: Tensor
    power_8_EOR: Tensor
    """Sums over ranks before."""

    @classmethod
    def of(cls, before_EORD: Tensor, added_EORD: Tensor, span_O: Tensor) -> _Rises:
        after_EORD = before_EORD + added_EORD
        before_2, after_2 = before_EORD.square(), after_EORD.square()
        before_8, after_8 = _to_the_eighth(before_2), _to_the_eighth(after_2)
        highest_EOR = before_EORD.amax(-1)
        return cls(
            (
                _over_spans(added_EORD, span_O, torch.sum),
                _over_spans(after_2 - before_2, span_O, torch.sum),
                _over_spans(after_8 - before_8, span_O, torch.sum),
            ),
            (_over_spans(after_EORD, span_O, torch.amax) - highest_EOR[..., None]).clamp_min(0),
            highest_EOR,
            before_2.sum(-1),
            before_8.sum(-1),
        )

    def _means(self, power_2: Tensor, power_8: Tensor) -> tuple[Tensor, Tensor]:
        """How much power means rise with sums of powers [E, O, R, ...]."""
        ranks = self.highest_rise.shape[-1]
        rises = []
        for sum_EOR, more, roots in ((self.power_2_EOR, power_2, 1), (self.power_8_EOR, power_8, 3)):
            now, then = sum_EOR[..., None] / ranks, (sum_EOR[..., None] + more).clamp_min(0) / ranks
            for _ in range(roots):
                now, then = now.sqrt(), then.sqrt()
            rises.append(then - now)
        return rises[0], rises[1]

    def keys(self) -> Tensor:
        """What each rule's position has lowest, [E, O, K, D]."""
        mean_2_EOD, mean_8_EOD = (rise.sum(2) for rise in self._means(*self.sums[1:]))
        return torch.stack([mean_8_EOD, mean_2_EOD, self.highest_rise.sum(2) + TIES * mean_8_EOD], 2)

    def together(self, rank_EOKU: Tensor, exists_OU: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """:data:`RISES` with all units of an option at these first ranks, each [E, O, R, K]."""
        exists_O11U = exists_OU[:, None, None]
        sum_1, sum_2, sum_8 = ((_at(values, rank_EOKU) * exists_O11U).sum(-1) for values in self.sums)
        highest = (_at(self.highest_rise, rank_EOKU) * exists_O11U).amax(-1)
        return (sum_1 / self.highest_rise.shape[-1], *self._means(sum_2, sum_8), highest)


def _narrowed(legal_EOK: Tensor, to_EO: Tensor) -> Tensor:
    """Only these options, where any of them is legal."""
    narrow_EOK = legal_EOK & to_EO[..., None]
    return torch.where(narrow_EOK.flatten(1).any(-1)[:, None, None], narrow_EOK, legal_EOK)


def _to_the_eighth(square: Tensor) -> Tensor:
    return square.square().square()


def _at(values_EORD: Tensor, rank_EOKU: Tensor) -> Tensor:
    """Values at ranks, [E, O, R, K, U]."""
    index = rank_EOKU[:, :, None].expand(-1, -1, values_EORD.shape[2], -1, -1)
    return values_EORD[:, :, :, None].expand(-1, -1, -1, index.shape[3], -1).gather(-1, index)


def _over_spans(values_EORD: Tensor, span_O: Tensor, reduced: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Values of all ranks of a unit together, at its first rank: their sum, the largest, or whether all are true;
    elsewhere as they were, or False. Options come in ascending order of span."""
    if int(span_O[-1]) == 1:
        return values_EORD
    values_EORD = values_EORD.clone()
    spans, counts = span_O.unique_consecutive(return_counts=True)
    for span, some_EORD in zip(spans.tolist(), values_EORD.split(counts.tolist(), 1), strict=True):  # views
        if span > 1:
            over_EORN = reduced(some_EORD.unflatten(-1, (-1, span)), -1)
            if over_EORN.dtype == torch.bool:
                some_EORD.fill_(False)
            some_EORD[..., ::span] = over_EORN
    return values_EORD


def _positions(key_EOKD: Tensor, fits_EOD: Tensor, actions: TableActions) -> tuple[Tensor, Tensor]:
    """First rank of every unit, int64 [E, O, K, U], on ranks of their own, by the lowest keys; and whether all have
    room, and no rule before has the same, bool [E, O, K]."""
    key_EOKD = key_EOKD.masked_fill(~fits_EOD[:, :, None], torch.inf)
    units = actions.part_OUD.shape[1]
    if units == 1:
        lowest_EOKU, rank_EOKU = key_EOKD.min(-1, keepdim=True)
    else:
        lowest_EOKU, rank_EOKU = key_EOKD.topk(min(units, key_EOKD.shape[-1]), -1, largest=False)
    pinned_O1U = actions.pinned_OU[:, None]
    if bool((pinned_O1U >= 0).any()):
        rank_EOKU = torch.where(pinned_O1U >= 0, pinned_O1U, rank_EOKU)
        lowest_EOKU = key_EOKD.gather(-1, rank_EOKU)
    exists_O1U = actions.exists_OU[:, None]
    rank_EOKU = rank_EOKU.masked_fill(~exists_O1U, 0)
    legal_EOK = (lowest_EOKU.isfinite() | ~exists_O1U).all(-1)
    for rule in range(1, len(RULES)):
        for before in range(rule):
            legal_EOK[:, :, rule] &= (rank_EOKU[:, :, rule] != rank_EOKU[:, :, before]).any(-1)
    return rank_EOKU, legal_EOK
