# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The figures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dreamshard_planner.plans.picture import drawing
from dreamshard_planner.plans.picture.content import Content, ms
from dreamshard_planner.plans.replan import Replan
from dreamshard_planner.plans.report import MemoryEntry, TableEntry
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.formatting import runs

MAX_BARS = 64
"""Ranks up to which each has a bar of its own; more become areas."""
MAX_TABLES = 20
MAX_NAME = 36
"""Characters of a name in a figure."""
ROW_INCHES = 0.3
PALETTE = (drawing.BLUE, drawing.ORANGE, drawing.VERMILION, drawing.GREEN, drawing.SKY, drawing.PURPLE, drawing.INK)
"""Of sharding types, in their order."""
PARTS = {
    "forward of the slowest rank": drawing.BLUE,
    "backward of the slowest rank": drawing.ORANGE,
    "collectives": drawing.GREEN,
}
"""Of a plan's total."""


def curve(replan: Replan) -> Figure:
    """What a step costs by what has moved; the chosen plan, and one made afresh."""
    figure = Figure((drawing.WIDTH_INCHES, 3.9), layout="constrained")
    axes = figure.subplots()
    unit, name = _unit(max(1, replan.afresh.bytes_moved, *(move.bytes_moved for move in replan.curve)))
    points = [(move.bytes_moved / unit, move.step_ms) for move in replan.curve]
    axes.step(*zip(*points, strict=True), where="post", color=drawing.BLUE, marker="o", label="re-planned")
    for move, label, colour, marker in (
        (replan.afresh, "planned afresh", drawing.ORANGE, "s"),
        (replan.chosen, "chosen", drawing.VERMILION, "D"),
    ):
        axes.plot(move.bytes_moved / unit, move.step_ms, marker, color=colour, markersize=8, label=label)
    axes.set_xlabel(f"{name} of weights moved")
    axes.set_ylabel("ms per training step")
    axes.set_ylim(0, max(step_ms for _, step_ms in points) * 1.1 or 1.0)
    axes.grid(axis="y")
    _legend(axes)
    return figure


def ranks(content: Content) -> Figure:
    """What each rank does in a step, one after the other."""
    figure, axes = _ranks_axes(content.world_size, "ms per training step")
    chosen = content.chosen
    stacked = {
        "forward": (chosen.forward_ms, drawing.BLUE),
        "backward": (chosen.backward_ms, drawing.ORANGE),
        "waiting for the slowest rank": (chosen.waiting_ms, drawing.GREY),
        "collectives": ([chosen.collectives_ms] * content.world_size, drawing.GREEN),
    }
    base = [0.0] * content.world_size
    for label, (values, colour) in stacked.items():
        _layer(axes, base, values, colour, label)
        base = [low + value for low, value in zip(base, values, strict=True)]
    axes.set_ylim(0, chosen.total_ms * 1.05 or 1.0)
    _legend(axes)
    return figure


def memory(content: Content) -> Figure:
    """Used and limit of each rank, for each kind of memory."""
    figure = Figure((drawing.WIDTH_INCHES, 2.6 * len(content.report.memory)), layout="constrained")
    every = figure.subplots(len(content.report.memory), 1, squeeze=False)[:, 0]
    for axes, entry in zip(every, content.report.memory, strict=True):
        _memory_of_kind(axes, entry)
    every[-1].set_xlabel("rank")
    return figure


def plans(content: Content) -> Figure:
    """Totals of the chosen plan and of each rival: the slowest rank's compute, and collectives."""
    figure = Figure((drawing.WIDTH_INCHES, 1.1 + ROW_INCHES * len(content.plans)), layout="constrained")
    axes = figure.subplots()
    for row, entry in enumerate(content.plans):
        if not entry.feasible:
            _beside(axes, 0, row, "does not fit", color=drawing.SOFT)
            continue
        parts_ms = (entry.forward_ms[entry.slowest], entry.backward_ms[entry.slowest], entry.collectives_ms)
        left = 0.0
        for value, colour in zip(parts_ms, PARTS.values(), strict=True):
            axes.barh(row, value, left=left, color=colour, height=0.68)
            left += value
        label = ms(entry.total_ms) + (f", \N{MULTIPLICATION SIGN} {entry.times(content.chosen):.3f}" if row else "")
        _beside(axes, left, row, label, fontweight="normal" if row else "bold")
    longest_ms = max((entry.total_ms for entry in content.plans if entry.feasible), default=0.0)
    axes.set_xlim(0, longest_ms * 1.22 or 1.0)
    _rows(axes, [_short(entry.name) for entry in content.plans])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set_xlabel("ms per training step")
    _legend(axes, [Patch(color=colour, label=part) for part, colour in PARTS.items()])
    return figure


