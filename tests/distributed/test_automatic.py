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
from concurrent.futures import ThreadPoolExecutor
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
from dreamshard_planner.observing import automatic
from dreamshard_planner.observing.observer import END_DEFAULT
from tests.faults import ended, start, wait_for

STEPS = 24
TRAINED = automatic.WARM_UP_STEPS + STEPS + 3


IMPATIENT = (
    "import sys; from dreamshard_planner import background; background.PATIENCE_SECONDS = 0.5; "
    "background.main(sys.argv[1:])"
)
"""Learns as the module does, but hardly waits for the files of other ranks."""


def _surroundings(home: str, steps: str = str(STEPS), *, learns: bool = True, waits: bool = True) -> None:
    """Observe so many steps of this rank.

    Args:
        learns: in a process that imports all anew; else one that ends at once takes its place.
        waits: for all ranks' files.
    """
    os.environ.update(DREAMSHARD_HOME=home, DREAMSHARD_OBSERVE=steps)
    logging.getLogger("dreamshard_planner").setLevel(logging.INFO)

    def start(command: list[str], **given: Any) -> Popen:
        python, safe, *module, folder, run_id = command
        what = module if waits else ["-c", IMPATIENT]
        return Popen([python, safe, *what, folder, run_id] if learns else ["true"], **given)

    automatic.subprocess.Popen = start  # in this process alone


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


def _trained(rank: Rank, home: str) -> tuple[list[float], list[float], list[str]]:
    _surroundings(home, learns=False)
    with logged("observing.automatic") as records:
        model = shard(make_planner("dreamshard", rank), rank)
        begun = _hooks(model)
        losses = train(model, rank, TRAINED, 2 * LOCAL_BATCH)
        _written()
    left = _hooks(model)
    assert left != begun and not END_DEFAULT
    _surroundings(home, "0")
    plain = shard(make_planner("dreamshard", rank), rank)
    assert _hooks(plain) == left  # nothing is left, as if it had never been observed
    return losses, train(plain, rank, TRAINED, 2 * LOCAL_BATCH), _messages(records)


def test_steps_after_the_warm_up_are_observed_and_nothing_is_left(tmp_path: Path) -> None:
    ranks = run_on_ranks(_trained, str(tmp_path), world_size=2)
    for losses, plain, messages in ranks:
        assert losses == plain
        assert not any("training goes on" in message for message in messages)
    assert "DREAMSHARD_OBSERVE=0 switches this off" in ranks[0][2][0]  # rank 0 alone says so
    assert not ranks[1][2]
    files = _runs(tmp_path)
    assert [file.suffixes for file in files] == [[".0", ".json"], [".1", ".json"]]
    (run,) = Observation.load_all(files).runs
    assert run.steps >= STEPS and run.plan is not None and len(run.ranks) == 2
    assert "t0" in next(iter(run.plan.sharding.values()))


def _otherwise(rank: Rank, home: str, how: str) -> list[str]:
    """Train in one way, and return the warnings of the observation."""
    _surroundings(home, {"variable": "0", "no number": "many"}.get(how, str(STEPS)), learns=False)
    with logged("observing.automatic") as records:
        model = shard(make_planner("dreamshard", rank), rank, observe=how != "argument")
        if how == "explicit":
            train(model, rank, automatic.WARM_UP_STEPS + 3, 2 * LOCAL_BATCH)
            with observe(model):
                assert not END_DEFAULT
                train(model, rank, STEPS, 2 * LOCAL_BATCH)
        steps = {"short": automatic.WARM_UP_STEPS + 5, "dropped": automatic.WARM_UP_STEPS + automatic.LEAST_STEPS + 2}
        losses = train(model, rank, steps.get(how, TRAINED) - 3, 2 * LOCAL_BATCH)
        if how == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        losses += train(model, rank, 3, 2 * LOCAL_BATCH)
        assert torch.tensor(losses).isfinite().all()
        del model
        gc.collect()
        _written()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not END_DEFAULT
    return [text for text in _messages(records) if "training goes on" in text]


NOTHING_WRITTEN = ("variable", "argument", "explicit", "no number", "short", "no folder", "full disk")
FILES = {"dropped": 2, **dict.fromkeys(NOTHING_WRITTEN, 0)}
"""Files that each way to train leaves."""


def _every_way(rank: Rank, folder: str) -> dict[str, list[str]]:
    with logged("observing") as records:
        automatic.begin(torch.nn.Linear(1, 1), make_planner("torchrec", rank))
    assert not records and not END_DEFAULT  # a job without tables is told nothing
    return {how: _otherwise(rank, f"{folder}/{how}", how) for how in FILES}


def test_the_observation_ends_with_its_switches_and_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "no folder").write_bytes(b"")
    for told in run_on_ranks(_every_way, str(tmp_path), world_size=2):
        assert "'many'" in told.pop("no number")[0]
        for how in ("no folder", "full disk"):
            assert str(tmp_path / how) in told.pop(how)[0]
        assert not any(told.values())
    assert {how: len(_runs(tmp_path / how)) for how in FILES} == FILES
    assert not [path for path in (tmp_path / "full disk").rglob("*") if path.is_file()]


