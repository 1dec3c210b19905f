# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's plan, kept where a searched one is predicted to gain less than costs can tell.

Where nobody tells the lookups per sample, both planners take one for each feature. Plans that these costs rate alike
then differ in steps by chance, either way: see ``benchmarks/default_steps.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrec.distributed.planner.types import ShardingOption

from dreamshard_planner.cost.model import PlacementCosts
from dreamshard_planner.planning.baseline import BASELINE
from dreamshard_planner.planning.search_plan import SearchedPlan
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.report import Report, ReportEntry
from dreamshard_planner.search_space.options import fqn_of, ranks_of, same_options

LEAST_GAIN = 0.03
"""Of the predicted cost of TorchRec's plan, where lookups per sample are guessed."""


@dataclass(frozen=True)
class KeptPlan:
    """TorchRec's plan, and the searched one that was not taken."""

    options: tuple[ShardingOption, ...]
    """With ranks."""
    searched: PlacementCosts
    gain: float
    """Of the searched one, as a share of what TorchRec's costs."""
    least_gain: float
    """That was asked for."""
    guessed: bool
    """Whether it was asked for since lookups per sample are guessed."""

    def is_plan(self, plan: Sequence[ShardingOption]) -> bool:
        """Whether a plan is this one."""
        mine, given = ({fqn_of(option): ranks_of(option) for option in options} for options in (self.options, plan))
        return mine == given and same_options(self.options, plan)

    def beside(self, report: Report) -> Report:
        """The report with the searched plan among the rivals."""
        rivals = [*report.rivals, ReportEntry.of("searched", self.searched)]
        return replace(report, rivals=tuple(sorted(rivals, key=lambda rival: rival.total_ms)))

    def note(self) -> Note:
        """For the report."""
        text = (
            f"TorchRec's plan is kept: the searched one is predicted to gain {max(0.0, 100 * self.gain):.2f} %, less "
            f"than the {100 * self.least_gain:.3g} % of least_gain"
        )
        if self.guessed:
            text += ", since lookups per sample are guessed; statistics would tell which plan is better"
        return Note("search", text, {"gain": self.gain, "least_gain": self.least_gain})


def baseline_of(found: SearchedPlan | None) -> list[ShardingOption] | None:
    """Return TorchRec's plan among those that a search started from, with ranks; None where there is none that fits."""
    if found is None or found.torchrec is None:
        return None
    fits = any(rival.name == BASELINE and rival.feasible for rival in found.rivals)
    return copy.deepcopy(found.torchrec.options) if fits else None
