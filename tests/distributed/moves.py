# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train under one plan, save, load under another, and go on."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import Case, MixedModel, TableSpec, batches, fill, sharders, whole_weights
from ranks import Rank
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.tensor import DTensor
from torchrec.distributed import comm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import attach_optimizers, load_across_plans, save_across_plans

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
}
LEARNING_RATES = {"sgd": 0.5, "adagrad": 0.005, "row_wise_adagrad": 0.005, "top": 0.05}
"""So small that no sample's probability gets near 0 or 1, where float32 has few digits of its gradient."""
EPS = 1e-8
SAMPLES = 12
"""Samples of a global batch, equally many on each of 2, 3 and 4 ranks."""
BEFORE, AFTER = 2, 2
"""Steps before a move, and after it."""


@dataclass(frozen=True)
class Sharding:
    """Sharding of a table.

    Attributes:
        kind: TorchRec's name.
        ranks: of whole tables and column slices; hosts of ``table_row_wise`` and ``grid_shard``.
        widths: of the column slices.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def slices(self, dim: int) -> list[tuple[int, int]]:
        """First column and width of each."""
        widths = self.widths or (dim,)
        return [(sum(widths[:number]), width) for number, width in enumerate(widths)]

    def shards(self, rows: int, dim: int, world_size: int, hosts: int) -> list[tuple[int, int, int, int, int]]:
        """Rank, first row, first column, rows and columns of each."""
        local = world_size // hosts
        blocks = world_size if self.kind == "row_wise" else local
        if self.kind in ("table_wise", "column_wise", "table_column_wise"):
            where = zip(self.ranks, self.slices(dim), strict=True)
            return [(rank, 0, first, rows, width) for rank, (first, width) in where]
        size, result = -(-rows // blocks), []
        for host, (first, width) in zip(self.ranks or (0,), self.slices(dim), strict=True):
            for block in range(blocks):
                start = min(rows, block * size)
                result.append((host * local + block, start, first, min(rows, start + size) - start, width))
        return result


@dataclass(frozen=True)
class Moving:
    tables: Mapping[str, Mapping[str, TableSpec]]
    plan: Mapping[str, Sharding]
    optimizer: str
    hosts: int = 1
    ranks: int = 2
    groups: bool = False
    attached: bool = False
    """Replicas have the in-backward optimizer of their tables."""
    dtensors: bool = False
    """In state dicts, in place of ``ShardedTensor``."""

    @property
    def case(self) -> Case:
        return Case(modules=self.tables, stock=False)

    @property
    def states_apart(self) -> dict[str, list[tuple[int, int]]]:
        """Column slices of tables whose optimizer has a state for each: what training depends on, of a plan."""
        if self.optimizer != "row_wise_adagrad":
            return {}
        return {name: self.plan[name].slices(spec.dim) for _, name, spec in self.case.tables()}


def sharding_plan(moving: Moving, world_size: int) -> ShardingPlan:
    plan = {}
    for module, tables in moving.tables.items():
        plan[module] = EmbeddingModuleShardingPlan()
        for name, spec in tables.items():
            sharding = moving.plan[name]
            if sharding.kind == "data_parallel":
                ranks = list(range(world_size))
                plan[module][name] = ParameterSharding("data_parallel", "dense", ranks)
                continue
            shards = sharding.shards(spec.rows, spec.dim, world_size, moving.hosts)
            spec_ = EnumerableShardingSpec(
                [
                    ShardMetadata([row, column], [rows, columns], f"rank:{rank}/cpu")
                    for rank, row, column, rows, columns in shards
                ]
            )
            plan[module][name] = ParameterSharding(sharding.kind, "fused", [shard[0] for shard in shards], spec_)
    return ShardingPlan(plan)


class Job:
    def __init__(self, moving: Moving, rank: Rank) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(rank.world_size // moving.hosts)
        comm._INTRA_PG = comm._CROSS_PG = None  # TorchRec keeps the groups of the first number of hosts
        self.case, self.plan, self.rank = moving.case, moving.plan, rank
        optimizer = OPTIMIZERS[moving.optimizer]
        settings = {"lr": LEARNING_RATES[moving.optimizer]} | ({} if moving.optimizer == "sgd" else {"eps": EPS})
        model = MixedModel(self.case)
        for module in moving.tables:
            apply_optimizer_in_backward(optimizer, getattr(model, module).parameters(), dict(settings))
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv(rank.world_size, rank.rank, dist.group.WORLD, output_dtensor=moving.dtensors),
            device=rank.device,
            plan=sharding_plan(moving, rank.world_size),
            sharders=sharders(self.case),
        )
        if moving.attached:
            attach_optimizers(self.model)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        replicated = {name: parameter for name, parameter in dense.items() if not name.startswith("top")}
        parts: list[Any] = [self.model.fused_optimizer]
        if replicated:
            tables = KeyedOptimizerWrapper(replicated, lambda params: optimizer(params, **settings))
            tables.init_state()
            parts.append(("replicated", tables))
        self.top = torch.optim.SGD([p for name, p in dense.items() if name.startswith("top")], lr=LEARNING_RATES["top"])
        self.optimizer = CombinedOptimizer(parts)
        self.optimizer.save_param_groups(moving.groups)
        fill(self.model)
        kinds = {type(weights) for weights in self.model.state_dict().values()}
        assert (DTensor in kinds) == moving.dtensors

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train(self, first: int, steps: int) -> list[float]:
        count, losses = SAMPLES // self.rank.world_size, []
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.top.zero_grad()
            loss = self.model(*batches(self.case, step, count * self.rank.rank, count))
            loss.backward()
            self.optimizer.step()
            self.top.step()
            total = loss.detach() / self.rank.world_size
            dist.all_reduce(total)
            losses.append(total.item())
        return losses

    def save(self, folder: Path, plain: bool) -> None:
        if plain:
            dcp.save(self.state(), checkpoint_id=folder)
        else:
            save_across_plans(self.state(), folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        load_across_plans(state, folder)
        if all(len(set(sharding.widths)) < 2 for sharding in self.plan.values()):  # TorchRec's fails with uneven slices
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True)
class Result:
    losses: list[float]
    at_move: dict[str, Tensor]


def train_and_save(rank: Rank, moving: Moving, folder: Path, plain: bool = True) -> Result:
    job = Job(moving, rank)
    losses = job.train(0, BEFORE)
    job.save(folder, plain)
    at_move = whole_weights(job.model, rank.world_size)
    return Result(losses + job.train(BEFORE, AFTER), at_move)


def load_and_train(rank: Rank, moving: Moving, folder: Path) -> Result:
    job = Job(moving, rank)
    job.load(folder)
    at_move = whole_weights(job.model, rank.world_size)
    return Result(job.train(BEFORE, AFTER), at_move)


def check(moved: Result, after: Moving, unmoved: Result, before: Moving) -> None:
    """A training that was moved goes on as the one that was not.

    Row-wise states of other column slices are means: then only what the weights decide is the same.
    """
    for name, weight in unmoved.at_move.items():
        assert torch.equal(moved.at_move[name], weight), name
    expected = unmoved.losses[BEFORE:]
    assert moved.losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert moved.losses == pytest.approx(expected, rel=1e-5 if after.states_apart == before.states_apart else 0.05)
