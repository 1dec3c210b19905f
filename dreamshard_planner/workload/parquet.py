# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Count parquet files, one batch in memory at a time; the only module that needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.support.formatting import checked, progress_bar
from dreamshard_planner.support.reproducible import neutral
from dreamshard_planner.workload.counting import FeatureCounts
from dreamshard_planner.workload.lookups import FeatureStatistics

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as missing:
    raise StatisticsError(
        f"reading parquet files needs pyarrow ({missing}): pip install 'dreamshard_planner[parquet]'"
    ) from missing

LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def count_parquet(
    paths: str | Path | Sequence[str | Path],
    batch_size: int,
    features: Sequence[str] | Mapping[str, str] | None = None,
    max_batches: int | None = None,
    progress: bool = False,
) -> dict[str, FeatureStatistics]:
    """Count files, see :meth:`~dreamshard_planner.workload.statistics.TableStatistics.from_parquet`."""
    for name, count in (("batch_size", batch_size), ("max_batches", 1 if max_batches is None else max_batches)):
        checked(name, count, error=StatisticsError)
    files = [_opened(path) for path in _files(paths)]
    names = _columns(*files[0], features)
    for path, file in files:
        _columns(path, file, names)
    rows = sum(file.metadata.num_rows for _, file in files)
    total = max(1, rows // batch_size)
    total = total if max_batches is None else min(total, max_batches)
    counts = {name: FeatureCounts(name) for name in names}
    with progress_bar("counting batches", total, progress) as advance:
        for table in islice(_batches(files, sorted(set(names.values())), batch_size), max_batches):
            with neutral():
                for name, column in names.items():
                    counts[name].add(_ids(table.column(column)), table.num_rows)
            advance("")
    with neutral():
        return {name: count.statistics() for name, count in counts.items()}


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    given = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    found = [file for path in given for file in (sorted(path.glob("*.parquet")) if path.is_dir() else [path])]
    if not found:
        raise StatisticsError(f"no .parquet file in {', '.join(map(str, given)) or 'an empty list'}")
    return found


def _opened(path: Path) -> tuple[Path, pq.ParquetFile]:
    try:
        return path, pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise StatisticsError(f"{path}: no parquet file that can be read ({str(error).splitlines()[0]})") from error


def _columns(path: Path, file: pq.ParquetFile, features: Sequence[str] | Mapping[str, str] | None) -> dict[str, str]:
    """Return the columns of a file by feature name, checked."""
    schema = file.schema_arrow
    types = dict(zip(schema.names, schema.types, strict=True))
    if features is None:
        found = {name: name for name, kind in types.items() if _is_ids(kind, lists_only=True)}
        if not found:
            raise StatisticsError(f"{path}: no column is a list of whole numbers; name some of {list(types)}")
        return found
    if isinstance(features, str) or not features:
        raise StatisticsError(f"features must be some names of columns, got {features!r}")
    names = dict(features) if isinstance(features, Mapping) else {name: name for name in features}
    for name, column in names.items():
        if column not in types:
            raise StatisticsError(f"{path}: has no column {column!r} of feature {name!r}; there are {list(types)}")
        if not _is_ids(types[column]):
            raise StatisticsError(f"{path}: column {column!r} holds {types[column]}, and ids are whole numbers")
    return names


def columns_left_out(paths: str | Path | Sequence[str | Path]) -> list[str]:
    """Return columns of the first file with one whole number per sample: ids, labels or times, counted if named."""
    _, file = _opened(_files(paths)[0])
    schema = file.schema_arrow
    return [name for name, kind in zip(schema.names, schema.types, strict=True) if pa.types.is_integer(kind)]


def _is_ids(kind: pa.DataType, lists_only: bool = False) -> bool:
    if any(is_list(kind) for is_list in LISTS):
        return pa.types.is_integer(kind.value_type)
    return not lists_only and pa.types.is_integer(kind)


def _batches(
    files: Sequence[tuple[Path, pq.ParquetFile]], columns: Sequence[str], batch_size: int
) -> Iterator[pa.Table]:
    """Yield batches of exactly this many rows, across row groups and files; a smaller one only if it is the first."""
    pending = made = None
    for path, file in files:
        try:
            for part in file.iter_batches(batch_size=batch_size, columns=list(columns)):
                table = pa.Table.from_batches([part])
                # Files may differ in the width of integers.
                pending = pa.concat_tables([pending, table] if pending else [table], promote_options="permissive")
                if pending.num_rows >= batch_size:
                    made = pending.slice(0, batch_size)
                    pending = pending.slice(batch_size)
                    yield made
        except (OSError, pa.ArrowException) as error:
            raise StatisticsError(f"{path}: cannot be read to its end ({str(error).splitlines()[0]})") from error
    if made is None and pending is not None:
        yield pending


def _ids(column: pa.ChunkedArray) -> torch.Tensor:
    """Return all ids of a column, without nulls."""
    values = column.combine_chunks()
    values = values.flatten() if any(is_list(values.type) for is_list in LISTS) else values
    return torch.from_numpy(np.array(values.drop_null()))
