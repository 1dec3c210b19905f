# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Two plans beside each other, on ranks that form other sharding groups."""

from pathlib import Path

import pytest

from dreamshard_planner import SavedPlan, ShardingGroups, compare
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline.jobs import Job, OfflineModel, TableSpec
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
    text = run("report", str(tmp_path / "two.json")).stdout
    assert "8 cuda ranks in 2 sharding groups of 4, 4 on a host" in text


def test_files_have_the_names_that_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("monday", "tuesday"):
        (tmp_path / folder).mkdir()
        saved(tmp_path / folder / "plan.json")
    monkeypatch.chdir(tmp_path)
    found = compare("monday/plan.json", Path("tuesday/plan.json"))
    assert (found.before, found.after) == ("monday/plan.json", "tuesday/plan.json")
    assert found.before in str(found) and found.after in str(found)
