# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Commands in processes of their own, as users run them: streams, interruptions, and disks that fill up."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dreamshard_planner.cost.dataset import CostDataset
from tests.cli.test_commands import EXAMPLE, MEASURED
from tests.faults import dreamshard, ended, start, wait_for

BLOCKS = {"collect": "x.blocks", "train": "x.test.blocks"}
"""The first folder that each command measures into."""
STOPS = [("train", signal.SIGKILL), ("fit", signal.SIGINT)]


def arguments(command: str, folder: Path) -> list[str]:
    """Arguments of a run that takes minutes, or more."""
    return {
        "collect": ["--out", str(folder / "x.npz"), "--pools", "merlin_tiny", "--batch-sizes", "64", "--repeats", "2",
                    "--sets", "150"],
        "train": ["--out", str(folder / "x.safetensors"), "--quick", "--seconds", "90"],
        "fit": ["--out", str(folder / "x.safetensors"), "--dataset", str(MEASURED), "--test-dataset", str(MEASURED),
                "--quick", "--updates", "100000"],
    }[command]  # fmt: skip


def sets_in(folder: Path) -> int:
    return sum(len(CostDataset.load(path)) for path in folder.glob("block-*.npz"))


@pytest.mark.parametrize(("command", "stop"), STOPS)
def test_what_is_stopped_loses_nothing(command: str, stop: int, tmp_path: Path) -> None:
    folder, said = tmp_path / "out", tmp_path / "stderr"
    folder.mkdir()
    process = start(dreamshard, [command, *arguments(command, folder)], said)
    blocks = folder / BLOCKS.get(command, "none")

    def at_work() -> bool:
        """A set was measured, or the cost network is fitted and the policy's turn has come."""
        return sets_in(blocks) > 0 or said.exists() and "fitting" in said.read_text()

    wait_for(at_work, process)
    held = sets_in(blocks)
    os.kill(process.pid, stop)
    (status,) = ended(process)
    assert status == (-stop if stop != signal.SIGINT else 130)
    assert "Traceback" not in said.read_text()
    assert {path.name for path in folder.iterdir()} <= {blocks.name}
    if blocks.exists():
        assert sets_in(blocks) >= held > 0


def test_a_disk_that_fills_up_keeps_what_it_holds(tmp_path: Path) -> None:
    folder, said = tmp_path / "out", tmp_path / "stderr"
    folder.mkdir()
    blocks = folder / BLOCKS["collect"]
    process = start(dreamshard, ["collect", *arguments("collect", folder)], said, 1_500)
    assert ended(process) == [1]
    text = said.read_text()
    assert f"error: {blocks / 'block-0.npz'}: cannot be written: File too large" in text
    assert "Traceback" not in text
    assert [path.name for path in folder.iterdir()] == [blocks.name]


def test_errors_of_the_shell_are_one_line_too() -> None:
    """In a process of its own, as users run it."""
    command = [sys.executable, "-c", "from dreamshard_planner.cli import main; main()"]
    job = ("plan", "--tables", EXAMPLE, "--gpus-per-node", "2", "--gpu", "h10", "--batch-size", "8")
    result = subprocess.run([*command, *job], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: unknown GPU 'h10' (did you mean 'h100'?): known are a100-40, a100-80, h100, h200, b200, l4, l40s, a10\n"
    )


def test_stdout_is_for_data_whatever_libraries_print() -> None:
    """In a process of its own, as users run it."""
    code = (
        "import ctypes; from dreamshard_planner import cli\nlibrary = ctypes.CDLL(None)\n"
        "cli.app = lambda: (library.puts(b'solver says'), library.fflush(None), print('data'))\ncli.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("data\n", "solver says\n")


@pytest.mark.parametrize(
    ("stdout", "status", "shown", "said"),
    [
        ("", 0, r"\xfc", ""),
        (">&-", 0, "", ""),
        (">/dev/full", 1, "", "error: standard output cannot be written: No space left on device\n"),
    ],
    ids=["ASCII", "closed", "full"],
)
def test_data_goes_to_any_stdout_or_the_exit_status_tells(stdout: str, status: int, shown: str, said: str) -> None:
    """In a process of its own, as users run it."""
    code = (
        "from dreamshard_planner import cli\nfrom dreamshard_planner.cli.output import Format, facts, show\n"
        "cli.app = lambda: show({}, Format.table, facts({'name': chr(252)}, 'title'))\ncli.main()"
    )
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = f"exec {shlex.join([sys.executable, '-c', code])} {stdout}"
    result = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (status, said) and shown in result.stdout
