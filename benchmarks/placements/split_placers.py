# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Planners that may split tables, under one contract: a task in, a sharding out, or nothing where they find none.

All but those that are called freer choose among TorchRec's own options of the task.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.search.search import search
from dreamshard_planner.search_space.sharding_types import TW
from placements.beam import beam_sharding
from placements.placers import Field
from placements.split_contests import SameStorage, SplitTask

SplitPlacer = Callable[[SplitTask], Sharding | None]

WHOLE = ("dreamshard_whole", "torchrec_whole")
"""Placers that split nothing."""
FREER = ("dreamshard", "dreamshard_shipped", "neuroshard_halvings", "joint_halvings")
"""Placers that merge slices, and so have more widths than TorchRec's planner."""


class SplitField:
    """All of them by name.

    Args:
        field: checkpoint and fitted costs.
        device: compute device.
        seed: of the searches.
    """

    def __init__(self, field: Field, device: str = "cpu", seed: int = 0) -> None:
        self.field, self._device, self._seed = field, device, seed
        self.placers: dict[str, SplitPlacer] = {
            "dreamshard": partial(self._dreamshard, None, None),
            "dreamshard_shipped": partial(self._dreamshard, None, "auto"),
            "dreamshard_whole": partial(self._dreamshard, (TW,), None),
            "linear_joint": self._linear_joint,
            "torchrec": partial(self._torchrec, None, True),
            "torchrec_default": partial(self._torchrec, None, False),
            "torchrec_whole": partial(self._torchrec, (TW,), True),
            "neuroshard": lambda task: _widened(task, beam_sharding(task.context.cost(task.allowed))),
            "neuroshard_halvings": lambda task: beam_sharding(task.cost),
            "joint_halvings": self._joint_halvings,
        }

    def _dreamshard(
        self, sharding_types: Sequence[str] | None, checkpoint: str | None, task: SplitTask
    ) -> Sharding | None:
        """The planner as a user calls it; with the field's checkpoint, unless another is given: what ships may have
        been measured on other hardware."""
        planner = DreamShardPlanner(
            topology=task.topology,
            batch_size=task.local_batch_size,
            constraints=copy.deepcopy(task.constraints),
            statistics=task.statistics,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            checkpoint=checkpoint or self.field.learned,
            sharding_types=sharding_types or task.contest.sharding_types,
            seed=self._seed,
            debug=False,
        )
        return _planned(planner, task)

    def _torchrec(self, sharding_types: Sequence[str] | None, known: bool, task: SplitTask) -> Sharding | None:
        """TorchRec's planner with its own proposers and partitioner."""
        constraints = task.constraints_with(sharding_types or task.contest.sharding_types, known)
        planner = EmbeddingShardingPlanner(
            topology=task.topology,
            batch_size=task.local_batch_size,
            enumerator=SameStorage(task.topology, task.local_batch_size, constraints, storages=task.storages),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            constraints=constraints,
            debug=False,
        )
        return _planned(planner, task)

    def _linear_joint(self, task: SplitTask) -> Sharding | None:
        """Our joint search on the additive cost."""
        context = PlanningContext(task.topology, task.reader, self.field.learned)
        context.compute = self.field.linear
        found = search(context.cost(task.allowed), [], seed=self._seed)
        return None if found is None else task.widened(found.sharding)

    def _joint_halvings(self, task: SplitTask) -> Sharding | None:
        """Our joint search on our network, with halvings besides."""
        found = search(task.cost, [], seed=self._seed)
        return None if found is None else found.sharding


def _planned(planner: EmbeddingShardingPlanner, task: SplitTask) -> Sharding | None:
    try:
        return task.sharding(planner.plan(copy.copy(task.module), task.sharders))
    except PlannerError:
        return None


def _widened(task: SplitTask, sharding: Sharding | None) -> Sharding | None:
    return None if sharding is None else task.widened(sharding)
