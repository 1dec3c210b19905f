# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs of a checkpoint corrected by what training steps took, and kept where ``auto`` finds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.compute import OPTIMIZERS
from dreamshard_planner.cost.correction import StageCheck, choose_corrections
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import CalibrationRefused, ObservationError
from dreamshard_planner.measure.hardware import REFERENCE, hardware_name
from dreamshard_planner.observing.exchanges import learn_exchanges
from dreamshard_planner.observing.observation import Observation, ObservedKernel, ObservedRun, RankSteps
from dreamshard_planner.search_space.kernels import DENSE, FUSED
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.features import optimizer_of
from dreamshard_planner.workload.tables import Workload

OTHER_LOOKUPS = 0.1
"""Share by which a kernel's lookups may differ from those that statistics of the batches tell of it."""


@dataclass(frozen=True)
class ObservedSets:
    """Fused kernels that were observed, each once, whatever runs and ranks had it: one plan may give all of its ranks
    equal parts of the same tables, none of which confirms what is learned from another. Apart, where these looked up
    more or less."""

    sets: LabelledSets
    kinds: frozenset[str]
    """Sharding types among them."""
    left_out: tuple[str, ...]
    """Why kernels are not among them, in words."""

    @classmethod
    @neutral()
    def of(cls, observation: Observation) -> ObservedSets:
        """Of all runs and ranks.

        Raises:
            ObservationError: there is none to learn from; says why.
        """
        found: dict[tuple[Any, ...], tuple[list[Workload], list[list[float]]]] = {}
        left_out: dict[str, None] = {}
        kernels = (
            (run, rank, index, kernel)
            for run in observation.runs
            for rank in run.ranks
            for index, kernel in enumerate(rank.kernels)
        )
        for run, rank, index, kernel in kernels:
            workloads, reason = _asked(run, rank, index, kernel)
            if reason:
                left_out[reason] = None
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
        return cls(sets, frozenset(kind for kind, *_ in found), tuple(left_out))


def _asked(run: ObservedRun, rank: RankSteps, index: int, kernel: ObservedKernel) -> tuple[list[Workload], str]:
    """What a kernel was asked for; or why nobody can tell."""
    name = f"{kernel.sharding_type} of {kernel.tables[0].name}"
    if kernel.kernel != FUSED:
        if kernel.kernel == DENSE:
            return [], f"{name}: replicas are updated outside their kernels; observe a plan whose tables are sharded"
        return [], f"{kernel.kernel} kernels take more than their own time"
    if not all(rank.median(f"kernel {index} {way}") > 0 for way in ("lookups", "forward", "backward")):
        return [], f"{name}: the kernel looked nothing up, or was not trained"
    try:
        workloads = kernel.workloads(run.statistics)
    except ObservationError as error:
        return [], str(error)
    told, read = sum(one.lookups for one in workloads), rank.median(f"kernel {index} lookups")
    if abs(told - read) > OTHER_LOOKUPS * read:
        return [], f"{name}: the kernel reads {read:,.0f} ids a step, and the batches have {told:,.0f} for it"
    return workloads, ""


@neutral()
def learn(checkpoint: Checkpoint, observation: Observation, out: str | Path, *, force: bool = False) -> Checkpoint:
    """Correct a checkpoint's costs, or those of bandwidths where it has no network, by optimizer and direction: their
    level, or what rows, their weights and lookups add, or both, as far as kernels that are held out confirm it; and
    latency and bandwidth of exchanges (:func:`learn_exchanges`). Of kernels, what was not observed stays.

    Args:
        checkpoint: to do better than.
        observation: of one kind of hardware.
        out: file to write.
        force: write it, even where nothing was made better.

    Returns:
        What was written; its metadata have under ``learned`` from what, errors before and after, and what was never
        observed.

    Raises:
        CalibrationRefused: no held-out kernel confirmed anything, or the kernels were FBGEMM's reference kernels;
            nothing was written.
        ObservationError: there is no kernel to learn from, or the checkpoint's costs are of another kind of device.
        FileError: ``out`` cannot be written.
    """
    if observation.hardware.get("instruction_set") == REFERENCE and not force:
        raise CalibrationRefused(
            f"{observation.title}: the training ran FBGEMM's slow reference kernels, although its CPU has AVX2; "
            "observe it with the fast ones (dreamshard doctor says how)"
        )
    observed = ObservedSets.of(observation)
    device, known = str(observation.hardware["device"]), checkpoint.metadata.get("hardware", {}).get("device")
    if known != device and (checkpoint.cost is not None or "learned" in checkpoint.metadata):
        raise ObservationError(
            f"{checkpoint.name} has costs of {known}, and {device} was observed: use --checkpoint auto"
        )
    prior = RooflineCost.of_topology(observation.topology)
    # Bandwidths of memory and of the link to the host's: corrections are of these, whatever the topology says later.
    memory, link = checkpoint.metadata.get("learned", {}).get("bytes_per_ms") or (
        prior.memory_bytes_per_ms,
        prior.uvm_bytes_per_ms,
    )
    compute = checkpoint.cost or RooflineCost.of_bandwidths(device, memory, link, str(observation.hardware.get("name")))
    corrections, checks = choose_corrections(compute, checkpoint.metadata.get("corrections", {}), observed.sets)
    collectives, exchanges = learn_exchanges(observation, checkpoint)
    if not force and not any(check.changed for check in checks) and not exchanges:
        kernels = f"{len(observed.sets)} kernels" if len(observed.sets) > 1 else "one kernel, which none confirms"
        raise CalibrationRefused(
            f"{observation.title} ({kernels}): no correction made the costs of {checkpoint.name} better on kernels or "
            "exchanges held out; observe another plan too",
            [check.to_dict(observed=True) for check in checks],
        )
    title = f"{observation.title} on {hardware_name(observation.hardware)}"
    seen = set(optimizer_of(observed.sets.features_SF).tolist())
    unseen = [title for index, title in enumerate(OPTIMIZERS.values()) if index not in seen]
    unseen += [kind for kind in SHARDING_TYPES if kind not in observed.kinds]
    # Of what an earlier learning had observed, corrections are kept: that is not as it was before any.
    ever_unseen = checkpoint.metadata.get("learned", {}).get("never_observed", unseen)
    never, earlier = ([one for one in unseen if (one in ever_unseen) == yes] for yes in (True, False))
    told = {
        "from": checkpoint.name,
        "runs": len(observation.runs),
        "steps": observation.steps,
        "sets": len(observed.sets),
        "bytes_per_ms": [memory, link],
        "title": title,
        "said": _said(title, checks, earlier, never),
        "checks": [check.to_dict(observed=True) for check in checks],
        "exchanges": exchanges,
        "never_observed": never,
        "left_out": list(observed.left_out),
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


def _said(title: str, checks: Sequence[StageCheck], earlier: Sequence[str], never: Sequence[str]) -> str:
    off: dict[str, list[str]] = {}
    for check in checks:
        off.setdefault(OPTIMIZERS[check.optimizer], []).append(f"{100 * check.after:.0f}")
    errors = ", ".join(f"{name} ({' and '.join(both)} % off on kernels held out)" for name, both in off.items())
    of_earlier = f"observed in earlier runs: {', '.join(earlier)}; " if earlier else ""
    return f"learned from {title}: {errors}; {of_earlier}never observed, and as before: {', '.join(never) or 'nothing'}"
