# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compare predicted with observed steps: differences, their meaning, and a verdict on the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from dreamshard_planner.cost.correction import DIRECTIONS
from dreamshard_planner.observing.observation import OUTPUTS, ObservedRun
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Predicted
from dreamshard_planner.search_space.sharding_types import DENSE
from dreamshard_planner.support.formatting import first_of
from dreamshard_planner.workload.counting import same_batch
from dreamshard_planner.workload.tables import costed_optimizer

NEAR, NEAR_EXCHANGE = 0.2, 0.5
"""Relative errors of kernels and exchanges up to which a prediction is trusted."""
ALIKE = 1.25
"""Ratio between ranks' errors up to which all ranks are off alike."""
SMALL = 0.1
"""Share of the embedding work below which the error of exchanges does not matter."""
SHOWN = 3
"""Features that a sentence names."""
OTHER_LOOKUPS = 0.1
"""Relative change of a feature's lookups from which its statistics differ."""


@dataclass(frozen=True)
class Compared:
    """Milliseconds of a step for one kind of work, by rank."""

    what: str
    predicted_ms: tuple[float, ...] | None
    """None for work that is not predicted."""
    observed_ms: tuple[float, ...]


@dataclass(frozen=True)
class RunComparison:
    """Predicted and observed times of one run."""

    title: str
    kinds: tuple[Compared, ...]
    meaning: tuple[str, ...]
    """Sentences that explain the differences."""
    verdict: str
    trusted: bool | None
    """None if no prediction was kept."""
    embeddings: str
    """Sentence on the share of embedding work in a step, and on the plan's predicted gain over TorchRec's; empty if no
    step was timed."""


def compare(run: ObservedRun) -> RunComparison:
    """Compare a run with its plan's prediction for the observed ranks."""
    plan, ranks = run.plan, [rank.rank for rank in run.ranks]
    predicted, trusted = None, None
    meaning: list[str] = []
    if plan is None and min(ranks):
        verdict = "the prediction, if one was kept, is in the file of rank 0, which is not given"
    elif plan is None:
        verdict = "no prediction was kept: observe(model, planner) with the DreamShardPlanner that made the plan"
    elif (planned := plan.inputs.topology.world_size) <= max(ranks):
        verdict = f"the prediction is for {planned} ranks, and rank {max(ranks)} was observed: times do not compare"
    else:
        predicted = plan.predicted
        meaning, verdict, trusted = _judged(run, plan)
    return RunComparison(
        title=f"{run.steps:,} steps from {run.started}, {len(ranks)} of {run.world_size} ranks",
        kinds=tuple(_kinds(run, predicted)),
        meaning=tuple(meaning),
        verdict=verdict,
        trusted=trusted,
        embeddings=_embeddings(run),
    )


def _embeddings(run: ObservedRun) -> str:
    if run.embedding_share is None:
        return ""
    text = f"embeddings are about {run.embedding_share:.0%} of the step"
    saved = None if run.plan is None else run.plan.predicted.saved_share
    return text if saved is None else f"{text}; the plan is predicted to save {saved:.0%} of them"


def _kinds(run: ObservedRun, predicted: Predicted | None) -> Iterator[Compared]:
    ranks = [rank.rank for rank in run.ranks]
    for way in DIRECTIONS:
        expected = None if predicted is None else tuple(getattr(predicted.chosen, f"{way}_ms")[rank] for rank in ranks)
        yield Compared(f"fused kernels, {way}", expected, tuple(rank.kernel_ms(way) for rank in run.ranks))
    # Lookups that the modules did not wait for take the time of their exchanges alone.
    exchanged_ms = sum(one.ms for name, one in run.collectives.items() if name.startswith("lookups"))
    lookups_ms = exchanged_ms if run.lookups_ms is None else run.lookups_ms
    # The time of an exchange beside other work is not predicted.
    for carried, beside, observed_ms in (
        (OUTPUTS, run.hides_outputs, run.outputs_ms),
        ("lookups", run.lookups_ms is None, lookups_ms),
    ):
        what = f"exchange of {carried}, {'on their way beside other work' if beside else 'of the last rank to come'}"
        expected = None if beside or predicted is None else (_predicted_ms(predicted, carried),) * len(ranks)
        yield Compared(what, expected, (observed_ms,) * len(ranks))

    others: dict[str, Sequence[float]] = {}
    for name, one in run.collectives.items():
        others |= {f"{name}: until it is there": one.span_ms, f"{name}: waiting alone": one.waited_ms}
    if any(run.medians("input_dist")):
        others["input_dist: until kernels have their lookups"] = run.medians("input_dist")
    model_ms, step_ms = np.array(run.medians("forward", "backward")), run.medians("step")
    away_ms = run.medians("input_dist", "kernels", *(f"{name} waited" for name in run.outputs))
    others |= {
        "dense layers, and what else is in the model": (model_ms - away_ms).clip(0).tolist(),
        "outside of the model: data, dense optimizer": (step_ms - model_ms).clip(0).tolist(),
        "the whole step": step_ms,
    }
    for what, ms in others.items():
        yield Compared(what, None, tuple(ms))


def _predicted_ms(predicted: Predicted, carried: str) -> float:
    lookups_ms = sum(ms for name, ms in predicted.collectives if name.endswith((" lookups", " bucketing")))
    return lookups_ms if carried == "lookups" else predicted.chosen.collectives_ms - lookups_ms


