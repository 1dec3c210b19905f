# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reports on plans: costs, baselines, bottleneck and confidence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from dreamshard_planner.cost.problem import PlacementCosts
from dreamshard_planner.search_space.sharding_types import sharding_in_words
from dreamshard_planner.support.documents import STRICT, Amount, Count, Finite, Share, Unbounded, document_of
from dreamshard_planner.support.formatting import memory_in_words, short_words

MAX_RANKS_SHOWN = 8
COLLECTIVES_DOMINATE = 0.5
"""Share of the cost from which collectives are the bottleneck."""
LEVEL = 0.02
"""Largest excess of the slowest rank over the mean, as a share, of level ranks."""
ONE_TABLE = 0.5
"""Share of the slowest rank's compute from which one table is the bottleneck."""
ESTIMATE_PARTS = ("fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "prefetch_compute")
"""Parts of TorchRec's estimate of a rank: compute and collectives together."""
TORCHREC_PLANS = {"torchrec": "TorchRec's plan", "torchrec_default": "TorchRec's default plan"}
"""TorchRec's plans in words, by name of the rival."""
_FOR_COLLECTIVES = (
    "Faster links, smaller outputs (dims, 16-bit collectives) or a smaller batch would help; moving tables would not"
)


Code = Literal[
    "hardware",  # devices read from the driver
    "assumption",  # a guess that moves the figures
    "cost",  # tables beyond the measured ones
    "skew",  # a block of rows is read more than the others
    "measurement",  # measured in training
    "search",  # a search that was cut short, and TorchRec's plan
    "source",  # origin of the costs
    "optimizer",  # assumed, or costed as another one
    "table",  # unlikely shapes, or an unknown access pattern
    "placement_rule",  # effect of placement rules
    "beyond_exact_training",  # options excluded by exact training
    "hot_rows",  # rows of sequence tables that every rank holds
    "index_dedup",  # gain of TorchRec's index dedup
    "forced_out",  # exact training keeps tables out of device memory
    "training",  # tables that train differently than whole ones
    "unused",  # names missing in the model, or modules missing in the plan
    "callbacks",  # callbacks that changed the plan
    "loaded",  # the file of a loaded plan
    "stale",  # changes since that file was made
]
"""Subject of a note."""


@dataclass(frozen=True)
class Note:
    """One thing to know."""

    __pydantic_config__: ClassVar = STRICT
    code: Code
    text: str
    """A sentence without its full stop."""
    figures: Mapping[str, Finite] = field(default_factory=dict)
    """Numbers of the text, by names with units."""

    def __str__(self) -> str:
        return self.text


def noted(code: Code, texts: Iterable[str | None]) -> tuple[Note, ...]:
    """Notes of one code, without empty ones."""
    return tuple(Note(code, text) for text in texts if text)


@dataclass(frozen=True)
class ReportEntry:
    """Predicted cost of one plan, in milliseconds of embedding work per training step."""

    __pydantic_config__: ClassVar = STRICT
    name: str
    total_ms: Unbounded
    """Overall: compute plus both collectives; infinite where infeasible."""
    collectives_ms: Unbounded
    forward_ms: tuple[Amount, ...]
    """Compute of each rank; none where infeasible."""
    backward_ms: tuple[Amount, ...]

    @classmethod
    def of(cls, name: str, costs: PlacementCosts | None) -> ReportEntry:
        """From the costs of one plan, None for a method that found none."""
        if costs is None:
            return cls(name, math.inf, math.inf, (), ())
        return cls(
            name=name,
            total_ms=float(costs.overall_ms_B[0]),
            collectives_ms=float(costs.collectives_ms_B[0]),
            forward_ms=tuple(costs.forward_ms_BD[0].tolist()),
            backward_ms=tuple(costs.backward_ms_BD[0].tolist()),
        )

    @property
    def feasible(self) -> bool:
        return math.isfinite(self.total_ms)

    @cached_property
    def rank_ms(self) -> tuple[float, ...]:
        """Compute of each rank, forward and backward."""
        return tuple(map(sum, zip(self.forward_ms, self.backward_ms, strict=True)))

    def times(self, base: ReportEntry) -> float:
        """Its total over another one's."""
        return self.total_ms / base.total_ms if base.total_ms > 0 else 1.0

    @property
    def slowest(self) -> int:
        """Rank."""
        return self.rank_ms.index(max(self.rank_ms))

    @property
    def shares_cores(self) -> bool:
        """True if the work of all ranks lasts longer than that of the slowest, since they share cores."""
        return self.total_ms - self.collectives_ms > max(self.rank_ms, default=0.0) * (1 + LEVEL)

    @property
    def waiting_ms(self) -> tuple[float, ...]:
        """Milliseconds that each rank waits for the slowest."""
        last_ms = max(self.rank_ms)
        return tuple(last_ms - own_ms for own_ms in self.rank_ms)


@dataclass(frozen=True)
class TableEntry:
    """Sharding of one table, with its cost."""

    name: str
    sharding_type: str
    kernel: str
    ranks: tuple[int, ...]
    """Ranks of its shards, in order."""
    shard_ms: tuple[float, ...]
    """Milliseconds of each shard alone on its rank."""

    @property
    def alone_ms(self) -> float:
        """Milliseconds of all shards."""
        return sum(self.shard_ms)

    def on_rank_ms(self, rank: int) -> float:
        """Return the milliseconds of its shards on one rank."""
        return sum(ms for at, ms in zip(self.ranks, self.shard_ms, strict=True) if at == rank)

    @property
    def most_ms(self) -> float:
        """On the rank that has most to compute of it."""
        return float(np.bincount(self.ranks, self.shard_ms).max(initial=0.0))

    @property
    def label(self) -> str:
        """In words, such as ``row_wise``."""
        return sharding_in_words(self.sharding_type, self.kernel)


@dataclass(frozen=True)
class MemoryEntry:
    """Bytes of tables in one kind of memory, per rank."""

    kind: str
    used_bytes: tuple[Count, ...]
    limit_bytes: tuple[int, ...]
    """Bytes that the storage reservation left."""

    @property
    def shares(self) -> list[float]:
        """Used share of each rank's limit."""
        return [used / max(1, limit) for used, limit in zip(self.used_bytes, self.limit_bytes, strict=True)]

    @property
    def fullest(self) -> int:
        """Rank that uses the largest share of its limit."""
        return self.shares.index(max(self.shares))


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted costs of the chosen plan and of the plans it was chosen from: of a report all but tables, which files
    of plans say elsewhere."""

    __pydantic_config__: ClassVar = STRICT
    chosen: ReportEntry
    rivals: tuple[ReportEntry, ...]
    """The baselines: TorchRec's own plan, the best of whole tables, the policy's first draft, each heuristic's; none of
    a plan that was given, and not searched for."""
    cost_source: str
    """Source of compute costs."""
    collectives_source: str
    candidates: Count
    """Moves and swaps that the search evaluated."""
    reshards: Count
    """Changes of how a table is split that it evaluated."""
    memory: tuple[MemoryEntry, ...]
    """Bytes of tables on every rank, for each kind of memory that they use."""
    collectives: tuple[tuple[str, Amount], ...]
    """Milliseconds of each collective, both passes together."""
    confidence: str = ""
    """Agreement of the costs with the planned hardware, in words; empty in files of earlier releases."""
    averaging_ms: Amount = 0.0
    """Milliseconds of the compute that average replicas of other sharding groups."""
    estimate_ms: dict[str, Amount] = field(default_factory=dict)
    """Parts of TorchRec's estimate of the slowest rank, by :data:`ESTIMATE_PARTS`; empty for other cost sources."""
    embedding_share: Share | None = None
    """Share of embedding work in an observed training step; None if costs were not learned from steps."""
    notes: tuple[Note, ...] = ()
    """Assumptions first, since they move the figures most."""

    @property
    def saved_share(self) -> float | None:
        """Share of embedding work saved against TorchRec's default plan, else its plan; None without either."""
        theirs = {rival.name: rival for rival in self.rivals if rival.name in TORCHREC_PLANS and rival.feasible}
        if not theirs:
            return None
        usual = theirs.get("torchrec_default") or theirs["torchrec"]
        return max(0.0, 1 - self.chosen.times(usual))


@dataclass(frozen=True, kw_only=True)
class Report(Predicted):
    """The chosen plan with its baselines and tables."""

    tables: tuple[TableEntry, ...]

    @property
    def predicted(self) -> Predicted:
        """As files have it: to the nanosecond."""
        return Predicted(**{entry.name: _rounded(getattr(self, entry.name)) for entry in fields(Predicted)})

    @property
    def alone_ms(self) -> dict[str, float | tuple[float, ...]]:
        """As files have it: what each shard of a table would cost alone on its rank, or their sum where they are
        alike."""
        each = {table.name: table.alone_ms if _alike(table.shard_ms) else table.shard_ms for table in self.tables}
        return {name: _rounded(known) for name, known in each.items()}

    def noting(self, notes: Iterable[Note]) -> Report:
        """Return the report with further notes; assumptions stay first."""
        return replace(self, notes=tuple(sorted((*self.notes, *notes), key=lambda note: note.code != "assumption")))

    @property
    def headline(self) -> str:
        """The predicted cost against TorchRec's plans, and how far to trust it."""
        against = [f"{_against(self.chosen, rival)} {TORCHREC_PLANS[rival.name]}" for rival in self.rivals
                   if rival.name in TORCHREC_PLANS and rival.feasible]  # fmt: skip
        known = f" Confidence: {self.confidence}." if self.confidence else ""
        cost = f"Predicted: {self.chosen.total_ms:.3f} ms of embedding work per training step"
        return f"{', '.join([cost, *against])}.{known}{self._of_step()}"

    def _of_step(self) -> str:
        """Return a sentence on the share of the whole step."""
        if self.embedding_share is None:
            return ""
        share, saved = f" Embeddings are about {self.embedding_share:.0%} of your step", self.saved_share
        return f"{share}." if saved is None else f"{share}; the plan saves {saved:.0%} of them."

    @property
    def verdict(self) -> str:
        """The bottleneck, and what would help, in a sentence or two."""
        chosen, total_ms = self.chosen, self.chosen.total_ms
        if not total_ms > 0:
            return "Nothing to compute"
        if self.averaging_ms > COLLECTIVES_DOMINATE * total_ms:
            return (
                f"Bottleneck: averaging replicas, {self.averaging_ms / total_ms:.0%} of {total_ms:.3f} ms. A longer "
                "sync_interval or larger sharding groups would help; moving tables would not"
            )
        if chosen.collectives_ms > COLLECTIVES_DOMINATE * total_ms:
            name, ms = max(self.collectives, key=lambda collective: collective[1], default=("collectives", 0.0))
            return (
                f"Bottleneck: collectives, {chosen.collectives_ms / total_ms:.0%} of {total_ms:.3f} ms"
                f" ({name}: {ms:.3f} ms). {_FOR_COLLECTIVES}"
            )
        if chosen.shares_cores:
            together_ms, slowest_ms = total_ms - chosen.collectives_ms, max(chosen.rank_ms)
            return (
                f"Bottleneck: cores that ranks share, {together_ms / total_ms:.0%} of {total_ms:.3f} ms; the slowest "
                f"rank alone would take {slowest_ms:.3f} ms. More cores, fewer lookups or smaller dims would help; "
                "moving tables within a host would not"
            )
        rank, mean_ms = chosen.slowest, sum(chosen.rank_ms) / len(chosen.rank_ms)
        compute_ms = chosen.rank_ms[rank]
        table = max(self.tables, key=lambda table: table.on_rank_ms(rank), default=None)
        if len(chosen.rank_ms) > 1 and table is not None:
            alone_ms = min(table.on_rank_ms(rank), compute_ms)  # slices that are fused cost less than each alone
            if alone_ms > ONE_TABLE * compute_ms and alone_ms > mean_ms * (1 + LEVEL):
                takes = "takes" if self.estimate_ms else "computes"
                return (
                    f"Bottleneck: table {table.name!r} ({table.label}), {alone_ms:.3f} of the {compute_ms:.3f} ms that "
                    f"rank {rank} {takes}; every rank would take {mean_ms:.3f} ms if all were level. Another sharding "
                    "or fewer lookups of it could help: dreamshard explain rates others"
                )
        above = max(0.0, compute_ms / mean_ms - 1)
        if above > LEVEL:
            return (
                f"Bottleneck: rank {rank}, {above:.0%} above the mean of {mean_ms:.3f} ms, with no table that is most "
                "of it. dreamshard explain rates changes of its costliest tables"
            )
        level = f"on level ranks (the slowest is {above:.1%} above the mean)"
        total = f"{total_ms:.3f} ms, {level if len(chosen.rank_ms) > 1 else 'on one rank'}"
        sent_ms = sum(ms for name, ms in self.estimate_ms.items() if name.endswith("_comms"))
        if sent_ms > COLLECTIVES_DOMINATE * total_ms:
            return f"Bottleneck: collectives, {sent_ms / total_ms:.0%} of {total}. {_FOR_COLLECTIVES}"
        return (
            f"Bottleneck: compute, {(compute_ms - sent_ms) / total_ms:.0%} of {total}. Fewer lookups, smaller dims, a "
            "smaller batch or more ranks would help; moving tables would not"
        )

    @property
    def sharding_types(self) -> dict[str, int]:
        """Tables of each sharding type, with the kernel where that is not the usual one; most frequent first."""
        return dict(Counter(table.label for table in self.tables).most_common())

    def rival(self, name: str) -> ReportEntry:
        """The rival of that name; KeyError lists the known ones."""
        for entry in self.rivals:
            if entry.name == name:
                return entry
        raise KeyError(f"no rival {name!r}; there are {', '.join(entry.name for entry in self.rivals)}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the infinite costs of infeasible rivals, which JSON lacks, become None."""

        def told(entry: ReportEntry) -> dict[str, Any]:
            return {**document_of(entry), "feasible": entry.feasible, "rank_ms": entry.rank_ms}

        plans = {"chosen": told(self.chosen), "rivals": tuple(map(told, self.rivals))}
        return {"verdict": self.verdict, **document_of(self), **plans}

    def __str__(self) -> str:
        first = ("forced_out", "hardware", "optimizer", "assumption")
        told = {code: [f"{note}." for note in self.notes if note.code == code] for code in first}
        lines = [
            *told["forced_out"],
            self.headline,
            f"{self.verdict}.",
            *(f"Planned for {text}" for text in told["hardware"]),
            *(f"Note: {text}" for text in (*told["optimizer"], *told["assumption"])),
            *self._plan_lines(),
            f"Tables: {', '.join(f'{count} {name}' for name, count in self.sharding_types.items())}.",
            *map(_memory_line, self.memory),
        ]
        if len(self.collectives) > 1:
            each = ", ".join(f"{name} {ms:.3f}" for name, ms in self.collectives)
            lines.append(f"Milliseconds of collectives, forward and backward: {each}.")
        reshards = f", and {self.reshards:,} re-shards" if self.reshards else ""
        lines += [
            f"Compute: {self.cost_source}. Collectives: {self.collectives_source}.",
            f"The search evaluated {self.candidates:,} moves and swaps{reshards}.",
            *(f"Note: {note}." for note in self.notes if note.code not in first),
        ]
        return short_words("\n".join(lines))

    def _plan_lines(self) -> Iterator[str]:
        """Yield a line per plan: the chosen one, TorchRec's and those of the search, and a count of the others."""
        per_rank = f"compute{' and collectives' * bool(self.estimate_ms)} per rank"
        yield f"{'milliseconds of plan':<22}{'total':>9}{'vs chosen':>11}{'collectives':>13}   {per_rank}"
        yield _line(self.chosen, self.chosen)
        heuristics = [rival for rival in self.rivals if rival.name.endswith("_greedy")]
        yield from (_line(rival, self.chosen) for rival in self.rivals if rival not in heuristics)
        fitting = [f"{rival.times(self.chosen):.3f}" for rival in heuristics if rival.feasible]
        if heuristics:
            cost = f"{fitting[0]} to {fitting[-1]} of the chosen" if fitting else "none fits"
            yield f"{len(heuristics)} greedy heuristics: {cost}."
        if self.estimate_ms:
            parts = ", ".join(f"{name} {ms:.3f}" for name, ms in self.estimate_ms.items())
            yield f"TorchRec's estimate of the slowest rank: {parts} ms; it has no other exchanges."
        if any(rival.name == "torchrec_default" for rival in self.rivals):
            yield "torchrec: TorchRec's planner, told the same lookups; torchrec_default: not told, as most run it."


def _against(chosen: ReportEntry, rival: ReportEntry) -> str:
    """Return the gain over a rival in words."""
    gain = 1 - chosen.total_ms / rival.total_ms if rival.total_ms > 0 else 0.0
    return "as much as" if abs(gain) < 0.0005 else f"{abs(gain):.1%} {'less' if gain > 0 else 'more'} than"


def _alike(shard_ms: Sequence[float]) -> bool:
    return max(shard_ms, default=0.0) - min(shard_ms, default=0.0) < 1e-6


def _rounded(value: Any) -> Any:
    """Milliseconds to the nanosecond, in whatever has some."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, ReportEntry):
        return ReportEntry(*(_rounded(getattr(value, entry.name)) for entry in fields(value)))
    return value


def _memory_line(entry: MemoryEntry) -> str:
    rank = entry.fullest
    used, limit = memory_in_words(entry.used_bytes[rank]), memory_in_words(entry.limit_bytes[rank])
    return f"{entry.kind}: rank {rank} is the fullest, with {used} of the {limit} that the storage reservation leaves."


def _line(entry: ReportEntry, chosen: ReportEntry) -> str:
    if not entry.feasible:
        return f"{entry.name:<20}{'infeasible':>11}"
    shown = " ".join(f"{value:.3f}" for value in entry.rank_ms[:MAX_RANKS_SHOWN])
    if len(entry.rank_ms) > MAX_RANKS_SHOWN:
        shown += f" ... max {max(entry.rank_ms):.3f} min {min(entry.rank_ms):.3f} of {len(entry.rank_ms)} ranks"
    return f"{entry.name:<20}{entry.total_ms:>11.3f}{entry.times(chosen):>11.3f}{entry.collectives_ms:>13.3f}   {shown}"
