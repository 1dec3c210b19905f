# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sets of tables: drawn over all kinds, and measured in blocks that continue. Cost datasets keep everything, and refuse
whatever is not whole.

Shape letters: N sets, R repeats.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
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
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Table, Workload

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


def test_a_folder_has_one_collection_at_a_time_of_the_same_sets_repeats_and_seed(tmp_path: Path) -> None:
    run(SMALL_SETS[:4], tmp_path / "sets.blocks")
    for other in (SMALL_SETS[1:], SMALL_SETS[:3]):
        with pytest.raises(DatasetError, match=r"block-\d.npz: its sets are not those asked for"):
            run(other, tmp_path / "sets.blocks")
    with pytest.raises(DatasetError, match="holds 2 repeats of each set, asked for 3"):
        run(SMALL_SETS, tmp_path / "sets.blocks", repeats=3)
    with pytest.raises(DatasetError, match="'threads': 1.*'threads': 2"):
        run(SMALL_SETS, tmp_path / "sets.blocks", threads=2)
    with pytest.raises(DatasetError, match="seed 0, asked for 5"):
        run(SMALL_SETS, tmp_path / "sets.blocks", seed=5)
    with open_locked(tmp_path / "sets.blocks" / "lock"), pytest.raises(FileError, match="another process"):
        run(SMALL_SETS, tmp_path / "sets.blocks")


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


HARDWARE = {"device": "cpu", "name": "abacus", "threads": 1, "fbgemm": "1.8.0", "memory_bytes": 1 << 30}
W = Workload("a", 50, 8, 6, 2.5, 8.0, (0.1, 0.7, 0.2) + (0.0,) * 14)
SETS = [
    [W, replace(W, name="table ü", dim=12)],
    [replace(W, pooled=False, optimizer="rowwise_adagrad", num_features=3)],
    [replace(W, pooling_factor=0.0, distinct_rows=0.0, reuse_histogram=(0.0,) * 17), W, W],
]
SAMPLES_NR2 = [[[1.0, 2.0], [3.0, 4.0], [2.0, 9.0]], [[0.1, 0.2], [0.1, 0.2], [0.1, 0.2]], [[5.0, 6.0]] * 3]
REFERENCE_NR2 = [[[0.4, 0.6], [0.8, 1.2], [0.4, 0.6]], [[0.4, 0.6]] * 3, [[0.4, 0.6]] * 3]


def dataset(**changes) -> CostDataset:
    return CostDataset.from_sets(SETS, SAMPLES_NR2, HARDWARE, REFERENCE_NR2, **changes)


def test_medians_with_and_without_reference() -> None:
    plain = CostDataset.from_sets(SETS, SAMPLES_NR2, HARDWARE)
    assert plain.median_ms().tolist() == [[2.0, 4.0], [0.1, 0.2], [5.0, 6.0]]
    assert plain.spread[0].tolist() == pytest.approx([(1 + 1 + 0) / 3 / 2, (2 + 0 + 5) / 3 / 4])
    # In the second round of set 0 the reference took 2 ms instead of 1: that round shrinks by the root of 2.
    corrected = dataset()
    assert corrected.corrected_ms[0, :, 1].tolist() == pytest.approx([2.0, 4.0 * 0.5**0.5, 9.0])
    assert corrected.median_ms().flatten().tolist() == pytest.approx([2.0, 8**0.5, 0.1, 0.2, 5.0, 6.0])
    assert dataset().median_ms().dtype == torch.float64
    # Another file's reference usually took 4 ms where this one's took 1: its hours were slow, which counts by the root.
    assert corrected.usual_ms == 1.0 and plain.usual_ms is None
    assert corrected.median_ms(4.0).flatten().tolist() == pytest.approx([4.0, 2 * 8**0.5, 0.2, 0.4, 10.0, 12.0])
    for unknown in (plain.median_ms(4.0), plain.median_ms(None)):
        assert torch.equal(unknown, plain.median_ms())


@pytest.mark.parametrize(
    "wrong", [[[[0.0, 1.0]]] * 3, [[[float("nan"), 1.0]]] * 3, [[[1.0, 1.0]]] * 2, [[1.0, 2.0]] * 3]
)
def test_times_are_positive_and_of_every_set(wrong: list) -> None:
    for samples, reference, name in ((wrong, None, "samples_ms"), ([[[1.0, 2.0]]] * 3, wrong, "reference_ms")):
        with pytest.raises(DatasetError, match=rf"{name} must be finite milliseconds above 0 of \[3 sets"):
            CostDataset.from_sets(SETS, samples, HARDWARE, reference)


