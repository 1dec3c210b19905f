# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Scripts on several ranks as ``torchrun --standalone`` runs them, and the same without a rank importing torch anew."""

import gc
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from dreamshard_planner.search.effort import EFFORTS
from tests.faults import PATIENCE_SECONDS, ended, start


def forked(script: Path, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """The script on ranks that are forked, with the environment variables that torchrun gives them.

    A rank whose script leaves a process group behind fails: its threads can abort Python at its end, but rarely do.
    Where there are GPUs torchrun runs it, since asking for them rules forks out.
    """
    if torch.cuda.is_available():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [str(script), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_USE_AGENT_STORE": True}
        world |= {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        own = [world | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
        statuses = ended(*(start(run_script, script, options, of_rank, stdout, stderr) for of_rank in own))
        return subprocess.CompletedProcess(
            [str(script), *options], max(statuses, key=abs), stdout.read_text(), stderr.read_text()
        )


def run_script(script: Path, options: Sequence[str], own: Mapping[str, object], stdout: Path, stderr: Path) -> None:
    """Run it in this process, which is one of :func:`tests.faults.start`, with these environment variables; plans take
    little effort."""
    os.environ.update({name: str(value) for name, value in own.items()})
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        with path.open("a") as file:  # of all ranks
            os.dup2(file.fileno(), stream.fileno())
    EFFORTS["default"] = EFFORTS["quick"]
    sys.argv, sys.path[0] = [str(script), *options], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    gc.collect()  # what the script's own names held, as the end of Python does
    assert_no_process_group()


def assert_no_process_group() -> None:
    """Fails where this process has threads of one."""
    names = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended since it was listed
            names.add(thread.joinpath("comm").read_text().strip())
    assert "gloo_tcp_loop" not in names, "something keeps the process group"
