# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Default plans of both planners on unseen tables, and a published plan: every rank's kernels measured on one card.

    python benchmarks/gpu_contest.py plan kernels.json.gz                  # beforehand; needs no GPU
    python benchmarks/gpu_contest.py measure kernels.json.gz --record gpu-contest.jsonl --seconds 480
    python benchmarks/gpu_contest.py summarize gpu-contest.jsonl

``plan`` draws tasks of tables that trained nothing: 20 to 60 tables on 8 or 16 H100s, 2,048 samples a rank. Both
planners know the lookups per sample, and neither knows how often rows repeat; the measured kernels follow the true
reuse. In every second task the optimizer keeps its states element by element, so that column slices train exactly, and
our planner plans once more with TorchRec's slices alone. Tables are cut to 12 GB for all planners, which fits the
buffer of the measured kernels. TorchRec's planner ends by itself or after ``--limit`` seconds of processor time.

The published plan (``published_plan.py``) gives its five slowest ranks by our costs, under that plan and under ours, at
a quarter of its batch: outputs of sequence tables would not fit the card otherwise.

``measure`` times each different kernel of a task once a round, in shuffled order, beside a reference set. Exchanges
are those of the prior. Kernels of data-parallel tables are measured as fused ones at the local batch; the time of their
table-sized gradient is modelled. One JSON line a task; the same command continues where it ended.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import published_plan
from common.measured_costs import SetClock, spread
from common.output import append, interval, lines_of, provenance, quiet, table_of, wide_console
from common.tasks import RANKS_PER_HOST, feature_names, meta_collection
from default_plans import plan_within
from dlrm.options import OPTIMIZERS
from dreamshard_planner import DreamShardPlanner, TableStatistics
from dreamshard_planner.cost.roofline import dense_ms
from dreamshard_planner.devices import Machine
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.sharding_types import sharding_in_words
from dreamshard_planner.workload.pools import named_pool, pool_tables
from dreamshard_planner.workload.tables import Table, Workload

LOCAL_BATCH, TABLES, MOST_BYTES = 2048, (20, 60), 12e9
POOLS = ("meta_like_2021", "merlin_medium", "mlperf_dlrm_dcnv2", "meta_like_2022", "embark_t200")
"""The first trained the network with half of its tables; tasks are of the others. The other pools trained nothing."""
BASE, OURS, SAME_SLICES = "torchrec", "dreamshard", "dreamshard, torchrec's slices"
SLOWEST, BATCH_SHARE = 5, 4


@dataclass(frozen=True)
class Task:
    """Tables and ranks to plan for."""

    name: str
    tables: tuple[Table, ...]
    ranks: int

    @classmethod
    def draw(cls, index: int, generator: torch.Generator) -> Task:
        """Draw tables of one pool, with one optimizer for all of them."""
        pool = POOLS[index % len(POOLS)]
        tables = pool_tables([pool])[1] if pool == POOLS[0] else named_pool(pool)
        count = int(torch.randint(TABLES[0], min(TABLES[1], len(tables)) + 1, (1,), generator=generator))
        optimizer = ("rowwise_adagrad", "adagrad", "rowwise_adagrad", "sgd")[index % 4]
        chosen = torch.randperm(len(tables), generator=generator)[:count].tolist()
        capped = [replace(t, optimizer=optimizer, rows=min(t.rows, int(MOST_BYTES / 4 / t.dim))) for t in tables]
        ranks = RANKS_PER_HOST * (1 + index // 2 // len(POOLS) % 2)
        return cls(f"{index} {pool}, {optimizer}", tuple(capped[i] for i in chosen), ranks)

    @property
    def topology(self) -> Topology:
        return Machine(ranks_per_host=RANKS_PER_HOST, hosts=self.ranks // RANKS_PER_HOST, gpu="h100").topology()

    def model(self) -> nn.Module:
        """On the meta device, with the optimizer in the backward."""
        model = nn.Module()
        model.sparse = meta_collection(self.tables)
        optimizer = OPTIMIZERS[self.tables[0].optimizer]
        apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.01})
        return model

    def plans(self, limit: float) -> dict[str, dict[str, Any]]:
        """Plan by all planners; the kernels and exchanges of each plan."""
        features = {name: f for t in self.tables for name, f in zip(feature_names(t), t.features, strict=True)}
        known = {
            t.name: ParameterConstraints(pooling_factors=[f.pooling_factor for f in t.features]) for t in self.tables
        }
        given = {"topology": self.topology, "batch_size": LOCAL_BATCH, "stats": [], "debug": False}
        ours = {**given, "constraints": known, "optimizers_attached": True}
        planners = {BASE: EmbeddingShardingPlanner(**given, constraints=known), OURS: DreamShardPlanner(**ours)}
        if self.tables[0].optimizer != "rowwise_adagrad":
            theirs = EmbeddingEnumerator(self.topology, LOCAL_BATCH, known)
            planners[SAME_SLICES] = DreamShardPlanner(**ours, enumerator=theirs)
        reader = OptionReader(known, TableStatistics(features))
        rater = PlanRater(PlannedRanks.of(self.topology), reader)
        plans = {}
        for name, planner in planners.items():
            start = time.process_time()
            plan, ended = plan_within(planner, self.model(), limit if name == BASE else math.inf)
            plans[name] = {"seconds": time.process_time() - start, "ended": ended} | kernels_of(plan, rater)
        return plans


