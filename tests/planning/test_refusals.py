# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Errors for impossible inputs: they name the input, and what would help."""

import pytest
from small_models import SHARDERS, collection, managed, planner, small_model, table, topology
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders

from dreamshard_planner import (
    CheckpointError,
    DistributedModelParallel,
    DreamShardError,
    DreamShardPlanner,
    FeatureStatistics,
    StatisticsError,
    TableStatistics,
)


def test_modules_that_cannot_be_sharded_here_are_refused() -> None:
    model = nn.ModuleDict({"sparse": managed(collection(table("t0")), 1000)})
    with pytest.raises(PlannerError, match=r"'sparse.t0' cannot be sharded: Managed\w+ offers no sharding type on cpu"):
        planner().plan(model, get_default_sharders())
    plan = planner(topology=topology(1, device="cuda")).plan(model, get_default_sharders())
    assert plan.plan["sparse"]["t0"].sharding_type == "row_wise"  # nothing else is offered


def test_kernels_that_the_sharder_does_not_offer_are_left_alone() -> None:
    model, tight = collection(table("t", 10_000_000, 64)), topology(2, 2**30, "cuda")
    for kernels, told in (
        (["fused", "quant"], "Tables do not fit"),
        (["quant"], "'t' may only use compute kernels .'quant'., and Embedding.* offers"),
    ):
        constraints = {"t": ParameterConstraints(compute_kernels=kernels, sharding_types=["table_wise"])}
        with pytest.raises(PlannerError, match=told):
            planner(topology=tight, constraints=constraints).plan(model, SHARDERS)


def test_tables_without_a_sharding_type_are_an_error() -> None:
    constraints = {"t1": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(PlannerError, match=r"no sharding type is left for table 'sparse.t1' .row_wise: the sharder"):
        planner(constraints=constraints).plan(small_model(), SHARDERS)
    constraints = {"t1": ParameterConstraints(sharding_types=["column_wise"])}
    with pytest.raises(PlannerError, match=r"'sparse.t1' .column_wise: the planner's sharding_types leave it out"):
        planner(constraints=constraints, sharding_types=("table_wise",)).plan(small_model(), SHARDERS)
    with pytest.raises(PlannerError, match=r"row_wise: the sharder .*Allow another one in the planner's"):
        planner(sharding_types=("row_wise",)).plan(small_model(), SHARDERS)


def test_lengths_that_do_not_match_the_features_are_an_error() -> None:
    constraints = {"t1": ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0])}
    with pytest.raises(PlannerError, match="'t1' serves 2 features, .* 3 pooling_factors"):
        planner(constraints=constraints).plan(small_model(), SHARDERS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_room_names_table_and_missing_bytes(device: str) -> None:
    model = nn.ModuleDict({"sparse": collection(table("small"), table("huge", 10_000_000, 128))})
    with pytest.raises(PlannerError, match=r"'sparse.huge' needs [\d,.]+ GiB of (HBM|DDR).*[\d,.]+ GiB are missing"):
        planner(topology=topology(memory=2**28, device=device)).plan(model, SHARDERS)


def test_statistics_of_no_feature_are_an_error() -> None:
    statistics = TableStatistics({"t9_f0": FeatureStatistics(2.0)})
    with pytest.raises(StatisticsError, match="'t9_f0'"):
        planner(statistics=statistics).plan(small_model(), SHARDERS)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("search_seconds", 0, "search_seconds must be positive, got 0"),
        *(("sharding_types", kinds, "sharding_types must be some of table_wise, column_wise")
          for kinds in ((), "table_wise", ("table_wise", "diagonal"))),
        ("cost_source", "guess", "cost_source must be one of auto, roofline, torchrec, got 'guess'"),
        ("effort", "fast", "effort must be one of quick, default, thorough, got 'fast'"),
        ("checkpoint", "gone.safetensors", "gone.safetensors"),
        ("topology", 512, "topology must be .*Topology, got 512: give a batch size by name, batch_size=512"),
        ("statistics", {"t0_f0": 1.0}, "TableStatistics, got dict"),
        *(("batch_size", size, f"batch_size.*{size}") for size in (0, -1, 1.5, True)),
        *(("least_gain", share, f"least_gain.*{share}") for share in (-0.1, 1.0, 3)),
    ],
)  # fmt: skip
def test_wrong_arguments_are_errors(name: str, value: object, told: str) -> None:
    with pytest.raises((ValueError, TypeError, CheckpointError), match=told):
        DreamShardPlanner(**{"topology": topology(), name: value})


def test_calls_without_a_process_group_or_a_plan_are_errors() -> None:
    with pytest.raises(DreamShardError, match="no process group"):
        DreamShardPlanner()
    with pytest.raises(DreamShardError, match="needs a process group"):
        planner().collective_plan(small_model(), SHARDERS)
    with pytest.raises(DreamShardError, match="plan first"):
        planner().report()
    with pytest.raises(ValueError, match="either plan= or planner="):
        DistributedModelParallel(small_model(), plan=object(), planner=planner())


@pytest.mark.parametrize("seed", [None, "7", 1.5, True])
def test_seeds_are_whole_numbers(seed) -> None:
    with pytest.raises(TypeError, match=f"seed must be a whole number, .* got {seed!r}"):
        planner(seed=seed)
    with pytest.raises(ValueError, match="seed must be from"):
        planner(seed=2**64)
