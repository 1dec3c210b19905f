# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes on a plan: guesses that its figures rest on, changes in the training of its tables, and the options that exact
training leaves out, with what they would gain by prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torchrec.distributed.planner.constants import DDR_CAP
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Topology

from dreamshard_planner.measure.hardware import total_bytes
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.model_problem import ModelProblem, planned_constraints
from dreamshard_planner.planning.search_plan import torchrec_plan
from dreamshard_planner.plans.report import Note, noted
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.search import search
from dreamshard_planner.search_space.enumeration import sharding_only
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import by_table, fqn_of, is_torchrecs, same_option, type_of
from dreamshard_planner.search_space.replica_rules import DENSE_KERNELS
from dreamshard_planner.search_space.sharding_types import DENSE, REPLICAS_OF_GROUPS, in_host_memory, memory_of
from dreamshard_planner.support.formatting import first_of, size_in_words
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.workload.counting import in_smaller_batches
from dreamshard_planner.workload.reuse import POPULARITY_EXPONENT
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics

MANY_LOOKUPS = 10.0
"""Lookups per sample of features without statistics, for a second figure beside the one for a single lookup."""
NAMED = 3
"""Features, or tables, named in one note."""
FIGURE_EFFORT = 0.1
"""Candidates of the search for a figure, as a share of the plan's."""
NOTHING = 1e-3
"""Share of a cost below which a difference is not reported."""
MAX_SHARDS = 4_000
"""Tables times ranks up to which reports have TorchRec's plan over all options, which takes seconds beyond."""