def kernels_of(plan: Sequence[ShardingOption], rater: PlanRater) -> dict[str, Any]:
    """Return the workloads of each rank's fused kernels, and what else the plan is predicted to take."""
    read = rater.read(plan, with_storage=False)
    sharding, cost = read.sharding(plan), rater.cost(read)
    rated, topology = cost.rate(sharding), rater.ranks.topology
    ranks: list[dict[int, list[Workload]]] = [{} for _ in range(read.problem.num_ranks)]
    extra_ms_D = torch.zeros(read.problem.num_ranks, dtype=torch.float64)
    for rank, part in zip(*(row_X.tolist() for row_X in read.problem.laid(sharding)), strict=True):
        ranks[rank].setdefault(int(read.problem.group_P[part]), []).append(read.workload_P[part])
        extra_ms_D[rank] += dense_ms(read.parts[part].dense_elements, read.parts[part].dense_passes, topology)
    return {
        "kernels": [list(groups.values()) for groups in ranks],
        "extra_ms": extra_ms_D.tolist(),
        "predicted_ms": rated.device_ms_BD[0].tolist(),
        "exchange_ms": float(rated.collectives_ms_B[0]),
        "types": dict(Counter(sharding_in_words(o.sharding_type, o.compute_kernel) for o in plan)),
    }


def published_task() -> dict[str, dict[str, Any]]:
    """Return the slowest ranks of the published plan, and the same ranks of ours."""
    planner = DreamShardPlanner(**published_plan.given(gpu="h100"))
    planner.plan(published_plan.model(), published_plan.SHARDERS)
    plans = {BASE: published_plan.published_options(planner), OURS: planner.options}
    told = {}
    for name, plan in plans.items():
        for option in plan:
            option.batch_size = published_plan.LOCAL_BATCH // BATCH_SHARE
        told[name] = kernels_of(plan, planner._model().rater)
    for entry in told.values():
        slowest = np.argsort(entry["predicted_ms"])[::-1][:SLOWEST].tolist()
        entry |= {"ranks": slowest} | {
            key: [entry[key][rank] for rank in slowest] for key in ("kernels", "extra_ms", "predicted_ms")
        }
        entry["kernels"] = [[[measurable(w) for w in one] for one in rank] for rank in entry["kernels"]]
    return told


def measurable(workload: Workload) -> Workload:
    """Return a workload with whole bags a sample: features with several poolings count as several features."""
    return replace(workload, num_features=max(1, round(workload.num_features * workload.output_share)), output_share=1)


class Catalogue:
    """Workloads, each written once."""

    NAMES = tuple(field.name for field in fields(Workload) if field.name != "ids")

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def indices(self, workloads: Sequence[Workload]) -> list[int]:
        """Return the places of some workloads, in order."""
        texts = [json.dumps([asdict(w)[name] for name in self.NAMES]) for w in workloads]
        return sorted(self.rows.setdefault(text, len(self.rows)) for text in texts)

    @staticmethod
    def load(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Workload]:
        """Return the workloads of a file, which names their fields."""
        named = (dict(zip(names, row, strict=True)) for row in rows)
        return [Workload(**row | {"reuse_histogram": tuple(row["reuse_histogram"])}) for row in named]


def plan(args: argparse.Namespace) -> None:
    """Write a file of kernels, or continue it."""
    generator, tasks = torch.Generator().manual_seed(0), []
    if args.file.exists():
        with gzip.open(args.file, "rt") as file:
            tasks = json.load(file)["tasks"]
    drawn: dict[str, Callable[[], dict[str, Any]]] = {"published plan": published_task}
    for index in range(args.tasks):
        task = Task.draw(index, generator)
        drawn[f"{task.name}, {len(task.tables)} x {task.ranks}"] = partial(task.plans, args.limit)
    done = {task["task"] for task in tasks}
    for name in [name for name in drawn if name not in done]:
        catalogue, plans = Catalogue(), drawn[name]()
        for entry in plans.values():
            entry["kernels"] = [[catalogue.indices(one) for one in rank] for rank in entry["kernels"]]
        tasks.append({"task": name, "plans": plans, "workloads": [json.loads(row) for row in catalogue.rows]})
        print(name, *(f"{n} {max(e['predicted_ms']) + e['exchange_ms']:.3f}" for n, e in plans.items()), flush=True)
        part = args.file.with_suffix(".part")
        with gzip.open(part, "wt") as file:
            json.dump(provenance(torch.device("cpu")) | {"fields": Catalogue.NAMES, "tasks": tasks}, file)
        part.replace(args.file)  # a killed process leaves a whole file


