# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which plans are made for 120 problems, as one line each: so that rebuilding the planner can show what it changed.

    export PYTHONPATH=.
    python benchmarks/plan_record.py --out before.jsonl              # of one state of the code
    python benchmarks/plan_record.py --out after.jsonl --against before.jsonl
    python benchmarks/plan_record.py --time ../before                # planning times, another checkout's beside these

The problems: random mixed models (constraints, several hosts, all cost sources), tasks of the full search, and
rules of placement. A plan is told by a digest of types, kernels and ranks, and by its predicted cost; where no plan is
possible, by the kind of error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders

from common.tasks import SETTINGS, tasks
from dreamshard_planner import DreamShardPlanner, PlacementRules
from tests.mixed_models import mixed_case

ROOT = Path(__file__).parent.parent
MIXED = 96
FULL = ("mlperf x 8", "random 50 x 8", "merlin tiny x 8", "merlin tiny x 16", "meta 60 x 8", "meta 60 x 64")
COST_SOURCES = ("auto", "roofline", "torchrec")

Problem = Callable[[], DreamShardPlanner]


def problems() -> Iterator[tuple[str, Problem]]:
    """Name of each, and what plans it and answers with the planner."""
    for seed in range(MIXED):
        yield f"mixed {seed}", lambda seed=seed: _mixed(seed)
    for name in FULL:
        for source in COST_SOURCES:
            yield f"{name}, {source}", lambda name=name, source=source: _full(name, source)
    for seed in range(6):
        yield f"rules {seed}", lambda seed=seed: _ruled(seed)


def _mixed(seed: int) -> DreamShardPlanner:
    case = mixed_case(seed)
    planner = case.planner(seed=seed)
    planner.plan(case.model, case.sharders)
    return planner


def _full(name: str, source: str, **changed: object) -> DreamShardPlanner:
    task = tasks()[name]
    planner = DreamShardPlanner(
        topology=task.topology(),
        batch_size=task.batch_size,
        constraints=task.constraints("all"),
        cost_source=source,
        sharding_types=SETTINGS["no_dp"],
        stats=[],
        debug=False,
        **changed,
    )
    planner.plan(task.model(), get_default_sharders())
    return planner


def _ruled(seed: int) -> DreamShardPlanner:
    names = [table.name for table in tasks()["mlperf x 8"].make()]
    first = names[seed:]
    rules = PlacementRules(together=[first[:3]], apart=[first[4:8]], on_ranks={first[9]: [seed, seed + 1]})
    return _full("mlperf x 8", "auto", placement_rules=rules)


def outcome(problem: Problem) -> dict[str, object]:
    """Return the record of one problem."""
    try:
        planner = problem()
    except (PlannerError, ValueError) as error:
        return {"error": type(error).__name__}
    saved = planner.saved_plan()
    shards = [(name, t.sharding_type, t.kernel, [s.rank for s in t.shards]) for name, t in saved.tables()]
    digest = hashlib.sha256(json.dumps(sorted(shards)).encode()).hexdigest()[:12]
    return {"plan": digest, "total_ms": planner.report().chosen.total_ms}


def compared(before: dict[str, object] | None, after: dict[str, object]) -> str:
    """In which way a problem's plan changed."""
    if before is None:
        return "new"
    if "error" in before or "error" in after:
        return "same error" if before == after else "ERROR CHANGED"
    ratio = after["total_ms"] / before["total_ms"] if before["total_ms"] else 1.0
    if before["plan"] == after["plan"]:
        return "same plan" if abs(ratio - 1) < 1e-6 else "same plan, rated otherwise"
    return "other plan, cheaper" if ratio < 1 - 1e-6 else "other plan, same cost" if ratio < 1 + 1e-6 else "DEARER"


def record(out: Path, against: Path | None, every: int) -> None:
    """Plan all problems, or every so many; say of each how it compares with an earlier record."""
    before = {} if against is None else {row["name"]: row for row in map(json.loads, against.read_text().splitlines())}
    changes: Counter[str] = Counter()
    with out.open("w") as file:
        for name, problem in islice(problems(), 0, None, every):
            row = outcome(problem)
            print(json.dumps({"name": name, **row}), file=file, flush=True)
            if against is not None:
                old = {key: value for key, value in before[name].items() if key != "name"} if name in before else None
                change = compared(old, row)
                changes[change] += 1
                if change not in ("same plan", "same error"):
                    print(f"{name}: {change} {old} {row}", flush=True)
    print(dict(changes))


def planning_seconds(checkout: Path, names: list[str]) -> dict[str, float]:
    """Processor seconds of planning each problem once, in a process of its own on a checkout's code."""
    command = [sys.executable, str(checkout / "benchmarks" / "plan_record.py"), "--seconds", *names]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def tell_seconds(names: list[str]) -> None:
    """Each problem planned twice, the faster one told."""
    made = dict(problems())
    seconds = {}
    for name in names:
        took = []
        for _ in range(2):
            start = time.process_time()
            outcome(made[name])
            took.append(time.process_time() - start)
        seconds[name] = min(took)
    print(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--time", type=Path, metavar="CHECKOUT")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every so many of the problems")
    parser.add_argument("--seconds", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.seconds is not None:
        tell_seconds(arguments.seconds)
    elif arguments.time is not None:
        names = [name for name, _ in problems()][::6]
        ours, theirs = [], []
        for _ in range(2):  # interleaved: the machine's speed drifts
            theirs.append(planning_seconds(arguments.time.resolve(), names))
            ours.append(planning_seconds(ROOT, names))
        ratios = [min(o[n] for o in ours) / min(t[n] for t in theirs) for n in names]
        print(
            f"{len(ratios)} problems, processor time: {statistics.geometric_mean(ratios):.3f} of the other checkout's"
        )
    else:
        record(arguments.out, arguments.against, arguments.every)


if __name__ == "__main__":
    main()
