# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How far a short calibration carries a checkpoint to other hardware: here, to kernels with other threads.

    python benchmarks/transfer.py --threads 2 --json benchmarks/results/2026-11-22-transfer.json

Measures sets of training tables on the target, first for as long as a calibration would and then for the rest of a
training from nothing, and sets of held-out tables in several rounds, as cost_accuracy.py does. The records have sets
without Adagrad, of up to 60e6 of work, as training drew them until 2026-11-26. Judged on the latter:

    as shipped     the checkpoint, as measured elsewhere
    scaled         the same, times the best constant for each stage
    calibrated     corrected by optimizer and direction as ``dreamshard calibrate`` does, with half of the sets of the
                   first ``--calibrate-seconds``, where the other half confirms it
    from nothing   a network that knows those sets alone
    full           a network that knows all sets of the target
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from cost_accuracy import REPEATS, measure_rounds
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.cost.correction import CorrectedCost, choose_corrections
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import LabelledSets, fit_cost_network, mape_2, predict_ms
from dreamshard_planner.measure.collect import collect
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.training import MAX_SETS_PER_SECOND, TrainingConfig, pool_tables
from placements.placers import best_scale


def measure(args: argparse.Namespace, folder: Path) -> tuple[CostDataset, CostDataset, CostDataset]:
    """Sets for the calibration, the other training sets, and held-out sets."""
    config = TrainingConfig(device=args.device)
    train_tables, test_tables = pool_tables((*config.pools, *config.extra_pools))
    arena = Arena(args.device, config.arena_bytes, seed=args.seed)

    def timed(name: str, seconds: float, seed: int) -> CostDataset:
        most = int(seconds * MAX_SETS_PER_SECOND) + 1
        sets = config.draw_sets(train_tables, most, seed)
        journal = folder / f"{name}.journal"
        return collect(sets, journal, args.device, args.threads, REPEATS, args.seed, seconds, arena=arena)

    few = timed("calibrate", args.calibrate_seconds, args.seed)
    rest = timed("rest", args.seconds - args.calibrate_seconds, args.seed + 1)
    sets = config.draw_sets(test_tables, args.test_sets, args.seed + 2)
    return few, rest, measure_rounds(sets, args.rounds, folder / "test.journal", args.device, args.seed, args.threads)


def judge(args: argparse.Namespace, few: CostDataset, rest: CostDataset, test: CostDataset) -> dict[str, Any]:
    """Errors of all five on the held-out sets, all at the speed of the machine while the held-out sets were timed."""
    shipped = resolve(args.checkpoint, args.device).cost
    first = LabelledSets.of_dataset(few, test.usual_ms)
    sets = LabelledSets.of_dataset(CostDataset.concatenate([few, rest]), test.usual_ms)
    held_out = LabelledSets.of_dataset(test)
    label_X2 = held_out.labels_ms_X2
    halves = (first.select(torch.arange(start, len(first), 2)) for start in (0, 1))
    corrections, _ = choose_corrections(shipped, {}, *halves)
    as_shipped_X2 = predict_ms(shipped, held_out)
    best_2 = best_scale(predict_ms(shipped, first), first.labels_ms_X2)
    predictions = {
        "as shipped": as_shipped_X2,
        "scaled": as_shipped_X2 * best_2,
        "calibrated": predict_ms(CorrectedCost(shipped, corrections), held_out),
        "from nothing": predict_ms(fit_cost_network(first), held_out),
        "full": predict_ms(fit_cost_network(sets), held_out),
    }
    return {
        "sets": {"calibration": len(few), "full": len(sets), "held out": len(test)},
        "mape": {name: mape_2(predicted_X2, label_X2).tolist() for name, predicted_X2 in predictions.items()},
        "scale": best_2.tolist(),
        "corrections": corrections,
    }


def print_result(result: dict[str, Any]) -> None:
    """For people."""
    title = f"error on {result['sets']['held out']} held-out sets"
    table = table_of(title, "network", "forward", "backward", "over full", "")
    full = result["mape"]["full"]
    for name, errors in result["mape"].items():
        ratios = (f"{error / least:.2f}" for error, least in zip(errors, full, strict=True))
        table.add_row(name, *(f"{error:.1%}" for error in errors), *ratios)
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of the target's kernels")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of measuring for full training, calibration included"
    )
    parser.add_argument("--calibrate-seconds", type=float, default=45.0, help="what `calibrate --seconds 60` trains on")
    parser.add_argument("--test-sets", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5, help="over the held-out sets")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = measure(args, Path(folder))
    torch.set_num_threads(1)
    result = judge(args, *data)
    print_result(result)
    hardware = {"hardware": data[0].hardware}  # that of the target: this process fits on one thread
    write_result(args.json, provenance(torch.device(args.device)), hardware, result)


if __name__ == "__main__":
    main()
