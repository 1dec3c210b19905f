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
Fused groups are rated at a few positions of each option alone. They are shortlisted by an estimate: what the part costs
alone, times the group's cost over that of its parts alone.

Shapes: E episodes, T tables, O options of the table at hand, which are the actions, U units of an option, Q parts of
all options, D ranks, N positions (D, of which wide units use the first), K of them at which compute is rated, C
collectives, J of them that an option sends in (padded), R = 1 + J heights that it raises, X parts laid down, Z sums
over a fused group's parts, G fused groups, M limits, Y channels of actions, N types of sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.policy.task import ShardingTask, TableActions

CHANNELS = ("mean_compute", "mean_exchanges", "peak_compute", "peak_exchanges", "start_up")
"""Rises by an action: of the mean and the power mean of heights, of compute and of exchanges; and what collectives take
that nothing was sent in before."""
RATED = 4
"""Positions of each option at which compute is rated: the best by estimates. More for options of more units."""
TINY = 1e-300
"""Least sum of powers, which underflow."""
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
class Choices:
    """The next table's actions in every episode."""

    actions: TableActions
    mean_EOR: np.ndarray
    """Rise of the mean of heights by each action; nothing if the sweep gives it no weight."""
    peak_EOR: np.ndarray
    """Rise of their power mean."""
    start_up_EO: np.ndarray
    """Start-up of collectives that carried nothing before."""
    position_EOU: np.ndarray
    rank_EQ: np.ndarray
    """Rank of each part of all options."""
    legal_EO: np.ndarray

    @property
    def rise_EOY(self) -> np.ndarray:
        """:data:`CHANNELS` of each action, over what the table adds to the level height."""
        rises = [part_EO for of in (self.mean_EOR, self.peak_EOR) for part_EO in (of[..., 0], of[..., 1:].sum(-1))]
        return np.stack([*rises, self.start_up_EO], -1) / self.actions.level

    def least(self, sweep: Sweep) -> np.ndarray:
        """Return the action of each episode that raises the sweep's weighted heights least, [E]."""
        rise_EO = (sweep.mean * self.mean_EOR + (1 - sweep.mean) * self.peak_EOR).sum(-1) + self.start_up_EO
        return np.where(self.legal_EO, rise_EO, np.inf).argmin(-1)


@dataclass(frozen=True)
class Shortlist:
    """Positions of each option at which compute is rated, K of them."""

    position_EOK: np.ndarray
    legal_EOK: np.ndarray
    mean_EOKR: np.ndarray
    """Rise of the mean of heights by a unit at each position."""
    more_EOKR: np.ndarray
    """Rise of the sum of powers."""
    sum_EOR: np.ndarray
    """Sum of powers over all ranks before."""
    highest_EOR: np.ndarray
    """Height of which powers are shares."""


