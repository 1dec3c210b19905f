# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A/B tests of plans: in one job, models under several plans train in turns.

Shapes: C and K models of two plans, N rounds, R rows, D columns.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dreamshard_planner.cost.correction import DIRECTIONS
from dreamshard_planner.errors import ObservationError
from dreamshard_planner.observing.hooks import kernels_in, lookups_of
from dreamshard_planner.observing.observation import WARM_UP, Observation
from dreamshard_planner.observing.observer import end_default, observe
from dreamshard_planner.search_space.sharding_types import DP

Step = Callable[[Iterator[Any]], object]
"""Trains one step on the next batch of an iterator, as ``progress`` of TorchRec's pipelines does."""


@dataclass(frozen=True)
class StepComparison:
    """Training steps under several plans. ``print`` shows ratios to the first plan, and which work differs."""

    step_ms: dict[str, list[list[float]]]
    """Milliseconds per step of each plan's models, by round; a block takes as long as on its slowest rank."""
    block_steps: int
    """Steps of one model before it is another's turn."""
    observed: dict[str, Observation]
    """Steps of a model of each plan, on all ranks, that were observed after the rounds."""

    def ratio(self, plan: str) -> tuple[float, float, float]:
        """Return a plan's step over the first plan's, between the bounds of the 95 % interval; below 1 is faster."""
        return ratio_interval(self.step_ms[plan], next(iter(self.step_ms.values())))

    def work(self, plan: str) -> dict[str, str]:
        """Return a step's embedding work in words, by kind: kernels of each sharding type, and collectives."""
        (run,) = self.observed[plan].runs
        kinds = sorted({kernel.sharding_type for rank in run.ranks for kernel in rank.kernels})
        kernels_ms = {kind: [rank.kernel_ms(*DIRECTIONS, sharding_type=kind) for rank in run.ranks] for kind in kinds}
        return {
            **{f"{kind} kernels": f"{min(ms):.2f}-{max(ms):.2f} ms" for kind, ms in kernels_ms.items()},
            **{name: f"{one.ms:.2f} ms, {max(one.bytes) / 1e6:.2f} MB" for name, one in run.collectives.items()},
        }

    def __str__(self) -> str:
        (base, copies), *_ = self.step_ms.items()
        rows = [("plan", "step ms", f"x {base}", "95 %", "")]
        for name, block_ms in self.step_ms.items():
            low, ratio, high = self.ratio(name)
            verdict = "faster" if high < 1 else "slower" if low > 1 else "no difference shown"
            told = (f"{ratio:.3f}", f"{low:.3f}-{high:.3f}", verdict) if name != base else ("", "", "")
            rows.append((name, f"{np.median(block_ms):.2f}", *told))
        work = {name: self.work(name) for name in self.observed}
        kinds = dict.fromkeys(kind for of_plan in work.values() for kind in of_plan)
        differing = [("embedding work of a step", *work)]
        differing += [(kind, *(of_plan.get(kind, "-") for of_plan in work.values())) for kind in kinds]
        size = f"{len(copies)} model(s) of each plan, {len(copies[0])} rounds of {self.block_steps} steps each"
        legend = "Kernels: fastest to slowest rank. Collectives: without waiting for the slowest rank; most bytes sent."
        if f"{DP} kernels" in kinds:
            legend += f" The all-reduce and the update of {DP} tables are not shown."
        return "\n".join([size, *_columns(rows), *(["", *_columns(differing), legend] if work else [])])


