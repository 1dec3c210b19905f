# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placements whose ranks hold few fused groups each.

A rank starts a kernel for every group that it holds a shard of. Heuristics that level ranks shard by shard give every
rank some of every group; and no move ends a kernel, unless it takes the last shard: what pays for all shards that a
rank holds of a group pays for none of them alone.

Shapes: S shards, D ranks, G groups that have shards, H latent channels, I boundaries between shards (S + 1), M limits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import summed

HALVINGS = 16
"""Of the interval in which the lowest height lies that ranks can be filled up to."""


def gathered(cost: Cost) -> Tensor | None:
    """Rank of each shard, int64 [S], where one group after the other fills up one rank after the other, the largest
    shards of a group first, up to the lowest height that suffices. None where there is one group alone, or where ranks
    cannot be filled like that.

    Args:
        cost: of a placement problem.
    """
    problem = cost.problem
    group_S = problem.group_P.unique(return_inverse=True)[1]
    if not len(group_S) or not group_S.any():
        return None
    start_S, own_S = _kernel_starts(cost, group_S)
    total_G = np.bincount(group_S, own_S)
    order_S = np.lexsort((-own_S, group_S, -total_G[group_S]))
    row = _Row(cost, order_S, group_S.numpy(), start_S, own_S)
    high = float(row.loads_D[-1] + cost.single_ms_P.sum())
    low, filled = 0.0, row.filled(high)
    for _ in range(HALVINGS if filled is not None else 0):
        middle = (low + high) / 2
        lower = row.filled(middle)
        if lower is None:
            low = middle
        else:
            high, filled = middle, lower
    if filled is None:
        return None
    assignment_S = torch.empty(problem.num_parts, dtype=torch.int64)
    assignment_S[torch.from_numpy(order_S)] = torch.from_numpy(filled)
    return assignment_S


def _kernel_starts(cost: Cost, group_S: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds that the kernel of each shard's group takes whatever it computes, and those that the shard adds,
    both [S]: as if all shards of a group in one kernel saved the starts of all others."""
    groups = int(group_S.max()) + 1
    single_G = torch.zeros(groups, dtype=torch.float64).index_add_(0, group_S, cost.single_ms_P.double())
    fused_G = cost.compute.group_cost_ms(summed(cost.latent_PH, group_S, groups)).sum(-1)
    start_G = ((single_G - fused_G) / (group_S.bincount() - 1).clamp_min(1)).clamp_min(0)
    start_S = torch.minimum(start_G[group_S], cost.single_ms_P)
    return start_S.numpy(), (cost.single_ms_P - start_S).double().numpy()


class _Row:
    """Shards in a row, to be cut into runs, one for each rank, the least loaded first.

    Args:
        cost: of the placement problem.
        order_S: the shards.
        group_S, start_S, own_S: group of each shard, and what its kernel and it take, not in that order.
    """

    def __init__(
        self, cost: Cost, order_S: np.ndarray, group_S: np.ndarray, start_S: np.ndarray, own_S: np.ndarray
    ) -> None:
        problem = cost.problem
        load_D = np.zeros(problem.num_ranks) if cost.preload_ms_D is None else cost.preload_ms_D.double().numpy()
        self._rank_D = np.argsort(load_D, kind="stable")
        self.loads_D = load_D[self._rank_D]
        """Milliseconds that lie on the ranks already, in ascending order."""
        self._room_DM = problem.limits_DM.clamp_min(0).numpy()[self._rank_D]
        group_S = group_S[order_S]
        is_first_S = np.append(True, group_S[1:] != group_S[:-1])
        # A run that begins within a group starts a kernel that the sum up to there has counted before.
        self._again_S = np.where(is_first_S, 0.0, start_S[order_S])
        self._ms_I = np.append(0.0, np.cumsum(own_S[order_S] + np.where(is_first_S, start_S[order_S], 0.0)))
        needs_SM = problem.needs_PM.numpy()[order_S]
        self._need_IM = np.concatenate([np.zeros_like(needs_SM[:1]), needs_SM.cumsum(0)])

    def filled(self, height_ms: float) -> np.ndarray | None:
        """Rank of each shard of the row, [S], with no rank above this height or its limits; None where some are
        left."""
        shards, begin = len(self._again_S), 0
        ranks_S = np.empty(shards, dtype=np.int64)
        for rank, load, room_M in zip(self._rank_D, self.loads_D, self._room_DM, strict=True):
            most_ms = height_ms - load - self._again_S[begin] + self._ms_I[begin]
            ends = [self._ms_I.searchsorted(most_ms, "right") - 1]
            most_M = self._need_IM[begin] + room_M
            ends += [
                need_I.searchsorted(most, "right") - 1 for need_I, most in zip(self._need_IM.T, most_M, strict=True)
            ]
            end = max(begin, int(min(ends)))
            ranks_S[begin:end] = rank
            begin = end
            if begin == shards:
                return ranks_S
        return None
