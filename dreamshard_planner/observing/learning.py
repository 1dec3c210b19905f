# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Correct a checkpoint's costs of kernels and exchanges by observed training steps.

Shapes: X exchanges, D ranks, 2 = bytes of lookups and of ids to sort, or latency and bytes. Of an exchange 4: calls,
most bytes that any rank sends or receives, bytes of all ranks, milliseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
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
)
from dreamshard_planner.cost.compute import OPTIMIZERS
from dreamshard_planner.cost.correction import LEAST_GAIN, choose_corrections, errors_in_words
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import CalibrationRefused, ObservationError
from dreamshard_planner.measure.hardware import REFERENCE, hardware_name
from dreamshard_planner.observing.observation import OUTPUTS, Observation, ObservedKernel, ObservedRun, RankSteps
from dreamshard_planner.planning.cost_sources import links_of
from dreamshard_planner.problem.parts import Links, lookup_exchanges, sorting_bytes
from dreamshard_planner.search_space.sharding_types import DENSE, FUSED, SHARDING_TYPES
from dreamshard_planner.support.reproducible import neutral
from dreamshard_planner.workload.tables import Workload, optimizer_of

OTHER_LOOKUPS = 0.1
"""Relative difference of a kernel's lookups from those in the batches' statistics up to which both are one workload."""
TOGETHER = 0.1
"""Prior on the ratio of latency's and bytes' factors, which few exchanges tell apart: factors that differ by e weigh as
much as an exchange that is 10 % off."""
OUTLYING = 0.5
"""Relative error from which on an exchange counts less."""


@neutral()
def learn(checkpoint: Checkpoint, observation: Observation, out: str | Path, *, force: bool = False) -> Checkpoint:
    """Correct a checkpoint's costs by observed steps, as far as held-out kernels and exchanges confirm it.

    Kernels are corrected by optimizer and direction: their level, the parts for rows, weights and lookups, or both.
    Without a network, costs by bandwidths are corrected. Exchanges get latency and bandwidth. All that was not observed
    stays as it was.

    Args:
        checkpoint: costs to correct.
        observation: training steps on one kind of hardware.
        out: file to write.
        force: write the file even if nothing improved.

    Returns:
        The written checkpoint. Its metadata under ``learned`` name the source, errors before and after, and what was
        never observed.

    Raises:
        CalibrationRefused: held-out data confirmed nothing, or the kernels were FBGEMM's reference kernels; nothing was
            written.
        ObservationError: no kernel was observed, or the checkpoint's costs are of another kind of device.
        FileError: ``out`` cannot be written.
    """
    if observation.hardware.get("instruction_set") == REFERENCE and not force:
        raise CalibrationRefused(
            f"{observation.title}: the training ran FBGEMM's slow reference kernels, although its CPU has AVX2; "
            "observe it with the fast ones (dreamshard doctor says how)"
        )
    sets, kinds, left_out = observed_sets(observation)
    device, known = str(observation.hardware["device"]), checkpoint.known
    if checkpoint.has_costs and (other := known.hardware.device) != device:
        raise ObservationError(f"{checkpoint.name} has costs of {other}, and {device} was observed: use --costs auto")
    prior = RooflineCost.of_topology(observation.topology)
    # Corrections are of these bandwidths, whatever topologies say later.
    memory, link = known.learned.bytes_per_ms or (prior.memory_bytes_per_ms, prior.uvm_bytes_per_ms)
    compute = checkpoint.cost or RooflineCost.of_bandwidths(device, memory, link, str(observation.hardware["name"]))
    corrections, checks = choose_corrections(compute, known.corrections, sets)
    collectives, exchanges = learn_exchanges(observation, checkpoint)
    if not force and not any(check.changed for check in checks) and not exchanges:
        kernels = f"{len(sets)} kernels" if len(sets) > 1 else "one kernel, which none confirms"
        raise CalibrationRefused(
            f"{observation.title} ({kernels}): no correction reduced the errors of {checkpoint.name} on held-out "
            "kernels or exchanges; observe another plan too",
            [check.to_dict(observed=True) for check in checks],
        )
    title = f"{observation.title} on {hardware_name(observation.hardware)}"
    seen = set(optimizer_of(sets.features_SF).tolist())
    unseen = [name for index, name in enumerate(OPTIMIZERS.values()) if index not in seen]
    unseen += [kind for kind in SHARDING_TYPES if kind not in kinds]
    # Corrections from earlier observations are kept, so these parts are not "as before".
    before = known.learned.never_observed
    never = unseen if before is None else [one for one in unseen if one in before]
    shares = [share for run in observation.runs if (share := run.embedding_share) is not None]
    told = {
        "from": checkpoint.name,
        "runs": len(observation.runs),
        "steps": observation.steps,
        "sets": len(sets),
        "bytes_per_ms": [memory, link],
        "title": title,
        "said": f"learned from {title}: {errors_in_words(checks)}; never observed, and as before: "
        + (", ".join(never) or "nothing"),
        "checks": [check.to_dict(observed=True) for check in checks],
        "exchanges": exchanges,
        "never_observed": never,
        "embedding_share": fmean(shares) if shares else None,
        "left_out": left_out,
    }
    metadata = {
        **{key: value for key, value in checkpoint.metadata.items() if key not in ("calibration", "corrected")},
        "corrections": corrections,
        "collectives": collectives,
        "hardware": observation.hardware,
        "hardware_name": f"{checkpoint.measured_on}, learned on {hardware_name(observation.hardware)}",
        "learned": told,
    }
    Checkpoint(checkpoint.policy, checkpoint.cost, metadata).save(out)
    return Checkpoint.load(out)


