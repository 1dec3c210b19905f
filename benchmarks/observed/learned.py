# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs before and after learning from observed steps, and how far off they are on kernels and exchanges of other
plans."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from dlrm.job import Job
from dlrm.planners import SkewedPartitioner, make_planners
from dreamshard_planner import Checkpoint
from dreamshard_planner.checkpoints.checkpoint import SHIPPED, resolve, shipped
from dreamshard_planner.cost.fit import mape_2, predict_ms
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.observing.exchanges import exchanges_of, mean_error
from dreamshard_planner.observing.learning import ObservedSets, learn
from dreamshard_planner.observing.observation import Observation
from dreamshard_planner.planning.cost_sources import links_of
from observed.setting import HELD_OUT, LEARNED_FROM

PRIORS = ("roofline", "shipped")
LEARNED = "-learned"
"""Behind the name of what it was learned from."""
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Observed:
    """One model's kernels under plans to learn from, and under others."""

    train: Observation
    test: Observation

    @classmethod
    def of(cls, job: Job, steps: int, learned_from: str) -> Observed:
        """Train so many steps under each plan."""
        kinds = [PLANS[learned_from]] * LEARNED_FROM + [arbitrary_plan] * HELD_OUT
        seen = []
        for index, plan_of in enumerate(kinds):
            seen.append(_observed(job, plan_of(job, index), steps))
            gc.collect()  # models are cyclic
        return cls(*(_merged(part) for part in (seen[:LEARNED_FROM], seen[LEARNED_FROM:])))

    def costs(self, networks: Mapping[str, Path]) -> dict[str, Checkpoint]:
        """By name: priors, and what was learned from them; and networks as they are."""
        made = {}
        for name, prior in zip(PRIORS, (resolve("roofline", "cpu"), shipped(SHIPPED, "cpu", "default")), strict=True):
            made |= {name: prior, name + LEARNED: self._learned(prior)}
        return made | {name: Checkpoint.load(path) for name, path in networks.items()}

    def _learned(self, prior: Checkpoint) -> Checkpoint:
        """The prior, where learning is refused."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                return learn(prior, self.train, Path(folder) / "learned.safetensors")
            except CalibrationRefused:
                return prior

    def errors(self, checkpoint: Checkpoint, job: Job) -> list[float]:
        """Mean errors on held-out kernels, forward and backward."""
        sets = ObservedSets.of(self.test).sets
        return mape_2(predict_ms(checkpoint.compute_cost(job.node.topology()), sets), sets.labels_ms_X2).tolist()

    def exchange_errors(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Mean errors on held-out exchanges, by operation."""
        links = links_of(self.test.topology, checkpoint)
        seen = exchanges_of(self.test.runs, links, "cpu")
        return {operation: mean_error(points, links) for operation, points in seen.items()}

    @property
    def kernels(self) -> list[int]:
        """To learn from, and held out."""
        return [len(ObservedSets.of(one).sets) for one in (self.train, self.test)]


def arbitrary_plan(job: Job, index: int) -> ShardingPlan:
    """A placement of whole tables."""
    planner = EmbeddingShardingPlanner(
        topology=job.node.topology(),
        batch_size=job.config.batch_size,
        constraints={table.name: ParameterConstraints(["table_wise"], ["fused"]) for table in job.tables},
        partitioner=SkewedPartitioner(job.tables, 100 * job.config.seed + index),
    )
    return planner.collective_plan(job.fresh_model(), job.sharders, dist.group.WORLD)


def planned(job: Job, index: int) -> ShardingPlan:
    """TorchRec's plan, or ours by bandwidths."""
    prior = {"dreamshard": resolve("roofline", "cpu")}
    planners = make_planners(job.tables, job.batches, job.config, job.node, prior)
    name = ("torchrec", "dreamshard")[index]
    return planners[name][0].collective_plan(job.fresh_model(), job.sharders, dist.group.WORLD)


def mixed(job: Job, index: int) -> ShardingPlan:
    """An arbitrary placement, and TorchRec's plan."""
    return planned(job, 0) if index else arbitrary_plan(job, 0)


PLANS = {"arbitrary": arbitrary_plan, "planners": planned, "mixed": mixed}
"""To learn from, by name."""


def _observed(job: Job, plan: ShardingPlan, steps: int) -> Observation:
    """All ranks."""
    one = job.trainee(plan, pipelined=False)
    one.train(WARMUP_STEPS, timed=False)
    return _merged(job.node.gather(one.observed(steps)))


def _merged(parts: list[Observation]) -> Observation:
    return Observation.merge({str(index): part for index, part in enumerate(parts)})
