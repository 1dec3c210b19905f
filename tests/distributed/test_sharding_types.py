# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every sharding type trained for real on gloo ranks: what is exact is as on one rank, what the planner leaves out is
not. row_wise, table_row_wise and grid_shard of pooled tables need a sharder of the tests' own on CPUs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed import Case, MixedModel, TableSpec, Trained, alone, planner_of, sharders, train_all, untrained
from ranks import run_on_ranks
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import SGD, Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import JsonPlanLoader
from dreamshard_planner.search_space.sharding_types import (
    BLOCKS_WITHOUT_ROWS,
    CW,
    DENSE_SEQUENCES,
    DP,
    GRID,
    MISSED_ROWS,
    MIXED_MEAN,
    OPTIMIZER_OUTSIDE,
    RW,
    STATE_PER_SLICE,
    SUMS_FOR_MEANS,
    TW,
    TWCW,
    TWRW,
    WEIGHTED_MEANS,
)

MEAN, SUM = PoolingType.MEAN, PoolingType.SUM
FP16 = DataType.FP16


def spec(kind: str, rows: int = 40, dim: int = 8, **arguments) -> TableSpec:
    """A table that may only be sharded so, with column slices of at least 4 columns."""
    return TableSpec(rows, dim, (kind,), 4 if kind in (CW, TWCW, GRID) else None, **arguments)


def sequence(kinds: tuple[str, ...]) -> dict[str, TableSpec]:
    """TorchRec's own types of unpooled tables on CPUs."""
    return {f"{k}_sequence": spec(k, 30 + i, features=1 + i) for i, k in enumerate((TW, CW, RW)) if k in kinds}


def stock(optimizer: type, slices: tuple[str, ...] = (CW, TWCW)) -> Case:
    """TorchRec's own sharders on CPUs, two modules of bags and a sequence; several features, rows not a multiple of the
    ranks, half precision."""
    bags = {kind: spec(kind, 33, 16, features=2) for kind in (TW, *slices)}
    more = {f"{kind}_mean": spec(kind, pooling=MEAN) for kind in (TW, *slices)}
    half = {f"{kind}_half": spec(kind, data_type=FP16) for kind in (TW, *slices)}
    modules = {"bags": bags, "weighted": half, "more": more, "sequence": sequence((TW, CW, RW))}
    return Case(modules, optimizer)


def every(optimizer: type, kinds: tuple[str, ...] = (TW, CW, RW, TWRW, GRID)) -> Case:
    """A sharder of the tests' own: all types in one module, and blocks of rows for weighted, mean-pooled and tiny
    tables, whose last blocks are uneven."""
    rows = {f"{kind}_{tiny}": spec(kind, tiny, 16, features=2) for kind in (RW,) for tiny in (4, 7)}
    weighted = {f"{kind}_weighted": spec(kind, 33) for kind in kinds}
    mean = {"rw_mean": spec(RW, pooling=MEAN), "twrw_mean": spec(TWRW, pooling=MEAN), "rw_sum": spec(RW)}
    bags = {kind: spec(kind, 33, 16, features=2) for kind in kinds}
    return Case(
        {"bags": bags, "tiny": {"anchor": spec(RW), **rows}, "weighted": weighted, "mean": mean}, optimizer, stock=False
    )


