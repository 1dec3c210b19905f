# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A checkpoint loads under every other plan of its tables, and training goes on as if nothing had been moved.

``pytest tests/distributed/test_moved_training.py --pairs 200`` tries more pairs of random plans of random models.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import TableSpec
from moves import (
    OPTIMIZERS,
    STEPS,
    Job,
    Moving,
    Result,
    Sharding,
    load_and_train,
    plan_file,
    reference,
    train_and_save,
    trains_alike,
)
from ranks import Rank, run_on_ranks

from dreamshard_planner import CheckpointError, SavedPlan, load_across_plans
from dreamshard_planner.across_plans.convert import convert

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


def turned(turn: int, optimizer: str, **settings: Any) -> Moving:
    """Every table in the next sharding: so many turns try every pair of them."""
    plan = {f"bag{number}": POOLED[(number + turn) % len(POOLED)] for number in range(len(POOLED))}
    plan |= {f"sequence{number}": SEQUENCE[(number + turn) % len(SEQUENCE)] for number in range(len(SEQUENCE))}
    return Moving(TABLES, plan, optimizer, hosts=2, **settings)


def check(result: Result, expected: Result, atol: float = 1e-5) -> None:
    """Losses since the move, to rounding of a loss of 1, and the weights in the end."""
    assert result.losses == pytest.approx(expected.losses[-len(result.losses) :], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(result.weights, expected.weights, rtol=1e-4, atol=atol)


def _every_turn(rank: Rank, folder: Path) -> dict[str, list[Result]]:
    results = {}
    for optimizer in OPTIMIZERS:
        results[optimizer] = [train_and_save(rank, turned(0, optimizer), folder / optimizer)]
        for turn in range(len(POOLED)):
            results[optimizer].append(load_and_train(rank, turned(turn, optimizer), folder / optimizer))
    return results


def test_every_sharding_type_to_every_other(tmp_path: Path) -> None:
    for optimizer, (unmoved, *moved) in run_on_ranks(_every_turn, tmp_path, world_size=2)[0].items():
        before = turned(0, optimizer)
        check(unmoved, reference(before, before))
        for turn, result in enumerate(moved):
            after = turned(turn, optimizer)
            check(result, reference(before, after))
            if trains_alike(optimizer, before, after):
                assert result.losses == pytest.approx(unmoved.losses[STEPS:], rel=1e-5), (optimizer, turn)


def _attached_and_not(rank: Rank, folder: Path) -> dict[str, list[Result]]:
    """From attached replicas to other shardings, and to replicas that the script's own optimizer trains."""
    results = {}
    for optimizer in OPTIMIZERS:
        results[optimizer] = [train_and_save(rank, turned(0, optimizer, attached=True), folder / optimizer, False)]
        for turn, attached in ((0, True), (4, True), (0, False)):
            moving = turned(turn, optimizer, attached=attached)
            results[optimizer].append(load_and_train(rank, moving, folder / optimizer))
    return results


def test_replicas_with_attached_optimizers_move_like_all_else(tmp_path: Path) -> None:
    for optimizer, (unmoved, *moved) in run_on_ranks(_attached_and_not, tmp_path, world_size=2)[0].items():
        before = turned(0, optimizer)
        check(unmoved, reference(before, before))
        for turn, result in zip((0, 4, 0), moved, strict=True):
            check(result, reference(before, turned(turn, optimizer)))


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


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    """4 to 2 to 3."""
    first, second, third = (random_plan(1, ranks, "row_wise_adagrad", random_tables(2)) for ranks in (4, 2, 3))
    unmoved = run_on_ranks(train_and_save, first, tmp_path / "4", False, world_size=4)[0]
    check(unmoved, reference(first, first))
    moved = run_on_ranks(_move_and_save, second, tmp_path / "4", tmp_path / "2", world_size=2)[0]
    check(moved, reference(first, second))
    check(run_on_ranks(load_and_train, third, tmp_path / "2", world_size=3)[0], reference(first, second, third))


def _move_and_save(rank: Rank, moving: Moving, source: Path, target: Path) -> Result:
    job = Job(moving, rank)
    job.load(source)
    job.save(target, plain=True)
    return load_and_train(rank, moving, source)


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
            # Adagrad makes a whole step of a gradient that is but rounding: of single weights whose state is near 0.
            check(result, reference(before, after), atol=5e-4 if before.optimizer == "adagrad" else 1e-5)


def _convert(rank: Rank, pairs: list[tuple[Moving, Moving]], folder: Path) -> list[Result]:
    results = []
    for number, (before, after) in enumerate(pairs):
        own = folder / str(number)
        train_and_save(rank, before, own / "saved", go_on=False)
        if rank.rank == 0:
            plan_file(after, own / "plan.json")
            convert(own / "saved", own / "converted", SavedPlan.load(own / "plan.json"))
        dist.barrier()
        replicated = any(sharding.kind == "data_parallel" for sharding in after.plan.values())
        results.append(load_and_train(rank, after, own / "converted", plain=not replicated))
    return results


def test_a_converted_checkpoint_needs_nothing_of_ours(tmp_path: Path) -> None:
    """But for tables whose own optimizer has other names."""
    pairs = []
    for optimizer, turn in (("row_wise_adagrad", 4), ("adagrad", 1)):
        before, after = turned(0, optimizer), turned(turn, optimizer)
        plan = {name: POOLED[3] if own.kind == "data_parallel" else own for name, own in after.plan.items()}
        pairs += [(before, after), (before, replace(after, plan=plan))]
    results = run_on_ranks(_convert, pairs, tmp_path, world_size=2)[0]
    for (before, after), result in zip(pairs, results, strict=True):
        check(result, reference(before, after))


def _refused(job: Job, folder: Path, state: dict[str, Any] | None = None, **consent: Any) -> str:
    state = job.state() if state is None else state
    state["model"] = {key: value for key, value in state["model"].items() if not key.startswith("top")}
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


@pytest.mark.parametrize("release", ["installed", "1.6.1", "1.7.0", "1.9.2"])
def test_checkpoints_of_jobs_without_this_package(release: str, tmp_path: Path) -> None:
    if release != "installed" and not (MATRIX / release).is_dir():
        pytest.skip(f"no TorchRec {release} in {MATRIX}")
    paths = [str(MATRIX / release)] if release != "installed" else []
    command = [sys.executable, str(Path(__file__).with_name("plain_job.py")), str(tmp_path / "saved")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    whole = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert all(states["momentum1"].any() for states in whole.values())
    sums = {f"dense.{key}": {"sum": torch.zeros(len(states["weight"]), 1)} for key, states in whole.items()}
    weights = {key: torch.zeros_like(states["weight"]) for key, states in whole.items()}
    state = {"model": weights, "optimizer": {"state": sums}}
    load_across_plans(state, tmp_path / "saved")
    for key, states in whole.items():
        torch.testing.assert_close(weights[key], states["weight"])
        torch.testing.assert_close(sums[f"dense.{key}"]["sum"][:, 0], states["momentum1"])