# Kernels


@neutral()
def kernels_off(observation: Observation, *checkpoints: Checkpoint) -> list[float]:
    """Return the mean relative error of each checkpoint's costs of observed kernels; ObservationError without any."""
    sets, *_ = observed_sets(observation)
    costs = [checkpoint.compute_cost(observation.topology) for checkpoint in checkpoints]
    return [float(mape_2(predict_ms(cost, sets), sets.labels_ms_X2).mean()) for cost in costs]


@neutral()
def observed_sets(observation: Observation) -> tuple[LabelledSets, frozenset[str], list[str]]:
    """Return the fused kernels of all runs and ranks as labelled sets, their sharding types, and reasons for which
    others are left out; ObservationError says why there is none.

    Equal parts of the same tables are one set, whatever runs and ranks had them: they must not confirm each other. The
    same tables with other lookups are another set.
    """
    found: dict[tuple[Any, ...], tuple[list[Workload], list[list[float]]]] = {}
    left_out: dict[str, None] = {}
    ranks = ((run, rank) for run in observation.runs for rank in run.ranks)
    for run, rank in ranks:
        for index, kernel in enumerate(rank.kernels):
            try:
                workloads = _workloads(run, rank, index, kernel)
            except ObservationError as error:
                left_out[str(error)] = None
                continue
            parts = tuple(sorted((table.name, table.size) for table in kernel.tables))
            asked = sum(one.lookups for one in workloads), sum(one.distinct_rows for one in workloads)
            alike = tuple(round(math.log(number, 1 + OTHER_LOOKUPS)) for number in asked)
            key = kernel.sharding_type, kernel.optimizer, kernel.samples, parts, alike
            times_ms = [rank.median(f"kernel {index} {way}") for way in ("forward", "backward")]
            found.setdefault(key, (workloads, []))[1].append(times_ms)
    if not found:
        raise ObservationError(f"no fused kernel to learn from: {'; '.join(left_out) or 'none was observed'}")
    labels_X2 = torch.tensor([torch.tensor(times).mean(0).tolist() for _, times in found.values()])
    sets = LabelledSets.of([workloads for workloads, _ in found.values()], labels_X2)
    return sets, frozenset(kind for kind, *_ in found), list(left_out)