def compare_steps(
    build: Callable[[Any], tuple[nn.Module, Step]],
    plans: Mapping[str, Any],
    batches: Sequence[Any],
    *,
    copies: int = 2,
    rounds: int = 10,
    block_seconds: float = 0.5,
    observed_steps: int = 20,
    seed: int = 0,
) -> StepComparison:
    """Measure training steps under several plans, on all ranks of a job.

    Every plan gets models with equal weights, which train on equal batches. A block of steps of one model comes after a
    block of another, in an order that each round shuffles anew, so that other load of the machine hits all plans alike.

    Args:
        build: gets one of ``plans``; returns a new sharded model, and a function that trains it for one step on the
            next batch of an iterator.
        plans: by name, anything that ``build`` understands: planners, sharding plans, settings. The first is the base.
        batches: this rank's batches. Models go round them.
        copies: models of each plan, all in memory at once. The place in memory alone changes steps by some percent.
        rounds: blocks of each model.
        block_seconds: length of a block.
        observed_steps: steps of each plan to observe afterwards, for times of kernels and collectives; 0 for none.
        seed: of weights and order. Each call of ``build`` finds torch's generators in this state.

    Raises:
        ValueError: a count is out of bounds; names all counts.
        TypeError: ``batches`` has no length, as an iterator.
        ObservationError: a model has no sharded embeddings, or ``build``'s function does not train it; names the plan.
            Raised before anything is measured.
    """
    if not isinstance(batches, Sized):
        raise TypeError(f"batches must be a list, which models go round, got {type(batches).__name__}")
    counts = {"plans": len(plans), "batches": len(batches), "copies": copies, "rounds": rounds}
    if min(counts.values()) < 1 or observed_steps < 0:
        raise ValueError(f"each of these must be at least 1: {counts}; and observed_steps at least 0: {observed_steps}")
    order, models = random.Random(seed), [(name, copy) for name in plans for copy in range(copies)]
    trainees: dict[tuple[str, int], _Trainee] = {}
    for name, copy in order.sample(models, len(models)):
        torch.manual_seed(seed)
        trainees[name, copy] = _Trainee(name, *build(plans[name]), batches)
    for (_, copy), trainee in trainees.items():
        if copy or not observed_steps:
            trainee.train(WARM_UP)
        else:  # what cannot be observed must fail before all rounds are measured
            trainee.observed(WARM_UP - 1)
    step_ms = max(_gathered(trainees[models[0]].train(WARM_UP)))
    block = max(2, round(1e3 * block_seconds / step_ms))
    blocks_ms: dict[tuple[str, int], list[float]] = {model: [] for model in models}
    for _ in range(rounds):
        for model in order.sample(models, len(models)):
            blocks_ms[model].append(trainees[model].train(block))
    slowest_ms = np.max(_gathered(list(blocks_ms.values())), axis=0).reshape(len(plans), copies, rounds)
    observed = {name: trainees[name, 0].observed(observed_steps) for name in plans if observed_steps}
    del trainees
    gc.collect()  # models are cyclic, and hold the process group
    return StepComparison(dict(zip(plans, slowest_ms.tolist(), strict=True)), block, observed)


class _Trainee:
    """A model in training on this rank."""

    def __init__(self, plan: str, model: nn.Module, step: Step, batches: Sequence[Any]) -> None:
        end_default()  # else DistributedModelParallel observes one of the models
        _equalize(model)
        self._plan, self._model, self._step, self._batches = plan, model, step, itertools.cycle(batches)
        self._device = next(model.parameters()).device

    def train(self, steps: int) -> float:
        """Train so many steps, and return the milliseconds of one; ranks begin together."""
        self._wait_for_device()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self._step(self._batches)
        self._wait_for_device()
        return 1e3 * (time.perf_counter() - start) / steps

    def observed(self, steps: int) -> Observation:
        """Train one step more than so many, and return the observation of all ranks."""
        try:
            with observe(self._model, every=max(1, steps // 4)) as seen:
                self.train(steps + 1)
            mine = seen.observation()
        except ObservationError as error:
            raise ObservationError(f"plan {self._plan!r}: {error}; or give observed_steps=0") from error
        return Observation.merge({f"rank {rank}": one for rank, one in enumerate(_gathered(mine))})

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@torch.no_grad()
def _equalize(model: nn.Module) -> None:
    """Give tables weights that follow from rows and columns, in any sharding; key-value tables keep theirs."""
    state = model.state_dict()
    kernels: list[Any] = [kernel for *_, lookup in lookups_of(model) for kernel in kernels_in(lookup)]
    for kernel in kernels:
        for table, weights_RD in zip(kernel.config.embedding_tables, kernel.split_embedding_weights(), strict=True):
            if isinstance(weights_RD, Tensor):
                offset = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
                starts, device = zip(offset, weights_RD.shape, strict=True), weights_RD.device
                sines = [torch.arange(at, at + size, dtype=torch.float64, device=device).sin() for at, size in starts]
                torch.mul(sines[0][:, None] * table.num_embeddings**-0.5, sines[1], out=weights_RD)
    model.load_state_dict(state)  # replicas of hot rows follow


def ratio_interval(block_ms_CN: ArrayLike, base_ms_KN: ArrayLike) -> tuple[float, float, float]:
    """Return the median ratio over rounds, as the geometric mean over pairs of models, with its bootstrap interval.

    Other load hits both blocks of a round. The bootstrap resamples models and rounds.
    """
    logs_CKN = np.log(np.array(block_ms_CN))[:, None] - np.log(np.array(base_ms_KN))
    generator = np.random.default_rng(0)
    c, k, n = (generator.integers(size, size=(1000, size)) for size in logs_CKN.shape)
    drawn = logs_CKN[c[:, :, None, None], k[:, None, :, None], n[:, None, None, :]]
    low, high = np.percentile(np.median(drawn, axis=-1).mean((1, 2)), (2.5, 97.5))
    return float(np.exp(low)), float(np.exp(np.median(logs_CKN, axis=-1).mean())), float(np.exp(high))


def _gathered(thing: Any) -> list[Any]:
    """Return the things of all ranks."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return ["  ".join(of_row).rstrip() for of_row in cells]
