# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How each state of an optimizer is carried to another plan: one table, for the code and for the documentation."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum


class Join(Enum):
    """What becomes of a state that is not of the shape of the weights; one that is, is cut like them."""

    MEAN = "one value per row: a slice takes it as it is, slices join as the mean weighted by width"
    SAME = "one value per row, the same in every slice: as it is"
    SINGLE = "one value per table: as it is"


@dataclass(frozen=True)
class Rule:
    """``name`` is what TorchRec's fused optimizers call a state; ``aliases`` are the names in optimizers of torch and
    TorchRec, which train replicated tables."""

    name: str
    aliases: tuple[str, ...]
    join: Join
    why: str


RULES = (
    Rule("momentum1", ("sum", "exp_avg"), Join.MEAN, "row-wise Adagrad sums the mean square of a row's gradient"),
    Rule("exp_avg_sq", ("momentum2",), Join.MEAN, "row-wise Adam and LAMB average the same mean square"),
    Rule("prev_iter", (), Join.SAME, "every slice sees the same lookups"),
    Rule("row_counter", (), Join.SAME, "every slice sees the same lookups"),
    Rule("iter", ("step",), Join.SINGLE, "steps done"),
)
NAMES = {alias: rule.name for rule in RULES for alias in (rule.name, *rule.aliases)}
JOINS = {rule.name: rule.join for rule in RULES}
STEP_COUNT = "iter"


def needs_no_step_count(states: Set[str]) -> bool:
    """Adagrad counts steps to decay its learning rate, which its fused kernels do not do: nothing hangs on it."""
    return set(states) - {STEP_COUNT} == {"momentum1"}
