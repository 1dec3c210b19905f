# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Errors for impossible inputs: they name the input, and what would help. Memory that never limits is taken."""

import math
import re
import sys
from typing import Any

import pytest
from small_models import SHARDERS, collection, managed, planner, ranks_of, scarce_planner, small_model, table, topology
from torch import nn
from torchrec.distributed.planner.proposers import GridSearchProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType
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
from dreamshard_planner.search_space.input_checks import MAX_PER_SAMPLE


def test_modules_that_cannot_be_sharded_here_are_refused() -> None:
    model = nn.ModuleDict({"sparse": managed(collection(table("t0")), 1000)})
    with pytest.raises(PlannerError, match=r"'sparse.t0' cannot be sharded: Managed\w+ offers no sharding type on cpu"):
        planner().plan(model, get_default_sharders())
    plan = planner(topology=topology(1, device="cuda")).plan(model, get_default_sharders())
    assert plan.plan["sparse"]["t0"].sharding_type == "row_wise"  # nothing else is offered


def test_kernels_that_the_sharder_does_not_offer_are_left_alone() -> None:
    constraints = {name: ParameterConstraints(compute_kernels=["fused", "quant"]) for name in "zabc"}
    made, model = scarce_planner(constraints=constraints)
    with pytest.raises(PlannerError, match="Tables do not fit"):
        made.plan(model, SHARDERS)
    constraints["z"] = ParameterConstraints(compute_kernels=["quant"])
    made, model = scarce_planner(constraints=constraints)
    with pytest.raises(PlannerError, match="'z' may only use compute kernels .'quant'., and Embedding.* offers"):
        made.plan(model, SHARDERS)


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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("memory", [sys.maxsize, 1.5e19, 10**100], ids="{:.3g}".format)
def test_memory_without_end_is_planned(device: str, memory: float) -> None:
    expected = ranks_of(planner(topology=topology(2, 2**40, device)).plan(small_model(), SHARDERS))
    assert ranks_of(planner(topology=topology(2, memory, device)).plan(small_model(), SHARDERS)) == expected


@pytest.mark.parametrize(("device", "memory"), [("cpu", math.inf), ("cuda", math.nan), ("cuda", "80GB")])
def test_memory_that_is_no_number_is_refused(device: str, memory: object) -> None:
    kind = "DDR" if device == "cpu" else "HBM"
    with pytest.raises(
        PlannerError, match=f"rank 0 of the topology has {memory!r} bytes of {kind}: give a whole number"
    ):
        planner(topology=topology(2, memory, device)).plan(small_model(), SHARDERS)


@pytest.mark.parametrize("factor", [2.0 * MAX_PER_SAMPLE, 1e308])
def test_pooling_factors_that_cannot_be_meant_are_refused(factor: float) -> None:
    where = f"must be numbers from 0 to .*, got {re.escape(repr(factor))}; they count per sample"
    with pytest.raises(PlannerError, match=r"table 't0': pooling factors of \['t0_f0'\] " + where):
        planner(statistics=TableStatistics({"t0_f0": FeatureStatistics(factor)})).plan(small_model(), SHARDERS)
    for what in ("pooling_factors", "num_poolings", "batch_sizes"):
        constraints = {"t1": ParameterConstraints(**{what: [1, factor]})}
        with pytest.raises(PlannerError, match=f"table 't1': {what} {where}"):
            planner(constraints=constraints).plan(small_model(), SHARDERS)


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        *(
            ({"pooling_factors": [value]}, "pooling_factors must be numbers from 0 ")
            for value in (math.inf, -1.0, "many", None)
        ),
        *(({"batch_sizes": [size]}, "batch_sizes must be whole numbers from 1, ") for size in (0, 64.5)),
        ({"pooling_factors": [math.nan], "device_group": "cuda"}, "pooling_factors must be "),  # left out here
    ],
)
def test_constraints_that_are_no_numbers_are_refused(constraint: dict[str, Any], told: str) -> None:
    (value,) = next(iter(constraint.values()))
    with pytest.raises(PlannerError, match=f"table 't0': {told}.*got {value!r}"):
        planner(constraints={"t0": ParameterConstraints(**constraint)}).plan(small_model(), SHARDERS)


def test_what_is_short_comes_before_torchrecs_advice() -> None:
    with pytest.raises(
        PlannerError, match=r"(?s)^Tables do not fit: .*GiB.*\nTorchRec: Unable to find a plan"
    ) as caught:
        planner(topology=topology(memory=2**30)).plan(collection(table("t0", 2**25, 64)), SHARDERS)
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def test_proposers_that_propose_nothing_are_named() -> None:
    asked = planner(proposer=GridSearchProposer(max_proposals=1))  # fewer than there are
    with pytest.raises(PlannerError, match="^GridSearchProposer proposed nothing"):
        asked.plan(small_model(), SHARDERS)


def test_tables_that_fit_no_machine_are_refused_by_name() -> None:
    most = float(MAX_PER_SAMPLE)
    given = {
        "topology": topology(memory=10**30),
        "statistics": TableStatistics({"t0_f0": FeatureStatistics(most)}),
        "storage_reservation": FixedPercentageStorageReservation(0.0),
    }
    with pytest.raises(PlannerError, match="Tables do not fit: table 'sparse.t0' needs .*"):
        planner(**given).plan(small_model(), SHARDERS)
