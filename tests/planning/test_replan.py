# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""From the plan that runs, by few moves, to one that pays over the steps that remain."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import MultiPassPrefetchConfig
from small_models import SHARDERS, collection, planner, table, topology
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import BoundsCheckMode, CacheParams
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import (
    DreamShardPlanner,
    FeatureStatistics,
    JsonPlanLoader,
    PlacementRules,
    PlanError,
    SavedPlan,
    TableStatistics,
    compare,
)
from tests.cli.test_commands import run, run_json

POOLING = (900.0, 600.0, 400.0, 200.0, 90.0, 60.0, 40.0, 10.0)
ROOMY = {"cost_source": "roofline", "effort": "quick"}


def model(
    names: str = "abcdefgh", optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad, rows: int = 4000, **arguments
) -> nn.Module:
    tables = (table(name, rows * (1 + ord(name) % 3), 64, **arguments) for name in names)
    return nn.ModuleDict({"sparse": collection(*tables, optimizer=optimizer)})


def statistics(order: str = "abcdefgh") -> TableStatistics:
    """The first table is read most."""
    read = zip(order, POOLING, strict=False)
    return TableStatistics({f"{name}_f0": FeatureStatistics(factor) for name, factor in read})


def planned(order: str = "abcdefgh", module: nn.Module | None = None, **arguments):
    """A planner with its plan."""
    made = planner(**{**ROOMY, "statistics": statistics(order), **arguments})
    made.plan(module or model(), SHARDERS)
    return made


kept = cache(planned)
"""Plans that several tests ask for, and none changes."""


@cache
def whole(ranks: int) -> DreamShardPlanner:
    """Plan whole tables on so many ranks."""
    return planned(topology=topology(ranks), sharding_types=["table_wise"])


