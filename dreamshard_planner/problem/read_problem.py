# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding problem beside the TorchRec options that it was made of: plans become shardings, shardings plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.distributed.planner.types import Shard, ShardingOption

from dreamshard_planner.cost.problem import Problem, Sharding
from dreamshard_planner.problem.parts import positions_of
from dreamshard_planner.search_space.options import cannot_lie_so, fqn_of, refused, same_option, set_ranks
from dreamshard_planner.workload.tables import Workload


@dataclass(frozen=True)
class ReadProblem:
    """A sharding problem, and the TorchRec options that it was made of."""

    problem: Problem
    options: tuple[tuple[ShardingOption, ...], ...]
    """In the order of the problem's tables and options."""
    shard_P: tuple[Shard, ...]
    """One shard of each part; a part stands for all shards of an option that cost and need the same."""
    workload_P: tuple[Workload, ...]
    """What each part asks of its rank."""
    dense_elements_P: torch.Tensor
    """Elements of the table-sized gradient of data-parallel parts, zero elsewhere."""
    dense_passes_P: torch.Tensor
    """Times that as many pass through memory beside the kernels, by the table's optimizer."""
    ssd_bytes_P: torch.Tensor
    """Bytes of the distinct rows that parts on SSDs read per batch, zero elsewhere."""
    synced_bytes_P: torch.Tensor
    """Bytes of weights and optimizer states that replicas in other sharding groups are averaged with."""
    is_estimated_P: torch.Tensor
    """Whether a part's kernel is unknown, so that the perf of its shard is what it costs."""

    def assign(self, sharding: Sharding) -> list[ShardingOption]:
        """The chosen options, with the ranks of their shards set."""
        chosen = []
        for options, units, option, positions in zip(
            self.options, self.problem.tables, sharding.options, sharding.positions, strict=True
        ):
            set_ranks(options[option], units[option].ranks(positions))
            chosen.append(options[option])
        return chosen

    def sharding(self, plan: Sequence[ShardingOption]) -> Sharding:
        """A plan with ranks, of this problem's tables.

        Raises:
            PlannerError: where a table is missing, or is sharded as no option of this problem.
        """
        given = {option.fqn: option for option in plan}
        options, positions = [], []
        for choices, units in zip(self.options, self.problem.tables, strict=True):
            option = given.get(choices[0].fqn)
            index = next(
                (i for i, choice in enumerate(choices) if option is not None and same_option(choice, option)), None
            )
            if index is None:
                raise refused(f"the plan has no sharding of table {fqn_of(choices[0])!r} that could be rated")
            places = positions_of(option, units[index].units)
            if units[index].pinned not in (None, places):
                raise cannot_lie_so(f"table {fqn_of(option)!r} is pinned elsewhere than the plan has it")
            options.append(index)
            positions.append(places)
        return Sharding(tuple(options), tuple(positions))
