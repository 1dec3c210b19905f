# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One plan for all ranks, or one error for all ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from ranks import Rank
from tiny import SHARDERS, TinyModel, make_planner
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner import DreamShardError, DreamShardPlanner


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


def test_a_topology_of_another_size_is_an_error(launch: Callable[..., list[Any]]) -> None:
    errors = launch(_wrong_size)
    assert all(f"has {len(errors)} ranks, the planner's topology {len(errors) + 1}" in error for error in errors)


def _measured_collectives(rank: Rank) -> tuple[float, float, int]:
    from dreamshard_planner.measure.collectives import measure

    result = measure(rank.device, repeats=2)
    return result.latency_ms, result.bytes_per_ms, len(result.samples_ms)


def test_collectives_are_measured_between_ranks(launch: Callable[..., list[Any]]) -> None:
    results = launch(_measured_collectives)
    assert len(set(results)) == 1  # the slowest rank's time, on every rank
    latency_ms, bytes_per_ms, samples = results[0]
    assert latency_ms > 0 and bytes_per_ms > 0 and samples == 39
