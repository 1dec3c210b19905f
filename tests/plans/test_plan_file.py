# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plan files: read back without loss, loaded instead of planning, refused where damaged or stale; plans compared and
rated, whoever made them.

``pytest tests/plans/test_plan_file.py --models 1000`` saves and loads plans of a hundred random models.
"""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import small_models
from small_models import SHARDERS, collection, ranks_of, table, topology
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

from dreamshard_planner import DreamShardError, DreamShardPlanner, JsonPlanLoader, PlanError, SavedPlan, compare
from dreamshard_planner.devices import Machine
from tests.mixed_models import EveryTypeSharder, mixed_case
from tests.planning.test_context import model, statistics


def planner(**changes: Any) -> DreamShardPlanner:
    return small_models.planner(**({"statistics": statistics()} | changes))


def planned(module: nn.Module | None = None, **changes: Any) -> DreamShardPlanner:
    return small_models.planned(module or model(), **({"statistics": statistics()} | changes))


@pytest.fixture(scope="module")
def made() -> tuple[DreamShardPlanner, Any]:
    """A planner that has planned, and its plan."""
    one = planner()
    return one, one.plan(model(), SHARDERS)


@pytest.fixture
def file(made: tuple[DreamShardPlanner, Any], tmp_path: Path) -> Path:
    made[0].save_plan(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("models") // 10))


def test_saved_plans_of_random_models_load_to_the_same_plan(seed: int, tmp_path: Path) -> None:
    case = mixed_case(seed)
    one = case.planner(effort="quick")
    try:
        plan = one.plan(case.model, case.sharders)
    except PlannerError:
        return  # nothing to save
    one.save_plan(tmp_path / "plan.json")
    assert SavedPlan.load(tmp_path / "plan.json") == one.saved_plan(name="plan.json")
    other = case.planner(effort="quick", plan_loader=JsonPlanLoader(tmp_path / "plan.json"))
    assert other.plan(case.model, case.sharders).plan == plan.plan
    report = other.report()
    assert report.chosen.total_ms == pytest.approx(one.report().chosen.total_ms, rel=1e-6)
    fresh = one.report()
    assert report.memory == fresh.memory and any("loaded from plan.json" in note.text for note in report.notes)
    assert [rival.name for rival in report.rivals] == [rival.name for rival in fresh.rivals]
    saved = SavedPlan.load(tmp_path / "plan.json").report()
    for was, now in zip(fresh.rivals, saved.rivals, strict=True):
        assert (was.name, was.feasible) == (now.name, now.feasible)
        assert was.total_ms == pytest.approx(now.total_ms, abs=1e-5)
        assert was.rank_ms == pytest.approx(now.rank_ms, abs=1e-5)
    shard_ms = {table.name: table.shard_ms for table in saved.tables}
    assert shard_ms.keys() == {table.name for table in fresh.tables}
    for entry in fresh.tables:
        assert shard_ms[entry.name] == pytest.approx(entry.shard_ms, abs=2e-6)
    assert one.predict(plan).total_ms == pytest.approx(report.chosen.total_ms, rel=1e-6)


def test_a_loaded_plan_is_the_file_s_and_not_a_new_one(made: tuple, file: Path) -> None:
    _all_on_rank_0(file)  # a plan that nobody would make
    again = planner(plan_loader=JsonPlanLoader(file), seed=7)
    assert {rank for ranks in ranks_of(again.plan(model(), SHARDERS)).values() for rank in ranks} == {0}
    report = again.report()
    assert report.chosen.rank_ms[1] == 0 < report.chosen.rank_ms[0]
    assert "since the plan was made: setting, seed: 0 -> 7" in [note.text for note in report.notes]
    again.save_plan(file)
    assert SavedPlan.load(file).predicted.chosen.total_ms == pytest.approx(report.chosen.total_ms, abs=1e-6)


def test_a_file_shows_the_table_of_rivals_that_the_fresh_plan_had(made: tuple, file: Path) -> None:
    fresh, saved = made[0].report(), SavedPlan.load(file)
    assert str(saved.report()).splitlines()[:8] == str(fresh).splitlines()[:8] and len(fresh.rivals) > 5
    assert [name for name, _ in saved.report().collectives] == [name for name, _ in fresh.collectives]
    dearer = planned(plan_loader=JsonPlanLoader(file), cost_source="torchrec")
    assert dearer.report().rivals == () and any("by the costs of then" in note.text for note in dearer.report().notes)
    given = made[0].saved_plan(saved)
    assert given.predicted.rivals == () and given.alone_ms == saved.alone_ms


def test_a_file_reads_well_in_a_diff(file: Path) -> None:
    lines = file.read_text().splitlines()
    places = [line for line in lines if '"rank"' in line]
    assert len(places) == 4 and all(line.count('"rank"') == 1 for line in places)
    assert max(len(line) for line in lines if '"text"' not in line) < 200


def of_tables(*numbers: int) -> nn.Module:
    return collection(*(table(f"t{i}", 1000 * (i + 1)) for i in numbers))


STALE: list[tuple[dict[str, Any], str]] = [
    ({"model": model(rows=1001)}, "rows of table 't0' 1,000 -> 1,001"),
    ({"model": of_tables(0, 1, 2, 3, 4)}, "'t4' is new"),
    ({"model": of_tables(0, 1, 3), "statistics": None}, "'t2' is gone"),
    (
        {"model": nn.ModuleDict({"over": model()}), "statistics": None},
        "has none of the model's tables: it is for t0, .*the model has over.t0, .*--tables module:function",
    ),
    ({"topology": topology(3)}, "number of ranks 2 -> 3"),
    (
        {"constraints": {"t1": ParameterConstraints(min_partition=8)}},
        "constraint of table 't1', min_partition: None -> 8",
    ),
    ({"sharding_types": ("row_wise",)}, "may be sharded here"),
]


@pytest.mark.parametrize(("change", "words"), STALE)
def test_a_stale_plan_is_refused_with_the_difference_named(file: Path, change: dict[str, Any], words: str) -> None:
    arguments = {"model": model(), **change}
    given = arguments.pop("model")
    with pytest.raises(PlannerError, match=words):
        planner(plan_loader=JsonPlanLoader(file), **arguments).plan(given, [EveryTypeSharder()])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topology": topology(memory=2**33)}, "DDR of rank 0 and 1 more 16.00 GiB -> 8.00 GiB"),
        ({"topology": topology(memory=2**35)}, "DDR of rank 0 and 1 more 16.00 GiB -> 32.00 GiB"),
        (
            {"constraints": {"t1": ParameterConstraints(num_poolings=[2.0])}},
            "constraint of table 't1', num_poolings: None -> [2.0]",
        ),
    ],
)
def test_a_plan_that_fits_loads_with_other_memory_and_costs(file: Path, change: dict[str, Any], words: str) -> None:
    made = planner(plan_loader=JsonPlanLoader(file), **change)
    made.plan(model(), [EveryTypeSharder()])
    assert f"since the plan was made: {words}" in [note.text for note in made.report().notes if note.code == "stale"]


def test_a_plan_without_room_is_refused_with_rank_and_bytes(tmp_path: Path) -> None:
    small = topology(memory=500_000)
    planned(topology=small).save_plan(tmp_path / "plan.json")
    _all_on_rank_0(tmp_path / "plan.json")
    size = r"[\d.]+ [KM]iB"
    words = rf"plan.json puts {size} of DDR on rank 0, the storage reservation leaves {size}: {size} are missing"
    with pytest.raises(PlannerError, match=words):
        planned(topology=small, plan_loader=JsonPlanLoader(tmp_path / "plan.json"))


def _all_on_rank_0(file: Path) -> None:
    document = json.loads(file.read_text())
    for sharding in document["sharding"][""].values():
        for shard in sharding["shards"]:
            shard["rank"] = 0
    file.write_text(json.dumps(document))


TOPOLOGY = ("inputs", "topology")
T1 = ("inputs", "tables", "t1")
SHARDING = ("sharding", "", "t1")
SHARD = (*SHARDING, "shards", 0)
GONE = object()
DAMAGES: list[tuple[Any, tuple[str | int, ...], str]] = [
    ("other", ("format",), "no dreamshard_planner plan: its 'format' is not"),
    (99, ("version",), r"version 99 is newer than this package reads \(8\): upgrade the package"),
    (5, ("version",), r"version 5 is older than this package reads \(8\): plan and save again"),
    (1, ("surprise",), "unknown key 'surprise'"),
    (2, (*SHARD, "rank"), "'t1' has a shard on rank 2, and the topology has ranks 0 to 1"),
    ([1000, 16], (*SHARD, "size"), "'t1': 1 table_wise shard.* do not cover its 2000 rows of dim 16"),
    ([1, 0], (*SHARD, "offset"), r"\(1, 0\) leaves its 2000 rows of dim 16"),
    (GONE, SHARDING, "inputs and sharding name different tables: t1"),
    ([1], (*TOPOLOGY, "memory_bytes", "HBM"), "the HBM, DDR, SSD of all 2 ranks"),
    ("diagonal", (*SHARDING, "sharding_type"), "must be one of .*, got 'diagonal'"),
    ("row_wise", (*SHARDING, "sharding_type"), "'t1' is row_wise on rank .: .* shard on each of 2 ranks"),
    (GONE, (*TOPOLOGY, "bandwidths", "HBM"), "bandwidths must be of HBM, DDR, .*"),
    ("float31", (*T1, "data_type"), "'float31' is no dtype of torch"),
    ("int64", (*T1, "data_type"), "'int64' is no .* weights train in"),
    (0.0, (*TOPOLOGY, "bandwidths", "DDR"), "bandwidths: DDR must be greater than 0 on cpu"),
    (math.inf, ("predicted", "chosen", "collectives_ms"), "a cost of dreamshard is infinite"),
    ({}, ("alone_ms",), "costs and sharding name different tables: t0, t1, t2, t3"),
    ([1.0] * 9, ("alone_ms", "t0"), "'t0' has 1 shards, and alone_ms of 9"),
    (1.0, ("alone_ms", "t9"), "costs and sharding name different tables: t9"),
    ([1.0] * 3, ("predicted", "rivals", 0, "backward_ms"), "costs of 3 ranks are predicted, the topology has 2"),
]
"""New value, or none, of an entry, and what the error says."""


@pytest.mark.parametrize(("value", "entry", "words"), DAMAGES)
def test_a_damaged_file_is_refused_with_the_entry_named(
    file: Path, value: Any, entry: tuple[str | int, ...], words: str
) -> None:
    document = json.loads(file.read_text())
    holder = reduce(getitem, entry[:-1], document)
    holder[entry[-1]] = value
    if value is GONE:
        del holder[entry[-1]]
    file.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=rf"^{file}: .*{words}"):
        SavedPlan.load(file)


def test_no_other_planner_loads_files_that_are_none_and_plans_that_cannot_be_saved(made: tuple, file: Path) -> None:
    with pytest.raises(DreamShardError, match="needs DreamShardPlanner"):
        EmbeddingShardingPlanner(topology(), 64, stats=[], plan_loader=JsonPlanLoader(file)).plan(model(), SHARDERS)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="plan.json: not a JSON file, or a truncated one"):
        planned(plan_loader=JsonPlanLoader(file))
    with pytest.raises(PlanError, match="plan.json: cannot be written: there is no folder"):
        made[0].save_plan(file.parent / "no" / "plan.json")
    with pytest.raises(DreamShardError, match="there is no plan: plan first"):
        planner().save_plan(file)


def test_predict_takes_any_kind_of_plan(made: tuple, file: Path) -> None:
    one, plan = made
    expected = one.report().chosen.total_ms
    for given in (plan, file, str(file), SavedPlan.load(file), one.options):
        assert one.predict(given).total_ms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("cost_source", ["auto", "torchrec"])
def test_predict_takes_shards_that_were_not_enumerated(cost_source: str) -> None:
    narrow = {"t": ParameterConstraints(sharding_types=["column_wise"], min_partition=32)}
    module, common = collection(table("t", 1000, 256)), {"batch_size": 64, "stats": [], "debug": False}
    theirs = EmbeddingShardingPlanner(topology(), constraints=narrow, **common)
    split = theirs.plan(module, SHARDERS)
    one = DreamShardPlanner(topology(), cost_source=cost_source, effort="quick", **common)
    one.plan(module, SHARDERS)
    assert one.predict(split).total_ms == pytest.approx(one.predict(theirs._best_plan).total_ms)


def _options_with(one: DreamShardPlanner, ranks: list) -> Any:
    options = copy.deepcopy(one.options)
    for option, rank in zip(options, ranks, strict=True):
        option.shards[0].rank = rank
    return options


def _plan_with(plan: Any, change: Callable[[dict], object]) -> Any:
    changed = copy.deepcopy(plan)
    change(changed.plan[""])
    return changed


IMPOSSIBLE: list[tuple[Callable, type[Exception], str]] = [
    (lambda one, plan: [], PlannerError, "no sharding of 4 table.* 't0', 't1', 't2', 't3'"),
    (lambda one, plan: _plan_with(plan, lambda tables: tables.pop("t2")), PlannerError, "no sharding of 1 table.*'t2'"),
    (
        lambda one, plan: _plan_with(plan, lambda tables: tables.update(t22=tables["t2"])),
        PlannerError,
        r"does not have, .*'t22' \(did you mean 't2'\?\)",
    ),
    (lambda one, plan: one.options + copy.deepcopy(one.options[:1]), PlannerError, "'t0' twice"),
    (lambda one, plan: _options_with(one, [0, None, 0, 0]), PlannerError, r"'t1' has 1 shard\(s\) and ranks \[None\]"),
    (lambda one, plan: _options_with(one, [0, 0, 2, 0]), PlannerError, "'t2' has a shard on rank 2, .* ranks 0 to 1"),
    (
        lambda one, plan: _plan_with(plan, lambda tables: setattr(tables["t1"], "sharding_type", "diagonal")),
        PlannerError,
        "'t1': unknown sharding type 'diagonal'",
    ),
    (lambda one, plan: 3, TypeError, "a plan is a ShardingPlan, the file of one, or a list"),
    (lambda one, plan: ["t0"], TypeError, "holds ShardingOption, got str"),
]


@pytest.mark.parametrize(("given", "kind", "words"), IMPOSSIBLE)
def test_what_is_wrong_with_a_plan_is_named(made: tuple, given: Callable, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        made[0].predict(given(*made))


def test_compare_names_what_changed_and_what_it_moves(made: tuple, file: Path) -> None:
    one, plan = made
    before = SavedPlan.load(file)
    same = compare(file, before)
    assert (same.changes, same.unchanged, same.total_bytes) == ((), 4, 0)
    document = json.loads(file.read_text())
    tables = document["sharding"][""]
    t1, t3 = tables["t1"]["shards"][0], tables["t3"]
    t1["rank"] = 1 - t1["rank"]
    home = t3["shards"][0]["rank"]
    t3["sharding_type"] = "column_wise"
    t3["shards"] = [{"rank": rank, "offset": [0, 8 * rank], "size": [4000, 8]} for rank in (0, 1)]
    other = file.with_name("other.json")
    other.write_text(json.dumps(document))
    found = compare(file, other)
    moved, split = sorted(found.changes, key=lambda change: change.table)
    assert (moved.table, moved.retyped, moved.bytes_received) == ("t1", False, 2000 * 16 * 4)
    assert (split.table, split.retyped, split.bytes_received) == ("t3", True, 4000 * 8 * 4)
    expected = [0, 0]
    expected[t1["rank"]] += 2000 * 16 * 4
    expected[1 - home] += 4000 * 8 * 4
    assert list(found.bytes_received) == expected and found.unchanged == 2
    text = str(found)
    assert "2 table(s) change, 1 of them their sharding type or kernel, 2 stay; 250.00 KiB to move" in text
    assert f"table_wise on rank {home} -> column_wise on ranks 0-1" in text
    assert json.loads(json.dumps(found.to_dict()))["total_bytes"] == sum(expected)
    for declared in document["inputs"]["tables"].values():
        declared["optimizer"] = "exact_rowwise_adagrad"  # a number for each row of a shard
    other.write_text(json.dumps(document))
    trained = compare(replace(before, inputs=SavedPlan.load(other).inputs), other)
    assert trained.total_bytes == found.total_bytes + (2000 + 4000) * 4
    rated = compare(before, one.saved_plan(SavedPlan.load(other), "split"))
    assert rated.cost_after.chosen.total_ms != before.predicted.chosen.total_ms == rated.cost_before.chosen.total_ms


def test_compare_says_where_plans_do_not_compare(file: Path) -> None:
    tables = collection(table("t0", 1000), table("t1", 999), table("new"))
    other = planned(tables, cost_source="torchrec", batch_size=128, statistics=None)
    found = compare(file, other.saved_plan(name="other"))
    assert (found.before, found.after) == (str(file), "other")
    assert found.only_before == ("t1", "t2", "t3") and found.only_after == ("new", "t1")
    assert "batch size 64 -> 128" in found.inputs and not found.one_cost_source
    assert str(found).startswith(f"Costs of {file} and other come from different sources and cannot be compared.")


def test_compare_tells_a_machine_from_a_better_one() -> None:
    def on(gpu: str, ranks: int) -> SavedPlan:
        return planned(topology=Machine(ranks_per_host=ranks, gpu=gpu).topology()).saved_plan(name=gpu)

    before = on("a100-40", 2)
    found = compare(before, on("a100-80", 2))
    assert found.one_cost_source and found.cost_after.chosen.total_ms < found.cost_before.chosen.total_ms
    first, machine, *_ = str(found).splitlines()
    assert first.startswith(f"A step takes {found.cost_after.chosen.total_ms:.3f} ms with a100-80, ")
    assert "samples" not in first
    assert ", for 256 samples instead of 128 (" in str(compare(before, on("a100-40", 4))).splitlines()[0]
    cards = "cards NVIDIA A100-SXM4-40GB -> NVIDIA A100-SXM4-80GB"
    memory, bandwidth = "HBM of rank 0 and 1 more 37.25 GiB -> 74.51 GiB", "bandwidth of HBM 1,555 GB/s -> 2,039 GB/s"
    assert machine == f"Machine: {memory}; {cards}; {bandwidth}."
    assert found.inputs == ()


def test_a_module_in_a_path_and_tables_of_one_name(tmp_path: Path) -> None:
    outer = nn.ModuleDict({"a": collection(table("t", 100)), "b": collection(table("t", 200))})
    one = planner(statistics=None)
    plan = one.plan(outer, SHARDERS)
    one.save_plan(tmp_path / "plan.json")
    (note,) = [note for note in one.report().notes if note.code == "assumption"]
    assert "1 of 1 features (t_f0)" in note.text
    assert sorted(dict(SavedPlan.load(tmp_path / "plan.json").tables())) == ["a.t", "b.t"]
    again = planner(statistics=None, plan_loader=JsonPlanLoader(tmp_path / "plan.json"))
    assert again.plan(outer, SHARDERS).plan == plan.plan
