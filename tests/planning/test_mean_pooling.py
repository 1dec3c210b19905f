# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Mean-pooled tables too large for a rank lie in blocks of rows, with all tables of their module."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import MB, SHARDERS, collection, planner, table, topology
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType, ShardingOption
from torchrec.modules.embedding_configs import PoolingType

from dreamshard_planner import JsonPlanLoader
from dreamshard_planner.search_space.sharding_types import LATE_MEANS, MIXED_MEAN

MEAN = PoolingType.MEAN
RANK_MB = 1024


def rows_of(megabytes: int) -> int:
    """Of four columns."""
    return megabytes * MB // 16


def model(large_mb: int, **arguments) -> nn.Module:
    made = nn.Module()
    made.large = collection(table("large", rows_of(large_mb), 4, pooling=MEAN), table("small", 100, 4), **arguments)
    made.other = collection(table("mean", 100, 4, pooling=MEAN), table("sum", 100, 4))
    return made


def types_of(plan) -> dict[str, str]:
    return {name: sharding.sharding_type for module in plan.plan.values() for name, sharding in module.items()}


def gpus(**arguments):
    return planner(topology=topology(2, RANK_MB * MB, "cuda"), **arguments)


def test_a_module_lies_in_rows_where_its_means_fit_in_no_other_way(tmp_path: Path) -> None:
    made = gpus()
    plan = made.plan(model(1100), SHARDERS)
    types = types_of(plan)
    assert {types["large"], types["small"]} <= LATE_MEANS and types["mean"] not in LATE_MEANS
    notes = [note.text for note in made.report().notes if MIXED_MEAN in note.text]
    assert len(notes) == 1 and "module 'large' lie in blocks of rows" in notes[0]
    made.save_plan(tmp_path / "plan.json")
    again = gpus(plan_loader=JsonPlanLoader(tmp_path / "plan.json"))
    assert types_of(again.plan(model(1100), SHARDERS)) == types


def test_tables_that_fit_one_by_one_but_not_together_lie_in_rows() -> None:
    several = collection(*(table(f"t{index}", rows_of(550), 4, pooling=MEAN) for index in range(5)))
    assert set(types_of(gpus().plan(several, SHARDERS)).values()) <= LATE_MEANS


def test_means_that_fit_whole_keep_out_of_rows() -> None:
    assert types_of(gpus().plan(model(400), SHARDERS))["large"] not in LATE_MEANS


def test_what_fits_and_is_refused_is_not_planned_again() -> None:
    seen: list[object] = []

    def refuse(plan: list[ShardingOption]) -> list[ShardingOption]:
        seen.append(plan)
        raise PlannerError("not this one", PlannerErrorType.OTHER)

    with pytest.raises(PlannerError, match="^not this one$"):
        gpus(callbacks=[refuse]).plan(model(400), SHARDERS)
    assert len(seen) == 1


def test_the_rule_is_told_where_rows_do_not_help() -> None:
    whole = {"small": ParameterConstraints(sharding_types=["table_wise"])}
    why = f"'large.large' may not be .*row_wise, table_row_wise: {MIXED_MEAN}, and table 'large.small' may be neither"
    with pytest.raises(PlannerError, match=why):
        gpus(constraints=whole).plan(model(1100), SHARDERS)
    with pytest.raises(PlannerError, match=f"(?s){MIXED_MEAN}.*of module 'large' in blocks of rows: Tables do not fit"):
        gpus().plan(model(4000), SHARDERS)
    with pytest.raises(PlannerError, match="'large.large' may not be .*: TorchRec divides weighted means by"):
        gpus().plan(model(1100, weighted=True), SHARDERS)
