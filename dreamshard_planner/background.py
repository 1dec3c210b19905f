# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``python -m dreamshard_planner.background FOLDER RUN``: learn from a training that was observed by itself.

Rank 0 of the training starts it, and it runs at low priority. It waits for the files of all ranks, learns costs from
the newest runs in the folder, keeps statistics and observed plans of the tables, and plans again. It prints a JSON
object with sentences for the training's log.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner.checkpoints import choice
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.errors import CalibrationRefused, DreamShardError, ObservationError
from dreamshard_planner.observing.learning import kernels_off, learn
from dreamshard_planner.observing.observation import Observation, ObservedRun, files_of
from dreamshard_planner.offline.from_plan import as_in_file, job_of
from dreamshard_planner.planning.settings import Remembered, batch_size_of, sharding_key
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.torchrec_components.components import least_gain
from dreamshard_planner.workload.counting import same_batch

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 1800
"""Time after which the process is ended by an alarm."""
PATIENCE_SECONDS = 20.0
"""Time to wait for the files of other ranks, which may be killed, or write into another home."""
DAY_SECONDS = 86_400
"""Age from which on unfinished files are removed."""
RUNS = 8
"""Newest runs to learn from; older ones are removed."""
TABLES = 64
"""Sets of tables to remember; those that were trained longest ago are removed."""
LEAST_GAIN = 0.02
"""Share of an observed step from which on a better plan is told."""


def main(words: Sequence[str]) -> None:
    """The command."""
    folder, run_id = Path(words[0]), words[1]
    lower_priority()
    signal.alarm(LIMIT_SECONDS)
    torch.set_num_threads(1)
    with open_locked(folder / "lock", wait=True):  # the alarm ends the wait
        _wait_for_ranks(folder / f"{run_id}.json")
        told = learn_from(folder, run_id)
    try:
        os.write(1, json.dumps(told).encode())
    except BrokenPipeError:  # the training has ended, and its log with it
        return


