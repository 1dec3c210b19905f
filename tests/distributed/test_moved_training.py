# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A checkpoint loads under every other plan of its tables, and training goes on as if nothing had been moved."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_job
import pytest
import small_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import TableSpec, parts_of
from moves import OPTIMIZERS, Job, Moving, Result, Sharding, check, load_and_train, train_and_save
from ranks import Rank, run_on_ranks
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints

from dlrm.job import EveryTypeSharder
from dreamshard_planner import CheckpointError, load_across_plans
from tests.faults import ended, start
from tests.ways import saved_state

DIM = 16
POOLED = (
    Sharding("table_wise", (0,)),
    Sharding("table_wise", (1,)),
    Sharding("column_wise", (0, 1), (8, 8)),
    Sharding("column_wise", (1, 0, 1, 0), (4, 4, 4, 4)),
    Sharding("column_wise", (1, 0), (4, 12)),
    Sharding("row_wise"),
    Sharding("table_row_wise", (0,)),
    Sharding("grid_shard", (0, 1), (8, 8)),
    Sharding("data_parallel"),
)
SEQUENCE = (Sharding("table_wise", (1,)), Sharding("column_wise", (1, 0), (8, 8)), Sharding("row_wise"))
TABLES = {
    "bags": {f"bag{number}": TableSpec(9 + 2 * number, DIM) for number in range(len(POOLED))},
    "sequence": {f"sequence{number}": TableSpec(11 + number, DIM) for number in range(len(SEQUENCE))},
}


def turned(turn: int, optimizer: str, ranks: int = 2, **settings: Any) -> Moving:
    """Every table in the next sharding: so many turns try every pair of them. Two hosts, or three of a rank each."""
    plan = {f"bag{number}": POOLED[(number + turn) % len(POOLED)] for number in range(len(POOLED))}
    plan |= {f"sequence{number}": SEQUENCE[(number + turn) % len(SEQUENCE)] for number in range(len(SEQUENCE))}
    for name, sharding in plan.items():
        if sharding.kind in ("table_wise", "column_wise"):
            plan[name] = replace(sharding, ranks=tuple(rank * (ranks - 1) for rank in sharding.ranks))
    return Moving(TABLES, plan, optimizer, hosts=3 if ranks == 3 else 2, ranks=ranks, **settings)


ATTACHED, DTENSORS = {"attached": True}, {"dtensors": True}
SETTINGS: tuple[tuple[str, dict[str, bool], tuple[tuple[int, dict[str, bool]], ...]], ...] = (
    ("row_wise_adagrad", ATTACHED, ((4, ATTACHED), (0, {}))),
    ("row_wise_adagrad", DTENSORS, ((2, DTENSORS), (5, {}))),
    ("row_wise_adagrad", {}, ((1, DTENSORS),)),
)
"""Optimizer and settings of jobs that save, with turns and settings of those that load."""


def _settings(rank: Rank, folder: Path) -> list[list[Result]]:
    """By job that saves: its training, and those that were moved."""
    results = []
    for number, (optimizer, before, others) in enumerate(SETTINGS):
        moving, path = turned(0, optimizer, **before), folder / str(number)
        results.append([train_and_save(rank, moving, path, plain=moving.dtensors)])
        results[-1] += [load_and_train(rank, turned(turn, optimizer, **after), path) for turn, after in others]
    return results


