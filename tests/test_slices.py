# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Column slices wider than TorchRec's one width."""

from __future__ import annotations

import pytest
from small_models import SHARDERS, collection, planner, table, topology
from torchrec.distributed.planner.types import ParameterConstraints

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.search_space.enumeration import FastEnumerator
from dreamshard_planner.search_space.slices import is_torchrecs, wider_slices

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_slices_are_merged_by_powers_of_two() -> None:
    constraints = {
        "a": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
        "b": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
    }
    enumerator = FastEnumerator(topology(), 64, constraints, variants=wider_slices)
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


def test_a_hot_table_is_split_no_further_than_it_pays() -> None:
    """One table reads as much as all others together: two slices, not eight, which would repeat every lookup."""
    tables = [table("hot", 100_000, 128), *(table(f"t{i}", 10_000, 32) for i in range(6))]
    constraints = {config.name: ParameterConstraints(min_partition=16) for config in tables}
    pooling = {config.feature_names[0]: FeatureStatistics(150.0 if config.name == "hot" else 12.0) for config in tables}
    made = planner(topology=topology(3), constraints=constraints, statistics=TableStatistics(pooling))
    made.plan(collection(*tables), SHARDERS)
    report = made.report()
    (hot,) = (entry for entry in report.tables if entry.name == "hot")
    assert hot.sharding_type == "column_wise" and len(set(hot.ranks)) == len(hot.ranks) < 8
    assert report.chosen.total_ms < 0.9 * report.rival("whole_tables").total_ms
