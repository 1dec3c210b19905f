# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's proposers, each for a few proposals: what a performance model that is given may like better than ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption

from dreamshard_planner.planning.placing import Countdown
from dreamshard_planner.search.effort import portion

TABLES_PLACED = 1000
"""Tables x proposals of each proposer: some seconds for all."""
LEAST_PROPOSALS = 20
"""Where there are many tables."""


class FewProposals(Proposer):
    """Another proposer's first proposals, the fewer the more tables there are.

    Args:
        proposer: the other one.
        countdown: no more than one proposal after it has ended.
        effort: multiple of the default's number of proposals.
    """

    def __init__(self, proposer: Proposer, countdown: Countdown, effort: float) -> None:
        self._proposer, self._countdown, self._effort = proposer, countdown, effort
        self._proposed = self._most = 0

    def load(self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """See ``Proposer.load``."""
        tables = len({option.fqn for option in search_space})
        most = max(LEAST_PROPOSALS, TABLES_PLACED // max(1, tables))
        self._proposed, self._most = 0, portion(most, self._effort)
        self._proposer.load(search_space=search_space, enumerator=enumerator)

    def propose(self) -> list[ShardingOption] | None:
        """See ``Proposer.propose``."""
        if self._proposed == self._most or (self._proposed and self._countdown.left() == 0.0):
            return None
        self._proposed += 1
        return self._proposer.propose()

    def feedback(self, *given: Any, **named: Any) -> None:
        """See ``Proposer.feedback``."""
        self._proposer.feedback(*given, **named)


def few_proposals(seconds: float | None, effort: float) -> list[Proposer]:
    """TorchRec's own by default, but for the grid; those of one kind for all tables first.

    Args:
        seconds: that they share; None for no cap.
        effort: multiple of the default's number of proposals.
    """
    countdown = Countdown(seconds)
    theirs = (UniformProposer(), GreedyProposer(), GreedyProposer(use_depth=False))
    return [FewProposals(proposer, countdown, effort) for proposer in theirs]
