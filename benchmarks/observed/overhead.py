# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure what observing takes of a step of the demo.

Short blocks of one model in turn with and without observing, in the order on, off, off, on; all read the same batches,
and each step is timed by itself. An observer counts the first batch that it sees, and by default every 100th: so of the
first step of each block, a hundredth of what it takes more than the others do is added to what these take more. Steps
are compared in pairs, of the same batch in the two blocks beside each other; of their ratios the tenth at either end is
left out, in which others had the core. Intervals are over pairs of blocks. Attaching and the end, once in an
observation, are not in it.

Shapes: R ranks, N pairs of blocks, 2 = with and without, S steps, the first one included, 2 = by the wall clock and
computed.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

from common.output import interval, trimmed_mean
from dlrm.job import Job, make_planners, plan_all, scale_tables
from dlrm.options import Config, Node
from dlrm.steps import Trainee
from dreamshard_planner import observe
from dreamshard_planner.checkpoints.choice import SHIPPED, shipped
from dreamshard_planner.workload.counting import EVERY
from dreamshard_planner.workload.pools import named_pool

WARMUP_STEPS = 10


def overhead(node: Node, pairs: int, block: int) -> dict[str, Any]:
    """Shares of a step, each with its interval, of pairs of blocks of so many steps."""
    one = demo(node, block)
    one.train(WARMUP_STEPS, timed=False)
    rows = []
    for pair in range(pairs):
        ms = {on: _block_ms(one, on, block) for on in ((True, False) if pair % 2 == 0 else (False, True))}
        rows.append([ms[True], ms[False]])
        if node.rank == 0 and pair % 20 == 19:
            print(f"{pair + 1} of {pairs} pairs of blocks", file=sys.stderr, flush=True)
    return told(np.array(node.gather(rows)))


def demo(node: Node, block: int) -> Trainee:
    """The model of ``make demo`` under our plan."""
    config = Config(
        hot=6.0,
        optimizer="adagrad",
        sharding_types="table_wise,column_wise",
        min_partition=32,
        planners="dreamshard",
        steps=block + 1,  # as many batches: all blocks read the same ones
    ).on("cpu")
    tables, _ = scale_tables(named_pool(config.tables), config.max_rows, config.dim, config.hot)
    job = Job.of(tables, config, node)
    planners = make_planners(tables, job.batches, config, node, {"dreamshard": shipped(SHIPPED, "cpu", "default")})
    return job.trainee(plan_all(planners, job.fresh_model, job.sharders, config, node).plans["dreamshard"])


def _block_ms(one: Trainee, on: bool, block: int) -> list[tuple[float, float]]:
    """Return the milliseconds of each step."""
    with observe(one.model) if on else nullcontext():
        return [one.train(1, timed=False) for _ in range(1 + block)]


def told(ms_RN2S2: np.ndarray) -> dict[str, Any]:
    """Shares of a step, with their intervals."""
    clocks = {"wall": ms_RN2S2[..., 0].max(0), "computed": ms_RN2S2[..., 1].sum(0)}
    return {"pairs": ms_RN2S2.shape[1]} | {name: _of_clock(ms_N2S) for name, ms_N2S in clocks.items()}


def _of_clock(ms_N2S: np.ndarray) -> dict[str, Any]:
    """Return the shares of one clock: of the slower rank, or of all together."""
    more_NS = ms_N2S[:, 0] / ms_N2S[:, 1] - 1
    hooks_NS, counting_N1 = more_NS[:, 1:], (more_NS[:, :1] - more_NS[:, 1:].mean(1, keepdims=True)) / EVERY

    def hooks(some: np.ndarray) -> np.ndarray:
        return trimmed_mean(hooks_NS[some].reshape(len(some), -1))

    def counting(some: np.ndarray) -> np.ndarray:
        return trimmed_mean(counting_N1[some].reshape(len(some), -1))

    parts = {
        "share": lambda some: hooks(some) + counting(some),
        "hooks": hooks,
        "counting": counting,
        "untrimmed": lambda some: (hooks_NS[some].mean(-1) + counting_N1[some][..., 0]).mean(1),
    }
    told_ms = {"step_ms": float(np.median(ms_N2S[:, 1]))}
    return told_ms | {part: interval(of, len(ms_N2S)) for part, of in parts.items()}
