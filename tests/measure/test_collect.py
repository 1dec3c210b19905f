# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A collection of measured sets survives whatever stops it."""

from pathlib import Path

import numpy as np
import pytest

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.errors import DatasetError, FileError
from dreamshard_planner.measure.collect import collect
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import draw_sets
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.workload.tables import FeatureStatistics, Table

TABLES = [
    Table(f"t{i}", rows=100 * (i + 1), dim=(8, 16, 32)[i % 3], features=(FeatureStatistics(float(i % 7)),))
    for i in range(60)
]
SMALL_SETS = draw_sets(TABLES, 12, seed=1, batch_sizes=(4, 8), max_tables=5)


def run(sets: list, path: Path, **options) -> CostDataset:
    options = {"repeats": 2, "progress": False, "block": 2} | options
    return collect(sets, path, arena=Arena("cpu", size_bytes=4 << 20), **options)


def test_collect_measures_every_set_and_resumes(tmp_path: Path) -> None:
    data = run(SMALL_SETS[:5], tmp_path / "sets.blocks")
    assert data.sets == SMALL_SETS[:5]
    assert data.samples_ms.shape == data.reference_ms.shape == (5, 2, 2)
    more = run(SMALL_SETS, tmp_path / "sets.blocks")
    assert more.sets == SMALL_SETS
    assert np.array_equal(more.samples_ms[:4], data.samples_ms[:4])  # whole blocks
    assert run(SMALL_SETS, tmp_path / "sets.blocks").digest == more.digest


def test_collect_stops_after_its_seconds(tmp_path: Path) -> None:
    for held in (3, 6):  # a block at least, or no call would ever get further
        assert len(run(SMALL_SETS, tmp_path / "sets.blocks", seconds=1e-9, block=3)) == held
    assert len(run(SMALL_SETS, tmp_path / "sets.blocks", seconds=0.0, block=3)) == 6
    with pytest.raises(DatasetError, match="nothing was measured yet"):
        run(SMALL_SETS, tmp_path / "another", seconds=0.0)


def test_collect_refuses_other_sets_and_repeats(tmp_path: Path) -> None:
    run(SMALL_SETS[:4], tmp_path / "sets.blocks")
    for other in (SMALL_SETS[1:], SMALL_SETS[:3]):
        with pytest.raises(DatasetError, match=r"block-\d.npz: its sets are not those asked for"):
            run(other, tmp_path / "sets.blocks")
    with pytest.raises(DatasetError, match="holds 2 repeats of each set, asked for 3"):
        run(SMALL_SETS, tmp_path / "sets.blocks", repeats=3)
    with pytest.raises(DatasetError, match="'threads': 1.*'threads': 2"):
        run(SMALL_SETS, tmp_path / "sets.blocks", threads=2)


def test_a_damaged_block_is_named_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "sets.blocks"
    run(SMALL_SETS[:4], folder)
    path = folder / "block-1.npz"
    path.write_bytes(damaged := path.read_bytes()[:-9])
    with pytest.raises(DatasetError, match="block-1.npz: not a readable"):
        run(SMALL_SETS, folder)
    assert path.read_bytes() == damaged
    path.unlink()  # its two sets are measured again
    assert run(SMALL_SETS, folder).sets == SMALL_SETS


def test_a_folder_has_one_collection_at_a_time_and_one_seed(tmp_path: Path) -> None:
    folder = tmp_path / "sets.blocks"
    run(SMALL_SETS[:2], folder)
    with open_locked(folder / "lock"), pytest.raises(FileError, match="another process"):
        run(SMALL_SETS, folder)
    with pytest.raises(DatasetError, match="seed 0, asked for 5"):
        run(SMALL_SETS, folder, seed=5)
