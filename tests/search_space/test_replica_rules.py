# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Rules of replicas against FBGEMM's fused kernels, for ten steps, and which plans they open."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from small_models import collection, planner, table
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import SGD, Adagrad, Adam
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import FeatureStatistics, ShardingGroups, TableStatistics
from dreamshard_planner.search_space.replica_rules import (
    FUSED_DEFAULTS,
    REPLICA_RULES,
    in_backward_arguments,
    why_not_replicas,
)

ROWS, DIM, LOOKUPS, SAMPLES, STEPS = 30, 8, 3, 12, 10


def fused(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weights before and after the steps of a fused kernel, and the gradients of the whole table."""
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)], **arguments
    )
    (weight_RC,) = kernel.split_embedding_weights()
    weight_RC.copy_(torch.empty(ROWS, DIM).uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1)))
    start_RC, gradients = weight_RC.clone(), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step % 3)
        index_BL = torch.randint(ROWS // 2, (SAMPLES, LOOKUPS), generator=generator)  # half of the rows are never read
        factor_BC = torch.randn(SAMPLES, DIM, generator=generator)
        output_BC = kernel(index_BL.flatten(), torch.arange(SAMPLES + 1) * LOOKUPS)
        (output_BC * factor_BC).sum().backward()
        gradient_RC = torch.zeros(ROWS, DIM)
        gradient_RC.index_add_(0, index_BL.flatten(), factor_BC.repeat_interleave(LOOKUPS, 0))
        gradients.append(gradient_RC)
    return start_RC, weight_RC, gradients


OPTIMIZERS = {
    "exact_sgd": EmbOptimType.EXACT_SGD,
    "exact_adagrad": EmbOptimType.EXACT_ADAGRAD,
    "exact_rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rules_equal_fused_kernels(name: str, eps: float | None) -> None:
    given = {"optimizer": OPTIMIZERS[name], "learning_rate": 0.3} | ({} if eps is None else {"eps": eps})
    assert why_not_replicas(given, torch.float32) is None
    start, last, gradients = fused(given)
    assert (last - start).abs().max() > 0.3  # it learns, so that equal weights mean something
    rule, trained = REPLICA_RULES[name], start.clone()
    state = None if rule.state is None else rule.state(trained)
    for gradient in gradients:
        rule.update(trained, gradient, state, 0.3, FUSED_DEFAULTS["eps"] if eps is None else eps)
    torch.testing.assert_close(trained, last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "reason"),
    [
        (SGD, {"lr": 0.1}, None),
        (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.0}, None),
        (RowWiseAdagrad, {"lr": 0.1, "eps": 0.0}, "not a number"),
        (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}, "weight_decay"),
        (Adam, {"lr": 0.1}, "adam"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, "momentum"),
    ],
)
def test_reasons_name_what_stands_in_the_way(optimizer: type, arguments: dict[str, Any], reason: str | None) -> None:
    model = collection(table("t", 100, 8))
    apply_optimizer_in_backward(optimizer, model.parameters(), arguments)
    (parameter,) = model.parameters()
    found = why_not_replicas(in_backward_arguments(parameter, None), parameter.dtype, model)
    assert found is None if reason is None else reason in found


def test_modules_without_collections_and_tables_without_optimizers_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    assert "no in-backward" in why_not_replicas(in_backward_arguments(parameter, None), torch.float32)
    given = in_backward_arguments(parameter, {"optimizer": EmbOptimType.EXACT_SGD})
    assert why_not_replicas(given, torch.float32) is None
    assert "EmbeddingBag is no" in why_not_replicas(given, torch.float32, torch.nn.EmbeddingBag(2, 4))


def replicated(optimizer: type, **settings: Any) -> Any:
    """A planner of many small tables on two hosts, where replicas pay by TorchRec's estimates, and its plan."""
    model = collection(*(table(f"t{index}", 200, 64) for index in range(12)), optimizer=optimizer)
    made = planner(topology=Topology(16, "cuda", local_world_size=8), cost_source="torchrec", **settings)
    plan = made.plan(model, [EmbeddingBagCollectionSharder()]).plan[""]
    return made, {sharding.sharding_type for sharding in plan.values()}


@pytest.mark.parametrize("optimizer", [SGD, Adagrad, RowWiseAdagrad])
def test_attached_optimizers_open_data_parallel(optimizer: type) -> None:
    closed, kinds = replicated(optimizer)
    assert "data_parallel" not in kinds
    assert any("leaves out" in str(note) and "data_parallel for 12" in str(note) for note in closed.report().notes)
    attached, kinds = replicated(optimizer, optimizers_attached=True)
    assert "data_parallel" in kinds and not any("trains differently" in str(note) for note in attached.report().notes)
    assert attached.report().chosen.total_ms < closed.report().chosen.total_ms


def test_optimizers_that_replicas_cannot_follow_keep_it_closed() -> None:
    made, kinds = replicated(Adam, optimizers_attached=True)
    assert "data_parallel" not in kinds
    named = {f"t{index}": ParameterConstraints(sharding_types=["data_parallel"]) for index in range(12)}
    with pytest.warns(UserWarning, match="takes the in-backward optimizer away"):
        made, kinds = replicated(Adam, optimizers_attached=True, constraints=named)
    notes = [str(note) for note in made.report().notes]
    assert kinds == {"data_parallel"} and any("no optimizer of its replicas" in note for note in notes)
    with pytest.raises(PlannerError, match="no optimizer of its replicas does"):
        replicated(Adam, optimizers_attached=True, sharding_types=["data_parallel"])


def test_replicas_of_several_sharding_groups_train_otherwise() -> None:
    """They follow the gradient of all groups at once, where other tables are averaged after a step of each group's."""
    groups = {"optimizers_attached": True, "sharding_groups": ShardingGroups(size=8)}
    made, kinds = replicated(SGD, **groups)
    assert "data_parallel" not in kinds
    named = {f"t{index}": ParameterConstraints(sharding_types=["data_parallel"]) for index in range(12)}
    made, kinds = replicated(SGD, constraints=named, **groups)
    assert kinds == {"data_parallel"} and any("gradient of all groups" in str(note) for note in made.report().notes)


VARIED = TableStatistics({f"t{index}_f0": FeatureStatistics(1.0, batch_size=8 * index) for index in (2, 3)})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"constraints": {"t3": ParameterConstraints(batch_sizes=[32])}}, "varies by feature"),
        ({"constraints": {"t3": ParameterConstraints(output_dtype=DataType.FP16)}}, "no optimizer of its replicas"),
        ({"statistics": VARIED}, "varies by feature"),
    ],
)
def test_what_replicas_would_do_otherwise_keeps_it_closed(settings: dict[str, Any], reason: str) -> None:
    everywhere = ["row_wise", "data_parallel"]  # else ranks may send outputs of different types
    made, _ = replicated(SGD, optimizers_attached=True, sharding_types=everywhere, **settings)
    kinds = {option.name: option.sharding_type for option in made.options}
    assert kinds["t3"] != "data_parallel"
    assert ("data_parallel" in kinds.values()) == ("constraints" in settings)
    with pytest.raises(PlannerError, match=reason):
        replicated(SGD, optimizers_attached=True, sharding_types=["data_parallel"], **settings)
