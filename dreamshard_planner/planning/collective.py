# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One rank plans, all ranks go on: with its plan, or with its error. None waits for a rank that failed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, Topology
from torchrec.distributed.types import ShardingPlan

from dreamshard_planner import errors
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.torch_state import neutral

_KNOWN: tuple[type[Exception], ...]
_KNOWN = (PlannerError, errors.CheckpointError, errors.DatasetError, errors.PlanError, errors.StatisticsError)
_KNOWN += (errors.TaskError, DreamShardError, ValueError, TypeError, RuntimeError, AssertionError, OSError)
KNOWN_ERRORS = {f"{known.__module__}.{known.__qualname__}": known for known in _KNOWN}
"""Errors that one text makes again on another rank."""

MAX_SHARE_OF_TIMEOUT = 0.75
"""Of the time that ranks wait for one another, how much may be asked for; the rest is for all else in planning."""


@dataclass(frozen=True)
class Failure:
    """An error in plain strings, which always pickle; errors themselves need not."""

    known: str | None
    """The nearest of :data:`KNOWN_ERRORS` among its class and bases."""
    kind: str
    text: str
    planner_error: str | None = None
    """Name of the ``PlannerErrorType``."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Whatever the error does when it is asked for its text."""
        known = next((name for base in type(error).__mro__ for name, of in KNOWN_ERRORS.items() if of is base), None)
        try:
            text = str(error)
        except Exception as unreadable:
            text = f"its text cannot be read: {type(unreadable).__name__}"
        planner_error = getattr(error, "error_type", None)
        planner_error = planner_error.name if isinstance(planner_error, PlannerErrorType) else None
        return cls(known, type(error).__qualname__, text, planner_error)

    def error(self) -> Exception:
        """For the other ranks: of the same type where that is known, of its nearest known base otherwise, or
        :class:`DreamShardError`; then the text begins with the name of the type."""
        if self.known is None:
            return DreamShardError(f"planning on rank 0 ended with {self.kind}: {self.text}")
        made = KNOWN_ERRORS[self.known]
        text = self.text if made.__qualname__ == self.kind else f"{self.kind}: {self.text}"
        if made is PlannerError and self.planner_error:
            return PlannerError(text, PlannerErrorType[self.planner_error])
        return made(text)


def plan_on_rank_0(make: Callable[[], ShardingPlan], pg: dist.ProcessGroup) -> ShardingPlan:
    """Call ``make`` on rank 0 of the group, and return its plan on every rank.

    Raises:
        BaseException: the error of ``make`` on rank 0; on the others the error that :meth:`Failure.error` makes of it.
        DreamShardError: on every rank, if the plan does not pickle.
    """
    if pg.size() == 1:
        return make()
    told: ShardingPlan | Failure | None = None
    failed = None
    try:
        if pg.rank() == 0:
            try:
                told = make()
                _require_pickles(told)
            except BaseException as error:  # an interrupt as well: the other ranks are waiting
                failed, told = error, Failure.of(error)
        with neutral():
            message = [told]
            dist.broadcast_object_list(message, group_src=0, group=pg)
        if failed is not None:
            raise failed
        (told,) = message
        if isinstance(told, Failure):
            raise told.error() from None
        return cast("ShardingPlan", told)
    finally:
        # An error holds this frame: without this it would keep itself, and the group, whose threads must not outlive
        # Python.
        del failed, pg


def check_ranks(planned: int, all_ranks: Topology | None, ranks: int, in_groups: bool) -> None:
    """Whether a plan serves a process group.

    Args:
        planned: ranks that the plan is for.
        all_ranks: of all sharding groups; None where nobody spoke of any.
        ranks: of the process group.
        in_groups: whether these may form several sharding groups.

    Raises:
        DreamShardError: where not; says what would help.
    """
    if not in_groups and planned != ranks:
        raise DreamShardError(
            f"the planner's topology has {planned} ranks, and there are {ranks} to shard over: plan for all of them "
            "(sharding groups are for TorchRec's DMPCollection)"
        )
    if all_ranks is not None and ranks not in (all_ranks.world_size, planned):
        raise DreamShardError(
            f"the process group has {ranks} ranks, and the planner's topology {all_ranks.world_size} in sharding "
            f"groups of {planned}: give the topology of all ranks"
        )
    if ranks % planned:
        raise DreamShardError(
            f"the process group has {ranks} ranks, which are no whole number of sharding groups of the {planned} ranks "
            "that the planner's topology has"
        )


def check_patience(ranks: int, patience_seconds: float | None, search_seconds: float | None) -> None:
    """Whether a plan is made while a process group waits.

    Args:
        ranks: of the process group.
        patience_seconds: for which ranks wait for one another; None where that is unknown.
        search_seconds: that rank 0 may search alone.

    Raises:
        DreamShardError: where not; says what would help.
    """
    if ranks == 1 or patience_seconds is None:
        return
    seconds, most = search_seconds or 0.0, MAX_SHARE_OF_TIMEOUT * patience_seconds
    if seconds > most:
        raise DreamShardError(
            f"rank 0 may plan for {seconds:g} s (search_seconds), but the other ranks wait for "
            f"{patience_seconds:g} s, the process group's timeout: give less than {most:g} s, or "
            "init_process_group(timeout=...) more"
        )


def _require_pickles(plan: ShardingPlan) -> None:
    try:
        pickle.loads(pickle.dumps(plan))  # what only fails there would leave this rank waiting for the others
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DreamShardError(f"the plan cannot be sent to the other ranks, it does not pickle ({reason})") from error
