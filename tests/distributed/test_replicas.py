# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Replicated tables with an attached optimizer train as whole ones do, whatever a script steps."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mixed import local_shards
from ranks import Rank, gpu_ranks, run_on_ranks
from tiny import FEATURES, SHAPES, TinyModel, batches, make_planner
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecsDistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.optim import SGD, Adagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, attach_optimizers
from dreamshard_planner.errors import DreamShardError
from tests.ways import Batch, Training, local, saved_state, states_of, train

TW, DP = "table_wise", "data_parallel"
NAMES = [f"t{index}" for index in range(len(SHAPES))]
REPLICATED = [name for name in NAMES if name != "t1"]
"""Tables that are replicated; one beside them is always whole."""
STEPS = 6
SHARES = {2: (7, 5), 4: (4, 3, 3, 2)}

RULES = {
    "sgd": (SGD, {"lr": 0.2}),
    "adagrad": (Adagrad, {"lr": 0.2, "eps": 1e-3}),
    "adagrad, eps of FBGEMM": (torch.optim.Adagrad, {"lr": 0.2}),
    "row-wise adagrad": (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-3}),
}
WAYS = (
    "dense", "schedule", "warm-up", "clipping", "accumulation", "pipeline", "everything", "ahead", "twice",
    "ids without rows",
)  # fmt: skip
TRAININGS = {
    **{name: Training(*rule) for name, rule in RULES.items()},
    **{f"way: {way}": Training(*RULES["row-wise adagrad"], way) for way in WAYS},
    "summed gradients, twice": Training(torch.optim.SGD, {"lr": 0.2}, "twice", divides=False),
    "torchrec's class": Training(*RULES["row-wise adagrad"], torchrecs_class=True),
}


ON_FOUR = ("way: pipeline", "summed gradients, twice")


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    """States of the fused optimizer on this rank."""
    dense: set[str]
    """Names of the parameters that are the script's to train."""

    @staticmethod
    def of(model: TorchRecsDistributedModelParallel, losses: list[float]) -> "Trained":
        weights = {name: part.cpu().clone() for name, _, shards in local_shards(model) for _, part in shards}
        dense = {name for name, _ in in_backward_optimizer_filter(model.named_parameters())}
        return Trained(losses, weights, local(states_of(model)), dense)


def tiny_model(training: Training) -> TinyModel:
    return TinyModel(training.optimizer, training.arguments, mean=6)


def sharded(training: Training, kind: str, rank: Rank) -> TorchRecsDistributedModelParallel:
    constraints = {
        name: ParameterConstraints(sharding_types=[its], compute_kernels=["dense" if its == DP else "fused"])
        for name, its in ((name, kind if name in REPLICATED else TW) for name in NAMES)
    }
    planner, model = make_planner("torchrec", rank, constraints=constraints, stats=[]), tiny_model(training)
    if not training.torchrecs_class:
        return DistributedModelParallel(model, device=rank.device, planner=planner)
    made = TorchRecsDistributedModelParallel(model, device=rank.device, plan=planner.collective_plan(model))
    attach_optimizers(made)
    return made


def given(training: Training, rank: Rank, steps: range = range(STEPS)) -> Iterator[Batch]:
    """Shares of unequal size, where there are so many ranks."""
    shares = SHARES.get(rank.world_size, [3] * rank.world_size)
    for batch in batches(rank, steps, sum(shares), shares):
        if training.way == "ids without rows":
            ids = batch.sparse.values().clone()
            ids[::5], ids[1::7] = 10**6, -3
            batch.sparse = KeyedJaggedTensor(list(FEATURES), ids, lengths=batch.sparse.lengths())
        yield batch


def train_each(rank: Rank, trainings: Mapping[str, Training]) -> dict[str, dict[str, Trained]]:
    results: dict[str, dict[str, Trained]] = {}
    for name, training in trainings.items():
        for kind in (TW, DP):
            model = sharded(training, kind, rank)
            losses = train(training, model, given(training, rank))
            results.setdefault(name, {})[kind] = Trained.of(model, losses)
    return results


