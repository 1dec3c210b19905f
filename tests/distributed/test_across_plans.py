# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A checkpoint loads under every other plan of its tables, and training goes on as if nothing had been moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixed import TableSpec
from moves import (
    OPTIMIZERS,
    Moving,
    Result,
    Sharding,
    load_and_train,
    reference,
    train_and_save,
    trains_alike,
)
from ranks import Rank, run_on_ranks

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