def assumptions(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return notes on the guesses that the figures of a plan with ranks rest on: lookups, their reuse, batch sizes and
    memory; none if the plan cannot be rated."""
    missing = missing_optimizers(plan, model.context.reader)
    try:
        return (
            *noted("optimizer", [missing] if missing else []),
            *_lookups(model, plan),
            *_popularity(model.context, plan),
            *_batch_size(plan, model.settings.given_batch_size),
            *_samples(model, plan),
            *_host_memory(model.ranks.topology, plan),
        )
    except PlannerError:  # callbacks changed the plan
        return ()


@torch.no_grad()
def _lookups(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    context, settings = model.context, model.settings
    given = [(one, feature) for one in plan for feature in context.reader.declared(one).features]
    unknown = [(one, feature) for one, feature in given if not settings.tells_lookups(one.name, feature)]
    if not unknown:
        return ()
    # Features of an nn.EmbeddingBag have no names.
    every, shown = (
        sorted({feature or f"of table {fqn_of(one)!r}" for one, feature in some}) for some in (given, unknown)
    )
    text = (
        f"one lookup per sample is assumed for {len(shown)} of {len(every)} features ({first_of(shown, NAMED)}), "
        "since neither statistics nor pooling_factors tell"
    )
    figures = {"features": float(len(shown)), "of_features": float(len(every))}
    if context.cost_source != "torchrec":  # its estimates stay those that the options came with
        many = dict.fromkeys((feature for _, feature in unknown), FeatureStatistics(MANY_LOOKUPS))
        other = context.with_statistics(TableStatistics({**dict(settings.statistics or {}), **many}))
        one_ms, ten_ms = (each.rated(plan).total_ms for each in (context, other))
        # More lookups never take less. A network errs by more than a few lookups take in a nearly empty kernel.
        ten_ms = max(one_ms, ten_ms)
        figures |= {"one_ms": one_ms, "ten_ms": ten_ms}
        if ten_ms > one_ms * (1 + NOTHING):
            text += f"; with {MANY_LOOKUPS:.0f} this plan would take {ten_ms:.3f} ms instead of {one_ms:.3f}"
            text += ", and another may be better"
    return (Note("assumption", text, figures),)


def _popularity(context: PlanRater, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note on tables in host memory, whose popularity of rows decides the hits of caches."""
    names = [fqn_of(option) for option in plan if context.reader.assumes_popularity(option)]
    if not names or context.cost_source == "torchrec":
        return ()
    text = (
        f"popularity of rows is assumed to fall as rank to the power {POPULARITY_EXPONENT} for {len(names)} table(s) "
        f"in host memory ({first_of(names, NAMED)}), and with it hits of caches, since no statistics tell how often "
        "rows are read again"
    )
    return (Note("assumption", text, {"tables": float(len(names)), "exponent": POPULARITY_EXPONENT}),)


def _batch_size(plan: Sequence[ShardingOption], given: int | None) -> tuple[Note, ...]:
    if given is not None or not plan:
        return ()
    batch_size = plan[0].batch_size
    text = f"a local batch of {batch_size} samples is assumed, TorchRec's default: costs are nearly proportional to it"
    return (Note("assumption", text, {"batch_size": float(batch_size)}),)


def _samples(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note on features that were counted in smaller batches than others of their module."""
    context, settings = model.context, model.settings
    statistics: Mapping[str, FeatureStatistics] = settings.statistics or {}
    known: dict[str, dict[str, FeatureStatistics]] = {}
    told: set[str] = set()
    for option in plan:
        features, given = context.reader.declared(option).features, (settings.constraints or {}).get(option.name)
        known.setdefault(option.path, {}).update((name, statistics[name]) for name in features if name in statistics)
        told.update(features if given is not None and given.batch_sizes else ())
    names = sorted({name for of_module in known.values() for name in in_smaller_batches(of_module)} - told)
    if not names:
        return ()
    text = (
        f"batches of {plan[0].batch_size:,} samples are assumed for every feature, and {len(names)} of them "
        f"({first_of(names, NAMED)}) were counted in smaller batches than others of their module: where batches vary "
        "by feature, batch_sizes of constraints tell"
    )
    return (Note("assumption", text, {"features": float(len(names))}),)


def _host_memory(topology: Topology, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note on TorchRec's default of host memory: if tables lie there, or CPU ranks have less."""
    here_bytes, rank_bytes = total_bytes(), topology.devices[0].storage.ddr
    host_bytes = rank_bytes * min(topology.local_world_size, topology.world_size)
    figures = {"host_bytes": float(host_bytes), "here_bytes": float(here_bytes)}
    if rank_bytes != DDR_CAP:
        return ()
    assumed = f"{size_in_words(rank_bytes)} of host memory are assumed for every rank, TorchRec's default (ddr_cap)"
    if topology.compute_device != "cpu":
        outside = [fqn_of(option) for option in plan if in_host_memory(option.compute_kernel)]
        there = f"{len(outside)} table(s) lie there ({first_of(outside, NAMED)})"
        text = f"{assumed}: {size_in_words(host_bytes)} on a host; {there}"
        return (Note("assumption", text, figures),) if outside else ()
    text = f"{assumed}; a host like this one has {size_in_words(here_bytes)} for all of its ranks"
    return (Note("assumption", text, figures),) if host_bytes > here_bytes else ()


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
    trained = [option for option in plan if model.context.reader.in_backward(option)]
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
    """Return notes on the options that exact training excludes from the search for a plan with ranks."""
    wider = _WiderSpace.of(model, exact_training=False)
    if not wider.opened:
        return []
    with single_thread():
        return [*_forced_out(model, wider, plan), _left_out(model, wider, plan)]


@dataclass(frozen=True)
class _WiderSpace:
    """The options of a model under other settings."""

    model: ModelProblem
    context: PlanRater
    """Rates options within the wider constraints."""
    opened: Mapping[str, set[str]]
    """Sharding types that only this space has, by table name."""

    @classmethod
    def of(cls, model: ModelProblem, **settings: Any) -> _WiderSpace:
        """Widen the options of a model by changed settings."""
        tables = shardable_tables(model.skeleton, model.sharders, model.settings.statistics)
        constraints = planned_constraints(replace(model.settings, **settings), model.ranks, tables, model.legal)
        known: Mapping[str, ParameterConstraints] = model.context.constraints or {}
        exact = {name: set(constraint.sharding_types or ()) for name, constraint in known.items()}
        opened = {
            name: types
            for name, constraint in constraints.items()
            if (types := set(constraint.sharding_types or ()) - exact.get(name, set()))
        }
        return cls(model, replace(model.context, constraints=constraints), opened)

    def enumerated(self, names: Collection[str]) -> list[ShardingOption]:
        """Return the options of the tables with these names."""
        module, given = self.model.skeleton, self.model.sharders
        tables = frozenset((id(t.module), t.name) for t in shardable_tables(module, given) if t.name in names)
        sharders = [sharding_only(tables, sharder) for sharder in given]
        enumerator = self.context.enumerator(self.model.settings.batch_size)
        return self.context.usable_options(enumerator.enumerate(module, sharders))

    def opened_in_words(self) -> str:
        """Return the types that only this space has, with their number of tables."""
        return _counted(sorted(Counter(chain.from_iterable(self.opened.values())).items()))


def _counted(types: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} for {count} table(s)" for kind, count in types)


def _forced_out(model: ModelProblem, wider: _WiderSpace, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note on tables that only exact training keeps out of device memory, if there are any.

    A short search from the plan lets these tables take the options that exact training excludes.
    """
    outside = {fqn_of(option) for option in plan if memory_of(option.compute_kernel) != "device"}
    named = {option.name for option in plan if fqn_of(option) in outside and option.name in wider.opened}
    if model.ranks.topology.compute_device == "cpu" or not named:
        return ()
    options = [option for option in wider.enumerated(named) if fqn_of(option) in outside]
    offered = by_table(options)
    options += [one for one in plan if not any(same_option(one, other) for other in offered.get(fqn_of(one), ()))]
    read = wider.context.read(options, model.left)
    cost, start, settings = wider.context.cost(read), read.sharding(plan), model.settings
    found = search(cost, [start], settings.search.times(FIGURE_EFFORT), settings.seed, settings.seconds)
    exact_ms = cost.overall_ms(start)
    if found is None or not found.overall_ms < exact_ms * (1 - NOTHING):
        return ()
    inside = [
        choices[index].sharding_type
        for name, choices, index in zip(read.problem.names, read.problem.tables, found.sharding.options, strict=True)
        if name in outside and memory_of(choices[index].kernel) == "device"
    ]
    if not inside:
        return ()
    lost_ms = exact_ms - found.overall_ms
    text = (
        f"Exact training keeps {len(inside)} table(s) out of device memory, which is predicted to cost {lost_ms:.3f} "
        f"of {exact_ms:.3f} ms. With exact_training=False they would fit: {_counted(Counter(inside).most_common())}"
    )
    return (Note("forced_out", text, {"tables": len(inside), "lost_ms": lost_ms}),)


def _left_out(model: ModelProblem, wider: _WiderSpace, plan: Sequence[ShardingOption]) -> Note:
    """Return a note on the excluded options. Beyond quick effort it has the cost of TorchRec's plan over all options of
    smaller models."""
    text = f"exact training leaves out {wider.opened_in_words()} (exact_training=False allows it)"
    figures = {}
    if len(plan) * model.left.world_size <= MAX_SHARDS and model.settings.effort != "quick":
        figures["exact_ms"] = exact_ms = wider.context.rated(plan).total_ms
        theirs_ms = _torchrec_ms(model, wider, plan)
        if theirs_ms is None:
            text += ": TorchRec's plan over all options is not found"
        else:
            factor = exact_ms / theirs_ms if theirs_ms > 0 else 1.0
            text += (
                f": TorchRec's plan over all options is predicted at {theirs_ms:.3f} ms, this plan at {exact_ms:.3f} "
                f"({factor:.3f} times)"
            )
            figures["torchrec_ms"] = theirs_ms
    attached = _WiderSpace.of(model, optimizers_attached=True)
    if attached.opened:
        text += f"; optimizers_attached=True allows {attached.opened_in_words()} and trains exactly"
    return Note("beyond_exact_training", text, figures)


def _torchrec_ms(model: ModelProblem, wider: _WiderSpace, plan: Sequence[ShardingOption]) -> float | None:
    """Return the predicted milliseconds of TorchRec's plan over all options; None if there is none."""
    context, searched = wider.context, model.searched
    options = [option for option in searched if option.name not in wider.opened]
    options += wider.enumerated(set(wider.opened))
    if not any(map(context.is_guess, plan)):
        options = context.certain_options(options)
    order = {fqn: index for index, fqn in enumerate(by_table(searched))}
    options.sort(key=lambda option: order[fqn_of(option)])
    offered = [option for option in options if is_torchrecs(option)]
    theirs = torchrec_plan(offered, model.left, model.settings.candidates)
    return None if theirs is None else context.rated(theirs.options).total_ms
