# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Results of the DLRM benchmark: plans, steps, and their ratios to the base's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from common.output import provenance, table_of
from dlrm.job import Planned
from dlrm.options import Config, Node
from dlrm.steps import Trained
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.plans.report import Report, ReportEntry, noted

MAX_SPLITS_SHOWN = 3


@dataclass(frozen=True)
class PlannerResult:
    """One planner's plan, and what it was like to train on it. Medians and quartiles are over blocks of steps."""

    name: str
    plan_seconds: float
    ranks: dict[str, list[int]]
    """Ranks of each table's shards."""
    split: dict[str, str]
    """Sharding type of each table that is not whole."""
    predicted: ReportEntry
    """By DreamShard's cost model, whoever made the plan."""
    step_ms: tuple[float, float, float]
    """Lower quartile, median, upper quartile; a block takes as long as on its slowest rank."""
    ratio: tuple[float, float, float]
    """Ratio of the step time to the base's, between the bounds of its 95 % interval: :func:`ratio_interval`."""
    forward_ms: tuple[float, ...]
    """Fused kernels of each rank."""
    backward_ms: tuple[float, ...]
    kernel_ratio: tuple[float, float, float]
    """Ratio of the slower rank's kernels to the base's, as :attr:`ratio`."""
    samples_per_second: float
    kernel_ms: tuple[tuple[tuple[float, ...], ...], ...]
    """Forward + backward of the blocks, by rank and model, per step."""
    block_ms: tuple[tuple[float, ...], ...]
    """By model, per step."""
    losses: tuple[float, ...]

    @classmethod
    def of(
        cls,
        name: str,
        times_ms: np.ndarray,
        base_ms: np.ndarray,
        losses: np.ndarray,
        config: Config,
        node: Node,
        plan: dict,
    ) -> PlannerResult:
        """From milliseconds per step [ranks, models, rounds, (step, forward, backward)] of the planner and of the
        base."""
        block_ms, base_block_ms = times_ms[..., 0].max(0), base_ms[..., 0].max(0)
        median_ms = np.median(times_ms, axis=(1, 2))
        kernel_ms, base_kernel_ms = (times[..., 1:].sum(-1) for times in (times_ms, base_ms))
        step_ms = np.percentile(block_ms, (25, 50, 75)).tolist()
        return cls(
            name=name,
            step_ms=tuple(step_ms),
            ratio=ratio_interval(block_ms, base_block_ms),
            forward_ms=tuple(median_ms[:, 1].tolist()),
            backward_ms=tuple(median_ms[:, 2].tolist()),
            kernel_ratio=ratio_interval(kernel_ms.max(0), base_kernel_ms.max(0)),
            kernel_ms=tuple(tuple(map(tuple, of_rank)) for of_rank in kernel_ms.tolist()),
            samples_per_second=config.batch_size * node.world_size / step_ms[1] * 1e3,
            block_ms=tuple(map(tuple, block_ms.tolist())),
            losses=tuple(losses.tolist()),
            **plan,
        )


@dataclass(frozen=True)
class Result:
    """Everything about one run."""

    provenance: dict[str, Any]
    config: Config
    scaling: str
    base: str
    """The planner that ratios refer to."""
    cost_source: str
    loss_difference: float
    """Largest between two models, any step and rank."""
    reference_ms: float
    """Milliseconds of the reference set, between the steps: median over rounds, mean over ranks."""
    checkpoint_reference_ms: float | None
    """Milliseconds of it when the checkpoint's kernels were measured; None if they were not."""
    world_size: int
    planners: tuple[PlannerResult, ...]
    report: Report
    """On dreamshard's plan, with notes on the steps."""

    @classmethod
    def of(cls, ranks: Sequence[Trained], planned: Planned, scaling: str, config: Config, node: Node) -> Result:
        """From what all ranks saw, and what was planned."""
        base = "torchrec" if "torchrec" in config.names else config.names[0]
        times = {name: np.array([trained.blocks[name] for trained in ranks]) for name in config.names}
        losses_RCN = {name: np.array([trained.losses[name] for trained in ranks]) for name in config.names}
        planners = []
        for name in config.names:
            losses = losses_RCN[name].mean((0, 1))
            planners.append(PlannerResult.of(name, times[name], times[base], losses, config, node, planned.told[name]))
        report = planned.judge.report()
        return cls(
            provenance=provenance(node.device),
            config=config,
            scaling=f"{config.tables}: {scaling}",
            base=base,
            cost_source=report.cost_source,
            report=with_steps(report, planners, base),
            reference_ms=float(np.mean([trained.reference_ms for trained in ranks])),
            checkpoint_reference_ms=resolve(config.checkpoint, node.device.type).metadata.get("reference_ms"),
            loss_difference=float(np.ptp(np.concatenate(list(losses_RCN.values()), axis=1), axis=1).max()),
            world_size=node.world_size,
            planners=tuple(planners),
        )

    @property
    def speed(self) -> float | None:
        """Time of kernels now over that time, by the reference set; None if it is unknown."""
        usual_ms = self.checkpoint_reference_ms
        return self.reference_ms / usual_ms if usual_ms else None


