# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans by several costs, and TorchRec's: their steps, measured in turns; and all models together, for people and in
files, with intervals by resampling models.

Shapes: R ranks, C copies of a model, N rounds.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from common.output import interval, table_of
from dlrm.job import Job, make_planners, plan_all
from dlrm.results import ratio_interval
from dlrm.steps import Trainee, take_turns
from dreamshard_planner import Checkpoint, DreamShardPlanner
from observed.learned import HELD_OUT, LEARNED

BASE = "torchrec"
SHIPPED_PLAN = "dreamshard"
"""Name of our planner with the shipped network among the planners."""
WINNER = "shipped"
"""Whose win over TorchRec's plan counts as all of it."""

Row = Mapping[str, Any]


def measure_plans(job: Job, costs: Mapping[str, Checkpoint]) -> dict[str, Any]:
    """Measure steps under the plan of each cost and under TorchRec's, by name. Plans that are the same are measured
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
    """Return a planner's prediction of its own plan, and of the base's."""
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


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors by optimizer, and steps under plans."""
    optimizers = dict.fromkeys(row["optimizer"] for row in rows)
    groups = {"all": list(rows)} | {name: [row for row in rows if row["optimizer"] == name] for name in optimizers}
    result: dict[str, Any] = {"errors": {name: _errors(some) for name, some in groups.items()}} if rows else {}
    if rows:
        result["exchanges"] = {name: _exchange_errors(rows, name) for name in rows[0]["exchanges"]}
    planned = [row for row in rows if row["plans"]]
    return result | ({"steps": _steps(planned)} if planned else {})


def _errors(rows: Sequence[Row]) -> dict[str, Any]:
    """Means of both directions and models, and ratios of these to what was learned from bandwidths."""
    mean_N = {name: np.array([np.mean(row["errors"][name]) for row in rows]) for name in rows[0]["errors"]}
    mine_N = mean_N["roofline" + LEARNED]
    ratios = {
        name: interval(lambda some, other_N=other_N: mine_N[some].mean(1) / other_N[some].mean(1), len(rows))
        for name, other_N in mean_N.items()
        if name != "roofline" + LEARNED
    }
    directions = {name: np.mean([row["errors"][name] for row in rows], axis=0).tolist() for name in mean_N}
    return {"models": len(rows), "mean": directions, f"roofline{LEARNED} over": ratios}


def _exchange_errors(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Means by operation of costs of that name, over models that had it."""
    operations = dict.fromkeys(operation for row in rows for operation in row["exchanges"][name])
    return {
        operation: float(np.mean([one[operation] for row in rows if operation in (one := row["exchanges"][name])]))
        for operation in operations
    }


def _steps(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric means of ratios to the base, and shares of the shipped network's win, by kind of time."""
    names = [name for name in rows[0]["plans"] if name != BASE]
    result: dict[str, Any] = {}
    for kind in ("step", "computed", "kernels"):
        logs_N = {name: np.log([row["plans"][name][f"{kind}_ratio"][1] for row in rows]) for name in names}
        result[kind] = {
            name: {
                "ratio": interval(lambda some, of_N=of_N: np.exp(of_N[some].mean(1)), len(rows)),
                "share_of_win": _share(of_N, logs_N.get(WINNER)),
            }
            for name, of_N in logs_N.items()
        }
    return result


def _share(mine_N: np.ndarray, winner_N: np.ndarray | None) -> list[float] | None:
    """Return the share of the winner's win, in logarithms; its bounds say nothing if that win may be none."""
    if winner_N is None or not winner_N.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return interval(lambda some: np.nan_to_num(mine_N[some].mean(1) / winner_N[some].mean(1)), len(mine_N))


def tell(rows: Sequence[Row], summary: Mapping[str, Any], taken: Mapping[str, Any] | None, console: Console) -> None:
    """Print all that there is."""
    if rows:
        _tell_errors(rows, summary, console)
    if "steps" in summary:
        _tell_steps(rows, summary, console)
    for clock in ("computed", "wall") if taken else ():
        told = taken[clock]
        parts = ", ".join(f"{part} {_percents(bounds)}" for part, bounds in told.items() if part != "step_ms")
        console.print(
            f"Observing takes of a step of the demo ({told['step_ms']:.1f} ms {clock}, {taken['pairs']} pairs): {parts}"
        )


def _tell_errors(rows: Sequence[Row], summary: Mapping[str, Any], console: Console) -> None:
    names = list(rows[0]["errors"])
    table = table_of(f"Error on kernels of {HELD_OUT} other plans, forward and backward", "model", "kernels", *names)
    for row in rows:
        cells = [" ".join(f"{error:.0%}" for error in row["errors"][name]) for name in names]
        table.add_row(f"{row['model']} {row['optimizer']}", " ".join(map(str, row["kernels"])), *cells)
    for group, told in summary["errors"].items():
        table.add_section()
        cells = [" ".join(f"{error:.0%}" for error in told["mean"][name]) for name in names]
        table.add_row(f"{group}: mean", "", *cells)
        ratios = told[f"roofline{LEARNED} over"]
        table.add_row("learned over it", "", *("" if name not in ratios else _bounds(ratios[name]) for name in names))
    console.print(table)
    for name, errors in summary.get("exchanges", {}).items():
        told = ", ".join(f"{operation} {error:.0%}" for operation, error in errors.items())
        console.print(f"Error on exchanges of these plans by {name}: {told}")


def _tell_steps(rows: Sequence[Row], summary: Mapping[str, Any], console: Console) -> None:
    planned = [row for row in rows if row["plans"]]
    names = list(summary["steps"]["step"])
    table = table_of("Step over that under TorchRec's plan", "model", "TorchRec's step ms", "kernels", *names)
    for row in planned:
        base = row["plans"][BASE]
        step_ms, kernels_ms = max(base["step_ms"]), max(base["kernels_ms"])
        cells = [_plan_cell(row["plans"][name], name) for name in names]
        table.add_row(f"{row['model']} {row['optimizer']}", f"{step_ms:.1f}", f"{kernels_ms / step_ms:.0%}", *cells)
    for kind, of_plans in summary["steps"].items():
        table.add_section()
        table.add_row(f"{kind}: geometric mean", "", "", *(_bounds(of_plans[name]["ratio"]) for name in names))
        shares = [of_plans[name]["share_of_win"] for name in names]
        table.add_row(f"share of {WINNER}'s win", "", "", *(_percents(share) if share else "" for share in shares))
    console.print(table)
    console.print(
        "step: by the wall clock; computed: processor time of a whole step, kernels: of the fused kernels, each of the "
        "rank that computes most, as if ranks had cores of their own."
    )


def _plan_cell(plan: Mapping[str, Any], name: str) -> str:
    return _bounds(plan["step_ratio"]) + ("" if plan["same_as"] == name else f" as {plan['same_as']}")


def _bounds(of: Sequence[float]) -> str:
    low, value, high = of
    return f"{value:.3f} ({low:.3f}-{high:.3f})"


def _percents(of: Sequence[float]) -> str:
    low, value, high = (100 * share for share in of)
    return f"{value:.2f} % ({low:.2f} to {high:.2f})"
