# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placement problems of whole tables, and the policy's roll-outs of them.

Shapes: S tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import Collective, CollectiveModel, Collectives
from dreamshard_planner.cost.problem import Cost, Option, Problem
from dreamshard_planner.errors import TaskError
from dreamshard_planner.policy.network import Policy, roll_out
from dreamshard_planner.policy.task import ShardingTask
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Workload, feature_matrix


@dataclass(frozen=True)
class Task:
    """A problem with the workloads that it was made from."""

    workloads: tuple[Workload, ...]
    problem: Problem


def problem_of(workloads: Sequence[Workload], num_devices: int) -> Problem:
    """A problem from whole-table workloads, all in one fused group, on devices whose memory is no limit; its exchange
    costs nothing until :func:`over` says which link it takes."""
    if num_devices < 1 or not workloads:
        raise TaskError(f"a task needs tables and devices, got {len(workloads)} tables, {num_devices} devices")
    sizes = [w.rows * (w.dim * w.weight_bytes + (4 if w.optimizer != "sgd" else 0)) for w in workloads]
    output_bytes = [w.output_elements * OUTPUT_BYTES / num_devices for w in workloads]
    return Problem(
        num_ranks=num_devices,
        features_PF=feature_matrix(workloads),
        group_P=torch.zeros(len(workloads), dtype=torch.int64),
        num_groups=1,
        bytes_PC=torch.tensor(output_bytes, dtype=torch.float64)[:, None],
        collectives=_all_to_all(CollectiveModel(num_devices, math.inf, 0.0)),
        needs_PM=torch.tensor(sizes, dtype=torch.int64)[:, None],
        limits_DM=torch.full((num_devices, 1), torch.iinfo(torch.int64).max // 4),
        names=tuple(w.name for w in workloads),
    )


def over(problem: Problem, link: CollectiveModel) -> Problem:
    """Return the problem with all that is sent in one all-to-all between all ranks, over this link."""
    return replace(problem, bytes_PC=problem.bytes_PC.sum(-1, keepdim=True), collectives=_all_to_all(link))


def _all_to_all(link: CollectiveModel) -> Collectives:
    return Collectives([Collective("all-to-all", "world", link, link)], link.world_size, link)


def with_options(problem: Problem) -> Problem:
    """Return the problem of parts as one of tables, each with one option, whole."""
    return replace(problem, tables=tuple((Option(np.array([[part]]), TW),) for part in range(problem.num_parts)))


def rolled_out(policy: Policy, cost: Cost) -> Tensor | None:
    """Return the ranks [S] of one greedy roll-out; None where it dead-ends."""
    whole = Cost(with_options(cost.problem), cost.compute, cost.latent_PH)
    (plan,) = roll_out(policy, ShardingTask(whole, OptionTotals(whole)), 1).shardings()
    return None if plan is None else torch.tensor(plan.positions)[:, 0]