def with_steps(report: Report, results: Sequence[PlannerResult], base: str) -> Report:
    """Return a report with what was measured in training."""
    steps = noted(
        "measurement",
        [
            f"measured in training: a step takes {entry.step_ms[1]:.1f} ms under the plan of {entry.name}"
            + (f", {entry.ratio[1]:.3f} of {base}'s" if entry.name != base else "")
            for entry in results
        ],
    )
    return report.noting(steps)


def ratio_interval(block_ms_CN: np.ndarray, base_ms_KN: np.ndarray, draws: int = 1000) -> tuple[float, float, float]:
    """Ratio of a planner's blocks to the base's between the bounds of its 95 % bootstrap interval.

    The median over the N rounds, in which both were hit by the same spells of the machine, then the geometric mean over
    pairs of one of the planner's C models and one of the base's K; the bootstrap resamples models and rounds.
    """
    logs_CKN = np.log(block_ms_CN)[:, None] - np.log(base_ms_KN)
    copies, base_copies, rounds = logs_CKN.shape
    generator = np.random.default_rng(0)

    def resampled() -> float:
        c, k, n = (generator.integers(size, size=size) for size in (copies, base_copies, rounds))
        return float(np.exp(np.median(logs_CKN[np.ix_(c, k, n)], axis=-1).mean()))

    low, high = np.percentile([resampled() for _ in range(draws)], (2.5, 97.5))
    return float(low), float(np.exp(np.median(logs_CKN, axis=-1).mean())), float(high)


def print_table(result: Result, console: Console) -> None:
    """The result for people."""
    config = result.config
    ranks = "1 rank" if result.world_size == 1 else f"{result.world_size} ranks"
    title = f"DLRM on {ranks} x {config.batch_size} samples, {result.provenance['hardware']['name']}"
    headings = ("step ms", "IQR", f"x {result.base}", "95 %", "embedding ms per rank", "samples/s")
    table = table_of(title, "planner", *headings, "predicted ms", "per rank")
    for entry in result.planners:
        embedding = [f + b for f, b in zip(entry.forward_ms, entry.backward_ms, strict=True)]
        table.add_row(
            entry.name,
            f"{entry.step_ms[1]:.1f}",
            f"{entry.step_ms[0]:.1f}-{entry.step_ms[2]:.1f}",
            f"{entry.ratio[1]:.3f}",
            f"{entry.ratio[0]:.3f}-{entry.ratio[2]:.3f}",
            _per_rank(embedding),
            f"{entry.samples_per_second:,.0f}",
            f"{entry.predicted.total_ms:.2f}",
            _per_rank(entry.predicted.rank_ms),
        )
    console.print(result.scaling)
    console.print(table)
    blocks = len(result.planners[0].block_ms[0])
    console.print(
        f"{config.copies} model(s) per planner, {blocks} blocks of {config.block} steps each, interleaved: medians and "
        f"quartiles of blocks; x {result.base}: ratio of blocks of one round, and its 95 % interval over models and "
        f"rounds. Embedding: fused kernels, forward + backward, measured in the steps. Predicted: embedding work and "
        f"its collectives; cost source: {result.cost_source}. Sharding types allowed: {', '.join(config.kinds)}, in "
        f"fused kernels; torchrec_default alone has no pooling factors."
    )
    for entry in result.planners:
        if entry.split:
            shown = list(entry.split.items())[:MAX_SPLITS_SHOWN]
            split = ", ".join(f"{name} {kind} over ranks {entry.ranks[name]}" for name, kind in shown)
            more = ", ..." if len(entry.split) > len(shown) else ""
            console.print(f"{entry.name} splits {len(entry.split)} table(s): {split}{more}")
    base = next(entry for entry in result.planners if entry.name == result.base)
    slowest = max(f + b for f, b in zip(base.forward_ms, base.backward_ms, strict=True))
    console.print(f"Embedding kernels are {slowest / base.step_ms[1]:.0%} of {result.base}'s step on its slower rank.")
    if result.speed is not None:
        hour = ", ".join(
            f"{entry.name} {_per_rank([ms * result.speed for ms in entry.predicted.rank_ms])}"
            for entry in result.planners
            if entry.predicted.rank_ms
        )
        console.print(
            f"Speed of the hour: the reference set takes {result.reference_ms:.2f} ms, {result.speed:.2f} times what "
            f"it took when the checkpoint's kernels were measured. Predicted per rank at that speed: {hour}."
        )
    console.print(f"Same training: losses of the models differ by at most {result.loss_difference:.1e}.")


def _per_rank(values_ms: Sequence[float], shown: int = 4) -> str:
    text = " ".join(f"{value:.1f}" for value in values_ms[:shown])
    return text if len(values_ms) <= shown else f"{text} ... max {max(values_ms):.1f}"
