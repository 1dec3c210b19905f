# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training on real ranks that is observed by itself: the files that it leaves, and nothing in the model."""

import gc
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from logged import logged
from ranks import Rank, run_on_ranks
from test_observed_steps import _hooks
from tiny import FEATURES, LOCAL_BATCH, POOLING_FACTORS, make_planner, shard, train
from torch.multiprocessing import ProcessExitedException

from dreamshard_planner import DreamShardPlanner, Observation, background, observe
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.environment import of_child
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.observing import observer
from dreamshard_planner.observing.observer import DEFAULTS
from tests.faults import ended, start, wait_for
from tests.observing.runs import observation

STEPS, WARM_UP, LEAST = 16, 4, 6
TRAINED = WARM_UP + STEPS + 3


def _surroundings(home: str, steps: str = str(STEPS), *, learns: bool = False) -> None:
    """Observe so many steps of this rank; ``learns``: in a process that imports all anew, else in none."""
    os.environ.update(DREAMSHARD_HOME=home, DREAMSHARD_OBSERVE=steps)
    observer.WARM_UP_STEPS, observer.LEAST_STEPS = WARM_UP, LEAST
    logging.getLogger("dreamshard_planner").setLevel(logging.INFO)
    if not learns:
        observer.subprocess.Popen = lambda _, **given: Popen(["true"], **given)  # in this process alone


def _written() -> None:
    """Wait for the threads that write what was observed, and then for what was learned."""
    for name in ("observation", "background"):
        for thread in threading.enumerate():
            if thread.name == f"dreamshard_planner {name}":
                thread.join()


def _messages(records: list[Any]) -> list[str]:
    return [record.getMessage() for record in records]


def _runs(home: Path) -> list[Path]:
    return sorted(home.glob("runs/*/*.json"))


def _observed(rank: Rank, home: str) -> tuple[list[float], list[float], list[str]]:
    """Losses with and without observation, and messages."""
    _surroundings(home)
    with logged("observing.observer") as records:
        model = shard(make_planner("dreamshard", rank), rank)
        idle = shard(make_planner("torchrec", rank), rank)  # as a model for evaluation
        begun = _hooks(model)
        losses = train(model, rank, TRAINED, 2 * LOCAL_BATCH)
        _written()
        del idle
        gc.collect()
    left = _hooks(model)
    assert left != begun and not DEFAULTS
    _surroundings(home, "0")
    plain = shard(make_planner("dreamshard", rank), rank)
    assert _hooks(plain) == left  # nothing is left, as if it had never been observed
    return losses, train(plain, rank, TRAINED, 2 * LOCAL_BATCH), _messages(records)


def _otherwise(rank: Rank, home: str, how: str) -> list[str]:
    _surroundings(home)
    with logged("observing.observer") as records:
        model = shard(make_planner("torchrec", rank), rank, observe=how != "argument")
        assert bool(DEFAULTS) == (how != "argument")
        if how == "explicit":
            train(model, rank, WARM_UP + 3, 2 * LOCAL_BATCH)
            with observe(model):
                assert not DEFAULTS
                train(model, rank, 3, 2 * LOCAL_BATCH)
        losses = train(model, rank, TRAININGS[how], 2 * LOCAL_BATCH)
        if how == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        losses += train(model, rank, 3, 2 * LOCAL_BATCH)
        assert torch.tensor(losses).isfinite().all()
        del model
        gc.collect()
        _written()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not DEFAULTS
    return [text for text in _messages(records) if "training goes on" in text]


TRAININGS = {
    "dropped": WARM_UP + LEAST,
    "short": WARM_UP + LEAST - 4,
    **dict.fromkeys(("explicit", "argument"), 0),
    "full disk": WARM_UP + STEPS,
}
"""Steps of each way to train before the last three. The first alone leaves files."""


def _job(rank: Rank, folder: Path) -> tuple[tuple[list[float], list[float], list[str]], dict[str, list[str]]]:
    with logged("observing") as records:
        observer.begin(torch.nn.Linear(1, 1), make_planner("torchrec", rank))
    assert not records and not DEFAULTS  # a job without tables is told nothing
    return _observed(rank, f"{folder}/observed"), {how: _otherwise(rank, f"{folder}/{how}", how) for how in TRAININGS}


def test_steps_after_the_warm_up_are_observed_and_nothing_is_left(tmp_path: Path) -> None:
    """The observation ends with its switches, too, and with the model."""
    ranks = run_on_ranks(_job, tmp_path, world_size=2)
    for (losses, plain, messages), told in ranks:
        assert losses == plain
        assert not any("training goes on" in message for message in messages)
        assert str(tmp_path / "full disk") in told.pop("full disk")[0]
        assert not any(told.values())
    assert "DREAMSHARD_OBSERVE=0 switches this off" in ranks[0][0][2][0]  # rank 0 alone says so
    assert not ranks[1][0][2]
    files = _runs(tmp_path / "observed")
    assert [file.suffixes for file in files] == [[".0", ".json"], [".1", ".json"]]
    (run,) = Observation.load_all(files).runs
    assert run.steps >= STEPS and run.plan is not None and len(run.ranks) == 2
    assert "t0" in next(iter(run.plan.sharding.values()))
    assert {how: len(_runs(tmp_path / how)) for how in TRAININGS} == dict.fromkeys(TRAININGS, 0) | {"dropped": 2}
    assert not [path for path in (tmp_path / "full disk").rglob("*") if path.is_file()]


