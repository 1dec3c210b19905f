# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Observe training steps at little cost: in ``with observe(model, planner)``, and of each model by itself.

The observation that begins by itself waits for the warm-up, observes some steps, and keeps them for learning. None adds
a collective or a synchronisation to a step. Errors end an observation with a warning, and never reach the training.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import data_type_to_dtype

from dreamshard_planner.checkpoints import choice
from dreamshard_planner.environment import of_child
from dreamshard_planner.errors import DreamShardError, ObservationError, StatisticsError
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.observing.hooks import DeviceClock, Hooks, StepRecorder, guarded, kernels_in, lookups_of, trains
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
from dreamshard_planner.search_space.sharding_types import kernel_of
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.torchrec_components.compat import default_store
from dreamshard_planner.workload.counting import EVERY, BatchSampler
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.tables import costed_optimizer

logger = logging.getLogger(__name__)

VARIABLE = "DREAMSHARD_OBSERVE"
"""Environment variable with the number of steps to observe by default; 0 switches the observation off."""
STEPS = 200
WARM_UP_STEPS = 20
"""Training steps before the first that is observed by default."""
LEAST_STEPS = 20
"""Steps from which on an observation is kept that the end of the training, or of the model, cuts short."""
DEFAULT_EVERY = 50
"""Batches from one whose ids are counted to the next, by default."""
DEFAULTS: list[DefaultObservation] = []
"""Observations that ``DistributedModelParallel`` began by itself, one per model; at most one is past its warm-up."""
_BEGUN: Counter[str] = Counter()
"""Observations that this process has begun, by file name."""


Prediction = tuple[SavedPlan | None, dict[str, float]]
"""A model's plan with its predicted costs, and planned lookups per sample by feature. None and nothing on all ranks but
0, and without a ``DreamShardPlanner``."""