def check(found, current: SavedPlan) -> None:
    """Check that the curve falls, and that the plan costs and moves what it says."""
    costs, moved = [move.step_ms for move in found.curve], [move.bytes_moved for move in found.curve]
    assert costs == sorted(set(costs), reverse=True) and moved == sorted(moved)
    assert found.plan.predicted.chosen.total_ms == pytest.approx(found.chosen.step_ms, rel=1e-5)
    received = [0] * found.plan.inputs.topology.world_size
    held, sizes = dict(current.tables()), found.plan.inputs.tables
    for name, after in found.plan.tables():
        if current.inputs.tables.get(name) != sizes[name]:
            continue
        for shard in after.shards:
            new = np.ones(shard.size, dtype=bool)
            for other in held[name].shards:
                if other.rank == shard.rank:
                    first, last = np.maximum(shard.offset, other.offset), np.add(other.offset, other.size)
                    (row, column), (last_row, last_column) = first - shard.offset, np.maximum(last - shard.offset, 0)
                    new[row:last_row, column:last_column] = False
            new = int(new.sum())
            received[shard.rank] += new * sizes[name].weight_bytes + -(-new // shard.size[1]) * 4  # row-wise Adagrad's
    assert (sum(received), max(received)) == (found.chosen.bytes_moved, found.chosen.bytes_to_one_rank)


def test_a_plan_of_the_same_data_stays() -> None:
    made = kept()
    found = made.replan(made.saved_plan(), steps=10**9, statistics=statistics())
    assert found.stays and found.chosen == found.now and found.chosen.bytes_moved == found.chosen.moving_seconds == 0
    assert found.plan.sharding == made.saved_plan().sharding
    assert found.sentence.startswith("Stay with plan: ") and "1,000,000,000 steps" in found.sentence


def test_drift_moves_few_tables_and_the_curve_ends_no_dearer_than_planning_afresh() -> None:
    before, after = planned(topology=topology(4)), planned("hgfedcba", topology=topology(4))
    current = before.saved_plan(name="before.json")
    found = after.replan(current, steps=10**9)
    check(found, current)
    assert found.now.step_ms == pytest.approx(after.predict(current).total_ms)
    assert found.curve[-1].step_ms <= after.report().chosen.total_ms * (1 + 1e-9)
    assert found.curve[-1].step_ms <= found.afresh.step_ms < found.now.step_ms
    assert not found.stays and found.sentence.startswith("Move ") and found.saved_seconds > 0
    assert found.chosen.bytes_moved <= found.afresh.bytes_moved
    assert compare(current, found.plan).total_bytes <= found.chosen.bytes_moved


def test_a_model_that_was_sharded_in_place_since_is_replanned() -> None:
    made, module = planner(statistics=statistics(), **ROOMY), model()
    plan = made.plan(module, SHARDERS)
    saved = made.saved_plan()
    before = made.replan(plan, steps=10**9, statistics=statistics("hgfedcba"))  # plans of TorchRec, too
    module["sparse"] = nn.Identity()  # as TorchRec does
    after = made.replan(saved, steps=10**9, statistics=statistics("hgfedcba"))
    assert after.plan.sharding == before.plan.sharding and after.curve == before.curve
    next(iter(plan.plan["sparse"].values())).ranks = None
    with pytest.raises(PlannerError, match="has not been placed"):
        made.replan(plan, steps=1)


def test_what_pays_depends_on_the_steps_that_remain_and_on_what_moving_takes_and_no_more_moves_than_may() -> None:
    saved, after = kept().saved_plan(), kept("hgfedcba")
    long, slow = (after.replan(saved, steps=steps, bytes_per_s=rate) for steps, rate in ((10**9, 1e12), (10**6, 1.0)))
    short = long.over(10)
    assert not long.stays and short.stays and slow.stays
    moving_seconds = long.chosen.bytes_to_one_rank / 1e12
    assert long.chosen.seconds(10**9) == pytest.approx(60 + moving_seconds + 1e6 * long.chosen.step_ms)
    assert after.replan(saved, steps=1, restart_seconds=0.0, bytes_per_s=1e15).saved_seconds > 0
    most = long.chosen.bytes_moved
    some = after.replan(saved, steps=10**9, max_bytes_moved=most // 2)
    for found, limit in ((long.over(10**9, 0), 0), (some, most // 2), (some.over(10**9, most), most)):
        check(found, saved)
        assert found.chosen.bytes_moved <= limit
    assert found.chosen.bytes_moved > 0


def test_few_moves_find_what_trying_all_finds() -> None:
    """Whole tables on two ranks, every set of them that may trade places."""
    module = model("abcdef")
    arguments = {"sharding_types": ["table_wise"], "module": module, "effort": "default"}
    saved, after = planned(**arguments).saved_plan(), planned("fedcba", **arguments)
    found = after.replan(saved, steps=10**9)
    tables, names = saved.sharding["sparse"], sorted(saved.sharding["sparse"])
    least: dict[int, float] = {}
    for ranks in itertools.product(range(2), repeat=len(names)):
        plan = {
            name: replace(tables[name], shards=(replace(tables[name].shards[0], rank=rank),))
            for name, rank in zip(names, ranks, strict=True)
        }
        rows = sum(sharding.shards[0].size[0] for name, sharding in plan.items() if sharding != tables[name])
        moved = rows * (256 + 4)
        cost = after.predict(replace(saved, sharding={"sparse": plan})).total_ms
        least[moved] = min(cost, least.get(moved, cost))
    assert found.curve[-1].step_ms == pytest.approx(min(least.values()), rel=1e-6)
    for move in found.curve:
        cheapest = min(cost for moved, cost in least.items() if moved <= move.bytes_moved)
        assert move.step_ms <= cheapest * 1.02


def test_rules_and_memory_are_kept() -> None:
    rules = PlacementRules(together=[["a", "b"]], apart=[["c", "d"]], on_ranks={"e": [1]})
    arguments = {"placement_rules": rules, "topology": topology(2, memory=2**26)}
    current, after = planned(**arguments).saved_plan(), planned("hgfedcba", **arguments)
    found = after.replan(current, steps=10**9)
    check(found, current)
    tables = found.plan.sharding["sparse"]
    ranks = {name: {shard.rank for shard in sharding.shards} for name, sharding in tables.items()}
    assert ranks["a"] == ranks["b"] and not ranks["c"] & ranks["d"] and ranks["e"] == {1}
    for entry in found.plan.predicted.memory:
        assert all(used <= limit for used, limit in zip(entry.used_bytes, entry.limit_bytes, strict=True))


def test_a_plan_that_breaks_a_new_rule_cannot_stay() -> None:
    current = whole(2).saved_plan()
    apart = next(names for names in itertools.combinations("abcdefgh", 2)
                 if len({current.sharding["sparse"][name].shards[0].rank for name in names}) == 1)  # fmt: skip
    rules = PlacementRules(apart=[list(apart)])
    found = planned(sharding_types=["table_wise"], placement_rules=rules).replan(current, steps=1)
    check(found, current)
    assert not found.stays and found.forced == ("it does not keep within memory and rules",)
    assert found.chosen.tables > 0 and "plan cannot stay" in found.sentence
    with pytest.raises(PlanError, match=r"max_bytes_moved=1: .* cannot stay, and the least that must move is \d"):
        found.over(1, max_bytes_moved=1)


@cache
def three_tables() -> DreamShardPlanner:
    """Plan three whole tables."""
    return planned("abc", model("abc"), sharding_types=["table_wise"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"module": model("ab")}, "table 'sparse.c' is gone"),
        ({"topology": topology(2, device="cuda")}, "device cpu -> cuda"),
        ({"module": model("abc", pooling=PoolingType.MEAN)}, "pooling of table 'sparse.a' sum -> mean"),
        ({"module": model("abc", torch.optim.SGD)}, "optimizer of table 'sparse.a' exact_rowwise_adagrad -> exact"),
    ],
    ids=["gone", "device", "pooling", "optimizer"],
)
def test_what_stays_of_a_plan_for_something_else_is_the_sharding_and_the_plan_found_loads(
    change, told: str, tmp_path: Path
) -> None:
    current = three_tables().saved_plan()
    current.save(tmp_path / "plan.json")
    arguments = {"order": "abc", "module": model("abc"), "sharding_types": ["table_wise"], **change}
    found = planned(**arguments).replan(tmp_path / "plan.json", steps=0)
    check(found, current)
    stays = found.plan.sharding["sparse"]
    assert stays == {name: current.sharding["sparse"][name] for name in stays}
    assert found.stays and not found.forced and found.stale[0].startswith(told) and told in str(found)
    assert found.sentence.startswith("Keep the sharding of plan.json, but save and load this plan")
    found.plan.save(tmp_path / "new.json")
    loaded = planned(plan_loader=JsonPlanLoader(tmp_path / "new.json"), **arguments)
    assert loaded.saved_plan().sharding["sparse"] == stays
    with pytest.raises(PlannerError, match=r"plan\.json was made for something else.*Load the plan that replan"):
        planned(plan_loader=JsonPlanLoader(tmp_path / "plan.json"), **arguments)


def test_what_a_job_of_a_file_lacks_is_not_told_as_changed(tmp_path: Path) -> None:
    cache = CacheParams(load_factor=0.2, multipass_prefetch_config=MultiPassPrefetchConfig(num_passes=3))
    constraints = {"a": ParameterConstraints(bounds_check_mode=BoundsCheckMode.FATAL, cache_params=cache)}
    given = {"constraints": constraints, "topology": Topology(2, "cpu", ssd_cap=2**42)}
    plan, new = tmp_path / "plan.json", tmp_path / "new.json"
    planned("abc", model("abc"), **given).save_plan(plan)
    assert "Stay with plan.json" in run("replan", plan, "--steps", "1", "--out", new).stdout
    for file in (plan, new):
        loaded = planned("abc", model("abc"), plan_loader=JsonPlanLoader(file), **given)
        assert loaded.options and "storage_reservation" not in str(loaded.report())
    assert "made for something else" in run("replan", plan, "--steps", "1", "--batch-size", "8").stdout
    found = planned("abc", model("abc"), topology=given["topology"]).replan(SavedPlan.load(plan), steps=1)
    assert "bounds_check_mode" in str(found.stale)  # the model no longer has it


def test_changed_tables_are_told_from_new_ones_and_carry_weights_of_the_same_shape() -> None:
    arguments = {"sharding_types": ["table_wise"], "topology": topology(3)}
    module = model("abc")
    made = planner(**ROOMY, statistics=statistics(), **arguments)
    running = made.plan(module, SHARDERS)
    current = made.saved_plan()
    for other, told in ((model("abc", rows=5000), "changed"), (model("def"), "new")):
        after = planned(module=other, **arguments)
        for given in (current, running):
            found = after.replan(given, steps=0)
            assert found.forced[0].startswith(f"{told}: 'sparse.") and found.chosen.bytes_moved == 0
    other = model("abc", pooling=PoolingType.MEAN)
    found = planned(module=other, **{**arguments, "topology": topology(2)}).replan(current, steps=0, lost=[0])
    homeless = [table for table in current.sharding["sparse"].values() if table.shards[0].rank == 0]
    assert found.forced == ("rank 0 lost",) and found.chosen.tables == len(homeless) == 1
    assert found.chosen.bytes_moved == homeless[0].shards[0].size[0] * (64 + 1) * 4


@pytest.mark.parametrize(("ranks", "lost"), [((4, 3), (1,)), ((3, 2), ()), ((2, 3), ()), ((4, 2), (0, 3))])
def test_lost_and_added_ranks_move_only_what_they_must(ranks: tuple[int, int], lost: tuple[int, ...]) -> None:
    was, now = ranks
    current, after = whole(was).saved_plan(), whole(now)
    gone = set(lost) or set(range(now, was))
    names = {rank: index for index, rank in enumerate(rank for rank in range(was) if rank not in gone)}
    shards = {name: sharding.shards[0] for name, sharding in current.sharding["sparse"].items()}
    homeless = sum(shard.size[0] * (shard.size[1] + 1) * 4 for shard in shards.values() if shard.rank in gone)
    # With a cap: a further table may move if that leaves fewer bytes to the rank that gets most.
    found = after.replan(current, steps=0, lost=lost, max_bytes_moved=homeless)
    for name, shard in shards.items():
        (after_shard,) = found.plan.sharding["sparse"][name].shards
        if shard.rank not in gone:
            assert after_shard.rank == names[shard.rank]
    assert found.chosen.bytes_moved == homeless and not found.stays
    told = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, sorted(gone)))} lost"
    assert not gone or found.forced == (told,)


