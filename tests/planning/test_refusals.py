# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Errors for impossible inputs: they name the input, and what would help; memory that never limits is taken."""

import math
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from small_models import SHARDERS, collection, managed, planned, planner, ranks_of, small_model, table, topology
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GridSearchProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, StorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams

from dreamshard_planner import (
    CheckpointError,
    DistributedModelParallel,
    DreamShardError,
    DreamShardPlanner,
    FeatureStatistics,
    TableStatistics,
)
from dreamshard_planner.errors import InputWarning
from dreamshard_planner.search_space.constraints import MAX_PER_SAMPLE, PER_FEATURE


def on(table: str = "t0", **constraint: Any) -> dict[str, dict[str, ParameterConstraints]]:
    """Return the constraint of one table, as an argument of a planner."""
    return {"constraints": {table: ParameterConstraints(**constraint)}}


def read(factor: float) -> dict[str, TableStatistics]:
    """Return so many lookups of the first feature, as an argument of a planner."""
    return {"statistics": TableStatistics({"t0_f0": FeatureStatistics(factor)})}


ENDLESS = {"topology": topology(memory=10**30), "storage_reservation": FixedPercentageStorageReservation(0.0)}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (on("t1", sharding_types=["row_wise"]), r"no sharding type is left for table 'sparse.t1' .row_wise: the sharder"),
    (
        {**on("t1", sharding_types=["column_wise"]), "sharding_types": ("table_wise",)},
        r"'sparse.t1' .column_wise: the planner's sharding_types leave it out",
    ),
    ({"sharding_types": ("row_wise",)}, r"row_wise: the sharder .*Allow another one in the planner's"),
    (on("t1", pooling_factors=[1.0, 2.0, 3.0]), "'t1' serves 2 features, .* 3 pooling_factors"),
    *(
        (
            {"topology": topology(2, memory, device)},
            f"rank 0 of the topology has {memory!r} bytes of {kind}: give a whole number",
        )
        for device, kind, memory in (("cpu", "DDR", math.inf), ("cuda", "HBM", math.nan), ("cuda", "HBM", "80GB"))
    ),
    *(
        (arguments, rf"{what} must be numbers from 0 to .*, got {re.escape(repr(factor))}; they count per sample")
        for factor in (2.0 * MAX_PER_SAMPLE, 1e308)
        for arguments, what in (
            (read(factor), r"table 't0': pooling factors of \['t0_f0'\]"),
            *((on("t1", **{name: [1, factor]}), f"table 't1': {name}") for name in PER_FEATURE),
        )
    ),
    *(
        (on(**{name: [value]}), f"table 't0': {name} must be {numbers}.*got {value!r}")
        for name, numbers, values in (
            ("pooling_factors", "numbers from 0 ", (math.inf, -1.0, "many", None)),
            ("batch_sizes", "whole numbers from 1, ", (0, 64.5)),
        )
        for value in values
    ),
    (on(pooling_factors=[math.nan], device_group="cuda"), "table 't0': pooling_factors must be .*nan"),  # left out here
    ({**ENDLESS, **read(float(MAX_PER_SAMPLE))}, "Tables do not fit: table 'sparse.t0' needs .*"),
    *(
        (
            on(cache_params=CacheParams(load_factor=share)),
            f"'sparse.t0': load_factor of its .*above 0, up to 1, got {share!r}",
        )
        for share in (-0.2, 1.5, math.nan, "0.2")
    ),
    ({"topology": topology(0)}, "the topology has no ranks"),
    ({"topology": topology(memory=80, device="cuda")}, "(?s)rank 0 has, 80 B of HBM and 80 B .* are bytes.*TorchRec: "),
    *(
        (
            {
                "topology": topology(2, device="cuda"),
                "enumerator": EmbeddingEnumerator(topology(4, device="cuda"), 64, kind),
            },
            "'sparse.t0' is to be sharded row_wise in 4 shards, .* make plan and enumerator with the planner's",
        )
        for kind in [{f"t{k}": ParameterConstraints(sharding_types=["row_wise"]) for k in range(6)}]
    ),
    ({"enumerator": EmbeddingEnumerator(topology(), 512)}, "batch_size is 64, and the enumerator's 512: give both one"),
    ({"callbacks": [lambda plan: plan[:1]]}, "callbacks returned a plan without sparse.t1.*every table"),
    ({"callbacks": [lambda plan: None]}, "callbacks returned a plan without sparse.t0, .*every table"),
    # Fewer proposals than there are.
    ({"proposer": GridSearchProposer(max_proposals=1)}, "^GridSearchProposer proposed nothing"),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_cannot_be_planned_is_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(PlannerError, match=told):
        planner(**arguments).plan(small_model(), SHARDERS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_without_end_is_planned(device: str) -> None:
    memories = (2**40, sys.maxsize, 1.5e19, 10**100)
    model = collection(table("t0"), table("t1", 5000))
    plans = [planner(topology=topology(2, memory, device)).plan(model, SHARDERS) for memory in memories]
    assert all(ranks_of(plan) == ranks_of(plans[0]) for plan in plans)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_room_names_table_and_missing_bytes_before_torchrecs_advice(device: str) -> None:
    model = nn.ModuleDict({"sparse": collection(table("small"), table("huge", 10_000_000, 128))})
    missing = r"'sparse.huge' needs [\d,.]+ GiB of (HBM|DDR).*[\d,.]+ GiB are missing.*would help"
    told = f"(?s)^Tables do not fit: .*{missing}.*\nTorchRec: Unable to find"
    with pytest.raises(PlannerError, match=told) as caught:
        planner(topology=topology(memory=2**28, device=device)).plan(model, SHARDERS)
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


def test_no_room_is_told_with_any_reservation() -> None:
    """TorchRec's text reads a percentage, which it asks of every reservation (4595)."""

    class Nothing(StorageReservation):
        last_reserved_topology = None

        def reserve(self, topology: Topology, *_: object, **__: object) -> Topology:
            return topology

    with pytest.raises(PlannerError, match="^Tables do not fit: "):
        planner(topology=topology(memory=1000), storage_reservation=Nothing()).plan(small_model(), SHARDERS)


def test_bandwidths_in_other_units_are_warned_of() -> None:
    for given, rate in (({"inter_host_bw": 25e9}, "2.5e.10"), ({"intra_host_bw": 600.0}, "600")):
        name = next(iter(given))
        with pytest.warns(InputWarning, match=f"the topology's {name} is {rate} bytes per millisecond, .* / 1000"):
            planner(topology=Topology(2, "cuda", **given)).plan(collection(table("t0")), SHARDERS)


def test_modules_that_cannot_be_sharded_here_are_refused() -> None:
    model = nn.ModuleDict({"sparse": managed(collection(table("t0")), 1000)})
    with pytest.raises(PlannerError, match=r"'sparse.t0' cannot be sharded: Managed\w+ offers no sharding type on cpu"):
        planner().plan(model, get_default_sharders())
    plan = planner(topology=topology(1, device="cuda")).plan(model, get_default_sharders())
    assert plan.plan["sparse"]["t0"].sharding_type == "row_wise"  # nothing else is offered


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *((name, value, f"{name} must be a number from .*, got {value!r}")
          for name in ("search_seconds", "timeout_seconds") for value in (0, "2")),
        *(("sharding_types", kinds, "sharding_types must be some of table_wise, column_wise")
          for kinds in ((), "table_wise", ("table_wise", "diagonal"))),
        ("cost_source", "guess", "cost_source must be one of auto, roofline, torchrec, got 'guess'"),
        ("effort", "fast", "effort must be one of quick, default, thorough, got 'fast'"),
        ("checkpoint", "gone.safetensors", "gone.safetensors"),
        ("topology", 512, "topology must be .*Topology, got 512: give a batch size by name, batch_size=512"),
        ("statistics", {"t0_f0": 1.0}, "TableStatistics, got dict"),
        *(("batch_size", size, f"batch_size.*{size}") for size in (0, -1, 1.5, True, 2**50)),
        *(("least_gain", share, f"least_gain.*{share}") for share in (-0.1, 1.0, 3, "1")),
        *(("seed", seed, f"seed must be a whole number .* got {seed!r}") for seed in (None, "7", 1.5, True, 2**64)),
    ],
)  # fmt: skip
def test_wrong_arguments_are_errors(name: str, value: object, told: str) -> None:
    with pytest.raises((ValueError, TypeError, CheckpointError), match=told):
        DreamShardPlanner(**{"topology": topology(), name: value})


