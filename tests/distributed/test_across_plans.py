# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A checkpoint loads under every other plan of its tables, and training goes on as if nothing had been moved."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixed import TableSpec
from moves import (
    OPTIMIZERS,
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

from dreamshard_planner import SavedPlan
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
POOLED_KINDS = tuple(sorted({sharding.kind for sharding in POOLED}))
SEQUENCE_KINDS = tuple(sorted({sharding.kind for sharding in SEQUENCE}))
TABLES = {
    "bags": {f"bag{number}": TableSpec(9 + 2 * number, DIM) for number in range(len(POOLED))},
    "sequence": {f"sequence{number}": TableSpec(11 + number, DIM) for number in range(len(SEQUENCE))},
}


def _turned(turn: int, optimizer: str, **settings: Any) -> Moving:
    """Every table in the next sharding: so many turns try every pair of them."""
    plan = {f"bag{number}": POOLED[(number + turn) % len(POOLED)] for number in range(len(POOLED))}
    plan |= {f"sequence{number}": SEQUENCE[(number + turn) % len(SEQUENCE)] for number in range(len(SEQUENCE))}
    return Moving(TABLES, plan, optimizer, hosts=2, **settings)


def _table(rank: Rank, optimizer: str, folder: Path) -> list[Result]:
    unmoved = train_and_save(rank, _turned(0, optimizer), folder)
    moved = [load_and_train(rank, _turned(turn, optimizer), folder) for turn in range(len(POOLED))]
    return [unmoved, *moved]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_sharding_type_to_every_other(optimizer: str, tmp_path: Path) -> None:
    unmoved, *moved = run_on_ranks(_table, optimizer, tmp_path / "saved", world_size=2)[0]
    before = _turned(0, optimizer)
    check(unmoved, reference(before, before))
    for turn, result in enumerate(moved):
        after = _turned(turn, optimizer)
        check(result, reference(before, after))
        if trains_alike(optimizer, before, after):
            assert result.losses == pytest.approx(unmoved.losses[-len(result.losses) :], rel=1e-5), turn


def check(result: Result, expected: Result) -> None:
    assert result.losses == pytest.approx(expected.losses[-len(result.losses) :], rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            result.weights[name], weight, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}"
        )


def _converted(rank: Rank, before: Moving, after: Moving, folder: Path) -> Result:
    train_and_save(rank, before, folder / "saved")
    if rank.rank == 0:
        plan_file(after, folder / "plan.json")
        convert(folder / "saved", folder / "converted", SavedPlan.load(folder / "plan.json"))
    dist.barrier()
    replicated = any(sharding.kind == "data_parallel" for sharding in after.plan.values())
    return load_and_train(rank, after, folder / "converted", plain=not replicated)


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adagrad"])
def test_a_converted_checkpoint_needs_nothing_of_ours(optimizer: str, tmp_path: Path) -> None:
    """But for tables whose own optimizer has other names."""
    before, after = _turned(0, optimizer), _turned(4, optimizer)
    plan = {name: Sharding("row_wise") if s.kind == "data_parallel" else s for name, s in after.plan.items()}
    for number, moving in enumerate((replace(after, plan=plan), after)):
        (tmp_path / str(number)).mkdir()
        check(
            run_on_ranks(_converted, before, moving, tmp_path / str(number), world_size=2)[0], reference(before, moving)
        )


@pytest.mark.parametrize(("before_ranks", "after_ranks"), [(4, 2), (2, 3)])
def test_other_numbers_of_ranks(before_ranks: int, after_ranks: int, tmp_path: Path) -> None:
    before, after = (_random(seed, ranks, "row_wise_adagrad") for seed, ranks in ((1, before_ranks), (2, after_ranks)))
    folder = tmp_path / "saved"
    check(run_on_ranks(train_and_save, before, folder, False, world_size=before_ranks)[0], reference(before, before))
    check(run_on_ranks(load_and_train, after, folder, world_size=after_ranks)[0], reference(before, after))


def _random(seed: int, ranks: int, optimizer: str, tables: Any = TABLES) -> Moving:
    """A random plan."""
    generator = random.Random(f"{seed} {ranks}")
    hosts, plan = generator.choice([h for h in (1, 2) if ranks % h == 0]), {}
    for module, specs in tables.items():
        widths = generator.choice([(8, 8), (4, 4, 4, 4)])  # those of a sequence module must be equal
        for name in specs:
            kinds = SEQUENCE_KINDS if module == "sequence" else POOLED_KINDS
            kind = generator.choice(kinds)
            if kind == "column_wise":
                own = widths if module == "sequence" else generator.choice([(8, 8), (4, 4, 4, 4), (4, 12), (8, 4, 4)])
                plan[name] = Sharding(kind, tuple(generator.randrange(ranks) for _ in own), own)
            elif kind == "grid_shard":
                plan[name] = Sharding(kind, tuple(generator.choices(range(hosts), k=2)), (8, 8))
            elif kind in ("table_wise", "table_row_wise"):
                plan[name] = Sharding(kind, (generator.randrange(ranks if kind == "table_wise" else hosts),))
            else:
                plan[name] = Sharding(kind)
    return Moving(tables, plan, optimizer, hosts=hosts, ranks=ranks)
