# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One rank plans, all ranks go on: with its plan, or with its error. None waits for a rank that failed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import ShardingPlan

from dreamshard_planner.ambient import neutral
from dreamshard_planner.errors import (
    CheckpointError,
    DatasetError,
    DreamShardError,
    PlanError,
    StatisticsError,
    TaskError,
)

_KNOWN = (PlannerError, CheckpointError, DatasetError, PlanError, StatisticsError, TaskError, DreamShardError)
_KNOWN += (ValueError, TypeError, RuntimeError, AssertionError, OSError)
KNOWN_ERRORS = {f"{known.__module__}.{known.__qualname__}": known for known in _KNOWN}
"""Errors that one text makes again on another rank."""


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
    """What ``make`` returns on rank 0 of the group, on every rank; the other ranks never call it.

    Raises:
        BaseException: what ``make`` raised, on rank 0; on the others what :meth:`Failure.error` makes of it.
        DreamShardError: where the plan does not pickle, on every rank.
    """
    if pg.size() == 1:
        return make()
    plan = failed = None
    message = [b""]
    try:
        if pg.rank() == 0:
            try:
                plan = make()
                message[0] = _pickled(plan)
            except BaseException as error:  # an interrupt as well: the other ranks are waiting
                failed = error
                message[0] = pickle.dumps(Failure.of(error))
        with neutral():
            dist.broadcast_object_list(message, src=dist.get_global_rank(pg, 0), group=pg)
        if failed is not None:
            raise failed
        if pg.rank() == 0:
            return plan
        received = pickle.loads(message[0])
        if isinstance(received, Failure):
            raise received.error() from None
        return received
    finally:
        # An error holds this frame: without this it would keep itself, and the group, whose threads must not outlive
        # Python.
        del failed, pg


def group_timeout_seconds(pg: dist.ProcessGroup) -> float | None:
    """How long ranks of the group wait for one another; None where its backend does not say."""
    try:
        device = torch.device(dist.distributed_c10d._get_object_coll_device(pg))
        return pg._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return None


def _pickled(plan: ShardingPlan) -> bytes:
    try:
        message = pickle.dumps(plan)
        pickle.loads(message)  # what only fails there would leave this rank waiting for the others
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DreamShardError(f"the plan cannot be sent to the other ranks, it does not pickle ({reason})") from error
    return message
