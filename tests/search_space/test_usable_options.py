# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options that are searched: which of TorchRec's, and column slices of other widths."""

import pytest
import torch
from small_models import SHARDERS, collection, planner, rater, table, topology
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.search_space.enumeration import FastEnumerator
from dreamshard_planner.search_space.options import is_torchrecs
from dreamshard_planner.search_space.sharding_types import CW, TW
from dreamshard_planner.search_space.usable_options import own_slices, usable_options


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


def test_slices_are_merged_by_powers_of_two() -> None:
    constraints = {
        "a": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
        "b": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
    }
    enumerator = FastEnumerator(topology(), 64, constraints, variants=own_slices)
    options = enumerator.enumerate(collection(table("a", dim=128), table("b", dim=96)), SHARDERS)
    widths = {name: [[s.size[1] for s in o.shards] for o in options if o.name == name] for name in "ab"}
    assert widths == {"a": [[16] * 8, [32] * 4, [64] * 2], "b": [[16] * 6, [32] * 3]}
    for option in options:
        assert [shard.offset[1] for shard in option.shards] == [
            index * option.shards[0].size[1] for index in range(option.num_shards)
        ]
        # TorchRec's estimators have seen them: half the columns, half the weights.
        assert option.total_storage.ddr > 0 and option.total_perf > 0
    assert [is_torchrecs(option) for option in options if option.name == "a"] == [True, False, False]


def _with_a_hot_table(**constraint: int) -> list[int]:
    """Widths of the hot table's slices, of a model whose other tables cost a third as much together, and whose kernels
    outweigh one more exchange."""
    tables = [table("hot", 100_000, 128), *(table(f"t{i}", 10_000, 64) for i in range(6))]
    lookups = {"hot": 3000.0}
    pooling = {one.feature_names[0]: FeatureStatistics(lookups.get(one.name, 120.0)) for one in tables}
    constraints = {"hot": ParameterConstraints(sharding_types=["table_wise", "column_wise"], **constraint)}
    made = planner(topology=topology(3), constraints=constraints, statistics=TableStatistics(pooling))
    plan = made.plan(collection(*tables), SHARDERS)
    (sharding,) = (module["hot"] for module in plan.plan.values())
    return [shard.shard_sizes[1] for shard in sharding.sharding_spec.shards]


def test_a_hot_table_is_halved_unasked() -> None:
    assert _with_a_hot_table() == [64, 64]
    assert _with_a_hot_table(min_partition=128) == [128]
    assert set(_with_a_hot_table(min_partition=32)) <= {32, 64}


@pytest.mark.parametrize(("dim", "halves"), [(16, []), (32, [[16, 16]]), (36, []), (40, [[20, 20]]), (128, [[64, 64]])])
def test_only_widths_that_kernels_run_well_are_halved(dim: int, halves: list[list[int]]) -> None:
    constraints = {"t": ParameterConstraints(sharding_types=["column_wise"])}
    options = FastEnumerator(topology(), 64, constraints, variants=own_slices).enumerate(
        collection(table("t", dim=dim)), SHARDERS
    )
    assert [[shard.size[1] for shard in option.shards] for option in options if not is_torchrecs(option)] == halves