def _own_costs(home: Path, scale: float) -> None:
    """Keep costs for this processor that are too high by a factor."""
    shipped, hardware = resolve("auto", "cpu"), describe_hardware("cpu", 1)
    rates = [scale, 0.0, 0.0, 0.0, 0.0]
    metadata = {**shipped.metadata, "hardware": hardware, "corrections": {"rowwise_adagrad": [rates, rates]}}
    (home / "checkpoints").mkdir(parents=True)
    replace(shipped, metadata=metadata).save(home / "checkpoints" / "own.safetensors")


def _start(rank: Rank, home: str, learns: bool) -> dict[str, Any]:
    """A start of a job that says nothing of batches, lookups and costs."""
    _surroundings(home, learns=learns)
    planner = DreamShardPlanner(effort="quick", sharding_types=["table_wise", "column_wise"])
    with logged("observing.observer") as records:
        train(shard(planner, rank), rank, TRAINED, 2 * LOCAL_BATCH)
        _written()
    told: dict[str, Any] = {"messages": _messages(records)}
    if rank.rank == 0:
        told |= {"report": str(planner.report()).splitlines(), "inputs": planner.saved_plan().inputs}
    return told


def test_a_job_makes_the_next_plan_better(tmp_path: Path) -> None:
    _own_costs(tmp_path, 9.0)
    first, then = (run_on_ranks(_start, str(tmp_path), learns, world_size=2)[0] for learns in (True, False))
    assert len(_runs(tmp_path)) == 4 and not list(tmp_path.rglob("*.part"))
    assert len(list(tmp_path.glob("checkpoints/*-observed.safetensors"))) == 1
    assert any("costs learned from" in text for text in first["messages"])
    assert "learned" not in first["report"][0] and first["inputs"].statistics is None
    report, inputs = then["report"], then["inputs"]
    assert re.search(r"Confidence: costs learned from 1 run on this hardware, \d+ % off\.", report[0])
    assert "-observed.safetensors" in inputs.settings["checkpoint"]
    assert inputs.batch_size == LOCAL_BATCH and inputs.statistics is not None
    assert any("statistics are those of the last training" in line for line in report)
    assert {name: known.pooling_factor for name, known in inputs.features.items()} == dict(
        zip(FEATURES, POOLING_FACTORS, strict=True)
    )


def _learn(home: Path, file: Path, seen: Observation | None = None) -> None:
    """Learn in this process, a session of its own as the one that is started, from a file that may be written first."""
    os.setsid()
    os.environ["DREAMSHARD_HOME"] = str(home)
    background.PATIENCE_SECONDS = 0.5  # for the files of other ranks
    closed, output = os.pipe()
    os.close(closed)
    os.dup2(output, 1)  # the training has ended, and listens no more
    if seen is not None:
        seen.save(file)
    background.main([str(file.parent), file.name.partition(".")[0]])
    # On Linux each session may have its own share of the processor; nice counts within it alone.
    group = Path("/proc/self/autogroup")
    assert os.nice(0) == 19 and (not os.access(group, os.W_OK) or group.read_text().endswith("nice 19\n"))


def test_jobs_that_learn_at_once_both_count(tmp_path: Path) -> None:
    whole, folder = observation(2), tmp_path / "runs" / "place"
    folder.mkdir(parents=True)
    runs = {folder / f"{run.id}.json": replace(whole, runs=(run,)) for run in whole.runs}
    assert ended(*(start(_learn, tmp_path, file, seen) for file, seen in runs.items())) == [0, 0]
    (learned,) = tmp_path.glob("checkpoints/*-observed.safetensors")
    assert Checkpoint.load(learned).metadata["learned"]["runs"] == 2  # the second to learn sees both


def test_the_process_that_learns_imports_as_the_training_and_tells_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    subprocess.run([sys.executable, "-P", "-c", "import only_here"], env=of_child(), check=True)
    with logged("observing.observer") as records:
        observer._tell(b"", 0, "background.log")
        observer._tell(b"", 1, "background.log")
    (message,) = _messages(records)
    assert "ended with 1; see background.log" in message


SHARES = (16, 9)


def _killed(rank: Rank, home: Path) -> None:
    """A job with unequal batches whose last rank is killed once all steps are observed, and before it has written
    them."""

    def die(*_: Any) -> None:
        wait_for(lambda: any(home.glob("runs/*/*.0.json")))
        os.kill(os.getpid(), signal.SIGKILL)

    _surroundings(str(home))
    if rank.rank == rank.world_size - 1:
        observer._write = die
    model = shard(DreamShardPlanner(effort="quick", sharding_types=["table_wise"]), rank)
    train(model, rank, TRAINED, sum(SHARES), SHARES)
    _written()


def test_a_killed_rank_leaves_the_others_files_whole(tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_on_ranks(_killed, tmp_path, world_size=len(SHARES))
    observed = [Observation.load(file).runs[0] for file in _runs(tmp_path)]
    assert 0 in (ranks := {one.rank for run in observed for one in run.ranks}) and len(SHARES) - 1 not in ranks
    assert all(run.steps >= STEPS for run in observed)
    (first,) = tmp_path.glob("runs/*/*.0.json")
    assert ended(start(_learn, tmp_path, first)) == [0]  # when the last rank is given up
    assert any(tmp_path.glob("tables/*/statistics.json"))
