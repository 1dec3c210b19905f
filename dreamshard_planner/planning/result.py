# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The result of one run of TorchRec's loop: the plan with its report, immutable.

Notes tell the guesses that figures rest on, changes in the training of tables, and the options that exact training
leaves out, with what they would gain by prediction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torchrec.distributed.planner.constants import DDR_CAP
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Topology

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.hardware import total_bytes
from dreamshard_planner.planning.model_problem import ModelProblem, constraints_under, libraries
from dreamshard_planner.planning.notes import report_on
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.planning.search_plan import BASELINE, torchrec_plan
from dreamshard_planner.plans.comparison import differences
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Note, Report, ReportEntry, noted
from dreamshard_planner.problem.enumeration import sharding_only
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.search import SearchResult, search
from dreamshard_planner.search_space.constraints import UNEVEN_OUTPUTS
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import (
    by_table,
    fqn_of,
    is_torchrecs,
    ranks_of,
    refused,
    same_option,
    type_of,
)
from dreamshard_planner.search_space.replica_rules import DENSE_KERNELS
from dreamshard_planner.search_space.sharding_types import DENSE, REPLICAS_OF_GROUPS, TW, in_host_memory, kernel_of
from dreamshard_planner.support.formatting import first_of, size_in_words
from dreamshard_planner.support.reproducible import neutral, single_thread
from dreamshard_planner.workload.counting import in_smaller_batches
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.reuse import POPULARITY_EXPONENT
from dreamshard_planner.workload.statistics import TableStatistics

MANY_LOOKUPS = 10.0
"""Lookups per sample of features without statistics, for a second figure beside the one for a single lookup."""
NAMED = 3
"""Features, or tables, named in one note."""
FIGURE_EFFORT = 0.1
"""Candidates of the search for a figure, as a share of the plan's."""
OTHER_BATCH = 8
"""Ratio of two batch sizes from which on a report notes it."""
NOTHING = 1e-3
"""Share of a cost below which a difference is not reported."""
MAX_SHARDS = 4_000
"""Tables times ranks up to which reports have TorchRec's plan over all options, which takes seconds beyond."""
Signatures: TypeAlias = dict[str, tuple[Hashable, tuple[int | None, ...]]]
"""Sharding and ranks of each table, by name."""


def signatures(plan: Iterable[ShardingOption]) -> Signatures:
    """Return the sharding and the ranks of each table; equal for equal plans."""
    return {
        fqn_of(option): (
            (option.sharding_type, option.compute_kernel, option.cache_load_factor, option.num_shards),
            tuple(ranks_of(option)),
        )
        for option in plan
    }


@dataclass(frozen=True)
class ChosenPlan:
    """The plan that the user's callbacks get, and its origin."""

    options: list[ShardingOption]
    """One option for every table, with ranks. Callbacks may change them."""
    signatures: Signatures
    """Sharding and ranks before callbacks."""
    notes: Sequence[Note] = ()
    rivals: Sequence[ReportEntry] = ()
    """Plans that it was chosen from."""
    result: SearchResult | None = None
    """Outcome of the search that found it."""
    is_placed: bool = False
    """True if our partitioner placed it."""
    excludes: bool = False
    """True if exact training may have left options out of the search."""
    loaded: SavedPlan | None = None
    """The file that it comes from, instead of a search."""


