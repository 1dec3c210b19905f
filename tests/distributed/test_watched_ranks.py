# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The rank that planned judges by the batches of all ranks, where a group is given."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import Rank, run_on_ranks
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardPlanner, DriftWatch, TableStatistics

NAMES = ["a", "b", "c", "d"]


def batch(lookups: list[int], samples: int = 8) -> KeyedJaggedTensor:
    lengths = torch.tensor(lookups).repeat_interleave(samples)
    return KeyedJaggedTensor(NAMES, torch.arange(int(lengths.sum())) % 90, lengths=lengths)


def watched(rank: Rank, together: bool) -> list[tuple[int, int]]:
    """Batches and drifted features of each judgement: the data of rank 1 alone drift."""
    tables = [EmbeddingBagConfig(100, 16, name=f"t_{name}", feature_names=[name]) for name in NAMES]
    planner = DreamShardPlanner(
        topology=Topology(rank.world_size, "cpu"),
        batch_size=8,
        statistics=TableStatistics.from_batches([batch([4, 3, 2, 1])]),
        stats=[],
        debug=False,
    )
    planner.collective_plan(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    group = dist.group.WORLD if together else None
    watch = DriftWatch(planner, steps=100, every=8, sample_every=1, group=group)
    for _ in range(16):
        watch(batch([4, 3, 2, 1] if rank.rank == 0 else [1, 2, 3, 20]))
    return [(judgement.batches, len(judgement.drifted)) for judgement in watch.judgements]


def test_a_group_is_judged_by_all_of_its_batches() -> None:
    assert run_on_ranks(watched, True, world_size=2) == [[(16, 4), (16, 4)], []]


def test_without_a_group_the_rank_that_planned_judges_by_its_own() -> None:
    assert run_on_ranks(watched, False, world_size=2) == [[(8, 0), (8, 0)], []]
