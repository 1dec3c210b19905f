# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows in files belong to a vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

from dreamshard_planner import PlanError, load_hot_rows, save_hot_rows
from dreamshard_planner.hot_rows.hot_set import hot_rows_of, replicate_hot_rows
from tests.hot_rows.zipf import sequence_model

HOT = {"ec.t0": torch.tensor([7, 1, 90]), "ec.t1": torch.tensor([0])}


def _plan(rows: int, by_rows: bool = True) -> ShardingPlan:
    sharder, how = EmbeddingCollectionSharder(), {"t0": row_wise(), "t1": row_wise() if by_rows else table_wise(rank=1)}
    module = sequence_model(rows, 4).ec
    made = construct_module_sharding_plan(module, how, sharder, local_size=2, world_size=2, device_type="cpu")
    return ShardingPlan({"ec": made})


def test_hot_rows_are_read_as_they_were_saved(tmp_path: Path) -> None:
    path, plan = tmp_path / "hot.json", replicate_hot_rows(_plan(100), HOT)
    save_hot_rows(plan, path, vocabulary="november")
    assert dict(hot_rows_of(load_hot_rows(path, _plan(100), vocabulary="november"))) == dict(hot_rows_of(plan))


def test_a_file_for_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    save_hot_rows(replicate_hot_rows(_plan(100), HOT), path)
    refused = {
        "made for 100 rows of table 'ec.t0', this plan has 120. Plan again": lambda: load_hot_rows(path, _plan(120)),
        "for vocabulary '', this job has 'december'. Plan": lambda: load_hot_rows(path, _plan(100), "december"),
        "'t1' is table_wise": lambda: load_hot_rows(path, _plan(100, by_rows=False)),
        "the plan lacks: ec.t0, ec.t1": lambda: load_hot_rows(path, ShardingPlan({})),
    }
    for text, load in refused.items():
        with pytest.raises(PlanError, match=text):
            load()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", "not a file of hot rows of schema"),
        ('{"schema": "dreamshard_planner.hot_rows/1", "vocabulary": "", "tables": {"ec.t0": {"rows": 100}}}', "'ids'"),
        (
            '{"schema": "dreamshard_planner.hot_rows/1", "vocabulary": "", '
            '"tables": {"ec.t0": {"rows": 100, "ids": [100]}}}',
            "got ids from 100 to 100",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "hot.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=error):
        load_hot_rows(path, _plan(100))
