# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans by several costs, and TorchRec's: their steps, measured in turns.

Shapes: R ranks, C copies of a model, N rounds.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from dlrm.job import Job
from dlrm.planners import make_planners, plan_all
from dlrm.results import ratio_interval
from dlrm.steps import Trainee, take_turns
from dreamshard_planner import Checkpoint, DreamShardPlanner

BASE = "torchrec"
SHIPPED_PLAN = "dreamshard"
"""What our planner with the shipped network is called among the planners."""


def measure_plans(job: Job, costs: Mapping[str, Checkpoint]) -> dict[str, Any]:
    """What a step takes under the plan of each cost and under TorchRec's, by name. Plans that are the same are measured
    once."""
    more = {SHIPPED_PLAN if name == "shipped" else name: checkpoint for name, checkpoint in costs.items()}
    planners = make_planners(job.tables, job.batches, job.config, job.node, more)
    planned = plan_all(planners, job.fresh_model, job.sharders, job.config, job.node)
    first = _first_alike(planned.plans)
    order = random.Random(job.config.seed)
    models = [(name, copy) for name in dict.fromkeys(first.values()) for copy in range(job.config.copies)]
    trainees = {model: job.trainee(planned.plans[model[0]]) for model in order.sample(models, len(models))}
    take_turns(trainees, job.config, job.node, order)
    times_ms = {name: _times(job, trainees, name) for name in dict.fromkeys(first.values())}
    del trainees
    gc.collect()  # models are cyclic
    told = job.node.gather(planned.told)[0]
    ours = {name: planners[name][0] for name in more}
    predicted = {} if job.node.rank else {name: _predicted(ours[name], name, planned.options) for name in ours}
    return {
        "shipped" if name == SHIPPED_PLAN else name: {
            **_told(times_ms[first[name]], times_ms[first[BASE]]),
            "same_as": "shipped" if first[name] == SHIPPED_PLAN else first[name],
            "plan_seconds": told[name]["plan_seconds"],
            "ranks": told[name]["ranks"],
            "split": told[name]["split"],
            "predicted": predicted.get(name),
        }
        for name in planned.plans
    }


def _predicted(planner: DreamShardPlanner, name: str, options: Mapping[str, list[ShardingOption]]) -> dict[str, Any]:
    """What a planner thinks of its own plan, and of the base's."""
    entries = {which: planner.predict(options[which], which) for which in (name, BASE)}
    return {
        which: {"total_ms": entry.total_ms, "rank_ms": list(entry.rank_ms), "collectives_ms": entry.collectives_ms}
        for which, entry in zip(("own", BASE), entries.values(), strict=True)
    }


def _first_alike(plans: Mapping[str, ShardingPlan]) -> dict[str, str]:
    """By plan, the first one that is the same."""
    texts = {name: repr(sorted(_rows(plan))) for name, plan in plans.items()}
    firsts: dict[str, str] = {}
    return {name: firsts.setdefault(text, name) for name, text in texts.items()}


def _rows(plan: ShardingPlan) -> list[tuple[str, str, str]]:
    """Each table with how it is sharded."""
    return [(path, name, repr(sharding)) for path, tables in plan.plan.items() for name, sharding in tables.items()]


def _times(job: Job, trainees: Mapping[tuple[str, int], Trainee], name: str) -> dict[str, np.ndarray]:
    """Milliseconds per step [R, C, N] of the models of a plan: that passed, computed by this rank, and by its
    kernels."""
    mine = [trainees[name, copy] for copy in range(job.config.copies)]
    blocks_RCN3 = np.array(job.node.gather([one.blocks for one in mine]))
    computed_RCN = np.array(job.node.gather([one.computed_ms for one in mine]))
    return {"step": blocks_RCN3[..., 0], "computed": computed_RCN, "kernels": blocks_RCN3[..., 1:].sum(-1)}


def _told(times_ms: Mapping[str, np.ndarray], base_ms: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Medians, and ratios to the base's with intervals; of the slower rank each."""
    ratios = {
        f"{name}_ratio": ratio_interval(of_ranks.max(0), base_ms[name].max(0)) for name, of_ranks in times_ms.items()
    }
    by_rank = {f"{name}_ms": np.median(of_ranks, axis=(1, 2)).tolist() for name, of_ranks in times_ms.items()}
    return by_rank | ratios
