# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What exchanges cost, from those that were observed: latency and bandwidth, off by one factor as far as few sizes do
not tell them apart.

Shapes: X exchanges, D ranks, 2 = bytes of lookups and of ids to sort.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.collectives import (
    LATENCY_MS,
    LOOKUPS,
    MAX_BYTES_PER_MS,
    OPERATIONS,
    REVISION,
    CollectiveFit,
    CollectiveModel,
    bag_bytes,
    fits_of,
)
from dreamshard_planner.cost.correction import LEAST_GAIN
from dreamshard_planner.observing.observation import OUTPUTS, Observation, ObservedRun
from dreamshard_planner.planning.cost_sources import links_of
from dreamshard_planner.problem.exchanges import Links, lookup_exchanges, sorting_bytes
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

TOGETHER = 0.1
"""How much latency and bytes are taken to be off by one factor rather than by two: factors that differ by e weigh as
much as an exchange that is 10 % off. Few exchanges tell the two apart."""
OUTLYING = 0.5
"""Relative error from which on an exchange counts less."""


@dataclass(frozen=True)
class ObservedExchange:
    """All calls of one operation in one pass of a run's steps; all of a run's exchanges of lookups."""

    operation: str
    calls: float
    slowest_bytes: float
    """The most that any rank sends or receives."""
    total_bytes: float
    ms: float

    def shares(self, model: CollectiveFit | CollectiveModel) -> tuple[float, float]:
        """Of its time, what latency and bytes are predicted to take."""
        bytes_ms = self.slowest_bytes / model.bytes_per_ms + self.total_bytes / model.shared_bytes_per_ms
        return self.calls * model.latency_ms / self.ms, bytes_ms / self.ms

    def off(self, model: CollectiveFit | CollectiveModel) -> float:
        """Relative error of what is predicted, signed."""
        return sum(self.shares(model)) - 1