def lower_priority() -> None:
    """Leave the processor to the training, on Linux also where each session gets its own share of it (autogroups)."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # no autogroups
            Path("/proc/self/autogroup").write_text("19")


def _wait_for_ranks(path: Path) -> None:
    world_size = Observation.load_all([path]).runs[0].world_size
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(files_of(path)) < world_size and time.monotonic() < deadline:
        time.sleep(0.2)


def learn_from(folder: Path, run_id: str) -> dict[str, str]:
    """Learn from the newest runs in a folder, and plan one of them again. Return sentences for the training's log:
    ``learned``, which may be empty, and ``better`` if a better plan is known."""
    observation = _newest(folder, run_id)
    run = next(one for one in observation.runs if one.id == run_id)
    checkpoint = _learned(observation, run.world_size)
    told = {"learned": choice.learned_from(checkpoint)}
    if run.plan is not None:
        told |= _remember(observation, run, run.plan, checkpoint)
    with suppress(FileNotFoundError):  # trainings on other hardware remove some as well
        tables = [(one.stat().st_mtime, one) for one in (choice.home() / "tables").glob("*")]
        for _, one in sorted(tables, reverse=True)[TABLES:]:
            shutil.rmtree(one, ignore_errors=True)
    return told


def _newest(folder: Path, run_id: str) -> Observation:
    """Return this run and the newest others that can be read, and remove the files of older ones."""
    written: dict[str, float] = {}
    for path in folder.glob("*.json"):
        name = path.name.partition(".")[0]
        written[name] = max(written.get(name, 0.0), path.stat().st_mtime)
    newest = sorted(written, key=lambda name: (name == run_id, written[name]), reverse=True)
    for name in newest[RUNS:]:
        for path in folder.glob(f"{name}.*"):
            path.unlink(missing_ok=True)
    for part in folder.glob(".*.part"):  # of a process that was killed
        if time.time() - part.stat().st_mtime > DAY_SECONDS:
            part.unlink(missing_ok=True)
    found = Observation.load_all([folder / f"{run_id}.json"])
    for name in newest[1:RUNS]:
        try:
            found = Observation.merge({run_id: found, name: Observation.load_all([folder / f"{name}.json"])})
        except ObservationError as error:
            logger.warning("run %s is left out: %s", name, error)
    return found


def _learned(observation: Observation, ranks: int) -> Checkpoint:
    """Learn costs; return those in use if nothing better is confirmed. Earlier corrections with which the observed
    kernels are further off than without are removed."""
    hardware = observation.hardware
    device, threads, card = str(hardware["device"]), int(hardware["threads"]), str(hardware["name"])
    path, measured = choice.observed_file(hardware, ranks), choice.measured(device, threads, card)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return learn(measured, observation, path)
    except (CalibrationRefused, ObservationError) as error:
        logger.warning("nothing was learned: %s", error)
        in_use = choice.resolve("auto", device, threads, card, ranks)
        is_unconfirmed = isinstance(error, CalibrationRefused) and error.checks
        if not is_unconfirmed:
            return in_use
        off_in_use, off_measured = kernels_off(observation, in_use, measured)
        if off_in_use <= off_measured:
            return in_use
        path.unlink(missing_ok=True)
        logger.warning("what earlier runs taught is removed, since these kernels are nearer to the costs without it")
        return measured


def _remember(observation: Observation, run: ObservedRun, plan: SavedPlan, checkpoint: Checkpoint) -> dict[str, str]:
    """Keep statistics and observed plans of a run's tables, plan again, and tell of a better plan."""
    remembered = Remembered.of_plan(plan, observation.hardware)
    steps_ms: dict[str, float] = {}
    plans: dict[str, SavedPlan] = {}
    for one in sorted(observation.runs, key=attrgetter("started"), reverse=True):
        if (
            one.plan is not None
            and Remembered.of_plan(one.plan, observation.hardware) == remembered
            and same_batch(_samples(one, one.plan), _samples(run, plan))  # else steps do not compare
        ):
            key = sharding_key(one.plan.sharding)
            steps_ms.setdefault(key, one.step_ms)
            plans.setdefault(key, one.plan)
    fastest = plans[min(steps_ms, key=steps_ms.__getitem__)]
    remembered.remember(run.statistics or None, steps_ms, fastest)
    if not run.statistics:
        return {}
    try:
        better, before_ms, after_ms = _planned_again(run, plan, checkpoint)
    except (DreamShardError, PlannerError) as error:  # such as hosts of unequal ranks
        logger.warning("no better plan is looked for: %s", error)
        return {}
    now_ms, then_ms = run.step_ms, run.step_ms - (before_ms - after_ms)
    worth_it = after_ms <= (1 - least_gain(checkpoint)) * before_ms and then_ms <= (1 - LEAST_GAIN) * now_ms
    if not worth_it or sharding_key(better.sharding) in steps_ms:
        return {}
    better.save(remembered.better_file)
    return {
        "better": f"a plan {100 * (1 - then_ms / now_ms):.0f} % faster is known (predicted {now_ms:.1f} -> "
        f"{then_ms:.1f} ms a step, embedding {100 * (1 - after_ms / before_ms):.0f} %); saved as "
        f"{remembered.better_file}; it loads your checkpoint at the next start"
    }


def _planned_again(run: ObservedRun, plan: SavedPlan, checkpoint: Checkpoint) -> tuple[SavedPlan, float, float]:
    """Return a plan for what a run observed, with predicted costs of the run's plan and of it."""
    job, samples = job_of(plan, run.statistics), _samples(run, plan)
    batch_size = job.batch_size if same_batch(samples, job.batch_size) else samples
    planner = replace(job, batch_size=batch_size, settings={**job.settings, "checkpoint": checkpoint}).plan()
    made = planner.saved_plan()
    return as_in_file(made, plan), planner.predict(plan).total_ms, made.predicted.chosen.total_ms


def _samples(run: ObservedRun, plan: SavedPlan) -> int:
    """Return the samples of a run's local batch, by its plan if it has counted none."""
    return batch_size_of(run.statistics) or plan.inputs.batch_size


if __name__ == "__main__":
    main(sys.argv[1:])
