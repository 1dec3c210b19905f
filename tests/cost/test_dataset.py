# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost datasets keep everything, and refuse whatever is not whole.

Shape letters: N sets, R repeats.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.errors import DatasetError
from dreamshard_planner.workload.tables import Workload

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
