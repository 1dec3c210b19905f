# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Results of the DLRM benchmark for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from common.output import table_of
from dlrm.results import Result

MAX_SPLITS_SHOWN = 3


def print_table(result: Result, console: Console) -> None:
    """The result for people."""
    config = result.config
    ranks = "1 rank" if result.world_size == 1 else f"{result.world_size} ranks"
    title = f"DLRM on {ranks} x {config.batch_size} samples, {result.provenance['hardware']['name']}"
    headings = ("step ms", "IQR", f"x {result.base}", "95 %", "embedding ms per rank", "samples/s")
    table = table_of(title, "planner", *headings, "predicted ms", "per rank")
    for entry in result.planners:
        embedding = [f + b for f, b in zip(entry.forward_ms, entry.backward_ms, strict=True)]
        table.add_row(
            entry.name,
            f"{entry.step_ms[1]:.1f}",
            f"{entry.step_ms[0]:.1f}-{entry.step_ms[2]:.1f}",
            f"{entry.ratio[1]:.3f}",
            f"{entry.ratio[0]:.3f}-{entry.ratio[2]:.3f}",
            _per_rank(embedding),
            f"{entry.samples_per_second:,.0f}",
            f"{entry.predicted.total_ms:.2f}",
            _per_rank(entry.predicted.rank_ms),
        )
    console.print(result.scaling)
    console.print(table)
    blocks = len(result.planners[0].block_ms[0])
    console.print(
        f"{config.copies} model(s) per planner, {blocks} blocks of {config.block} steps each, interleaved: medians and "
        f"quartiles of blocks; x {result.base}: ratio of blocks of one round, and its 95 % interval over models and "
        f"rounds. Embedding: fused kernels, forward + backward, measured in the steps. Predicted: embedding work and "
        f"its collectives; cost source: {result.cost_source}. Sharding types allowed: {', '.join(config.kinds)}, in "
        f"fused kernels; torchrec_default alone has no pooling factors."
    )
    print_profiles(result, console)
    for entry in result.planners:
        if entry.split:
            shown = list(entry.split.items())[:MAX_SPLITS_SHOWN]
            split = ", ".join(f"{name} {kind} over ranks {entry.ranks[name]}" for name, kind in shown)
            more = ", ..." if len(entry.split) > len(shown) else ""
            console.print(f"{entry.name} splits {len(entry.split)} table(s): {split}{more}")
    base = next(entry for entry in result.planners if entry.name == result.base)
    slowest = max(f + b for f, b in zip(base.forward_ms, base.backward_ms, strict=True))
    console.print(f"Embedding kernels are {slowest / base.step_ms[1]:.0%} of {result.base}'s step on its slower rank.")
    if result.speed is not None:
        hour = ", ".join(
            f"{entry.name} {_per_rank([ms * result.speed for ms in entry.predicted.rank_ms])}"
            for entry in result.planners
            if entry.predicted.rank_ms
        )
        console.print(
            f"Speed of the hour: the reference set takes {result.reference_ms:.2f} ms, {result.speed:.2f} times what "
            f"it took when the checkpoint's kernels were measured. Predicted per rank at that speed: {hour}."
        )
    console.print(f"Same training: losses of the models differ by at most {result.loss_difference:.1e}.")


def print_profiles(result: Result, console: Console) -> None:
    """Where the time of a step goes, beside what was predicted of it."""
    profiled = [entry for entry in result.planners if entry.profile]
    if not profiled:
        return
    kinds = dict.fromkeys(kind for entry in profiled for of_rank in entry.profile for kind in of_rank)
    title = f"Milliseconds of a step by kind of work, each rank; {result.config.profile} steps profiled"
    table = table_of(title, "kind of work", *(entry.name for entry in profiled))
    for kind in kinds:
        table.add_row(kind, *(_per_rank([of_rank.get(kind, 0.0) for of_rank in entry.profile]) for entry in profiled))
    table.add_section()
    table.add_row("predicted: embedding", *(_per_rank(entry.predicted.rank_ms) for entry in profiled))
    table.add_row("predicted: collectives", *(f"{entry.predicted.collectives_ms:.1f}" for entry in profiled))
    console.print(table)


def _per_rank(values_ms: Sequence[float], shown: int = 4) -> str:
    text = " ".join(f"{value:.1f}" for value in values_ms[:shown])
    return text if len(values_ms) <= shown else f"{text} ... max {max(values_ms):.1f}"
