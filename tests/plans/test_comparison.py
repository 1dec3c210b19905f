# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans beside each other, re-named ranks, and reports as one HTML page."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import small_models
from small_models import SHARDERS, collection, planner, table
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from dreamshard_planner import DreamShardPlanner, PlacementRules, SavedPlan, ShardingGroups, compare
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline.jobs import Job, OfflineModel, read_table_list
from dreamshard_planner.planning.page import save_html
from dreamshard_planner.plans.comparison import names_that_keep_most, renamed
from dreamshard_planner.plans.plan_file import ShardPlace
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.support.formatting import size_in_words
from tests.cli.test_commands import run

ROWS, DIM, TABLES = 100_000, 64, 4
TABLE_BYTES = ROWS * DIM * 4


def saved(path: Path, groups: ShardingGroups | None = None) -> SavedPlan:
    """Whole tables on eight GPUs of two hosts."""
    model = collection(*(table(f"t{index}", ROWS, DIM) for index in range(TABLES)))
    gpus = Machine(ranks_per_host=4, hosts=2, gpu="h100").topology()
    given = {"sharding_types": ["table_wise"], "sharding_groups": groups, "batch_size": 256}
    small_models.planned(model, topology=gpus, **given).save_plan(path)
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


def test_tables_of_another_optimizer_stay(plan: SavedPlan) -> None:
    """Their weights may be reused."""
    tables = {name: replace(one, optimizer="adam") for name, one in plan.inputs.tables.items()}
    found = compare(plan, replace(plan, inputs=replace(plan.inputs, tables=tables)))
    assert found.unchanged == len(tables) and not found.only_before + found.only_after
    assert any("optimizer of table" in text for text in found.inputs)


def test_what_is_no_plan_with_costs_is_refused(plan: SavedPlan) -> None:
    with pytest.raises(TypeError, match=r"compare takes files, or plans of .*saved_plan, got ShardingPlan"):
        compare(plan, ShardingPlan({}))


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


EXAMPLE = Path(__file__).parents[2] / "examples" / "tables.json"
SCRIPT, FORMULA = "<script>alert('x')</script>", "$price_{a}$ \\frac & <b>"


@pytest.fixture(scope="module")
def planned() -> DreamShardPlanner:
    """The example's tables, two of them with names to stumble over."""
    specs = read_table_list(EXAMPLE)
    specs[0], specs[1] = replace(specs[0], name=SCRIPT), replace(specs[1], name=FORMULA)
    machine = Machine(ranks_per_host=2, gpu="a100-80")
    settings = {"effort": "quick", "stats": [], "debug": False}
    return Job(model=OfflineModel.of_specs(specs), machine=machine, batch_size=256, settings=settings).plan()


class Page:
    """A page with all tags closed but those that never are."""

    def __init__(self, path: Path) -> None:
        root = ElementTree.fromstring(re.sub("<(!doctype|meta)[^>]*>", "", path.read_text()))
        self.tags = [(element.tag, element.attrib) for element in root.iter()]
        self.text = "".join(root.itertext())
        self.sections = [attributes["id"] for tag, attributes in self.tags if tag == "section"]


def test_every_figure_is_on_a_page_without_script_and_address(planned: DreamShardPlanner, tmp_path: Path) -> None:
    report = replace(planned.report(), rivals=(*planned.report().rivals, ReportEntry.of("column_greedy", None)))
    save_html(report, path := tmp_path / "report.html", title=f"Plan of {SCRIPT}")
    page, source = Page(path), path.read_text()
    plans = [entry for entry in (report.chosen, *report.rivals) if entry.feasible]
    shown = [value for entry in plans for value in (max(entry.rank_ms), entry.collectives_ms, entry.total_ms)]
    shown += [*report.chosen.forward_ms, *report.chosen.backward_ms, *report.chosen.waiting_ms]
    shown += [table.alone_ms for table in report.tables] + [value for _, value in report.collectives]
    assert len(shown) > 30 and not [value for value in shown if f"{value:.3f}" not in page.text]
    words = [report.verdict, report.cost_source, report.collectives_source, "does not fit", "nothing was measured"]
    words += [*map(str, report.notes), *(entry.name for entry in report.rivals), f"{report.candidates:,}"]
    words += [name for table in report.tables for name in (table.name, table.label)]
    words += [size_in_words(count) for entry in report.memory for count in (*entry.used_bytes, *entry.limit_bytes)]
    assert not [word for word in words if word not in page.text]
    assert page.sections == ["ranks", "plans", "tables", "memory", "sources"]
    widths = [float(attributes["style"][6:-1]) for tag, attributes in page.tags if tag == "i"]
    assert len(widths) > 20 and all(0 <= width <= 100 for width in widths) and max(widths) == 100
    assert "http:" not in source and "https:" not in source and "@import" not in source and "url(" not in source
    assert "script" not in {tag for tag, _ in page.tags}
    assert not {"href", "src"} & {name for _, given in page.tags for name in given}
    assert SCRIPT in page.text and FORMULA in page.text


def test_pages_of_saved_plans_and_replans(planned: DreamShardPlanner, tmp_path: Path) -> None:
    saved = planned.saved_plan(name="saved.json")
    save_html(saved, tmp_path / "saved.html")
    text = Page(tmp_path / "saved.html").text
    assert "saved.json" in text and saved.libraries["torch"] in text and str(saved.inputs.topology) in text
    assert all(f"{value:.3f}" in text for value in saved.predicted.chosen.forward_ms)
    found = planned.replan(saved, steps=1000)
    save_html(found, tmp_path / "replan.html")
    page = Page(tmp_path / "replan.html")
    assert page.sections[0] == "curve" and found.sentence in page.text and "saved.json, re-planned" in page.text
