# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Correct a checkpoint's costs of kernels and exchanges by observed training steps.

Shapes: X exchanges, D ranks, 2 = bytes of lookups and of ids to sort, or latency and bytes. Of an exchange 4: calls,
most bytes that any rank sends or receives, bytes of all ranks, milliseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
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
    OPERATIONS,
    REVISION,
    CollectiveFit,
    CollectiveModel,
    bag_bytes,
)
from dreamshard_planner.cost.correction import LEAST_GAIN, OPTIMIZERS, choose_corrections, errors_in_words
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import CalibrationRefused, ObservationError
from dreamshard_planner.measure.hardware import REFERENCE, hardware_name
from dreamshard_planner.observing.observation import OUTPUTS, Observation, ObservedKernel, ObservedRun, RankSteps
from dreamshard_planner.planning.rater import links_of
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
    told = [check.to_dict(observed=True) for check in checks]
    if not force and not any(check.changed for check in checks) and not exchanges:
        kernels = f"{len(sets)} kernels" if len(sets) > 1 else "one kernel, which none confirms"
        raise CalibrationRefused(
            f"{observation.title} ({kernels}): no correction reduced the errors of {checkpoint.name} on held-out "
            "kernels or exchanges; observe another plan too",
            told,
        )
    title = f"{observation.title} on {hardware_name(observation.hardware)}"
    seen = set(optimizer_of(sets.features_SF).tolist())
    unseen = [name for index, name in enumerate(OPTIMIZERS.values()) if index not in seen]
    unseen += [kind for kind in SHARDING_TYPES if kind not in kinds]
    # Corrections from earlier observations are kept, so these parts are not "as before".
    before = known.learned.never_observed
    never = unseen if before is None else [one for one in unseen if one in before]
    shares = [share for run in observation.runs if (share := run.embedding_share) is not None]
    said = f"learned from {title}: {errors_in_words(checks)}; never observed, and as before: "
    metadata = {
        **{key: value for key, value in checkpoint.metadata.items() if key not in ("calibration", "corrected")},
        "corrections": corrections,
        "collectives": collectives,
        "hardware": observation.hardware,
        "hardware_name": f"{checkpoint.measured_on}, learned on {hardware_name(observation.hardware)}",
        "learned": {
            "from": checkpoint.name,
            "digest": checkpoint.digest(),
            "runs": len(observation.runs),
            "steps": observation.steps,
            "sets": len(sets),
            "bytes_per_ms": [memory, link],
            "title": title,
            "said": said + (", ".join(never) or "nothing"),
            "checks": told,
            "exchanges": exchanges,
            "never_observed": never,
            "embedding_share": fmean(shares) if shares else None,
            "left_out": left_out,
        },
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


class _Seen:
    """Observed exchanges of one operation."""

    def __init__(self, operation: str, figures: Sequence[tuple[float, ...]], links: Links) -> None:
        in_use, self._seen_X4 = links.get(operation), np.array(figures)
        like = in_use or links["all_to_all"]  # outputs on the same links
        self.model = replace(like, latency_ms=max(like.latency_ms, LATENCY_MS))
        """The model that a fit scales."""
        self._shares_X2 = self._shares(self.model)
        self._before_X = np.zeros(len(figures)) if in_use is None else self._shares(in_use).sum(1)
        self.before = float(np.abs(self._before_X - 1).mean())
        """Mean error of the costs in use, 1 if they do not count the operation."""

    def _shares(self, model: CollectiveModel) -> np.ndarray:
        """Return predicted latency and byte time, as shares of the observed times, [X, 2]."""
        calls_X, slowest_X, total_X, ms_X = self._seen_X4.T
        bytes_ms_X = slowest_X / model.bytes_per_ms + total_X / model.shared_bytes_per_ms
        return np.stack([calls_X * model.latency_ms, bytes_ms_X], -1) / ms_X[:, None]

    def errors(self, times_2: np.ndarray) -> np.ndarray:
        """Return relative errors of the model slowed down, [X]."""
        return np.abs(self._shares_X2 @ times_2 - 1)

    def fitted(self, without: int | None = None) -> np.ndarray:
        """Return factors of latency and byte time by robust least squares. The shares of the slowest rank's bytes and
        of all ranks' bytes are kept, since few runs tell them apart."""
        shares_X2 = self._shares_X2 if without is None else np.delete(self._shares_X2, without, 0)
        level = -np.log(np.median(shares_X2.sum(1)))

        def off(log_2: np.ndarray) -> np.ndarray:
            return np.append(np.log(shares_X2 @ np.exp(log_2)), TOGETHER * (log_2[0] - log_2[1]))

        return np.exp(least_squares(off, [level, level], loss="soft_l1", f_scale=OUTLYING).x)

    def held_out_error(self) -> float:
        """Return the mean error of each exchange by a fit to the others; infinite without others."""
        if len(self._seen_X4) == 1:
            return math.inf
        return fmean(self.errors(self.fitted(without=at))[at] for at in range(len(self._seen_X4)))

    def is_confirmed_by(self, times_2: np.ndarray) -> bool:
        """Return whether the only exchange is predicted nearer, as a factor, by the slowdown of outputs than before."""
        before, after = self._before_X[0], self._shares_X2[0] @ times_2
        return len(self._seen_X4) == 1 and (not before or abs(math.log(after)) < abs(math.log(before)))


def learn_exchanges(observation: Observation, checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Return collectives for a checkpoint's metadata, and sentences about the changes.

    Counts runs whose ranks were all observed, with the hosts and backend of the first one. An operation that was
    observed without a better fit stays as it was, unless outputs confirm its only exchange. Outputs that were not
    observed are taken to be slower than predicted by as much as the learned ones, or a plan would flee to them; those
    that were measured before get no faster. Null stands for the topology's bandwidths. The checkpoint's own collectives
    come back if held-out exchanges confirm nothing.
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
    seen = {operation: _Seen(operation, exchanges, links) for operation, exchanges in figures.items()}
    after = {operation: one.held_out_error() for operation, one in seen.items()}
    learned = {operation: one.fitted() for operation, one in seen.items() if after[operation] < one.before - LEAST_GAIN}
    now = {operation: f"{100 * after[operation]:.0f} % off" for operation in learned}
    outputs = [operation for operation in learned if operation in OPERATIONS]
    slower_2 = np.exp(np.mean([np.log(learned[operation]) for operation in outputs], axis=0)) if outputs else None
    for operation, one in seen.items():
        if operation not in learned and slower_2 is not None and one.is_confirmed_by(slower_2):
            learned[operation], now[operation] = one.fitted(), "as in the only run"
    if not learned:
        return kept, []
    said = []
    for operation in (name for name in seen if name in now):
        what = operation if operation in LOOKUPS else f"outputs by {operation}"
        were = f"{100 * seen[operation].before:.0f} % off" if operation in links else "not counted"
        said.append(f"{what}: were {were}, are now {now[operation]}")
    if known is not None and known.hosts != first.hosts:
        said.append(f"what was measured between ranks of {known.hosts} host(s) is no longer known")
        known = None
    measured, assumed = ({}, set()) if known is None else (known.known, {*known.assumed})
    errors = {operation: float(np.median(seen[operation].errors(times_2))) for operation, times_2 in learned.items()}
    fits: dict[str, CollectiveFit | None] = {}
    for operation in (*OPERATIONS, *(LOOKUPS if "lookups" in learned or "lookups" in links else ())):
        if operation in learned:
            assumed.discard(operation)
            fits[operation] = seen[operation].model.slowed(learned[operation].tolist(), errors[operation])
        elif slower_2 is None or operation in seen or operation in LOOKUPS:
            fits[operation] = measured.get(operation)
        else:
            assumed.add(operation)
            model = links[operation]
            times_2 = np.maximum(slower_2, 1.0) if model.is_measured else slower_2
            fits[operation] = model.slowed(times_2.tolist(), fmean(errors[name] for name in outputs))
    return {
        "backend": first.backend,
        "world_size": first.world_size,
        "hosts": first.hosts,
        "hardware": observation.hardware,
        "revision": REVISION,
        "fits": {operation: fit and asdict(fit) for operation, fit in fits.items()},
        "assumed": sorted(assumed),
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