def measure(args: argparse.Namespace) -> None:
    """Time the kernels of a file, task by task."""
    started = time.monotonic()
    with gzip.open(args.file, "rt") as file:
        planned = json.load(file)
    if not args.record.exists():
        made = {key: planned[key] for key in ("commit", "date")}
        append(args.record, provenance(torch.device(args.device)) | {"plans": made})
    done = {line.get("task") for line in lines_of(args.record)}
    arena, at_once = Arena(args.device), (4 << 30) if args.device == "cpu" else (12 << 30)
    for task in [one for one in planned["tasks"] if one["task"] not in done][: args.tasks]:
        begun = time.monotonic()
        if begun - started > args.seconds:
            break
        workloads = Catalogue.load(planned["fields"], task["workloads"])
        clock = SetClock(workloads, arena, bytes_at_once=at_once)
        sets = sorted({tuple(one) for entry in task["plans"].values() for rank in entry["kernels"] for one in rank})
        samples = clock.samples(sets, args.rounds)
        clock.usual_ms = samples.reference_ms.sum(-1).median()
        ms = dict(zip(sets, clock.corrected_ms(samples).quantile(0.5, dim=1), strict=True))
        for entry in task["plans"].values():
            kernels = entry.pop("kernels")
            entry["types_of_kernels"] = [len(rank) for rank in kernels]
            nothing = torch.zeros(2, dtype=torch.float64)
            entry["measured_ms"] = [sum((ms[tuple(one)] for one in rank), nothing).tolist() for rank in kernels]
        append(
            args.record,
            {
                "task": task["task"],
                "kernels": len(sets),
                "reference_ms": float(clock.usual_ms),
                "spread": float(spread(samples.samples_ms).mean()),
                "launch_bound": float(samples.launch_bound_N.mean()),
                "seconds": time.monotonic() - begun,
                "plans": task["plans"],
            },
        )
        print(f"{task['task']}: {len(sets)} kernels in {time.monotonic() - begun:.1f} s", flush=True)
    summarize(args)


def slowest_ms(entry: dict[str, Any], which: str = "measured_ms") -> float:
    """Return the kernels of the slowest rank, measured or predicted."""
    if which == "predicted_ms":
        return max(entry[which])
    return max(sum(ms) + extra for ms, extra in zip(entry[which], entry["extra_ms"], strict=True))


def summarize(args: argparse.Namespace) -> None:
    """Print plans over TorchRec's, with intervals over tasks; and predicted over measured kernels."""
    rows, console = [row for row in lines_of(args.record) if "task" in row], wide_console(150)
    title = "Milliseconds of the slowest rank's kernels; with exchanges by the prior"
    table = table_of(title, "task", BASE, OURS, SAME_SLICES, "predicted")
    logs: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        cells, base = [], row["plans"][BASE]
        for name in (BASE, OURS, SAME_SLICES):
            if (entry := row["plans"].get(name)) is None:
                cells.append("")
                continue
            kernels, total = slowest_ms(entry), slowest_ms(entry) + entry["exchange_ms"]
            cells.append(f"{kernels:.3f} {total:.3f}{'' if entry.get('ended', True) else ' (cut)'}")
            if base.get("ended", "published" not in row["task"]):
                kind = "all" if name == OURS else name
                base_ms = slowest_ms(base)
                both = {"kernels": kernels / base_ms, "total": total / (base_ms + base["exchange_ms"])}
                for what, ratio in both.items():
                    logs.setdefault((kind, what), []).append(math.log(ratio))
                    if name == OURS and SAME_SLICES in row["plans"]:
                        logs.setdefault(("all, tasks with slices", what), []).append(math.log(ratio))
        off = [slowest_ms(e, "predicted_ms") / slowest_ms(e) for e in row["plans"].values()]
        table.add_row(row["task"], *cells, " ".join(f"{one:.3f}" for one in off))
    console.print(table)
    for (kind, what), of in logs.items():
        if kind != BASE:
            logs_N = np.array(of)
            low, mean, high = interval(lambda some, logs_N=logs_N: np.exp(logs_N[some].mean(1)), len(of))
            console.print(f"{kind}, {what} over TorchRec's: {mean:.3f} ({low:.3f}-{high:.3f}), {len(of)} tasks")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "measure", "summarize"))
    parser.add_argument("file", type=Path, help="of kernels; of summarize: the record")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of TorchRec's search")
    parser.add_argument("--record", type=Path, default=Path("gpu-contest.jsonl"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task later than this")
    args = parser.parse_args()
    quiet()
    if args.what == "summarize":
        args.record = args.file
    {"plan": plan, "measure": measure, "summarize": summarize}[args.what](args)


if __name__ == "__main__":
    main()
