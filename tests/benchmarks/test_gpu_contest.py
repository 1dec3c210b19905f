# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The contest on a card measures every rank, and the published plan is read whole."""

import gzip
import json
import sys
from pathlib import Path

import pytest

import gpu_contest
import published_plan
from dreamshard_planner.workload.tables import FeatureStatistics, Table, workloads_of


def test_shards_of_the_published_plan_cover_every_table() -> None:
    sizes = {row["table"]: row["rows"] * row["dim"] for row in published_plan.rows()}
    found = {}
    for module in published_plan.published_plan().plan.values():
        for table, sharding in module.items():
            shards = sharding.sharding_spec.shards
            assert len(shards) == len(sharding.ranks) and max(sharding.ranks) < published_plan.RANKS
            found[table] = sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in shards)
    assert found == sizes and len(sizes) == 1935


def test_every_planner_of_a_task_fills_every_rank() -> None:
    tables = tuple(Table(f"t{index}", 1000, 16, (FeatureStatistics(4.0),), optimizer="sgd") for index in range(2))
    plans = gpu_contest.Task("small", tables, 8).plans(limit=5.0)
    assert list(plans) == [gpu_contest.BASE, gpu_contest.OURS, gpu_contest.SAME_SLICES]
    for entry in plans.values():
        assert len(entry["kernels"]) == len(entry["extra_ms"]) == len(entry["predicted_ms"]) == 8
        assert sum(entry["types"].values()) == 2 and max(entry["predicted_ms"]) > 0


def test_each_rank_takes_the_sum_of_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tables = [Table(f"t{index}", 1000, 16, (FeatureStatistics(4.0),)) for index in range(3)]
    catalogue = gpu_contest.Catalogue()
    indices = [catalogue.indices([workload])[0] for workload in workloads_of(tables, 64)]
    shared = {"predicted_ms": [1.0, 1.0], "exchange_ms": 0.5, "ended": True, "extra_ms": [0.0, 0.25]}
    plans = {
        gpu_contest.BASE: {**shared, "kernels": [[indices[:2]], [indices[2:]]]},
        gpu_contest.OURS: {**shared, "kernels": [[indices[:2], indices[2:]], []]},
    }
    task = {"task": "small", "plans": plans, "workloads": [json.loads(row) for row in catalogue.rows]}
    file, record = tmp_path / "kernels.json.gz", tmp_path / "record.jsonl"
    with gzip.open(file, "wt") as out:
        json.dump({"commit": "", "date": "", "fields": gpu_contest.Catalogue.NAMES, "tasks": [task]}, out)
    command = ["gpu_contest.py", "measure", str(file), "--record", str(record), "--device", "cpu", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", command)
    gpu_contest.main()
    told = json.loads(record.read_text().splitlines()[1])["plans"]
    apart, joined = (told[name]["measured_ms"] for name in (gpu_contest.BASE, gpu_contest.OURS))
    assert joined[0] == pytest.approx([sum(of_rank) for of_rank in zip(*apart, strict=True)])
    assert joined[1] == [0.0, 0.0] and gpu_contest.slowest_ms(told[gpu_contest.OURS]) == pytest.approx(sum(joined[0]))
    assert "kernels over TorchRec's" in capsys.readouterr().out