FREE = {
    "hot": TableSpec(1000, 256, None, 64, planned_lookups=200.0),
    **{f"cold{i}": TableSpec(100 + i, 8, None, 4) for i in range(4)},
}
REPLICATED = {
    "bags": {
        "t": spec(DP),
        "u": spec(DP, 33, 16, features=2),
        "mean": spec(DP, pooling=MEAN),
        "fp16": spec(TW, data_type=FP16),
        "w": spec(TW),
    },
    "weighted": {"x": spec(DP), "cw": spec(TW, 33, 16)},
    "sequence": sequence((TW, RW)),
}
"""Beside tables that are not, in several modules, of two precisions."""
UNEQUAL = (16 << 30, 8 << 30)
"""Memory of two ranks, by which TorchRec cuts row_wise tables."""
SEQUENCE = {"s": spec(RW, 50), "u": TableSpec(60, 8, features=2)}
EXACT = {
    "stock sgd": stock(SGD),
    "every adagrad": every(Adagrad),
    "every row-wise adagrad": every(RowWiseAdagrad, (TW, RW, TWRW)),
    # The script's own optimizer does to it what the in-backward one would have done.
    "data_parallel sgd": Case(REPLICATED, SGD, attached=False),
    "attached row-wise adagrad": Case(REPLICATED, RowWiseAdagrad),
    "unequal memory": replace(every(SGD), memory_bytes=UNEQUAL, modules={**every(SGD).modules, "sequence": SEQUENCE}),
    "weights in batches": Case(
        {"carried": {"mean": spec(CW, pooling=MEAN), "whole": spec(TW, pooling=MEAN), "rows": spec(RW)}},
        SGD,
        stock=False,
    ),
    "free": Case({"bags": FREE, "sequence": {"s": TableSpec(60, 8), "u": TableSpec(50, 8)}}, SGD, planned_batch=4096),
}
ON_FOUR = ("stock sgd", "every adagrad", "every row-wise adagrad")
DIFFERENT = {kind: Case({"bags": {"t": spec(kind)}}, RowWiseAdagrad, stock=kind != GRID) for kind in (CW, GRID)} | {
    DP: Case({"bags": {"t": spec(DP), "w": spec(TW)}}, SGD, dense=None, attached=False)
}
"""Named in a constraint, which is consent."""


def torchrec_case(module: str = "bags", **tables: TableSpec) -> Case:
    return Case({module: tables}, SGD, stock=False, planner="torchrec")


WRONG = {
    "grid mean": (torchrec_case(t=spec(GRID, pooling=MEAN)), SUMS_FOR_MEANS.text),
    "row_wise weighted mean": (torchrec_case("weighted", t=spec(RW, pooling=MEAN)), WEIGHTED_MEANS.text),
    "row_wise mean, weights in batches": (torchrec_case("carried", t=spec(RW, pooling=MEAN)), WEIGHTED_MEANS.text),
    "row_wise mean beside table_wise": (torchrec_case(t=spec(RW, pooling=MEAN), w=spec(TW)), MIXED_MEAN),
}
"""TorchRec's plan of it trains without an error, and wrongly: with the reason of ours."""
WRONG_ROWS = {
    module: replace(torchrec_case(module, t=spec(RW)), memory_bytes=UNEQUAL) for module in ("bags", "sequence")
}
"""TorchRec's plan of it looks up other rows than the planner's, which is exact."""
REFUSED = WRONG | {"sequence data_parallel": (torchrec_case("sequence", t=spec(DP)), DENSE_SEQUENCES.text)}
"""Besides, what crashes under TorchRec's plan."""
TRAINED = EXACT | DIFFERENT | WRONG_ROWS | {name: case for name, (case, _) in WRONG.items()}


def planned(case: Case, **arguments: Any) -> tuple[EmbeddingShardingPlanner, ShardingPlan]:
    """The planner of two ranks, and its plan."""
    made = planner_of(case, 2, 2, **arguments)
    return made, made.plan(MixedModel(case), sharders(case))


@pytest.fixture(scope="module")
def expected() -> dict[str, Trained]:
    return run_on_ranks(train_all, {name: alone(case) for name, case in TRAINED.items()}, world_size=1)[0]


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Trained]]:
    return run_on_ranks(train_all, TRAINED, world_size=2)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Trained]]:
    return run_on_ranks(train_all, {name: EXACT[name] for name in ON_FOUR}, 2, world_size=4)


@pytest.mark.parametrize(
    ("ranks", "name"), [*(("on_two", name) for name in EXACT), *(("on_four", name) for name in ON_FOUR)]
)
def test_exact_plans_train_as_one_rank(
    name: str, ranks: str, expected: dict[str, Trained], request: pytest.FixtureRequest
) -> None:
    one, many = expected[name], request.getfixturevalue(ranks)[0][name]
    assert many.error is None and one.error is None
    kinds = {table: kind for table, (kind, _) in many.sharding.items()}
    for _, table, asked in EXACT[name].tables():
        assert asked.sharding_types is None or (kinds[table],) == asked.sharding_types
    # The same batch comes back with another loss, so that equal losses mean something.
    assert one.losses[2] != pytest.approx(one.losses[0], rel=0.02)
    assert many.losses == pytest.approx(one.losses, rel=1e-5)
    assert many.weights.keys() == one.weights.keys() == kinds.keys()
    for table, weight in one.weights.items():
        torch.testing.assert_close(
            many.weights[table], weight, rtol=1e-4, atol=1e-5, msg=lambda m, t=table: f"{t}: {m}"
        )