def _other_work(run: ObservedRun, plan: SavedPlan) -> Iterator[str]:
    """Tell how the run's work differs from that of the prediction, so that times do not compare."""
    planned, seen = plan.inputs.batch_size, max((feature.samples for feature in run.statistics.values()), default=0)
    if seen and not same_batch(planned, seen):
        yield (
            f"another batch size: the plan was made for {planned:,} samples a rank, and batches have {seen:,}; "
            f"give the planner batch_size={seen}"
        )
    kernels = [(table.name, kernel) for rank in run.ranks for kernel in rank.kernels for table in kernel.tables]
    # The kernels of replicas have no optimizer.
    trained = {name: kernel.optimizer for name, kernel in kernels if kernel.kernel != DENSE}
    optimizers = {name: costed_optimizer(table.optimizer) for name, table in plan.inputs.tables.items()}
    other = sorted(name for name in trained.keys() & optimizers.keys() if optimizers[name] != trained[name])
    if other:
        yield (
            f"another optimizer: the plan was made for {optimizers[other[0]]} of {first_of(other, SHOWN)}, and "
            f"{trained[other[0]]} trains it: let the planner plan the model as it is trained"
        )
    if replicas := sorted({name for name, kernel in kernels if kernel.kernel == DENSE}):
        yield (
            f"data-parallel tables ({first_of(replicas, SHOWN)}) are predicted with their optimizer and the all-reduce "
            "of their gradients, which run outside of the observed kernels and exchanges: observe a plan without them"
        )


def _other_lookups(run: ObservedRun) -> Iterator[str]:
    known = run.statistics
    changed = [
        f"{name} ({planned:.3g} -> {known[name].pooling_factor:.3g})"
        for name, planned in run.planned_lookups.items()
        if name in known and abs(known[name].pooling_factor - planned) > OTHER_LOOKUPS * max(planned, 1e-9)
    ]
    if changed:
        yield f"wrong statistics: lookups per sample are not those of the plan: {first_of(changed, SHOWN)}"


def _judged(run: ObservedRun, plan: SavedPlan) -> tuple[list[str], str, bool]:
    """Return sentences on differences, the verdict, and whether to trust the prediction."""
    others, predicted = [*_other_work(run, plan)], plan.predicted
    meaning = [*others, *_other_lookups(run)]
    if others:
        return meaning, "the prediction is of another training or of other work: times do not compare", False
    expected_ms = predicted.chosen.rank_ms
    times = {r.rank: r.kernel_ms(*DIRECTIONS) / expected_ms[r.rank] for r in run.ranks if expected_ms[r.rank]}
    if unseen := [str(rank) for rank, ratio in times.items() if not ratio]:
        meaning.append(f"no kernel of rank {', '.join(unseen)} was observed; torch.compile hides them")
    ratios, outputs_off = {rank: ratio for rank, ratio in times.items() if ratio}, _outputs_off(run, predicted)
    if not ratios:
        return [*meaning, *outputs_off], "no kernel was observed: the prediction is not judged", False
    slowest, fastest = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
    alike, error = ratios[slowest] <= ALIKE * ratios[fastest], fmean(abs(1 / ratio - 1) for ratio in ratios.values())
    if max(ratios[slowest] - 1, 1 - ratios[fastest]) > NEAR:
        kinds = sorted({kernel.sharding_type for rank in run.ranks if rank.rank == slowest for kernel in rank.kernels})
        uneven = (
            f"kernels of rank {slowest} ({', '.join(kinds)}) take {ratios[slowest]:.2f} times the predicted time, "
            f"kernels of rank {fastest} {ratios[fastest]:.2f} times: other kernels than the costs know, or another load"
        )
        even = f"kernels take {fmean(ratios.values()):.2f} times the predicted time, on all ranks alike"
        meaning.append(f"{even}: costs of another machine" if alike else uneven)
    verdicts = (
        (
            error > NEAR and alike,
            False,
            ", all ranks alike: trust the order of tables, not times, before dreamshard learn",
        ),
        (error > NEAR, False, ": do not trust the prediction on this hardware before dreamshard learn"),
        (run.hides_outputs, True, ", exchanges are not judged: kernels may be trusted on this hardware"),
        (outputs_off, False, ", exchanges are not well predicted: trust kernels, but not plans that split tables"),
        (True, True, ", exchanges well enough: the prediction may be trusted on this hardware"),
    )
    trusted, verdict = next((trusted, verdict) for holds, trusted, verdict in verdicts if holds)
    said = f"kernels are predicted {100 * error:.0f} % off ({predicted.cost_source}){verdict}"
    return [*meaning, *outputs_off], said, trusted


def _outputs_off(run: ObservedRun, predicted: Predicted) -> list[str]:
    """Return a sentence if the time of outputs is hidden, or not that predicted."""
    expected_ms, observed_ms = _predicted_ms(predicted, OUTPUTS), run.outputs_ms
    if run.hides_outputs:
        return ["other work hides the time of outputs on their way: it is not judged, nor learned"]
    small_ms = SMALL * (max(predicted.chosen.rank_ms) + expected_ms)
    if abs(observed_ms - expected_ms) <= max(NEAR_EXCHANGE * expected_ms, small_ms):
        return []
    if not observed_ms or not expected_ms:
        return [f"exchange of outputs: {expected_ms:.3f} ms predicted, {observed_ms:.3f} observed"]
    ratio = observed_ms / expected_ms
    side = "slow link, or ranks that share cores" if ratio > 1 else "faster link than was assumed"
    moved = sum(max(one.bytes) for one in run.outputs.values())
    return [
        f"{side}: outputs take {ratio:.2f} times the predicted time, at {moved / observed_ms / 1e6:.3g} GB/s "
        f"of a rank ({predicted.collectives_source})"
    ]
