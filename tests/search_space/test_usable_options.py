# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which of TorchRec's options are searched."""

import pytest
import torch
from small_models import SHARDERS, collection, planner, rater, table, topology
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.search_space.sharding_types import CW, TW
from dreamshard_planner.search_space.usable_options import usable_options


def enumerated(*modules: nn.Module, device: str = "cpu") -> list[ShardingOption]:
    return EmbeddingEnumerator(topology(device=device), batch_size=64).enumerate(nn.ModuleList(modules), SHARDERS)


def test_whole_tables_may_join_others_of_their_module_in_slices() -> None:
    """One slice is the whole table; beside slices it shares their kernel and their exchange."""
    alone = collection(table("narrow", dim=64), table("also_narrow", dim=128))
    beside = collection(table("narrow", dim=64), table("wide", dim=512))
    slices: dict[str, list[int]] = {}
    for option in usable_options(enumerated(alone, beside), "cpu"):
        if option.sharding_type == CW:
            slices.setdefault(f"{option.path}.{option.name}", []).append(option.num_shards)
    assert slices == {"1.narrow": [1], "1.wide": [4]}


def test_slices_of_an_embedding_collection_keep_the_width_that_was_asked_for() -> None:
    """They must be of one width, which lone slices of other tables, however large, do not decide."""
    configs = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=128, feature_names=[f"{name}_f"])
        for name, rows in (("hot", 1_000_000), ("cold", 3_000_000), ("small", 100_000))
    ]
    hot = ParameterConstraints([TW, CW], min_partition=32, pooling_factors=[200.0])
    others = ParameterConstraints([TW, CW], pooling_factors=[1.0])
    made = planner(
        topology=topology(4, 2**37, "cuda"),
        constraints={"hot": hot, "cold": others, "small": others},
        cost_source="torchrec",
    )
    made.plan(EmbeddingCollection(tables=configs, device=torch.device("meta")), [EmbeddingCollectionSharder()])
    assert {option.name: (option.sharding_type, option.num_shards) for option in made.options} == {
        "hot": (CW, 4),
        "cold": (TW, 1),
        "small": (TW, 1),
    }


@pytest.mark.parametrize(("cost_source", "are_guesses"), [("auto", True), ("torchrec", False)])
def test_only_costs_of_ours_rest_on_a_popularity_of_rows(cost_source: str, are_guesses: bool) -> None:
    options = enumerated(collection(table("t", 10**6, 64)), device="cuda")
    context = rater(topology(device="cuda"), cost_source=cost_source)
    kernels = {option.compute_kernel for option in context.certain_options(options)}
    assert ("fused_uvm_caching" not in kernels) is are_guesses and "fused" in kernels
    # A table that has nothing else keeps what it has.
    cached = [option for option in options if option.compute_kernel == "fused_uvm_caching"]
    assert context.certain_options(cached) == cached
