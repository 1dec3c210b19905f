# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The DLRM benchmark: its data, and the whole command on one and two ranks."""

import json
from pathlib import Path

import torch

from dlrm import job as dlrm
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import FeatureStatistics, Table
from tests.torchrun import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "run_dlrm.py"


def test_scaling_is_said() -> None:
    tables, text = dlrm.scale_tables(named_pool("mlperf_dlrm_dcnv2"), max_rows=100_000)
    assert (len(tables), max(table.rows for table in tables)) == (26, 100_000)
    assert "8 of them cut to 100,000 rows: rows in all 204,184,588 -> 921,198" in text


def test_ranks_share_the_global_batches() -> None:
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
    planners = ["dreamshard", "torchrec", "lookup_greedy"]
    file = tmp_path / "result.json"
    options = ["--max-rows=500", "--dim=8", "--batch-size=8", "--rounds=2", "--block-seconds=0.001", "--copies=2"]
    options += [f"--planners={','.join(planners)}", f"--json={file}", f"--report={tmp_path / 'report.html'}"]
    done = forked(SCRIPT, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["ranks"] == 2 and result["loss_difference"] < 1e-5
    assert list(result["plans"]) == planners
    for name, entry in result["plans"].items():
        assert len(entry["ranks"]) == 26 and {rank for (rank,) in entry["ranks"].values()} == {0, 1}
        assert set(entry["types"].values()) == {"table_wise"}
        assert [len(block_ms) for block_ms in entry["step_ms"]] == [2, 2]  # two models of two blocks
        assert entry["ratio"] == sorted(entry["ratio"])
        assert len(entry["kernels_ms"]) == len(entry["predicted_rank_ms"]) == 2
        assert min(entry["kernels_ms"] + entry["predicted_rank_ms"]) > 0
        assert name in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "under the plan of lookup_greedy" in page
    assert done.stdout.replace("\n", "").rstrip().endswith("report.html")
    assert "cost source" in done.stdout and "cut to 500 rows" in done.stdout
