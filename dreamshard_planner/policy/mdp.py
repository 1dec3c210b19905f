# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP: an action says how the next table is split, and where its units go.

A rank has *heights*: its compute, and of every collective the milliseconds of what it sends. The cost of a plan is the
sum, over compute and collectives, of the highest rank's height, and the start-up of the collectives that carry
anything. Heights are relative to the level height, which ranks would have if every table took its cheapest option and
all of it spread evenly, so that tasks of any size look alike.

An episode has several *sweeps* over the tables, which come in descending order of what their cheapest option costs. The
first sweep lays every table down. Later sweeps take each up again and lay it down anew, so that it sees where all
others lie. An action is one option of the table at hand, and places all its units where they raise the ranks' heights
least. Each sweep has a *sharpness*: the exponent of the power mean of heights that counts as their maximum. Blunt means
see all ranks, and sharp ones the highest; so early sweeps choose options, and the last ones level the ranks.

Options whose units find no room are masked, as are sharding types that an episode does without. A table that finds no
room at all ends its episode as infeasible. Reward: minus the cost of the finished plan.

Many episodes of one task advance together; the only Python loop is over tables. States are running sums, so that a step
costs O(options x ranks), whatever the number of tables. They are numpy arrays, whose calls cost a third of torch's.

Shapes: E episodes, T tables, O options of the table at hand, which are the actions, U units of an option, L span of a
unit, D ranks, N positions (D, of which wide units use the first), C collectives, J of them that an option sends in
(padded), R = 1 + J heights that it raises, X parts laid down, H latent channels, G fused groups, M limits, Y channels
of actions, N types of sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dreamshard_planner.cost.compute import both_passes
from dreamshard_planner.cost.problem import Cost, Sharding
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.search_space.sharding_types import (
    CW,
    DP,
    GRID,
    RW,
    SHARDING_TYPES,
    TW,
    TWCW,
    TWRW,
    in_host_memory,
)

TYPES = (TW, CW, TWCW, RW, TWRW, GRID, DP)
"""That actions know, in the order of the network's channels; a type that is added later is no action."""
WHOLE_TYPES = tuple(kind for kind in TYPES if SHARDING_TYPES[kind].is_whole)
"""That leave a table whole."""
CHANNELS = ("mean_compute", "mean_exchanges", "peak_compute", "peak_exchanges", "start_up")
"""Rises by an action: of the mean and the power mean of heights, of compute and of exchanges; and what collectives take
that nothing was sent in before."""
AMPLE = 0.5
"""Share of the device memory up to which all tables may fill it before options in host memory become actions."""
DESCRIBED = len(TYPES) + 7
"""Channels that say what an option is."""
NOTHING = 1e-9
"""Heights up to which a collective counts as unused: differences leave a rest."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Weights of heights in one sweep."""

    doublings: int
    """Doublings of the exponent of the power mean: 3 for the exponent 8."""
    mean: float = 0.0
    """Weight of the mean of heights, beside the power mean, which has the rest."""


@dataclass(frozen=True)
class TableActions:
    """The options of one table, as actions take them, in ascending order of span."""

    table: int
    option_O: np.ndarray
    span_O: np.ndarray
    units_O: np.ndarray
    parts: tuple[np.ndarray, ...]
    """Parts of each option's units, int64 [U, L] each."""
    part_OD: np.ndarray
    """Part that each rank would get of an option's first unit."""
    group_O: np.ndarray
    collective_OJ: np.ndarray
    """Collectives that an option sends in; C, which has no bytes, where padded."""
    type_O: np.ndarray
    level: float
    """Height that the cheapest option adds to the level height."""
    described_OY: np.ndarray
    """Facts on each option, [O, DESCRIBED]."""

    @cached_property
    def alike_O(self) -> np.ndarray:
        """True if all units of an option have the same parts."""
        return np.array([bool((part_UL == part_UL[0]).all()) for part_UL in self.parts])

    @cached_property
    def wide(self) -> tuple[tuple[int, slice], ...]:
        """Spans of more than one rank, and the options that have them."""
        spans = [span for span in np.unique(self.span_O).tolist() if span > 1]
        return tuple(
            (span, slice(*(int(np.searchsorted(self.span_O, span, side)) for side in ("left", "right"))))
            for span in spans
        )


