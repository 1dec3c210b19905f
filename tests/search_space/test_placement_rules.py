# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables together, apart and on certain ranks: kept by every part that places tables, or refused with the reason."""

import pytest
import small_models
from small_models import SHARDERS, collection, table, topology
from torch import nn
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, JsonPlanLoader, PlacementRules, TableStatistics
from tests.mixed_models import EveryTypeSharder

TABLE_WISE = ("table_wise",)


def model(tables: int = 8) -> nn.Module:
    return nn.ModuleDict({"sparse": collection(*(table(f"t{i}", 1000 * (i + 1), 16) for i in range(tables)))})


def ranks_of(planner: DreamShardPlanner) -> dict[str, set[int]]:
    return {option.name: {shard.rank for shard in option.shards} for option in planner.options}


def planner(rules: PlacementRules | None, ranks: int = 4, **changes) -> DreamShardPlanner:
    return small_models.planner(**{"topology": topology(ranks), "placement_rules": rules, **changes})


RULES = PlacementRules(
    together=[("t0", "t7"), ("t1", "t6")],
    apart=[("t2", "t3", "t4", "sparse.t5", "sparse.t2"), ("t0", "t1")],
    on_ranks={"t2": [3, 1]},
)


@pytest.mark.parametrize("sharding_types", [TABLE_WISE, None])
def test_rules_are_kept(sharding_types: tuple[str, ...] | None) -> None:
    one = planner(RULES, sharding_types=sharding_types, exact_training=False)
    one.plan(model(), [EveryTypeSharder()])
    found = ranks_of(one)
    assert found["t0"] == found["t7"] and found["t1"] == found["t6"]
    assert len(found["t0"]) == len(found["t1"]) == 1 and found["t0"] != found["t1"]
    assert found["t2"] <= {1, 3}
    apart = [found[f"t{i}"] for i in (2, 3, 4, 5)]
    assert sum(map(len, apart)) == len(set().union(*apart))
    (rank,) = found["t0"]
    assert f"placement_rules: sparse.t0, sparse.t7 are together on rank {rank}" in map(str, one.report().notes)


def test_memory_and_rules_are_kept_together() -> None:
    """Packing finds what greedy placement does not."""
    made = nn.ModuleDict({"sparse": collection(*(table(f"t{i}", 1000, 16) for i in range(6)))})
    tight = topology(3, memory=2 * 1000 * 16 * 4 + 3 * 64 * 3 * 100 * 3)
    rules = PlacementRules(apart=[("t0", "t1", "t2")], on_ranks={"t3": [0], "t0": [0, 1], "t1": [0, 1]})
    one = planner(rules, 3, topology=tight, sharding_types=TABLE_WISE)
    one.plan(made, SHARDERS)
    found = ranks_of(one)
    assert found["t3"] == {0} and found["t2"] == {2} and found["t0"] | found["t1"] == {0, 1}


def typed(kind: str, *tables: str, **more) -> dict:
    return {"constraints": {name: ParameterConstraints(sharding_types=[kind], **more) for name in tables}}


KEPT, T01, EIGHT = PlacementRules, ("t0", "t1"), [f"t{i}" for i in range(8)]
REFUSED: list[tuple[PlacementRules, dict, str]] = [
    (KEPT(on_ranks={"tt1": [0]}), {}, r"'tt1', which the model does not have \(did you mean 't"),
    (KEPT(on_ranks={"t1": [4]}), {}, "'t1' names rank 4; there are ranks 0 to 3"),
    (KEPT(apart=[("t0", "sparse.t0")]), {}, "'t0'.* one table, 'sparse.t0'"),
    (KEPT(together=[("t1", "sparse.t1")]), {}, "one table, 'sparse.t1'"),
    (KEPT(apart=[EIGHT[:5]]), {}, "the 5 tables .* cannot be apart"),
    (KEPT((), [T01], {"t0": [2], "t1": [2]}), {}, "the 2 tables .* cannot be apart: they have rank 2 to share"),
    (KEPT([T01], (), {"t0": [2], "t1": [3]}), {}, "no rank is left for tables .*: on_ranks leave them none in common"),
    (
        KEPT(on_ranks={"t0": [2]}),
        typed("row_wise", "t0"),
        "no sharding type is left for table 'sparse.t0' .row_wise: placement_rules leave it rank 2",
    ),
    (
        KEPT(apart=[T01]),
        typed("row_wise", "t0"),
        "it would lie on every rank, and placement_rules keep it apart from 'sparse.t1'",
    ),
    (
        KEPT(apart=[EIGHT[:3]]),
        typed("column_wise", *EIGHT[:3], min_partition=8),
        "of sparse.t0, sparse.t1, sparse.t2, which are apart, a rank may have one shard, and they have 6 for 4 ranks",
    ),
    (
        KEPT(on_ranks=dict.fromkeys(EIGHT, [0])),
        {"topology": topology(4, memory=1_500_000)},
        "Tables do not fit where placement_rules leave them",
    ),
]


