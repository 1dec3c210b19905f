# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""From a problem to a placement: policy roll-outs and greedy heuristics as starts, then search.

Shapes: S shards, B placements, D ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.model import Cost, PlacementCosts
from dreamshard_planner.policy.environment import TaskBatch
from dreamshard_planner.policy.network import AnyPolicy, roll_out
from dreamshard_planner.search.exact import pack
from dreamshard_planner.search.gathering import gathered
from dreamshard_planner.search.heuristics import HEURISTICS, greedy_by_score, place_by_heuristic
from dreamshard_planner.search.local_search import SearchConfig, local_search


@dataclass(frozen=True)
class Contender:
    """One placement that was considered, as the report shows it."""

    name: str
    assignment_S: Tensor | None
    """None where the method found no feasible placement."""
    costs: PlacementCosts | None

    @property
    def total_ms(self) -> float:
        """Overall cost; infinite where infeasible."""
        return float("inf") if self.costs is None else float(self.costs.overall_ms_B[0])


@dataclass(frozen=True)
class Placement:
    """The chosen placement, and all that it was chosen from."""

    chosen: Contender
    rivals: tuple[Contender, ...]
    """Policy, greedy heuristics and whatever else was given, feasible or not."""
    candidates: int
    cut_short: bool

    @property
    def assignment_S(self) -> Tensor:
        """Of the chosen one; ValueError for a plan that was only rated."""
        if self.chosen.assignment_S is None:
            raise ValueError("of this plan only costs are known")
        return self.chosen.assignment_S


MAX_ROLLOUT_RANKS = 128
"""Roll-outs x ranks played side by side; more take longer than the search and find nothing that it does not."""


class InfeasibleError(Exception):
    """No placement keeps every rank within its memory."""

    def __init__(self, proven: bool) -> None:
        super().__init__("no feasible placement" if proven else "no feasible placement found")
        self.proven = proven


@torch.inference_mode()
def place(
    cost: Cost,
    policy: AnyPolicy | None,
    config: SearchConfig | None,
    *,
    seed: int = 0,
    given: Mapping[str, Tensor | None] | None = None,
    seconds: float | None = None,
    packing: float = 1.0,
) -> Placement:
    """Place the shards of one problem.

    Args:
        cost: the problem and its cost.
        policy: the policy network; None to start from heuristics alone.
        config: search settings; None means one greedy policy roll-out and nothing else (the paper's
            procedure), with other placements only where the roll-out dead-ends on memory.
        seed: of the sampled roll-outs and the perturbations of the search.
        given: further placements [S] to start from, by name; None where one does not fit.
        seconds: cap on the search, on top of its budget of candidates.
        packing: effort of the exact packing, where all else finds no room; 0 for none.

    Returns:
        The cheapest placement found; with a ``config`` never dearer than any rival.

    Raises:
        InfeasibleError: where no method, exact packing included, fits the shards into memory.
    """
    problem = cost.problem
    if not problem.num_parts:
        return Placement(_contender(cost, "chosen", torch.zeros(0, dtype=torch.int64)), (), 0, False)
    generator = torch.Generator().manual_seed(seed)
    starts: dict[str, Tensor | None] = {}
    sampled: list[Tensor] = []
    if policy is not None:
        samples = 0 if config is None else sampled_rollouts(config.samples, problem.num_ranks)
        source = generator if samples else None
        episodes = roll_out(policy, TaskBatch.collate([cost]), 1 + samples, source, greedy_first=True).environment
        starts["policy"], *others = episodes.plans(0)
        sampled = [plan for plan in others if plan is not None]
    starts |= given or {}
    for name in HEURISTICS:
        starts[name] = place_by_heuristic(problem, name)
    starts["cost_greedy"] = greedy_by_score(problem, cost.single_ms_P, cost.preload_ms_D)
    rivals = tuple(_contender(cost, name, assignment_S) for name, assignment_S in starts.items())
    if config is None and rivals[0].assignment_S is not None:
        return Placement(rivals[0], rivals[1:], 0, False)

    pool = [rival.assignment_S for rival in rivals if rival.assignment_S is not None] + sampled
    if config is not None and (gathered_S := gathered(cost)) is not None:
        pool.append(gathered_S)
    if not pool:
        assignment_S, proven = pack(problem, packing, seconds)
        if assignment_S is None:
            raise InfeasibleError(proven)
        pool.append(assignment_S)
    overall_B = cost.rate(torch.stack(pool)).overall_ms_B
    order = torch.argsort(_round_significant(overall_B), stable=True).tolist()
    if config is None:
        return Placement(_contender(cost, "chosen", pool[order[0]]), rivals, 0, False)
    result = local_search(cost, [pool[index] for index in order[: config.starts]], config, generator, seconds)
    return Placement(_contender(cost, "chosen", result.assignment_S), rivals, result.candidates, result.cut_short)


def sampled_rollouts(wanted: int, ranks: int) -> int:
    """How many to play beside the greedy one, of so many wanted; none where there is nothing to choose."""
    return 0 if ranks == 1 else min(wanted, max(0, MAX_ROLLOUT_RANKS // ranks - 1))


def _contender(cost: Cost, name: str, assignment_S: Tensor | None) -> Contender:
    """Rate a placement alone, so that equal placements get equal figures whatever they are rated beside."""
    return Contender(name, assignment_S, None if assignment_S is None else cost.rate(assignment_S[None]))


def _round_significant(values_B: Tensor) -> Tensor:
    return (values_B / values_B.min().clamp_min(1e-9) * 1e6).round()
