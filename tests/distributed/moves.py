# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train under one plan, save, load under another, go on; and the same in plain torch, with nothing sharded.

Shape letters: R rows, D dim, S column slices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import LEARNING_RATE, SAMPLES, Case, MixedModel, TableSpec, batches, fill, sharders, untrained, whole_weights
from ranks import Rank
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed import comm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import DreamShardPlanner, SavedPlan, attach_optimizers, load_across_plans, save_across_plans
from dreamshard_planner.plans.plan_file import ShardPlace, TableSharding

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
}
EPS = 1e-8
STEPS = 3
"""Before and after a move."""


@dataclass(frozen=True)
class Sharding:
    """How a table is sharded.

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
    """A model and its plan on some ranks."""

    tables: Mapping[str, Mapping[str, TableSpec]]
    plan: Mapping[str, Sharding]
    optimizer: str
    hosts: int = 1
    ranks: int = 2
    groups: bool = False
    """Learning rates are in the state dict."""
    attached: bool = False
    """Replicas have the in-backward optimizer of their tables."""

    @property
    def samples(self) -> int:
        """Of a global batch: as many on each rank."""
        return SAMPLES // self.ranks * self.ranks

    @property
    def case(self) -> Case:
        return Case(modules=self.tables, stock=False)


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
    """A sharded model with its optimizers, as a script has them."""

    def __init__(self, moving: Moving, rank: Rank) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(rank.world_size // moving.hosts)
        comm._INTRA_PG = comm._CROSS_PG = None  # TorchRec keeps the groups of the first number of hosts
        self.case, self.plan, self.rank = moving.case, moving.plan, rank
        optimizer = OPTIMIZERS[moving.optimizer]
        settings = {"lr": LEARNING_RATE} | ({} if moving.optimizer == "sgd" else {"eps": EPS})
        model = MixedModel(self.case)
        for module in moving.tables:
            apply_optimizer_in_backward(optimizer, getattr(model, module).parameters(), dict(settings))
        self.model = DistributedModelParallel(
            model,
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
        self.top = torch.optim.SGD([p for name, p in dense.items() if name.startswith("top")], lr=LEARNING_RATE)
        self.optimizer = CombinedOptimizer(parts)
        self.optimizer.save_param_groups(moving.groups)
        fill(self.model)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train(self, first: int, steps: int) -> list[float]:
        """Losses, the mean over all ranks."""
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

    def load(self, folder: Path, plain: bool = False, **consent: Any) -> None:
        state = self.state()
        if plain:
            dcp.load(state, checkpoint_id=folder)
        else:
            load_across_plans(state, folder, **consent)
        if all(len(set(sharding.widths)) < 2 for sharding in self.plan.values()):  # TorchRec's fails with uneven slices
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def plan_file(moving: Moving, file: Path) -> None:
    """The plan as a file, with inputs and costs of a plan that was made for the same tables."""
    planner = DreamShardPlanner(
        topology=Topology(moving.ranks, "cpu", local_world_size=moving.ranks // moving.hosts),
        batch_size=SAMPLES,
        stats=[],
        debug=False,
        sharding_types=["table_wise"],
    )
    planner.plan(MixedModel(moving.case), sharders(moving.case))
    planner.save_plan(file)
    saved = SavedPlan.load(file)
    sharding: dict[str, dict[str, TableSharding]] = {}
    for module, tables in moving.tables.items():
        sharding[module] = {}
        for name, spec in tables.items():
            own = moving.plan[name]
            if own.kind == "data_parallel":
                shards = [(rank, 0, 0, spec.rows, spec.dim) for rank in range(moving.ranks)]
            else:
                shards = own.shards(spec.rows, spec.dim, moving.ranks, moving.hosts)
            places = tuple(ShardPlace(rank, (row, column), (rows, dims)) for rank, row, column, rows, dims in shards)
            sharding[module][name] = TableSharding(own.kind, "fused", places)
    replace(saved, sharding=sharding).save(file)


@dataclass(frozen=True)
class Result:
    """Of training after a move, or without one."""

    losses: list[float]
    weights: dict[str, Tensor]


def train_and_save(rank: Rank, moving: Moving, folder: Path, plain: bool = True, go_on: bool = True) -> Result:
    """Train, save, and go on as if nothing had been."""
    job = Job(moving, rank)
    losses = job.train(0, STEPS)
    job.save(folder, plain)
    losses += job.train(STEPS, STEPS) if go_on else []
    return Result(losses, whole_weights(job.model, rank.world_size))


def load_and_train(rank: Rank, moving: Moving, folder: Path, **consent: Any) -> Result:
    job = Job(moving, rank)
    job.load(folder, **consent)
    losses = job.train(STEPS, STEPS)
    return Result(losses, whole_weights(job.model, rank.world_size))


class Reference:
    """The model in plain torch, unsharded, with the states of column slices kept apart as the kernels keep them."""

    def __init__(self, moving: Moving) -> None:
        self.case, self.optimizer = moving.case, moving.optimizer
        self.model = MixedModel(replace(moving.case, optimizer=None))
        for module, tables in moving.tables.items():
            for name, spec in tables.items():
                weight = nn.Parameter(untrained(name, (spec.rows, spec.dim)))
                self._holder(module, name).weight = weight
        self.weights = {name: self._holder(module, name).weight for module, name, _ in self.case.tables()}
        self.states_RD = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def _holder(self, module: str, name: str) -> nn.Module:
        collection = getattr(self.model, module)
        return (collection.embeddings if module.startswith("sequence") else collection.embedding_bags)[name]

    def train(self, moving: Moving, first: int, steps: int) -> list[float]:
        losses = []
        for name, weight in self.weights.items():  # what a slice starts with is the mean over its columns
            self._average(name, moving.plan[name].slices(weight.shape[1]))
        for step in range(first, first + steps):
            self.model.zero_grad()
            loss = self.model(*batches(self.case, step, 0, moving.samples))
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for name, weight in self.weights.items():
                    self._step(name, weight, moving.plan[name].slices(weight.shape[1]))
                for parameter in self.model.top.parameters():
                    parameter -= LEARNING_RATE * parameter.grad
        return losses

    def _average(self, name: str, slices: list[tuple[int, int]]) -> None:
        if self.optimizer == "row_wise_adagrad":
            parts = [self.states_RD[name][:, first : first + width] for first, width in slices]
            self.states_RD[name] = torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], 1)

    def _step(self, name: str, weight: nn.Parameter, slices: list[tuple[int, int]]) -> None:
        gradient_RD = weight.grad
        if self.optimizer == "sgd":
            weight -= LEARNING_RATE * gradient_RD
            return
        squares = [gradient_RD[:, first : first + width].square() for first, width in slices]
        if self.optimizer == "row_wise_adagrad":
            squares = [square.mean(1, keepdim=True).expand_as(square) for square in squares]
        self.states_RD[name] = self.states_RD[name] + torch.cat(squares, 1)
        weight -= LEARNING_RATE * gradient_RD / (self.states_RD[name].sqrt() + EPS)


def reference(before: Moving, *after: Moving) -> Result:
    """Losses before and after moves, trained on after the last alone, and the weights in the end."""
    model = Reference(before)
    losses = model.train(before, 0, STEPS)
    for number, moving in enumerate(after, start=1):
        losses += model.train(moving, STEPS, STEPS if number == len(after) else 0)
    return Result(losses, {name: weight.detach() for name, weight in model.weights.items()})


def trains_alike(optimizer: str, before: Moving, after: Moving) -> bool:
    """Whether the run goes on under the new plan as it would have under the old one, not only by the rules: column
    slices of row-wise Adagrad have states of their own."""
    dims = {name: spec.dim for _, name, spec in before.case.tables()}
    slices = [[moving.plan[name].slices(dim) for name, dim in dims.items()] for moving in (before, after)]
    return optimizer != "row_wise_adagrad" or slices[0] == slices[1]
