# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Benchmarks of GPUs: the commands of ``make gpu``, fused kernels, and the contest on a card. ``tests/cli/test_cli.py``
runs two of the commands."""

import gzip
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fused_kernels
import gpu
import gpu_contest
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.tables import Table, workloads_of
from fused_kernels import BASE, SWEEPS, moved_bytes


def test_scripts_know_all_options_that_the_commands_give(tmp_path: Path) -> None:
    lines = gpu.commands("cuda", 8, tmp_path, "nvidia-x", 25)
    assert list(lines) == ["tests", "kernels", "collectives", "checkpoint", "accuracy", "placements", "steps"]
    assert "collectives" not in gpu.commands("cuda", 1, tmp_path, "nvidia-x", 25)
    for line in lines.values():
        before, _, after = line.partition(".py ")
        if "compare_placements" in before or "fused_kernels" in before or "cost_accuracy" in before:
            script = Path(f"{shlex.split(before)[-1]}.py")
            known = re.findall(r'"(--[a-z-]+)"', script.read_text())
            given = re.findall(r"(?<= )--[a-z-]+", f" {after}")
            assert len(given) > 1 and set(given) <= set(known), script.name


def test_moved_bytes_by_hand() -> None:
    shape = replace(BASE, tables=3, dim=8, pooling=4, reuse_bin=1)
    workloads = shape.workloads(batch_size=10, optimizer="sgd")
    # Of each table: 40 lookups of 20 rows, each read twice; 10 outputs.
    assert [(w.lookups, w.distinct_rows, w.output_elements) for w in workloads] == [(40, 20, 80)] * 3
    forward, backward = moved_bytes(workloads)
    assert forward == 3 * (40 * 8 + 40 * 8 * 4 + 80 * 4)
    assert backward == 3 * (40 * 8 + 80 * 4 + 2 * 20 * 8 * 4)


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    options = ["--sweeps", "tables", "--batch-size", "16", "--repeats", "1", "--json", str(tmp_path / "r.json")]
    monkeypatch.setattr(sys, "argv", ["fused_kernels.py", *options])
    fused_kernels.main()
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["shape"]["tables"] for row in result["rows"]] == list(SWEEPS["tables"])
    assert f"{result['copy_gb_per_s']:.1f} GB/s" in capsys.readouterr().out
    (base,) = [row for row in result["rows"] if row["shape"]["tables"] == BASE.tables]
    forward, _ = moved_bytes(BASE.workloads(16, "rowwise_adagrad"))
    assert base["gb_per_s"][0] == pytest.approx(forward / base["ms"][0] / 1e6)


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
