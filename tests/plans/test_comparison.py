# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Two plans beside each other, and names of ranks by which most bytes stay where they are."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_models import SHARDERS, collection, planner, table
from torchrec.distributed.planner.types import ParameterConstraints, Topology

from dreamshard_planner import PlacementRules, SavedPlan, ShardingGroups, compare
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline.jobs import Job, OfflineModel, TableSpec
from dreamshard_planner.plans.plan_file import ShardPlace
from dreamshard_planner.plans.replan import names_that_keep_most, renamed
from tests.cli.test_commands import run

ROWS, DIM, TABLES = 100_000, 64, 4
TABLE_BYTES = ROWS * DIM * 4


def saved(path: Path, groups: ShardingGroups | None = None) -> SavedPlan:
    """Whole tables on eight GPUs of two hosts."""
    specs = [
        TableSpec(
            name=f"t{index}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=(f"f{index}",), pooling_factor=5.0
        )
        for index in range(TABLES)
    ]
    settings = {"effort": "quick", "sharding_types": ["table_wise"], "sharding_groups": groups}
    machine = Machine(ranks_per_host=4, hosts=2, gpu="h100")
    job = Job(model=OfflineModel.of_specs(specs), machine=machine, batch_size=256, settings=settings)
    job.plan().save_plan(path)
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
    text = run("report", tmp_path / "two.json").stdout
    assert "8 cuda ranks in 2 sharding groups of 4, 4 on a host" in text


def test_files_have_the_names_that_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("monday", "tuesday"):
        (tmp_path / folder).mkdir()
        saved(tmp_path / folder / "plan.json")
    monkeypatch.chdir(tmp_path)
    found = compare("monday/plan.json", Path("tuesday/plan.json"))
    assert (found.before, found.after) == ("monday/plan.json", "tuesday/plan.json")
    assert found.before in str(found) and found.after in str(found)


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
        topology=Topology(4, "cuda", local_world_size=2), constraints=constraints, exact_training=False, **given
    )
    made.plan(collection(*(table(f"t{index}", 1000 * (index + 1), 32) for index in range(10))), SHARDERS)
    return made.saved_plan()


def held(plan: SavedPlan) -> dict[str, tuple[ShardPlace, ...]]:
    return {name: sharding.shards for name, sharding in plan.tables()}


@pytest.fixture(scope="module")
def plan() -> SavedPlan:
    return spanning(effort="quick")


def test_a_plan_under_other_names_gets_them_back(plan: SavedPlan) -> None:
    other = renamed(plan, NAMES)
    tables = dict(other.tables())
    assert [shard.rank for shard in tables["t0"].shards] == [0, 1, 2, 3]
    assert [shard.rank % 2 for shard in tables["t1"].shards] == [0, 1]
    assert other.sharding != plan.sharding and names_that_keep_most(held(other), plan) == NAMES
    assert names_that_keep_most(held(plan), plan) == (0, 1, 2, 3) and renamed(plan, (0, 1, 2, 3)) is plan


def test_ranks_that_rules_name_and_ranks_of_other_memory_keep_theirs(plan: SavedPlan) -> None:
    ruled = spanning(effort="quick", placement_rules=PlacementRules(on_ranks={"t5": [0, 1]}))
    assert names_that_keep_most(held(renamed(ruled, NAMES)), ruled) == (0, 1, 2, 3)
    topology = replace(plan.inputs.topology, memory_bytes={"HBM": (1, 2, 3, 3), "DDR": (1,) * 4, "SSD": (0,) * 4})
    uneven = replace(plan, inputs=replace(plan.inputs, topology=topology))
    assert names_that_keep_most(held(renamed(uneven, (0, 1, 3, 2))), uneven) == (0, 1, 3, 2)
    assert names_that_keep_most(held(renamed(uneven, NAMES)), uneven)[:2] == (0, 1)
