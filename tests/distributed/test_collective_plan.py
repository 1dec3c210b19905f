# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One plan for all ranks, or one error for all ranks."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ranks import Rank
from tiny import SHARDERS, TinyModel, make_planner
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner import DreamShardError, DreamShardPlanner
from dreamshard_planner.cost.collectives import CollectiveFit
from dreamshard_planner.measure.collectives import PAYLOADS, Collectives


def _same_plan(rank: Rank) -> str:
    planner = make_planner("dreamshard", rank)
    return str(planner.collective_plan(TinyModel(rank.device), list(SHARDERS)))


def _no_room(rank: Rank) -> str:
    memory = "hbm_cap" if rank.device.type == "cuda" else "ddr_cap"
    planner = DreamShardPlanner(topology=Topology(rank.world_size, rank.device.type, **{memory: 1000}))
    gc.disable()  # what is gone then, is gone without a collection
    try:
        planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
    except PlannerError as error:
        text, still_there = str(error), weakref.ref(error)
    assert (
        still_there() is None
    )  # an error in a cycle keeps the process group alive until Python ends, and may abort it
    return text


def _plan_of_a_sharding_group(rank: Rank) -> str:
    """In 2D parallelism, all groups follow a plan for the ranks of one."""
    planner = DreamShardPlanner(topology=Topology(rank.world_size // 2, rank.device.type))
    return str(planner.collective_plan(TinyModel(rank.device), list(SHARDERS)))


def _wrong_size(rank: Rank) -> str:
    planner = DreamShardPlanner(topology=Topology(rank.world_size + 1, rank.device.type))
    try:
        planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
    except DreamShardError as error:
        return str(error)
    return "a plan"


def test_all_ranks_get_one_plan(launch: Callable[..., list[Any]]) -> None:
    plans = launch(_same_plan)
    assert plans[0].count("table_wise") == 8 and len(set(plans)) == 1


def test_all_ranks_get_the_error(launch: Callable[..., list[Any]]) -> None:
    errors = launch(_no_room)
    assert len(set(errors)) == 1 and "bytes are missing" in errors[0] and "embeddings.t0" in errors[0]


def test_all_sharding_groups_get_one_plan(launch: Callable[..., list[Any]]) -> None:
    plans = launch(_plan_of_a_sharding_group)
    assert plans[0].count("table_wise") == 8 and len(set(plans)) == 1


def test_a_topology_of_another_size_is_an_error(launch: Callable[..., list[Any]]) -> None:
    errors = launch(_wrong_size)
    text = f"has {len(errors)} ranks, which are no whole number of sharding groups of the {len(errors) + 1} ranks"
    assert all(text in error for error in errors)


def _measured_collectives(rank: Rank) -> str:
    from dreamshard_planner.measure.collectives import measure

    return json.dumps(asdict(measure(rank.device, repeats=2)))


def test_collectives_are_measured_between_ranks(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    results = launch(_measured_collectives)
    assert len(set(results)) == 1  # the slowest rank's time, on every rank
    path = tmp_path / "collectives.json"
    path.write_text(results[0])
    measured = Collectives.load(path)
    assert set(measured.fits) == {"all_to_all", "reduce_scatter", "all_reduce"} and measured.world_size == len(results)
    times_ms = [sample[-1] for sample in measured.samples_ms]
    assert len(times_ms) == len(PAYLOADS) and min(times_ms) > 0
    assert "samples_ms" not in measured.metadata()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lambda text: text[:50], "JSONDecodeError"), (lambda text: text.replace("fits", "fit"), "fits")]
    + [(lambda text: text.replace('"bytes_per_ms": 2.0', '"bytes_per_ms": -1'), "must be positive")],
)
def test_damaged_measurements_are_refused(damage: Callable[[str], str], reason: str, tmp_path: Path) -> None:
    fit = CollectiveFit(latency_ms=1.0, bytes_per_ms=2.0, shared_bytes_per_ms=3.0, relative_error=0.1)
    path = tmp_path / "collectives.json"
    path.write_text(damage(json.dumps(asdict(Collectives("gloo", 2, {}, {"all_to_all": fit}, ())))))
    with pytest.raises(DreamShardError, match=f"collectives.json: not a measurement.*{reason}"):
        Collectives.load(path)
