# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans over every sharding type, on TorchRec's own terms: ours, TorchRec's planner, and a beam over column splits.

    python benchmarks/full_search.py --record benchmarks/results/2026-11-22-full-search.jsonl

Four planners get the same model, topology (GPUs of 80 GB, eight to a host), batch and true pooling factors: TorchRec's
``EmbeddingShardingPlanner``, the same with its ``DynamicProgrammingProposer``, NeuroShard's beam (``beam.py``),
and ours with ``cost_source="torchrec"``. Every plan is estimated afresh by TorchRec's estimators and rated by its perf
model (the slowest rank's sum), and by our own cost source as well. Once with all sharding types, once without
data-parallel, on all sides.

The bound is what no plan over TorchRec's options can be below, memory aside: the sum over tables of their cheapest
option over the ranks, and the largest part that some table cannot do without.

Each plan is made in a process of its own, on one thread, and appends one line to the record; the same command
continues where it ends, and summarizes. Seconds are of processor time, so that they mean the same on a shared machine,
and hold everything from the planner's making to its plan; memory is the peak of the process until then, libraries
included. ``--limit`` ends TorchRec's proposals and the beam; who reaches it is rated by the best plan so far and marked
``>``, and who has none long after (:func:`kill_seconds`) is ended. A larger limit runs again what a smaller one cut.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import Enumerator, PlannerError, Proposer, ShardingOption

from all_types.column_halves import column_beam_plan
from all_types.summary import PLANNERS, Key, summarize
from all_types.tasks import QUICK, SETTINGS, FullTask, tasks
from common.provenance import commit, provenance
from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.search.starts import JointOptions
from dreamshard_planner.search_space.enumeration import FastEnumerator, estimate_all, torchrec_estimators
from dreamshard_planner.search_space.kernels import sharding_in_words
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.search_space.usable_options import usable_options
from dreamshard_planner.torchrec_components.perf_model import DreamShardPerfModel

SHARDERS = [EmbeddingBagCollectionSharder()]
RESERVED = 0.15
"""Share of memory that TorchRec's planner reserves by default."""


@dataclass(frozen=True)
class Made:
    """A plan, None where none was found, and whether its search came to an end."""

    plan: list[ShardingOption] | None
    finished: bool


class Timed(Proposer):
    """Another proposer, until there is no time left."""

    def __init__(self, inner: Proposer, left: Callable[[], bool]) -> None:
        self._inner, self._left, self.cut = inner, left, False

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """The other's."""
        self._inner.load(search_space, enumerator)

    def propose(self) -> list[ShardingOption] | None:
        """The other's, or None where time is up."""
        proposal = self._inner.propose()
        self.cut = proposal is not None and not self._left()
        return None if self.cut else proposal

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """The other's."""
        self._inner.feedback(*args, **kwargs)


class Contest:
    """One task in one setting; each planner is asked from nothing but the model."""

    def __init__(self, task: FullTask, setting: str, limit: float) -> None:
        self.task, self.setting, self.limit = task, setting, limit
        self._start = time.process_time()
        self.model, self.constraints, self.topology = task.model(), task.constraints(setting), task.topology()
        self.planners: dict[str, Callable[[], Made]] = {
            "dreamshard": self.dreamshard,
            "torchrec": lambda: self.torchrec(None),
            "torchrec_dynamic": lambda: self.torchrec([DynamicProgrammingProposer()]),
            "column_beam": self.column_beam,
        }

    def estimate(self, options: list[ShardingOption]) -> None:
        """TorchRec's perf and storage."""
        estimate_all(torchrec_estimators(self.topology, self.constraints), options, SHARDERS)

    def dreamshard(self) -> Made:
        """Ours, on TorchRec's estimates."""
        planner = DreamShardPlanner(
            topology=self.topology,
            batch_size=self.task.batch_size,
            constraints=self.constraints,
            stats=[],
            debug=False,
            exact_training=False,
            cost_source="torchrec",
        )
        planner.plan(self.model, SHARDERS)
        return Made(planner.options, True)

    def torchrec(self, proposers: list | None) -> Made:
        """TorchRec's, with its own proposers or others."""
        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.task.batch_size,
            constraints=self.constraints,
            proposer=proposers,
            stats=[],
            debug=False,
        )
        timed = [Timed(proposer, self.left) for proposer in planner._proposers]
        planner._proposers = timed
        planner.plan(self.model, SHARDERS)
        return Made(planner._best_plan, not any(proposer.cut for proposer in timed))

    def left(self) -> bool:
        """Whether the limit allows more."""
        return time.process_time() - self._start < self.limit

    def options(self, sharding_types: Sequence[str] | None = None) -> list[ShardingOption]:
        """TorchRec's search space, or that of other sharding types, estimated."""
        constraints = {
            name: ParameterConstraints(
                sharding_types=list(sharding_types or constraint.sharding_types or SETTINGS["all"]),
                pooling_factors=constraint.pooling_factors,
            )
            for name, constraint in self.constraints.items()
        }
        return FastEnumerator(self.topology, self.task.batch_size, constraints).enumerate(self.model, SHARDERS)

    def reserved(self) -> Topology:
        """What TorchRec's default reservation leaves."""
        return HeuristicalStorageReservation(RESERVED).reserve(
            self.topology, self.task.batch_size, self.model, SHARDERS, self.constraints
        )

    def column_beam(self) -> Made:
        """NeuroShard's way, on TorchRec's estimates."""
        context = PlanningContext.of(self.topology, self.constraints, cost_source="torchrec")
        whole = [option for option in self.options([TW]) if option.compute_kernel == "fused"]
        return Made(*column_beam_plan(context, whole, self.reserved(), self.estimate, self.left))

    def bound_ms(self) -> dict[str, float]:
        """What no plan can be below: all work spread evenly, and the largest part that cannot be avoided."""
        context = PlanningContext.of(self.topology, self.constraints, cost_source="torchrec")
        asked = JointOptions(context.cost(context.read(usable_options(self.options(), "cuda"))))
        return {
            "level_ms": asked.least_ms / self.task.ranks,
            "largest_ms": float(asked.largest_ms_TO.min(1).max()),
        }

    def rated(self, plan: list[ShardingOption]) -> dict[str, Any]:
        """One plan, estimated afresh."""
        self.estimate(plan)
        used = [0] * self.task.ranks
        for option in plan:
            for shard in option.shards:
                used[shard.rank] += shard.storage.hbm
        context = PlanningContext.of(self.topology, self.constraints)
        return {
            "torchrec_ms": NoopPerfModel(self.topology).rate(plan),
            "own_ms": float(DreamShardPerfModel(self.topology, context=context).costs(plan).overall_ms_B[0]),
            "own_source": str(context.compute.source),
            "hbm_bytes": max(used),
            "hbm_limit_bytes": min(device.storage.hbm for device in self.reserved().devices),
            "types": dict(Counter(sharding_in_words(o.sharding_type, o.compute_kernel) for o in plan).most_common()),
        }

    def play(self, name: str) -> dict[str, Any]:
        """One planner's line of the record, or the bound's."""
        if name == "bound":
            return self.bound_ms()
        before_bytes, wall = peak_bytes(), time.perf_counter()
        self._start = time.process_time()
        try:
            made, error = self.planners[name](), "found no plan"
        except PlannerError as raised:
            made, error = Made(None, self.left()), str(raised).strip().splitlines()[0]
        line = {
            "seconds": time.process_time() - self._start,
            "wall_seconds": time.perf_counter() - wall,
            "peak_bytes": peak_bytes(),
            "before_bytes": before_bytes,
            "finished": made.finished,
        }
        return line | (self.rated(made.plan) if made.plan is not None else {"error": error})