@dataclass(frozen=True)
class Laid:
    """A table as it lies in every episode."""

    action_E: np.ndarray
    position_EU: np.ndarray
    cell: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Episode, fused group and rank of each part, int64 [X] each."""
    part_X: np.ndarray

    def only(self, rows: Sequence[int]) -> Laid:
        """Return the table in some episodes, numbered anew."""
        at = [np.flatnonzero(self.cell[0] == row) for row in rows]
        row_X, at_X = np.repeat(np.arange(len(rows)), [len(some) for some in at]), np.concatenate(at)
        cell = row_X, self.cell[1][at_X], self.cell[2][at_X]
        return Laid(self.action_E[list(rows)], self.position_EU[list(rows)], cell, self.part_X[at_X])


class EstimatedMDP:
    """Episodes of one task side by side.

    Args:
        task: tables and ranks.
        episodes: how many.
        types_ETN: sharding types that each episode may use for the table of each step of its first sweep, bool; a table
            that has none of them takes what it has.
    """

    def __init__(self, task: ShardingTask, episodes: int, types_ETN: np.ndarray | None = None) -> None:
        problem, cost, ranks = task.problem, task.cost, task.problem.num_ranks
        self.task, self.types_ETN = task, types_ETN
        ones_P = np.ones(len(task.alone_P))
        self._own_PZ = np.column_stack([cost.latent_PH.numpy(), task.alone_P, ones_P])
        limits_DM = problem.limits_DM.numpy()[:, task.scarce_M]
        self._limits_DM = limits_DM.astype(np.float64).clip(1)
        compute = cost.compute
        self._rate = compute.approximate_ms if compute.approximates else compute.group_cost_ms
        groups = episodes, problem.num_groups, ranks
        self.sums_EGDZ = np.zeros((*groups, self._own_PZ.shape[1]))
        """Sums over the parts of each fused group: latents, heights that they would have alone, and one each."""
        self.group_EGD = np.zeros(groups)
        """Height of each fused group."""
        self.fusion_EGD = np.ones(groups)
        """The ratio of the two; 1 where nothing lies. It estimates what one more part adds."""
        self.height_ERD = np.zeros((episodes, 1 + task.sent_PC.shape[1], ranks))
        """Heights of compute, of every collective, and of none."""
        self.free_EDM = np.repeat(limits_DM[None], episodes, 0)
        self.alive_E = np.ones(episodes, dtype=bool)
        self.episode_E = np.arange(episodes)
        """Number of each episode, of those that were begun."""
        self._laid: dict[int, Laid] = {}

    def observe(self, step: int, sweep: Sweep) -> Choices:
        """Take up the table of a step, if it lies anywhere; return its actions."""
        actions = self.task.actions(step)
        laid = self._laid.get(actions.table)
        if laid is not None:
            self._take_up(laid)
        listed = self._shortlist(actions, sweep)
        rated_EOK = self._rated(actions, sweep, laid, listed)
        types_EN = self.types_ETN[:, step] if laid is None and self.types_ETN is not None else None
        return self._placed(actions, sweep, listed, rated_EOK, types_EN)

    def _placed(
        self, actions: TableActions, sweep: Sweep, listed: Shortlist, rated_EOK: np.ndarray, types_EN: np.ndarray | None
    ) -> Choices:
        """Place the units of each option at the shortlisted positions where they raise the weighted means least."""
        ranks, doublings = self.task.problem.num_ranks, sweep.doublings

        def risen(more_EOKR: np.ndarray) -> np.ndarray:
            """Return the rise of power means by rises of sums of powers, [E, O, K, R]."""
            before_EO1R = listed.sum_EOR[:, :, None]
            sums = before_EO1R + more_EOKR, before_EO1R
            return listed.highest_EOR[:, :, None] * np.subtract(*(_roots((s / ranks).clip(0), doublings) for s in sums))

        rise_EOKR = sweep.mean * listed.mean_EOKR + (1 - sweep.mean) * risen(listed.more_EOKR)
        key_EOK = np.where(listed.legal_EOK, rise_EOKR.sum(-1), np.inf)
        exists_OU, episode_E1 = actions.exists_OU, np.arange(len(key_EOK))[:, None]
        best_EOU = key_EOK.argsort(-1, kind="stable")[..., : exists_OU.shape[1]] * exists_OU
        best = episode_E1[..., None], np.arange(len(exists_OU))[:, None], best_EOU
        position_EOU, legal_EO = listed.position_EOK[best], listed.legal_EOK[best].all(-1)
        mean_EOR, more_EOR = (
            (values_EOKR[best] * exists_OU[..., None]).sum(2) for values_EOKR in (listed.mean_EOKR, listed.more_EOKR)
        )
        # All ranks of a unit count from here on, each with what is on it.
        rank_EQ, added_EQ = actions.ranks_at(position_EOU), rated_EOK[best][:, actions.option_Q, actions.unit_Q]
        before_EQ, highest_EQ = self.height_ERD[episode_E1, 0, rank_EQ], listed.highest_EOR[:, actions.option_Q, 0]
        more_EQ = _added_powers(before_EQ, added_EQ, highest_EQ, doublings)
        more_EOR[..., 0] = np.add.reduceat(more_EQ, actions.first_O, -1)
        unused_EOJ = self.height_ERD.max(-1)[:, actions.raised_OR[:, 1:]] <= NOTHING
        return Choices(
            actions,
            mean_EOR=mean_EOR,
            peak_EOR=risen(more_EOR[:, :, None])[:, :, 0],
            start_up_EO=(unused_EOJ * actions.start_up_OJ).sum(-1),
            position_EOU=position_EOU,
            rank_EQ=rank_EQ,
            legal_EO=self._legal(actions, legal_EO, types_EN),
        )

    def _shortlist(self, actions: TableActions, sweep: Sweep) -> Shortlist:
        """Return the positions where the sum of power means rises least by estimates of compute, as far as it is linear
        in sums of powers."""
        ranks, raised_OR, doublings = self.task.problem.num_ranks, actions.raised_OR, sweep.doublings
        added_EORD = np.empty((len(self.alive_E), *raised_OR.shape, ranks))
        added_EORD[:] = actions.added_OR[..., None]
        added_EORD[:, :, 0] *= self.fusion_EGD[:, actions.group_O]
        # Powers are of shares of what the highest rank may rise to, about 1 at most.
        top_ER1 = self.height_ERD.max(-1, keepdims=True).clip(NOTHING)
        top_EOR1 = top_ER1[:, raised_OR]
        highest_EOR1 = top_EOR1 + added_EORD.max(-1, keepdims=True)
        scale_EOR1 = _powers(top_EOR1 / highest_EOR1, doublings)
        before_p = _powers(self.height_ERD / top_ER1, doublings)
        more_EORD = _powers((self.height_ERD[:, raised_OR] + added_EORD) / highest_EOR1, doublings)
        more_EORD -= before_p[:, raised_OR] * scale_EOR1
        sum_EOR1 = before_p.sum(-1, keepdims=True)[:, raised_OR] * scale_EOR1
        mean_EORN, more_EORN = _over_spans(added_EORD, actions) / ranks, _over_spans(more_EORD, actions)
        least_EOR1 = (sum_EOR1 + more_EORN.min(-1, keepdims=True)).clip(TINY)
        slope_EOR1 = highest_EOR1 * _roots(least_EOR1 / ranks, doublings) / least_EOR1 / 2**doublings
        key_EON = (sweep.mean * mean_EORN + (1 - sweep.mean) * slope_EOR1 * more_EORN).sum(2)
        fits_EON = self._fits(actions)
        key_EON = np.where(fits_EON, key_EON, np.inf)
        position_EOK = key_EON.argsort(-1, kind="stable")[..., : max(RATED, actions.exists_OU.shape[1])]
        at = np.arange(len(key_EON))[:, None, None], np.arange(len(raised_OR))[:, None]
        return Shortlist(
            position_EOK,
            legal_EOK=fits_EON[(*at, position_EOK)],
            mean_EOKR=mean_EORN[(*at, slice(None), position_EOK)],
            more_EOKR=more_EORN[(*at, slice(None), position_EOK)],
            sum_EOR=sum_EOR1[..., 0],
            highest_EOR=highest_EOR1[..., 0],
        )

    def _rated(self, actions: TableActions, sweep: Sweep, laid: Laid | None, listed: Shortlist) -> np.ndarray:
        """Rate what the first part of each option would add to the compute of the shortlisted ranks, [E, O, K], in
        place of the estimates; and the fused groups that the table was taken from."""
        span_O1, ranks = actions.span_O[:, None], self.task.problem.num_ranks
        rank_EOK = (listed.position_EOK * span_O1).clip(max=ranks - 1)
        episode_E11 = np.arange(len(rank_EOK))[:, None, None]
        cell = episode_E11, actions.group_O[:, None], rank_EOK
        sums_EOKZ = self.sums_EGDZ[cell] + self._own_PZ[actions.part_Q[actions.first_O]][:, None]
        sums_XZ = sums_EOKZ.reshape(-1, sums_EOKZ.shape[-1])
        if laid is None:
            height_X = self._compute(sums_XZ)
        else:
            height_X = self._compute(np.concatenate([sums_XZ, self.sums_EGDZ[laid.cell]]))
            self._set_compute(laid.cell, height_X[len(sums_XZ) :])
        rated_EOK: np.ndarray = height_X[: len(sums_XZ)].reshape(rank_EOK.shape) - self.group_EGD[cell]
        before_ED, highest_EO1 = self.height_ERD[:, 0], listed.highest_EOR[..., :1]
        more_EOK = _added_powers(before_ED[episode_E11, rank_EOK], rated_EOK, highest_EO1, sweep.doublings)
        listed.more_EOKR[..., 0], listed.mean_EOKR[..., 0] = span_O1 * more_EOK, span_O1 * rated_EOK / ranks
        listed.sum_EOR[..., 0] = _powers(before_ED[:, None] / highest_EO1, sweep.doublings).sum(-1)
        return rated_EOK

    def _fits(self, actions: TableActions) -> np.ndarray:
        """Return whether a unit of each option finds room at each position, bool [E, O, N]."""
        need_O1M = actions.need_OM[:, None]
        if (self.free_EDM >= actions.need_OM.max(0)).all():
            return np.repeat(actions.exists_ON[None], len(self.alive_E), 0)
        fits_EON = ((self.free_EDM[:, None] >= need_O1M) | (need_O1M == 0)).all(-1)
        for span, some in actions.wide:
            wide = fits_EON[:, some]
            wide[..., : wide.shape[-1] // span] = wide.reshape(*wide.shape[:-1], -1, span).all(-1)
        return fits_EON & actions.exists_ON

    def free_share(self, choices: Choices) -> np.ndarray:
        """Return the share of a rank's memory that each action leaves free where it is scarcest, [E, O]."""
        actions = choices.actions
        if not len(self.task.scarce_M):
            return np.ones(choices.legal_EO.shape)
        rank_EO = choices.position_EOU[..., 0] * actions.span_O
        free_EOM = self.free_EDM[np.arange(len(rank_EO))[:, None], rank_EO]
        return ((free_EOM - actions.need_OM) / self._limits_DM[rank_EO]).min(-1)

    def _legal(self, actions: TableActions, legal_EO: np.ndarray, types_EN: np.ndarray | None) -> np.ndarray:
        """Actions of the types that an episode may use, where there are any. Dead episodes keep one legal action, so
        that a softmax stays defined."""
        if types_EN is not None:
            narrow_EO = legal_EO & types_EN[:, actions.type_O]
            legal_EO = np.where(narrow_EO.any(-1, keepdims=True), narrow_EO, legal_EO)
        alive_E = legal_EO.any(-1)
        if not alive_E.all():
            self.alive_E = self.alive_E & alive_E
            legal_EO[~alive_E, 0] = True
        return legal_EO

    def step(self, choices: Choices, action_E: np.ndarray) -> None:
        """Lay the table down that was observed last."""
        actions, before = choices.actions, self._laid.get(choices.actions.table)
        position_EU = choices.position_EOU[np.arange(len(action_E)), action_E]
        row_X, at_X = (actions.option_Q == action_E[:, None]).nonzero()
        cell = row_X, actions.group_O[action_E][row_X], choices.rank_EQ[row_X, at_X]
        after = Laid(action_E, position_EU, cell, actions.part_Q[at_X])
        self._laid[actions.table] = after
        self._add(after, 1)
        if before is not None and (action_E == before.action_E).all() and (position_EU == before.position_EU).all():
            self._set_compute(after.cell, self._before_X)
        else:
            self._set_compute(after.cell, self._compute(self.sums_EGDZ[after.cell]))

    def _take_up(self, laid: Laid) -> None:
        """Take a table off its ranks in every episode. What that leaves of its fused groups is an estimate."""
        self._before_X = self.group_EGD[laid.cell]
        self._add(laid, -1)
        self._set_compute(laid.cell, self.fusion_EGD[laid.cell] * self.sums_EGDZ[laid.cell][:, -2])

    def _add(self, laid: Laid, sign: int) -> None:
        """Add a table to all sums but compute, or subtract it."""
        row_X, _, rank_X = cell = laid.cell
        sums_XZ = self.sums_EGDZ[cell] + sign * self._own_PZ[laid.part_X]
        sent_XC = self.height_ERD[row_X, 1:, rank_X] + sign * self.task.sent_PC[laid.part_X]
        if sign < 0:  # what is empty is nothing, not the rounding of what was there
            sums_XZ[sums_XZ[:, -1] == 0] = 0.0
            sent_XC = np.maximum(sent_XC, 0.0)
        self.sums_EGDZ[cell], self.height_ERD[row_X, 1:, rank_X] = sums_XZ, sent_XC
        if len(self.task.scarce_M):
            self.free_EDM[row_X, rank_X] -= sign * self.task.need_PM[laid.part_X]

    def _set_compute(self, cell: tuple[np.ndarray, np.ndarray, np.ndarray], height_X: np.ndarray) -> None:
        row_X, _, rank_X = cell
        alone_X, self.group_EGD[cell] = self.sums_EGDZ[cell][:, -2], height_X
        self.fusion_EGD[cell] = np.where(alone_X > 0, height_X / alone_X.clip(TINY), 1.0)
        self.height_ERD[row_X, 0, rank_X] = self.group_EGD[row_X, :, rank_X].sum(-1)

    def _compute(self, sums_XZ: np.ndarray) -> np.ndarray:
        """Heights of fused groups by their sums."""
        ms_X2 = self._rate(torch.from_numpy(sums_XZ[:, :-2])).numpy()
        return np.asarray(ms_X2[:, 0] + ms_X2[:, 1]) / self.task.level_ms

    def relative_cost(self) -> np.ndarray:
        """Return the cost over the level height of what is laid down, [E]; infinite where infeasible."""
        highest_ER = self.height_ERD.max(-1)
        started_E = ((highest_ER[:, 1:] > NOTHING) * self.task.start_up_C).sum(-1)
        return np.where(self.alive_E, highest_ER.sum(-1) + started_E, np.inf)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the episodes alone."""
        for name, values in vars(self).items():
            if name.endswith(("_E", "_EGD", "_EGDZ", "_ERD", "_EDM")):
                setattr(self, name, values[list(rows)])
        self.types_ETN = None if self.types_ETN is None else self.types_ETN[list(rows)]
        self._laid = {table: laid.only(rows) for table, laid in self._laid.items()}

    def shardings(self) -> list[Sharding | None]:
        """Return the plans of the finished episodes; None where infeasible."""
        return [self.sharding(episode) if alive else None for episode, alive in enumerate(self.alive_E.tolist())]

    def sharding(self, episode: int) -> Sharding:
        """Return the plan of a feasible episode after a sweep."""
        chosen = [0] * self.task.num_tables
        placed: list[tuple[int, ...]] = [()] * self.task.num_tables
        for step in range(self.task.num_tables):
            actions = self.task.actions(step)
            laid = self._laid[actions.table]
            action = laid.action_E[episode]
            chosen[actions.table] = int(actions.option_O[action])
            placed[actions.table] = tuple(laid.position_EU[episode, : actions.units_O[action]].tolist())
        return Sharding(tuple(chosen), tuple(placed))


def _powers(values: np.ndarray, doublings: int) -> np.ndarray:
    for _ in range(doublings):
        values = values * values
    return values


def _added_powers(before: np.ndarray, added: np.ndarray, highest: np.ndarray, doublings: int) -> np.ndarray:
    """Return what heights add to the sum of powers, each a share of the highest."""
    return _powers((before + added) / highest, doublings) - _powers(before / highest, doublings)


def _roots(values: np.ndarray, doublings: int) -> np.ndarray:
    for _ in range(doublings):
        values = np.sqrt(values)
    return values


def _over_spans(values_EORD: np.ndarray, actions: TableActions) -> np.ndarray:
    """Sum, in place, the values of all ranks of a unit, at its position. Wide units have fewer positions than there are
    ranks; the others repeat the first."""
    for span, some in actions.wide:
        wide = values_EORD[:, some]
        sums = wide.reshape(*wide.shape[:-1], -1, span).sum(-1)
        wide[..., : sums.shape[-1]] = sums
        wide[..., sums.shape[-1] :] = sums[..., :1]
    return values_EORD
