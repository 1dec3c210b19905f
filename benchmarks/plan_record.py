# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which plans are made for 120 problems, as one line each: so that rebuilding the planner can show what it changed.

    export PYTHONPATH=.
    python benchmarks/plan_record.py --out before.jsonl              # of one state of the code
    python benchmarks/plan_record.py --out after.jsonl --against before.jsonl

The problems: random mixed models (constraints, several hosts, all cost sources), tasks of the full search, and
rules of placement. A plan is told by a digest of types, kernels and ranks, and by its predicted cost; where no plan is
possible, by the kind of error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders

from common.output import lines_of
from common.tasks import SETTINGS, named_task
from dreamshard_planner import DreamShardPlanner, PlacementRules
from tests.mixed_models import mixed_case

MIXED = 96
FULL = ("mlperf x 8", "random 50 x 8", "merlin tiny x 8", "merlin tiny x 16", "meta 60 x 8", "meta 60 x 64")
COST_SOURCES = ("auto", "roofline", "torchrec")


def problems() -> Iterator[tuple[str, Callable[[], DreamShardPlanner]]]:
    """Yield the name of each, and what plans it and returns the planner."""
    for seed in range(MIXED):
        yield f"mixed {seed}", partial(_mixed, seed)
    for name in FULL:
        for source in COST_SOURCES:
            yield f"{name}, {source}", partial(_full, name, source)
    for seed in range(6):
        first = [table.name for table in named_task("mlperf x 8").make()][seed:]
        rules = PlacementRules(together=[first[:3]], apart=[first[4:8]], on_ranks={first[9]: [seed, seed + 1]})
        yield f"rules {seed}", partial(_full, "mlperf x 8", "auto", placement_rules=rules)


def _mixed(seed: int) -> DreamShardPlanner:
    case = mixed_case(seed)
    planner = case.planner(seed=seed)
    planner.plan(case.model, case.sharders)
    return planner


def _full(name: str, source: str, **changed: object) -> DreamShardPlanner:
    task = named_task(name)
    types = {"cost_source": source, "sharding_types": SETTINGS["no_dp"]}
    planner = DreamShardPlanner(**task.given(), **types, **changed)
    planner.plan(task.model(), get_default_sharders())
    return planner


def outcome(problem: Callable[[], DreamShardPlanner]) -> dict[str, object]:
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
    """Return in which way a problem's plan changed."""
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
    before = {row.pop("name"): row for row in (lines_of(against) if against else ())}
    changes: Counter[str] = Counter()
    with out.open("w") as file:
        for name, problem in islice(problems(), 0, None, every):
            row = outcome(problem)
            print(json.dumps({"name": name, **row}), file=file, flush=True)
            if against is not None:
                old = before.get(name)
                change = compared(old, row)
                changes[change] += 1
                if change not in ("same plan", "same error"):
                    print(f"{name}: {change} {old} {row}", flush=True)
    print(dict(changes))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every so many of the problems")
    warnings.simplefilter("ignore")
    record(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
