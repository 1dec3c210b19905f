# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A plan trains; saved and loaded, it trains as it did; a stale one is refused on every rank. Also run with other
releases of TorchRec (``make test-matrix``)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Rank
from tiny import LOCAL_BATCH, SHAPES, make_planner, shard, train
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner import JsonPlanLoader, SavedPlan

STEPS = 5


def _fresh_then_loaded(rank: Rank, file: Path) -> dict[str, Any]:
    fresh = make_planner("dreamshard", rank)
    model = shard(fresh, rank)
    result = {"fresh": train(model, rank, STEPS, LOCAL_BATCH * rank.world_size), "plan": str(model.plan)}
    if rank.rank == 0:
        fresh.save_plan(file)  # modules are sharded by now
        result["saved_ms"] = SavedPlan.load(file).predicted.chosen.total_ms
        result["chosen"] = fresh.report().chosen
    again = make_planner("dreamshard", rank, plan_loader=JsonPlanLoader(file))  # read on rank 0 alone
    model = shard(again, rank)
    result |= {"loaded": train(model, rank, STEPS, LOCAL_BATCH * rank.world_size), "loaded_plan": str(model.plan)}
    if rank.rank == 0:
        result["loaded_ms"] = again.report().chosen.total_ms
        result["notes"] = [note.text for note in again.report().notes]
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
    stale = f"made for something else (then -> now): batch size {LOCAL_BATCH + 1} -> {LOCAL_BATCH}"
    for result in results:
        assert stale in result["stale"] and result["plan"].count("table_wise") == len(SHAPES)
        assert result["loaded"] == result["fresh"] and result["loaded_plan"] == result["plan"]
    first = results[0]
    assert len(first["chosen"].rank_ms) == len(results) and min(first["chosen"].rank_ms) > 0
    assert first["saved_ms"] == pytest.approx(first["chosen"].total_ms, abs=1e-6)
    assert first["loaded_ms"] == pytest.approx(first["chosen"].total_ms, rel=1e-6)
    assert any("loaded from plan.json" in note for note in first["notes"])
