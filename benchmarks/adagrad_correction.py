# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What the shipped network lacks of Adagrad with a state per weight, learned from recorded training steps.

    python benchmarks/adagrad_correction.py
    python benchmarks/adagrad_correction.py --out cpu.safetensors

The network's data have SGD and row-wise Adagrad, and it rates Adagrad as the latter. Two records of ``run_dlrm.py``,
on the kind of machine that measured these data, tell what fused kernels of a DLRM trained with Adagrad took. Those of
ranks that had one kernel are learned from as from any observed ones; of the backward, since the forward knows no
optimizer. Of the earlier record's ranks with several kernels sums are told.

What Adagrad adds is learned as a time per row and per weight that a batch reads: a state as large as the weights, a
square root and a division for each. Eight kernels cannot tell this from the network times 3.1, which fits them as well.
Random sets of another kind of processor can, whatever its level: ``--sets N`` times some on this machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from torch import Tensor

import calibration_check
from common.output import table_of, wide_console
from dlrm.job import BATCHES_KEPT
from dlrm.model import feature_names, make_batches, scale_tables
from dreamshard_planner import Checkpoint, TableStatistics
from dreamshard_planner.checkpoints.checkpoint import SHIPPED, shipped
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.correction import UNCHANGED, CorrectedCost, learn_corrections
from dreamshard_planner.cost.fit import LabelledSets, predict_ms
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import Workload, workloads_of

RESULTS = Path(__file__).parent / "results"
RECORDS = ("2026-11-22-step-profile.json", "2026-11-24-run_dlrm-hot.json")
PER_ROW_AND_WEIGHT, TIMES = (1, 2), (0,)
"""Of the numbers of a correction."""


@dataclass(frozen=True)
class RankKernels:
    """What a rank computed under a plan, kernel by kernel, and what all of it took, [2]."""

    title: str
    kernels: list[list[Workload]]
    took_ms_2: Tensor

    def told_ms_2(self, compute: ComputeCost) -> Tensor:
        """By a cost."""
        sets = LabelledSets.of(self.kernels, torch.zeros(len(self.kernels), 2))
        return predict_ms(compute, sets).sum(0)


def recorded(path: Path) -> Iterator[RankKernels]:
    """Every rank of every plan of a record."""
    record = json.loads(path.read_text())
    config, ranks = record["config"], record["world_size"]
    drawn, _ = scale_tables(named_pool(config["tables"]), config["max_rows"], config["dim"], config["hot"])
    sizes = min(config["steps"], BATCHES_KEPT), config["batch_size"]
    batches = [batch for rank in range(ranks) for batch in make_batches(drawn, *sizes, rank, ranks, config["seed"])]
    statistics = TableStatistics.from_batches(batch.sparse_features for batch in batches)
    tables = [
        replace(one, optimizer=config["optimizer"], features=tuple(statistics[name] for name in feature_names(one)))
        for one in drawn
    ]
    whole = dict(zip((one.name for one in tables), workloads_of(tables, config["batch_size"] * ranks), strict=True))
    for plan in record["planners"]:
        for rank in range(ranks):
            took_ms_2 = torch.tensor([plan["forward_ms"][rank], plan["backward_ms"][rank]])
            yield RankKernels(f"{path.stem[:10]} {plan['name']} {rank}", list(_kernels(plan, rank, whole)), took_ms_2)


def _kernels(plan: dict[str, Any], rank: int, whole: dict[str, Workload]) -> Iterator[list[Workload]]:
    """Tables of one sharding type are fused."""
    kernels: dict[str, list[Workload]] = {}
    for name, ranks in plan["ranks"].items():
        columns = whole[name].dim // len(ranks)
        parts = [whole[name].part(whole[name].rows, columns, 0) for one in ranks if one == rank]
        if parts:
            kernels.setdefault(plan["split"].get(name, "table_wise"), []).extend(parts)
    yield from kernels.values()


def corrected(network: ComputeCost, seen: list[RankKernels], numbers: tuple[int, ...]) -> list[list[float]]:
    """Of Adagrad's forward, none; of its backward, these numbers, as kernels that were alone on their rank teach."""
    alone = [one for one in seen if len(one.kernels) == 1]
    sets = LabelledSets.of([one.kernels[0] for one in alone], torch.stack([one.took_ms_2 for one in alone]))
    corrections, checks = learn_corrections(network, {}, sets, [numbers])
    print(checks[1].to_dict()["said"])
    return [list(UNCHANGED[0]), [float(f"{number:.5g}") for number in corrections["adagrad"][1]]]


def tell_shape(network: ComputeCost, ways: dict[str, list[list[float]]], count: int) -> None:
    """Errors of the backward of random sets on this machine, as predicted and at the best scale."""
    calibration_check.SETS = count
    groups = calibration_check.draw(random.Random(1), "adagrad")
    sets = LabelledSets.of(groups, calibration_check.timed_ms(groups, 1).quantile(0.5, dim=1))
    table = table_of(
        f"{count} random sets on {describe_hardware('cpu', 1)['name']}, backward", "way", "off", "at scale"
    )
    for name, rates in ways.items():
        ratio_X = predict_ms(CorrectedCost(network, {"adagrad": rates}), sets)[:, 1] / sets.labels_ms_X2[:, 1]
        off = [float((ratio_X / scale - 1).abs().mean()) for scale in (1.0, ratio_X.median())]
        table.add_row(name, *(f"{share:.0%}" for share in off))
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the shipped checkpoint with this correction")
    parser.add_argument("--sets", type=int, default=0, help="random ones to time here")
    given = parser.parse_args()
    start = shipped(SHIPPED, "cpu", "default")
    assert start.cost is not None
    seen = [one for name in RECORDS for one in recorded(RESULTS / name)]
    ways = {str(numbers): corrected(start.cost, seen, numbers) for numbers in (TIMES, PER_ROW_AND_WEIGHT)}
    rates = ways[str(PER_ROW_AND_WEIGHT)]
    table = table_of("kernels of a rank, ms", "rank", "took", "before", "now", "off")
    for one in seen:
        both = [one.told_ms_2(cost) for cost in (start.cost, CorrectedCost(start.cost, {"adagrad": rates}))]
        took, before, now = (float(ms_2.sum()) for ms_2 in (one.took_ms_2, *both))
        table.add_row(one.title, f"{took:.1f}", f"{before:.1f}", f"{now:.1f}", f"{now / took - 1:+.0%}")
    wide_console().print(table)
    print(f"backward of Adagrad: {rates[1]}")
    if given.sets:
        tell_shape(start.cost, {"as it is": [list(one) for one in UNCHANGED], **ways}, given.sets)
    if given.out:
        alone = sum(len(one.kernels) == 1 for one in seen)
        said = f"backward of Adagrad, by {alone} kernels of training steps on {start.measured_on}"
        metadata = {**start.metadata, "corrections": {"adagrad": rates}, "corrected": said}
        Checkpoint(start.policy, start.cost, metadata).save(given.out)


if __name__ == "__main__":
    main()