@dataclass(frozen=True)
class PlanResult:
    """The plan that a planner made, with its model and report."""

    model: ModelProblem
    plan: tuple[ShardingOption, ...]
    """One option for every table, with ranks, after callbacks."""
    report_or_reason: Report | str
    """The report, or the reason why there is none."""

    @classmethod
    def of(cls, model: ModelProblem, chosen: ChosenPlan, plan: Sequence[ShardingOption]) -> PlanResult:
        """Report on the plan that callbacks made of the chosen one.

        Raises:
            PlannerError: ranks would exchange outputs of different types.
        """
        if mixed := model.mixed_exchanges(plan):
            raise refused(mixed[0])
        before, after = chosen.signatures, signatures(plan)
        is_changed = chosen.is_placed and before != after
        try:
            if chosen.loaded is not None:
                report = _of_file(model, plan, chosen.loaded)
            else:
                # Placed shards need no check: a user's enumerator may make placeholders, which TorchRec replaces.
                checked = is_changed or not chosen.is_placed
                rated = model.rated(plan) if checked else model.rater.rated(plan, model.room)
                notes = [*chosen.notes]
                if chosen.is_placed:
                    notes += noted("placement_rule", () if model.legal is None else model.legal.notes())
                    if not any(rival.name == BASELINE and rival.feasible for rival in chosen.rivals):
                        late = " in time" if chosen.result is not None and chosen.result.cut_short else ""
                        notes.append(Note("search", f"no plan of TorchRec's that fits was found{late} to compare with"))
                if is_changed:
                    same_ways = all(after[fqn][0] == way for fqn, (way, _) in before.items())
                    verb = "moved tables" if same_ways else "changed options"
                    text = f"callbacks {verb} after they were placed; dreamshard is the plan that they made"
                    notes.append(Note("callbacks", text))
                notes += exact_training_notes(model, plan) if chosen.excludes else ()
                report = report_on(model.rater, rated, notes, chosen.rivals, chosen.result)
            return cls(model, tuple(plan), report.noting(_model_notes(model, plan)))
        except PlannerError as error:
            whose = "callbacks changed the last plan to one whose" if is_changed else "the last plan's"
            return cls(model, tuple(plan), f"{whose} cost is not known: {error}")

    @property
    def report(self) -> Report:
        """The plan and what it was chosen from; raises DreamShardError if it could not be rated."""
        if isinstance(self.report_or_reason, str):
            raise DreamShardError(f"there is no report: {self.report_or_reason}")
        return self.report_or_reason

    def saved(self, name: str) -> SavedPlan:
        """Return the plan with all its inputs, and with its report if there is one."""
        return self.model.saved(
            self.plan, name, self.report_or_reason if isinstance(self.report_or_reason, Report) else None
        )


def _of_file(model: ModelProblem, plan: Sequence[ShardingOption], saved: SavedPlan) -> Report:
    rated, now = model.rated(plan), libraries()
    changed = [*differences(saved.inputs, model.inputs)]
    changed += [f"{name} {was} -> {now.get(name)}" for name, was in saved.libraries.items() if now.get(name) != was]
    then, sources = saved.predicted, (str(rated.cost.compute.source), rated.read.problem.collectives.world.source)
    alike = sources == (then.cost_source, then.collectives_source) and math.isclose(
        then.chosen.total_ms, rated.total_ms, rel_tol=1e-6, abs_tol=1e-6
    )
    others = "" if alike else f"; dreamshard report {saved.name} tells what it was chosen from by the costs of then"
    loaded = f"the plan was loaded from {saved.name}, where its cost is {then.chosen.total_ms:.3f} ms{others}"
    report = report_on(
        model.rater,
        rated,
        (Note("loaded", loaded), *noted("stale", [f"since the plan was made: {text}" for text in changed])),
    )
    if not alike:
        return report
    return replace(report, rivals=then.rivals, candidates=then.candidates, reshards=then.reshards)


def _model_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return notes on any plan of the model: its assumptions, and oddities of the module and its inputs."""
    unused, doubtful = [*model.unused], [*model.doubtful]
    if unsharded := model.unsharded:
        unused.append(
            f"{len(unsharded)} embedding module(s) have no sharder and are not in the plan: {first_of(unsharded)}"
        )
    if uneven := [fqn for fqn, why in model.left_out.items() if TW in why and UNEVEN_OUTPUTS in why.values()]:
        doubtful.append(f"{len(uneven)} table(s) ({first_of(uneven)}) may only lie on all ranks: {UNEVEN_OUTPUTS}")
    return (
        *noted("hardware", [model.ranks.hardware]),
        *noted("source", [model.settings.recalled]),
        *assumptions(model, plan),
        *noted("table", doubtful),
        *noted("unused", unused),
        *noted("training", training_notes(model, plan)),
    )


def assumptions(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return notes on the guesses that the figures of a plan with ranks rest on: lookups, their reuse, batch sizes and
    memory; none if the plan cannot be rated."""
    try:
        return (
            *noted("optimizer", [missing_optimizers(plan, model.rater.reader)]),
            *_lookups(model, plan),
            *_popularity(model.rater, plan),
            *_batches(model, plan),
            *_host_memory(model.ranks.topology, plan),
        )
    except PlannerError:  # callbacks changed the plan
        return ()