def test_what_is_cut_for_other_ranks_is_cut_anew_and_blocks_that_stay_are_no_bytes() -> None:
    current, after = (planned(topology=topology(ranks, device="cuda"), sharding_types=["row_wise"]) for ranks in (2, 4))
    current = current.saved_plan()
    found = after.replan(current, steps=0)
    check(found, current)
    sizes = [table.rows * (table.dim + 1) * 4 for table in current.inputs.tables.values()]
    assert found.chosen.bytes_moved == pytest.approx(0.75 * sum(sizes), rel=0.01)
    assert "2 -> 4 ranks" in found.forced and found.forced[1].startswith("may not be sharded as they are: 'sparse.a'")


def test_bad_input_names_itself() -> None:
    made, running = kept(), planner(**ROOMY, statistics=statistics()).plan(model(), SHARDERS)
    saved = made.saved_plan()
    for arguments, words in (
        ({"steps": -1}, "steps must be a whole number from 0, got -1"),
        ({"steps": 1, "restart_seconds": -2.0}, "restart_seconds.*got -2.0"),
        ({"steps": 1, "bytes_per_s": -2.0}, "bytes_per_s must be a number from 1, got -2.0"),
        ({"steps": 1, "bytes_per_s": 0}, "bytes_per_s must be a number from 1, got 0"),
        ({"steps": 1, "max_bytes_moved": -1}, "max_bytes_moved must be a number from 0, got -1"),
        ({"steps": 1, "max_bytes_moved": "1"}, "max_bytes_moved must be a number from 0, got '1'"),
        ({"steps": 1, "lost": [0, 9]}, "no rank 9 "),
        ({"steps": 1, "lost": [-1]}, "no rank -1 "),
    ):
        for current in (saved, running):
            with pytest.raises(ValueError, match=words):
                made.replan(current, **arguments)
    with pytest.raises(PlanError, match=r"nowhere\.json"):
        made.replan("nowhere.json", steps=1)


def test_the_command_writes_the_plan_and_the_page_and_says_what_to_do(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("plan.json", "today.json", "new.json", "page.html")}
    made = kept()
    made.save_plan(files["plan.json"])
    statistics("hgfedcba").to_json(files["today.json"])

    replan = ("replan", files["plan.json"], "--steps")
    given = ("--statistics", files["today.json"], "--out", files["new.json"], "--html", files["page.html"])
    document = run_json(*replan, "1e9", *given, "--restart-seconds", "5", status=3)
    new = SavedPlan.load(files["new.json"])
    assert document["chosen"]["step_ms"] == pytest.approx(new.predicted.chosen.total_ms, rel=1e-5)
    assert new.sharding == kept("hgfedcba").replan(files["plan.json"], steps=10**9).plan.sharding
    page = Path(files["page.html"]).read_text()
    assert "Cost against bytes moved" in page and document["sentence"].partition(":")[0] in page
    assert "Stay with plan.json" in run(*replan, "1e9").stdout
    assert run_json(*replan, "1", "--batch-size", "32")["stale"] == ["batch size 64 -> 32"]
    assert run_json(*replan, "1", "--gpus-per-node", "1", status=3)["forced"][0] == "rank 1 lost"
    run(*replan, "0", status=2)
