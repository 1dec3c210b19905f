# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Two plans beside each other, on ranks that form other sharding groups or have other names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_models import SHARDERS, collection, planner, table
from torchrec.distributed.planner.types import ParameterConstraints, Topology

from dreamshard_planner import (
    FeatureStatistics,
    PlacementRules,
    PlanError,
    SavedPlan,
    ShardingGroups,
    TableStatistics,
    compare,
)
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline.jobs import Job, OfflineModel, TableSpec
from dreamshard_planner.plans.comparison import names_that_keep_most, renamed
from dreamshard_planner.plans.plan_file import ShardPlace
from dreamshard_planner.workload.ids import IdHistogram
from tests.cli.test_commands import run

ROWS, DIM, TABLES = 100_000, 64, 4
TABLE_BYTES = ROWS * DIM * 4


def saved(path: Path, groups: ShardingGroups | None = None) -> SavedPlan:
    """Whole tables on eight GPUs of two hosts."""
    specs = [
        TableSpec(
            name=f"t{index}", num_embeddings=ROWS, embedding_dim=DIM, features={f"f{index}": FeatureStatistics(5.0)}
        )
        for index in range(TABLES)
    ]
    settings = {"effort": "quick", "sharding_types": ["table_wise"], "sharding_groups": groups}
    machine = Machine(ranks_per_host=4, hosts=2, gpu="h100")
    job = Job(model=OfflineModel.of_specs(specs), machine=machine, batch_size=256, settings=settings)
    job.plan().planner.save_plan(path)
    return SavedPlan.load(path)


@pytest.mark.parametrize("consecutive", [False, True])
def test_a_plan_of_sharding_groups_is_counted_for_all_ranks(tmp_path: Path, consecutive: bool) -> None:
    groups = ShardingGroups(size=4, use_inter_host_allreduce=consecutive)
    one, two = saved(tmp_path / "one.json"), saved(tmp_path / "two.json", groups)
    found = compare(one, two)
    assert found.samples == (2048, 2048) and "for each" not in str(found)
    assert any("sharding groups" in text and "1 -> 2" in text for text in found.machine)
    assert len(found.bytes_received) == 8
    place = {name: table.shards[0].rank for name, table in one.tables()}
    group = {name: table.shards[0].rank for name, table in two.tables()}
    expected = [0] * 8
    for name in place:
        of_group = [group[name], group[name] + 4] if consecutive else [2 * group[name], 2 * group[name] + 1]
        for rank in set(of_group) - {place[name]}:
            expected[rank] += TABLE_BYTES
    assert list(found.bytes_received) == expected
    assert compare(two, two).total_bytes == 0
    text = run("report", str(tmp_path / "two.json")).stdout
    assert "8 cuda ranks in 2 sharding groups of 4, 4 on a host" in text
    assert json.loads(run("info", str(tmp_path / "two.json"), "--format", "json").stdout)["ranks"] == 8


def test_a_file_of_no_sharding_group_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    saved(path, ShardingGroups(size=4))
    document = json.loads(path.read_text())
    document["inputs"]["topology"]["groups"]["count"] = 0
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="two.json: .*topology.groups.count: .*equal to 1, got 0"):
        SavedPlan.load(path)


def test_files_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("monday/run", "tuesday/run"):
        (tmp_path / folder).mkdir(parents=True)
        saved(tmp_path / folder / "plan.json")
    monkeypatch.chdir(tmp_path / "monday/run")
    found = compare("plan.json", "../../tuesday/run/plan.json")
    assert (found.before, found.after) == ("monday/run/plan.json", "tuesday/run/plan.json")
    assert found.before in str(found) and found.after in str(found)
    monkeypatch.chdir(tmp_path / "monday")
    (tmp_path / "monday/run/plan.json").rename(tmp_path / "monday/plan.json")
    other = compare("plan.json", "../tuesday/run/plan.json")
    assert (other.before, other.after) == ("monday/plan.json", "run/plan.json")
    same = compare("plan.json", "plan.json")
    assert (same.before, same.after) == ("plan.json", "plan.json")


KINDS = ["row_wise", "table_row_wise", "column_wise", *["table_wise"] * 7]
NAMES = (3, 2, 0, 1)
"""Hosts change places, and so do the ranks of one of them."""
LOOKUPS = 50_000.0
"""Lookups per sample: so many that each rank has some table."""


def spanning(**given) -> SavedPlan:
    """Ten tables on two hosts of two GPUs, of all spans."""
    constraints = {
        f"t{index}": ParameterConstraints(sharding_types=[kind], min_partition=8, pooling_factors=[LOOKUPS])
        for index, kind in enumerate(KINDS)
    }
    made = planner(
        topology=Topology(4, "cuda", local_world_size=2),
        constraints=constraints,
        exact_training=False,
        **given,
    )
    made.plan(collection(*(table(f"t{index}", 1000 * (index + 1), 32) for index in range(10))), SHARDERS)
    return made.saved_plan()


