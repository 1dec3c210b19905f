# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Drawn sets cover what planning meets; a collection survives whatever stops it."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.errors import DatasetError, TaskError
from dreamshard_planner.measure.collect import BATCH_SIZES, MAX_SET_WORK, GroupMix, collect, draw_sets, set_work
from dreamshard_planner.measure.kernels import Arena, check_group
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.workload.id_histogram import IdHistogram
from dreamshard_planner.workload.tables import FeatureStatistics, Table
from tests.faults import ended, start, wait_for

TABLES = [
    Table(f"t{i}", rows=100 * (i + 1), dim=(8, 16, 32)[i % 3], features=(FeatureStatistics(float(i % 7)),))
    for i in range(60)
]
SMALL_SETS = draw_sets(TABLES, 12, seed=1, batch_sizes=(4, 8), max_tables=5)
MANY_SETS = draw_sets(TABLES, 400, seed=2, batch_sizes=(4, 8), max_tables=5)


def run(sets: list, path: Path, **options) -> CostDataset:
    options = {"repeats": 2, "progress": False, "block": 2} | options
    return collect(sets, path, arena=Arena("cpu", size_bytes=4 << 20), **options)


def test_sets_cover_sizes_and_attributes() -> None:
    sets = draw_sets(TABLES, 600, seed=3, batch_sizes=(16, 64), max_work=1e12)
    sizes = [len(group) for group in sets]
    assert min(sizes) == 1 and max(sizes) > 30 and 0.1 < sizes.count(1) / 600 < 0.3
    for group in sets:
        check_group(group)
        assert len({workload.name for workload in group}) == len(group)
    firsts = [group[0] for group in sets]
    assert {w.batch_size for w in firsts} == {16, 64}
    assert {w.weight_bytes for w in firsts} == {2, 4}
    assert {w.optimizer for w in firsts} == {"sgd", "rowwise_adagrad", "adagrad"}
    assert 20 < sum(not w.pooled for w in firsts) < 90 and 20 < sum(w.weighted for w in firsts) < 90


def test_a_share_of_the_sets_has_one_dim_and_the_others_are_the_same_without() -> None:
    mixed, some, all_of_one = (draw_sets(TABLES, 400, seed=3, mix=GroupMix(one_dim=share)) for share in (0, 0.25, 1))
    same = [one for one, drawn in zip(mixed, some, strict=True) if one == drawn]
    assert same and all(drawn in (one, other) for one, drawn, other in zip(mixed, some, all_of_one, strict=True))
    several = [len({w.dim for w in group}) > 1 for group in mixed]
    of_one = [len({w.dim for w in drawn}) == 1 for drawn, counts in zip(some, several, strict=True) if counts]
    assert 0.2 < sum(of_one) / len(of_one) < 0.3 and sum(several) > 200
    assert all(len({w.dim for w in group}) == 1 for group in all_of_one)
    assert [group[0].batch_size for group in mixed] == [group[0].batch_size for group in some]


def test_a_collection_goes_on_whatever_else_a_pool_says_of_its_tables(tmp_path: Path) -> None:
    counted = FeatureStatistics(5.0, ids=IdHistogram.even(1000), batch_size=8)
    tables = [
        replace(table, features=(counted,), output_share=0.5, cache_load_factor=0.5, prefetched=True)
        for table in TABLES
    ]
    sets = draw_sets(tables, 3, seed=1, batch_sizes=(8,), max_tables=3)
    first = run(sets, tmp_path / "x.blocks")
    assert run(sets, tmp_path / "x.blocks").digest == first.digest


def test_sets_follow_the_seed() -> None:
    assert draw_sets(TABLES, 20, seed=3) == draw_sets(TABLES, 20, seed=3)
    assert draw_sets(TABLES, 20, seed=3) != draw_sets(TABLES, 20, seed=4)
    assert draw_sets(TABLES, 20, seed=3)[:10] == draw_sets(TABLES, 10, seed=3)


