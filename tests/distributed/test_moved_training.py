# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A checkpoint loads under every other plan of its tables, and training goes on as if nothing had been moved.

``pytest tests/distributed/test_moved_training.py --turns 9 --pairs 200`` tries every type to every other on other
numbers of ranks too, and more pairs of random plans of random models.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_job
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import TableSpec, parts_of
from moves import (
    BEFORE,
    OPTIMIZERS,
    Job,
    Moving,
    Result,
    Sharding,
    check,
    load_and_train,
    train_and_save,
)
from ranks import Rank, run_on_ranks
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology

from dlrm.job import EveryTypeSharder
from dreamshard_planner import CheckpointError, DreamShardPlanner, load_across_plans
from dreamshard_planner.errors import FileError

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


LAUNCH = 20
"""Pairs that the same processes try."""


def turned(turn: int, optimizer: str, ranks: int = 2, **settings: Any) -> Moving:
    """Every table in the next sharding: so many turns try every pair of them. Two hosts, or three of a rank each."""
    plan = {f"bag{number}": POOLED[(number + turn) % len(POOLED)] for number in range(len(POOLED))}
    plan |= {f"sequence{number}": SEQUENCE[(number + turn) % len(SEQUENCE)] for number in range(len(SEQUENCE))}
    for name, sharding in plan.items():
        if sharding.kind in ("table_wise", "column_wise"):
            plan[name] = replace(sharding, ranks=tuple(rank * (ranks - 1) for rank in sharding.ranks))
    return Moving(TABLES, plan, optimizer, hosts=3 if ranks == 3 else 2, ranks=ranks, **settings)


def _unmoved(rank: Rank, folder: Path) -> list[Result]:
    return [train_and_save(rank, turned(0, name, rank.world_size), folder / name, plain=False) for name in OPTIMIZERS]


def _turns(rank: Rank, folder: Path, turns: Mapping[str, Sequence[int]]) -> dict[str, list[Result]]:
    return {
        name: [load_and_train(rank, turned(turn, name, rank.world_size), folder / name) for turn in of_optimizer]
        for name, of_optimizer in turns.items()
    }