def _workloads(run: ObservedRun, rank: RankSteps, index: int, kernel: ObservedKernel) -> list[Workload]:
    """Return a kernel's workloads; ObservationError says why they are unknown."""
    name = f"{kernel.sharding_type} of {kernel.tables[0].name}"
    if kernel.kernel == DENSE:
        raise ObservationError(
            f"{name}: replicas are updated outside their kernels; observe a plan whose tables are sharded"
        )
    if kernel.kernel != FUSED:
        raise ObservationError(f"{kernel.kernel} kernels take more than their own time")
    if not all(rank.median(f"kernel {index} {way}") > 0 for way in ("lookups", "forward", "backward")):
        raise ObservationError(f"{name}: the kernel looked nothing up, or was not trained")
    workloads = kernel.workloads(run.statistics)
    told, read = sum(one.lookups for one in workloads), rank.median(f"kernel {index} lookups")
    if abs(told - read) > OTHER_LOOKUPS * read:
        raise ObservationError(
            f"{name}: the kernel reads {read:,.0f} ids a step, and the batches have {told:,.0f} for it"
        )
    return workloads


# Exchanges


Exchange = tuple[str, tuple[float, float, float, float]]
"""Operation and figures of all its calls in one pass of a run's steps; for lookups, of all their exchanges."""


@dataclass(frozen=True)
class Slowdown:
    """Factors between a model of an operation and its observed exchanges. The shares of the slowest rank's bytes and of
    all ranks' bytes are kept, since few runs tell them apart."""

    times_2: np.ndarray  # of latency and of bytes
    relative_error: float

    @classmethod
    def fitted(cls, shares_X2: np.ndarray) -> Slowdown:
        """Fit exchanges, given as :func:`_shares`, by robust least squares."""
        level = -np.log(np.median(shares_X2.sum(1)))

        def off(log_2: np.ndarray) -> np.ndarray:
            return np.append(np.log(shares_X2 @ np.exp(log_2)), TOGETHER * (log_2[0] - log_2[1]))

        times_2 = np.exp(least_squares(off, [level, level], loss="soft_l1", f_scale=OUTLYING).x)
        return cls(times_2, float(np.median(np.abs(shares_X2 @ times_2 - 1))))

    @classmethod
    def mean(cls, some: Sequence[Slowdown]) -> Slowdown:
        """Return the geometric mean of some operations' factors, with the mean of their errors."""
        times_2 = np.exp(np.mean([np.log(one.times_2) for one in some], axis=0))
        return cls(times_2, fmean(one.relative_error for one in some))

    def of(self, model: CollectiveModel, least: float = 0.0) -> CollectiveFit:
        """Return the model slowed down, by at least some factor."""
        latency_times, bytes_times = np.maximum(self.times_2, least).tolist()
        slowest, shared = (min(rate, MAX_BYTES_PER_MS) for rate in (model.bytes_per_ms, model.shared_bytes_per_ms))
        fit = CollectiveFit(latency_times * model.latency_ms, slowest, shared, self.relative_error)
        return fit.slowed(bytes_times)