def test_sets_stay_within_their_work() -> None:
    sets = draw_sets(TABLES, 200, seed=3, batch_sizes=(64,), max_work=20_000)
    work = [set_work(group) for group in sets]
    assert max(work) <= 20_000
    assert 15_000 < sorted(work)[150] <= 20_000
    heavy = [Table("light", 100, 8, (FeatureStatistics(10.0),)), Table("heavy", 100, 8, (FeatureStatistics(90.0),))]
    for group in draw_sets(heavy, 20, seed=0, batch_sizes=(64,), max_work=1.0):
        assert [workload.name for workload in group] == ["light"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sets_fit_the_device(device: str) -> None:
    heavy = [Table(f"heavy {i}", 100, 64, (FeatureStatistics(16.0),)) for i in range(100)]
    sets = draw_sets(TABLES + heavy, 200, seed=3, max_tables=100, device=device)
    assert {w.batch_size for group in sets for w in group} == set(BATCH_SIZES[device])
    work = sorted(set_work(group) for group in sets if len(group) > 1)
    assert MAX_SET_WORK[device] / 2 < work[-1] <= MAX_SET_WORK[device]
    assert work[len(work) // 2] < MAX_SET_WORK[device] / 5  # few are as large: they would take most of the time


def test_work_of_a_set() -> None:
    (w,) = draw_sets(TABLES[4:5], 1, seed=0, batch_sizes=(10,), mix=GroupMix(sequence=0, weighted=0, fp16=0))[0]
    assert (w.lookups, w.dim, set_work([w]), set_work([w, w])) == (40.0, 16, 1280.0, 2560.0)
    assert set_work([replace(w, pooled=False)]) == 12800.0
    assert set_work([replace(w, weighted=True, weight_bytes=2)]) == pytest.approx(1280 * 3.2)


def test_mix_decides_the_attributes() -> None:
    plain = GroupMix(sequence=0, weighted=0, fp16=0, rowwise_adagrad=1, adagrad=0)
    for w, *_ in draw_sets(TABLES, 50, seed=0, mix=plain):
        assert (w.pooled, w.weighted, w.weight_bytes, w.optimizer) == (True, False, 4, "rowwise_adagrad")
    with pytest.raises(TaskError, match="fp16.*1.5"):
        GroupMix(fp16=1.5)
    with pytest.raises(TaskError, match="exceed 1: 0.8 and 0.3"):
        GroupMix(rowwise_adagrad=0.8)
    with pytest.raises(TaskError, match="0 tables"):
        draw_sets([], 1, seed=0)


def test_collect_measures_every_set_and_resumes(tmp_path: Path) -> None:
    data = run(SMALL_SETS[:5], tmp_path / "sets.blocks")
    assert data.sets == SMALL_SETS[:5]
    assert data.samples_ms.shape == data.reference_ms.shape == (5, 2, 2)
    more = run(SMALL_SETS, tmp_path / "sets.blocks")
    assert more.sets == SMALL_SETS
    assert np.array_equal(more.samples_ms[:5], data.samples_ms)
    assert run(SMALL_SETS, tmp_path / "sets.blocks").digest == more.digest


def test_collect_stops_after_its_seconds(tmp_path: Path) -> None:
    for held in (3, 6):  # a block at least, or no call would ever get further
        assert len(run(SMALL_SETS, tmp_path / "sets.blocks", seconds=1e-9, block=3)) == held
    assert len(run(SMALL_SETS, tmp_path / "sets.blocks", seconds=0.0)) == 6
    with pytest.raises(DatasetError, match="nothing was measured yet"):
        run(SMALL_SETS, tmp_path / "another", seconds=0.0)


def test_collect_refuses_other_sets_and_repeats(tmp_path: Path) -> None:
    run(SMALL_SETS[:4], tmp_path / "sets.blocks")
    for other in (SMALL_SETS[1:], SMALL_SETS[:3]):
        with pytest.raises(DatasetError, match="blocks: its 4 sets are not all among the"):
            run(other, tmp_path / "sets.blocks")
    with pytest.raises(DatasetError, match="holds 2 repeats of each set, asked for 3"):
        run(SMALL_SETS, tmp_path / "sets.blocks", repeats=3)
    with pytest.raises(DatasetError, match="'threads': 1.*'threads': 2"):
        run(SMALL_SETS, tmp_path / "sets.blocks", threads=2)


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(SMALL_SETS[:2], tmp_path / "sets.blocks", progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "sets/s" in captured.err and "spread of repeats" in captured.err


def recorded(folder: Path) -> int:
    return sum(len(CostDataset.load(path)) for path in folder.glob("rank0-*.npz"))


def test_sigkill_at_random_moments_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    """Real processes, really killed."""
    folder, moments, held = tmp_path / "sets.blocks", random.Random(0), 0
    for _ in range(10):
        process = start(partial(run, block=1), MANY_SETS, folder)
        wait_for(lambda held=held: recorded(folder) > held, process)
        time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        assert ended(process) == [-signal.SIGKILL]
        assert recorded(folder) > held
        held = recorded(folder)
    data = run(MANY_SETS, folder)
    assert data.sets == MANY_SETS


def test_a_damaged_block_is_named_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "sets.blocks"
    run(SMALL_SETS[:4], folder)
    path = folder / "rank0-1.npz"
    path.write_bytes(damaged := path.read_bytes()[:-9])
    with pytest.raises(DatasetError, match="rank0-1.npz: not a readable"):
        run(SMALL_SETS, folder)
    assert path.read_bytes() == damaged
    path.unlink()  # its two sets are measured again
    assert run(SMALL_SETS, folder).sets == SMALL_SETS


def test_a_folder_has_one_collection_at_a_time_and_one_seed(tmp_path: Path) -> None:
    folder = tmp_path / "sets.blocks"
    run(SMALL_SETS[:2], folder)
    with open_locked(folder / "rank0.lock"), pytest.raises(DatasetError, match="another process"):
        run(SMALL_SETS, folder)
    with pytest.raises(DatasetError, match="seed 0, asked for 5"):
        run(SMALL_SETS, folder, seed=5)