def learn_exchanges(observation: Observation, checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Collectives for a checkpoint's metadata, and in words what changed.

    Only runs count of which all ranks were observed, with the hosts and backend of the first such. Operations that were
    measured, or observed without a better fit, stay as they were; of outputs, those of which nothing is known are taken
    to be slower than predicted by as much as one that was learned. Null stands for what stays with the topology's
    bandwidths.

    Returns:
        The checkpoint's own, where nothing was observed, or held-out exchanges do not confirm it.
    """
    known = checkpoint.metadata.get("collectives")
    whole = [run for run in observation.runs if len(run.ranks) == run.world_size > 1]
    if not whole:
        return known, []
    first = whole[0]
    alike = [run for run in whole if _ranks(run) == _ranks(first)]
    links = links_of(replace(observation, runs=tuple(alike)).topology, checkpoint)
    seen = exchanges_of(alike, links, str(observation.hardware["device"]))
    learned, said = {}, []
    for operation, points in seen.items():
        fit, was, now = _learned(points, links)
        if fit is not None:
            learned[operation] = fit
            what = operation if operation in LOOKUPS else f"outputs by {operation}"
            were = "not counted" if getattr(links, operation) is None else f"{100 * was:.0f} % off"
            said.append(f"{what}: were {were}, are now {100 * now:.0f} % off")
    if not learned:
        return known, []
    before = {} if known is None else fits_of(known)
    if known is not None and known.get("hosts", 1) != first.hosts:
        said.append(f"what was measured between ranks of {known.get('hosts', 1)} host(s) is no longer known")
        before = {}
    fits, assumed = _completed(links, before, seen, learned)
    return {
        "backend": first.backend,
        "world_size": first.world_size,
        "hosts": first.hosts,
        "hardware": observation.hardware,
        "revision": REVISION,
        "fits": {operation: fit and asdict(fit) for operation, fit in fits.items()},
        "assumed": assumed,
    }, said


def exchanges_of(runs: Iterable[ObservedRun], links: Links, device: str) -> dict[str, list[ObservedExchange]]:
    """What can be compared with predictions, by operation. ``links`` tell what is taken off lookups for sorting."""
    seen: dict[str, list[ObservedExchange]] = defaultdict(list)
    for run in runs:
        for one in (*_of_outputs(run), *_of_lookups(run, links.bucketing, bag_bytes(device))):
            seen[one.operation].append(one)
    return seen


def mean_error(points: Sequence[ObservedExchange], links: Links) -> float:
    """Of what links predict of one operation; what is not counted is all off."""
    model: CollectiveModel | None = getattr(links, points[0].operation)
    return 1.0 if model is None else float(np.mean([abs(one.off(model)) for one in points]))


def _ranks(run: ObservedRun) -> tuple[int, int, str]:
    return run.hosts, run.world_size, run.backend


@dataclass(frozen=True)
class Learned:
    """How an operation differs from a model of it. Of the bytes of the slowest rank and of those of all, which few runs
    tell apart, each keeps its share."""

    latency_times: float
    """By how many its latency is longer."""
    bytes_times: float
    """By how many its bytes take longer."""
    relative_error: float = 0.0

    def of(self, model: CollectiveModel) -> CollectiveFit:
        """The model, so much slower."""
        latency_ms = self.latency_times * model.latency_ms
        slowest, shared = (min(rate, MAX_BYTES_PER_MS) for rate in (model.bytes_per_ms, model.shared_bytes_per_ms))
        return CollectiveFit(latency_ms, slowest, shared, self.relative_error).slowed(self.bytes_times)


def _completed(
    links: Links, before: Mapping[str, CollectiveFit], seen: Collection[str], learned: Mapping[str, Learned]
) -> tuple[dict[str, CollectiveFit | None], list[str]]:
    """Fits of all operations, and which of them are assumed: outputs that nobody observed or measured are as much
    slower than predicted as one that was learned, else as they were assumed before."""
    slower = next((fit for operation, fit in learned.items() if operation in OPERATIONS), None)
    counted = LOOKUPS if "lookups" in learned or links.lookups is not None else ()
    fits: dict[str, CollectiveFit | None] = {}
    assumed = []
    for operation in (*OPERATIONS, *counted):
        model: CollectiveModel | None = getattr(links, operation)
        if operation in learned:
            fits[operation] = learned[operation].of(_like(links, operation))
        elif model is not None and model.is_measured:
            fits[operation] = before[operation]
        elif model is None or operation in seen or operation in LOOKUPS:
            fits[operation] = None
        else:
            same = before.get(operation)
            fits[operation] = same if slower is None else slower.of(model)
            assumed += [operation] * (fits[operation] is not None)
    return fits, assumed


def _of_outputs(run: ObservedRun) -> Iterator[ObservedExchange]:
    """Between all ranks; none where it is not told how long they take by themselves. Several operations on their way
    together share the time."""
    if run.hides_outputs:
        return
    each_ms = sum(one.ms for one in run.outputs.values())
    share = min(1.0, run.outputs_ms / max(each_ms, 1e-9))
    for name, one in run.outputs.items():
        operation, total = name.split()[1], sum(one.bytes)
        if " of " in name or not total or one.ms <= 0:
            continue
        # Gradients move the other way what the forward moved: a rank receives as much as it has sent.
        forward = run.outputs.get(f"{OUTPUTS} {operation} forward", one)
        sent_D = np.array(forward.bytes) * (total / max(sum(forward.bytes), 1.0))
        received_D = (total - sent_D) / (run.world_size - 1)
        slowest = float(max(sent_D.max(), received_D.max()))
        yield ObservedExchange(operation, one.calls, slowest, total, share * one.ms)


def _of_lookups(
    run: ObservedRun, bucketing: CollectiveModel | None, bag_more_bytes: float
) -> Iterator[ObservedExchange]:
    """Between all ranks, with the bytes that the cost counts for the run's plan: ``bag_more_bytes`` for each bag beside
    those of its length. Sorting into blocks of rows is taken off as it is predicted; where it is not, runs that sort
    tell nothing."""
    sent: dict[tuple[str, str], Tensor] = defaultdict(lambda: torch.zeros(run.world_size, 2, dtype=torch.float64))
    weighted = {(kernel.module, kernel.sharding_type): kernel.weighted for rank in run.ranks for kernel in rank.kernels}
    for rank in run.ranks:
        for index, kernel in enumerate(rank.kernels):
            spec, lookups = SHARDING_TYPES[kernel.sharding_type], rank.median(f"kernel {index} lookups")
            if not spec.is_replicated:
                sent_bytes = kernel.lookup_bytes(lookups) + bag_more_bytes * kernel.bags
                told_2 = torch.tensor([sent_bytes, sorting_bytes(spec, lookups, kernel.bags)])
                sent[kernel.module, kernel.sharding_type][rank.rank] += told_2 / run.world_size
    of_groups = any(name.startswith("lookups") and " of " in name for name in run.collectives)
    if run.lookups_ms is None or of_groups or not sent:
        return
    bytes_XD, sorted_XD = torch.stack(list(sent.values())).unbind(-1)
    if bucketing is None and bool(sorted_XD.any()):
        return
    sorting_ms = 0.0 if bucketing is None else float(bucketing.all_to_all_ms(sorted_XD).sum())
    slowest_X = CollectiveModel(run.world_size, bytes_per_ms=1.0, latency_ms=0.0).all_to_all_ms(bytes_XD)
    calls_X = torch.tensor([lookup_exchanges(weighted[key]) for key in sent], dtype=torch.float64)
    calls, slowest, total = float(calls_X[slowest_X > 0].sum()), float(slowest_X.sum()), float(bytes_XD.sum())
    if calls and run.lookups_ms > sorting_ms:
        yield ObservedExchange("lookups", calls, slowest, total * (run.world_size - 1), run.lookups_ms - sorting_ms)


def _learned(points: Sequence[ObservedExchange], links: Links) -> tuple[Learned | None, float, float]:
    """What is better on points that are held out; and errors before and after."""
    like, before = _like(links, points[0].operation), mean_error(points, links)
    if len(points) < 2:
        return None, before, before
    held_out = [one.off(_fit([other for other in points if other is not one], like).of(like)) for one in points]
    after = float(np.abs(held_out).mean())
    return (_fit(points, like) if after < before - LEAST_GAIN else None), before, after


def _like(links: Links, operation: str) -> CollectiveModel:
    """What an operation is a multiple of: its own model, or that of outputs, whose links it passes; with some latency,
    where none was measured."""
    model: CollectiveModel = getattr(links, operation) or links.all_to_all
    return replace(model, latency_ms=max(model.latency_ms, LATENCY_MS))


def _fit(points: Sequence[ObservedExchange], like: CollectiveModel) -> Learned:
    """Factors of latency and bytes, as far from one another as the exchanges tell."""
    shares_X2 = np.array([one.shares(like) for one in points])
    level = -np.log(np.median(shares_X2.sum(1)))

    def off(log_2: np.ndarray) -> np.ndarray:
        return np.append(np.log(shares_X2 @ np.exp(log_2)), TOGETHER * (log_2[0] - log_2[1]))

    fit = Learned(*np.exp(least_squares(off, [level, level], loss="soft_l1", f_scale=OUTLYING).x).tolist())
    return replace(fit, relative_error=float(np.median([abs(one.off(fit.of(like))) for one in points])))
