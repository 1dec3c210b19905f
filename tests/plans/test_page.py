# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reports as one HTML page, read as text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline.jobs import Job, OfflineModel, read_table_list
from dreamshard_planner.plans.page import save_html
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.support.formatting import size_in_words
from tests.cli.test_commands import SMALL, run, run_json

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


class Page(HTMLParser):
    """A page as a browser reads it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text())
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""

    def sections(self) -> list[str | None]:
        return [attributes["id"] for tag, attributes in self.tags if tag == "section"]


def test_every_figure_of_the_report_is_on_the_page(planned: DreamShardPlanner, tmp_path: Path) -> None:
    report = replace(planned.report(), rivals=(*planned.report().rivals, ReportEntry.of("column_greedy", None)))
    save_html(report, path := tmp_path / "report.html", title=f"Plan of {SCRIPT}")
    page = Page(path)
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
    assert page.sections() == ["ranks", "plans", "tables", "memory", "sources"]
    widths = [float(attributes["style"][6:-1]) for tag, attributes in page.tags if tag == "i"]
    assert len(widths) > 20 and all(0 <= width <= 100 for width in widths) and max(widths) == 100


def test_the_page_has_no_script_and_no_address(planned: DreamShardPlanner, tmp_path: Path) -> None:
    save_html(planned.report(), path := tmp_path / "report.html", title=f"Plan of {SCRIPT}")
    page, source = Page(path), path.read_text()
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
    assert page.sections()[0] == "curve" and found.sentence in page.text and "saved.json, re-planned" in page.text


def test_commands_write_pages(tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    shown = run_json("plan", *SMALL, "--out", plan, "--html", page)
    assert f"{shown['report']['chosen']['total_ms']:.3f} ms" in page.read_text()
    assert "256 samples each" in page.read_text()
    assert run_json("report", plan, "--html", page)
    assert "plan.json" in page.read_text()
    refused = run("report", plan, "--html", tmp_path, status=2).output
    assert "cannot be written" in re.sub(r"\W+", " ", refused)
