# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which tables of a rank share a kernel: what TorchRec makes of the same options."""

import random

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from small_models import collection, table, topology
from torch import nn
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    create_sharding_infos_by_sharding_device_group,
)
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import CacheParams, ShardingEnv
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner.planning.cost_sources import FREE
from dreamshard_planner.problem.parts import Links
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.enumeration import FastEnumerator

META = torch.device("meta")
SHARDER_PARAMS = (
    None,
    {"cache_load_factor": 0.4, "prefetch_pipeline": True},
    {"learning_rate": 0.3, "enforce_hbm": True},
    {"use_one_tbe_per_table": True},
)


def random_tables(rng: random.Random) -> nn.Module:
    configs = [
        table(f"t{i}", dim=rng.choice((8, 16, 64)), data_type=rng.choice([DataType.FP32] * 3 + [DataType.FP16]))
        for i in range(12)
    ]
    for config in configs:
        config.pooling = rng.choice([PoolingType.SUM] * 3 + [PoolingType.MEAN])
    model = nn.ModuleDict({"sparse": collection(*configs)})
    for parameter in model.parameters():
        if optimizer := rng.choice((None, torch.optim.Adam, RowWiseAdagrad, RowWiseAdagrad)):
            apply_optimizer_in_backward(optimizer, [parameter], {"lr": rng.choice((0.1, 0.1, 0.2))})
    return model


def random_constraint(rng: random.Random) -> ParameterConstraints:
    def rarely(*values):
        return rng.choice([None] * 4 + [*values])

    cache = CacheParams(
        load_factor=rng.choice((None, 0.1, 0.3)),
        prefetch_pipeline=rng.choice((None, True, False)),
        algorithm=rarely(CacheAlgorithm.LFU),
        reserved_memory=rarely(1.0),
    )
    return ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=[rng.choice(("fused", "fused_uvm", "fused_uvm_caching", "fused_uvm_caching"))],
        cache_params=rng.choice((None, CacheParams(load_factor=0.3), cache)),
        output_dtype=rarely(DataType.FP16),
        enforce_hbm=rarely(True),
        stochastic_rounding=rarely(False),
        bounds_check_mode=rarely(BoundsCheckMode.IGNORE),
    )


def groups_of_torchrec(
    model: nn.Module, options: list[ShardingOption], sharder: EmbeddingBagCollectionSharder
) -> list[list[str]]:
    for option in options:
        option.shards[0].rank = 0
    sharding = to_sharding_plan(options, topology(1, device="cuda")).plan["sparse"]
    (infos,) = create_sharding_infos_by_sharding_device_group(
        model.sparse, sharding, "embedding_bags.", sharder.fused_params
    ).values()
    env = ShardingEnv.from_local(1, 0)
    made = ShardedEmbeddingBagCollection.create_embedding_bag_sharding(infos, env, META)
    return sorted(sorted(one.name for one in group.embedding_tables) for group in made._grouped_embedding_configs)


@pytest.mark.parametrize("seed", range(12))
def test_fused_groups_are_those_of_torchrec(seed: int) -> None:
    rng, gpu = random.Random(seed), topology(1, device="cuda")
    model, sharder = random_tables(rng), EmbeddingBagCollectionSharder(fused_params=SHARDER_PARAMS[seed % 4])
    constraints = {f"t{i}": random_constraint(rng) for i in range(12)}
    options = FastEnumerator(gpu, 64, constraints).enumerate(model, [sharder])
    links = Links(*[FREE] * 10)
    read = OptionReader(constraints, sharders=[sharder]).read(options, gpu, links, with_storage=False)
    ours: dict[int, list[str]] = {}
    for option, group in zip(options, read.problem.group_P.tolist(), strict=True):
        ours.setdefault(group, []).append(option.name)
    assert sorted(map(sorted, ours.values())) == groups_of_torchrec(model, options, sharder)
