# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Numbers that do not fit are refused by name; memory that never limits is taken."""

import math
import re
import sys
from typing import Any

import pytest
from small_models import SHARDERS, collection, planner, ranks_of, small_model, table, topology
from torchrec.distributed.planner.proposers import GridSearchProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.search_space.input_checks import MAX_PER_SAMPLE


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