class ShardingTask:
    """A problem whose tables are sharded one after the other.

    Args:
        cost: the problem and its cost.
        asked: what its options ask of all ranks together.
        types: sharding types that are actions, where a table has any of them.
    """

    def __init__(self, cost: Cost, asked: OptionTotals, types: Sequence[str] = TYPES) -> None:
        problem = cost.problem
        self.cost, self.problem, self._asked = cost, problem, asked
        self.level_ms = max(1e-9, asked.least_ms / problem.num_ranks)
        collectives = problem.collectives.collectives
        forward_C, backward_C = problem.collectives.alone_ms_per_byte()
        per_byte_C = (forward_C + backward_C).numpy() / self.level_ms
        start_up = [sum(model.latency_ms for model in each.passes if model.world_size > 1) for each in collectives]
        self.start_up_C = np.array([*start_up, 0.0]) / self.level_ms
        """Height that each collective takes to start; 0 for padding."""
        self.sent_PC = np.pad(problem.bytes_PC.numpy() * per_byte_C, ((0, 0), (0, 1)))
        """Height that each part adds to its rank in each collective; 0 for padding."""
        self._kept_TO = self._kept(types)
        total_TO = np.where(self._kept_TO, asked.total_ms_TO, np.inf)
        self._order_T = np.argsort(-total_TO.min(1), kind="stable")
        cheapest_T = total_TO.min(1)[self._order_T]
        self.share_T = cheapest_T / max(1e-30, cheapest_T.sum())
        """Share of the cost of all tables, in the order in which they are sharded."""
        self.left_T = 1 - np.concatenate([[0.0], self.share_T.cumsum()[:-1]])
        """Share of each table and all that follow."""
        self._ahead_TNY = self._ahead(total_TO[self._order_T])
        most_M = np.where(self._kept_TO[..., None], asked.needs_TOM, 0.0).max(1).sum(0)
        self.scarce_M = np.flatnonzero(most_M > problem.limits_DM.numpy().min(0))
        """Limits that may bind: all tables together might exceed them on one rank."""
        self._actions: dict[int, TableActions] = {}

    @property
    def num_tables(self) -> int:
        return self.problem.num_tables

    def _kept(self, types: Sequence[str]) -> np.ndarray:
        """Options that are actions, bool [T, O]: of some types; and where tables in device memory would fill little of
        it, none in host memory, unless a table has no others."""
        problem, finite_TO = self.problem, np.isfinite(self._asked.total_ms_TO)
        room_TO, named_TO = np.zeros_like(finite_TO), np.zeros_like(finite_TO)
        is_host_TO, is_replica_TO = np.zeros_like(finite_TO), np.zeros_like(finite_TO)
        for table, options in enumerate(problem.tables):
            for index, option in enumerate(options):
                fits = len(option.units) * option.units[0].span <= problem.num_ranks
                room_TO[table, index] = fits and option.sharding_type in TYPES
                named_TO[table, index] = option.sharding_type in types
                is_host_TO[table, index] = in_host_memory(option.kernel)
                is_replica_TO[table, index] = SHARDING_TYPES[option.sharding_type].is_replicated
        kept_TO = finite_TO & room_TO
        kept_TO = np.where((kept_TO & named_TO).any(1, keepdims=True), kept_TO & named_TO, kept_TO)
        most_T = np.where(kept_TO & ~is_host_TO & ~is_replica_TO, self._asked.needs_TOM[..., 0], 0.0).max(1)
        if most_T.sum() <= AMPLE * self._asked.limits_M[0]:
            fast_TO = kept_TO & ~is_host_TO
            kept_TO = np.where(fast_TO.any(1, keepdims=True), fast_TO, kept_TO)
        self.may_be_played = bool(kept_TO.any(1).all())
        """True if every table has an option of these whose units find ranks of their own."""
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
        """Return the actions of the table that comes at a step."""
        if step not in self._actions:
            self._actions[step] = self._read_actions(step)
        return self._actions[step]

    def _read_actions(self, step: int) -> TableActions:
        problem, table = self.problem, int(self._order_T[step])
        all_options, ranks = problem.tables[table], problem.num_ranks
        chosen = sorted(np.flatnonzero(self._kept_TO[table]).tolist(), key=lambda o: all_options[o].units[0].span)
        options = [all_options[index] for index in chosen]
        spans = [option.units[0].span for option in options]
        parts = tuple(
            problem.parts_of(table, index).reshape(-1, span) for index, span in zip(chosen, spans, strict=True)
        )
        sends = [np.flatnonzero(self.sent_PC[part_UL.ravel()].any(0)).tolist() for part_UL in parts]
        width, none = max(1, *map(len, sends)), len(problem.collectives.collectives)
        type_O = np.array([TYPES.index(option.sharding_type) for option in options])
        total_O = self._asked.total_ms_TO[table, chosen] / ranks / self.level_ms
        return TableActions(
            table=table,
            option_O=np.array(chosen),
            span_O=np.array(spans),
            units_O=np.array([len(part_UL) for part_UL in parts]),
            parts=parts,
            part_OD=np.stack([np.tile(part_UL[0], ranks // part_UL.shape[1]) for part_UL in parts]),
            group_O=np.array([problem.group_of(table, index) for index in chosen]),
            collective_OJ=np.array([columns + [none] * (width - len(columns)) for columns in sends]),
            type_O=type_O,
            level=max(1e-9, float(total_O.min())),
            described_OY=self._described(step, chosen, type_O, total_O),
        )

    def _described(self, step: int, chosen: Sequence[int], type_O: np.ndarray, total_O: np.ndarray) -> np.ndarray:
        """Type; whether in host memory; units and their span; how the tables that follow would do with this type; and
        what it costs over the cheapest option, [O, DESCRIBED]."""
        options = [self.problem.tables[int(self._order_T[step])][index] for index in chosen]
        is_host_O = np.array([in_host_memory(option.kernel) for option in options], dtype=np.float64)
        sizes_O2 = np.log2([[len(option.units), option.units[0].span] for option in options])
        times_O = total_O / max(1e-30, total_O.min())
        columns = [
            np.eye(len(TYPES))[type_O],
            is_host_O[:, None],
            sizes_O2 / (3.0, 8.0),
            self._ahead_TNY[step][type_O],
            (times_O - 1).clip(0, 10)[:, None],
            np.log(times_O.clip(1e-30)).clip(0, 5)[:, None],
        ]
        return np.concatenate(columns, -1)


@dataclass(frozen=True)
class Choices:
    """The next table's actions in every episode."""

    actions: TableActions
    rise_EOY: np.ndarray
    """:data:`CHANNELS` of each action, over what the table adds to the level height."""
    free_EO: np.ndarray
    """Share of a rank's memory that stays free where it is scarcest."""
    legal_EO: np.ndarray

    def least(self, sweep: Sweep) -> np.ndarray:
        """Return the action of each episode that raises the sweep's weighted heights least, [E]."""
        weight_Y = np.repeat([sweep.mean, 1 - sweep.mean, 1.0], (2, 2, 1))
        return np.where(self.legal_EO, self.rise_EOY @ weight_Y, np.inf).argmin(-1)


class EstimatedMDP:
    """Episodes of one task side by side.

    Args:
        task: tables and ranks.
        episodes: how many.
        types_EN: sharding types that each episode may use in its first sweep, bool; where a table has no other, it
            takes what it has.
    """

    def __init__(self, task: ShardingTask, episodes: int, types_EN: np.ndarray | None = None) -> None:
        problem, cost, ranks = task.problem, task.cost, task.problem.num_ranks
        self.task, self.types_EN = task, types_EN
        self._latent_PH = cost.latent_PH.numpy()
        self._need_PM = problem.needs_PM.numpy()[:, task.scarce_M]
        limits_DM = problem.limits_DM.numpy()[:, task.scarce_M]
        self._limits_DM = limits_DM.astype(np.float64).clip(1)
        compute = cost.compute
        self._rate = compute.approximate_ms if compute.approximates else compute.group_cost_ms
        self.latent_EGDH = np.zeros((episodes, problem.num_groups, ranks, self._latent_PH.shape[1]))
        self.group_EGD = np.zeros((episodes, problem.num_groups, ranks))
        """Height of each fused group."""
        self.height_ERD = np.zeros((episodes, 1 + task.sent_PC.shape[1], ranks))
        """Heights of compute, of every collective, and of none."""
        self.free_EDM = np.repeat(limits_DM[None], episodes, 0)
        self.alive_E = np.ones(episodes, dtype=bool)
        self.episode_E = np.arange(episodes)
        """Number of each episode, of those that were begun."""
        self._laid: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
        """By table, the action of each episode, and the positions of its units."""

    def observe(self, step: int, sweep: Sweep) -> Choices:
        """Take up the table of a step, if it lies anywhere; return its actions."""
        actions = self._actions = self.task.actions(step)
        first_sweep = actions.table not in self._laid
        if not first_sweep:
            self._take_up(actions)
        ranks = self.task.problem.num_ranks
        self._after_EOD = self._compute(self.latent_EGDH[:, actions.group_O] + self._latent_PH[actions.part_OD])
        compute_O1 = np.zeros((len(actions.option_O), 1), dtype=np.int64)
        before_EORD = self.height_ERD[:, np.concatenate([compute_O1, actions.collective_OJ + 1], 1)]
        added_EORD = np.empty_like(before_EORD)
        added_EORD[:, :, 0] = self._after_EOD - self.group_EGD[:, actions.group_O]
        added_EORD[:, :, 1:] = self.task.sent_PC[actions.part_OD[:, None], actions.collective_OJ[..., None]]
        after_EORD = before_EORD + added_EORD
        highest_EOR1 = after_EORD.max(-1, keepdims=True).clip(NOTHING)  # powers are of shares of it, at most 1
        before_p, after_p = (_powers(values / highest_EOR1, sweep.doublings) for values in (before_EORD, after_EORD))
        sum_EOR1 = before_p.sum(-1, keepdims=True) / ranks
        mean_EOR1 = highest_EOR1 * _roots(sum_EOR1, sweep.doublings)
        added_EORN = _over_spans(added_EORD / ranks, actions, 0.0)
        more_EORN = _over_spans((after_p - before_p) / ranks, actions, 0.0)
        rise_EORN = highest_EOR1 * _roots((sum_EOR1 + more_EORN).clip(0), sweep.doublings) - mean_EOR1
        key_EON = (sweep.mean * added_EORN + (1 - sweep.mean) * rise_EORN).sum(2)
        fits_EON, left_EOD = self._room(actions)
        key_EON = np.where(fits_EON, key_EON, np.inf)
        position_EOU, legal_EO = _positions(key_EON, actions)
        exists_O1U = (np.arange(position_EOU.shape[-1]) < actions.units_O[:, None])[:, None]
        if position_EOU.shape[-1] == 1:
            mean_EOR, peak_EOR = (_at(values, position_EOU)[..., 0] for values in (added_EORN, rise_EORN))
        else:
            mean_EOR = (_at(added_EORN, position_EOU) * exists_O1U).sum(-1)
            peak_p = sum_EOR1[..., 0] + (_at(more_EORN, position_EOU) * exists_O1U).sum(-1)
            peak_EOR = highest_EOR1[..., 0] * _roots(peak_p.clip(0), sweep.doublings) - mean_EOR1[..., 0]
        self._position_EOU = position_EOU
        unused_EOJ = before_EORD[:, :, 1:].max(-1) <= NOTHING
        rise_EOY = np.stack(
            [
                *(part_EO for of in (mean_EOR, peak_EOR) for part_EO in (of[..., 0], of[..., 1:].sum(-1))),
                (unused_EOJ * self.task.start_up_C[actions.collective_OJ]).sum(-1),
            ],
            -1,
        )
        free_EO = np.take_along_axis(left_EOD, position_EOU[..., :1] * actions.span_O[:, None], -1)[..., 0]
        legal_EO = self._legal(actions, legal_EO, self.types_EN if first_sweep else None)
        return Choices(actions, rise_EOY / actions.level, free_EO, legal_EO)

    def _room(self, actions: TableActions) -> tuple[np.ndarray, np.ndarray]:
        """Return whether a unit of each option finds room at each position, and the share of each rank's memory that
        its part would leave where it is scarcest, both [E, O, N]."""
        shape = (len(self.alive_E), *actions.part_OD.shape)
        if not len(self.task.scarce_M):
            fits_EON = np.ones(shape, dtype=bool)
            for span, some in actions.wide:
                fits_EON[:, some, shape[-1] // span :] = False
            return fits_EON, np.ones(shape)
        need_ODM = self._need_PM[actions.part_OD]
        left_EODM = self.free_EDM[:, None] - need_ODM
        no_room_EOD = ((left_EODM < 0) & (need_ODM > 0)).any(-1)
        return _over_spans(no_room_EOD.astype(np.float64), actions, 1.0) == 0, (left_EODM / self._limits_DM).min(-1)

    def _compute(self, latent_XH: np.ndarray) -> np.ndarray:
        """Heights of fused groups by their latents."""
        return both_passes(self._rate(torch.from_numpy(latent_XH))).numpy() / self.task.level_ms

    def _legal(self, actions: TableActions, legal_EO: np.ndarray, types_EN: np.ndarray | None) -> np.ndarray:
        """Actions of the types that an episode may use, where there are any. Dead episodes keep one legal action, so
        that a softmax stays defined."""
        if types_EN is not None:
            narrow_EO = legal_EO & types_EN[:, actions.type_O]
            legal_EO = np.where(narrow_EO.any(-1, keepdims=True), narrow_EO, legal_EO)
        dead_E = ~legal_EO.any(-1)
        if dead_E.any():
            self.alive_E = self.alive_E & ~dead_E
            legal_EO[dead_E, 0] = True
        return legal_EO

    def step(self, action_E: np.ndarray) -> None:
        """Lay the table at hand down in every episode; call :meth:`observe` first."""
        actions = self._actions
        positions = [
            self._position_EOU[episode, action, : actions.units_O[action]] for episode, action in enumerate(action_E)
        ]
        self._laid[actions.table] = action_E, positions
        row_X, group_X, rank_X, part_X = self._change(actions, 1)
        if actions.alike_O[action_E].all():
            height_X = self._after_EOD[row_X, action_E[row_X], rank_X]
        else:
            height_X = self._compute(self.latent_EGDH[row_X, group_X, rank_X])
        self._set_compute(row_X, group_X, rank_X, height_X)

    def _take_up(self, actions: TableActions) -> None:
        """Take the table at hand off its ranks in every episode."""
        row_X, group_X, rank_X, part_X = self._change(actions, -1)
        np.maximum(self.height_ERD, 0.0, out=self.height_ERD)
        latent_XH = self.latent_EGDH[row_X, group_X, rank_X]
        latent_XH[latent_XH[:, 0] < 0.5] = 0.0  # an empty group is nothing, not the rounding of what was there
        self.latent_EGDH[row_X, group_X, rank_X] = latent_XH
        self._set_compute(row_X, group_X, rank_X, self._compute(latent_XH))

    def _set_compute(self, row_X: np.ndarray, group_X: np.ndarray, rank_X: np.ndarray, height_X: np.ndarray) -> None:
        self.height_ERD[row_X, 0, rank_X] += height_X - self.group_EGD[row_X, group_X, rank_X]
        self.group_EGD[row_X, group_X, rank_X] = height_X

    def _change(self, actions: TableActions, sign: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Add the parts of the table at hand to all sums but compute, or subtract them; return their episodes, groups,
        ranks and parts."""
        action_E, positions = self._laid[actions.table]
        ranks = [
            (position_U[:, None] * actions.span_O[action] + np.arange(actions.span_O[action])).ravel()
            for action, position_U in zip(action_E, positions, strict=True)
        ]
        parts = [actions.parts[action].ravel() for action in action_E]
        row_X = np.repeat(np.arange(len(ranks)), [len(part_X) for part_X in parts])
        rank_X, part_X, group_X = np.concatenate(ranks), np.concatenate(parts), actions.group_O[action_E][row_X]
        latent_XH, sent_XC = sign * self._latent_PH[part_X], sign * self.task.sent_PC[part_X]
        self.latent_EGDH[row_X, group_X, rank_X] += latent_XH
        self.height_ERD[row_X, 1:, rank_X] += sent_XC
        self.free_EDM[row_X, rank_X] -= sign * self._need_PM[part_X]
        return row_X, group_X, rank_X, part_X

    def relative_cost(self) -> np.ndarray:
        """Return the cost over the level height of what is laid down, [E]; infinite where infeasible."""
        highest_ER = self.height_ERD.max(-1)
        started_E = ((highest_ER[:, 1:] > NOTHING) * self.task.start_up_C).sum(-1)
        return np.where(self.alive_E, highest_ER.sum(-1) + started_E, np.inf)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the episodes alone."""
        for name in ("latent_EGDH", "group_EGD", "height_ERD", "free_EDM", "alive_E", "episode_E"):
            setattr(self, name, getattr(self, name)[list(rows)])
        self.types_EN = None if self.types_EN is None else self.types_EN[list(rows)]
        self._laid = {
            table: (action_E[list(rows)], [positions[row] for row in rows])
            for table, (action_E, positions) in self._laid.items()
        }

    def shardings(self) -> list[Sharding | None]:
        """Return the plans of the finished episodes; None where infeasible."""
        return [self.sharding(episode) if alive else None for episode, alive in enumerate(self.alive_E.tolist())]

    def sharding(self, episode: int) -> Sharding:
        """Return the plan of a feasible episode after a sweep."""
        chosen = [0] * self.task.num_tables
        placed: list[tuple[int, ...]] = [()] * self.task.num_tables
        for step in range(self.task.num_tables):
            actions = self.task.actions(step)
            action_E, positions = self._laid[actions.table]
            chosen[actions.table] = int(actions.option_O[action_E[episode]])
            placed[actions.table] = tuple(positions[episode].tolist())
        return Sharding(tuple(chosen), tuple(placed))


def _powers(values: np.ndarray, doublings: int) -> np.ndarray:
    for _ in range(doublings):
        values = values * values
    return values


def _roots(values: np.ndarray, doublings: int) -> np.ndarray:
    for _ in range(doublings):
        values = np.sqrt(values)
    return values


def _over_spans(values_EOXD: np.ndarray, actions: TableActions, elsewhere: float) -> np.ndarray:
    """Sum, in place, the values of all ranks of a unit, at its position; wide units have fewer positions than there are
    ranks, and get ``elsewhere`` in the others."""
    for span, some in actions.wide:
        wide = values_EOXD[:, some]
        sums = wide.reshape(*wide.shape[:-1], -1, span).sum(-1)
        values_EOXD[:, some, ..., : sums.shape[-1]] = sums
        values_EOXD[:, some, ..., sums.shape[-1] :] = elsewhere
    return values_EOXD


def _at(values_EORN: np.ndarray, position_EOU: np.ndarray) -> np.ndarray:
    """Values at positions, [E, O, R, U]."""
    index = np.arange(values_EORN.shape[0])[:, None, None, None], np.arange(values_EORN.shape[1])[:, None, None]
    return values_EORN[(*index, np.arange(values_EORN.shape[2])[:, None], position_EOU[:, :, None])]


def _positions(key_EON: np.ndarray, actions: TableActions) -> tuple[np.ndarray, np.ndarray]:
    """Position of every unit, int64 [E, O, U], each on its own, by the lowest keys; and whether all have room, bool
    [E, O]."""
    units = int(actions.units_O.max())
    position_EOU = np.zeros((*key_EON.shape[:2], units), dtype=np.int64)
    position_EOU[..., 0] = key_EON.argmin(-1)
    for option in np.flatnonzero(actions.units_O > 1):
        count = actions.units_O[option]
        position_EOU[:, option, :count] = np.argsort(key_EON[:, option], -1, kind="stable")[:, :count]
    lowest_EOU = np.take_along_axis(key_EON, position_EOU, -1)
    return position_EOU, (np.isfinite(lowest_EOU) | (np.arange(units) >= actions.units_O[:, None])).all(-1)
