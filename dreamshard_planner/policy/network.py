# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The policy network, and its roll-outs: each is a plan, from which the search can start.

Shapes: X any leading dimensions (episodes, or steps x episodes), E episodes, S steps, T tables, A actions, F features
of an action, Y channels, N types of sharding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dreamshard_planner.cost.problem import Cost, Sharding
from dreamshard_planner.policy.mdp import CHANNELS, Choices, EstimatedMDP, Sweep
from dreamshard_planner.policy.task import DESCRIBED, TYPES, ShardingTask
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.search_space.sharding_types import CW, DP, RW, TW, TWCW, TWRW

SWEEPS = (Sweep(doublings=3, mean=0.6), *(Sweep(doublings=doublings) for doublings in (2, 4, 6, 8)))
"""Sweeps of a roll-out. The policy acts in the first. In the others each table goes where it raises the heights least.
The second sweep is the bluntest: tables leave the options that crowded ranks forced on them."""
STARTS = 2
"""Episodes whose best sweeps become starts of the search: the cheapest."""
GREEDINESS = 8.0
"""Times that an untrained policy's score takes the weighted excess."""
BREADTH = 25_000
"""Tables x ranks up to which the planner plays all roll-outs. It plays fewer, in proportion, of larger problems."""
FEWEST = 2
"""Roll-outs of the largest problems."""
LENGTH = 2_700_000
"""Tables x ranks x sweeps up to which a roll-out has all sweeps. Those of larger problems have the first and the last,
or the first alone."""
HEAD_START = 0.1
"""Share of the time that roll-outs may take before they count as too slow for it."""
LOGIT_STEP = 1e-3
"""Greedy decoding compares scores after rounding to this step, so that ties always go to the first action."""
CLIP, EXCESS_CLIP = 20.0, 50.0
SITUATION = 8
FEATURES = 2 * len(CHANNELS) + DESCRIBED + 1 + SITUATION
NEXT = 10
"""Tables at hand and to come whose mean share says how lumpy what follows is."""


@dataclass(frozen=True)
class Opening:
    """Sharding types that the first sweep of a greedy roll-out may use. Each type that is used costs kernels and
    collectives of its own, and no single table's choice sees that it could do without."""

    types: Sequence[str]
    heaviest: float = 0.0
    """Share of the tables, the first in a task's order, that use :attr:`theirs` instead."""
    theirs: Sequence[str] = ()
    """Sharding types of the heaviest tables."""


OPENINGS = (
    Opening(TYPES),
    Opening((CW,), 0.03, (TWRW,)),
    Opening((CW,), 0.06, (RW,)),
    Opening((TW,), 0.06, (TWRW,)),
    Opening((TW,), 0.03, (TWRW,)),
    Opening((CW, TWRW)),
    Opening((DP,), 0.5, (CW,)),
    Opening((DP,), 0.5, (TWRW,)),
    Opening((TWCW,), 0.03, (TWRW,)),
    Opening((CW, RW)),
    Opening((TW, CW, TWCW)),
    Opening((TW, TWRW, DP)),
)
"""One for each greedy roll-out. Of 43 that were tried on other tables than the benchmarks', each of the first eight
lowered the best roll-out most, beside those above it."""
SURVIVORS = (len(OPENINGS), 10, 4, STARTS)
"""Episodes that go on after each of the planner's sweeps: the cheapest of those that cost different amounts."""


@dataclass(frozen=True)
class Seen:
    """Input of the policy: actions of one step of all episodes; in training, padded, of all steps."""

    excess_XAY: Tensor
    """Rises by an action, above the least of all legal actions."""
    features_XAF: Tensor
    legal_XA: Tensor

    @classmethod
    def of(cls, environment: EstimatedMDP, step: int, choices: Choices) -> Seen:
        """Describe the actions of a step."""
        rise_EAY, legal_EA1 = choices.rise_EOY, choices.legal_EO[..., None]
        least_E1Y = np.where(legal_EA1, rise_EAY, np.inf).min(1, keepdims=True)
        excess_EAY = np.where(legal_EA1, rise_EAY - least_E1Y, 0.0)
        described_AY, situation_EF = choices.actions.described_OY, _situation(environment, step, choices)
        features = (
            rise_EAY.clip(-CLIP, CLIP),
            excess_EAY.clip(-CLIP, CLIP),
            np.broadcast_to(described_AY, (len(rise_EAY), *described_AY.shape)),
            environment.free_share(choices).clip(-1, 1)[..., None],
            np.broadcast_to(situation_EF[:, None], (*rise_EAY.shape[:2], SITUATION)),
        )
        features_EAF = torch.from_numpy(np.concatenate(features, -1)).float()
        excess = torch.from_numpy(excess_EAY.clip(max=EXCESS_CLIP)).float()
        return cls(excess, features_EAF, torch.from_numpy(choices.legal_EO))


