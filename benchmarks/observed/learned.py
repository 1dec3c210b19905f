# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs before and after learning from observed steps, and how far off they are on kernels and exchanges of other
plans."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from dlrm.job import Job, SkewedPartitioner, make_planners
from dreamshard_planner import Checkpoint
from dreamshard_planner.checkpoints.choice import SHIPPED, resolve, shipped
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.observing.learning import ObservedSets, exchanges_of, learn, mean_error
from dreamshard_planner.observing.observation import Observation
from dreamshard_planner.planning.cost_sources import links_of

PRIORS = ("roofline", "shipped")
LEARNED = "-learned"
"""Behind the name of what it was learned from."""
HELD_OUT = 5
"""Plans whose kernels tell the errors."""
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Observed:
    """One model's kernels under plans to learn from, and under others."""

    train: Observation
    test: Observation

    @classmethod
    def of(cls, job: Job, steps: int) -> Observed:
        """Train so many steps under each plan: an arbitrary one and TorchRec's to learn from, then others."""
        learned_from = _merged([_observed(job, plan, steps) for plan in (arbitrary_plan(job, 0), torchrecs_plan(job))])
        others = range(2, 2 + HELD_OUT)
        return cls(learned_from, _merged([_observed(job, arbitrary_plan(job, index), steps) for index in others]))

    def costs(self) -> dict[str, Checkpoint]:
        """Return priors and what was learned from them, by name."""
        made = {}
        for name, prior in zip(PRIORS, (resolve("roofline", "cpu"), shipped(SHIPPED, "cpu", "default")), strict=True):
            made |= {name: prior, name + LEARNED: self._learned(prior)}
        return made

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


def torchrecs_plan(job: Job) -> ShardingPlan:
    """The plan of TorchRec's planner, told the true pooling factors."""
    planner, _ = make_planners(job.tables, job.batches, job.config, job.node)["torchrec"]
    return planner.collective_plan(job.fresh_model(), job.sharders, dist.group.WORLD)


def _observed(job: Job, plan: ShardingPlan, steps: int) -> Observation:
    """All ranks."""
    one = job.trainee(plan, pipelined=False)
    one.train(WARMUP_STEPS, timed=False)
    seen = _merged(job.node.gather(one.observed(steps)))
    del one
    gc.collect()  # models are cyclic
    return seen


def _merged(parts: list[Observation]) -> Observation:
    return Observation.merge({str(index): part for index, part in enumerate(parts)})
