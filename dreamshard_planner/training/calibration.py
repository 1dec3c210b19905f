# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Correct a checkpoint's costs for this machine by measured sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.correction import FEW_SETS, OPTIMIZERS, StageCheck, choose_corrections, errors_in_words
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import CostNetwork
from dreamshard_planner.errors import CalibrationRefused, CheckpointError
from dreamshard_planner.measure.hardware import hardware_name
from dreamshard_planner.measure.kernels import Arena, core_use_ns
from dreamshard_planner.measure.sets import collect, draw_sets, most_sets
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.workload.pools import pool_tables
from dreamshard_planner.workload.tables import Table, Workload

BUSY_SHARE = 0.25
"""Largest share of the time in which others had the core: they change caches and memory."""
POOL = "broad"
"""Default tables to measure with."""
_MAX_TABLES, _MAX_WORK, _REPEATS = 40, {"cpu": 30e6, "cuda": 2.5e9}, 3  # small sets: a minute measures many
_ARENA_BYTES = {"cpu": 1 << 30}  # of weights; optimizer states take as much again


def calibrate(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    seconds: float = 60.0,
    device: str = "cpu",
    threads: int = 1,
    tables: Sequence[Table] | None = None,
    batch_sizes: Sequence[int] | None = None,
    collectives: dict[str, Any] | None = None,
    seed: int = 0,
    force: bool = False,
    progress: bool = True,
) -> Checkpoint:
    """Correct a checkpoint's costs for this machine with few measurements, and write the result to ``out``.

    Two halves of the time measure sets of different tables, unless ``tables`` are given. Each half confirms the
    corrections fitted to the other (:mod:`dreamshard_planner.cost.correction`). The metadata under ``calibration`` have
    the errors before and after. Networks and measured collectives are kept. With one thread processor time counts, else
    the wall clock.

    Args:
        checkpoint: costs to correct.
        out: file to write.
        seconds: of measuring.
        device: ``cpu`` or ``cuda``.
        threads: intra-op threads.
        tables: with the optimizers, dims and lookups that count. Default: the pool ``broad`` with every optimizer.
        batch_sizes: samples that kernels see. Default: ``BATCH_SIZES`` of the device.
        collectives: of this machine, in place of the checkpoint's.
        seed: of the sets.
        force: write the result even with few sets or a busy core.
        progress: show bars on stderr.

    Raises:
        CalibrationRefused: too few sets, a busy core, or bad costs that no correction improved; nothing was written.
        CheckpointError: the checkpoint has no cost network.
        FileError: ``out`` cannot be written; before anything is measured.
    """
    if not seconds > 0:
        raise ValueError(f"seconds of measuring must be positive, got {seconds}")
    out, network = Path(out), checkpoint.cost
    check_writable(out)
    if not isinstance(network, CostNetwork):
        raise CheckpointError(
            f"{checkpoint.name} holds a policy and no cost network to calibrate, since nothing was measured on such a "
            f"device: make one with dreamshard train --device {device}"
        )
    if tables is None:
        pools = [dict.fromkeys(OPTIMIZERS, half) for half in pool_tables((POOL,))]
    else:
        pools = [_by_optimizer(tables)] * 2
    drawn = [_draw(of_half, seconds, seed + half, batch_sizes, device) for half, of_half in enumerate(pools)]
    arena, before_ns = Arena(device, _ARENA_BYTES.get(device), seed), core_use_ns()
    with TemporaryDirectory() as folder:
        halves = [
            collect(sets, f"{folder}/{half}", device, threads, _REPEATS, seed, seconds / 2, progress, arena=arena)
            for half, sets in enumerate(drawn)
        ]
    computed_ns, waited_ns = core_use_ns() - before_ns
    # Events on the card time its kernels, whatever the processor does.
    others_share = float(waited_ns / max(1, computed_ns + waited_ns)) if device == "cpu" else 0.0
    data = CostDataset.concatenate(halves)
    half_X = torch.arange(2).repeat_interleave(torch.tensor([len(half) for half in halves]))
    sets = LabelledSets.of_dataset(data)
    corrections, checks = choose_corrections(network, checkpoint.known.corrections, sets, half_X)
    if not force:
        _refuse(checks, others_share, seconds)
    dims, batches = zip(*((shard.dim, shard.batch_size) for shard in data.shards), strict=True)
    measured = f"dims {min(dims)} to {max(dims)}, batches {min(batches):,} to {max(batches):,}"
    told = {
        "from": checkpoint.name,
        "sets": len(sets),
        "clock": "processor time" if (device, threads) == ("cpu", 1) else "wall clock",
        "others_share": round(others_share, 3),
        "checked": f"{errors_in_words(checks)}; {measured}",
        "checks": [one.to_dict() for one in checks],
    }
    metadata = {
        **{key: value for key, value in checkpoint.metadata.items() if key not in ("learned", "corrected")},
        "corrections": corrections,
        "collectives": collectives or checkpoint.metadata.get("collectives"),
        "hardware": data.hardware,
        "hardware_name": f"{checkpoint.measured_on}, calibrated on {hardware_name(data.hardware)}",
        "reference_ms": data.usual_ms,
        "calibration": told,
    }
    Checkpoint(checkpoint.policy, network, metadata).save(out)
    return Checkpoint.load(out)


def _by_optimizer(tables: Sequence[Table]) -> dict[str, list[Table]]:
    """Return a user's tables by optimizer, without the distribution of ids, which whole tables do not need."""
    pools: dict[str, list[Table]] = {}
    for table in tables:
        features = tuple(replace(feature, ids=None) for feature in table.features)
        costed = table.optimizer if table.optimizer in OPTIMIZERS else "rowwise_adagrad"
        pools.setdefault(costed, []).append(replace(table, features=features))
    return pools


def _draw(
    pools: Mapping[str, Sequence[Table]], seconds: float, seed: int, batch_sizes: Sequence[int] | None, device: str
) -> list[list[Workload]]:
    """Draw random sets that take turns in optimizers, each with its tables."""
    count, work = most_sets(seconds) // len(pools) + 1, _MAX_WORK[device]
    drawn = [
        draw_sets(pool, count, 100 * seed + k, batch_sizes or None, _MAX_TABLES, optimizer, work, device)
        for k, (optimizer, pool) in enumerate(pools.items())
    ]
    return [group for groups in zip(*drawn, strict=True) for group in groups]


def _refuse(checks: Sequence[StageCheck], others_share: float, seconds: float) -> None:
    """Raise CalibrationRefused if the result is no better, or if that is unknown."""
    reasons, fewest = [], min(check.sets for check in checks) // 2  # of each half
    if others_share > BUSY_SHARE:
        share = f"{100 * others_share:.0f} % of the time (at most {100 * BUSY_SHARE:.0f} %)"
        reasons.append(f"others had the core for {share}: measure while the machine is free")
    if fewest < FEW_SETS:
        longer = f"fewer than {FEW_SETS} tell nothing: --seconds {math.ceil(seconds * 2 * FEW_SETS / max(1, fewest))}"
        reasons.append(f"{fewest} measured set(s) of some optimizer, and {longer}")
    elif not any(check.changed or check.good for check in checks):
        reasons.append("no correction made the costs better on held-out sets, and they are not good")
    if reasons:
        raise CalibrationRefused("; ".join(reasons), [check.to_dict() for check in checks])
