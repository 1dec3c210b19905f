# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Replicated tables with an attached optimizer train as whole ones do, whatever a script steps."""

from functools import partial
from typing import Any

import pytest
import torch
from ranks import Rank, gpu_ranks, run_on_ranks
from replicas import DP, FEATURES, SHAPES, STEPS, TABLES, TW, Model, Trained, all_reduces, resume, sharded, train_each
from torchrec.optim import SGD, Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DistributedModelParallel, DreamShardPlanner
from dreamshard_planner.errors import DreamShardError
from tests.ways import Batch, Training

RULES = {
    "sgd": (SGD, {"lr": 0.2}),
    "torch sgd": (torch.optim.SGD, {"lr": 0.2}),
    "adagrad": (Adagrad, {"lr": 0.2, "eps": 1e-3}),
    "adagrad, eps of FBGEMM": (torch.optim.Adagrad, {"lr": 0.2}),
    "row-wise adagrad": (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-3}),
    "row-wise adagrad, eps of FBGEMM": (RowWiseAdagrad, {"lr": 0.2}),
}
WAYS = (
    "fused", "dense", "combined", "schedule", "warm-up", "clipping", "accumulation", "pipeline", "everything", "ahead",
    "twice", "ids without rows",
)  # fmt: skip
TRAININGS = {
    **{name: Training(*rule) for name, rule in RULES.items()},
    **{f"way: {way}": Training(*RULES["row-wise adagrad"], way) for way in WAYS},
    "summed gradients": Training(*RULES["sgd"], divides=False),
    "summed gradients, twice": Training(*RULES["sgd"], "twice", divides=False),
    "torchrec's class": Training(*RULES["row-wise adagrad"], torchrecs_class=True),
}


ON_FOUR = ("adagrad", "row-wise adagrad", "way: accumulation", "way: pipeline", "summed gradients, twice")
"""Tried on four ranks as well."""


@pytest.fixture(scope="module", params=[2, 4, pytest.param("GPUs", marks=pytest.mark.gpu)])
def trained(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Trained]]]:
    """By rank, training and sharding type."""
    if request.param == "GPUs":
        return run_on_ranks(train_each, TRAININGS, world_size=gpu_ranks(), backend="nccl")
    trainings = {name: training for name, training in TRAININGS.items() if request.param == 2 or name in ON_FOUR}
    return run_on_ranks(train_each, trainings, world_size=request.param)


def of_all_ranks(trained: list[dict[str, dict[str, Trained]]], name: str, kind: str) -> Trained:
    """Losses of all, and every table."""
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
        assert whole.weights.keys() == replicated.weights.keys() == SHAPES.keys()
        named = partial("{}: {}".format, name)
        for table, weight in whole.weights.items():
            torch.testing.assert_close(replicated.weights[table], weight, rtol=1e-5, atol=1e-6, msg=named)
        for of_rank in trained:
            for table in TABLES:
                assert torch.equal(of_rank[name][DP].weights[table], replicated.weights[table]), (name, table)
            # Tables are not the script's to train.
            assert of_rank[name][DP].dense == of_rank[name][TW].dense == {"top.weight", "top.bias"}, name
        if name in RULES:
            torch.testing.assert_close(replicated.states, whole.states, rtol=1e-4, atol=1e-8, msg=named)
            assert ("sgd" in name) == (not whole.states), name


def _planned_replicas(rank: Rank) -> tuple[set[str], list[str]]:
    planner = DreamShardPlanner(sharding_types=[DP], stats=[], debug=False)
    model = DistributedModelParallel(Model(TRAININGS["sgd"]), device=rank.device, planner=planner)
    kinds = {tables.sharding_type for tables in model.plan.plan["bags"].values()}
    return kinds, sorted(model.fused_optimizer.params)


def _batches_of_several_sizes(rank: Rank) -> str:
    model = sharded(TRAININGS["sgd"], DP, rank)
    counts = [[2 + index] for index in range(len(FEATURES))]
    lengths = torch.ones(sum(count for (count,) in counts), dtype=torch.int64)
    ids = torch.zeros(len(lengths), dtype=torch.int64)
    sparse = KeyedJaggedTensor(
        FEATURES,
        ids,
        lengths=lengths,
        stride_per_key_per_rank=counts,
        inverse_indices=(FEATURES, torch.zeros(len(FEATURES), 8, dtype=torch.int64)),
    )
    with pytest.raises(DreamShardError) as error:
        model(Batch(sparse, torch.zeros(8)))
    return str(error.value)


def _job(rank: Rank, folder: str) -> dict[str, Any]:
    """All that two ranks are asked beside whole trainings."""
    training = TRAININGS["row-wise adagrad"]
    return {
        "resumed": [resume(rank, training, first, f"{folder}/{first}") for first in (DP, TW)],
        "all reduces": all_reduces(rank, TRAININGS["sgd"]),
        "planned": _planned_replicas(rank),
        "refused": _batches_of_several_sizes(rank),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_on_ranks(_job, str(tmp_path_factory.mktemp("replicas")), world_size=2)


def test_training_resumes_from_a_checkpoint(found: list[dict[str, Any]]) -> None:
    """Also from one of whole tables."""
    for of_rank in found:
        for through, resumed in of_rank["resumed"]:
            for table, weight in through.weights.items():
                torch.testing.assert_close(resumed.weights[table], weight, rtol=1e-5, atol=1e-6)


def test_gradients_are_reduced_once(found: list[dict[str, Any]]) -> None:
    """One all-reduce of the replicas, which are one group, one of the dense layers."""
    assert [of_rank["all reduces"] for of_rank in found] == [2, 2]


def test_our_class_opens_data_parallel(found: list[dict[str, Any]]) -> None:
    for kinds, parameters in (of_rank["planned"] for of_rank in found):
        assert kinds == {DP} and parameters == sorted(f"bags.embedding_bags.{name}.weight" for name in SHAPES)


def test_replicas_refuse_batches_whose_size_varies_by_feature(found: list[dict[str, Any]]) -> None:
    for text in (of_rank["refused"] for of_rank in found):
        assert all(name in text for name in (*TABLES, "data_parallel", "batch_sizes")), text
