# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compare our plans with a proven lower bound, and with better plans that an exact solver finds.

    python benchmarks/lower_bound.py --record lower-bound.jsonl

Costs are TorchRec's estimates, which add up on each rank. The optimizer is SGD, so exact training allows all sharding
types. HiGHS is asked whether a plan below some milliseconds exists: "no" raises the bound, "yes" comes with a plan.
Questions ignore memory, which can only lower the bound; only plans that fit count as found. Dual feasible functions,
whose sum over the shards of a rank is at most 1, are constraints: each shard above half of the limit needs a rank.

Shapes: P parts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from common.output import append, opened, quiet, table_of, wide_console
from common.tasks import RANKS_PER_HOST, FullTask, random_tables
from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.cost.problem import Problem, Sharding
from dreamshard_planner.devices import Machine

TABLES, RANKS = (16, 24, 32, 48, 60), (8, 16, 32, 64)
STEPS = 6
"""Questions that share the seconds of a problem."""
CLOSED = 1.003
"""Ratio of plan and bound at which a problem is done."""
INFEASIBLE = 2
"""Status of HiGHS."""
Function = Callable[[np.ndarray], np.ndarray]


def rounded(pieces: int) -> Function:
    """Return a dual feasible function that rounds shares of a rank down to ``1 / pieces``."""

    def function(share: np.ndarray) -> np.ndarray:
        scaled = share * (pieces + 1)
        return np.where(np.abs(scaled - scaled.round()) < 1e-6, share, np.floor(scaled) / pieces)

    return function


def without_small(least: float) -> Function:
    """Return a dual feasible function that drops shares below ``least``, and rounds up the shares that leave less."""
    return lambda share: np.where(share > 1 - least + 1e-9, 1.0, np.where(share < least - 1e-9, 0.0, share))


LEAST = [without_small(float(least)) for least in np.linspace(0.02, 0.5, 25)]
FUNCTIONS: tuple[Function, ...] = (
    lambda share: share,
    *(rounded(pieces) for pieces in range(1, 21)),
    *LEAST,
    *(lambda share, p=p, drop=drop: rounded(p)(drop(share)) for p in (1, 2, 3, 4) for drop in LEAST[::3]),
)


@dataclass(frozen=True)
class Choice:
    """One option of a table."""

    option: int
    span: int
    units: dict[tuple[float, ...], list[int]]
    """Units by the milliseconds that they add to each rank of their span."""

    @cached_property
    def ms(self) -> np.ndarray:
        """Milliseconds of all parts, units that are alike one after the other."""
        return np.array([ms for unit, alike in self.units.items() for _ in alike for ms in unit])


def choices_of(problem: Problem, ms_P: np.ndarray) -> list[list[Choice]]:
    """Return the options of each table, without those that cost more on every rank than another, such as tables in
    host memory."""
    choices: list[list[Choice]] = []
    for options in problem.tables:
        kept: list[Choice] = []
        for index in sorted(range(len(options)), key=lambda index: ms_P[options[index].parts].sum()):
            units: dict[tuple[float, ...], list[int]] = {}
            for position, part_L in enumerate(options[index].part_UL):
                units.setdefault(tuple(ms_P[part_L].round(9).tolist()), []).append(position)
            new = Choice(index, options[index].span, units)
            alike = (old for old in kept if (old.span, len(old.ms)) == (new.span, len(new.ms)))
            if not any((old.ms <= new.ms).all() for old in alike):
                kept.append(new)
        choices.append(kept)
    return choices


