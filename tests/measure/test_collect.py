# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sets of tables: drawn over all kinds, and measured in blocks that continue."""

from pathlib import Path

import numpy as np
import pytest
from torchrec.distributed.planner import Topology

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.roofline import CPU_DENSE_PASSES, FRESH_BYTES, dense_ms
from dreamshard_planner.errors import DatasetError, DreamShardError, FileError, TaskError
from dreamshard_planner.measure import sets
from dreamshard_planner.measure.collectives import local_ranks
from dreamshard_planner.measure.kernels import Arena, check_group
from dreamshard_planner.measure.sets import BATCH_SIZES, MAX_SET_WORK, collect, draw_sets, set_work
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Table

WHOLE = [
    Table(f"t{i}", rows=100 * (i + 1), dim=(8, 16, 32)[i % 3], features=(FeatureStatistics(float(i % 7)),))
    for i in range(60)
]
SMALL_SETS = draw_sets(WHOLE, 12, seed=1, batch_sizes=(4, 8), max_tables=5)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "BLOCK", 2)


def run(some: list, path: Path, **options) -> CostDataset:
    options = {"repeats": 2, "progress": False} | options
    return collect(some, path, arena=Arena("cpu", size_bytes=4 << 20), **options)


def test_collect_measures_every_set_and_resumes(tmp_path: Path) -> None:
    data = run(SMALL_SETS[:5], tmp_path / "sets.blocks")
    assert data.sets == SMALL_SETS[:5]
    assert data.samples_ms.shape == data.reference_ms.shape == (5, 2, 2)
    more = run(SMALL_SETS, tmp_path / "sets.blocks")
    assert more.sets == SMALL_SETS
    assert np.array_equal(more.samples_ms[:4], data.samples_ms[:4])  # whole blocks
    assert run(SMALL_SETS, tmp_path / "sets.blocks").digest == more.digest


def test_collect_stops_after_its_seconds(tmp_path: Path) -> None:
    for held in (2, 4):  # a block at least, or no call would ever get further
        assert len(run(SMALL_SETS, tmp_path / "sets.blocks", seconds=1e-9)) == held
    assert len(run(SMALL_SETS, tmp_path / "sets.blocks", seconds=0.0)) == 4
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


def test_sets_cover_sizes_and_attributes() -> None:
    sets = draw_sets(WHOLE, 600, seed=3, batch_sizes=(16, 64), max_work=1e12)
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
    several = [group for group in sets if len(group) > 2 and group[0].pooled]
    assert 0.2 < sum(len({w.dim for w in group}) == 1 for group in several) / len(several) < 0.4
    assert {w.optimizer for group in draw_sets(WHOLE, 50, 0, optimizer="adagrad") for w in group} == {"adagrad"}
    with pytest.raises(TaskError, match="0 tables"):
        draw_sets([], 1, seed=0)


def test_sets_follow_the_seed_and_begin_alike() -> None:
    one, same, other = (draw_sets(WHOLE, 20, seed, shard_share=0.25) for seed in (3, 3, 4))
    assert one == same != other and draw_sets(WHOLE, 10, 3, shard_share=0.25) == one[:10]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sets_stay_within_their_work(device: str) -> None:
    sets = draw_sets(WHOLE, 200, seed=3, batch_sizes=(64,), max_work=20_000, device=device)
    work = sorted(map(set_work, sets))
    assert 15_000 < work[150] <= work[-1] <= 20_000
    tables = [Table("light", 100, 8, (FeatureStatistics(10.0),)), Table("heavy", 100, 8, (FeatureStatistics(90.0),))]
    for group in draw_sets(tables, 20, seed=0, batch_sizes=(64,), max_work=1.0, device=device):
        assert [workload.name for workload in group] == ["light"]
    heavy = [Table(f"heavy {i}", 100, 64, (FeatureStatistics(16.0),)) for i in range(100)]
    sets = draw_sets(WHOLE + heavy, 200, seed=3, max_tables=100, device=device)
    assert {w.batch_size for group in sets for w in group} == set(BATCH_SIZES[device])
    work = sorted(set_work(group) for group in sets if len(group) > 1)
    assert MAX_SET_WORK[device] / 2 < work[-1] <= MAX_SET_WORK[device]
    assert work[len(work) // 2] < MAX_SET_WORK[device] / 5  # few are as large: they would take most of the time
    cut = draw_sets(WHOLE, 60, 3, (256,), max_work=2e5, device=device, shard_share=1)
    assert all(set_work(group) <= 2e5 or len(group) == 1 for group in cut)


def test_a_share_of_all_sets_is_of_shards() -> None:
    sizes = {table.name: (table.rows, table.dim) for table in WHOLE}
    sets = draw_sets(WHOLE, 100, 3, (256,), shard_share=0.25)
    whole = [all((shard.rows, shard.dim) == sizes[shard.name] for shard in group) for group in sets]
    assert whole[0] and whole.count(False) == pytest.approx(25, abs=3)
    with pytest.raises(TaskError, match="between 0 and 1, got 2"):
        draw_sets(WHOLE, 7, 3, shard_share=2)


def test_large_gradients_cost_more_per_element_on_cpu() -> None:
    half, cpu = FRESH_BYTES / OUTPUT_BYTES / 2, Topology(2, "cpu")
    nothing, small, large = (dense_ms(elements, CPU_DENSE_PASSES, cpu) for elements in (0, half, 2 * half))
    assert nothing == 0 and large > 4 * small > 0
    assert dense_ms(half, 7, Topology(2, "cuda", hbm_mem_bw=1e9)) == pytest.approx(7 * 4 * half / 1e9)


def test_starting_without_torchrun_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(DreamShardError, match="torchrun has to start this.*--nproc_per_node"):
        local_ranks()
