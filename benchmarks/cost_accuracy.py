# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure the error of predicted costs of fused sets of held-out tables against clean labels.

    python benchmarks/cost_accuracy.py --measure --json benchmarks/results/2026-11-21-cost-accuracy.json

``--measure`` times the sets first, each ``--rounds`` times in shuffled rounds over all of them (half a minute each on
the machine of the committed data), every run beside a reference set; the median is the label. Runs as close together
as the repeats of one collection share their luck. It also times every table of these sets alone. The measurements are
kept in ``--data`` and continued after an interruption; without ``--measure`` those are judged that are there. Where
time is short, ``--seconds`` ends the rounds, and ``--no-singles`` does without the tables alone.

Costs that are judged:

    network      the cost network of the checkpoint
    additive     sum of the measured costs of the single tables
    linear       relative least squares on summed work, fitted to the training sets of the network
    torchrec     TorchRec's estimator, forward and backward each scaled by its best constant on these very sets
    roofline     bandwidths that TorchRec assumes, scaled likewise
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
from rich.console import Console
from scipy.stats import kendalltau
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from common.linear_cost import LinearCost
from common.output import mean_interval, provenance, quiet, table_of, wide_console, write_result
from common.tasks import meta_collection
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import CostNetwork, mape_2, predict_ms
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.measure.sets import collect, draw_sets
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.pools import pool_tables
from dreamshard_planner.workload.tables import Table, Workload
from placements.placers import best_scale

DATA = Path(__file__).parent / "data"
POOLS = ("meta_like_2021", "merlin_small", "broad")
STAGES = ("forward", "backward")
MAX_WORK = {"cpu": 60e6, "cuda": 5e9}
"""Most work of a set, as when the shipped sets were drawn; none of these has Adagrad."""
REPEATS = 3
"""Runs of a set in one round."""
AGAIN = "-again"
"""Ends the names of files whose sets are those of another file, measured a second time."""


def measure(args: argparse.Namespace) -> None:
    """Time the clean sets, and their tables alone."""
    tables, work = pool_tables(POOLS)[1], MAX_WORK[args.device]
    sets = draw_sets(tables, args.sets, args.seed, None, 100, max_work=work, device=args.device)
    singles = {workload: [workload] for workloads in sets for workload in workloads}
    parts = [("clean", sets, args.rounds), ("clean-singles", list(singles.values()), 3)]
    for name, chosen, rounds in parts[:1] if args.no_singles else parts:
        path = args.data / f"{args.device}-{name}.npz"
        folder = path.with_suffix(".blocks")
        measure_rounds(chosen, rounds, folder, args.device, args.seed, args.seconds).save(path)