@torch.no_grad()
def _lookups(model: ModelProblem, plan: Sequence[ShardingOption]) -> Iterator[Note]:
    rater, settings = model.rater, model.settings
    given = [(one, feature) for one in plan for feature in rater.reader.declared(one).features]
    unknown = [(one, feature) for one, feature in given if not settings.tells_lookups(one.name, feature)]
    if not unknown:
        return
    # Features of an nn.EmbeddingBag have no names.
    every, shown = (
        sorted({feature or f"of table {fqn_of(one)!r}" for one, feature in some}) for some in (given, unknown)
    )
    text = (
        f"one lookup per sample is assumed for {len(shown)} of {len(every)} features ({first_of(shown, NAMED)}), "
        "since neither statistics nor pooling_factors tell"
    )
    figures: dict[str, float] = {"features": len(shown), "of_features": len(every)}
    if rater.cost_source != "torchrec":  # its estimates stay those that the options came with
        many = dict.fromkeys((feature for _, feature in unknown), FeatureStatistics(MANY_LOOKUPS))
        other = rater.with_statistics(TableStatistics({**dict(settings.statistics or {}), **many}))
        one_ms, ten_ms = (each.rated(plan).total_ms for each in (rater, other))
        # More lookups never take less. A network errs by more than a few lookups take in a nearly empty kernel.
        ten_ms = max(one_ms, ten_ms)
        figures |= {"one_ms": one_ms, "ten_ms": ten_ms}
        if ten_ms > one_ms * (1 + NOTHING):
            text += f"; with {MANY_LOOKUPS:.0f} this plan would take {ten_ms:.3f} ms instead of {one_ms:.3f}"
            text += ", and another may be better"
    yield Note("assumption", text, figures)


def _popularity(rater: PlanRater, plan: Sequence[ShardingOption]) -> Iterator[Note]:
    """Yield a note on tables in host memory, whose popularity of rows decides the hits of caches."""
    names = [fqn_of(option) for option in plan if rater.reader.assumes_popularity(option)]
    if names and rater.cost_source != "torchrec":
        text = (
            f"popularity of rows is assumed to fall as rank to the power {POPULARITY_EXPONENT} for {len(names)} "
            f"table(s) in host memory ({first_of(names, NAMED)}), and with it hits of caches, since no statistics tell "
            "how often rows are read again"
        )
        yield Note("assumption", text, {"tables": len(names), "exponent": POPULARITY_EXPONENT})


def _batches(model: ModelProblem, plan: Sequence[ShardingOption]) -> Iterator[Note]:
    """Yield notes on an assumed batch size, on statistics of batches of another size, and on features that were counted
    in smaller batches than others of their module."""
    settings, size = model.settings, model.settings.batch_size
    statistics: Mapping[str, FeatureStatistics] = settings.statistics or {}
    known: dict[str, dict[str, FeatureStatistics]] = {}
    told: set[str] = set()
    for option in plan:
        features, given = model.rater.reader.declared(option).features, (settings.constraints or {}).get(option.name)
        known.setdefault(option.path, {}).update((name, statistics[name]) for name in features if name in statistics)
        told.update(features if given is not None and given.batch_sizes else ())
    reused = (one.samples for of_module in known.values() for one in of_module.values() if one.reuse_histogram)
    counted, text = max(reused, default=0), ""
    if settings.given_batch_size is None and plan:
        text = f"a local batch of {size} samples is assumed, TorchRec's default: costs are nearly proportional to it"
    elif counted and not 1 / OTHER_BATCH <= size / counted <= OTHER_BATCH:
        text = (
            f"statistics were counted in batches of {counted:,} samples, and the plan is for {size:,}: how often a "
            "batch reads a row again is extrapolated; statistics of such batches tell"
        )
    if text:
        yield Note("assumption", text, {"batch_size": size})
    if names := sorted({name for of_module in known.values() for name in in_smaller_batches(of_module)} - told):
        text = (
            f"batches of {size:,} samples are assumed for every feature, and {len(names)} of them "
            f"({first_of(names, NAMED)}) were counted in smaller batches than others of their module: where batches "
            "vary by feature, batch_sizes of constraints tell"
        )
        yield Note("assumption", text, {"features": len(names)})


