# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The benchmark of observed steps: what it makes of times, and the whole command on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observed import overhead
from observed.plans import summary_of
from tests.torchrun import forked

COMMAND = Path(__file__).parents[2] / "benchmarks" / "observed_steps.py"


def test_overhead_is_that_of_steps_and_a_hundredth_of_a_counted_batch() -> None:
    generator = np.random.default_rng(0)
    ms = np.full((2, 60, 2, 8, 2), 100.0)  # ranks, pairs, on and off, steps, clocks
    ms *= 1 + 0.001 * generator.standard_normal(ms.shape)
    ms[:, :, 0] *= 1.004
    ms[:, :, 0, 0] += 20.0  # the counted batch
    ms[1, ::7, 1, 3] += 50.0  # somebody else's
    told = overhead.told(ms)
    assert told["pairs"] == 60
    for clock in ("wall", "computed"):
        assert told[clock]["hooks"][1] == pytest.approx(0.004, abs=0.0005)
        assert told[clock]["counting"][1] == pytest.approx(0.002, abs=0.0003)
        low, share, high = told[clock]["share"]
        assert low < share < high < 0.007
        assert share == pytest.approx(told[clock]["hooks"][1] + told[clock]["counting"][1])


def _row(model: int, optimizer: str, errors: dict[str, float], ratios: dict[str, float]) -> dict[str, Any]:
    plans = {
        name: {f"{kind}_ratio": [ratio, ratio, ratio] for kind in ("step", "computed", "kernels")}
        for name, ratio in ratios.items()
    }
    return {
        "model": model,
        "optimizer": optimizer,
        "errors": {name: [error, error] for name, error in errors.items()},
        "exchanges": {name: {"lookups": error / 2} for name, error in errors.items()},
        "plans": plans,
    }


def test_summary_of_models() -> None:
    learned, plans = "roofline-learned", {"torchrec": 1.0, "shipped": 0.8}
    rows = [
        _row(0, "sgd", {"roofline": 0.8, learned: 0.2}, plans | {learned: 0.8}),
        _row(1, "adagrad", {"roofline": 0.4, learned: 0.1}, plans | {learned: 1.0}),
    ]
    summary = summary_of(rows)
    assert list(summary["errors"]) == ["all", "sgd", "adagrad"]
    assert summary["errors"]["all"]["roofline-learned over"]["roofline"] == pytest.approx([0.25] * 3)
    assert summary["exchanges"][learned] == {"lookups": pytest.approx(0.075)}
    assert summary["steps"]["step"]["shipped"]["ratio"] == pytest.approx([0.8] * 3)
    assert summary["steps"]["step"]["roofline-learned"]["share_of_win"] == pytest.approx([0.0, 0.5, 1.0])
    assert summary_of([]) == {}


def test_two_ranks_learn_and_plan(tmp_path: Path) -> None:
    options = ["--first-model=1", "--models=1", "--count=4", "--max-rows=500", "--dim=8", "--batch-size=8", "--steps=6"]
    options += ["--steps-measured=8", "--copies=2", "--min-partition=4"]
    options += [f"--record={tmp_path / 'rows.jsonl'}", f"--json={tmp_path / 'all.json'}"]
    done = forked(COMMAND, *options)
    assert done.returncode == 0, done.stderr
    assert "Step over that under TorchRec's plan" in done.stdout
    result = json.loads((tmp_path / "all.json").read_text())
    (row,) = result["models"]
    assert (row["model"], row["optimizer"], set(row["errors"])) == (
        1, "adagrad", {"roofline", "roofline-learned", "shipped", "shipped-learned"}
    )  # fmt: skip
    assert set(row["plans"]) == {"shipped", "torchrec", "roofline-learned"}
    assert row["plans"]["torchrec"]["step_ratio"][1] == pytest.approx(1.0)
    # On a busy machine other work may hide how long an exchange takes, and then it is not judged.
    assert set(row["exchanges"]["roofline-learned"]) <= {"all_to_all", "lookups"}
    assert {"errors", "exchanges", "steps", "overhead"} < set(result)
