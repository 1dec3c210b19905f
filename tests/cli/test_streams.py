# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Commands write to stdout and stderr, in processes of their own, as users run them."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.cli.test_commands import EXAMPLE


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
