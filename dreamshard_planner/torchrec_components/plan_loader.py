# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``PlanLoader`` for plan files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchrec.distributed.planner.types import PlanLoader, ShardingOption

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.plans.plan_file import SavedPlan


class JsonPlanLoader(PlanLoader):
    """A file that ``DreamShardPlanner.save_plan`` wrote, for ``DreamShardPlanner(plan_loader=...)``: it is used instead
    of planning, on every release of TorchRec that the package accepts. The file is read on the rank that plans.

    A plan that was made for other tables, ranks, memory, batch size or constraints is refused with ``PlannerError``,
    which names what differs; what it was merely chosen by (statistics, bandwidths, cost source, seed, versions) may
    differ, and the report says so.

    Args:
        path: of the file.

    Attributes:
        loaded: the plan of the file, once it was found to fit.

    Example::

        loader = JsonPlanLoader("plan.json") if Path("plan.json").exists() else None
        planner = DreamShardPlanner(batch_size=512, plan_loader=loader)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.loaded: SavedPlan | None = None
        self.options: list[ShardingOption] = []
        """As the file has them."""
        self._matched: Callable[[SavedPlan], dict[int, ShardingOption]] | None = None

    def bind(self, matched: Callable[[SavedPlan], dict[int, ShardingOption]]) -> None:
        """What makes options of a file, by storage hash of those enumerated, or refuses it; set by the planner that
        loads."""
        self._matched, self.loaded, self.options = matched, None, []

    def load(self) -> dict[int, ShardingOption]:
        """See ``PlanLoader.load``.

        Raises:
            PlanError: the file can't be read.
            PlannerError: the plan is stale.
            DreamShardError: another planner asks, which could not tell a stale plan.
        """
        if self._matched is None:
            raise DreamShardError(
                f"{self.path}: JsonPlanLoader needs DreamShardPlanner, which can tell whether the plan still fits; "
                "plan with it, and give its ShardingPlan to any DistributedModelParallel"
            )
        saved = SavedPlan.load(self.path)
        options = self._matched(saved)
        self.loaded, self.options = saved, list(options.values())
        return options

    def plan_context_hash(self) -> None:
        """None: not one hash decides here whether a plan is stale, see :meth:`load`."""
        return None

    def get_plan_id(self) -> str:
        """The file, for TorchRec's log."""
        return str(self.path)
