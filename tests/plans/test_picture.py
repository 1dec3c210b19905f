# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reports as one HTML file and as PNGs: opened in a browser where there is one, read as text everywhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from matplotlib import rc_context, rcParams
from typer.testing import CliRunner

from dreamshard_planner.cli import app
from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.offline.jobs import Job, OfflineModel, PlannedJob
from dreamshard_planner.offline.table_list import read_table_list
from dreamshard_planner.plans.picture import save_html
from dreamshard_planner.plans.picture.drawing import COLOURS
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import MemoryEntry, Report, ReportEntry, TableEntry
from tests.faults import PATIENCE_SECONDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "tables.json"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCRIPT, FORMULA = "<script>alert('x')</script>", "$price_{a}$ \\frac & <b>"
FIGURES = ["ranks", "plans", "tables", "memory"]


@pytest.fixture(scope="module")
def planned() -> PlannedJob:
    """The example's tables, two of them with names to stumble over."""
    specs = read_table_list(EXAMPLE)
    specs[0], specs[1] = replace(specs[0], name=SCRIPT), replace(specs[1], name=FORMULA)
    machine = Machine(ranks_per_host=2, gpu="a100-80")
    settings = {"effort": "quick", "stats": [], "debug": False}
    return Job(model=OfflineModel.of_specs(specs), machine=machine, batch_size=256, settings=settings).plan()


@pytest.fixture(scope="module")
def report(planned: PlannedJob) -> Report:
    """With a rival that does not fit."""
    return replace(planned.report, rivals=(*planned.report.rivals, ReportEntry.of("column_greedy", None)))


