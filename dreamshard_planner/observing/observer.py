# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``with observe(model, planner)``: what training steps take, without a collective of its own and at little cost."""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner.errors import DreamShardError, ObservationError, StatisticsError
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.observing.hooks import DeviceClock, Hooks, Step, StepRecorder, kernels_in, lookups_of
from dreamshard_planner.observing.observation import (
    Observation,
    ObservedKernel,
    ObservedRun,
    ObservedTable,
    RankSteps,
    rank_file,
)
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search_space.kernels import memory_of
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.torchrec_components.compat import default_store
from dreamshard_planner.workload.counting import EVERY, BatchSampler
from dreamshard_planner.workload.tables import FeatureStatistics, costed_optimizer

logger = logging.getLogger(__name__)

_BEGUN: Counter[str] = Counter()
"""Observations that this process has begun, by the name of the file that they go to."""


class Observer:
    """What one rank has seen so far; see :func:`observe`."""

    def __init__(self, model: nn.Module, planner: EmbeddingShardingPlanner | None, every: int, path: str = "") -> None:
        if not dist.is_initialized():
            raise ObservationError("there is no process group: call torch.distributed.init_process_group() first")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        ranks, self._rank = dist.get_world_size(), dist.get_rank()
        hosts = -(-ranks // get_local_size(ranks))
        self._kernels: list[tuple[str, str, Any]] = []
        lookups = list(lookups_of(model))
        if not lookups:
            raise ObservationError("the model has no sharded embeddings: give the DistributedModelParallel that trains")
        planned = _planned(model, planner)
        self._device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        self._recorder = StepRecorder(DeviceClock(self._device))
        modules = dict.fromkeys(module for _, module, _, _ in lookups)
        self._samplers = [BatchSampler(every) for _ in modules]
        self._hooks = Hooks(self._recorder)
        try:
            self._hooks.listen_to_collectives()
            # After it: what it refuses is no run, and ranks count their runs alike.
            self._run = ObservedRun(_run_id(path), started, ranks, hosts, dist.get_backend(), *planned)
            for module, sampler in zip(modules, self._samplers, strict=True):
                self._hooks.listen_to_inputs(module, _counting(sampler))
            for path, _, kind, lookup in lookups:
                for kernel in kernels_in(lookup):
                    self._listen(path, kind, kernel)
            self._hooks.listen_to_steps(model)
        except BaseException:
            self._hooks.close()
            raise

    def _listen(self, path: str, sharding_type: str, kernel: Any) -> None:
        index = len(self._kernels)
        self._kernels.append((path, sharding_type, kernel))

        def called(step: Step, indices: Tensor, offsets: Tensor) -> None:
            step.count(f"kernel {index} lookups", indices.numel())
            step.count(f"kernel {index} samples", (offsets.numel() - 1) // max(1, kernel.config.num_features()))

        self._hooks.listen_to_kernel(f"kernel {index}", kernel.emb_module, called)

    def close(self) -> None:
        """Take all hooks off; what was seen stays."""
        self._hooks.close()

    def observation(self) -> Observation:
        """What this rank has seen so far; waits for the device.

        Raises:
            ObservationError: no step has ended, in which the model was called and trained.
        """
        kept, columns = self._recorder.columns()
        if not kept:
            raise ObservationError(
                f"no training step was seen in {self._recorder.steps} calls of the model: it has to be called itself, "
                "with backward(), at least twice"
            )
        of_rank = RankSteps(
            rank=self._rank,
            steps=self._recorder.steps,
            kept=kept,
            columns=columns,
            kernels=tuple(
                self._described(kernel, int(np.median(columns.get(f"kernel {index} samples", (0,)))))
                for index, kernel in enumerate(self._kernels)
            ),
            statistics={name: known for one in self._samplers if one.seen for name, known in _counted(one).items()},
        )
        run = replace(self._run, ranks=(of_rank,))
        return Observation(describe_hardware(self._device, torch.get_num_threads()), (run,))

    def save(self, path: str | Path) -> None:
        """Write what this rank has seen so far beside the files of the others: for ``observation.json``, rank 1 writes
        ``observation.1.json``.

        Raises:
            FileError: the file cannot be written.
            ObservationError: as :meth:`observation`.
        """
        self.observation().save(rank_file(Path(path), self._rank))

    def _described(self, observed: tuple[str, str, Any], samples: int) -> ObservedKernel:
        path, sharding_type, kernel = observed
        config, fused = kernel.config, kernel.emb_module
        return ObservedKernel(
            sharding_type=sharding_type,
            kernel=config.compute_kernel.value,
            optimizer=costed_optimizer(getattr(getattr(fused, "optimizer", None), "name", "other")),
            memory=memory_of(config.compute_kernel.value),
            pooled=config.pooling.value != "NONE",
            weighted=config.is_weighted,
            weight_bytes=data_type_to_dtype(config.data_type).itemsize,
            samples=samples,
            tables=tuple(_described_table(path, table) for table in config.embedding_tables),
        )


def _counting(sampler: BatchSampler) -> Callable[[KeyedJaggedTensor], None]:
    """Adds batches, until one cannot be counted: that ends no training."""
    stopped = False

    def add(features: KeyedJaggedTensor) -> None:
        nonlocal stopped
        if not stopped:
            try:
                sampler.add(features)
            except StatisticsError as error:
                stopped = True
                logger.warning("no more batches are counted, and training goes on: %s", error)

    return add


def _counted(sampler: BatchSampler) -> Mapping[str, FeatureStatistics]:
    """Of all batches that could be counted; none where the last ones on their way from a GPU could not."""
    try:
        return sampler.statistics()
    except StatisticsError as error:
        logger.warning("statistics of a module's batches are not among what was observed: %s", error)
        return {}


def _described_table(path: str, table: Any) -> ObservedTable:
    place = table.local_metadata
    return ObservedTable(
        name=f"{path}.{table.name}".removeprefix("."),
        features=tuple(table.feature_names),
        rows=table.num_embeddings,
        dim=table.embedding_dim,
        offset=tuple(place.shard_offsets) if place is not None else (0, 0),
        size=(table.local_rows, table.local_cols),
    )


def _planned(model: Any, planner: EmbeddingShardingPlanner | None) -> tuple[SavedPlan | None, dict[str, float]]:
    """The model's plan with what a planner of ours, which may have made another, predicts of it; on the rank that
    planned, and none where it cannot."""
    if not isinstance(planner, DreamShardPlanner):
        return None, {}
    if not hasattr(model, "plan"):  # on all ranks: of one that raises alone the others wait in their next collective
        raise ObservationError("the model has no plan to predict: give the DistributedModelParallel itself")
    if isinstance(model, DMPCollection):
        raise ObservationError(
            "2D parallelism: a plan is that of one sharding group, which is not compared with what all ranks take; "
            "observe(model) without the planner"
        )
    if dist.get_rank():
        return None, {}
    try:
        return planner.saved_plan(model.plan), planner.lookups_per_sample()
    except (DreamShardError, PlannerError) as error:
        logger.warning("no prediction is kept beside what is observed: %s", error)
        return None, {}


def _run_id(path: str) -> str:
    """Of this observation, the same on every rank that begins as many for a file of this name, in whatever folder;
    ranks meet at the process group's store, and none waits for another."""
    name = os.path.basename(path)
    _BEGUN[name] += 1
    store = default_store()
    key = f"dreamshard_planner/observe/{_BEGUN[name]} {name}"
    return store.compare_set(key, "", secrets.token_hex(8)).decode()


@contextmanager
def observe(
    model: nn.Module,
    planner: EmbeddingShardingPlanner | None = None,
    path: str | os.PathLike[str] | None = None,
    every: int = EVERY,
) -> Iterator[Observer]:
    """Observe the training steps inside: per fused kernel forward and backward (events on a GPU, processor time on a
    CPU), each kind of collective with bytes and waiting, the rest of the step, and statistics of the batches. All ranks
    may be observed, or some; none waits for another, and nothing is left on the model.

    Args:
        model: sharded, as ``DistributedModelParallel`` has it.
        planner: a ``DreamShardPlanner`` that planned it, or the same model otherwise: what it predicts, on rank 0, is
            kept beside what is observed. Of other planners nothing is, nor of one that has planned another model or
            none, which is logged.
        path: write a file of each rank at the end, ``observation.0.json`` and so on for ``observation.json``; of the
            same name on all ranks. Where there is nothing to write, or it cannot be written any more, a warning is
            logged and training goes on.
        every: batches from one whose ids are counted to the next.

    Raises:
        ObservationError: there is no process group, the model is not sharded, or another one is observed just now.
        StatisticsError: ``every`` is no number of batches.
        FileError: the file cannot be written; before anything is observed.

    Example::

        with observe(model, planner, "observation.json"):
            for _ in range(200):
                pipeline.progress(batches)
    """
    if path is not None and dist.is_initialized():
        check_writable(rank_file(Path(path), dist.get_rank()))
    observer = Observer(model, planner, every, "" if path is None else os.fspath(path))
    try:
        yield observer
    except StopIteration:  # by which TorchRec's pipelines say that there are no more batches
        _save(observer, path)
        raise
    else:
        _save(observer, path)
    finally:
        observer.close()


def _save(observer: Observer, path: str | os.PathLike[str] | None) -> None:
    """Where a path is given; without an error that would end the training."""
    if path is not None:
        try:
            observer.save(Path(path))
        except DreamShardError as error:
            logger.warning("nothing of what was observed is written as %s: %s", path, error)