def _own_costs(home: Path, scale: float) -> None:
    """Keep costs for this processor that are too high by a factor."""
    shipped, hardware = resolve("auto", "cpu"), describe_hardware("cpu", 1)
    rates = [scale, 0.0, 0.0, 0.0, 0.0]
    metadata = {**shipped.metadata, "hardware": hardware, "corrections": {"rowwise_adagrad": [rates, rates]}}
    (home / "checkpoints").mkdir(parents=True)
    replace(shipped, metadata=metadata).save(home / "checkpoints" / "own.safetensors")


def _start(rank: Rank, home: str, job: str | None = None) -> dict[str, Any]:
    """A start of a job that says nothing of batches, lookups and costs.

    Args:
        job: name of the job, which waits for another one before its last step, so that both learn at once; without a
            name it is alone, and nothing learns from it.
    """
    _surroundings(home, learns=job is not None)
    planner = DreamShardPlanner(effort="quick", sharding_types=["table_wise", "column_wise"])
    with logged("observing.automatic") as records:
        model = shard(planner, rank)
        train(model, rank, TRAINED - 3, 2 * LOCAL_BATCH)
        if job and rank.rank == 0:
            Path(home, f"{job}.waits").touch()
            wait_for(lambda: len(list(Path(home).glob("*.waits"))) == 2)
        train(model, rank, 3, 2 * LOCAL_BATCH)
        _written()
    told: dict[str, Any] = {"messages": _messages(records)}
    if rank.rank == 0:
        told |= {"report": str(planner.report()).splitlines(), "inputs": planner.saved_plan().inputs}
    return told


def test_jobs_at_once_both_count_and_make_the_next_plan_better(tmp_path: Path) -> None:
    _own_costs(tmp_path, 9.0)
    with ThreadPoolExecutor() as jobs:
        both = [jobs.submit(run_on_ranks, _start, str(tmp_path), job, world_size=2) for job in "ab"]
        first, other = (job.result()[0] for job in both)
    assert len(_runs(tmp_path)) == 4 and not list(tmp_path.rglob("*.part"))
    (learned,) = tmp_path.glob("checkpoints/*-observed.safetensors")
    assert Checkpoint.load(learned).metadata["learned"]["runs"] == 2  # the second to learn sees both
    for messages in (first["messages"], other["messages"]):
        assert any("costs learned from" in text for text in messages)
    assert "learned" not in first["report"][0] and first["inputs"].statistics is None

    then = run_on_ranks(_start, str(tmp_path), world_size=2)[0]
    report, inputs = then["report"], then["inputs"]
    assert re.search(r"Confidence: costs learned from 2 runs on this hardware, \d+ % off\.", report[0])
    assert "-observed.safetensors" in inputs.settings["checkpoint"]
    assert inputs.batch_size == LOCAL_BATCH and inputs.statistics is not None
    assert any("statistics are those of the last training" in line for line in report)
    assert {name: known.pooling_factor for name, known in inputs.features.items()} == dict(
        zip(FEATURES, POOLING_FACTORS, strict=True)
    )


def test_the_process_that_learns_imports_as_the_training_and_tells_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    subprocess.run([sys.executable, "-P", "-c", "import only_here"], env=of_child(), check=True)
    with logged("observing.automatic") as records:
        automatic._tell(b"", 0, "background.log")
        automatic._tell(b"", 1, "background.log")
    (message,) = _messages(records)
    assert "ended with 1; see background.log" in message


def _die(home: Path) -> None:
    wait_for(lambda: any(home.glob("runs/*/lock")))  # rank 0's process has begun
    os.kill(os.getpid(), signal.SIGKILL)


SHARES = (16, 9, 3, 16)
"""Samples of each of four ranks."""


def _killed(rank: Rank, home: str) -> None:
    """A job with unequal batches whose last rank is killed once all steps are observed, and before it has written
    them."""
    _surroundings(home, waits=False)
    if rank.rank == rank.world_size - 1:
        automatic._write = lambda *_: _die(Path(home))
    model = shard(DreamShardPlanner(effort="quick", sharding_types=["table_wise"]), rank)
    train(model, rank, TRAINED, sum(SHARES), SHARES)
    _written()


def _lowered(told: Path) -> None:
    os.setsid()  # as the process that learns is started
    background.lower_priority()
    group = Path("/proc/self/autogroup")
    told.write_text(f"{os.nice(0)}\n{group.read_text() if os.access(group, os.W_OK) else ''}")


def test_the_process_that_learns_leaves_the_processor_to_the_training(tmp_path: Path) -> None:
    """Its own session has its own share of the processor where Linux groups by session; nice counts within it alone."""
    assert ended(start(_lowered, tmp_path / "told")) == [0]
    nice, _, group = (tmp_path / "told").read_text().strip().partition("\n")
    assert nice == "19" and (not group or group.endswith("nice 19")), group


def test_a_killed_rank_leaves_the_others_files_whole(tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_on_ranks(_killed, str(tmp_path), world_size=len(SHARES))
    wait_for(lambda: any(tmp_path.glob("tables/*/statistics.json")))  # from rank 0, when the last rank is given up
    observed = [Observation.load(file).runs[0] for file in _runs(tmp_path)]
    assert 0 in (ranks := {one.rank for run in observed for one in run.ranks}) and len(SHARES) - 1 not in ranks
    assert all(run.steps >= STEPS for run in observed)