def measure_rounds(
    sets: Sequence[Sequence[Workload]], rounds: int, folder: Path, device: str, seed: int, seconds: float | None
) -> CostDataset:
    """Every round goes over all sets in a new order; in each, a set is measured as training sets are, several runs
    beside a few other sets. With ``seconds``, as many whole rounds as are done then, or part of the first."""
    order = np.random.default_rng(seed)
    passes = np.concatenate([order.permutation(len(sets)) for _ in range(rounds)])
    timed = collect([sets[i] for i in passes], folder, device, 1, REPEATS, seed, seconds)
    rounds = max(1, len(timed) // len(sets))
    passes = passes[: min(rounds * len(sets), len(timed))]
    sets = [sets[i] for i in np.unique(passes)]
    runs_NR = passes.argsort(kind="stable").reshape(len(sets), rounds)
    samples_ms, reference_ms = (ms[runs_NR].reshape(len(sets), -1, 2) for ms in (timed.samples_ms, timed.reference_ms))
    return CostDataset.from_sets(sets, samples_ms, timed.hardware, reference_ms, seed)


def additive_ms(sets: Sequence[Sequence[Workload]], singles: CostDataset, usual_ms: float | None) -> Tensor:
    """Sum of measured single tables, [X, 2]."""
    alone_ms = {group[0]: row for group, row in zip(singles.sets, singles.median_ms(usual_ms), strict=True)}
    return torch.stack([torch.stack([alone_ms[w] for w in workloads]).sum(0) for workloads in sets])


def torchrec_table_ms(sets: Sequence[Sequence[Workload]], device: str) -> Tensor:
    """Estimated compute of sets, the sum over their tables, [X, 2]; all taken as pooled, on one device.

    An estimate's unit is a second times unknown constants: scale it before any comparison in milliseconds.
    """
    estimates: dict[Workload, Tensor] = {}
    workloads = dict.fromkeys(workload for group in sets for workload in group)
    for batch_size in {workload.batch_size for workload in workloads}:
        names = {f"t{index}": w for index, w in enumerate(workloads) if w.batch_size == batch_size}
        tables = [
            Table(name, w.rows, w.dim, (FeatureStatistics(w.pooling_factor / w.num_features),) * w.num_features)
            for name, w in names.items()
        ]
        constraints = {
            table.name: ParameterConstraints(
                ["table_wise"], ["fused"], pooling_factors=[feature.pooling_factor for feature in table.features]
            )
            for table in tables
        }
        enumerator = EmbeddingEnumerator(Topology(1, device), batch_size, constraints)
        for option in enumerator.enumerate(meta_collection(tables), [EmbeddingBagCollectionSharder()]):
            perf = option.shards[0].perf
            estimates[names[option.name]] = torch.tensor([perf.fwd_compute, perf.bwd_compute])
    return torch.stack([torch.stack([estimates[w] for w in group]).sum(0) for group in sets]).double()


def relative_errors(predicted_X2: Tensor, label_X2: Tensor) -> np.ndarray:
    """Absolute, as shares of the labels, [X, 2]."""
    return ((predicted_X2 - label_X2) / label_X2).abs().numpy()


def errors(predicted_X2: Tensor, label_X2: Tensor) -> dict[str, Any]:
    """MAPE with its 95 % bootstrap interval over sets, 90th percentile, Kendall's tau; forward and backward."""
    relative_X2 = relative_errors(predicted_X2, label_X2)
    interval_22 = mean_interval(relative_X2, np.random.default_rng(0), draws=2000)
    return {
        stage: {
            "mape": float(relative_X2[:, i].mean()),
            "interval": interval_22[:, i].tolist(),
            "p90": float(np.percentile(relative_X2[:, i], 90)),
            "tau": float(kendalltau(predicted_X2[:, i], label_X2[:, i]).statistic),
        }
        for i, stage in enumerate(STAGES)
    }


def noise(clean: CostDataset) -> dict[str, Any]:
    """Return how far apart two halves of the rounds are, and the error of one round and of one run without correction.

    The median of all rounds is about half as far from the truth."""
    round_NR2 = torch.from_numpy(clean.corrected_ms).unflatten(1, (-1, REPEATS)).quantile(0.5, dim=2)
    known = {
        "one_round": errors(round_NR2[:, 0], clean.median_ms()),
        "one_run": errors(torch.from_numpy(clean.samples_ms)[:, 0], clean.median_ms()),
    }
    if round_NR2.shape[1] == 1:
        return known
    halves = [round_NR2[:, start::2].quantile(0.5, dim=1) for start in (0, 1)]
    return {"half_of_the_rounds": errors(halves[0], halves[1])} | known


def by_kind(sets: Sequence[Sequence[Workload]], relative_X2: np.ndarray) -> dict[str, dict[str, list[float]]]:
    """MAPE by size of the set, mean dim and mean pooling factor, [forward, backward, sets] in each bin."""
    kinds: dict[str, tuple[Callable[[Sequence[Workload]], float], tuple[float, ...]]] = {
        "tables": (len, (1, 2, 5, 10, 20, 50, 101)),
        "mean dim": (lambda ws: sum(w.dim for w in ws) / len(ws), (0, 8, 16, 32, 64, 96, 128, 257)),
        "mean pooling": (lambda ws: sum(w.pooling_factor for w in ws) / len(ws), (0, 0.1, 0.5, 2, 8, 16, 32, 301)),
        "batch": (lambda ws: ws[0].batch_size, (256, 512, 1024, 2048, 4096, 8192, 32768, 131073)),
        "features": (lambda ws: max(w.num_features for w in ws), (1, 2, 4, 17)),
    }
    result: dict[str, dict[str, list[float]]] = {}
    for kind, (value, edges) in kinds.items():
        values = np.array([value(workloads) for workloads in sets])
        result[kind] = {}
        for low, high in zip(edges, edges[1:], strict=False):
            inside = (values >= low) & (values < high)
            if inside.any():
                result[kind][f"{low:g}-{high:g}"] = [*relative_X2[inside].mean(0).tolist(), int(inside.sum())]
    return result


def on_test_sets(
    data: Path, device: str, network: CostNetwork, linear: LinearCost, usual_ms: float | None
) -> dict[str, dict[str, Any]]:
    """Errors on held-out sets that were measured once, like training sets: more of them, over wider bounds, and with
    the noise of one measurement in the error."""
    result = {}
    for path in sorted(data.glob(f"{device}-test*.npz")):
        if path.stem.endswith(AGAIN):
            continue
        held_out = CostDataset.load(path)
        test = LabelledSets.of_dataset(held_out, usual_ms)
        relative_X2 = relative_errors(predict_ms(network, test), test.labels_ms_X2)
        result[path.stem] = {
            "sets": len(held_out),
            "network": relative_X2.mean(0).tolist(),
            "linear": mape_2(predict_ms(linear, test), test.labels_ms_X2).tolist(),
            "network_by_kind": by_kind(held_out.sets, relative_X2),
        }
        again = path.with_stem(path.stem + AGAIN)
        if again.exists():
            result[path.stem] |= measured_again(network, test, CostDataset.load(again))
    return result


def measured_again(network: CostNetwork, test: LabelledSets, again: CostDataset) -> dict[str, list[float]]:
    """Return the error of a second measurement of these sets, at the best scale, as hours differ in
    speed; and how far the network is off the geometric mean of both."""
    second_X2 = again.median_ms()
    second_X2 = second_X2 * best_scale(second_X2, test.labels_ms_X2.double())
    both_X2 = (second_X2 * test.labels_ms_X2).sqrt()
    return {
        "measured_again": relative_errors(second_X2, test.labels_ms_X2).mean(0).tolist(),
        "network_against_both": relative_errors(predict_ms(network, test), both_X2).mean(0).tolist(),
    }


def judge(args: argparse.Namespace) -> dict[str, Any]:
    """All costs on the clean sets."""
    clean = CostDataset.load(args.data / f"{args.device}-clean.npz")
    sets = clean.sets
    checkpoint = resolve(args.checkpoint, args.device)
    usual_ms = checkpoint.metadata.get("reference_ms")
    label_X2 = clean.median_ms(usual_ms)
    test = LabelledSets.of(sets, label_X2)
    topology = Topology(world_size=1, compute_device=args.device)
    data = CostDataset.concatenate([CostDataset.load(path) for path in args.train])
    train = LabelledSets.of_dataset(data)
    unseen = {w.name for workloads in sets for w in workloads}
    if seen := unseen & {w.name for group in data.sets for w in group}:
        raise SystemExit(f"tables of the test sets are in the training sets too: {', '.join(sorted(seen)[:5])}")
    network = checkpoint.compute_cost(topology)
    torchrec_X2 = torchrec_table_ms(sets, args.device)
    roofline_X2 = predict_ms(RooflineCost.of_topology(topology), test).double()
    linear = LinearCost.fit(train)
    predictions = {
        "network": predict_ms(network, test).double(),
        "linear": predict_ms(linear, test),
        "torchrec": torchrec_X2 * best_scale(torchrec_X2, label_X2),
        "roofline": roofline_X2 * best_scale(roofline_X2, label_X2),
    }
    if not args.no_singles:
        singles = CostDataset.load(args.data / f"{args.device}-clean-singles.npz")
        predictions["additive"] = additive_ms(sets, singles, usual_ms)
    return {
        "sets": len(sets),
        "rounds": clean.repeats // REPEATS,
        "noise": noise(clean),
        "costs": {name: errors(predicted_X2, label_X2) for name, predicted_X2 in predictions.items()},
        "network_by_kind": by_kind(sets, relative_errors(predictions["network"], label_X2)),
        "test_sets": on_test_sets(args.data, args.device, network, linear, usual_ms),
    }


def print_result(result: dict[str, Any], console: Console) -> None:
    """For people."""
    title = f"{result['sets']} sets of held-out tables, {result['rounds']} rounds: error of costs"
    headings = (f"{stage} {what}" for stage in STAGES for what in ("MAPE", "95 %", "p90", "tau"))
    table = table_of(title, "cost", *headings)
    for name, both in {**result["costs"], **{f"noise: {k}": v for k, v in result["noise"].items()}}.items():
        cells = []
        for stage in STAGES:
            e = both[stage]
            low, high = e["interval"]
            cells += [f"{e['mape']:.1%}", f"{low:.1%}-{high:.1%}", f"{e['p90']:.1%}", f"{e['tau']:.3f}"]
        table.add_row(name, *cells)
    console.print(table)
    for kind, bins in result["network_by_kind"].items():
        cells = (f"{name}: {f:.1%}/{b:.1%} ({int(count)})" for name, (f, b, count) in bins.items())
        console.print(f"network by {kind}: " + ", ".join(cells))
    for name, test in result["test_sets"].items():
        cells = ("{} {:.1%}/{:.1%}".format(cost, *test[cost]) for cost in ("network", "linear"))
        console.print(f"{name}, {test['sets']} sets measured once: {', '.join(cells)}")
        if "measured_again" in test:
            told = ["{:.1%}/{:.1%}".format(*test[key]) for key in ("measured_again", "network_against_both")]
            console.print(f"    measured again {told[0]}; the network against the mean of both {told[1]}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="time the sets first")
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, help="of measuring; default: until all rounds are done")
    parser.add_argument("--no-singles", action="store_true", help="measure no table alone, and judge no additive cost")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the measurements")
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", type=Path, nargs="+", help="training sets of linear")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    args.train = args.train or sorted(args.data.glob(f"{args.device}-train*.npz"))
    if min(args.sets, args.rounds) < 1:
        parser.error("--sets and --rounds must be at least 1")
    quiet()
    if args.measure:
        measure(args)
    result = judge(args)
    print_result(result, wide_console(160))
    write_result(args.json, provenance(torch.device(args.device)), result)


if __name__ == "__main__":
    main()