@pytest.mark.parametrize(("rules", "arguments", "words"), REFUSED)
def test_rules_that_cannot_be_kept_are_refused_with_the_reason(
    rules: PlacementRules, arguments: dict, words: str
) -> None:
    with pytest.raises(PlannerError, match=words):
        planner(rules, **arguments).plan(model(), [EveryTypeSharder()])


def test_rules_that_mean_nothing_are_errors_at_once() -> None:
    for made, words in (
        (lambda: PlacementRules(together=["ab"]), "groups of two tables or more"),
        (lambda: PlacementRules(apart=[("a",), 5]), "groups of two tables or more"),
        (lambda: PlacementRules(together=[5]), "groups of two tables or more.* got 5"),
        (lambda: PlacementRules(on_ranks={"a": 1.5}), "'a' must be a whole number from 0, got 1.5"),
        (lambda: PlacementRules(together=[("a", "b"), ("b", "c")], apart=[("a", "c")]), "to be together and apart"),
        (lambda: PlacementRules(on_ranks={"a": []}), "'a' must name at least one rank"),
        (lambda: PlacementRules(on_ranks={"a": [-1]}), "'a' must be a whole number from 0, got -1"),
        (lambda: planner(RULES, partitioner=GreedyPerfPartitioner()), "own partitioner"),
    ):
        with pytest.raises(ValueError, match=words):
            made()
    with pytest.raises(TypeError, match="must be PlacementRules, got dict"):
        planner({"together": []})


def test_a_saved_plan_belongs_to_its_rules(tmp_path) -> None:
    file = tmp_path / "plan.json"
    one = planner(RULES)
    plan = one.plan(model(), SHARDERS)
    one.save_plan(file)
    again = PlacementRules(tuple(reversed(RULES.together)), RULES.apart, {"t2": (1, 3)})
    statistics = TableStatistics({f"t{i}_f0": FeatureStatistics(float(9 - i)) for i in range(8)})
    loaded = planner(again, plan_loader=JsonPlanLoader(file), statistics=statistics).plan(model(), SHARDERS)
    assert loaded.plan == plan.plan
    with pytest.raises(PlannerError, match="placement_rules, apart: .* -> None"):
        planner(None, plan_loader=JsonPlanLoader(file)).plan(model(), SHARDERS)
    rank = next(iter(ranks_of(one)["t0"]))
    moved = file.read_text().replace(f'"rank": {rank},', f'"rank": {(rank + 1) % 4},', 1)
    file.write_text(moved)
    with pytest.raises(PlannerError, match=r"plan.json (does not have|has) table"):
        planner(RULES, plan_loader=JsonPlanLoader(file)).plan(model(), SHARDERS)


def test_what_belongs_to_other_models_is_noted() -> None:
    """One dictionary of constraints, and one file of statistics, may serve several models."""
    constraints = {name: ParameterConstraints() for name in ("t1", "t11")}
    statistics = TableStatistics(dict.fromkeys(("t1_f0", "u_f0"), FeatureStatistics(2.0)))
    one = planner(None, constraints=constraints, statistics=statistics)
    one.plan(model(), SHARDERS)
    features, tables = [note.text for note in one.report().notes if note.code == "unused"]
    assert "no table of the model serves: 'u_f0'" in features and "'t11' (did you mean 't1'?)" in tables