def test_a_free_plan_splits_the_hot_table(on_two: list[dict[str, Trained]]) -> None:
    kind, used = on_two[0]["free"].sharding["hot"]
    assert kind == CW and len(set(used)) > 1


@pytest.mark.parametrize("kind", [CW, GRID])
def test_slices_of_a_row_wise_optimizer_train_differently(
    kind: str, expected: dict[str, Trained], on_two: list[dict[str, Trained]]
) -> None:
    one, many = expected[kind], on_two[0][kind]
    assert many.sharding["t"][0] == kind
    # Batches come back: the third step is the first to see rows that were updated.
    assert many.losses[0] == pytest.approx(one.losses[0], rel=1e-5)
    assert many.losses[2:] != pytest.approx(one.losses[2:], rel=1e-3)
    assert any(f"bags.t: {kind}" in note.text and STATE_PER_SLICE.text in note.text for note in many.notes)
    assert not many.warned


def test_data_parallel_loses_the_optimizer(expected: dict[str, Trained], on_two: list[dict[str, Trained]]) -> None:
    one, many = expected[DP], on_two[0][DP]
    assert many.sharding["t"][0] == DP and many.error is None
    moved = (many.weights["w"] - expected[DP].weights["w"]).abs().max()
    assert moved > 0  # through the loss
    whole = untrained("t", tuple(one.weights["t"].shape))
    assert torch.equal(many.weights["t"], whole) and not torch.allclose(one.weights["t"], whole)
    assert any(OPTIMIZER_OUTSIDE.text in note.text and "bags.t" in note.text for note in many.notes)
    (warning,) = (text for text in many.warned if "in-backward" in text)
    assert "bags.t:" in warning and "bags.w" not in warning


@pytest.mark.parametrize("name", [*WRONG, *WRONG_ROWS])
def test_torchrec_computes_wrongly_what_is_broken(
    name: str, expected: dict[str, Trained], on_two: list[dict[str, Trained]]
) -> None:
    one, many = expected[name], on_two[0][name]
    assert many.error is None and one.error is None
    assert many.losses[0] != pytest.approx(one.losses[0], rel=1e-3)  # the forward pass, with the same weights


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_plans_that_look_up_other_rows_are_refused(name: str, tmp_path: Path) -> None:
    theirs, plan = planned(WRONG_ROWS[name])
    case = replace(WRONG_ROWS[name], planner="dreamshard")
    made, _ = planned(case)
    message = f"{name}.t' is row_wise in blocks of 26, 14 rows: {MISSED_ROWS.text}"
    with pytest.raises(PlannerError, match=message):
        made.predict(plan)
    made.save_plan(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    document = json.loads(text)
    for shard, (row, rows) in zip(document["sharding"][name]["t"]["shards"], ((0, 26), (26, 14)), strict=True):
        shard["offset"][0], shard["size"][0] = row, rows
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlannerError, match=message):
        planned(case, plan_loader=JsonPlanLoader(tmp_path / "plan.json"))
    enumerator = EmbeddingEnumerator(theirs._topology, 16, theirs._constraints)
    with pytest.raises(PlannerError, match=MISSED_ROWS.text):
        planned(case, enumerator=enumerator)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_broken_is_refused_even_where_it_is_named(name: str) -> None:
    case, reason = REFUSED[name]
    ours = replace(case, planner="dreamshard", exact_training=False)
    with pytest.raises(PlannerError) as error:
        planned(ours)
    text = str(error.value)
    assert reason in text and (".t'" in text or ".w'" in text)


def test_blocks_without_rows_are_refused_on_cpus() -> None:
    case = Case({"bags": {"t": spec(RW, 1), "w": TableSpec(1, 8, (TW, RW))}}, SGD, stock=False)
    with pytest.raises(PlannerError) as error:
        planned(case)
    assert "'bags.t'" in str(error.value) and f"{RW}: {BLOCKS_WITHOUT_ROWS.text}" in str(error.value)
    free = replace(case, modules={"bags": {"w": case.modules["bags"]["w"]}})
    assert planned(free)[1].plan["bags"]["w"].sharding_type == TW
