# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The observation that begins by itself: it waits for the warm-up, observes some steps, and keeps them for learning.

It adds no collective and no synchronisation to a step. Its errors end it with a warning, and never reach the training.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from functools import partial

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner

from dreamshard_planner.checkpoints import choice
from dreamshard_planner.environment import of_child
from dreamshard_planner.errors import ObservationError
from dreamshard_planner.observing.hooks import guarded, lookups_of, trains
from dreamshard_planner.observing.observation import rank_file
from dreamshard_planner.observing.observer import END_DEFAULT, Observer, predicted

logger = logging.getLogger(__name__)

VARIABLE = "DREAMSHARD_OBSERVE"
"""Environment variable with the number of steps to observe; 0 switches the observation off."""
STEPS = 200
WARM_UP_STEPS = 20
"""Training steps before the first that is observed."""
LEAST_STEPS = 20
"""Steps from which on an observation is kept that the end of the training, or of the model, cuts short."""
EVERY = 50
"""Batches from one whose ids are counted to the next."""


def begin(model: nn.Module, planner: EmbeddingShardingPlanner) -> None:
    """Observe a model's training steps after its warm-up, unless the environment switches it off, or nothing of the
    model is sharded; never raises."""
    try:
        given = os.environ.get(VARIABLE, str(STEPS))
        if not (given.isascii() and given.isdecimal()):
            raise ObservationError(f"{VARIABLE} must be a number of steps, or 0 for none, got {given!r}")
        if int(given) and dist.is_initialized() and any(lookups_of(model)):
            AutomaticObservation(model, planner, int(given))
    except Exception as error:  # an observer's fault must not end a training
        _failed(error, _level())


def _level() -> int:
    """Return the level of messages that all ranks have: a warning on the first."""
    return logging.INFO if dist.is_initialized() and dist.get_rank() else logging.WARNING


def _failed(error: Exception, level: int = logging.WARNING) -> None:
    logger.log(level, "training goes on, and is not observed: %s: %s", type(error).__name__, error)


class AutomaticObservation:
    """An observation of a model that has just been sharded.

    Args:
        model: ``DistributedModelParallel``.
        planner: has just planned the model on rank 0.
        steps: to observe.
    """

    def __init__(self, model: nn.Module, planner: EmbeddingShardingPlanner, steps: int) -> None:
        while END_DEFAULT:
            END_DEFAULT.pop()()
        self._steps, self._seen, self._rank = steps, 0, dist.get_rank()
        self._prediction = predicted(planner)
        if not self._rank:
            logger.info(
                "training steps %d to %d will be observed, so that the next plan is better; observe=False or %s=0 "
                "switches this off",
                WARM_UP_STEPS + 1,
                WARM_UP_STEPS + steps,
                VARIABLE,
            )
        self._observer: Observer | None = None
        self._hook = model.register_forward_pre_hook(guarded(self._before_step, self._fail))
        # The model may be dropped, or Python may end, before all steps are observed.
        self._finalizer = weakref.finalize(model, guarded(self._keep, _failed))
        END_DEFAULT.append(self._end)

    def _before_step(self, model: nn.Module, *_: object) -> None:
        if not trains(model):
            return
        if self._observer is None:
            self._seen += 1
            if self._seen > WARM_UP_STEPS:
                self._observer = Observer(model, self._prediction, EVERY, "automatic")
        elif self._observer.steps >= self._steps:
            self._keep()

    def _fail(self, error: Exception) -> None:
        self._end()
        _failed(error)

    def _end(self) -> Observer | None:
        """Remove all hooks, and return the observer, if the warm-up is over."""
        observer, self._observer = self._observer, None
        self._hook.remove()
        self._finalizer.detach()
        if observer is not None:
            observer.close()
        if self._end in END_DEFAULT:
            END_DEFAULT.remove(self._end)
        return observer

    def _keep(self) -> None:
        """End, and write the record of the steps in a thread, if there are enough."""
        observer = self._end()
        if observer is None or observer.steps < min(self._steps, LEAST_STEPS):
            return
        write = guarded(lambda: _write(observer, self._rank), partial(_failed, level=_level()))
        if threading.main_thread().is_alive():
            threading.Thread(target=write, name="dreamshard_planner observation").start()
        else:  # Python ends
            write()


def _write(observer: Observer, rank: int) -> None:
    """Write a rank's record into the user's folder; rank 0 starts the process that learns from all ranks' records."""
    observation = observer.observation()
    place = choice.place(observation.hardware, observation.runs[0].world_size)
    folder = choice.home() / "runs" / place
    folder.mkdir(parents=True, exist_ok=True)
    observation.save(rank_file(folder / f"{observer.id}.json", rank))
    if rank:
        return
    with open(folder / "background.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dreamshard_planner.background", str(folder), observer.id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=of_child(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **{VARIABLE: "0"}),
            start_new_session=True,
        )
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
