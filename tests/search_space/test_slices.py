# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Column slices of other widths than TorchRec's one."""

import pytest
from small_models import SHARDERS, collection, planner, table, topology
from torchrec.distributed.planner.types import ParameterConstraints

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.search_space.enumeration import FastEnumerator
from dreamshard_planner.search_space.options import is_torchrecs
from dreamshard_planner.search_space.usable_options import Halves, own_slices, without_idle_halves


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


def test_halves_of_light_tables_are_not_searched() -> None:
    tables = [table("hot", 100_000, 64), *(table(f"t{i}", 10_000, 64) for i in range(6))]
    constraints = {
        config.name: ParameterConstraints(
            sharding_types=["table_wise", "column_wise"], pooling_factors=[200.0 if config.name == "hot" else 1.0]
        )
        for config in tables
    }
    options = FastEnumerator(topology(), 64, constraints, variants=own_slices).enumerate(collection(*tables), SHARDERS)
    kept = without_idle_halves(options, ranks=2)
    assert {option.name for option in kept if isinstance(option, Halves)} == {"hot"}
    assert [o for o in kept if not isinstance(o, Halves)] == [o for o in options if not isinstance(o, Halves)]
