# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans over every sharding type, side by side, their ratios, and the targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from all_types.tasks import SETTINGS, tasks

Key = tuple[str, str, str]
"""Task, setting, planner."""
PLANNERS = ("dreamshard", "torchrec", "torchrec_dynamic", "column_beam")
TYPE_NAMES = {"data_parallel": "dp", "table_column_wise": "twcw", "table_row_wise": "twrw"}
TYPE_NAMES |= {"table_wise": "tw", "column_wise": "cw", "row_wise": "rw", "fused_": ""}
MAX_SECONDS = {"random 50 x 8": 1.5, "random 200 x 8": 4.0, "random 200 x 64": 10.0, "random 800 x 64": 40.0}
"""Targets of ours."""


def summarize(record: dict[Key, dict[str, Any]], console: Console) -> None:
    """Tables by setting, geometric means, and the targets."""
    names = [name for name in tasks() if any(key[0] == name for key in record)]
    for setting in SETTINGS:
        shown = [name for name in names if (name, setting, "dreamshard") in record]
        if shown:
            _print_setting(record, setting, shown, console)
    for setting in SETTINGS:
        _print_targets(record, setting, console)


def _cell(line: dict[str, Any] | None, key: str, scale: float = 1.0, digits: int = 2) -> str:
    if line is None:
        return ""
    if key not in line:
        return "-" if "error" in line else ""
    mark = "" if line.get("finished", True) else ">"
    return f"{mark}{line[key] * scale:.{digits}f}"


def _print_setting(record: dict[Key, dict[str, Any]], setting: str, names: Sequence[str], console: Console) -> None:
    table = RichTable(title=f"{setting}: rating by TorchRec's perf model (ms), by our cost (ms)")
    for heading in ("task", "planner"):
        table.add_column(heading)
    for heading in ("torchrec ms", "x dreamshard", "own ms", "CPU s", "HBM GiB", "peak GB"):
        table.add_column(heading, justify="right")
    table.add_column("types")
    for name in names:
        ours = record[name, setting, "dreamshard"].get("torchrec_ms")
        for planner in (*PLANNERS, "bound"):
            line = record.get((name, setting, planner))
            if line is None:
                continue
            if planner == "bound":
                line = line | {"torchrec_ms": max(line["level_ms"], line["largest_ms"])}
            ratio = f"{line['torchrec_ms'] / ours:.3f}" if ours and "torchrec_ms" in line else ""
            kinds = line.get("error") or " ".join(f"{count} {kind}" for kind, count in line.get("types", {}).items())
            for long, short in TYPE_NAMES.items():
                kinds = kinds.replace(long, short)
            cells = [_cell(line, "torchrec_ms"), ratio, _cell(line, "own_ms"), _cell(line, "seconds", digits=1)]
            cells += [_cell(line, "hbm_bytes", 2**-30, 1), _cell(line, "peak_bytes", 1e-9)]
            table.add_row(name if planner == PLANNERS[0] else "", planner, *cells, kinds[:60])
        table.add_section()
    console.print(table)


def _print_targets(record: dict[Key, dict[str, Any]], setting: str, console: Console) -> None:
    ours = {name: line for (name, kind, planner), line in record.items() if (kind, planner) == (setting, "dreamshard")}
    for rival in PLANNERS[1:]:
        for which in ("torchrec_ms", "own_ms"):
            ratios = {
                name: (line[which] / record[name, setting, rival][which], record[name, setting, rival]["finished"])
                for name, line in ours.items()
                if which in line and which in record.get((name, setting, rival), {})
            }
            worse = ", ".join(f"{name} {ratio:.3f}" for name, (ratio, _) in ratios.items() if ratio > 1 + 1e-9)
            if not ratios:
                continue
            mean, ended = geometric_mean(r for r, _ in ratios.values()), [r for r, done in ratios.values() if done]
            console.print(
                f"{setting}, {which}: dreamshard / {rival} {mean:.3f} over {len(ratios)} tasks, "
                f"{geometric_mean(ended):.3f} over the {len(ended)} that {rival} finished; above 1: {worse or 'none'}"
            )
    for name, line in ours.items():
        if line["seconds"] > MAX_SECONDS.get(name, math.inf):
            console.print(f"{setting}: {name} took {line['seconds']:.1f} s, target {MAX_SECONDS[name]} s")
        if line.get("peak_bytes", 0) > 2e9:
            console.print(f"{setting}: {name} took {line['peak_bytes'] / 1e9:.2f} GB, target 2 GB")


def geometric_mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
