# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What exchanges cost, from those that were observed: the bandwidth, while few sizes leave latencies to what was known
before.

Shapes: X exchanges, D ranks, 2 = bytes of lookups and of ids to sort.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torchrec.distributed.planner.types import Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.collectives import (
    LOOKUPS,
    MAX_BYTES_PER_MS,
    OPERATIONS,
    REVISION,
    CollectiveFit,
    CollectiveModel,
    fits_of,
)
from dreamshard_planner.cost.correction import LEAST_GAIN
from dreamshard_planner.observing.observation import Observation, ObservedRun
from dreamshard_planner.planning.cost_sources import links_of
from dreamshard_planner.problem.exchanges import Links
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.workload.tables import INDEX_BYTES

OTHER_SIZE = 1.5
"""Ratio of bytes from which two exchanges tell a latency from a bandwidth."""


@dataclass(frozen=True)
class Exchange:
    """All calls of one operation in one pass of a run's steps; all of a run's exchanges of lookups."""

    operation: str
    calls: float
    slowest_bytes: float
    """The most that any rank sends or receives."""
    total_bytes: float
    ms: float

    def off(self, fit: CollectiveFit | CollectiveModel) -> float:
        """Relative error of what is predicted, signed."""
        by_bytes_ms = self.slowest_bytes / fit.bytes_per_ms + self.total_bytes / fit.shared_bytes_per_ms
        return (self.calls * fit.latency_ms + by_bytes_ms) / self.ms - 1


