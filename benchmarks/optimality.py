# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How far plans of small random problems are from the best of all shardings, which are all tried.

    PYTHONPATH=. python benchmarks/optimality.py --problems 200

Models of 3 to 8 tables on 2 or 4 ranks of one or two hosts, every sharding type allowed; by bandwidths and by
TorchRec's estimates. The plans are those of ``DreamShardPlanner`` as users get it.
"""

from __future__ import annotations

import argparse
import logging
import warnings

from tests.exhaustive import planned_and_best_ms

WITHIN = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    problems = parser.parse_args().problems
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for cost_source in ("roofline", "torchrec"):
        above = []
        for seed in range(problems):
            planned_ms, best_ms = planned_and_best_ms(seed, cost_source)
            above.append(planned_ms / best_ms - 1)
        good = sum(share <= WITHIN for share in above)
        print(f"{cost_source}: {good} of {problems} within {WITHIN:.0%} of the best, worst {max(above):.1%} above it")


if __name__ == "__main__":
    main()
