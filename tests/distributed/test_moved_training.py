# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A checkpoint loads under every other plan of its tables, and training goes on as if nothing had been moved."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import plain_job
import pytest
import small_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import Case, MixedModel, TableSpec, batches, fill, parts_of, sharders, whole_weights
from ranks import Rank, run_on_ranks
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.tensor import DTensor
from torchrec.distributed import comm
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm.job import EveryTypeSharder
from dreamshard_planner import CheckpointError, attach_optimizers, load_across_plans, save_across_plans
from tests.faults import ended, start
from tests.ways import saved_state

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
}
LEARNING_RATES = {"sgd": 0.5, "adagrad": 0.005, "row_wise_adagrad": 0.005, "top": 0.05}
"""So small that no sample's probability gets near 0 or 1, where float32 has few digits of its gradient."""
EPS, DIM = 1e-8, 16
SAMPLES = 12
"""Samples of a global batch, equally many on each of 2, 3 and 4 ranks."""
BEFORE, AFTER = 2, 2
"""Steps before a move, and after it."""


@dataclass(frozen=True)
class Sharding:
    """A table's sharding: TorchRec's name of it; ranks of a whole table or its slices, or hosts; widths of slices."""

    kind: str
    ranks: tuple[int, ...] = (0,)
    widths: tuple[int, ...] = (DIM,)

    def shards(self, rows: int, world_size: int, local: int) -> list[ShardMetadata]:
        on_hosts, shards = self.kind in ("table_row_wise", "grid_shard"), []
        blocks = world_size if self.kind == "row_wise" else local if on_hosts else 1
        for at, first, width in zip(self.ranks, accumulate(self.widths, initial=0), self.widths, strict=False):
            for block in range(blocks):
                start, end = (min(rows, number * -(-rows // blocks)) for number in (block, block + 1))
                rank = at * (local if on_hosts else 1) + block
                shards.append(ShardMetadata([start, first], [end - start, width], f"rank:{rank}/cpu"))
        return shards


POOLED = (
    Sharding("table_wise", (0,)),
    Sharding("table_wise", (1,)),
    Sharding("column_wise", (0, 1), (8, 8)),
    Sharding("column_wise", (1, 0, 1, 0), (4, 4, 4, 4)),
    Sharding("column_wise", (1, 0), (4, 12)),
    Sharding("row_wise"),
    Sharding("table_row_wise", (0,)),
    Sharding("grid_shard", (0, 1), (8, 8)),
    Sharding("data_parallel"),
)
SEQUENCE = (Sharding("table_wise", (1,)), Sharding("column_wise", (1, 0), (8, 8)), Sharding("row_wise"))
TABLES = {
    "bags": {f"bag{number}": TableSpec(9 + 2 * number, DIM) for number in range(len(POOLED))},
    "sequence": {f"sequence{number}": TableSpec(11 + number, DIM) for number in range(len(SEQUENCE))},
}
CASE = Case(modules=TABLES, stock=False)


@dataclass(frozen=True)
class Moving:
    plan: Mapping[str, Sharding]
    optimizer: str
    hosts: int = 1
    groups: bool = False
    attached: bool = False
    """Replicas have the in-backward optimizer of their tables."""
    dtensors: bool = False
    """In state dicts, in place of ``ShardedTensor``."""

    @property
    def states_apart(self) -> dict[str, tuple[int, ...]]:
        """Column slices of tables whose optimizer has a state for each: what training depends on, of a plan."""
        apart = self.optimizer == "row_wise_adagrad"
        return {name: sharding.widths for name, sharding in self.plan.items() if apart}


def sharding_plan(moving: Moving, world_size: int) -> ShardingPlan:
    plan = {module: EmbeddingModuleShardingPlan() for module in TABLES}
    for module, name, spec in CASE.tables():
        kind, ranks, given, kernel = moving.plan[name].kind, list(range(world_size)), None, "dense"
        if kind != "data_parallel":
            shards = moving.plan[name].shards(spec.rows, world_size, world_size // moving.hosts)
            ranks, given, kernel = [one.placement.rank() for one in shards], EnumerableShardingSpec(shards), "fused"
        plan[module][name] = ParameterSharding(kind, kernel, ranks, given)
    return ShardingPlan(plan)


class Job:
    def __init__(self, moving: Moving, rank: Rank) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(rank.world_size // moving.hosts)
        comm._INTRA_PG = comm._CROSS_PG = None  # TorchRec keeps the groups of the first number of hosts
        self.plan, self.rank = moving.plan, rank
        optimizer = OPTIMIZERS[moving.optimizer]
        settings = {"lr": LEARNING_RATES[moving.optimizer]} | ({} if moving.optimizer == "sgd" else {"eps": EPS})
        model = MixedModel(CASE)
        for module in TABLES:
            apply_optimizer_in_backward(optimizer, getattr(model, module).parameters(), dict(settings))
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv(rank.world_size, rank.rank, dist.group.WORLD, output_dtensor=moving.dtensors),
            device=rank.device,
            plan=sharding_plan(moving, rank.world_size),
            sharders=sharders(CASE),
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
            loss = self.model(*batches(CASE, step, count * self.rank.rank, count))
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


def turned(turn: int, optimizer: str, ranks: int = 2, **settings: Any) -> Moving:
    """Every table in the next sharding: so many turns try every pair of them. Two hosts, or three of a rank each."""
    plan = {f"bag{number}": POOLED[(number + turn) % len(POOLED)] for number in range(len(POOLED))}
    plan |= {f"sequence{number}": SEQUENCE[(number + turn) % len(SEQUENCE)] for number in range(len(SEQUENCE))}
    for name, sharding in plan.items():
        if sharding.kind in ("table_wise", "column_wise"):
            plan[name] = replace(sharding, ranks=tuple(rank * (ranks - 1) for rank in sharding.ranks))
    return Moving(plan, optimizer, hosts=3 if ranks == 3 else 2, **settings)


ATTACHED, DTENSORS = {"attached": True}, {"dtensors": True}
SETTINGS: tuple[tuple[str, dict[str, bool], tuple[tuple[int, dict[str, bool]], ...]], ...] = (
    ("row_wise_adagrad", ATTACHED, ((4, ATTACHED), (0, {}))),
    ("row_wise_adagrad", DTENSORS, ((2, DTENSORS), (5, {}))),
    ("row_wise_adagrad", {}, ((1, DTENSORS),)),
)
"""Optimizer and settings of jobs that save, with turns and settings of those that load."""


def _settings(rank: Rank, folder: Path) -> list[list[Result]]:
    """By job that saves: its training, and those that were moved."""
    results = []
    for number, (optimizer, before, others) in enumerate(SETTINGS):
        moving, path = turned(0, optimizer, **before), folder / str(number)
        results.append([train_and_save(rank, moving, path, plain=moving.dtensors)])
        results[-1] += [load_and_train(rank, turned(turn, optimizer, **after), path) for turn, after in others]
    return results


def _refused(state: dict[str, Any], folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_across_plans(state, folder)
    return str(refused.value)


def _learning_rates(rank: Rank, folder: Path) -> tuple[str, list[float], str]:
    before, after = (Job(turned(turn, "adagrad", groups=True), rank) for turn in (0, 1))
    for group in before.optimizer.param_groups:
        group["lr"] = 0.25
    before.save(folder / "plain", plain=True)
    before.save(folder / "ours", plain=False)
    told = _refused(after.state(), folder / "plain")
    after.load(folder / "ours")
    state = {"model": after.model.state_dict(), "optimizer": {"state": {0: {"sum": torch.ones(3)}}}}
    dcp.save(state, checkpoint_id=folder / "numbered")
    return told, [group["lr"] for group in after.optimizer.param_groups], _refused(state, folder / "numbered")


def _job(rank: Rank, folder: Path) -> dict[Any, Any]:
    """All that so many ranks train: without a move, and from what 2 or 4 of them saved. On as many ranks as before,
    row-wise states go every way; of all others, one way is tried."""
    ranks, found = rank.world_size, {}
    if ranks != 3:
        found["unmoved"] = {
            name: train_and_save(rank, turned(0, name, ranks), folder / f"{ranks} {name}", plain=False)
            for name in OPTIMIZERS
        }
    for was in {4: (), 2: (2, 4), 3: (2,)}[ranks]:
        turns = dict.fromkeys(OPTIMIZERS, [8])
        if was == ranks:
            turns |= {"adagrad": [4], "row_wise_adagrad": range(9)}
        found[was] = {
            (name, turn): load_and_train(rank, turned(turn, name, ranks), folder / f"{was} {name}")
            for name in OPTIMIZERS
            for turn in turns[name]
        }
    if ranks == 2:
        found |= {"settings": _settings(rank, folder), "learning rates": _learning_rates(rank, folder)}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("moved")
    return {ranks: run_on_ranks(_job, folder, world_size=ranks)[0] for ranks in (4, 2, 3)}


@pytest.mark.parametrize(("was", "now"), [(2, 2), (2, 3), (4, 2)])
def test_every_sharding_type_to_every_other(was: int, now: int, found: dict[int, dict[Any, Any]]) -> None:
    assert {optimizer for optimizer, _ in found[now][was]} == set(OPTIMIZERS)
    for (optimizer, turn), after in found[now][was].items():
        check(after, turned(turn, optimizer, now), found[was]["unmoved"][optimizer], turned(0, optimizer, was))


def test_attached_replicas_and_dtensors_move_like_all_else(found: dict[int, dict[Any, Any]]) -> None:
    """Also from one to the other: to replicas that the script's own optimizer trains, and to sharded tensors."""
    for (optimizer, _, others), (unmoved, *moved) in zip(SETTINGS, found[2]["settings"], strict=True):
        for (turn, _), result in zip(others, moved, strict=True):
            check(result, turned(turn, optimizer), unmoved, turned(0, optimizer))


def test_learning_rates_go_with_their_tables(found: dict[int, dict[Any, Any]]) -> None:
    told, rates, numbered = found[2]["learning rates"]
    assert rates and set(rates) == {0.25}
    assert "learning rate of" in told and "save_param_groups(False)" in told
    assert "by number" in numbered and "KeyedOptimizerWrapper" in numbered


MATRIX = Path(__file__).parents[2] / ".matrix"


def _under_our_plan(rank: Rank, folder: Path) -> tuple[dict[str, str], list[Any], list[Any]]:
    """The sharding of each table, and this rank's parts of weights and states."""
    kinds = {"cut": "row_wise", "whole": "column_wise"}
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=8) for name, kind in kinds.items()}
    planner = small_models.planner(constraints=constraints, exact_training=False)
    sharder = EveryTypeSharder()
    plan = planner.collective_plan(plain_job.unsharded(), [sharder], dist.group.WORLD)
    model = DistributedModelParallel(plain_job.unsharded(), device=rank.device, plan=plan, sharders=[sharder])
    state = saved_state(model)
    load_across_plans(state, folder)
    states = [(key, value) for key, of_table in state["optimizer"]["state"].items() for value in of_table.values()]
    weights, sums = (
        [(key, *at) for key, value in found for at in parts_of(value)] for found in (state["model"].items(), states)
    )
    return {name: table.sharding_type for name, table in plan.plan["ebc"].items()}, weights, sums


@pytest.mark.parametrize("release", ["installed", "1.6.1", "1.7.0", "1.9.2"])
def test_checkpoints_of_jobs_without_this_package(release: str, tmp_path: Path) -> None:
    if release != "installed" and not (MATRIX / release).is_dir():
        pytest.skip(f"no TorchRec {release} in {MATRIX}")
    saved = tmp_path / "saved"
    if release == "installed":
        assert ended(*(start(plain_job.main, rank, str(saved)) for rank in range(2))) == [0, 0]
    else:
        command, paths = [sys.executable, str(Path(__file__).with_name("plain_job.py")), str(saved)], MATRIX / release
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(paths)})
    rows, slices = plain_job.ROWS, {"cut": 2, "whole": 1}
    weights = {key: torch.zeros(rows, plain_job.DIM) for key in map("ebc.embedding_bags.{}.weight".format, slices)}
    sums = {
        key: {f"{name}.momentum1": torch.zeros(count * rows)}
        for key, (name, count) in zip(weights, slices.items(), strict=True)
    }
    dcp.load({"model": weights, "optimizer": {"state": sums}}, checkpoint_id=saved, no_dist=True)
    for kinds, loaded_weights, loaded_sums in run_on_ranks(_under_our_plan, saved, world_size=2):
        assert kinds == {"cut": "row_wise", "whole": "column_wise"} and loaded_weights and loaded_sums
        for key, (row, column), part in loaded_weights:
            own = weights[key][row : row + len(part), column : column + part.shape[1]]
            torch.testing.assert_close(part, own, rtol=0, atol=0)
        for key, (row,), part in loaded_sums:  # of one slice of columns after the other
            (whole,) = sums[key].values()
            own = whole.view(-1, rows).mean(0)
            assert own.any()
            torch.testing.assert_close(part, own[row % rows :][: len(part)])
