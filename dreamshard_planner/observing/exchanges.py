# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What exchanges of outputs cost, from those that were observed: the bandwidth, while few sizes leave latencies to what
was known before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.collectives import (
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


@dataclass(frozen=True)
class Exchange:
    """All calls of one operation in one pass of a run's steps."""

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
    observed stay as they were measured; else they are taken for the one that was. Of lookups, whose work between the
    exchanges is not observed, nothing is learned.

    Returns:
        The checkpoint's own, where nothing was observed, or held-out exchanges do not confirm it.
    """
    known = checkpoint.metadata.get("collectives")
    whole = [run for run in observation.runs if len(run.ranks) == run.world_size > 1]
    if not whole:
        return known, []
    first, device = whole[0], str(observation.hardware["device"])
    alike = (run for run in whole if (run.hosts, run.world_size) == (first.hosts, first.world_size))
    points = [one for run in alike for one in _of(run)]
    local = first.world_size // first.hosts
    links = links_of(Topology(first.world_size, device, local_world_size=local), checkpoint)
    fits, said = {}, []
    for operation in dict.fromkeys(one.operation for one in points):
        of_operation = [one for one in points if one.operation == operation]
        fit, before, after = _fitted(of_operation, getattr(links, operation))
        if fit is not None:
            fits[operation] = fit
            said.append(f"outputs by {operation}: were {100 * before:.0f} % off, are now {100 * after:.0f} % off")
    if not fits:
        return known, []
    others = _measured(links, known)
    of_any = next(iter(fits.values()))
    filled = others | {operation: fits.get(operation) or others.get(operation) or of_any for operation in OPERATIONS}
    return {
        "backend": first.backend,
        "world_size": first.world_size,
        "hosts": first.hosts,
        "hardware": observation.hardware,
        "revision": REVISION,
        "fits": {operation: asdict(fit) for operation, fit in filled.items()},
    }, said


def _measured(links: Links, known: Any) -> dict[str, CollectiveFit]:
    """Fits of a checkpoint, where they are what plans for these ranks would take."""
    return fits_of(known) if known and links.all_to_all.source.startswith("measured") else {}


def _of(run: ObservedRun) -> Iterator[Exchange]:
    """Between all ranks."""
    for name, one in run.collectives.items():
        carried, operation, *_ = name.split()
        if carried != "outputs" or " of " in name or not sum(one.bytes) or not one.ms:
            continue
        total = sum(one.bytes)
        received = [(total - sent) / (run.world_size - 1) for sent in one.bytes]
        yield Exchange(operation, one.calls, max(*one.bytes, *received), total, one.ms)


def _fitted(points: Sequence[Exchange], prior: CollectiveModel) -> tuple[CollectiveFit | None, float, float]:
    """A fit, if it is better on points that are held out; and errors before and after."""
    before = float(np.mean([abs(one.off(prior)) for one in points]))
    if len(points) < 2:
        return None, before, before
    held_out = [one.off(_fit([other for other in points if other is not one], prior)) for one in points]
    after = float(np.abs(held_out).mean())
    return (_fit(points, prior) if after < before - LEAST_GAIN else None), before, after


def _fit(points: Sequence[Exchange], prior: CollectiveModel) -> CollectiveFit:
    """The latency as it was, at most what was observed, and the rest by bytes."""
    latency_ms = min(prior.latency_ms, *(0.9 * one.ms / one.calls for one in points))
    slopes = [(one.ms - one.calls * latency_ms) / one.slowest_bytes for one in points]
    fit = CollectiveFit(latency_ms, min(1 / float(np.median(slopes)), MAX_BYTES_PER_MS), MAX_BYTES_PER_MS, 0.0)
    error = float(np.median([abs(one.off(fit)) for one in points]))
    return CollectiveFit(fit.latency_ms, fit.bytes_per_ms, fit.shared_bytes_per_ms, error)