def learn_exchanges(observation: Observation, checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Collectives for a checkpoint's metadata, and in words what changed.

    Only runs count of which all ranks were observed; the first such gives hosts and backend. Operations that were never
    observed stay as they were measured; else they are taken for one that was learned. Null stands for what is neither:
    it stays with the topology's bandwidths.

    Returns:
        The checkpoint's own, where nothing was observed, or held-out exchanges do not confirm it.
    """
    known = checkpoint.metadata.get("collectives")
    whole = [run for run in observation.runs if len(run.ranks) == run.world_size > 1]
    if not whole:
        return known, []
    first, device = whole[0], str(observation.hardware["device"])
    alike = (run for run in whole if (run.hosts, run.world_size) == (first.hosts, first.world_size))
    local = first.world_size // first.hosts
    links = links_of(Topology(first.world_size, device, local_world_size=local), checkpoint)
    points = [one for run in alike for one in (*_of_outputs(run), *_of_lookups(run, links.bucketing))]
    fits, said = {}, []
    for operation in dict.fromkeys(one.operation for one in points):
        of_operation = [one for one in points if one.operation == operation]
        fit, before, after = _fitted(of_operation, getattr(links, operation))
        if fit is not None:
            fits[operation] = fit
            what = operation if operation in LOOKUPS else f"outputs by {operation}"
            were = "not counted" if getattr(links, operation) is None else f"{100 * before:.0f} % off"
            said.append(f"{what}: were {were}, are now {100 * after:.0f} % off")
    if not fits:
        return known, []
    others = _measured(links, known)
    of_any = next((fit for operation, fit in fits.items() if operation in OPERATIONS), None)
    counted = LOOKUPS if "lookups" in fits or links.lookups is not None else ()
    filled = {operation: of_any for operation in OPERATIONS} | dict.fromkeys(counted) | others | fits
    return {
        "backend": first.backend,
        "world_size": first.world_size,
        "hosts": first.hosts,
        "hardware": observation.hardware,
        "revision": REVISION,
        "fits": {operation: fit and asdict(fit) for operation, fit in filled.items()},
    }, said


def _measured(links: Links, known: Any) -> dict[str, CollectiveFit]:
    """Fits of a checkpoint, where they are what plans for these ranks would take."""
    used = {operation for operation in (*OPERATIONS, *LOOKUPS) if _is_measured(getattr(links, operation))}
    return {operation: fit for operation, fit in fits_of(known).items() if operation in used} if used else {}


def _is_measured(model: CollectiveModel | None) -> bool:
    return model is not None and model.source.startswith("measured")


def _of_outputs(run: ObservedRun) -> Iterator[Exchange]:
    """Between all ranks."""
    for name, one in run.collectives.items():
        carried, operation, *_ = name.split()
        if carried != "outputs" or " of " in name or not sum(one.bytes) or not one.ms:
            continue
        total = sum(one.bytes)
        received = [(total - sent) / (run.world_size - 1) for sent in one.bytes]
        yield Exchange(operation, one.calls, max(*one.bytes, *received), total, one.ms)


def _of_lookups(run: ObservedRun, bucketing: CollectiveModel | None) -> Iterator[Exchange]:
    """Between all ranks, with the bytes that the cost counts for the run's plan. Sorting into blocks of rows is taken
    off as it is predicted; where it is not, runs that sort tell nothing."""
    sent: dict[tuple[str, str], Tensor] = defaultdict(lambda: torch.zeros(run.world_size, 2, dtype=torch.float64))
    for rank in run.ranks:
        for index, kernel in enumerate(rank.kernels):
            spec, lookups = SHARDING_TYPES[kernel.sharding_type], rank.median(f"kernel {index} lookups")
            if not spec.is_replicated:
                told_2 = torch.tensor([kernel.lookup_bytes(lookups), lookups * INDEX_BYTES * spec.splits_rows])
                sent[kernel.module, kernel.sharding_type][rank.rank] += told_2 / run.world_size
    of_groups = any(name.startswith("lookups") and " of " in name for name in run.collectives)
    if run.lookups_ms is None or of_groups or not sent:
        return
    bytes_XD, sorted_XD = torch.stack(list(sent.values())).unbind(-1)
    if bucketing is None and bool(sorted_XD.any()):
        return
    sorting_ms = 0.0 if bucketing is None else float(bucketing.all_to_all_ms(sorted_XD)[0].sum())
    slowest_X, _ = CollectiveModel(run.world_size, bytes_per_ms=1.0, latency_ms=0.0).all_to_all_ms(bytes_XD)
    calls, slowest, total = int((slowest_X > 0).sum()), float(slowest_X.sum()), float(bytes_XD.sum())
    if calls and run.lookups_ms > sorting_ms:
        yield Exchange("lookups", calls, slowest, total * (run.world_size - 1), run.lookups_ms - sorting_ms)


def _fitted(points: Sequence[Exchange], prior: CollectiveModel | None) -> tuple[CollectiveFit | None, float, float]:
    """A fit, if it is better on points that are held out; and errors before and after. What is not counted is all
    off."""
    before = 1.0 if prior is None else float(np.mean([abs(one.off(prior)) for one in points]))
    if len(points) < 2:
        return None, before, before
    held_out = [one.off(_fit([other for other in points if other is not one], prior)) for one in points]
    after = float(np.abs(held_out).mean())
    return (_fit(points, prior) if after < before - LEAST_GAIN else None), before, after


def _fit(points: Sequence[Exchange], prior: CollectiveModel | None) -> CollectiveFit:
    """A latency, at most what was observed, and the rest by bytes."""
    latency_ms = min(_latency_ms(points, prior), *(0.9 * one.ms / one.calls for one in points))
    slopes = [(one.ms - one.calls * latency_ms) / one.slowest_bytes for one in points]
    fit = CollectiveFit(latency_ms, min(1 / float(np.median(slopes)), MAX_BYTES_PER_MS), MAX_BYTES_PER_MS, 0.0)
    error = float(np.median([abs(one.off(fit)) for one in points]))
    return CollectiveFit(fit.latency_ms, fit.bytes_per_ms, fit.shared_bytes_per_ms, error)


def _latency_ms(points: Sequence[Exchange], prior: CollectiveModel | None) -> float:
    """As it was. Of lookups, which were not measured: of a line through the points, where some are larger."""
    sizes = [one.slowest_bytes / one.calls for one in points]
    if points[0].operation in OPERATIONS or _is_measured(prior) or max(sizes) < OTHER_SIZE * min(sizes):
        return 0.0 if prior is None else prior.latency_ms
    line = np.array([(one.calls / one.ms, one.slowest_bytes / one.ms) for one in points])
    (latency, _), _ = nnls(line / line.max(0), np.ones(len(points)))
    return float(latency / line[:, 0].max())
