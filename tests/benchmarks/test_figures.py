# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Figures that README and docs quote are those of the results they come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import log
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from placements.summary import summarize

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

WHOLE = "2026-11-22-placements-with-shards.jsonl"


@cache
def read(name: str) -> Any:
    """A result; of a record, its lines."""
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


@cache
def full_search() -> dict[str, tuple[dict, dict | None]]:
    """Ours, and TorchRec's where it ran to its end, by task; all sharding types."""
    last = {(line["task"], line["planner"]): line for line in read("2026-11-22-full-search.jsonl")[1:]
            if line["setting"] == "all" and line.get("finished")}  # fmt: skip
    return {task: (line, last.get((task, "torchrec"))) for (task, who), line in last.items() if who == "dreamshard"}


def default_plans() -> str:
    """Ours over TorchRec's by TorchRec's estimates, as each comes by default; at worst, and with nothing attached."""
    rows = read("2026-11-24-default-plans.jsonl")[1:]
    ms = {(row["model"], row["hosts"], row["planner"]): row["torchrec_ms"] for row in rows}
    theirs = {(model, hosts): value for (model, hosts, planner), value in ms.items() if planner == "torchrec"}
    ours, alone = (
        [ms[*task, f"{how}, torchrec"] / value for task, value in theirs.items()]
        for how in ("attached", "nothing attached")
    )
    assert len(ours) == 12
    return f"{geometric_mean(ours):.2f}, {max(ours):.2f} at most ({max(alone):.2f} in TorchRec's own class"


def on_torchrecs_terms() -> str:
    ratios = [ours["torchrec_ms"] / theirs["torchrec_ms"] for ours, theirs in full_search().values() if theirs]
    assert len(ratios) == 17 and max(ratios) <= 1
    product = 1.0
    for ratio in ratios:
        product *= ratio
    return f"{product ** (1 / len(ratios)):.2f}, 1.00 at most | [17 tasks]"


def seconds_to_plan() -> str:
    rows = read("2026-11-26-planning-scale.json")["results"]
    seconds = {row["size"]: row["seconds"] for row in rows if row["cost_source"] == "auto"}
    return f"{seconds['50x8']:.1f} s for 50 tables on 8 GPUs and {seconds['800x64']:.1f} s for 800 on 64"


def placements(record: str, placer: str = "dreamshard", pool: str | None = None) -> dict[str, Any]:
    return next(row for row in summarize(read(record)[1:], pool) if row["placer"] == placer)


def whole_tables() -> str:
    row = placements(WHOLE)
    assert row["tasks"] == 60
    return f"{row['compute']:.3f} ({row['interval'][0]:.3f}–{row['interval'][1]:.3f})"


def by_pool() -> str:
    pools = ("meta_like_2021", "merlin_medium", "mlperf_dlrm_dcnv2")
    return ", ".join(f"{placements(WHOLE, pool=pool)['compute']:.3f}" for pool in pools)


def of_mlperf() -> str:
    gain = 1 - placements(WHOLE, pool="mlperf_dlrm_dcnv2")["compute"]
    return f"{gain * 100:.0f} % without a hot one"


def untold_lookups() -> str:
    dearer = placements(WHOLE, "torchrec_default")["compute"]
    return {1.2: "its plans then cost another fifth more"}[round(dearer, 1)]


def split_tables() -> str:
    row = placements("2026-11-22-placements-splits.jsonl")
    return f"{row['compute']:.3f} ({row['interval'][0]:.3f}–{row['interval'][1]:.3f}) | [{row['tasks']} tasks]"


def hot_step() -> str:
    planners = {planner["name"]: planner for planner in read("2026-11-24-run_dlrm-hot.json")["planners"]}
    low, ratio, high = planners["dreamshard"]["ratio"]
    assert planners["dreamshard"]["losses"] == planners["torchrec"]["losses"]
    return f"{ratio:.3f} ({low:.3f}–{high:.3f})"


def plain_steps() -> str:
    gains = []
    for batch in (512, 2048):
        planners = read(f"2026-11-21-run_dlrm-{batch}.json")["planners"]
        gains.append(1 - next(planner for planner in planners if planner["name"] == "dreamshard")["ratio"][1])
    return f"{gains[0] * 100:.0f} to {gains[1] * 100:.0f} % of the step"


def network_errors() -> str:
    newest = max(path.name for path in RESULTS.glob("*-cost-accuracy.json"))
    forward, backward = (read(newest)["costs"]["network"][way]["mape"] for way in ("forward", "backward"))
    return f"errs by {forward * 100:.0f} % forward and {backward * 100:.0f} % backward"


def gain_of_few_bytes() -> str:
    rows = read("2026-11-25-drift.jsonl")[1:]
    assert len(rows) == 60
    afresh, few = (sum(log(row["stay_ms"] / ms(row)) for row in rows)
                   for ms in (lambda row: row["afresh_ms"], lambda row: row["share_ms"]["20%"]))  # fmt: skip
    return f"{few / afresh * 100:.1f} % of its gain over staying"


def alarms() -> str:
    result = read("2026-11-24-drift-watch.json")
    assert result["false_alarms"] == 0 and result["runs_without_drift"] == 20
    assert result["alarms_within_two_windows"] == result["of_those_worth"] == result["worth_5_percent"]
    return f"in the {result['of_those_worth']} where"


def watched_share() -> str:
    of_ranks = read("2026-11-24-watched-training.json")["processor_seconds"]
    return f"{max(rank['share'] for rank in of_ranks) * 100:.2f} % of a step's processor time"


FIGURES: tuple[tuple[str, Callable[[], str]], ...] = (
    ("README.md", default_plans),
    ("README.md", on_torchrecs_terms),
    ("README.md", seconds_to_plan),
    ("README.md", whole_tables),
    ("README.md", by_pool),
    ("README.md", of_mlperf),
    ("README.md", untold_lookups),
    ("README.md", split_tables),
    ("README.md", hot_step),
    ("README.md", plain_steps),
    ("README.md", network_errors),
    ("docs/replanning.md", gain_of_few_bytes),
    ("docs/replanning.md", alarms),
    ("docs/replanning.md", watched_share),
)
"""Page, and what it says by the results."""


@pytest.mark.parametrize(("page", "said"), FIGURES, ids=lambda value: getattr(value, "__name__", value))
def test_a_page_quotes_what_was_measured(page: str, said: Callable[[], str]) -> None:
    assert said() in " ".join((ROOT / page).read_text().split())
