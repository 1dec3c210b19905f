# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A checkpoint's cost network fitted on to this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import LabelledSets, calibrate_cost_network, mape_2, predict_ms
from dreamshard_planner.cost.network import CostNetwork
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.measure.collect import BATCH_SIZES
from dreamshard_planner.measure.hardware import hardware_name
from dreamshard_planner.measure.journals import remove_journals
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.training.config import TrainingConfig, pool_tables
from dreamshard_planner.training.measuring import measure, most_sets


def calibrate(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    seconds: float = 60.0,
    device: str = "cpu",
    threads: int = 1,
    collectives: dict[str, Any] | None = None,
    seed: int = 0,
    progress: bool = True,
    ranks: Ranks | None = None,
) -> Checkpoint:
    """Fit a checkpoint's cost network on to this machine with few measurements, and write the result ``out``. All
    ``ranks`` measure, the first one does the rest.

    A quarter of the time goes into sets of held-out tables, which tell the error before and after (in the metadata
    under ``calibration``, with what of the network was ``changed``). The policy stays as it is: what it observes is
    relative to the task's own cost. Collectives of other hardware are dropped in favour of ``collectives``, if given.

    An interrupted calibration, started again with the same settings, continues its measurements, and says so.

    Raises:
        CheckpointError: the checkpoint has no cost network of recipe ``default``, or doesn't say what it was fitted to.
        DatasetError: an interrupted calibration with other settings left its journals there.
        FileError: ``out`` cannot be written; before anything is measured.
    """
    out, network, ranks = Path(out), checkpoint.cost, ranks or Ranks()
    check_writable(out)
    if not isinstance(network, CostNetwork):
        raise CheckpointError(f"{checkpoint.name}: holds no cost network of recipe 'default' to calibrate")
    if lacking := [key for key in ("batch_sizes", "pools", "extra_pools") if key not in checkpoint.metadata]:
        raise CheckpointError(f"{checkpoint.name}: does not say what it was fitted to: no {', '.join(lacking)}")
    known_sizes = tuple(checkpoint.metadata["batch_sizes"])  # a minute has no time for the largest
    config = TrainingConfig(
        pools=tuple(checkpoint.metadata["pools"]),
        extra_pools=tuple(checkpoint.metadata["extra_pools"]),
        batch_sizes=tuple(size for size in known_sizes if size in BATCH_SIZES[device]) or known_sizes,
        device=device,
        threads=threads,
        seconds=seconds,
        seed=seed,
    )
    train_tables, test_tables = pool_tables((*config.pools, *config.extra_pools))
    max_sets = most_sets(seconds, ranks)
    parts = (("calibrate", train_tables, 0.75), ("check", test_tables, 0.25))
    journals = [out.with_suffix(f".{name}.journal") for name, *_ in parts]
    data = [
        measure(config, config.draw_sets(tables, max_sets, seed + 31 * part), journals[part], share, progress, ranks)
        for part, (_, tables, share) in enumerate(parts)
    ]
    calibrated = ranks.from_first(lambda: _calibrated(checkpoint, out, data, collectives, seed))
    remove_journals(journals, ranks)  # another calibration is of the machine as it is then
    return calibrated


def _calibrated(
    checkpoint: Checkpoint,
    out: Path,
    data: Sequence[CostDataset],
    collectives: dict[str, Any] | None,
    seed: int,
) -> Checkpoint:
    """Fit on to measured sets, ``data[0]``, check on ``data[1]``, and write."""
    network = checkpoint.cost
    sets, check = (LabelledSets.of_dataset(part, data[0].usual_ms) for part in data)
    calibrated, changed = calibrate_cost_network(network, sets, seed)
    errors = {
        f"{when}_mape": [round(value, 4) for value in mape_2(predict_ms(cost, check), check.labels_ms_X2).tolist()]
        for when, cost in (("before", network), ("after", calibrated))
    }
    known = checkpoint.metadata.get("collectives")
    if known is not None and all(known["hardware"][key] == data[0].hardware[key] for key in ("device", "name")):
        collectives = collectives or known
    before, here = checkpoint.metadata.get("hardware_name", "?"), hardware_name(data[0].hardware)
    metadata = {
        **checkpoint.metadata,
        "collectives": collectives,
        "hardware": data[0].hardware,
        "hardware_name": f"{before}, calibrated on {here}",
        "reference_ms": data[0].usual_ms,
        "calibration": {
            "from": checkpoint.name,
            "changed": changed,
            "sets": len(sets),
            "check_sets": len(check),
            **errors,
        },
    }
    Checkpoint(checkpoint.policy, calibrated, metadata).save(out)
    return Checkpoint.load(out)