def _host_memory(topology: Topology, plan: Sequence[ShardingOption]) -> Iterator[Note]:
    """Yield a note on TorchRec's default of host memory: if tables lie there, or CPU ranks have less."""
    here_bytes, rank_bytes = total_bytes(), topology.devices[0].storage.ddr
    host_bytes = rank_bytes * min(topology.local_world_size, topology.world_size)
    text = f"{size_in_words(rank_bytes)} of host memory are assumed for every rank, TorchRec's default (ddr_cap)"
    if topology.compute_device != "cpu":
        outside = [fqn_of(option) for option in plan if in_host_memory(option.compute_kernel)]
        matters, there = bool(outside), f"{len(outside)} table(s) lie there ({first_of(outside, NAMED)})"
        text += f": {size_in_words(host_bytes)} on a host; {there}"
    else:
        matters = host_bytes > here_bytes
        text += f"; a host like this one has {size_in_words(here_bytes)} for all of its ranks"
    if matters and rank_bytes == DDR_CAP:
        yield Note("assumption", text, {"host_bytes": host_bytes, "here_bytes": here_bytes})


def training_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> list[str]:
    """Return a sentence per sharding type and reason on tables that train differently than whole ones."""
    changed: dict[tuple[str, str], list[str]] = {}
    for option in plan:
        if reason := model.training_change(option):
            changed.setdefault((option.sharding_type, reason), []).append(fqn_of(option))
    return [
        f"{first_of(sorted(tables), NAMED)}: {kind} trains differently than a whole table, {reason}"
        for (kind, reason), tables in sorted(changed.items())
    ]


def missing_optimizers(plan: Sequence[ShardingOption], reader: OptionReader) -> str | None:
    """Return a sentence on tables whose optimizer is assumed; None if every table has one."""
    tables = sorted(fqn_of(option) for option in plan if reader.assumes_sgd(option))
    if not tables:
        return None
    return (
        f"no optimizer was found in the backward of {len(tables)} table(s) ({first_of(tables, NAMED)}): SGD is "
        "assumed. Call apply_optimizer_in_backward before planning, and again after a copy.deepcopy, which loses it: "
        "another optimizer needs more memory, and its model refuses the file of this plan"
    )


