# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reports, saved plans and re-plans as one HTML page: tables with bars, without scripts or addresses to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from dreamshard_planner import __version__
from dreamshard_planner.planning.replanning import Replan
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report, ReportEntry
from dreamshard_planner.support.files import write_whole
from dreamshard_planner.support.formatting import ranges, size_in_words

PARTS = ("forward", "backward", "waiting for the slowest rank", "collectives")
"""Parts of a rank's step, in the order of a bar's colours (page.css)."""


def save_html(subject: Report | SavedPlan | Replan, path: str | Path, title: str | None = None) -> None:
    """Write one HTML file that needs neither network nor scripts; an existing one is replaced as a whole.

    Args:
        subject: a report; a plan from a file, whose page also lists its inputs; or a re-plan, whose page begins with
            the curve of cost against bytes moved.
        path: of the file.
        title: what was planned; ``Sharding plan``, or the name of the saved plan, by default.

    Raises:
        FileError: the file can't be written.
    """
    saved = subject.plan if isinstance(subject, Replan) else subject
    if isinstance(saved, SavedPlan):
        report, facts, name = saved.report(), _facts(saved), saved.name
    else:
        report, facts, name = saved, [], "Sharding plan"
    headline = f"{report.headline} {report.verdict}."
    if isinstance(subject, Replan):
        headline, name = subject.sentence, f"{subject.before}, re-planned"
    title = title or name
    sections = [
        *([_curve(subject)] if isinstance(subject, Replan) else []),
        _ranks(report.chosen, report.collectives),
        *([_plans(report)] if report.rivals else []),
        *([_tables(report)] if report.tables else []),
        *([_memory(report)] if report.memory else []),
    ]
    style = resources.files("dreamshard_planner").joinpath("planning/page.css").read_text()
    facts += [("compute", report.cost_source), ("collectives", report.collectives_source)]
    facts += [("search", f"{report.candidates:,} moves and swaps, {report.reshards:,} re-shards evaluated")]
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(title)} - dreamshard_planner</title><style>{style}</style></head><body>",
        f'<p class="soft">Sharding report of dreamshard_planner {__version__}</p><h1>{_text(title)}</h1>',
        f"<p>{_text(headline)}</p>",
        *sections,
        '<section id="sources"><h2>Where the figures come from</h2><dl>',
        *(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts),
        "</dl><ul>",
        *(f"<li>{_text(str(note))}.</li>" for note in report.notes),
        "</ul></section></body></html>",
    ]
    write_whole(path, "\n".join(lines))


Row = tuple[Sequence[str], Sequence[float]]
"""Texts of cells, and the parts of the stacked bar in the last one."""


def _section(
    name: str, title: str, finding: str, columns: Sequence[str], rows: Sequence[Row], full: float | None = None
) -> str:
    """Return a table; a bar of ``full``, by default the longest one, fills its cell."""
    full = full or max((sum(bar) for _, bar in rows), default=0.0) or 1.0
    head = "".join(f"<th>{_text(column)}</th>" for column in (*columns, ""))
    lines = []
    for texts, bar in rows:
        cells = "".join(f"<td>{_text(text)}</td>" for text in texts)
        parts = "".join(f'<i style="width:{min(1.0, part / full):.2%}"></i>' for part in bar)
        lines.append(f'<tr>{cells}<td class="bar">{parts}</td></tr>')
    body = "\n".join(lines)
    return (
        f'<section id="{name}"><h2>{_text(title)}</h2><p>{_text(finding)}</p><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div></section>"
    )


def _text(text: str) -> str:
    """Escape a text, and replace what cannot be printed: names are the user's."""
    return escape("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text))


def _curve(replan: Replan) -> str:
    rows: list[Row] = [
        ((f"{tables}", moved, to_one, f"{step_ms:.3f}", f"{seconds:,.1f}"), [step_ms])
        for tables, moved, to_one, step_ms, seconds in replan.rows()
    ]
    finding = "Each line is a plan: what has to move to reach it, and its milliseconds per training step."
    return _section("curve", "Cost against bytes moved", finding, replan.COLUMNS, rows)


def _ranks(chosen: ReportEntry, collectives: Sequence[tuple[str, float]]) -> str:
    rows: list[Row] = []
    for rank, (forward_ms, backward_ms, waiting_ms) in enumerate(
        zip(chosen.forward_ms, chosen.backward_ms, chosen.waiting_ms, strict=True)
    ):
        shown_ms = (forward_ms, backward_ms, forward_ms + backward_ms, waiting_ms)
        bar = (forward_ms, backward_ms, waiting_ms, chosen.collectives_ms)
        rows.append(((f"{rank}", *(f"{ms:.3f}" for ms in shown_ms)), bar))
    sent = ", ".join(f"{name} {ms:.3f} ms" for name, ms in collectives)
    finding = (
        f"Rank {chosen.slowest} computes longest, {max(chosen.rank_ms):.3f} ms; collectives take "
        f"{chosen.collectives_ms:.3f} ms on all{f' ({sent})' if sent else ''}; in all {chosen.total_ms:.3f} ms. "
        f"Bars, from the left: {', '.join(PARTS)}."
    )
    columns = ("rank", "forward ms", "backward ms", "compute ms", "waiting ms")
    return _section("ranks", "Each rank's step", finding, columns, rows, chosen.total_ms)


def _plans(report: Report) -> str:
    rows: list[Row] = []
    for plan in (report.chosen, *report.rivals):
        if plan.feasible:
            figures = plan.total_ms, plan.times(report.chosen), max(plan.rank_ms), plan.collectives_ms
            rows.append(((plan.name, *(f"{figure:.3f}" for figure in figures)), [plan.total_ms]))
        else:
            rows.append(((plan.name, "does not fit", "", "", ""), [0.0]))
    finding = "Totals of the chosen plan, of TorchRec's own plan and of greedy rules, by the same cost source."
    columns = ("plan", "total ms", "vs chosen", "slowest rank's compute ms", "collectives ms")
    return _section("plans", "Against other plans", finding, columns, rows)


def _tables(report: Report) -> str:
    rows: list[Row] = [
        (
            (table.name, table.label, f"{len(table.ranks):,}", ranges(table.ranks), f"{table.alone_ms:,.3f}"),
            [table.alone_ms],
        )
        for table in sorted(report.tables, key=lambda table: -table.alone_ms)
    ]
    finding = "Tables by the milliseconds that their shards would take if each had its rank for itself."
    return _section("tables", "Tables", finding, ("table", "sharding", "shards", "ranks", "ms by itself"), rows)


def _memory(report: Report) -> str:
    rows: list[Row] = [
        ((f"{rank}", entry.kind, size_in_words(used), size_in_words(max(0, limit))), [used / max(1, limit)])
        for entry in report.memory
        for rank, (used, limit) in enumerate(zip(entry.used_bytes, entry.limit_bytes, strict=True))
    ]
    finding = "Memory of tables on each rank, of what the storage reservation leaves them."
    return _section("memory", "Memory against the limit", finding, ("rank", "memory", "used", "limit"), rows, 1.0)


def _facts(saved: SavedPlan) -> list[tuple[str, str]]:
    """Return what a plan was made from: names and values."""
    inputs = saved.inputs
    return [
        ("ranks", str(inputs.topology)),
        ("samples per rank", f"{inputs.batch_size:,}"),
        ("statistics", inputs.statistics or "none"),
        *((name, str(value)) for name, value in inputs.settings.items()),
        *saved.libraries.items(),
    ]
