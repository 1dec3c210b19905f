# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The benchmark of fused kernels counts what it says, and runs."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fused_kernels
from fused_kernels import BASE, SWEEPS, moved_bytes


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
