# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure processor time and memory of planning over every sharding type as models and clusters grow.

    python benchmarks/planning_scale.py --json benchmarks/results/2026-11-24-planning-scale.json
    python benchmarks/planning_scale.py --against ../before          # another checkout's code as well

Random tables (``common/tasks.py``) on hosts of eight GPUs of 80 GB, ``exact_training=False``. Each plan is made in a
process of its own, from nothing but the model, its report included. Memory is the peak of the process, libraries and
model included.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.sharding_plan import get_default_sharders

from common.output import provenance, table_of, wide_console, write_result
from common.tasks import FullTask, random_tables
from dreamshard_planner import DreamShardPlanner

ROOT = Path(__file__).parent.parent
SIZES = "200x64,800x64,1000x256,2000x512,5000x1024"
COST_SOURCES = "auto,torchrec"


def planned(size: str, cost_source: str) -> dict[str, Any]:
    """One plan, in this process."""
    tables, ranks = map(int, size.split("x"))
    task = FullTask(size, lambda: random_tables(tables), ranks, 2048)
    model, given, start = task.model(), task.given(), time.process_time()
    planner = DreamShardPlanner(**given, exact_training=False, cost_source=cost_source)
    planner.plan(model, get_default_sharders())
    report = planner.report()
    return {
        "seconds": time.process_time() - start,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "total_ms": report.chosen.total_ms,
        "reshards": report.reshards,
        "types": report.sharding_types,
    }


def in_own_process(checkout: Path, size: str, cost_source: str) -> dict[str, Any]:
    """Plan in a process of its own with a checkout's package."""
    command = [sys.executable, __file__, "--plan", size, cost_source]
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    name = "this" if checkout == ROOT.resolve() else checkout.name
    return {"size": size, "cost_source": cost_source, "checkout": name, **json.loads(told.splitlines()[-1])}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="tables x ranks, separated by commas")
    parser.add_argument("--cost-sources", default=COST_SOURCES)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plan", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan:
        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        print(json.dumps(planned(*args.plan)))
        return
    table = table_of("planning over all types", "tables x ranks", "costs", "checkout", "seconds", "GB", "plan, ms")
    rows = []
    for size in args.sizes.split(","):
        for cost_source in args.cost_sources.split(","):
            for checkout in (path.resolve() for path in (ROOT, args.against) if path is not None):
                row = in_own_process(checkout, size, cost_source)
                rows.append(row)
                cells = f"{row['seconds']:.1f}", f"{row['peak_bytes'] / 1e9:.2f}", f"{row['total_ms']:.4f}"
                table.add_row(size, cost_source, row["checkout"], *cells)
                print(json.dumps(row), flush=True)
    wide_console().print(table)
    write_result(args.json, provenance(torch.device("cpu")), {"results": rows})


if __name__ == "__main__":
    main()