def test_calls_without_a_process_group_a_plan_or_a_list_of_sharders_are_errors() -> None:
    for sharders in (type(SHARDERS[0]), SHARDERS[0], [type(SHARDERS[0])]):
        with pytest.raises(TypeError, match="sharders must be a list of objects"):
            planner().plan(small_model(), sharders)
    with pytest.raises(DreamShardError, match="no process group"):
        DreamShardPlanner()
    with pytest.raises(DreamShardError, match="needs a process group"):
        planner().collective_plan(small_model(), SHARDERS)
    with pytest.raises(ValueError, match="either plan= or planner="):
        DistributedModelParallel(small_model(), plan=object(), planner=planner())


def test_numbers_of_numpy_and_torch_count_as_pythons() -> None:
    whole = {"sharding_types": ["table_wise"]}
    plain = planned(small_model(), **whole, **on("t1", pooling_factors=[3.0, 2.0], min_partition=8))
    for numbers in (np.array, torch.tensor):
        constraint = on("t1", pooling_factors=numbers([3.0, 2.0]), min_partition=numbers(8))
        given = planned(small_model(), **whole, **constraint)
        assert given.hash_planner_context_inputs_str() == plain.hash_planner_context_inputs_str()


def test_an_empty_plan_of_a_model_with_tables_is_warned_of() -> None:
    for model, name in ((small_model(), "'sparse'"), (collection(table("t0")), "the model itself")):
        with pytest.warns(InputWarning, match=f"the plan is empty: no sharder is for {name}"):
            assert planner().plan(model, []).plan == {}


def test_an_enumerator_gives_the_batch_size_that_the_planner_lacks() -> None:
    made = planned(small_model(), enumerator=EmbeddingEnumerator(topology(), 4096), batch_size=None)
    assert made.saved_plan().inputs.batch_size == 4096
    assert made.predict(made.options).total_ms == planned(small_model(), batch_size=4096).predict(made.options).total_ms
