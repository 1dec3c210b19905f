# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Correct a checkpoint's costs for this machine, or measure their errors on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.compute import OPTIMIZERS, ComputeCost
from dreamshard_planner.cost.correction import FEW_SETS, StageCheck, check_costs, choose_corrections
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import CostNetwork
from dreamshard_planner.errors import CalibrationRefused, CheckpointError
from dreamshard_planner.measure.collect import remove_blocks
from dreamshard_planner.measure.hardware import hardware_name
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.measure.sets import BATCH_SIZES, GroupMix, draw_sets
from dreamshard_planner.measure.timing import processor_time
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.training.config import TrainingConfig, measure, most_sets, pool_tables
from dreamshard_planner.workload.tables import Table, Workload

BUSY_SHARE = 0.25
"""Largest share of the kernels' time in which others had the core: they change caches and memory."""
POOL = "broad"
"""Default tables to measure with."""
_MAX_TABLES, _MAX_WORK, _REPEATS = 40, {"cpu": 30e6, "cuda": 2.5e9}, 3  # small sets: a minute measures many
_ARENA_BYTES = {"cpu": 1 << 30}  # of weights; Adagrad's states take as much again


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
    ranks: Ranks | None = None,
) -> Checkpoint:
    """Correct a checkpoint's costs for this machine with few measurements, and write the result to ``out``.

    Two halves of the time measure sets of different tables, unless ``tables`` are given. Each half confirms the
    corrections fitted to the other (:mod:`dreamshard_planner.cost.correction`). The metadata under ``calibration`` have
    the errors before and after. Networks and measured collectives are kept. With one thread processor time counts, else
    the wall clock. The same call continues an interrupted calibration.

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
        ranks: processes that measure; the first one does the rest.

    Raises:
        CalibrationRefused: too few sets, a busy core, or bad costs that no correction improved; nothing was written.
        CheckpointError: the checkpoint has no cost network.
        DatasetError: an interrupted calibration with other settings left its blocks there.
        FileError: ``out`` cannot be written; before anything is measured.
    """
    out, network, ranks = Path(out), checkpoint.cost, ranks or Ranks()
    check_writable(out)
    if not isinstance(network, CostNetwork):
        raise CheckpointError(f"{checkpoint.name}: holds no cost network to calibrate")
    config = _config(seconds, device, threads, batch_sizes, seed)
    halves = pool_tables((POOL,)) if tables is None else (tables, tables)
    folders = [out.with_suffix(f".{name}.blocks") for name in ("calibrate", "check")]
    measured = []
    for part, (half, folder) in enumerate(zip(halves, folders, strict=True)):
        pools = dict.fromkeys(OPTIMIZERS, half) if tables is None else _by_optimizer(half)
        measured.append(_measure(_draw(pools, config, seed + part, ranks), config, folder, 0.5, progress, ranks))
    halves_of_data, shares = zip(*measured, strict=True)
    data, others_share = CostDataset.concatenate(halves_of_data), max(shares)
    half_X = torch.arange(2).repeat_interleave(torch.tensor([len(half) for half in halves_of_data]))
    for folder in folders:
        remove_blocks(folder, ranks)  # another calibration is of the machine as it is then

    def corrected() -> Checkpoint:
        in_use = checkpoint.metadata.get("corrections", {})
        sets = LabelledSets.of_dataset(data)
        corrections, checks = choose_corrections(network, in_use, sets, half_X)
        if not force:
            _refuse(checks, others_share, seconds)
        told = {
            "from": checkpoint.name,
            "sets": len(sets),
            "clock": "processor time" if (device, threads) == ("cpu", 1) else "wall clock",
            "others_share": round(others_share, 3),
            "checked": _checked(checks, data),
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

    return ranks.from_first(corrected)


def check(compute: ComputeCost, *, seconds: float = 10.0, device: str = "cpu", threads: int = 1) -> list[StageCheck]:
    """Measure a compute cost's errors on this machine by optimizer and direction, on sets of random tables."""
    config, ranks = _config(seconds, device, threads, None, 1), Ranks()
    sets = _draw(dict.fromkeys(OPTIMIZERS, pool_tables((POOL,))[1]), config, 1, ranks)
    with TemporaryDirectory() as folder:
        data, _ = _measure(sets, config, Path(folder) / "check.blocks", 1.0, True, ranks)
    return check_costs(compute, LabelledSets.of_dataset(data))


def _config(seconds: float, device: str, threads: int, batch_sizes: Sequence[int] | None, seed: int) -> TrainingConfig:
    sizes, arena = tuple(batch_sizes or BATCH_SIZES[device]), _ARENA_BYTES.get(device)
    return TrainingConfig(
        batch_sizes=sizes,
        device=device,
        threads=threads,
        seconds=seconds,
        repeats=_REPEATS,
        arena_bytes=arena,
        seed=seed,
    )


def _by_optimizer(tables: Sequence[Table]) -> dict[str, list[Table]]:
    """Return a user's tables by optimizer, without the distribution of ids, which whole tables do not need."""
    pools: dict[str, list[Table]] = {}
    for table in tables:
        features = tuple(replace(feature, ids=None) for feature in table.features)
        costed = table.optimizer if table.optimizer in OPTIMIZERS else "rowwise_adagrad"
        pools.setdefault(costed, []).append(replace(table, features=features))
    return pools


def _draw(
    pools: Mapping[str, Sequence[Table]], config: TrainingConfig, seed: int, ranks: Ranks
) -> list[list[Workload]]:
    """Draw random sets that take turns in optimizers, each with its tables."""
    count, work = most_sets(config.seconds, ranks) // len(pools) + 1, _MAX_WORK[config.device]
    mix = GroupMix(rowwise_adagrad=0.0, adagrad=0.0)
    drawn = [
        draw_sets(pool, count, 100 * seed + k, config.batch_sizes, _MAX_TABLES, mix, work, config.device)
        for k, pool in enumerate(pools.values())
    ]
    return [
        [replace(workload, optimizer=name) for workload in group]
        for groups in zip(*drawn, strict=True)
        for name, group in zip(pools, groups, strict=True)
    ]


def _measure(
    sets: Sequence[Sequence[Workload]], config: TrainingConfig, folder: Path, part: float, progress: bool, ranks: Ranks
) -> tuple[CostDataset, float]:
    """Return measured sets, and the largest share of a rank's time in which others had the core."""
    with processor_time((config.device, config.threads) == ("cpu", 1)) as clock:
        data = measure(config, sets, folder, part, progress, ranks)
    return data, max(ranks.gather(lambda: clock.others_share))


def _refuse(checks: Sequence[StageCheck], others_share: float, seconds: float) -> None:
    """Raise CalibrationRefused if the result is no better, or if that is unknown."""
    reasons, fewest = [], min(check.sets for check in checks) // 2  # of each half
    if others_share > BUSY_SHARE:
        share = f"{100 * others_share:.0f} % of the time of the kernels (at most {100 * BUSY_SHARE:.0f} %)"
        reasons.append(f"others had the core for {share}: measure while the machine is free")
    if fewest < FEW_SETS:
        longer = f"fewer than {FEW_SETS} tell nothing: --seconds {math.ceil(seconds * 2 * FEW_SETS / max(1, fewest))}"
        reasons.append(f"{fewest} measured set(s) of some optimizer, and {longer}")
    elif not any(check.changed or check.good for check in checks):
        reasons.append("no correction made the costs better on held-out sets, and they are not good")
    if reasons:
        raise CalibrationRefused("; ".join(reasons), [check.to_dict() for check in checks])


def _checked(checks: Sequence[StageCheck], data: CostDataset) -> str:
    """Return optimizers with errors, dims and batches, for reports."""
    off: dict[str, list[str]] = {}
    for one in checks:
        off.setdefault(OPTIMIZERS[one.optimizer], []).append(f"{100 * one.after:.0f}")
    optimizers = ", ".join(f"{name} ({' and '.join(errors)} % off)" for name, errors in off.items())
    dims, batches = (data.columns[name] for name in ("dim", "batch_size"))
    return f"{optimizers}; dims {dims.min()} to {dims.max()}, batches {batches.min():,} to {batches.max():,}"
