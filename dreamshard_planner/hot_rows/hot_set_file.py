# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Files of hot rows, beside the files of plans."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from dreamshard_planner.errors import PlanError
from dreamshard_planner.hot_rows.hot_set import HotRows, hot_rows_of, replicate_hot_rows, rows_of
from dreamshard_planner.support.documents import STRICT, parsed
from dreamshard_planner.support.files import read_json, write_whole

SCHEMA = "dreamshard_planner.hot_rows/1"


@dataclass
class _Table:
    __pydantic_config__: ClassVar = STRICT
    rows: int
    ids: list[int]


@dataclass
class _Document:
    __pydantic_config__: ClassVar = STRICT
    vocabulary: str
    tables: dict[str, _Table]


def save_hot_rows(plan: ShardingPlan, path: str | Path, vocabulary: str = "") -> None:
    """Write the hot rows of a plan to a file, which replaces an existing one.

    Args:
        plan: with hot rows, or without any.
        path: of the file.
        vocabulary: name of the mapping from items to ids, such as the date of a vocabulary file.

    Raises:
        FileError: the file cannot be written.
    """
    tables = {name: {"rows": hot.table_rows, "ids": hot.ids.tolist()} for name, hot in hot_rows_of(plan)}
    write_whole(path, json.dumps({"schema": SCHEMA, "vocabulary": vocabulary, "tables": tables}))


def load_hot_rows(path: str | Path, plan: ShardingPlan, vocabulary: str = "") -> ShardingPlan:
    """Return a plan with the hot rows of a file.

    Args:
        path: of the file.
        plan: TorchRec's; stays as it is. Tables with hot rows in the file must be row_wise.
        vocabulary: name of the present mapping from items to ids, which must be that of the file.

    Raises:
        PlanError: the file cannot be read, or was made for another vocabulary or number of rows; or its tables are not
            in the plan.
    """
    document = read_json(path, PlanError)
    if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
        raise PlanError(f"{path}: not a file of hot rows of schema {SCHEMA!r}")
    found = parsed(_Document, document, path, PlanError)
    again = "Plan again with statistics of the present vocabulary."
    if found.vocabulary != vocabulary:
        raise PlanError(f"{path} was made for vocabulary {found.vocabulary!r}, this job has {vocabulary!r}. {again}")
    rows = {
        f"{module}.{name}".lstrip("."): rows_of(sharding)
        for module, tables in plan.plan.items()
        if isinstance(tables, EmbeddingModuleShardingPlan)
        for name, sharding in tables.items()
    }
    hot = {}
    for name, table in found.tables.items():
        if name in rows and rows[name] != table.rows:
            raise PlanError(
                f"{path} was made for {table.rows:,} rows of table {name!r}, this plan has {rows[name]:,}. {again}"
            )
        hot[name] = HotRows(torch.tensor(table.ids, dtype=torch.int64), table.rows).ids
    return replicate_hot_rows(plan, hot)
