# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Describe a checkpoint: tables, cuts and optimizer states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dreamshard_planner.across_plans.layout import saved_tables
from dreamshard_planner.across_plans.reading import BoundedReader


def describe(path: str | Path) -> dict[str, Any]:
    """Return the tables of a checkpoint, with their cuts and the sizes of their states, and the keys of all else.

    Raises:
        CheckpointError: the folder holds no checkpoint, or a damaged one.
    """
    metadata = BoundedReader(path).read_metadata()
    sizes: Counter[str] = Counter()
    others, tables = set(metadata.state_dict_metadata), {}
    for index, stored in metadata.storage_data.items():
        sizes[index.fqn] += stored.length
    for _, table in sorted(saved_tables(metadata).items()):
        keys = {table.key, *table.states.values()}
        others -= keys
        tables[table.name] = {
            "rows": table.entry.size[0],
            "dim": table.entry.size[1],
            "data_type": str(table.entry.properties.dtype).removeprefix("torch."),
            "column_slices": [width for _, width in table.slices],
            "row_blocks": len({part.offsets[0] for part in table.entry.chunks}),
            "states": {name: list(entry.size) for name, entry in table.state_entries.items()},
            "bytes": sum(sizes[key] for key in keys),
        }
    return {"tables": tables, "others": sorted(others), "bytes": sum(sizes.values())}
