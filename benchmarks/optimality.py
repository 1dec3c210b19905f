# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How far plans of random problems are from the best sharding: of small ones all are tried, of middle ones a solver of
zero-one programs proves what none can beat.

    PYTHONPATH=. python benchmarks/optimality.py --problems 200
    PYTHONPATH=. python benchmarks/optimality.py --problems 20 --middle --seconds 60

Small: 3 to 8 tables on 2 or 4 ranks of one or two hosts, by bandwidths and by TorchRec's estimates. Middle: 16 to 40
tables on 8 or 16 ranks, by TorchRec's estimates alone, which add up; scipy's MILP solver (HiGHS). Every sharding type
is allowed. The plans are those of ``DreamShardPlanner`` as users get it.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from common.output import table_of, wide_console
from dreamshard_planner.cost.model import Cost
from tests.exhaustive import ALL, planned, planned_and_best_ms

WITHIN = 0.01
MIDDLE = ((8, 8, 16, ALL), (8, 4, 24, ALL), (8, 8, 40, ALL), (16, 8, 24, ALL))
"""As the small shapes."""


def solved_ms(cost: Cost, seconds: float) -> tuple[float, float]:
    """What the solver's own sharding costs, and what it proves that none costs less than, where costs of parts add up:
    of the busiest rank, memory apart.

    Of each option a variable says whether it is chosen, and of each place of its units whether the unit is there; the
    last variable is the load of the busiest rank.
    """
    problem, single_P = cost.problem, cost.single_ms_P.tolist()
    rows: list[tuple[int, int, float]] = []
    equal: list[float] = []
    loads: list[tuple[int, int, float]] = []
    variables = 0
    for options in problem.tables:
        chosen = range(variables, variables + len(options))
        variables += len(options)
        rows += [(len(equal), variable, 1.0) for variable in chosen]
        equal.append(1.0)
        for variable, option in zip(chosen, options, strict=True):
            for unit in option.units:
                rows.append((len(equal), variable, -1.0))
                for position in range(problem.num_ranks // unit.span):
                    rows.append((len(equal), variables, 1.0))
                    ranks = zip(unit.ranks(position), unit.parts, strict=True)
                    loads += [(rank, variables, single_P[part]) for rank, part in ranks]
                    variables += 1
                equal.append(0.0)
    loads += [(rank, variables, -1.0) for rank in range(problem.num_ranks)]
    solution = milp(
        np.append(np.zeros(variables), 1.0),
        integrality=np.append(np.ones(variables), 0),
        bounds=Bounds(0, np.append(np.ones(variables), np.inf)),
        constraints=[
            LinearConstraint(_matrix(rows, len(equal), variables + 1), equal, equal),
            LinearConstraint(_matrix(loads, problem.num_ranks, variables + 1), -np.inf, 0),
        ],
        options={"time_limit": seconds, "mip_rel_gap": WITHIN / 10},
    )
    return math.inf if solution.fun is None else float(solution.fun), float(solution.mip_dual_bound)


def _matrix(entries: list[tuple[int, int, float]], rows: int, columns: int) -> coo_array:
    row, column, value = zip(*entries, strict=True)
    return coo_array((value, (row, column)), shape=(rows, columns)).tocsr()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--middle", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the solver, for one problem")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.middle:
        _middle(args.problems, args.seconds)
    else:
        _small(args.problems)


def _small(problems: int) -> None:
    for cost_source in ("roofline", "torchrec"):
        each = [planned_and_best_ms(seed, cost_source) for seed in range(problems)]
        above = [planned_ms / best_ms - 1 for planned_ms, best_ms in each]
        good = sum(share <= WITHIN for share in above)
        print(f"{cost_source}: {good} of {problems} within {WITHIN:.0%} of the best, worst {max(above):.1%} above it")


def _middle(problems: int, seconds: float) -> None:
    table = table_of(
        "Plan over what is proven, and over the solver's", "problem", "tables", "ranks", "over bound", "over solver's"
    )
    good = 0
    for seed in range(problems):
        planned_ms, cost = planned(seed, "torchrec", MIDDLE)
        found_ms, bound_ms = solved_ms(cost, seconds)
        good += planned_ms <= (1 + WITHIN) * bound_ms
        ratios = [f"{planned_ms / ms:.4f}" for ms in (bound_ms, found_ms)]
        table.add_row(str(seed), str(cost.problem.num_tables), str(cost.problem.num_ranks), *ratios)
    wide_console().print(table)
    print(f"{good} of {problems} proven to be within {WITHIN:.0%} of the optimum")


if __name__ == "__main__":
    main()
