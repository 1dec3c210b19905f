# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The rank that planned judges by the batches of all ranks, where a group is given."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from logged import warned
from ranks import Rank, run_on_ranks
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardError, DreamShardPlanner, DriftWatch, TableStatistics

NAMES = ["a", "b", "c", "d"]


def batch(lookups: list[int], samples: int = 8) -> KeyedJaggedTensor:
    lengths = torch.tensor(lookups).repeat_interleave(samples)
    return KeyedJaggedTensor(NAMES, torch.arange(int(lengths.sum())) % 90, lengths=lengths)


def planner_of(rank: Rank) -> DreamShardPlanner:
    return DreamShardPlanner(
        topology=Topology(rank.world_size, "cpu"),
        batch_size=8,
        statistics=TableStatistics.from_batches([batch([4, 3, 2, 1])]),
        stats=[],
        debug=False,
    )


def planned(rank: Rank) -> DreamShardPlanner:
    planner = planner_of(rank)
    tables = [EmbeddingBagConfig(100, 16, name=f"t_{name}", feature_names=[name]) for name in NAMES]
    planner.collective_plan(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    return planner


def watched(rank: Rank, together: bool) -> list[tuple[int, int]]:
    """Batches and drifted features of each judgement: the data of rank 1 alone drift."""
    planner = planned(rank)
    group = dist.group.WORLD if together else None
    watch = DriftWatch(planner, steps=100, every=8, sample_every=1, group=group)
    for _ in range(16):
        watch(batch([4, 3, 2, 1] if rank.rank == 0 else [1, 2, 3, 20]))
    return [(judgement.batches, len(judgement.drifted)) for judgement in watch.judgements]


def test_a_group_is_judged_by_all_of_its_batches() -> None:
    assert run_on_ranks(watched, True, world_size=2) == [[(16, 4), (16, 4)], []]


def test_without_a_group_the_rank_that_planned_judges_by_its_own() -> None:
    assert run_on_ranks(watched, False, world_size=2) == [[(8, 0), (8, 0)], []]


def _troubled(rank: Rank) -> tuple[list[tuple[int, int]], list[str]]:
    """Judgements by step and batches, and warnings: in turn rank 1 has batches of another size, without samples, of
    features that change, and as rank 0."""
    watch = DriftWatch(planned(rank), steps=100, every=8, sample_every=1, group=dist.group.WORLD)
    usual = batch([4, 3, 2, 1])
    with warned("watch") as said:
        for kind in (batch([4, 3, 2, 1], 80), batch([0, 0, 0, 0], 0), None, usual):
            for step in range(8):
                halves = usual.split([2 + step // 4, 2 - step // 4])
                watch(usual if rank.rank == 0 else halves[0] if kind is None else kind)
    return [(judgement.step, judgement.batches) for judgement in watch.judgements], said


def test_whatever_batches_a_rank_has_all_ranks_go_on_in_step() -> None:
    (judged, said), (others, said_there) = run_on_ranks(_troubled, world_size=2)
    assert [step for step, _ in judged] == [16, 24, 32] and others == []
    assert [batches for _, batches in judged][::2] == [8, 16] and len(said) == 1 and "80 samples" in said[0]
    assert len(said_there) == 1 and "'c'" in said_there[0]


def _refused(rank: Rank, path: str) -> list[str]:
    """Errors by which watches end on this rank: without a plan, and with a file that only rank 0 would write."""
    said = []
    for planner, at in ((planner_of(rank), None), (planned(rank), path)):
        try:
            DriftWatch(planner, steps=100, every=8, sample_every=1, path=at, group=dist.group.WORLD)
        except DreamShardError as error:
            said.append(str(error))
    return said


def test_what_is_refused_at_the_start_is_refused_on_every_rank(tmp_path: Path) -> None:
    for no_plan, no_file in run_on_ranks(_refused, str(tmp_path / "nowhere" / "watch.jsonl"), world_size=2):
        assert "plan first" in no_plan and "nowhere" in no_file
