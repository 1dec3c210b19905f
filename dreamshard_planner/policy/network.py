# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The policy network, and its roll-outs: each is a plan, from which the search can start.

Shapes: X any leading dimensions (episodes, or steps x episodes), E episodes, S steps, A actions, F features of an
action, Y channels, N types of sharding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.policy.mdp import (
    CHANNELS,
    DESCRIBED,
    RULES,
    TYPES,
    Choices,
    EstimatedMDP,
    ShardingTask,
)
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.search_space.sharding_types import CW, DP, RW, TW, TWCW, TWRW

WEIGHTS = {"mean": 0.6, "mean_2": 0.2, "mean_8": 0.2, "highest": 0.01}
"""Of what an action raises (:data:`~dreamshard_planner.policy.mdp.RISES`) in the score of an untrained
policy, of compute and exchanges alike. What collectives take to start counts as it is."""
GREEDINESS = 8.0
"""Times that an untrained policy's score takes the weighted excess."""
SUBSETS = (TYPES, (TW, CW, TWCW), (TWRW,), (TWRW, DP), (TW, DP), (TW, TWRW, DP), (CW, TWRW, DP), (RW, DP))
"""Sharding types that one greedy roll-out each may use: each type that is used costs kernels and collectives of its
own, and no single table's choice sees that it could do without."""
SUBSET_RANKS = 64
"""Ranks up to which there are roll-outs of some types: on more, they take longer than all other starts, and the one of
all types was the best of them."""
RELAID = 4
"""Level starts whose options are laid down anew."""
HEAD_START = 0.1
"""Share of the time that roll-outs may take before they count as too slow for it."""
LOGIT_STEP = 1e-3
"""Greedy decoding compares scores after rounding to this step, so that ties always go to the first action."""
CLIP, EXCESS_CLIP = 20.0, 50.0
SITUATION = 8
FEATURES = 2 * len(CHANNELS) + DESCRIBED + len(RULES) + 1 + SITUATION
NEXT = 10
"""Tables at hand and to come whose mean share says how lumpy what follows is."""


@dataclass(frozen=True)
class Seen:
    """What the policy scores: actions of one step of all episodes; in training, padded, of all steps."""

    excess_XAY: Tensor
    """What an action raises, above the least of all legal actions."""
    features_XAF: Tensor
    legal_XA: Tensor

    @classmethod
    def of(cls, environment: EstimatedMDP, choices: Choices) -> Seen:
        """At the step at hand."""
        rise_EAY, legal_EA = choices.rise_EAY, choices.legal_EA
        least_E1Y = rise_EAY.masked_fill(~legal_EA[..., None], torch.inf).amin(1, keepdim=True)
        excess_EAY = (rise_EAY - least_E1Y).masked_fill(~legal_EA[..., None], 0.0)
        described_OY = choices.actions.described_OY
        per_action_AF = torch.cat(
            [described_OY.repeat_interleave(len(RULES), 0), torch.eye(len(RULES)).repeat(len(described_OY), 1)], -1
        )
        situation_EF = _situation(environment, choices)
        features = (
            rise_EAY.clamp(-CLIP, CLIP),
            excess_EAY.clamp(-CLIP, CLIP),
            per_action_AF.expand(len(rise_EAY), -1, -1),
            choices.free_EA.clamp(-1, 1)[..., None],
            situation_EF[:, None].expand(-1, rise_EAY.shape[1], -1),
        )
        return cls(excess_EAY.clamp_max(EXCESS_CLIP), torch.cat(features, -1), legal_EA)