def _situation(environment: EstimatedMDP, step: int, choices: Choices) -> np.ndarray:
    """Share of the tables' cost that is left; the table's; ranks and tables; how far the highest ranks are above the
    mean; the cost so far; and how large the next tables are beside a rank, [E, SITUATION]."""
    task = environment.task
    highest_ER, mean_ER = environment.height_ERD.max(-1), environment.height_ERD.mean(-1)
    ranks = task.problem.num_ranks
    lumps = min(5.0, float(task.share_T[step : step + NEXT].sum()) / NEXT * ranks)
    alike = [
        task.left_T[step],
        math.log10(choices.actions.level),
        math.log2(ranks) / 10,
        math.log2(task.num_tables) / 10,
        lumps,
    ]
    above_ER = highest_ER - mean_ER
    own_E3 = np.stack([above_ER[:, 0], above_ER[:, 1:].sum(-1), highest_ER.sum(-1)], -1)
    return np.concatenate([np.broadcast_to(alike, (len(own_E3), len(alike))), own_E3], -1)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Size of the policy network."""

    hidden: int = 32
    """Width of all hidden layers."""

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}.")


class Policy(nn.Module):
    """Scores the actions of a table.

    The score is minus a weighted sum of what an action raises above the others, so that an untrained policy is a greedy
    heuristic; a small network of what it sees changes the weights, and adds to the score.
    """

    def __init__(self, config: PolicyConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.seen, self.mixed = nn.Linear(FEATURES, hidden), nn.Linear(hidden, hidden)
            self.score = nn.Linear(hidden, 1, bias=False)
            self.reweighted = nn.Linear(hidden, len(CHANNELS), bias=False)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.reweighted.weight)
        first = SWEEPS[0].mean
        self.log_weights = nn.Parameter(torch.tensor([first, first, 1 - first, 1 - first, 1.0]).log())
        self.log_greediness = nn.Parameter(torch.tensor(math.log(GREEDINESS)))
        self.eval()

    def logits(self, seen: Seen) -> Tensor:
        """Scores of actions, [..., A], minus infinity where illegal."""
        hidden_XAH = torch.relu(self.mixed(torch.relu(self.seen(seen.features_XAF))))
        weight_XAY = (self.log_weights + self.reweighted(hidden_XAH).clamp(-4, 4)).exp()
        excess_XA = (seen.excess_XAY * weight_XAY).sum(-1)
        logit_XA = self.score(hidden_XAH)[..., 0] - self.log_greediness.exp() * excess_XA
        return logit_XA.masked_fill(~seen.legal_XA, -torch.inf)

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Return whether the scores of the largest observations are finite."""
        largest = Seen(
            torch.full((1, len(CHANNELS)), EXCESS_CLIP), torch.full((1, FEATURES), CLIP), torch.tensor([True])
        )
        return bool(self.logits(largest).isfinite().all())


