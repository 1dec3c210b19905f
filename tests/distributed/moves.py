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

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import SAMPLES, Case, MixedModel, TableSpec, batches, fill, sharders, untrained, whole_weights
from ranks import Rank
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
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
BEFORE, AFTER = 3, 5
"""Steps before a move, and after it."""
ROUNDED = 2
"""Further runs of the reference, which tell what rounding does."""
MARGIN = 4
"""Ratio of the allowed distance from the reference to that between reference runs."""


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
    dtensors: bool = False
    """In state dicts, in place of ``ShardedTensor``."""

    @property
    def samples(self) -> int:
        """Samples of a global batch, equally many on each rank."""
        return SAMPLES // self.ranks * self.ranks

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
    """A sharded model with its optimizers, as a script has them."""

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


@dataclass(frozen=True)
class Result:
    """Results of training after a move, or without one."""

    losses: list[float]
    weights: dict[str, Tensor]


def train_and_save(rank: Rank, moving: Moving, folder: Path, plain: bool = True) -> Result:
    """Train, save, and go on as if nothing had been."""
    job = Job(moving, rank)
    losses = job.train(0, BEFORE)
    job.save(folder, plain)
    losses += job.train(BEFORE, AFTER)
    return Result(losses, whole_weights(job.model, rank.world_size))


def load_and_train(rank: Rank, moving: Moving, folder: Path, **consent: Any) -> Result:
    job = Job(moving, rank)
    job.load(folder, **consent)
    losses = job.train(BEFORE, AFTER)
    return Result(losses, whole_weights(job.model, rank.world_size))


class Reference:
    """The model in plain torch, unsharded, with the states of column slices kept apart as the kernels keep them.

    Args:
        rounding: 0, or the number of a run whose sums are in another order, ``2**rounding`` parts of a batch one after
            the other, and whose weights start off by no more than float32 rounds.
    """

    def __init__(self, moving: Moving, rounding: int = 0) -> None:
        self.case, self.optimizer, self._parts = moving.case, moving.optimizer, 2**rounding
        self.model = MixedModel(replace(moving.case, optimizer=None))
        off = torch.Generator().manual_seed(rounding)
        for module, tables in moving.tables.items():
            for name, spec in tables.items():
                weight = untrained(name, (spec.rows, spec.dim))
                if rounding:
                    weight *= 1 + torch.finfo().eps * torch.randint(-1, 2, weight.shape, generator=off)
                self._holder(module, name).weight = nn.Parameter(weight)
        self.weights = {name: self._holder(module, name).weight for module, name, _ in self.case.tables()}
        self.states_RD = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def _holder(self, module: str, name: str) -> nn.Module:
        collection = getattr(self.model, module)
        return (collection.embeddings if module.startswith("sequence") else collection.embedding_bags)[name]

    def train(self, moving: Moving, first: int, steps: int) -> list[float]:
        losses = []
        self._average(moving)
        for step in range(first, first + steps):
            self.model.zero_grad()
            losses.append(self._gradients(step, moving.samples))
            with torch.no_grad():
                for name, weight in self.weights.items():
                    self._step(name, weight, moving.states_apart.get(name))
                for parameter in self.model.top.parameters():
                    parameter -= LEARNING_RATES["top"] * parameter.grad
        return losses

    def _gradients(self, step: int, samples: int) -> float:
        """Compute the gradients of a batch, and return its loss."""
        total, size = 0.0, -(-samples // self._parts)
        for first in range(0, samples, size):
            count = min(size, samples - first)
            loss = self.model(*batches(self.case, step, first, count)) * count / samples
            loss.backward()
            total += loss.item()
        return total

    def _step(self, name: str, weight: nn.Parameter, slices: list[tuple[int, int]] | None) -> None:
        gradient_RD, rate = weight.grad, LEARNING_RATES[self.optimizer]
        if self.optimizer == "sgd":
            weight -= rate * gradient_RD
            return
        self.states_RD[name] += _means(gradient_RD.square(), slices) if slices else gradient_RD.square()
        weight -= rate * gradient_RD / (self.states_RD[name].sqrt() + EPS)

    def _average(self, moving: Moving) -> None:
        """Set the states of slices to the mean over their columns."""
        for name, slices in moving.states_apart.items():
            self.states_RD[name] = _means(self.states_RD[name], slices)


def _means(whole_RD: Tensor, slices: list[tuple[int, int]]) -> Tensor:
    """Over the columns of each slice."""
    parts = [whole_RD[:, first : first + width] for first, width in slices]
    return torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], 1)


def reference(before: Moving, *after: Moving, rounding: int = 0) -> Result:
    """Losses before and after moves, trained on after the last alone, and the weights in the end."""
    model = Reference(before, rounding)
    losses = model.train(before, 0, BEFORE)
    for number, moving in enumerate(after, start=1):
        losses += model.train(moving, BEFORE, AFTER if number == len(after) else 0)
    return Result(losses, {name: weight.detach() for name, weight in model.weights.items()})


_references: dict[str, Result] = {}
_rounding: dict[str, Result] = {}
"""By what they depend on; the second is what float32 leaves open of losses and of each table's weights."""


def check(result: Result, *plans: Moving) -> None:
    """A run's last losses, and its weights in the end, are the reference's under these plans.

    How far float32 may take them apart depends on the model: a gradient that is nearly nothing is the small difference
    of large numbers. So the reference is run again with its sums in other orders, and that is the measure.
    """
    model = repr([(plan.tables, plan.optimizer, plan.samples) for plan in plans])
    key = model + repr([plan.states_apart for plan in plans])
    if key not in _references:
        _references[key] = reference(*plans)
    expected = _references[key]
    if model not in _rounding:
        others = [reference(*plans, rounding=number) for number in range(1, ROUNDED + 1)]
        _rounding[model] = _spread(expected, others)
    spread = _rounding[model]
    losses = expected.losses[-len(result.losses) :]
    assert result.losses == pytest.approx(losses, rel=0, abs=MARGIN * max(spread.losses))
    for name, weight in expected.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=MARGIN * float(spread.weights[name]))


def _spread(expected: Result, others: list[Result]) -> Result:
    """Return the largest distance of runs from the first, at least its last digit."""
    eps, losses = torch.finfo().eps, torch.tensor([run.losses for run in (expected, *others)])
    farthest = {
        name: torch.stack([weight * eps, *(run.weights[name] - weight for run in others)]).abs().max()
        for name, weight in expected.weights.items()
    }
    return Result([float(losses.max() * eps), float((losses - losses[0]).abs().max())], farthest)
