# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Proposer`` for table-wise placement: which compute kernel each table gets.

Every table starts with its fastest kernel. Where that does not fit into device memory, tables move to kernels that
need less of it (unified memory), those first that lose least time per byte, and as few of them as possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torchrec.distributed.planner.types import (
    Enumerator,
    Proposer,
    ShardingOption,
    Topology,
)

from dreamshard_planner.search_space.options import by_table, refused
from dreamshard_planner.search_space.sharding_types import TW

PROBES = 16
"""Numbers of tables outside of device memory that are tried where neither none nor all of them fit."""


class TableWiseProposer(Proposer):
    """Proposes table-wise options; a bisection finds the fewest tables that must leave device memory."""

    def __init__(self) -> None:
        self._choices: list[list[ShardingOption]] = []
        self._demotions: list[int] = []
        self._pending: int | None = None
        self._feasible: int | None = None
        self._infeasible = -1
        self._failed: list[int] = []
        self._probes: list[int] = []

    def load(self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """See ``Proposer.load``; raises ``PlannerError`` where a table has no table-wise option."""
        self._choices = []
        for fqn, options in by_table(search_space).items():
            table_wise = [o for o in options if o.sharding_type == TW]
            if not table_wise:
                raise refused(
                    f"table {fqn!r} may only be sharded "
                    f"{sorted({option.sharding_type for option in options})}, and TableWiseProposer proposes "
                    "table-wise options only"
                )
            # TorchRec enumerates kernels in the order of a set: sort, or plans would change with the hash seed.
            table_wise.sort(key=lambda option: (option.total_perf, option.compute_kernel))
            fastest, *slower = table_wise
            choices = [fastest]
            for option in slower:
                if option.total_storage.hbm < choices[-1].total_storage.hbm:
                    choices.append(option)
            self._choices.append(choices)
        # Each entry moves one table to its next kernel: the first step of all tables, cheapest first, then the next.
        steps = [
            (level, _lost_ms_per_byte(before, after), -before.total_storage.hbm, table)
            for table, choices in enumerate(self._choices)
            for level, (before, after) in enumerate(itertools.pairwise(choices))
        ]
        self._demotions = [table for *_, table in sorted(steps)]
        self._pending, self._feasible, self._infeasible, self._failed = 0, None, -1, []
        # All in device memory, then none, then in between: host memory may be scarce as well.
        last = len(self._demotions)
        between = {round(last * share / PROBES) for share in range(1, PROBES)}
        self._probes = [last, *sorted(between - {0, last})] if last else []

    def propose(self) -> list[ShardingOption] | None:
        """See ``Proposer.propose``; None when done."""
        if self._pending is None or not self._choices:
            return None
        level = [0] * len(self._choices)
        for table in self._demotions[: self._pending]:
            level[table] += 1
        return [choices[chosen] for choices, chosen in zip(self._choices, level, strict=True)]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """See ``Proposer.feedback``."""
        if self._pending is None:
            return
        if partitionable:
            self._feasible = self._pending
            # Known not to fit below, as far as it was tried.
            self._infeasible = max((n for n in self._failed if n < self._pending), default=-1)
        else:
            self._failed.append(self._pending)
            if self._feasible is not None:
                self._infeasible = self._pending
        if self._feasible is None:
            self._pending = self._probes.pop(0) if self._probes else None
        elif self._feasible - self._infeasible > 1:
            self._pending = (self._feasible + self._infeasible) // 2
        else:
            self._pending = None


def _lost_ms_per_byte(before: ShardingOption, after: ShardingOption) -> float:
    """What a table's slower kernel costs for each byte of device memory that it frees."""
    return (after.total_perf - before.total_perf) / (before.total_storage.hbm - after.total_storage.hbm)