def _resumed(rank: Rank, first: str, folder: str) -> Trained:
    """Saved under ``first`` half way, and loaded into replicas that knew nothing of it."""
    training, halves = TRAININGS["row-wise adagrad"], (range(STEPS // 2), range(STEPS // 2, STEPS))
    before, after = (sharded(training, kind, rank) for kind in (first, DP))
    losses = train(training, before, given(training, rank, halves[0]))
    dcp.save(saved_state(before), checkpoint_id=folder)
    dcp.load(loaded := saved_state(after), checkpoint_id=folder)
    after.load_state_dict(loaded["model"])
    after.fused_optimizer.load_state_dict(loaded["optimizer"])
    return Trained.of(after, losses + train(training, after, given(training, rank, halves[1])))


def _all_reduces(rank: Rank) -> int:
    """Return how many a step takes with replicas, after DDP's first steps."""
    training = TRAININGS["sgd"]
    model = sharded(training, DP, rank)
    train(training, model, given(training, rank, range(2)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(training, model, given(training, rank, range(2, 3)))
    return sum(event.name == "gloo:all_reduce" for event in profiler.events())


def _planned_replicas(rank: Rank) -> tuple[set[str], list[str]]:
    planner = DreamShardPlanner(sharding_types=[DP], stats=[], debug=False)
    model = DistributedModelParallel(tiny_model(TRAININGS["sgd"]), device=rank.device, planner=planner)
    kinds = {tables.sharding_type for tables in model.plan.plan["embeddings"].values()}
    return kinds, sorted(model.fused_optimizer.params)


def _batches_of_several_sizes(rank: Rank) -> str:
    model = sharded(TRAININGS["sgd"], DP, rank)
    counts = [[2 + index] for index in range(len(FEATURES))]
    lengths = torch.ones(sum(count for (count,) in counts), dtype=torch.int64)
    ids = torch.zeros(len(lengths), dtype=torch.int64)
    sparse = KeyedJaggedTensor(
        list(FEATURES),
        ids,
        lengths=lengths,
        stride_per_key_per_rank=counts,
        inverse_indices=(list(FEATURES), torch.zeros(len(FEATURES), 8, dtype=torch.int64)),
    )
    with pytest.raises(DreamShardError) as error:
        model(Batch(sparse, torch.zeros(8)))
    return str(error.value)


def _two_lookups_of_a_backward(rank: Rank) -> list[str]:
    told = []
    for name in ("sgd", "row-wise adagrad"):
        model, batch = sharded(TRAININGS[name], DP, rank), next(given(TRAININGS[name], rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (model(batch)[0] + model(batch)[0]).backward()
        told += [str(warning.message) for warning in caught if "twice" in str(warning.message)]
        assert bool(told) == (name != "sgd"), told
    return told


def _job(rank: Rank, folder: str) -> dict[str, Any]:
    return {
        "trained": train_each(rank, TRAININGS),
        "resumed": [_resumed(rank, first, f"{folder}/{first}") for first in (DP, TW)],
        "all reduces": _all_reduces(rank),
        "planned": _planned_replicas(rank),
        "refused": _batches_of_several_sizes(rank),
        "twice": _two_lookups_of_a_backward(rank),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_on_ranks(_job, str(tmp_path_factory.mktemp("replicas")), world_size=2)


@pytest.fixture(scope="module", params=[2, 4, pytest.param("GPUs", marks=pytest.mark.gpu)])
def trained(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Trained]]]:
    if request.param == "GPUs":
        return run_on_ranks(train_each, TRAININGS, world_size=gpu_ranks(), backend="nccl")
    if request.param == 2:
        return [of_rank["trained"] for of_rank in request.getfixturevalue("found")]
    return run_on_ranks(train_each, {name: TRAININGS[name] for name in ON_FOUR}, world_size=4)


def of_all_ranks(trained: list[dict[str, dict[str, Trained]]], name: str, kind: str) -> Trained:
    every = [of_rank[name][kind] for of_rank in trained]
    weights = {table: weight for one in every for table, weight in one.weights.items()}
    states = {name: state for one in every for name, state in one.states.items()}
    return Trained([loss for one in every for loss in one.losses], weights, states, every[0].dense)


def test_replicas_train_as_whole_tables(trained: list[dict[str, dict[str, Trained]]]) -> None:
    """Weights, losses, and states, which are named and shaped as those of fused tables."""
    for name in trained[0]:
        whole, replicated = of_all_ranks(trained, name, TW), of_all_ranks(trained, name, DP)
        assert len(whole.losses) == STEPS * len(trained), name
        assert replicated.losses == pytest.approx(whole.losses, rel=1e-5), name
        assert whole.weights.keys() == replicated.weights.keys() == set(NAMES)
        named = partial("{}: {}".format, name)
        for table, weight in whole.weights.items():
            torch.testing.assert_close(replicated.weights[table], weight, rtol=1e-4, atol=1e-5, msg=named)
        for of_rank in trained:
            for table in REPLICATED:
                assert torch.equal(of_rank[name][DP].weights[table], replicated.weights[table]), (name, table)
            # Tables are not the script's to train.
            assert of_rank[name][DP].dense == of_rank[name][TW].dense == {"top.weight", "top.bias"}, name
        if name in RULES:
            torch.testing.assert_close(replicated.states, whole.states, rtol=1e-4, atol=1e-8, msg=named)
            assert ("sgd" in name) == (not whole.states), name


def test_training_resumes_from_a_checkpoint(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for resumed in of_rank["resumed"]:
            for table, weight in of_rank["trained"]["row-wise adagrad"][DP].weights.items():
                torch.testing.assert_close(resumed.weights[table], weight, rtol=1e-4, atol=1e-5)


def test_gradients_are_reduced_once(found: list[dict[str, Any]]) -> None:
    """One all-reduce of the replicas, which are one group, one of the dense layers."""
    assert [of_rank["all reduces"] for of_rank in found] == [2, 2]


def test_our_class_opens_data_parallel(found: list[dict[str, Any]]) -> None:
    for kinds, parameters in (of_rank["planned"] for of_rank in found):
        assert kinds == {DP} and parameters == [f"embeddings.embedding_bags.{name}.weight" for name in NAMES]


def test_replicas_refuse_batches_whose_size_varies_by_feature(found: list[dict[str, Any]]) -> None:
    for text in (of_rank["refused"] for of_rank in found):
        assert all(name in text for name in (*REPLICATED, "data_parallel", "batch_sizes")), text


def test_two_lookups_of_one_backward_are_warned_of(found: list[dict[str, Any]]) -> None:
    """Fused kernels update after each lookup, which equals one update by SGD alone."""
    for of_rank in found:
        text = " ".join(of_rank["twice"])
        assert all(f".{name}.weight" in text for name in REPLICATED) and ".t1." not in text
