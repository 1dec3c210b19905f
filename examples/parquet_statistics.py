# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Count how features read their tables in parquet files, and plan with it: python examples/parquet_statistics.py

Needs pyarrow: pip install 'dreamshard_planner[parquet]'.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dreamshard_planner import TableStatistics
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline import Job, OfflineModel, TableSpec

BATCH_SIZE = 2048
ROWS = {"user": 1_000_000, "clicks": 200_000, "brand": 5_000}


def write_day(path: Path, samples: int, seed: int) -> None:
    """Stand-in for your data: a list column for each feature, ids of a few rows far more often than others."""
    random = np.random.default_rng(seed)
    columns = {}
    for name, mean in (("user", 1), ("clicks", 20), ("brand", 3)):
        lengths = random.poisson(mean, samples) if mean > 1 else np.ones(samples, int)
        ids = random.zipf(1.3, lengths.sum()) % ROWS[name]
        offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype("int32"))
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(ids))
    pq.write_table(pa.table(columns), path)


def main(folder: Path) -> None:
    for day in range(2):
        write_day(folder / f"day{day}.parquet", samples=4 * BATCH_SIZE, seed=day)
    monday, tuesday = (TableStatistics.from_parquet(folder / f"day{day}.parquet", BATCH_SIZE) for day in range(2))
    print(monday.diff(tuesday))  # what drifted
    statistics = TableStatistics.merge([monday, tuesday])
    statistics.to_json(folder / "statistics.json")  # for dreamshard plan --statistics

    tables = [TableSpec(name=name, num_embeddings=rows, embedding_dim=64) for name, rows in ROWS.items()]
    model = OfflineModel.of_specs(tables, statistics=statistics)
    planner = Job(model=model, machine=Machine(ranks_per_host=4, gpu="a100-40"), batch_size=BATCH_SIZE).plan()
    print(planner.report())
    for name, feature in statistics.items():
        print(f"{name}: {feature.pooling_factor:.1f} lookups per sample, {feature.distinct_rows:.0f} rows a batch")


if __name__ == "__main__":
    main(Path(mkdtemp()))
