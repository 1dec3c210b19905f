# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes on a plan: guesses that its figures rest on, and changes in the training of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.distributed.planner.constants import DDR_CAP
from torchrec.distributed.planner.types import ShardingOption, Topology

from dreamshard_planner.measure.hardware import total_bytes
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.plan_inputs import PlannerSettings
from dreamshard_planner.plans.report import Note, noted
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.options import fqn_of, type_of
from dreamshard_planner.search_space.replica_rules import DENSE_KERNELS
from dreamshard_planner.search_space.sharding_types import DENSE, in_host_memory, inexact
from dreamshard_planner.support.formatting import first_of, size_in_words
from dreamshard_planner.workload.counting import in_smaller_batches
from dreamshard_planner.workload.reuse import POPULARITY_EXPONENT
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics

MANY_LOOKUPS = 10.0
"""Lookups per sample of features without statistics, for a second figure beside the one for a single lookup."""
NAMED = 3
"""Features, or tables, named in one note."""


def assumptions(context: PlanRater, plan: Sequence[ShardingOption], settings: PlannerSettings) -> tuple[Note, ...]:
    """Return notes on guesses: lookups, their reuse, batch sizes and memory. The plan has ranks."""
    missing = missing_optimizers(plan, context.reader)
    return (
        *noted("optimizer", [missing] if missing else []),
        *_lookups(context, plan, settings),
        *_popularity(context, plan),
        *_batch_size(plan, settings.given_batch_size),
        *_samples(context, plan, settings),
        *_host_memory(context.ranks.topology, plan),
    )


@torch.no_grad()
def _lookups(context: PlanRater, plan: Sequence[ShardingOption], settings: PlannerSettings) -> tuple[Note, ...]:
    given = [(one.name, feature) for one in plan for feature in context.reader.declared(one).features]
    unknown = sorted(feature for table, feature in given if not settings.tells_lookups(table, feature))
    if not unknown:
        return ()
    # Features of an nn.EmbeddingBag have no names.
    unnamed = {f"of table {fqn_of(one)!r}" for one in plan if "" in context.reader.declared(one).features}
    shown = [*filter(None, unknown), *(sorted(unnamed) if "" in unknown else ())]
    text = (
        f"one lookup per sample is assumed for {len(unknown)} of {len(given)} features ({first_of(shown, NAMED)}), "
        "since neither statistics nor pooling_factors tell"
    )
    figures = {"features": float(len(unknown)), "of_features": float(len(given))}
    if context.cost_source != "torchrec":  # its estimates stay those that the options came with
        many = dict.fromkeys(unknown, FeatureStatistics(MANY_LOOKUPS))
        other = context.with_statistics(TableStatistics({**dict(settings.statistics or {}), **many}))
        one_ms, ten_ms = (each.rated(plan).total_ms for each in (context, other))
        # More lookups never take less. A network errs by more than a few lookups take in a nearly empty kernel.
        ten_ms = max(one_ms, ten_ms)
        figures |= {"one_ms": one_ms, "ten_ms": ten_ms}
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


def _samples(context: PlanRater, plan: Sequence[ShardingOption], settings: PlannerSettings) -> tuple[Note, ...]:
    """Return a note on features that were counted in smaller batches than others of their module."""
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


def training_notes(plan: Sequence[ShardingOption], reader: OptionReader, compute_device: str) -> list[str]:
    """Return a sentence per sharding type and reason on tables that train differently than whole ones."""
    changed: dict[tuple[str, str], list[str]] = {}
    for option in plan:
        reason = inexact(option.sharding_type, reader.facts(option, compute_device))
        if reason is not None:
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


def lost_optimizers(plan: Sequence[ShardingOption], reader: OptionReader, compute_device: str) -> tuple[str, ...]:
    """Return a warning for each way in which the plan takes an in-backward optimizer away from tables."""
    trained = [option for option in plan if reader.in_backward(option)]
    replicated = [
        fqn_of(option)
        for option in trained
        if type_of(option).is_replicated and not reader.facts(option, compute_device).replicas_follow
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
