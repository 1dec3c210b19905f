# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How each state of an optimizer is carried from one plan to another: the table that code and documentation share."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum


class Join(Enum):
    """What a row-wise state becomes where slices of columns are cut or joined."""

    MEAN = "a slice takes it as it is; slices join as the mean weighted by width"
    SAME = "the same in every slice: taken of one"
    SINGLE = "one value for the whole table"


@dataclass(frozen=True)
class Rule:
    """A state, by the name that TorchRec's fused optimizers give it. A state of the shape of the weights is always cut
    like them; the rule is for states with one value per row, or one per table."""

    name: str
    aliases: tuple[str, ...]
    """Names of the same in optimizers of torch and TorchRec that train replicated tables."""
    join: Join
    why: str


RULES = (
    Rule(
        "momentum1",
        ("sum", "exp_avg"),
        Join.MEAN,
        "row-wise Adagrad sums the mean square of a row's gradient, which is the mean over its slices by width",
    ),
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