class Question:
    """The integer program of all plans whose slowest rank takes at most ``limit_ms``; without ``placed``, of the
    choice of options alone."""

    def __init__(self, tables: Sequence[Sequence[Choice]], ranks: int, limit_ms: float, placed: bool) -> None:
        self._most: list[int] = []
        self._entries: list[tuple[int, int, float]] = []
        self._bounds: list[tuple[float, float]] = []
        self._allowed = [[(one, self._variable(1)) for one in some if one.ms.max() <= limit_ms] for some in tables]
        self._counts: dict[tuple[int, tuple[float, ...]], list[int]] = {}
        """Number of alike units at each position, by the variable of their option."""
        loads: list[list[tuple[int, float]]] = [[] for _ in range(ranks if placed else 0)]
        for choice, chosen in (pair for allowed in self._allowed for pair in allowed):
            for unit, alike in choice.units.items() if placed else ():
                counts = self._counts[chosen, unit] = [self._variable(len(alike)) for _ in range(ranks // choice.span)]
                self._row([*((count, 1.0) for count in counts), (chosen, -len(alike))], 0.0, 0.0)
                for (position, count), (at, ms) in itertools.product(enumerate(counts), enumerate(unit)):
                    loads[position * choice.span + at].append((count, ms / limit_ms))
        for allowed in self._allowed:
            self._row([(chosen, 1.0) for _, chosen in allowed], 1.0, 1.0)
        every = [pair for allowed in self._allowed for pair in allowed]
        for function in FUNCTIONS:
            terms = [(chosen, float(function(choice.ms / limit_ms).sum())) for choice, chosen in every]
            self._row(terms, -np.inf, ranks * (1 + 1e-9))
        for load in loads:
            self._row(load, -np.inf, 1 + 1e-9)

    def _variable(self, most: int) -> int:
        self._most.append(most)
        return len(self._most) - 1

    def _row(self, terms: Sequence[tuple[int, float]], least: float, most: float) -> None:
        self._entries += [(len(self._bounds), variable, factor) for variable, factor in terms]
        self._bounds.append((least, most))

    def answer(self, seconds: float) -> Sharding | bool | None:
        """Return False if there is no plan, a plan (True if units are not placed), or None after the seconds."""
        if not all(self._allowed):
            return False
        rows, columns, factors = zip(*self._entries, strict=True)
        matrix = coo_matrix((factors, (rows, columns)), shape=(len(self._bounds), len(self._most))).tocsr()
        result = milp(
            np.zeros(len(self._most)),
            constraints=LinearConstraint(matrix, *np.array(self._bounds).T),
            integrality=np.ones(len(self._most)),
            bounds=Bounds(0, self._most),
            options={"time_limit": seconds},
        )
        if result.x is None:
            return False if result.status == INFEASIBLE else None
        return self._sharding(result.x.round().astype(int)) if self._counts else True

    def _sharding(self, values: np.ndarray) -> Sharding:
        options, positions = [], []
        for allowed in self._allowed:
            [(choice, chosen)] = [(choice, chosen) for choice, chosen in allowed if values[chosen]]
            place: dict[int, int] = {}
            for unit, alike in choice.units.items():
                counts = values[self._counts[chosen, unit]]
                place |= dict(zip(alike, np.repeat(np.arange(len(counts)), counts).tolist(), strict=True))
            options.append(choice.option)
            positions.append(tuple(place[unit] for unit in range(len(place))))
        return Sharding(tuple(options), tuple(positions))


def compare(tables: int, ranks: int, seed: int, seconds: float) -> dict[str, Any]:
    """Plan one problem, and narrow the gap between the bound and the best plan known."""
    task = FullTask(f"{tables} x {ranks}", lambda: random_tables(tables, seed), ranks, 2048)
    model = task.model()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    planner = DreamShardPlanner(
        topology=Machine(ranks_per_host=RANKS_PER_HOST, hosts=ranks // RANKS_PER_HOST, gpu="h100").topology(),
        batch_size=task.batch_size,
        constraints=task.constraints("all"),
        stats=[],
        debug=False,
        cost_source="torchrec",
        optimizers_attached=True,
    )
    planner.plan(model, [EmbeddingBagCollectionSharder()])
    report, problem = planner.report(), planner._model()
    ours_ms = report.chosen.total_ms
    options = problem.searched
    cost = problem.rater.cost(problem.rater.read(options, problem.room))
    choices = choices_of(cost.problem, cost.single_ms_P.numpy())
    start = time.monotonic()
    bound_ms = sum(min(choice.ms.sum() for choice in some) for some in choices) / ranks
    open_ms = ours_ms  # no question below was answered "no plan"
    while open_ms > 1.001 * bound_ms:
        middle_ms = (bound_ms + open_ms) / 2
        is_possible = Question(choices, ranks, middle_ms, placed=False).answer(seconds / STEPS) is not False
        bound_ms, open_ms = (bound_ms, middle_ms) if is_possible else (middle_ms, open_ms)
    best_ms = open_ms = ours_ms
    for share in itertools.cycle((0.5, 0.25, 0.75)):
        if open_ms <= CLOSED * bound_ms or time.monotonic() - start > seconds:
            break
        limit_ms = bound_ms + share * (open_ms - bound_ms)
        answer = Question(choices, ranks, limit_ms, placed=True).answer(seconds / STEPS)
        if answer is False:
            bound_ms = limit_ms
        elif isinstance(answer, Sharding):
            open_ms = min(open_ms, cost.overall_ms(answer))
            if bool(cost.problem.fits(answer)):
                best_ms = min(best_ms, open_ms)
    return {
        "tables": tables,
        "ranks": ranks,
        "ours_ms": ours_ms,
        "torchrec_ms": next((one.total_ms for one in report.rivals if one.name == "torchrec"), None),
        "bound_ms": float(bound_ms),
        "best_ms": best_ms,
        "solver_seconds": round(time.monotonic() - start, 1),
    }


def tell(lines: Sequence[dict[str, Any]]) -> None:
    """Print the ratios of all problems."""
    pairs = [("torchrec_ms", "bound_ms"), ("ours_ms", "bound_ms"), ("ours_ms", "best_ms")]
    headings = ("bound, ms", "TorchRec's / bound", "ours / bound", "ours / best known")
    table = table_of("20 problems", "tables x ranks", *headings)
    ratios = np.array([[line[one] / line[other] for one, other in pairs] for line in lines])
    for line, of_line in zip(lines, ratios, strict=True):
        name = f"{line['tables']} x {line['ranks']}"
        table.add_row(name, f"{line['bound_ms']:.4f}", *(f"{ratio:.3f}" for ratio in of_line))
    for name, reduced in (("median", np.median(ratios, axis=0)), ("most", ratios.max(0))):
        table.add_row(name, "", *(f"{ratio:.3f}" for ratio in reduced))
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("lower-bound.jsonl"), help="continue this file")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the solver, for each problem")
    args = parser.parse_args()
    quiet()
    lines = [line for line in opened(args.record) if "tables" in line]
    for seed, (tables, ranks) in enumerate(itertools.product(TABLES, RANKS)):
        if not any((line["tables"], line["ranks"]) == (tables, ranks) for line in lines):
            lines.append(compare(tables, ranks, seed, args.seconds))
            append(args.record, lines[-1])
            print(lines[-1], flush=True)
    tell(lines)


if __name__ == "__main__":
    main()