def peak_bytes() -> int:
    """Of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def kill_seconds(limit: float) -> float:
    """After which a run is ended: what comes before the search takes time as well."""
    return 60 + 3 * limit


def in_own_process(key: Key, limit: float) -> dict[str, Any]:
    """Plan and rate in a new process; ended where it takes too long."""
    line: dict[str, Any] = dict(zip(("task", "setting", "planner"), key, strict=True))
    line |= {"limit": limit, "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    command = [sys.executable, __file__, "--limit", str(limit), "--play", *key]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGXCPU:
        return line | {"seconds": kill_seconds(limit), "finished": False, "error": "ended without a plan"}
    if done.returncode:
        raise RuntimeError(f"{key}: {done.stderr[-2000:]}")
    return line | json.loads(done.stdout.splitlines()[-1])


def read_record(path: Path) -> dict[Key, dict[str, Any]]:
    """The last line of each key."""
    if not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return {(line["task"], line["setting"], line["planner"]): line for line in lines if "task" in line}


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("full-search.jsonl"))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of search")
    parser.add_argument("--tasks", default=None, help="comma-separated names; all by default")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--planners", default=",".join((*PLANNERS, "bound")))
    parser.add_argument("--quick", action="store_true", help="two small tasks in the first setting: a minute")
    parser.add_argument("--again", action="store_true", help="also what is in the record; the last line counts")
    parser.add_argument("--play", nargs=3, metavar=("TASK", "SETTING", "PLANNER"), help="one run, in this process")
    args = parser.parse_args()
    if args.play:
        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(kill_seconds(args.limit)), resource.RLIM_INFINITY))
        task, setting, planner = args.play
        print(json.dumps(Contest(tasks()[task], setting, args.limit).play(planner)))
        return
    names = QUICK if args.quick else args.tasks.split(",") if args.tasks else tuple(tasks())
    settings = tuple(SETTINGS)[:1] if args.quick else args.settings.split(",")
    if not args.record.exists():
        append(args.record, provenance(torch.device("cpu")))
    console = Console(width=170)
    for name in names:
        for setting in settings:
            for planner in args.planners.split(","):
                key = (name, setting, planner)
                known = read_record(args.record).get(key)
                if known and not args.again and (known.get("finished", True) or known["limit"] >= args.limit):
                    continue
                line = in_own_process(key, args.limit)
                append(args.record, line)
                told = [f"{what} {line[what]:.4g}" for what in ("seconds", "torchrec_ms", "level_ms") if what in line]
                console.print(*key, *told)
    summarize(read_record(args.record), console)


if __name__ == "__main__":
    main()