@pytest.fixture(scope="module")
def file(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.save_html(path, title=f"Plan of {SCRIPT}")
    return path


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def browse(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The page in a browser without a screen; the console is on stderr."""
    if BROWSER is None:
        pytest.skip("there is no Chromium to open the page with")
    profile = path.parent / "profile"
    settings = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}")
    command = [BROWSER, *settings, *options, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)


def test_every_figure_of_the_report_is_on_the_page(report: Report, file: Path) -> None:
    text = " ".join(Page(file).text)
    entries = [entry for entry in (report.chosen, *report.rivals) if entry.feasible]
    shown = [value for entry in entries for value in (*entry.rank_ms, entry.collectives_ms)]
    shown += [entry.total_ms for entry in (report.chosen, *report.rivals) if entry.feasible]
    shown += [*report.chosen.forward_ms, *report.chosen.backward_ms]
    shown += [table.alone_ms for table in report.tables] + [value for _, value in report.collectives]
    assert len(shown) > 30
    assert not [value for value in shown if f"{value:.3f}" not in text]
    words = [
        report.cost_source,
        report.collectives_source,
        *map(str, report.notes),
        *(name for name, _ in report.collectives),
    ]
    words += [entry.name for entry in report.rivals] + [
        f"{report.candidates:,}",
        "does not fit",
        "nothing was measured",
    ]
    words += [name for table in report.tables for name in (table.name, table.label)]
    assert not [word for word in words if word not in text]
    for entry in report.memory:
        assert f"{max(entry.used_bytes) / 2**30:.2f} GiB" in text and f"{entry.limit_bytes[0] / 2**30:.2f} GiB" in text


def test_the_page_holds_all_it_needs_and_no_script(file: Path) -> None:
    page, source = Page(file), file.read_text()
    assert "http:" not in source and "https:" not in source and "@import" not in source
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src")]
    assert len(addresses) > 10 and all(address.startswith("#") or address == "data:," for address in addresses)
    targets = {address[1:] for address in addresses if address.startswith("#")} | set(
        re.findall(r"url\(#(.*?)\)", source)
    )
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert targets <= set(ids) and len(set(ids)) == len(ids)
    assert not page.named("script") and not [name for _, given in page.tags for name in given if name.startswith("on")]
    assert any(SCRIPT in text for text in page.text) and any(FORMULA in text for text in page.text)


def test_figures_speak_and_take_the_colours_of_the_page(file: Path) -> None:
    page, source = Page(file), file.read_text()
    figures = page.named("svg")
    assert len(figures) == len(FIGURES) and all(figure["role"] == "img" and figure["aria-label"] for figure in figures)
    assert len(page.named("details")) >= len(FIGURES)  # each has its numbers as a table
    drawn = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert not re.findall(r"#[0-9a-f]{6}\b", drawn)
    assert set(re.findall(r"var\(--(\w+)\)", source)) == set(COLOURS) - {"sky"}  # no table_row_wise on one host
    for theme in (0, 1):
        colours = {name: pair[theme] for name, pair in COLOURS.items()}
        assert min(contrast(colours[name], colours["paper"]) for name in ("ink", "soft", "blue")) > 4.5  # WCAG AA


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours."""
    brightness = []
    for colour in (one, other):
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        brightness.append(sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(brightness) + 0.05) / (min(brightness) + 0.05)


def test_a_browser_opens_it_without_a_complaint(file: Path) -> None:
    opened = browse(file, "--dump-dom")
    assert "CONSOLE" not in opened.stderr, opened.stderr
    assert all(f'id="{name}-section"' in opened.stdout for name in FIGURES)
    worse = file.with_name("worse.html")
    worse.write_text(
        file.read_text().replace("</main>", "<script>fail()</script><img src='https://a.example/b'></main>")
    )
    assert browse(worse, "--dump-dom").stderr.count("Content Security Policy") >= 2  # what the check would see


def test_a_browser_prints_it(file: Path) -> None:
    printed = file.with_suffix(".pdf")
    browse(file, f"--print-to-pdf={printed}")
    assert printed.read_bytes().startswith(b"%PDF")


def test_one_report_makes_one_file_whatever_the_style_of_the_user(report: Report, file: Path) -> None:
    again = file.with_name("again.html")
    with rc_context({"axes.facecolor": "#123456", "svg.fonttype": "path", "text.usetex": True}):
        save_html(report, again, title=f"Plan of {SCRIPT}")
        assert again.read_bytes() == file.read_bytes()
        assert rcParams["axes.facecolor"] == "#123456"


def test_pngs_are_of_the_same_figures(report: Report, tmp_path: Path) -> None:
    files = report.save_png(tmp_path / "new" / "folder")
    assert [path.stem for path in files] == FIGURES
    for path in files:
        head = path.read_bytes()[:24]
        assert head.startswith(b"\x89PNG") and int.from_bytes(head[16:20]) > 1200


def test_a_thousand_ranks_and_a_plan_without_tables(report: Report, tmp_path: Path) -> None:
    many = tuple(1.0 + rank / 1024 for rank in range(1024))
    chosen = ReportEntry("dreamshard", 4.0, 1.0, many, many)
    memory = (MemoryEntry("HBM", (2**30,) * 1024, (2**32,) * 1024),)
    table = TableEntry("a" * 500, "row_wise", "fused", tuple(range(1024)), (0.001,) * 1024)
    wide = replace(report, chosen=chosen, rivals=(), memory=memory, tables=(table,))
    wide.save_html(tmp_path / "wide.html")
    text = " ".join(Page(tmp_path / "wide.html").text)
    assert "0-1023" in text and f"{many[1000]:.3f}" in text and "a" * 500 in text
    drawn = re.findall(r"<svg.*?</svg>", (tmp_path / "wide.html").read_text(), re.DOTALL)
    assert len(drawn) == 3 and max(map(len, drawn)) < 300_000  # areas, not thousands of bars

    nothing = ReportEntry("dreamshard", 0.0, 0.0, (0.0,), (0.0,))
    empty = replace(report, chosen=nothing, rivals=(nothing,), memory=(), tables=())
    empty.save_html(tmp_path / "empty.html")
    assert 'id="tables-section"' not in (tmp_path / "empty.html").read_text()


def test_a_saved_plan_shows_what_its_report_does_and_what_it_was_made_from(planned: PlannedJob, tmp_path: Path) -> None:
    saved: SavedPlan = planned.planner.saved_plan(name="saved.json")
    save_html(saved, tmp_path / "saved.html")
    fresh, text = planned.report, " ".join(Page(tmp_path / "saved.html").text)
    assert "saved.json" in text and saved.libraries["torch"] in text
    shown = [*saved.predicted.chosen.forward_ms, *(table.alone_ms for table in fresh.tables)]
    shown += [rival.total_ms for rival in fresh.rivals if rival.feasible]
    assert not [ms for ms in shown if f"{ms:.3f}" not in text]
    given = replace(saved, predicted=replace(saved.predicted, rivals=()))
    save_html(given, tmp_path / "given.html")
    assert "Against other" in text and "Against other" not in " ".join(Page(tmp_path / "given.html").text)


def test_commands_write_pictures(tmp_path: Path) -> None:
    def dreamshard(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == status, result.output
        return result.output if status else result.stdout

    job = ("--tables", str(EXAMPLE), "--gpus", "2", "--gpu", "h100", "--batch-size", "256", "--effort", "quick")
    plan, page, folder = tmp_path / "plan.json", tmp_path / "plan.html", tmp_path / "figures"
    shown = dreamshard("plan", *job, "--out", str(plan), "--html", str(page), "--format", "json")
    assert f"{json.loads(shown)['report']['chosen']['total_ms']:.3f} ms" in page.read_text()
    assert "256 samples each" in page.read_text()
    assert json.loads(dreamshard("report", str(plan), "--html", str(page), "--png", str(folder), "--format", "json"))
    assert "plan.json" in page.read_text()
    assert {path.name for path in folder.iterdir()} == {"ranks.png", "plans.png", "tables.png", "memory.png"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        patch.setattr("dreamshard_planner.offline.jobs.Job.plan", None)  # asked for before anything is planned
        assert "there is no jinja2" in dreamshard("plan", *job, "--html", str(page), status=1)
    refused = dreamshard("report", str(plan), "--html", str(folder), status=2)
    assert "cannot be written" in re.sub(r"\W+", " ", refused)


def test_what_is_missing_is_said(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        DreamShardError, match=r"need matplotlib and jinja2, and there is no matplotlib.*dreamshard_planner\[report\]"
    ):
        report.save_html(tmp_path / "report.html")
