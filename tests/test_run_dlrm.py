# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The DLRM benchmark: its data, and the whole command on one and two ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import FeatureStatistics, Table

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def dlrm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dlrm", BENCHMARKS / "dlrm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(*options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*torchrun, str(BENCHMARKS / "run_dlrm.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_scaling_is_said(dlrm: ModuleType) -> None:
    tables, text = dlrm.scale_tables(named_pool("mlperf_dlrm_dcnv2"), max_rows=100_000)
    assert (len(tables), max(table.rows for table in tables)) == (26, 100_000)
    assert "8 of them cut to 100,000 rows: rows in all 204,184,588 -> 921,198" in text


def test_several_dims_need_a_choice(dlrm: ModuleType) -> None:
    feature = (FeatureStatistics(1.0),)
    pool = [Table("a", 10, 8, feature), Table("b", 10, 16, feature)]
    with pytest.raises(ValueError, match=r"\[8, 16\]: choose one with --dim"):
        dlrm.scale_tables(pool, max_rows=5)
    assert {(table.rows, table.dim) for table in dlrm.scale_tables(pool, max_rows=5, dim=4)[0]} == {(5, 4)}


def test_ranks_share_the_global_batches(dlrm: ModuleType) -> None:
    tables = [
        Table("one", 50, 8, (FeatureStatistics(3.0),)),
        Table("shared", 20, 8, (FeatureStatistics(2.0), FeatureStatistics(2.0))),
        Table("unread", 20, 8, (FeatureStatistics(0.0),)),
    ]
    (whole,) = dlrm.make_batches(tables, count=1, batch_size=64, rank=0, world_size=1, seed=3)
    halves = [dlrm.make_batches(tables, 1, 32, rank, world_size=2, seed=3)[0] for rank in range(2)]
    assert torch.equal(torch.cat([half.labels for half in halves]), whole.labels)
    assert torch.equal(torch.cat([half.dense_features for half in halves]), whole.dense_features)
    assert whole.sparse_features.keys() == ["one_f0", "shared_f0", "shared_f1", "unread_f0"]
    for name in whole.sparse_features.keys():
        parts = [half.sparse_features[name] for half in halves]
        assert torch.equal(torch.cat([part.lengths() for part in parts]), whole.sparse_features[name].lengths())
        assert torch.equal(torch.cat([part.values() for part in parts]), whole.sparse_features[name].values())
    lengths = [whole.sparse_features[name].lengths().float().mean().item() for name in whole.sparse_features.keys()]
    assert lengths == [3.0, 2.0, 2.0, 0.0]


def test_two_ranks_under_several_planners(tmp_path: Path) -> None:
    planners = ["dreamshard", "torchrec", "torchrec_default", "lookup_greedy"]
    file = tmp_path / "result.json"
    options = ["--max-rows=500", "--dim=8", "--batch-size=8", "--steps=4", "--block=2", f"--json={file}"]
    done = _run(*options, f"--planners={','.join(planners)}", ranks=2)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [entry["name"] for entry in result["planners"]] == planners
    assert result["world_size"] == 2 and result["base"] == "torchrec"
    assert result["loss_difference"] < 1e-5
    for entry in result["planners"]:
        assert len(entry["ranks"]) == 26 and set(entry["ranks"].values()) == {0, 1}
        assert len(entry["block_ms"]) == 2 and len(entry["losses"]) == 3 + 4  # warm-up steps first
        assert len(entry["forward_ms"]) == len(entry["backward_ms"]) == len(entry["predicted"]["rank_ms"]) == 2
        assert min(entry["forward_ms"] + entry["backward_ms"] + list(entry["predicted"]["rank_ms"])) > 0
        assert entry["name"] in done.stdout
    assert "cost source" in done.stdout and "cut to 500 rows" in done.stdout


def test_one_rank_and_no_torchrec() -> None:
    done = _run("--max-rows=100", "--dim=4", "--batch-size=4", "--steps=1", "--block=1", "--planners=size_greedy")
    assert done.returncode == 0, done.stderr
    assert "x size_greedy" in done.stdout


def test_unknown_planner_is_said() -> None:
    command = [sys.executable, str(BENCHMARKS / "run_dlrm.py"), "--planners=torchrec,best"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "planners must be some of dreamshard, torchrec, torchrec_default" in done.stderr
