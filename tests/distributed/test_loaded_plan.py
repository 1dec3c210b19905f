# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A plan that was saved trains, loaded, as it did; a stale one is refused on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Rank
from tiny import LOCAL_BATCH, make_planner, shard, train
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner import JsonPlanLoader, SavedPlan

STEPS = 5


def _fresh_then_loaded(rank: Rank, file: Path) -> dict[str, Any]:
    fresh = make_planner("dreamshard", rank)
    model = shard(fresh, rank)
    result = {"fresh": train(model, rank, STEPS, LOCAL_BATCH * rank.world_size), "plan": str(model.plan)}
    if rank.rank == 0:
        fresh.save_plan(file)  # modules are sharded by now
        result["saved_ms"], result["chosen_ms"] = (
            SavedPlan.load(file).predicted.chosen.total_ms,
            fresh.report().chosen.total_ms,
        )
    again = make_planner("dreamshard", rank, plan_loader=JsonPlanLoader(file))  # read on rank 0 alone
    model = shard(again, rank)
    result |= {"loaded": train(model, rank, STEPS, LOCAL_BATCH * rank.world_size), "loaded_plan": str(model.plan)}
    if rank.rank == 0:
        result["loaded_ms"], result["notes"] = (
            again.report().chosen.total_ms,
            [note.text for note in again.report().notes],
        )
    result["stale"] = _refused(rank, file)
    return result


def _refused(rank: Rank, file: Path) -> str:
    """Return the error on a rank for a file that only rank 0 reads."""
    if rank.rank == 0:
        document = json.loads(file.read_text())
        document["inputs"]["batch_size"] += 1
        file.write_text(json.dumps(document))
    try:
        shard(make_planner("dreamshard", rank, plan_loader=JsonPlanLoader(file)), rank)
    except PlannerError as error:
        return str(error)
    return "trained"


def test_a_loaded_plan_trains_like_a_fresh_one(launch_any: Callable[..., list[Any]], tmp_path: Path) -> None:
    results = launch_any(_fresh_then_loaded, tmp_path / "plan.json")
    for result in results:
        assert (
            f"made for something else (then -> now): batch size {LOCAL_BATCH + 1} -> {LOCAL_BATCH}" in result["stale"]
        )
        assert result["loaded"] == result["fresh"] and result["loaded_plan"] == result["plan"]
    first = results[0]
    assert first["saved_ms"] == pytest.approx(first["chosen_ms"], abs=1e-6)
    assert first["loaded_ms"] == pytest.approx(first["chosen_ms"], rel=1e-6)
    assert any("loaded from plan.json" in note for note in first["notes"])
