# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Mean-pooled tables keep out of blocks of rows, unless a constraint asks for these."""

import pytest
from small_models import MB, SHARDERS, collection, planner, table, topology
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import PoolingType

from dreamshard_planner.search_space.sharding_types import LATE_MEANS, MIXED_MEAN

MEAN = PoolingType.MEAN
RANK_MB = 1024


def rows_of(megabytes: int) -> int:
    """Return the rows of a table with four columns."""
    return megabytes * MB // 16


def model(large_mb: int, **arguments) -> nn.Module:
    large = collection(table("large", rows_of(large_mb), 4, pooling=MEAN), table("small", 100, 4), **arguments)
    other = collection(table("mean", 100, 4, pooling=MEAN), table("sum", 100, 4))
    return nn.ModuleDict({"large": large, "other": other})


def types_of(plan) -> dict[str, str]:
    return {name: sharding.sharding_type for module in plan.plan.values() for name, sharding in module.items()}


def gpus(**arguments):
    return planner(topology=topology(2, RANK_MB * MB, "cuda"), **arguments)


def test_means_keep_out_of_rows() -> None:
    assert types_of(gpus().plan(model(400), SHARDERS))["large"] not in LATE_MEANS


def test_a_table_that_fits_in_rows_alone_is_refused_until_its_constraint_asks_for_rows() -> None:
    asks = r"\(sharding_types=\['row_wise'\] in its constraint puts all tables of the module in rows\)"
    with pytest.raises(PlannerError, match=f"'large.large' may not be .*row_wise, table_row_wise: {MIXED_MEAN} {asks}"):
        gpus().plan(model(1100), SHARDERS)
    rows = {"large": ParameterConstraints(sharding_types=["row_wise"])}
    types = types_of(gpus(constraints=rows).plan(model(1100), SHARDERS))
    assert types["large"] == "row_wise" and types["small"] in LATE_MEANS and types["mean"] not in LATE_MEANS


def test_the_table_is_named_that_keeps_a_module_out_of_rows() -> None:
    whole = {"small": ParameterConstraints(sharding_types=["table_wise"])}
    why = f"'large.large' may not be .*row_wise, table_row_wise: {MIXED_MEAN}, and table 'large.small' may be neither"
    with pytest.raises(PlannerError, match=why):
        gpus(constraints=whole).plan(model(1100), SHARDERS)
    with pytest.raises(PlannerError, match="'large.large' may not be .*: TorchRec divides weighted means by"):
        gpus().plan(model(1100, weighted=True), SHARDERS)
