# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Types and cuts that TorchRec or FBGEMM would get wrong: what is planned instead, and what errors say."""

from typing import Any

import pytest
import torch
from small_models import SHARDERS, collection, planner, table, topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import SGD
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.search_space.sharding_types import (
    CW,
    DP,
    GRID,
    HALF_REPLICAS,
    MOST_CUDA_COLUMNS,
    RW,
    TWRW,
    VARIED_GRIDS,
    WEIGHTED_MEANS,
)

GPUS = topology(2, 2**36, "cuda")


@pytest.mark.parametrize("kinds", [None, [CW], [GRID]])
@pytest.mark.parametrize("dim", [1024, 1536, 2048, 4096])
def test_gpus_train_no_shards_that_are_too_wide(dim: int, kinds: list[str] | None) -> None:
    model = collection(table("wide", 1000, dim), table("small", 1000, 64))
    apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    made = planner(topology=GPUS, constraints={"wide": ParameterConstraints(sharding_types=kinds)})
    sharding = made.plan(model, SHARDERS).plan[""]["wide"]
    widths = {shard.shard_sizes[1] for shard in sharding.sharding_spec.shards}
    assert max(widths) <= MOST_CUDA_COLUMNS


def test_cpus_train_any_width() -> None:
    model = collection(table("wide", 1000, 4096))
    constraints = {"wide": ParameterConstraints(sharding_types=["table_wise"])}
    assert planner(constraints=constraints).plan(model, SHARDERS).plan[""]["wide"].sharding_type == "table_wise"


def test_a_wide_table_that_must_not_be_sliced_is_refused_with_a_way_out() -> None:
    model = collection(table("wide", 1000, 2048))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    with pytest.raises(PlannerError, match=r"'wide'.*1,024 columns.*min_partition.*exact_training=False"):
        planner(topology=GPUS).plan(model, SHARDERS)
    made = planner(topology=GPUS, exact_training=False)
    assert made.plan(model, SHARDERS).plan[""]["wide"].sharding_type == CW
    wide = {"wide": ParameterConstraints(min_partition=2048)}
    with pytest.raises(PlannerError, match=r"'wide'.*1,024 columns"):
        planner(topology=GPUS, exact_training=False, constraints=wide).plan(model, SHARDERS)


def carried(weights: bool) -> TableStatistics:
    """Statistics of batches with weights or without."""
    lengths, ids = torch.ones(128, dtype=torch.int64), torch.arange(128)
    batch = KeyedJaggedTensor(["mean_f0", "sum_f0"], ids, torch.rand(128) if weights else None, lengths=lengths)
    return TableStatistics.merge([TableStatistics.from_batches([batch])] * 2)


@pytest.mark.parametrize("kind", [RW, TWRW])
def test_means_of_batches_with_weights_keep_out_of_blocks_of_rows(kind: str) -> None:
    model = collection(table("mean", 1000, 16, pooling=PoolingType.MEAN), table("sum", 1000, 16))
    told: list[dict[str, Any]] = [
        {"statistics": carried(True)},
        {"constraints": {"mean": ParameterConstraints(is_weighted=True)}},
    ]
    for settings in told:
        with pytest.raises(PlannerError, match=WEIGHTED_MEANS.text) as error:
            planner(topology=GPUS, sharding_types=[kind], **settings).plan(model, SHARDERS)
        assert "'mean'" in str(error.value)
    made = planner(topology=GPUS, sharding_types=[kind], statistics=carried(False))
    assert {one.sharding_type for one in made.plan(model, SHARDERS).plan[""].values()} == {kind}


def test_grid_takes_varied_batches_where_torchrec_does() -> None:
    model = collection(table("t", 1000, 256))
    named = {"t": ParameterConstraints(sharding_types=[GRID], batch_sizes=[32])}
    if hasattr(GridPooledEmbeddingDist, "_preprocess_batch_size_per_rank_per_feature"):
        assert planner(topology=GPUS, constraints=named).plan(model, SHARDERS).plan[""]["t"].sharding_type == GRID
        return
    with pytest.raises(PlannerError, match=VARIED_GRIDS.text[:40]):
        planner(topology=GPUS, constraints=named).plan(model, SHARDERS)
    varied = TableStatistics(
        {"t_f0": FeatureStatistics(1.0, batch_size=8), "u_f0": FeatureStatistics(1.0, batch_size=64)}
    )
    model = collection(table("t", 1000, 256), table("u", 1000, 256))
    with pytest.raises(PlannerError, match=VARIED_GRIDS.text[:40]):
        planner(topology=GPUS, sharding_types=[GRID], statistics=varied).plan(model, SHARDERS)


@pytest.mark.parametrize("half", [DataType.FP16, DataType.BF16])
def test_replicas_of_half_precision_say_why_they_are_left_out(half: DataType) -> None:
    model = collection(table("narrow", 1000, 16, data_type=half))
    apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(PlannerError) as error:
        planner(sharding_types=[DP], optimizers_attached=True).plan(model, SHARDERS)
    assert HALF_REPLICAS.text in str(error.value)
