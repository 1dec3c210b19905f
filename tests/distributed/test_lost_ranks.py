# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Ranks that are killed, ended or interrupted while rank 0 plans: the others end as well, and say why."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import SHARDERS, TinyModel
from torchrec.distributed.planner import Topology

from dreamshard_planner import DreamShardPlanner
from tests.faults import ended, start, wait_for


def plan_on(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Plan together; rank 0 takes until the file ``go`` is there."""

    def pause(options: list) -> list:
        (folder / "planning").touch()
        while not (folder / "go").exists():
            time.sleep(0.005)
        return options

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    planner = DreamShardPlanner(topology=Topology(world_size, "cpu"), callbacks=[pause], stats=[], debug=False)
    (folder / f"ready{rank}").touch()
    try:
        planner.collective_plan(TinyModel(torch.device("cpu")), list(SHARDERS))
        outcome = "a plan"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    (folder / f"outcome{rank}").write_text(outcome)


@pytest.mark.parametrize(("world_size", "lost", "stop"), [(3, 2, signal.SIGKILL), (2, 0, signal.SIGINT)])
def test_no_rank_waits_for_a_lost_one(world_size: int, lost: int, stop: int, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(plan_on, rank, world_size, store.port, tmp_path) for rank in range(world_size)]
    awaited = [tmp_path / "planning", *(tmp_path / f"ready{rank}" for rank in range(world_size))]
    wait_for(lambda: all(path.exists() for path in awaited), *ranks)
    os.kill(ranks[lost].pid, stop)
    if stop == signal.SIGKILL:
        ended(ranks[lost])
    (tmp_path / "go").touch()
    ended(*ranks)
    outcomes = {path.name: path.read_text() for path in tmp_path.glob("outcome*")}
    if stop == signal.SIGKILL:
        assert set(outcomes) == {"outcome0", "outcome1"} and outcomes["outcome0"].startswith("RuntimeError: ")
    else:
        assert outcomes["outcome0"].startswith("KeyboardInterrupt")
        assert outcomes["outcome1"] == "DreamShardError: planning on rank 0 ended with KeyboardInterrupt: "