def _refused(state: dict[str, Any], folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_across_plans(state, folder)
    return str(refused.value)


def _learning_rates(rank: Rank, folder: Path) -> tuple[str, list[float], str]:
    before, after = (Job(turned(turn, "adagrad", groups=True), rank) for turn in (0, 1))
    for group in before.optimizer.param_groups:
        group["lr"] = 0.25
    before.save(folder / "plain", plain=True)
    before.save(folder / "ours", plain=False)
    told = _refused(after.state(), folder / "plain")
    after.load(folder / "ours")
    state = {"model": after.model.state_dict(), "optimizer": {"state": {0: {"sum": torch.ones(3)}}}}
    dcp.save(state, checkpoint_id=folder / "numbered")
    return told, [group["lr"] for group in after.optimizer.param_groups], _refused(state, folder / "numbered")


def _job(rank: Rank, folder: Path) -> dict[Any, Any]:
    """All that so many ranks train: without a move, and from what 2 or 4 of them saved. On as many ranks as before,
    row-wise states go every way; of all others, one way is tried."""
    ranks, found = rank.world_size, {}
    if ranks != 3:
        found["unmoved"] = {
            name: train_and_save(rank, turned(0, name, ranks), folder / f"{ranks} {name}", plain=False)
            for name in OPTIMIZERS
        }
    for was in {4: (), 2: (2, 4), 3: (2,)}[ranks]:
        turns = dict.fromkeys(OPTIMIZERS, [8])
        if was == ranks:
            turns |= {"adagrad": [4], "row_wise_adagrad": range(9)}
        found[was] = {
            (name, turn): load_and_train(rank, turned(turn, name, ranks), folder / f"{was} {name}")
            for name in OPTIMIZERS
            for turn in turns[name]
        }
    if ranks == 2:
        found |= {"settings": _settings(rank, folder), "learning rates": _learning_rates(rank, folder)}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("moved")
    return {ranks: run_on_ranks(_job, folder, world_size=ranks)[0] for ranks in (4, 2, 3)}


@pytest.mark.parametrize(("was", "now"), [(2, 2), (2, 3), (4, 2)])
def test_every_sharding_type_to_every_other(was: int, now: int, found: dict[int, dict[Any, Any]]) -> None:
    assert {optimizer for optimizer, _ in found[now][was]} == set(OPTIMIZERS)
    for (optimizer, turn), after in found[now][was].items():
        check(after, turned(turn, optimizer, now), found[was]["unmoved"][optimizer], turned(0, optimizer, was))


def test_attached_replicas_and_dtensors_move_like_all_else(found: dict[int, dict[Any, Any]]) -> None:
    """Also from one to the other: to replicas that the script's own optimizer trains, and to sharded tensors."""
    for (optimizer, _, others), (unmoved, *moved) in zip(SETTINGS, found[2]["settings"], strict=True):
        for (turn, _), result in zip(others, moved, strict=True):
            check(result, turned(turn, optimizer), unmoved, turned(0, optimizer))


def test_learning_rates_go_with_their_tables(found: dict[int, dict[Any, Any]]) -> None:
    told, rates, numbered = found[2]["learning rates"]
    assert rates and set(rates) == {0.25}
    assert "learning rate of" in told and "save_param_groups(False)" in told
    assert "by number" in numbered and "KeyedOptimizerWrapper" in numbered


MATRIX = Path(__file__).parents[2] / ".matrix"


def _under_our_plan(rank: Rank, folder: Path) -> tuple[dict[str, str], list[Any], list[Any]]:
    """The sharding of each table, and this rank's parts of weights and states."""
    kinds = {"cut": "row_wise", "whole": "column_wise"}
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=8) for name, kind in kinds.items()}
    planner = small_models.planner(constraints=constraints, exact_training=False)
    sharder = EveryTypeSharder()
    plan = planner.collective_plan(plain_job.unsharded(), [sharder], dist.group.WORLD)
    model = DistributedModelParallel(plain_job.unsharded(), device=rank.device, plan=plan, sharders=[sharder])
    state = saved_state(model)
    load_across_plans(state, folder)
    states = [(key, value) for key, of_table in state["optimizer"]["state"].items() for value in of_table.values()]
    weights, sums = (
        [(key, *at) for key, value in found for at in parts_of(value)] for found in (state["model"].items(), states)
    )
    return {name: table.sharding_type for name, table in plan.plan["ebc"].items()}, weights, sums


@pytest.mark.parametrize("release", ["installed", "1.6.1", "1.7.0", "1.9.2"])
def test_checkpoints_of_jobs_without_this_package(release: str, tmp_path: Path) -> None:
    if release != "installed" and not (MATRIX / release).is_dir():
        pytest.skip(f"no TorchRec {release} in {MATRIX}")
    saved = tmp_path / "saved"
    if release == "installed":
        assert ended(*(start(plain_job.main, rank, str(saved)) for rank in range(2))) == [0, 0]
    else:
        command, paths = [sys.executable, str(Path(__file__).with_name("plain_job.py")), str(saved)], MATRIX / release
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(paths)})
    rows, slices = plain_job.ROWS, {"cut": 2, "whole": 1}
    weights = {key: torch.zeros(rows, plain_job.DIM) for key in map("ebc.embedding_bags.{}.weight".format, slices)}
    sums = {
        key: {f"{name}.momentum1": torch.zeros(count * rows)}
        for key, (name, count) in zip(weights, slices.items(), strict=True)
    }
    dcp.load({"model": weights, "optimizer": {"state": sums}}, checkpoint_id=saved, no_dist=True)
    for kinds, loaded_weights, loaded_sums in run_on_ranks(_under_our_plan, saved, world_size=2):
        assert kinds == {"cut": "row_wise", "whole": "column_wise"} and loaded_weights and loaded_sums
        for key, (row, column), part in loaded_weights:
            own = weights[key][row : row + len(part), column : column + part.shape[1]]
            torch.testing.assert_close(part, own, rtol=0, atol=0)
        for key, (row,), part in loaded_sums:  # of one slice of columns after the other
            (whole,) = sums[key].values()
            own = whole.view(-1, rows).mean(0)
            assert own.any()
            torch.testing.assert_close(part, own[row % rows :][: len(part)])
