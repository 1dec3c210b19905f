# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The HTML page of a report, one file without scripts and with nothing to fetch; its parts: a figure, what it says in
words, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from dreamshard_planner import __version__
from dreamshard_planner.plans.picture import charts
from dreamshard_planner.plans.picture.content import Content, ms
from dreamshard_planner.plans.picture.drawing import COLOURS, svg
from dreamshard_planner.plans.replan import Replan
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.plans.verdict import LEVEL
from dreamshard_planner.support.formatting import ranges, ranks_in_words, size_in_words


@dataclass(frozen=True)
class Grid:
    """Numbers as rows under names of columns."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Section:
    """One figure."""

    name: str
    """For files and links."""
    title: str
    caption: str
    """What it shows."""
    finding: str
    """What it comes to; with the title, what a screen reader says of it."""
    draw: Callable[[], Figure]
    grids: tuple[Grid, ...]


def page(content: Content, sections: Sequence[Section]) -> str:
    """The HTML of a report; names are escaped wherever they come from."""
    environment = Environment(
        loader=PackageLoader("dreamshard_planner", "plans/picture"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {
        section.name: svg(section.draw, section.name, f"{section.title}. {section.finding}") for section in sections
    }
    return environment.get_template("page.html").render(
        content=content, sections=sections, figures=figures, colours=COLOURS, version=__version__
    )


def sections(content: Content) -> tuple[Section, ...]:
    """Those that there is something to show in."""
    found = [] if content.replan is None else [_curve(content.replan)]
    found.append(_ranks(content))
    if content.report.rivals:
        found.append(_plans(content))
    if content.tables:
        found.append(_tables(content))
    if content.report.memory:
        found.append(_memory(content))
    return tuple(found)


def _curve(replan: Replan) -> Section:
    rows = [
        (f"{tables}", moved, most, f"{ms:.3f}", f"{seconds:,.1f}") for tables, moved, most, ms, seconds in replan.rows()
    ]
    return Section(
        name="curve",
        title="Cost against bytes moved",
        caption="Each point is a plan. Weights that ranks get from others or from a checkpoint, all ranks together, "
        "against the milliseconds of embedding work of a training step.",
        finding=replan.sentence,
        draw=partial(charts.curve, replan),
        grids=(Grid("Each plan", replan.COLUMNS, rows),),
    )


def _ranks(content: Content) -> Section:
    chosen, waiting_ms = content.chosen, content.chosen.waiting_ms
    last, most_ms = chosen.slowest, max(waiting_ms)
    longest = f"Rank {last} computes longest, {ms(chosen.rank_ms[last])}"
    if most_ms > LEVEL * chosen.rank_ms[last]:
        longest += f"; rank {waiting_ms.index(most_ms)} waits longest, {ms(most_ms)}"
    elif content.world_size > 1:
        longest = f"Ranks are level: each computes {ms(chosen.rank_ms[last])}, or up to {ms(most_ms)} less"
    rows = [
        (f"{rank}", *(f"{value:.3f}" for value in values), f"{chosen.collectives_ms:.3f}")
        for rank, values in enumerate(
            zip(chosen.forward_ms, chosen.backward_ms, chosen.rank_ms, waiting_ms, strict=True)
        )
    ]
    grids = [Grid("Each rank", ("rank", "forward", "backward", "compute", "waiting", "collectives"), rows)]
    if content.report.collectives:
        each = [(name, f"{value:.3f}") for name, value in content.report.collectives]
        grids.append(Grid("Each collective, forward and backward together", ("collective", "ms"), each))
    return Section(
        name="ranks",
        title="Each rank's step",
        caption="Milliseconds of embedding work in one training step. A rank that is done computing waits for the "
        "slowest one; collectives then take as long on all.",
        finding=f"{longest}; collectives take {ms(chosen.collectives_ms)}.",
        draw=partial(charts.ranks, content),
        grids=tuple(grids),
    )


def _plans(content: Content) -> Section:
    infeasible = sum(not entry.feasible for entry in content.report.rivals)
    best = min(content.report.rivals, key=lambda entry: entry.total_ms)
    finding = f"The chosen plan takes {ms(content.chosen.total_ms)}."
    if best.feasible:
        finding += f" The best of the others, {best.name}, takes {ms(best.total_ms)}."
    if infeasible:
        finding += f" {infeasible} of the others do not fit into memory."
    fitting = [entry for entry in content.plans if entry.feasible]
    rows = [(f"{rank}", *(f"{entry.rank_ms[rank]:.3f}" for entry in fitting)) for rank in range(content.world_size)]
    return Section(
        name="plans",
        title="Against other plans",
        caption="Predicted totals by the same cost source: TorchRec's own plan, the policy's draft, and greedy rules.",
        finding=finding,
        draw=partial(charts.plans, content),
        grids=(
            Grid("Each plan", PLAN_COLUMNS, [_plan_row(entry, content.chosen) for entry in content.plans]),
            Grid("Compute of each rank under each plan, ms", ("rank", *(entry.name for entry in fitting)), rows),
        ),
    )


PLAN_COLUMNS = ("plan", "total ms", "vs chosen", "slowest rank", "its compute ms", "mean waiting ms", "collectives")


def _plan_row(entry: ReportEntry, chosen: ReportEntry) -> tuple[str, ...]:
    if not entry.feasible:
        return (entry.name, "does not fit", "", "", "", "", "")
    return (
        entry.name,
        f"{entry.total_ms:.3f}",
        f"{entry.times(chosen):.3f}",
        f"{entry.slowest}",
        f"{max(entry.rank_ms):.3f}",
        f"{sum(entry.waiting_ms) / len(entry.rank_ms):.3f}",
        f"{entry.collectives_ms:.3f}",
    )


def _tables(content: Content) -> Section:
    shown = content.tables[: charts.MAX_TABLES]
    costliest = shown[0]
    more = f", the first {len(shown)} of {len(content.tables):,}" if len(shown) < len(content.tables) else ""
    several = any(len(set(table.ranks)) < len(table.ranks) for table in shown)
    counted = " A number in a cell counts shards on that rank." if several else ""
    rows = [
        (table.name, table.label, f"{len(table.ranks):,}", ranges(table.ranks), f"{table.alone_ms:,.3f}")
        for table in content.tables
    ]
    columns = ("table", "sharding", "shards", "ranks", "ms by itself")
    return Section(
        name="tables",
        title="The costliest tables, and where their shards went",
        caption="Tables by what a table's shards would cost if each had its rank for itself, in milliseconds, all "
        f"ranks together{more}.{counted}",
        finding=f"{costliest.name}, {costliest.label} on {ranks_in_words(costliest.ranks)}, is first with "
        f"{costliest.alone_ms:,.3f} ms by itself.",
        draw=partial(charts.tables, content),
        grids=(Grid(f"Every table ({len(content.tables):,})", columns, rows),),
    )


def _memory(content: Content) -> Section:
    findings, columns = [], ["rank"]
    for entry in content.report.memory:
        rank = entry.fullest
        used, limit = entry.used_bytes[rank], max(0, entry.limit_bytes[rank])
        findings.append(f"{entry.kind}: rank {rank} is the fullest, {size_in_words(used)} of {size_in_words(limit)}.")
        columns += [f"{entry.kind} used", f"{entry.kind} limit"]
    sizes = [of_rank for entry in content.report.memory for of_rank in (entry.used_bytes, entry.limit_bytes)]
    rows = [
        (f"{rank}", *(size_in_words(max(0, of_rank[rank])) for of_rank in sizes)) for rank in range(content.world_size)
    ]
    return Section(
        name="memory",
        title="Memory against the limit",
        caption="What tables take on each rank, of what the storage reservation leaves them.",
        finding=" ".join(findings),
        draw=partial(charts.memory, content),
        grids=(Grid("Each rank", tuple(columns), rows),),
    )