def drawn(logit_EA: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return an action of each episode, int64 [E]: by its probability, with ``generator``; the likeliest without."""
    if generator is None:
        return (logit_EA / LOGIT_STEP).round().argmax(-1)
    uniform_EA = torch.rand(logit_EA.shape, generator=generator).clamp_min(1e-9)
    return (logit_EA - (-uniform_EA.log()).log()).argmax(-1)  # Gumbel's trick


@torch.no_grad()
def roll_out(
    policy: Policy,
    task: ShardingTask,
    episodes: int,
    generator: torch.Generator | None = None,
    types_ETN: np.ndarray | None = None,
    sweeps: Sequence[Sweep] = SWEEPS,
    survivors: Sequence[int] = (),
    seconds: float = math.inf,
    on_step: Callable[[Seen, Tensor], None] | None = None,
    on_sweep: Callable[[EstimatedMDP], None] | None = None,
) -> EstimatedMDP:
    """Play episodes.

    Args:
        policy: acts in the first sweep.
        task: tables and ranks.
        episodes: how many.
        generator: samples the policy's actions; greedy without.
        types_ETN: see :class:`~dreamshard_planner.policy.mdp.EstimatedMDP`.
        sweeps: of each episode.
        survivors: episodes that go on after each sweep, the cheapest of each cost; all without.
        seconds: that episodes may take.
        on_step: is told what the policy sees and does.
        on_sweep: is called after each sweep.

    Raises:
        TimeoutError: as soon as episodes are found to take more time.
    """
    environment, began = EstimatedMDP(task, episodes, types_ETN), time.monotonic()
    steps = len(sweeps) * task.num_tables
    for nth, sweep in enumerate(sweeps):
        for step in range(task.num_tables):
            done = (nth * task.num_tables + step) / steps
            if time.monotonic() - began > seconds * max(HEAD_START, done):
                raise TimeoutError
            choices = environment.observe(step, sweep)
            if nth > 0:
                environment.step(choices, choices.least(sweep))
                continue
            seen = Seen.of(environment, step, choices)
            action_E = drawn(policy.logits(seen), generator)
            environment.step(choices, action_E.numpy())
            if on_step is not None:
                on_step(seen, action_E)
        if on_sweep is not None:
            on_sweep(environment)
        if nth < min(len(survivors), len(sweeps) - 1):
            environment.keep(_cheapest(environment.relative_cost(), survivors[nth]))
    return environment


def _cheapest(cost_E: np.ndarray, most: int) -> list[int]:
    """Return the cheapest episodes, the first of each cost: those that cost the same are the same plan."""
    first = {f"{cost:.9g}": row for row, cost in reversed([*enumerate(cost_E.tolist())])}
    return sorted(first.values(), key=lambda row: (cost_E[row], row))[:most]


def opening_types(num_tables: int, openings: Sequence[Opening] = OPENINGS) -> np.ndarray:
    """Return openings as types that each episode may use for each table, bool [E, T, N]."""
    allowed = np.array([[[kind in types for kind in TYPES] for types in (one.types, one.theirs)] for one in openings])
    heaviest_ET = np.arange(num_tables) < np.array([[one.heaviest * num_tables] for one in openings])
    return np.where(heaviest_ET[..., None], allowed[:, 1:], allowed[:, :1])


def policy_starts(cost: Cost, policy: Policy, asked: OptionTotals, seconds: float = math.inf) -> list[Sharding]:
    """Return plans to start the search from, at most :data:`STARTS`, the cheapest first: the best of greedy
    roll-outs, whose first sweeps use different sharding types, each as it was after its best sweep.

    Args:
        cost: the problem and its cost.
        policy: plays.
        asked: what options ask of all ranks together.
        seconds: that roll-outs may take.

    Raises:
        TimeoutError: they would take more.
    """
    task = ShardingTask(cost, asked)
    if not task.may_be_played:
        return []
    size = task.num_tables * cost.problem.num_ranks
    roll_outs = max(FEWEST, portion(len(OPENINGS), min(1.0, BREADTH / size)))
    types_ETN = opening_types(task.num_tables, OPENINGS[:roll_outs])
    later = min(len(SWEEPS), max(1, LENGTH // size)) - 1
    sweeps = [SWEEPS[0], *SWEEPS[len(SWEEPS) - later :]]
    best: dict[int, tuple[float, Sharding]] = {}

    def keep_best(environment: EstimatedMDP) -> None:
        numbered = zip(environment.episode_E.tolist(), environment.relative_cost().tolist(), strict=True)
        for row, (episode, relative_cost) in enumerate(numbered):
            if relative_cost < best.get(episode, (math.inf,))[0]:
                best[episode] = relative_cost, environment.sharding(row)

    roll_out(policy, task, len(types_ETN), None, types_ETN, sweeps, SURVIVORS, seconds, on_sweep=keep_best)
    fitting = dict.fromkeys(plan for _, plan in best.values() if cost.problem.fits(plan))
    return sorted(fitting, key=cost.overall_ms)[:STARTS]