def learn_exchanges(observation: Observation, checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Return collectives for a checkpoint's metadata, and sentences about the changes.

    Counts runs whose ranks were all observed, with the hosts and backend of the first one. An operation that was
    observed without a better fit stays as it was, unless :func:`_as_seen_once` has one. Outputs that were not observed
    are taken to be slower than predicted by as much as the learned ones, or a plan would flee to them; those that were
    measured before get no faster. Null stands for the topology's bandwidths. The checkpoint's own collectives come back
    if held-out exchanges confirm nothing.
    """
    kept, known = checkpoint.metadata.get("collectives"), checkpoint.known.collectives
    whole = [run for run in observation.runs if len(run.ranks) == run.world_size > 1]
    if not whole:
        return kept, []
    first = whole[0]
    ranks = attrgetter("hosts", "world_size", "backend")
    alike = [run for run in whole if ranks(run) == ranks(first)]
    links = links_of(replace(observation, runs=tuple(alike)).topology, checkpoint)
    figures, more_bytes = defaultdict(list), bag_bytes(str(observation.hardware["device"]))
    for run in alike:
        for operation, exchange_4 in (*_of_outputs(run), *_of_lookups(run, links.get("bucketing"), more_bytes)):
            figures[operation].append(exchange_4)
    seen = {operation: np.array(exchanges) for operation, exchanges in figures.items()}
    learned: dict[str, Slowdown] = {}
    said = []
    found = {operation: _learned(seen_X4, operation, links) for operation, seen_X4 in seen.items()}
    outputs = [fit for operation, (fit, *_) in found.items() if fit is not None and operation in OPERATIONS]
    slower = Slowdown.mean(outputs) if outputs else None
    for operation, (fit, before, after) in found.items():
        now = f"are now {100 * after:.0f} % off"
        if fit is None and slower is not None:
            fit, now = _as_seen_once(seen[operation], operation, links, slower), "are now as in the only run"
        if fit is not None:
            learned[operation] = fit
            what = operation if operation in LOOKUPS else f"outputs by {operation}"
            were = "not counted" if operation not in links else f"{100 * before:.0f} % off"
            said.append(f"{what}: were {were}, {now}")
    if not learned:
        return kept, []
    measured = {} if known is None else known.known
    if known is not None and known.hosts != first.hosts:
        said.append(f"what was measured between ranks of {known.hosts} host(s) is no longer known")
        measured = {}
    counted = LOOKUPS if "lookups" in learned or "lookups" in links else ()
    fits: dict[str, CollectiveFit | None] = {}
    assumed = []
    for operation in (*OPERATIONS, *counted):
        model = links.get(operation)
        if operation in learned:
            fits[operation] = learned[operation].of(_like(links, operation))
        elif model is None or operation in seen or operation in LOOKUPS:
            fits[operation] = measured.get(operation) if model is not None and model.is_measured else None
        elif slower is None:
            fits[operation] = measured.get(operation)
            assumed += [operation] * (fits[operation] is not None and not model.is_measured)
        else:
            fits[operation] = slower.of(model, least=1.0 if model.is_measured else 0.0)
            assumed.append(operation)
    return {
        "backend": first.backend,
        "world_size": first.world_size,
        "hosts": first.hosts,
        "hardware": observation.hardware,
        "revision": REVISION,
        "fits": {operation: fit and asdict(fit) for operation, fit in fits.items()},
        "assumed": assumed,
    }, said


def _of_outputs(run: ObservedRun) -> Iterator[Exchange]:
    """Yield exchanges between all ranks, unless other work hides their time. Operations on their way together share
    it."""
    if run.hides_outputs:
        return
    each_ms = sum(one.ms for one in run.outputs.values())
    share = min(1.0, run.outputs_ms / max(each_ms, 1e-9))
    for name, one in run.outputs.items():
        operation, total = name.split()[1], sum(one.bytes)
        if " of " in name or not total or one.ms <= 0:
            continue
        # Gradients go the other way: a rank receives as many as it has sent outputs.
        forward = run.outputs.get(f"{OUTPUTS} {operation} forward", one)
        sent_D = np.array(forward.bytes) * (total / max(sum(forward.bytes), 1.0))
        received_D = (total - sent_D) / (run.world_size - 1)
        slowest = float(max(sent_D.max(), received_D.max()))
        yield operation, (one.calls, slowest, total, share * one.ms)


def _of_lookups(run: ObservedRun, bucketing: CollectiveModel | None, more_bytes: float) -> Iterator[Exchange]:
    """Yield the exchange of lookups between all ranks, with the bytes that the cost counts for the run's plan. The time
    of sorting is taken off; without a model of it, runs that sort are left out."""
    of_groups = any(name.startswith("lookups") and " of " in name for name in run.collectives)
    if run.lookups_ms is None or of_groups:
        return
    sent: dict[tuple[str, str], Tensor] = defaultdict(lambda: torch.zeros(run.world_size, 2, dtype=torch.float64))
    weighted: dict[tuple[str, str], bool] = {}
    for rank in run.ranks:
        for index, kernel in enumerate(rank.kernels):
            spec, lookups = SHARDING_TYPES[kernel.sharding_type], rank.median(f"kernel {index} lookups")
            if not spec.is_replicated:
                key = kernel.module, kernel.sharding_type
                sent_bytes = kernel.lookup_bytes(lookups) + more_bytes * kernel.bags
                told_2 = torch.tensor([sent_bytes, sorting_bytes(spec, lookups, kernel.bags)])
                sent[key][rank.rank] += told_2 / run.world_size
                weighted[key] = kernel.weighted
    if not sent:
        return
    bytes_XD, sorted_XD = torch.stack(list(sent.values())).unbind(-1)
    if bucketing is None and bool(sorted_XD.any()):
        return
    sorting_ms = 0.0 if bucketing is None else float(bucketing.all_to_all_ms(sorted_XD).sum())
    slowest_X = CollectiveModel(run.world_size, bytes_per_ms=1.0, latency_ms=0.0).all_to_all_ms(bytes_XD)
    calls_X = torch.tensor([lookup_exchanges(weighted[key]) for key in sent], dtype=torch.float64)
    calls, slowest, total = float(calls_X[slowest_X > 0].sum()), float(slowest_X.sum()), float(bytes_XD.sum())
    if calls and run.lookups_ms > sorting_ms:
        yield "lookups", (calls, slowest, total * (run.world_size - 1), run.lookups_ms - sorting_ms)


def _learned(seen_X4: np.ndarray, operation: str, links: Links) -> tuple[Slowdown | None, float, float]:
    """Return a fit that is better on held-out exchanges, if any, and the mean errors before and after; before, that of
    an operation that is not counted is 1."""
    model = links.get(operation)
    before = 1.0 if model is None else float(np.abs(_shares(seen_X4, model).sum(1) - 1).mean())
    if len(seen_X4) < 2:
        return None, before, before
    shares_X2 = _shares(seen_X4, _like(links, operation))
    fits = [Slowdown.fitted(np.delete(shares_X2, at, 0)) for at in range(len(shares_X2))]
    after = fmean(abs(shares_2 @ fit.times_2 - 1) for fit, shares_2 in zip(fits, shares_X2, strict=True))
    return (Slowdown.fitted(shares_X2) if after < before - LEAST_GAIN else None), before, after


def _as_seen_once(seen_X4: np.ndarray, operation: str, links: Links, slower: Slowdown) -> Slowdown | None:
    """Return the fit to the only exchange of an operation, if outputs confirm it: by their slowdown the exchange is
    predicted nearer, as a factor, than before."""
    if len(seen_X4) > 1:
        return None
    model, shares_X2 = links.get(operation), _shares(seen_X4, _like(links, operation))
    before = math.inf if model is None else abs(math.log(_shares(seen_X4, model).sum()))
    return Slowdown.fitted(shares_X2) if abs(math.log((shares_X2 @ slower.times_2).sum())) < before else None


def _shares(seen_X4: np.ndarray, model: CollectiveModel) -> np.ndarray:
    """Return predicted latency and byte time, as shares of the observed times, [X, 2]."""
    calls_X, slowest_X, total_X, ms_X = seen_X4.T
    bytes_ms_X = slowest_X / model.bytes_per_ms + total_X / model.shared_bytes_per_ms
    return np.stack([calls_X * model.latency_ms, bytes_ms_X], -1) / ms_X[:, None]


def _like(links: Links, operation: str) -> CollectiveModel:
    """Return the model that a fit scales: the operation's own, else that of outputs on the same links; its latency is
    at least :data:`LATENCY_MS`."""
    model = links.get(operation) or links["all_to_all"]
    return replace(model, latency_ms=max(model.latency_ms, LATENCY_MS))
