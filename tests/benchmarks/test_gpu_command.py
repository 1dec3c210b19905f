# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``make gpu``: whatever its stages do, each is told, and the same command goes on."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

import gpu
from dreamshard_planner.checkpoints.checkpoint import resolve, shipped


def _stage(name: str, code: str, share: float = 1.0) -> gpu.Stage:
    return gpu.Stage(name, share, f"runs {name}", lambda node, seconds: node.python("-c", code))


def _run(stages: list[gpu.Stage], out: Path, minutes: float = 1.0, grace_seconds: float = 120.0) -> gpu.Record:
    record = gpu.Record.open(out / "stages.json")
    node = gpu.Node("cpu", "cpu", 2, out, minutes, grace_seconds)
    gpu.run_all(stages, node, record, Console(file=io.StringIO()))
    return gpu.Record.open(out / "stages.json")


def test_a_stage_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    stages = [
        _stage("fails", "print('before'); raise SystemExit('the reason')"),
        gpu.Stage("nothing", 1.0, "needs two", lambda node, seconds: "one GPU"),
        _stage("works", "import os; print(os.environ['PYTHONPATH'])"),
    ]
    outcomes = _run(stages, tmp_path).outcomes
    assert [(o.state, o.note, o.status) for o in outcomes.values()] == [
        ("failed", "the reason", 1),
        ("skipped", "one GPU", None),
        ("done", "", 0),
    ]
    command, path = (tmp_path / "works.log").read_text().splitlines()
    assert command == f"$ {outcomes['works'].command}" and path.split(os.pathsep)[1].endswith("benchmarks")
    again = _run([_stage("fails", "print('now it works')")], tmp_path).outcomes
    assert [outcome.state for outcome in again.values()] == ["done", "skipped", "done"]
    assert "before" in (tmp_path / "fails.log").read_text()  # logs go on


def test_a_stage_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    children = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
print("at work", flush=True)
time.sleep(100)
"""
    stages = [_stage("long", children, share=0.001), _stage("next", "", share=1000)]
    outcomes = _run(stages, tmp_path, minutes=1, grace_seconds=5).outcomes
    assert [o.state for o in outcomes.values()] == ["timed out", "done"] and "ended after" in outcomes["long"].note
    assert "at work" in (tmp_path / "long.log").read_text()
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_time_that_a_stage_leaves_over_goes_to_the_others(tmp_path: Path) -> None:
    given: dict[str, float] = {}

    def noted(node: gpu.Node, seconds: float) -> str:
        given[f"stage {len(given)}"] = seconds
        return "only looking"

    _run([gpu.Stage(f"s{index}", share, "", noted) for index, share in enumerate((1.0, 1.0, 2.0))], tmp_path, minutes=4)
    assert list(given.values()) == pytest.approx([60, 80, 240], rel=0.05)


def test_stages_are_named_and_a_gpu_is_asked_for(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    for arguments, reason in (
        (["--device=cpu", "--stages=tests,best"], "--stages must be some of tests, kernels.*got best"),
        (["--device=cpu", "--minutes=0"], "--minutes must be above 0"),
    ):
        with pytest.raises(SystemExit):
            gpu.main([*arguments, f"--out={tmp_path}"])
        assert re.search(reason, capsys.readouterr().err.replace("\n", " "))
    assert not list(tmp_path.iterdir())
    assert gpu.collectives(gpu.Node("cuda", "nvidia-x", 1, tmp_path, 1.0), 1.0) == "one GPU: nobody to exchange with"


def test_a_short_run_on_two_ranks_ends_with_a_checkpoint_for_this_device(tmp_path: Path) -> None:
    arguments = [
        "--device=cpu",
        "--quick",
        "--minutes=0.1",
        "--grace-seconds=600",
        f"--out={tmp_path}",
        "--stages=checkpoint",
    ]
    status = gpu.main(arguments)
    assert status == 0, (tmp_path / "checkpoint.log").read_text()
    made = shipped(tmp_path, "cpu", "default")  # as auto looks for it
    assert made.name == "cpu.safetensors" and made.metadata["dataset"]["sets"] >= 16  # a block of each rank
    assert resolve(tmp_path / "cpu.safetensors", "cpu").cost is not None
    assert {p.name for p in tmp_path.iterdir()} >= {"cpu.dataset.npz", "environment.json", "report.md", "stages.json"}
    assert not list(tmp_path.glob("*.blocks"))
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torchrec"] and environment["hardware"]["device"] == "cpu"
    told = (tmp_path / "report.md").read_text()
    assert "| checkpoint |" in told and "network_mape" in told and "| steps |" in told
