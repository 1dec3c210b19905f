# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What there is to show of a report, or of a plan in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.replan import Replan
from dreamshard_planner.plans.report import Report, ReportEntry, TableEntry
from dreamshard_planner.support.formatting import size_in_words

COST_SOURCES = {
    "network": "A cost network, fitted to fused kernels that were measured, predicts compute.",
    "roofline": "Compute follows from bandwidths, on GPUs from how kernels of others use them: nothing was measured. "
    "Trust the order of plans more than the milliseconds.",
    "torchrec": "Compute and collectives are the estimates of the TorchRec that is installed.",
}
"""By kind of cost source, in a sentence."""


@dataclass(frozen=True)
class Content:
    """All that figures and page show."""

    title: str
    report: Report
    tables: tuple[TableEntry, ...]
    """Those that would take longest by themselves first."""
    facts: tuple[tuple[str, str], ...]
    """What the plan was made from, as far as known: name and value."""
    replan: Replan | None = None
    """How the plan was come to from another one."""

    @classmethod
    def of(cls, subject: Report | SavedPlan | Replan, title: str | None = None) -> Content:
        """Of any of them."""
        if isinstance(subject, Replan):
            return replace(cls._of_saved(subject.plan, title or f"{subject.before}, re-planned"), replan=subject)
        return cls._of_saved(subject, title) if isinstance(subject, SavedPlan) else cls._of_report(subject, title)

    @classmethod
    def _of_report(cls, report: Report, title: str | None) -> Content:
        tables = [replace(table, name=printable(table.name)) for table in report.tables]
        tables.sort(key=lambda table: -table.alone_ms)
        facts = (
            ("moves and swaps evaluated", f"{report.candidates:,}"),
            ("re-shards evaluated", f"{report.reshards:,}"),
            ("tables", ", ".join(f"{count:,} {name}" for name, count in report.sharding_types.items()) or "none"),
        )
        return cls(title or "Sharding plan", report, tuple(tables), facts)

    @classmethod
    def _of_saved(cls, saved: SavedPlan, title: str | None) -> Content:
        content, inputs, topology = cls._of_report(saved.report(), title), saved.inputs, saved.inputs.topology
        facts = (
            ("ranks", str(topology)),
            ("samples per rank", f"{inputs.batch_size:,}"),
            *((f"{kind.upper()} of a rank", size_in_words(max(of_D))) for kind, of_D in topology.memory_bytes.items()),
            ("statistics", inputs.statistics or "none"),
            *((name, str(value)) for name, value in inputs.settings.items()),
            *saved.libraries.items(),
        )
        return replace(content, title=title or saved.name, facts=(*content.facts, *facts))

    @property
    def chosen(self) -> ReportEntry:
        return self.report.chosen

    @cached_property
    def plans(self) -> tuple[ReportEntry, ...]:
        """The chosen one first."""
        return (self.chosen, *self.report.rivals)

    @cached_property
    def world_size(self) -> int:
        return len(self.chosen.rank_ms)

    @cached_property
    def torchrec(self) -> ReportEntry | None:
        """TorchRec's own plan, if it was searched and fits."""
        return next((entry for entry in self.report.rivals if entry.name == "torchrec" and entry.feasible), None)

    @cached_property
    def source_in_words(self) -> str:
        """A sentence on where compute comes from; empty for a kind without one."""
        return COST_SOURCES.get(self.report.cost_source.partition(" ")[0], "")

    @cached_property
    def headline(self) -> str:
        """What the report comes to."""
        chosen = self.chosen
        if self.replan is not None:
            return self.replan.sentence
        text = f"The plan is predicted to take {ms(chosen.total_ms)} of embedding work per training step"
        if self.torchrec is not None and chosen.total_ms > 0:
            text += f"; TorchRec's own would take {ms(self.torchrec.total_ms)}, "
            text += f"{self.torchrec.times(chosen):.3f} times as long"
        return f"{self.report.verdict}. {text}."

    @cached_property
    def key_figures(self) -> tuple[tuple[str, str, str], ...]:
        """Name, figure, and what it is of."""
        chosen = self.chosen
        found = [("total", ms(chosen.total_ms), "slowest rank's compute and all collectives")]
        if self.torchrec is not None and chosen.total_ms > 0:
            found.append(("TorchRec's own plan", f"{self.torchrec.times(chosen):.3f}x", ms(self.torchrec.total_ms)))
        found.append(("slowest rank", ms(max(chosen.rank_ms)), f"rank {chosen.slowest}: forward and backward"))
        share = chosen.collectives_ms / chosen.total_ms if chosen.total_ms > 0 else 0.0
        found.append(("collectives", ms(chosen.collectives_ms), f"{share:.0%} of the total"))
        for entry in self.report.memory:
            rank = entry.fullest
            limit, used = max(0, entry.limit_bytes[rank]), entry.used_bytes[rank]
            filled = f"{used / limit:.0%}" if limit else size_in_words(used)
            words = f"rank {rank}: {size_in_words(used)} of {size_in_words(limit)}"
            found.append((f"fullest {entry.kind}", filled, words))
        return tuple(found)


def printable(text: str) -> str:
    """Without what XML and lines of text cannot hold."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def ms(value: float) -> str:
    """As the text of a report has it."""
    return f"{value:,.3f} ms"