class Observer:
    """One rank's record of training steps; see :func:`observe`."""

    def __init__(
        self, model: nn.Module, planner: EmbeddingShardingPlanner | Prediction | None, every: int, path: str = ""
    ) -> None:
        if not dist.is_initialized():
            raise ObservationError("there is no process group: call torch.distributed.init_process_group() first")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        ranks, self.rank = dist.get_world_size(), dist.get_rank()
        hosts = -(-ranks // get_local_size(ranks))
        lookups = list(lookups_of(model))
        if not lookups:
            raise ObservationError("the model has no sharded embeddings: give the DistributedModelParallel that trains")
        prediction = planner if isinstance(planner, tuple) else predicted(planner, model)
        self._device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        self._recorder = StepRecorder(DeviceClock(self._device))
        self._kernels = [(path, kind, kernel) for path, _, kind, lookup in lookups for kernel in kernels_in(lookup)]
        self._samplers = {module: BatchSampler(every) for _, module, _, _ in lookups}
        self._hooks = Hooks(self._recorder)
        try:
            self._hooks.listen_to_collectives()
            # Only now: a refused observation is no run, and ranks count their runs alike.
            self._run = ObservedRun(_run_id(path), started, ranks, hosts, dist.get_backend(), *prediction)
            for module, sampler in self._samplers.items():
                self._hooks.listen_to_inputs(module, guarded(sampler.add, _not_counted))
            for index, (_, _, kernel) in enumerate(self._kernels):
                self._hooks.listen_to_kernel(f"kernel {index}", kernel)
            self._hooks.listen_to_steps(model)
        except BaseException:
            self._hooks.close()
            raise

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self._recorder.steps

    def close(self) -> None:
        """Remove all hooks; the record stays."""
        self._hooks.close()

    def observation(self) -> Observation:
        """Return this rank's record so far; waits for the device. ObservationError if no training step has ended."""
        kept, columns = self._recorder.columns()
        if not kept:
            raise ObservationError(
                f"no training step was seen in {self.steps} calls of the model: it has to be called itself, in train "
                "mode, with backward(), at least twice"
            )
        of_rank = RankSteps(
            rank=self.rank,
            steps=self.steps,
            kept=kept,
            columns=columns,
            kernels=tuple(
                _described(*observed, int(np.median(columns.get(f"kernel {index} samples", (0,)))))
                for index, observed in enumerate(self._kernels)
            ),
            statistics=self._statistics(),
        )
        run = replace(self._run, ranks=(of_rank,))
        return Observation(describe_hardware(self._device, torch.get_num_threads()), (run,))

    def _statistics(self) -> dict[str, FeatureStatistics]:
        """Return statistics of the counted batches; modules whose batches cannot be counted are left out."""
        found: dict[str, FeatureStatistics] = {}
        for sampler in self._samplers.values():
            if sampler.seen:
                try:
                    found |= sampler.statistics()
                except StatisticsError as error:
                    logger.warning("statistics of a module's batches are left out: %s", error)
        return found


def _not_counted(error: Exception) -> None:
    logger.warning("no more batches are counted, and training goes on: %s", error)


def _described(path: str, sharding_type: str, kernel: Any, samples: int) -> ObservedKernel:
    config = kernel.config
    return ObservedKernel(
        sharding_type=sharding_type,
        kernel=config.compute_kernel.value,
        optimizer=costed_optimizer(getattr(getattr(kernel.emb_module, "optimizer", None), "name", "other")),
        memory=kernel_of(config.compute_kernel.value).memory,
        pooled=config.pooling.value != "NONE",
        weighted=config.is_weighted,
        weight_bytes=data_type_to_dtype(config.data_type).itemsize,
        samples=samples,
        tables=tuple(
            ObservedTable(
                name=f"{path}.{table.name}".removeprefix("."),
                features=tuple(table.feature_names),
                rows=table.num_embeddings,
                dim=table.embedding_dim,
                offset=(0, 0) if table.local_metadata is None else tuple(table.local_metadata.shard_offsets),
                size=(table.local_rows, table.local_cols),
            )
            for table in config.embedding_tables
        ),
    )


def predicted(planner: EmbeddingShardingPlanner | None, model: Any = None) -> Prediction:
    """Return a planner's prediction of a model's plan, by default of its own last one."""
    if not isinstance(planner, DreamShardPlanner):
        return None, {}
    # On all ranks: others would wait for one that raises alone.
    if model is not None and not hasattr(model, "plan"):
        raise ObservationError("the model has no plan to predict: give the DistributedModelParallel itself")
    if isinstance(model, DMPCollection):
        raise ObservationError(
            "2D parallelism: a plan is that of one sharding group, which is not compared with what all ranks take; "
            "observe(model) without the planner"
        )
    if dist.get_rank():
        return None, {}
    try:
        return planner.saved_plan(None if model is None else model.plan), planner.lookups_per_sample()
    except (DreamShardError, PlannerError) as error:
        logger.warning("no prediction is kept beside what is observed: %s", error)
        return None, {}


def _run_id(path: str) -> str:
    """Return an id that is equal on all ranks that begin as many observations for a file name; none waits for another,
    since they agree through the process group's store."""
    name = os.path.basename(path)
    _BEGUN[name] += 1
    key = f"dreamshard_planner/observe/{_BEGUN[name]} {name}"
    return default_store().compare_set(key, "", secrets.token_hex(8)).decode()


@contextmanager
def observe(
    model: nn.Module,
    planner: EmbeddingShardingPlanner | None = None,
    path: str | os.PathLike[str] | None = None,
    every: int = EVERY,
) -> Iterator[Observer]:
    """Observe the training steps inside the block, on all ranks or some; none waits for another.

    Ends the observation that ``DistributedModelParallel`` begins by itself.

    Records forward and backward of each fused kernel (events on a GPU, processor time on a CPU), collectives with bytes
    and waiting, the rest of the step, and statistics of the batches. An error in a hook ends the observation with a
    warning. Nothing stays on the model.

    Args:
        model: ``DistributedModelParallel``, or another sharded model.
        planner: the ``DreamShardPlanner`` that planned the model, or an equal one. Rank 0 keeps its prediction. A
            planner that planned another model is logged; other planners predict nothing.
        path: base name of the files, ``observation.json`` for ``observation.0.json`` and so on; equal on all ranks. A
            file that cannot be written at the end is logged.
        every: batches from one whose ids are counted to the next.

    Raises:
        ObservationError: there is no process group, the model is not sharded, or another one is observed just now.
        StatisticsError: ``every`` is below 1.
        FileError: the file cannot be written; raised before anything is observed.

    Example::

        with observe(model, planner, "observation.json"):
            for _ in range(200):
                pipeline.progress(batches)
    """
    if path is not None and dist.is_initialized():
        check_writable(rank_file(Path(path), dist.get_rank()))
    end_default()
    observer = Observer(model, planner, every, "" if path is None else os.fspath(path))
    ended = False
    try:
        yield observer
        ended = True
    except StopIteration:  # TorchRec's pipelines end so when there are no more batches
        ended = True
        raise
    finally:
        observer.close()
        if ended and path is not None:
            try:
                observer.observation().save(rank_file(Path(path), observer.rank))
            except DreamShardError as error:  # which must not end the training
                logger.warning("no observation is written to %s: %s", path, error)


def end_default() -> None:
    """End the observations that began by themselves, without a record."""
    while DEFAULTS:
        DEFAULTS[-1].end()


def begin(model: nn.Module, planner: EmbeddingShardingPlanner) -> None:
    """Observe a model's steps after its warm-up, unless the environment forbids or it has no tables; never raises."""
    try:
        given = os.environ.get(VARIABLE, str(STEPS))
        if not (given.isascii() and given.isdecimal()):
            raise ObservationError(f"{VARIABLE} must be a number of steps, or 0 for none, got {given!r}")
        if int(given) and dist.is_initialized() and any(lookups_of(model)):
            DefaultObservation(model, planner, int(given))
    except Exception as error:  # an observer's fault must not end a training
        _failed(error, dist.get_rank() if dist.is_initialized() else 0)


def _failed(error: Exception, rank: int = 0) -> None:
    """Warn of an error; given the rank, of one that all ranks have, on the first alone."""
    level = logging.INFO if rank else logging.WARNING
    logger.log(level, "training goes on, and is not observed: %s: %s", type(error).__name__, error)


class DefaultObservation:
    """The observation of a ``DistributedModelParallel`` that its planner has just planned on rank 0.

    Of several models in a job, the last one whose warm-up is over is observed; models that do not train disturb none.
    """

    def __init__(self, model: nn.Module, planner: EmbeddingShardingPlanner, steps: int) -> None:
        self._steps, self._seen, self._prediction = steps, 0, predicted(planner)
        if not dist.get_rank():
            logger.info(
                "training steps %d to %d will be observed, so that the next plan is better; observe=False or %s=0 "
                "switches this off",
                WARM_UP_STEPS + 1,
                WARM_UP_STEPS + steps,
                VARIABLE,
            )
        self._observer: Observer | None = None  # until the warm-up is over
        self._hook = model.register_forward_pre_hook(guarded(self._before_step, self._fail))
        # The model may be dropped, or Python may end, before all steps are observed.
        self._finalizer = weakref.finalize(model, guarded(self._keep, _failed))
        DEFAULTS.append(self)

    def _before_step(self, model: nn.Module, *_: object) -> None:
        if not trains(model):
            return
        if self._observer is None:
            self._seen += 1
            if self._seen > WARM_UP_STEPS:
                for other in [other for other in DEFAULTS if other._observer is not None]:
                    logger.info("a model that began to train later is observed instead of the first")
                    other.end()
                self._observer = Observer(model, self._prediction, DEFAULT_EVERY, "automatic")
        elif self._observer.steps >= self._steps:
            self._keep()

    def _fail(self, error: Exception) -> None:
        self.end()
        _failed(error)

    def end(self) -> None:
        """Remove all hooks; nothing is recorded any more."""
        self._hook.remove()
        self._finalizer.detach()
        if self._observer is not None:
            self._observer.close()
        if self in DEFAULTS:
            DEFAULTS.remove(self)

    def _keep(self) -> None:
        """End, and write the record of the steps in a thread, if there are enough."""
        self.end()
        observer = self._observer
        if observer is None or observer.steps < min(self._steps, LEAST_STEPS):
            return
        write = guarded(partial(_write, observer), partial(_failed, rank=observer.rank))
        if threading.main_thread().is_alive():
            threading.Thread(target=write, name="dreamshard_planner observation").start()
        else:  # Python ends
            write()


def _write(observer: Observer) -> None:
    """Write a rank's record into the user's folder; rank 0 starts the process that learns from all ranks' records."""
    observation = observer.observation()
    (run,) = observation.runs
    folder = choice.home() / "runs" / choice.place(observation.hardware, run.world_size)
    folder.mkdir(parents=True, exist_ok=True)
    observation.save(rank_file(folder / f"{run.id}.json", observer.rank))
    if observer.rank:
        return
    with open(folder / "background.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dreamshard_planner.background", str(folder), run.id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=of_child(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **{VARIABLE: "0"}),
            start_new_session=True,
        )
    if threading.main_thread().is_alive():  # else Python ends, and may start no thread
        tell = guarded(lambda: _tell(process.communicate()[0], process.returncode, log.name), _failed)
        threading.Thread(target=tell, name="dreamshard_planner background", daemon=True).start()


def _tell(told: bytes, status: int, log: str) -> None:
    """Log what the process learned; it may have told nothing."""
    if status:
        logger.warning("nothing is learned from the observed steps: the process ended with %d; see %s", status, log)
    known = json.loads(told or b"{}")
    if learned := known.get("learned"):
        logger.info("%s", learned)
    if better := known.get("better"):
        logger.warning("%s", better)