def test_save_and_load(tmp_path: Path) -> None:
    data = dataset(seed=7)
    data.save(tmp_path / "costs.npz")
    loaded = CostDataset.load(tmp_path / "costs.npz")
    assert data.sets == loaded.sets == SETS and len(data) == 3 and data.repeats == 3
    assert isinstance(loaded.sets[0][0].rows, int) and loaded.sets[1][0].pooled is False
    assert np.array_equal(loaded.samples_ms, data.samples_ms) and np.array_equal(loaded.reference_ms, data.reference_ms)
    assert (loaded.hardware, loaded.seed, loaded.created) == (HARDWARE, 7, data.created)
    assert loaded.digest == data.digest != dataset(seed=1).digest and len(data.digest) == 64
    assert CostDataset.from_sets(SETS, np.array(SAMPLES_NR2) * 2, HARDWARE, REFERENCE_NR2, 7).digest != data.digest
    with np.load(tmp_path / "costs.npz") as archive:  # stores a shard once
        assert archive["rows"].shape == (4,) and archive["shard_index"].shape == archive["optimizer"].shape == (6,)
    assert os.listdir(tmp_path) == ["costs.npz"]


def test_datasets_of_one_kind_of_hardware_are_joined() -> None:
    data = dataset()
    joined = CostDataset.concatenate([data, dataset(seed=1)])
    assert joined.sets == SETS * 2 and joined.seed == 0
    assert joined.samples_ms.tolist() == SAMPLES_NR2 * 2 and joined.reference_ms.tolist() == REFERENCE_NR2 * 2
    other = CostDataset.from_sets(SETS, SAMPLES_NR2, HARDWARE | {"name": "slide rule"}, REFERENCE_NR2)
    with pytest.raises(DatasetError, match="slide rule.*not on .*abacus"):
        CostDataset.concatenate([data, other])
    with pytest.raises(DatasetError, match="only one of the two has reference times"):
        CostDataset.concatenate([data, CostDataset.from_sets(SETS, SAMPLES_NR2, HARDWARE)])


def _header(arrays: dict, **changes) -> dict:
    return arrays | {"header": np.array(json.dumps(json.loads(str(arrays["header"])) | changes))}


DAMAGE = {
    "older": (lambda a: _header(a, schema=1), "version 1 is older .* collect the sets again"),
    "newer": (lambda a: _header(a, schema=99), "version 99 is newer"),
    "header without a seed": (lambda a: _header(a, seed=None), "header lacks seed"),
    "other kind": (lambda a: {"weights": np.zeros(3)}, "not a dreamshard cost dataset"),
    "lacks a column": (lambda a: {k: v for k, v in a.items() if k != "dim"}, "lacks arrays of a dataset.*dim"),
    "object array": (lambda a: a | {"rows": np.array([{}] * 6, dtype=object)}, "not a readable"),
    "short column": (lambda a: a | {"rows": a["rows"][:-1]}, "index 3 is out of bounds"),
    "index of another kind": (lambda a: a | {"shard_index": a["shard_index"] / 2}, "arrays used as indices"),
    "as many shards as no memory holds": (
        lambda a: a | {"name": a["name"].astype("U99999"), "shard_index": np.zeros(9999, dtype=np.int64)},
        "9,999 shards are more than are read",
    ),
    **{
        f"altered {name}": (lambda a, name=name: a | {name: a[name] + 1}, "digest")
        for name in ("rows", "samples_ms", "reference_ms", "set_offsets", "batch_size")
    },
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_foreign_and_damaged_files_are_refused(damage, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.npz"
    dataset().save(path)
    with np.load(path) as archive:
        arrays = damage(dict(archive))
    np.savez(path, **arrays)
    with pytest.raises(DatasetError, match=f"costs.npz.*{message}"):
        CostDataset.load(path)


def test_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.npz"
    dataset().save(path)
    content = path.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DatasetError, match="costs.npz.*not a readable"):
            CostDataset.load(path)
    with pytest.raises(DatasetError, match="none.npz: no such file"):
        CostDataset.load(tmp_path / "none.npz")