def _situation(environment: EstimatedMDP, choices: Choices) -> Tensor:
    """Share of the tables' cost that is left; the table's; ranks and tables; how far the highest ranks are above the
    mean; the cost so far; and how large the next tables are beside a rank, [E, SITUATION]."""
    task, step = environment.task, environment.step_index
    highest_ER, mean_ER = environment.height_ERD.amax(-1), environment.height_ERD.mean(-1)
    ranks = task.problem.num_ranks
    alike = [
        task.left_T[step],
        math.log10(choices.actions.level),
        math.log2(ranks) / 10,
        math.log2(task.num_tables) / 10,
    ]
    own_E3 = [
        highest_ER[:, 0] - mean_ER[:, 0],
        (highest_ER - mean_ER)[:, 1:].sum(-1),
        highest_ER.sum(-1),
    ]
    lumps = min(5.0, float(task.share_T[step : step + NEXT].sum()) / NEXT * ranks)
    columns = [highest_ER.new_tensor(alike).expand(len(highest_ER), -1), torch.stack(own_E3, -1)]
    return torch.cat([*columns, highest_ER.new_full((len(highest_ER), 1), lumps)], -1).float()


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
        weights = [weight for weight in WEIGHTS.values() for _ in ("compute", "exchanges")]
        self.log_weights = nn.Parameter(torch.tensor([*weights, 1.0]).log())
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
        """Whether the scores of the largest observations are finite."""
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
    types_EN: Tensor | None = None,
    option_ET: Tensor | None = None,
    seconds: float | None = None,
    on_step: Callable[[Seen, Tensor], None] | None = None,
) -> EstimatedMDP:
    """Play episodes: sampled with ``generator``, greedy without; of all sharding types and options, or of some in
    each, see :class:`~dreamshard_planner.policy.mdp.EstimatedMDP`. TimeoutError as soon as they are found to
    take more ``seconds``. ``on_step`` is told what the policy sees and does."""
    environment, began = EstimatedMDP(task, episodes, types_EN, option_ET), time.monotonic()
    for step in range(task.num_tables):
        if seconds is not None and time.monotonic() - began > seconds * max(HEAD_START, step / task.num_tables):
            raise TimeoutError
        seen = Seen.of(environment, environment.observe())
        action_E = drawn(policy.logits(seen), generator)
        environment.step(action_E)
        if on_step is not None:
            on_step(seen, action_E)
    return environment


def subset_types() -> Tensor:
    """:data:`SUBSETS` as types that episodes may use, bool [E, N]."""
    return torch.tensor([[kind in subset for kind in TYPES] for subset in SUBSETS])


def policy_starts(
    cost: Cost,
    policy: Policy,
    asked: OptionTotals,
    level: Sequence[Sharding],
    seconds: float | None = None,
    effort: float = 1.0,
) -> list[Sharding]:
    """Plans to start the search from, at most two, the cheapest first: the best of greedy roll-outs that choose
    options, of all sharding types and, on few ranks, of some subsets of them; and the best of those that only lay the
    options of the cheapest level starts down anew. Further ones would leave the search little else to start from, and
    descents end elsewhere than they start.

    Args:
        cost: the problem and its cost.
        policy: plays.
        asked: what options ask of all ranks together.
        level: level starts.
        seconds: that roll-outs may take.
        effort: share of the roll-outs to play; all from 1 on.

    Raises:
        TimeoutError: they would take more.
    """
    task, types_EN = ShardingTask(cost, asked), subset_types()
    if not task.may_be_played:
        return []
    relaid = sorted(level, key=cost.overall_ms)[:RELAID]
    if cost.problem.num_ranks > SUBSET_RANKS:
        types_EN, relaid = types_EN[:1], relaid[:1]
    types_EN, relaid = types_EN[: portion(len(types_EN), effort)], relaid[: portion(len(relaid), effort)]
    free = len(types_EN)
    option_ET = torch.full((free + len(relaid), task.num_tables), -1)
    option_ET[free:] = torch.tensor([plan.options for plan in relaid]).view(-1, task.num_tables)
    types_EN = torch.cat([types_EN, types_EN[:1].expand(len(relaid), -1)])
    plans = roll_out(policy, task, len(option_ET), None, types_EN, option_ET, seconds).shardings()
    fitting = [
        [plan for plan in some if plan is not None and cost.problem.fits(plan)] for some in (plans[:free], plans[free:])
    ]
    best = dict.fromkeys(min(some, key=cost.overall_ms) for some in fitting if some)
    return sorted(best, key=cost.overall_ms)