@pytest.fixture(scope="module")
def plan() -> SavedPlan:
    return spanning(effort="quick")


def test_a_plan_under_other_names_moves_nothing(plan: SavedPlan) -> None:
    other = renamed(plan, NAMES)
    assert other.sharding != plan.sharding
    tables = dict(other.tables())
    assert [shard.rank for shard in tables["t0"].shards] == [0, 1, 2, 3]
    assert [shard.rank % 2 for shard in tables["t1"].shards] == [0, 1]
    assert names_that_keep_most(other, plan) == NAMES
    found = compare(other, plan)
    assert found.names == NAMES and (found.total_bytes, found.changes) == (0, ()) < (found.bytes_as_named, ())
    assert found.cost_after == other.predicted and found.cost_after != plan.predicted
    assert "Ranks of plan are named anew for that (0 -> 3, 1 -> 2, 2 -> 0, 3 -> 1)" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["names"] == list(NAMES)


def test_ranks_keep_their_names_where_nothing_is_gained(plan: SavedPlan) -> None:
    assert names_that_keep_most(plan, plan) == (0, 1, 2, 3) and renamed(plan, (0, 1, 2, 3)) is plan
    found = compare(plan, plan)
    assert found.bytes_as_named == 0 and "named anew" not in str(found)
    name, moved = next((name, table) for name, table in plan.tables() if len(table.shards) == 1)
    far = replace(moved, shards=(replace(moved.shards[0], rank=(moved.shards[0].rank + 2) % 4),))
    apart = replace(plan, sharding={"": {**plan.sharding[""], name: far}})
    assert compare(plan, apart).names == (0, 1, 2, 3) and compare(plan, apart).total_bytes == _bytes(moved.shards[0])


def test_ranks_that_rules_name_and_ranks_of_other_memory_keep_theirs(plan: SavedPlan) -> None:
    ruled = spanning(effort="quick", placement_rules=PlacementRules(on_ranks={"t5": [0, 1]}))
    assert names_that_keep_most(renamed(ruled, NAMES), ruled) == (0, 1, 2, 3)
    topology = replace(plan.inputs.topology, memory_bytes={"HBM": (1, 2, 3, 3), "DDR": (1,) * 4, "SSD": (0,) * 4})
    uneven = replace(plan, inputs=replace(plan.inputs, topology=topology))
    names = names_that_keep_most(renamed(uneven, (0, 1, 3, 2)), uneven)
    assert names == (0, 1, 3, 2) and names_that_keep_most(renamed(uneven, NAMES), uneven)[:2] == (0, 1)
    fewer = replace(plan.inputs, topology=replace(plan.inputs.topology, local_world_size=4))
    assert names_that_keep_most(renamed(plan, NAMES), replace(plan, inputs=fewer)) == (0, 1, 2, 3)


def test_ranks_keep_their_names_where_blocks_may_be_read_unevenly(tmp_path: Path) -> None:
    """Blocks lie in the order of ranks: under other names a block would have another rank's cost."""
    hot = FeatureStatistics(LOOKUPS, ids=IdHistogram.even(500), batch_size=64)  # half of the rows
    known = spanning(effort="quick", statistics=TableStatistics({"t0_f0": hot}))
    assert dict(known.tables())["t0"].sharding_type == "row_wise"
    other = renamed(known, NAMES)
    assert names_that_keep_most(other, known) == (0, 1, 2, 3)
    assert _compared(tmp_path, other, known) == known
    even = TableStatistics({f"t{index}_f0": FeatureStatistics(LOOKUPS) for index in range(10)})
    alike = spanning(effort="quick", statistics=even)
    assert names_that_keep_most(renamed(alike, NAMES), alike) == NAMES


def test_compare_writes_the_plan_with_its_ranks_renamed(plan: SavedPlan, tmp_path: Path) -> None:
    assert _compared(tmp_path, renamed(plan, NAMES), plan) == renamed(plan, NAMES)


def _compared(folder: Path, before: SavedPlan, after: SavedPlan) -> SavedPlan:
    """The plan that the command writes."""
    before.save(folder / "before.json")
    after.save(folder / "after.json")
    run("compare", str(folder / "before.json"), str(folder / "after.json"), "--out", str(folder / "out.json"))
    return replace(SavedPlan.load(folder / "out.json"), name=after.name)


def _bytes(shard: ShardPlace) -> int:
    return shard.size[0] * shard.size[1] * 4