def tables(content: Content) -> Figure:
    """The costliest tables, and the ranks that their shards are on."""
    shown = content.tables[:MAX_TABLES]
    figure = Figure((drawing.WIDTH_INCHES, 1.4 + ROW_INCHES * len(shown)), layout="constrained")
    alone, where = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    for row, table in enumerate(shown):
        colour = _colour(table)
        alone.barh(row, table.alone_ms, color=colour, height=0.68)
        _beside(alone, table.alone_ms, row, f"{table.alone_ms:,.3f}", fontsize=9)
        bars = [(first - 0.5, last - first + 1) for first, last in runs(table.ranks)]
        where.broken_barh(bars, (row - 0.34, 0.68), color=colour, linewidth=0)
        for rank, count in _several(table.ranks):
            where.text(rank, row, f"{count}", ha="center", va="center", fontsize=8, color=drawing.PAPER)
    alone.set_xlim(0, (shown[0].alone_ms or 1.0) * 1.3)
    alone.set_xlabel("ms by itself")
    _rows(alone, [_short(table.name) for table in shown])
    where.tick_params(axis="y", length=0, labelleft=False)
    where.set_xlim(-0.5, content.world_size - 0.5)
    where.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    where.set_xlabel("rank of each shard")
    if content.world_size <= MAX_BARS:
        where.set_xticks([rank + 0.5 for rank in range(content.world_size - 1)], minor=True)
        where.tick_params(axis="x", which="minor", length=0)
        where.grid(axis="x", which="minor")
    kinds = dict.fromkeys((table.sharding_type, _colour(table)) for table in shown)
    _legend(alone, [Patch(color=colour, label=kind) for kind, colour in kinds])
    return figure


def _memory_of_kind(axes: Axes, entry: MemoryEntry) -> None:
    unit, name = _unit(max(*entry.used_bytes, *entry.limit_bytes))
    used = [value / unit for value in entry.used_bytes]
    limit = [max(0, value) / unit for value in entry.limit_bytes]
    _ranks_on(axes, len(used), f"{entry.kind}, {name}")
    _layer(axes, [0.0] * len(used), used, drawing.PURPLE, "tables")
    edges = [rank - 0.5 for rank in range(len(limit) + 1)]
    axes.stairs(limit, edges, baseline=None, color=drawing.VERMILION, linewidth=2)
    handles: list[Patch | Line2D] = [
        Patch(color=drawing.PURPLE, label="tables"),
        Line2D([], [], color=drawing.VERMILION, linewidth=2, label="limit: what the storage reservation leaves"),
    ]
    axes.set_ylim(0, max(*used, *limit) * 1.1 or 1.0)
    _legend(axes, handles)


def _ranks_axes(count: int, label: str) -> tuple[Figure, Axes]:
    figure = Figure((drawing.WIDTH_INCHES, 3.9), layout="constrained")
    axes = figure.subplots()
    _ranks_on(axes, count, label)
    axes.set_xlabel("rank")
    return figure, axes


def _ranks_on(axes: Axes, count: int, label: str) -> None:
    axes.set_xlim(-0.6, count - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set_ylabel(label)
    axes.grid(axis="y")
    axes.tick_params(length=0)


def _layer(axes: Axes, base: Sequence[float], values: Sequence[float], colour: str, label: str) -> None:
    """One part of what is stacked: a bar for each rank, or one area where they are many."""
    if len(values) <= MAX_BARS:
        axes.bar(range(len(values)), values, bottom=base, width=0.72, color=colour, label=label)
        return
    tops = [low + value for low, value in zip(base, values, strict=True)]
    edges = [rank - 0.5 for rank in range(len(values) + 1)]
    axes.stairs(tops, edges, baseline=base, fill=True, color=colour, linewidth=0, label=label)


def _legend(axes: Axes, handles: Sequence[Patch | Line2D] | None = None) -> None:
    given = {} if handles is None else {"handles": handles}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2, handlelength=1.2, **given)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Names down the side, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    axes.grid(axis="x")


def _beside(axes: Axes, x: float, row: int, text: str, **looks: Any) -> None:
    """At the end of a row's bar."""
    axes.annotate(text, (x, row), xytext=(5, 0), textcoords="offset points", va="center", **looks)


def _several(ranks_of_shards: Sequence[int]) -> list[tuple[int, int]]:
    """Ranks with more than one shard of a table, and how many."""
    return [(rank, count) for rank in sorted(set(ranks_of_shards)) if (count := ranks_of_shards.count(rank)) > 1]


def _colour(table: TableEntry) -> str:
    return dict(zip(SHARDING_TYPES, PALETTE, strict=False)).get(table.sharding_type, drawing.SOFT)


def _short(name: str) -> str:
    """The ends of a long name, which tell names apart."""
    return (
        name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 2 - 1]}\N{HORIZONTAL ELLIPSIS}{name[-MAX_NAME // 2 :]}"
    )


def _unit(largest_bytes: int) -> tuple[int, str]:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest_bytes >= unit:
            return unit, name
    return 1, "B"