def lost_optimizers(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[str, ...]:
    """Return a warning for each way in which the plan takes an in-backward optimizer away from tables."""
    trained = [option for option in plan if model.rater.reader.in_backward(option)]
    kept = (None, REPLICAS_OF_GROUPS.text)
    replicated = [
        fqn_of(option)
        for option in trained
        if type_of(option).is_replicated and model.training_change(option) not in kept
    ]
    cut = (option for option in trained if not type_of(option).is_replicated)
    dense = [fqn_of(option) for option in cut if option.compute_kernel == DENSE]
    warnings = []
    if replicated:
        warnings.append(
            f"{first_of(sorted(replicated), NAMED)}: the plan is data_parallel, which takes the in-backward optimizer "
            "away. They are trained only by an optimizer of the script's own, over "
            "in_backward_optimizer_filter(model.named_parameters()), unless attach_optimizers(model) can give it back; "
            "or name other types in their ParameterConstraints.sharding_types"
        )
    if dense:
        warnings.append(f"{first_of(sorted(dense), NAMED)}: {DENSE_KERNELS}")
    return tuple(warnings)


@neutral()
@torch.no_grad()
def exact_training_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> list[Note]:
    """Return notes on the options that exact training excludes from the search for a plan with ranks.

    Beyond quick effort, smaller models have the cost of TorchRec's plan over all options.
    """
    wider, opened = _widened(model, exact_training=False)
    if not opened:
        return []
    outside = {fqn_of(one) for one in plan if one.name in opened and kernel_of(one.compute_kernel).memory != "device"}
    may_fit = outside and model.ranks.topology.compute_device != "cpu"
    compares = len(plan) * model.room.world_size <= MAX_SHARDS and model.settings.effort != "quick"
    with single_thread():
        options: list[ShardingOption] = []
        if may_fit or compares:
            tables = [*shardable_tables(model.skeleton, model.sharders)]
            needed = frozenset((id(one.owner.module), one.name) for one in tables if compares or one.fqn in outside)
            sharders = [sharding_only(needed, sharder) for sharder in model.sharders]
            every = wider.enumerator(model.settings.batch_size).enumerate(model.skeleton, sharders)
            options = wider.usable_options(every)
        others = [option for option in options if fqn_of(option) in outside]
        forced_out = _forced_out(model, wider, plan, others) if may_fit else ()
        text = f"exact training leaves out {_types(chain(*opened.values()))} (exact_training=False allows it)"
        figures: dict[str, float] = {}
        if compares:
            told, figures = _against_torchrec(model, wider, plan, options)
            text += f": TorchRec's plan over all options is {told}"
    _, attached = _widened(model, optimizers_attached=True)
    if attached:
        text += f"; optimizers_attached=True allows {_types(chain(*attached.values()))} and trains exactly"
    return [*forced_out, Note("beyond_exact_training", text, figures)]


def _widened(model: ModelProblem, **settings: Any) -> tuple[PlanRater, dict[str, set[str]]]:
    """Return a rater under changed settings, and the sharding types that only these allow, by table name."""
    tables = shardable_tables(model.skeleton, model.sharders, model.settings.statistics)
    constraints = constraints_under(replace(model.settings, **settings), model.ranks, tables, model.legal)
    known: Mapping[str, ParameterConstraints] = model.rater.constraints
    exact = {name: set(constraint.sharding_types or ()) for name, constraint in known.items()}
    opened = {
        name: types
        for name, constraint in constraints.items()
        if (types := set(constraint.sharding_types or ()) - exact.get(name, set()))
    }
    return replace(model.rater, constraints=constraints), opened


def _types(types: Iterable[str]) -> str:
    """Return sharding types with their number of tables."""
    return ", ".join(f"{kind} for {count} table(s)" for kind, count in sorted(Counter(types).items()))


def _forced_out(
    model: ModelProblem, wider: PlanRater, plan: Sequence[ShardingOption], options: Sequence[ShardingOption]
) -> tuple[Note, ...]:
    """Return a note on tables that only exact training keeps out of device memory, if there are any.

    A short search from the plan lets these tables take ``options``.
    """
    offered = by_table(options)
    kept = [one for one in plan if not any(same_option(one, other) for other in offered.get(fqn_of(one), ()))]
    read = wider.read([*options, *kept], model.room)
    cost, start, searching = wider.cost(read), read.sharding(plan), model.settings.searching
    found = search(cost, [start], replace(searching, effort=FIGURE_EFFORT * searching.effort))
    exact_ms = cost.overall_ms(start)
    if found is None or not found.overall_ms < exact_ms * (1 - NOTHING):
        return ()
    inside = [
        choices[index].sharding_type
        for name, choices, index in zip(read.problem.names, read.problem.tables, found.sharding.options, strict=True)
        if name in offered and kernel_of(choices[index].kernel).memory == "device"
    ]
    if not inside:
        return ()
    lost_ms = exact_ms - found.overall_ms
    text = (
        f"Exact training keeps {len(inside)} table(s) out of device memory, which is predicted to cost {lost_ms:.3f} "
        f"of {exact_ms:.3f} ms. With exact_training=False they would fit: {_types(inside)}"
    )
    return (Note("forced_out", text, {"tables": len(inside), "lost_ms": lost_ms}),)


def _against_torchrec(
    model: ModelProblem, wider: PlanRater, plan: Sequence[ShardingOption], options: list[ShardingOption]
) -> tuple[str, dict[str, float]]:
    """Return text and figures that compare a plan with TorchRec's over some options."""
    if not any(map(wider.is_guess, plan)):
        options = wider.certain_options(options)
    theirs = torchrec_plan([*filter(is_torchrecs, options)], model.room, model.settings.effort_factor)
    exact_ms = wider.rated(plan).total_ms
    if theirs is None:
        return "not found", {"exact_ms": exact_ms}
    theirs_ms = wider.rated(theirs.options).total_ms
    factor = exact_ms / theirs_ms if theirs_ms > 0 else 1.0
    told = f"predicted at {theirs_ms:.3f} ms, this plan at {exact_ms:.3f} ({factor:.3f} times)"
    return told, {"exact_ms": exact_ms, "torchrec_ms": theirs_ms}
