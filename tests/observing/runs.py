# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Observed runs made by hand, for tests."""

from dataclasses import replace
from functools import cache

import torch
from small_models import planned, topology

from dreamshard_planner import Observation, SavedPlan
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import predict_ms
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.observing.observation import ObservedKernel, ObservedRun, ObservedTable, RankSteps
from dreamshard_planner.workload.lookups import FeatureStatistics
from tests.planning.test_context import model

LOCAL_BATCH, WORLD_SIZE = 64, 2
MEMORY = 50e6
"""Bytes per millisecond."""


def kernel(run: int, rank: int, optimizer: str = "adagrad") -> ObservedKernel:
    """Some tables, others for each run and rank."""
    sizes = [(1000 * (2 + run), 16), (300 * (1 + rank), 64), (10_000 * (1 + run + rank), 32)]
    tables = [
        ObservedTable(f"ebc.t{run}{rank}{i}", (f"f{i}",), rows, dim, (0, 0), (rows, dim))
        for i, (rows, dim) in enumerate(sizes[: 1 + (run + rank) % 3])
    ]
    samples = LOCAL_BATCH * WORLD_SIZE
    return ObservedKernel("table_wise", "fused", optimizer, "device", True, False, 4, samples, tuple(tables))


STATISTICS = {f"f{i}": FeatureStatistics(2.0 + 3 * i, batch_size=LOCAL_BATCH, batches=4) for i in range(3)}


def truth(workloads: list, optimizer_ms_per_row: float = 2e-4) -> list[float]:
    """Forward and backward milliseconds as on hardware that is ten times slower than its memory, and takes its time for
    each row's state."""
    sets = LabelledSets.of([workloads], torch.ones(1, 2))
    forward, backward = predict_ms(RooflineCost.of_bandwidths("cpu", MEMORY, MEMORY), sets)[0].tolist()
    return [10 * forward, backward + optimizer_ms_per_row * sum(one.distinct_rows for one in workloads)]


def rank_steps(run: int, rank: int, statistics: dict = STATISTICS, steps: int = 8, **columns: tuple) -> RankSteps:
    of_rank = kernel(run, rank)
    workloads = of_rank.workloads(STATISTICS)
    forward, backward = truth(workloads)
    lookups = sum(one.lookups for one in workloads)
    every = {"step": 100.0, "forward": 30.0, "backward": 60.0, "kernels": forward + backward}
    every |= {"kernel 0 forward": forward, "kernel 0 backward": backward, "kernel 0 lookups": lookups}
    filled = {name: (value,) * steps for name, value in every.items()} | columns
    return RankSteps(rank, steps, tuple(range(steps)), filled, (of_rank,), statistics)


def observed_run(name: str, *ranks: RankSteps) -> ObservedRun:
    return ObservedRun(name, "2026-11-23", 2, 1, "gloo", None, {}, ranks)


def observation(runs: int = 3, **hardware: str | int) -> Observation:
    described = describe_hardware("cpu", torch.get_num_threads()) | hardware
    made = [observed_run(f"run{run}", *(rank_steps(run, rank) for rank in range(2))) for run in range(runs)]
    return Observation(described, tuple(made))


def with_kernels(run: ObservedRun, **changes: object) -> ObservedRun:
    """The run with changes in all its kernels."""
    ranks = (replace(rank, kernels=tuple(replace(one, **changes) for one in rank.kernels)) for rank in run.ranks)
    return replace(run, ranks=tuple(ranks))


def of_size(run: ObservedRun, times: int, *, lookups: int = 1) -> ObservedRun:
    """With batches of so many times the samples, and so many times the lookups of each; times grow with both."""
    ranks = []
    for rank in run.ranks:
        statistics = {
            name: replace(feature, batch_size=times * LOCAL_BATCH, pooling_factor=lookups * feature.pooling_factor)
            for name, feature in rank.statistics.items()
        }
        columns = {name: tuple(times * lookups * value for value in values) for name, values in rank.columns.items()}
        ranks.append(replace(rank, statistics=statistics, columns=columns))
    larger = replace(run, id=f"{times} x {lookups}", ranks=tuple(ranks))
    return with_kernels(larger, samples=times * LOCAL_BATCH * WORLD_SIZE)


@cache
def _planned() -> SavedPlan:
    return planned(model(), topology=topology(2), batch_size=LOCAL_BATCH).saved_plan()


def planned_run(factor: float, exchange: float, lookups: float = 2.0) -> ObservedRun:
    """Two ranks whose kernels take so many times what is predicted, and outputs likewise."""
    plan = _planned()
    predicted = plan.predicted.chosen
    ranks = []
    outputs_ms = sum(ms for name, ms in plan.predicted.collectives if not name.endswith(" lookups"))
    for rank in range(2):
        ways = {"forward": predicted.forward_ms[rank], "backward": predicted.backward_ms[rank]}
        columns = {f"kernel 0 {way}": (ms * factor,) * 8 for way, ms in ways.items()}
        spans = ("outputs all_to_all forward span", "outputs span together")
        columns |= dict.fromkeys(spans, (outputs_ms * exchange,) * 8)
        columns["outputs all_to_all forward bytes"] = (1e6,) * 8
        ranks.append(rank_steps(0, rank, **columns))
    return replace(observed_run("a", *ranks), plan=plan, planned_lookups={"f0": lookups})