@pytest.mark.parametrize(("was", "now"), [(2, 2), (2, 3), (4, 2)])
def test_every_sharding_type_to_every_other(was: int, now: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """On as many ranks as before, row-wise states go every way; of the simpler ones, fewer ways are tried."""
    few = pytestconfig.getoption("turns")
    turns = {name: range(len(POOLED))[-few:] for name in OPTIMIZERS}
    if was == now:
        turns = {"sgd": range(0, 9, 8), "adagrad": range(0, 9, 4)} | {"row_wise_adagrad": range(9)}
    unmoved = run_on_ranks(_unmoved, tmp_path, world_size=was)[0]
    moved = run_on_ranks(_turns, tmp_path, turns, world_size=now)[0]
    for optimizer, before_moving in zip(OPTIMIZERS, unmoved, strict=True):
        before = turned(0, optimizer, was)
        check(before_moving, before, before)
        for turn, result in zip(turns[optimizer], moved[optimizer], strict=True):
            after = turned(turn, optimizer, now)
            check(result, before, after)
            if after.states_apart == before.states_apart and after.samples == before.samples:
                assert result.losses == pytest.approx(before_moving.losses[BEFORE:], rel=1e-5), (optimizer, turn)


def _attached_and_not(rank: Rank, folder: Path) -> dict[str, list[Result]]:
    """From attached replicas to other shardings, and to replicas that the script's own optimizer trains."""
    results = {}
    for optimizer in OPTIMIZERS:
        results[optimizer] = [train_and_save(rank, turned(0, optimizer, attached=True), folder / optimizer, False)]
        for turn, attached in ((4, True), (0, False)):
            moving = turned(turn, optimizer, attached=attached)
            results[optimizer].append(load_and_train(rank, moving, folder / optimizer))
    return results


def test_replicas_with_attached_optimizers_move_like_all_else(tmp_path: Path) -> None:
    for optimizer, (unmoved, *moved) in run_on_ranks(_attached_and_not, tmp_path, world_size=2)[0].items():
        before = turned(0, optimizer)
        check(unmoved, before, before)
        for turn, result in zip((4, 0), moved, strict=True):
            check(result, before, turned(turn, optimizer))


DTENSORS = ((True, 2, True), (True, 5, False), (False, 1, True))
"""DTensors are saved, turn to move to, DTensors are loaded."""


def _dtensors(rank: Rank, folder: Path) -> list[Result]:
    for saved in (True, False):
        job = Job(turned(0, "row_wise_adagrad", dtensors=saved), rank)
        job.train(0, BEFORE)
        assert isinstance(job.model.state_dict()["bags.embedding_bags.bag0.weight"], DTensor) is saved
        job.save(folder / str(saved), plain=saved)
    return [
        load_and_train(rank, turned(turn, "row_wise_adagrad", dtensors=here), folder / str(saved))
        for saved, turn, here in DTENSORS
    ]


def test_dtensors_move_like_sharded_tensors(tmp_path: Path) -> None:
    results = run_on_ranks(_dtensors, tmp_path, world_size=2)[0]
    for (_, turn, _), result in zip(DTENSORS, results, strict=True):
        check(result, turned(0, "row_wise_adagrad"), turned(turn, "row_wise_adagrad"))


def random_plan(seed: int, ranks: int, optimizer: str, tables: Mapping[str, Mapping[str, TableSpec]]) -> Moving:
    generator = random.Random(f"{seed} {ranks} {optimizer}")
    hosts, plan = generator.choice([hosts for hosts in (1, 2) if ranks % hosts == 0]), {}
    for module, specs in tables.items():
        slices = generator.choice([2, 4])  # those of a sequence module must be equal
        for name, spec in specs.items():
            kinds = {sharding.kind for sharding in (SEQUENCE if module == "sequence" else POOLED)}
            kind = generator.choice(sorted(kinds))
            even = (spec.dim // slices,) * slices
            if kind == "column_wise":
                uneven = (4, spec.dim - 4) if spec.dim > 8 and module != "sequence" else even
                widths = generator.choice([even, uneven])
                plan[name] = Sharding(kind, tuple(generator.randrange(ranks) for _ in widths), widths)
            elif kind == "grid_shard":
                plan[name] = Sharding(kind, tuple(generator.choices(range(hosts), k=slices)), even)
            elif kind in ("table_wise", "table_row_wise"):
                plan[name] = Sharding(kind, (generator.randrange(ranks if kind == "table_wise" else hosts),))
            else:
                plan[name] = Sharding(kind)
    return Moving(tables, plan, optimizer, hosts=hosts, ranks=ranks)


def random_tables(seed: int) -> dict[str, dict[str, TableSpec]]:
    generator = random.Random(seed)
    return {
        module: {
            f"{module}{number}": TableSpec(generator.randint(3, 40), 16 * generator.choice([1, 1, 2]))
            if module != "sequence"
            else TableSpec(generator.randint(3, 40), 16)
            for number in range(generator.randint(1, 4))
        }
        for module in ("bags", "weighted", "sequence")
    }


def _pairs(rank: Rank, pairs: list[tuple[Moving, Moving]], folder: Path) -> list[Result]:
    results = []
    for number, (before, after) in enumerate(pairs):
        train_and_save(rank, before, folder / str(number), plain=bool(number % 2), go_on=False)
        results.append(load_and_train(rank, after, folder / str(number)))
    return results


def test_random_pairs_of_plans_of_random_models(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pairs = []
    for seed in range(pytestconfig.getoption("pairs")):
        tables, optimizer = random_tables(seed), list(OPTIMIZERS)[-1 - seed % len(OPTIMIZERS)]
        pairs.append(tuple(random_plan(seed + 1000 * number, 2, optimizer, tables) for number in range(2)))
    for first in range(0, len(pairs), LAUNCH):
        block, folder = pairs[first : first + LAUNCH], tmp_path / str(first)
        for (before, after), result in zip(block, run_on_ranks(_pairs, block, folder, world_size=2)[0], strict=True):
            check(result, before, after)


def _refused(job: Job, folder: Path, state: dict[str, Any] | None = None, **consent: Any) -> str:
    state = job.state() if state is None else state
    state["model"] = {key: value for key, value in state["model"].items() if not key.startswith("top")}
    consent = {**consent, "dropped": ["model.top", *consent.get("dropped", ())]}
    try:
        load_across_plans(state, folder, **consent)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def _refusals(rank: Rank, folder: Path) -> dict[str, str]:
    told = {}
    for optimizer in OPTIMIZERS:
        Job(turned(0, optimizer), rank).save(folder / optimizer, plain=True)
    row_wise, adagrad, sgd = (Job(turned(1, optimizer), rank) for optimizer in reversed(OPTIMIZERS))
    told["other optimizer"] = _refused(row_wise, folder / "adagrad")
    told["other optimizer, by consent"] = _refused(
        row_wise, folder / "adagrad", fresh=[*TABLES["bags"], *TABLES["sequence"]]
    )
    told["optimizer without states before"] = _refused(adagrad, folder / "sgd")
    told["optimizer without states now"] = _refused(sgd, folder / "adagrad")
    told["no optimizer of replicated tables"] = _refused(
        adagrad,
        folder / "adagrad",
        {"model": adagrad.model.state_dict(), "optimizer": adagrad.model.fused_optimizer.state_dict()},
    )
    told["nothing"] = _refused(adagrad, folder / "nowhere")
    (folder / f"file{rank.rank}").write_text("")
    with pytest.raises(FileError, match="file0/new: cannot be written: Not a directory"):
        adagrad.save(folder / "file0/new", plain=False)
    layers = adagrad.state()
    if rank.rank == 0:  # the other rank has them
        layers["model"].pop("top.weight")
    load_across_plans(layers, folder / "adagrad")
    layers["model"].pop("top.weight", None)
    with pytest.raises(CheckpointError, match=r"'model.top.weight': in the checkpoint, not in the state dict"):
        load_across_plans(layers, folder / "adagrad")
    told["misspelt"] = _refused(adagrad, folder / "adagrad", added=["bags.bug0"])
    more = {**TABLES, "bags": {**TABLES["bags"], "new": TableSpec(5, DIM)}}
    longer = {**TABLES, "bags": {**TABLES["bags"], "bag1": TableSpec(99, DIM)}}
    plan = {**turned(1, "adagrad").plan, "new": POOLED[2]}
    for name, tables in (("more", more), ("longer", longer)):
        job = Job(replace(turned(1, "adagrad"), tables=tables, plan=plan), rank)
        told[name] = _refused(job, folder / "adagrad")
        if name == "more":
            told["more, by consent"] = _refused(job, folder / "adagrad", added=["bags.new"])
            job.save(folder / "more", plain=False)
    told["fewer"] = _refused(adagrad, folder / "more")
    told["fewer, by consent"] = _refused(adagrad, folder / "more", dropped=["new"])
    return told


def test_what_has_no_exact_rule_is_refused_by_name(tmp_path: Path) -> None:
    told = run_on_ranks(_refusals, tmp_path, world_size=2)[0]
    loaded = {name for name, text in told.items() if text == "loaded"}
    assert loaded == {"other optimizer, by consent", "more, by consent", "fewer, by consent"}, told
    for name, words in {
        "other optimizer": ["table bags.bag1, state momentum1: of size", "no rule", "pass fresh=['bags.bag1']"],
        "optimizer without states before": ["table bags.bag1, state momentum1: not in the checkpoint", "no state"],
        "optimizer without states now": ["table bags.bag0, state momentum1: in the checkpoint, not in the state dict"],
        "no optimizer of replicated tables": ["table bags.bag7, state momentum1: in the checkpoint", "init_state()"],
        "nothing": ["nowhere", "no file .metadata"],
        "misspelt": ["'bags.bug0' (did you mean 'bags.bag0'?)"],
        "more": ["table bags.new: not in the checkpoint; if it is new, pass added=['bags.new']"],
        "longer": ["table bags.bag1: of size (11, 16) in the checkpoint, (99, 16) here"],
        "fewer": ["table bags.new: in the checkpoint, not in the model", "dropped="],
    }.items():
        assert all(word in told[name] for word in words), (name, told[name])


def _learning_rates(rank: Rank, folder: Path) -> tuple[str, list[float], str]:
    before, after = (Job(turned(turn, "adagrad", groups=True), rank) for turn in (0, 1))
    for group in before.optimizer.param_groups:
        group["lr"] = 0.25
    before.save(folder / "plain", plain=True)
    before.save(folder / "ours", plain=False)
    told = _refused(after, folder / "plain")
    after.load(folder / "ours")
    numbered = torch.optim.Adagrad([p for n, p in after.model.named_parameters() if "bag" in n], lr=0.1)
    state = {"model": after.model.state_dict(), "optimizer": {"state": {0: {"sum": torch.ones(3)}}}}
    dcp.save(state, checkpoint_id=folder / "numbered")
    assert numbered.param_groups
    return told, [group["lr"] for group in after.optimizer.param_groups], _refused(after, folder / "numbered", state)


def test_learning_rates_go_with_their_tables(tmp_path: Path) -> None:
    told, rates, numbered = run_on_ranks(_learning_rates, tmp_path, world_size=2)[0]
    assert rates and set(rates) == {0.25}
    assert "learning rate of" in told and "save_param_groups(False)" in told
    assert "by number" in numbered and "KeyedOptimizerWrapper" in numbered


MATRIX = Path(__file__).parents[2] / ".matrix"
"""Other releases of TorchRec, a folder each, where there are any."""


def _under_our_plan(rank: Rank, folder: Path) -> tuple[dict[str, str], list[Any], list[Any]]:
    """The sharding of each table, and this rank's parts of weights and states."""
    kinds = {"cut": "row_wise", "whole": "column_wise"}
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=8) for name, kind in kinds.items()}
    planner = DreamShardPlanner(
        topology=Topology(2, "cpu"), batch_size=8, constraints=constraints, stats=[], debug=False, exact_training=False
    )
    sharder = EveryTypeSharder()
    plan = planner.collective_plan(plain_job.unsharded(), [sharder], dist.group.WORLD)
    model = DistributedModelParallel(plain_job.unsharded(), device=rank.device, plan=plan, sharders=[sharder])
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
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
    paths = [str(MATRIX / release)] if release != "installed" else []
    command = [sys.executable, str(Path(__file__).with_name("plain_job.py")), str(tmp_path / "saved")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    whole = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert all(states["momentum1"].any() for states in whole.values())
    for kinds, weights, sums in run_on_ranks(_under_our_plan, tmp_path / "saved", world_size=2):
        assert kinds == {"cut": "row_wise", "whole": "column_wise"} and weights and sums
        for key, (row, column), part in weights:
            own = whole[key]["weight"][row : row + len(part), column : column + part.shape[1]]
            torch.testing.assert_close(part, own, rtol=0, atol=0)
        for key, (start,), part in sums:  # of one slice of columns after the other
            own = whole[key]["momentum1"][start % plain_job.ROWS :][: len(part)]
            torch.testing.assert_close(part, own)
