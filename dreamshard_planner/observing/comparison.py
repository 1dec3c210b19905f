# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compare predicted with observed steps: differences, their meaning, and a verdict on the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dreamshard_planner.observing.observation import OUTPUTS, ObservedRun
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Predicted
from dreamshard_planner.search_space.sharding_types import DENSE
from dreamshard_planner.support.formatting import first_of
from dreamshard_planner.workload.counting import SAME_BATCH
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
    embeddings: str = ""
    """Sentence on the share of embedding work in a step, and on the plan's predicted gain over TorchRec's."""


def compare(run: ObservedRun) -> RunComparison:
    """Compare a run with its plan's prediction for the observed ranks."""
    title = f"{run.steps:,} steps from {run.started}, {len(run.ranks)} of {run.world_size} ranks"
    plan = run.plan
    last, planned = max(rank.rank for rank in run.ranks), 0 if plan is None else plan.inputs.topology.world_size
    if plan is None or last >= planned:
        verdict = "no prediction was kept: observe(model, planner) with the DreamShardPlanner that made the plan"
        if min(rank.rank for rank in run.ranks):
            verdict = "the prediction, if one was kept, is in the file of rank 0, which is not given"
        if planned:
            verdict = f"the prediction is for {planned} ranks, and rank {last} was observed: times do not compare"
        return RunComparison(title, tuple(_kinds(run, None)), (), verdict, None, _embeddings(run))
    kinds = tuple(_kinds(run, plan.predicted))
    differs = (*_other_batch_size(run, plan), *_other_optimizers(run, plan), *_replicas(run))
    meaning = [*differs, *_other_lookups(run)]
    if differs:
        verdict, trusted = "the prediction is of another training or of other work: times do not compare", False
    else:
        ratios = _kernel_ratios(run, plan.predicted)
        meaning += [
            *_unseen_kernels(run, plan.predicted),
            *_of_kernels(run, ratios),
            *_of_exchange(run, plan.predicted),
        ]
        verdict, trusted = _verdict(run, ratios, plan.predicted)
    return RunComparison(title, kinds, tuple(meaning), verdict, trusted, _embeddings(run))


def _embeddings(run: ObservedRun) -> str:
    """Return a sentence on the share of embedding work in a step; empty if no step was timed."""
    if run.embedding_share is None:
        return ""
    text = f"embeddings are about {run.embedding_share:.0%} of the step"
    saved = None if run.plan is None else run.plan.predicted.saved_share
    return text if saved is None else f"{text}; the plan is predicted to save {saved:.0%} of them"


def _replicas(run: ObservedRun) -> Iterator[str]:
    kernels = [kernel for rank in run.ranks for kernel in rank.kernels if kernel.kernel == DENSE]
    if kernels:
        names = sorted({table.name for kernel in kernels for table in kernel.tables})
        yield (
            f"data-parallel tables ({first_of(names, SHOWN)}) are predicted with their optimizer and the all-reduce of "
            "their gradients, which run outside of the observed kernels and exchanges: observe a plan without them"
        )


def _other_optimizers(run: ObservedRun, plan: SavedPlan) -> Iterator[str]:
    planned = {name: costed_optimizer(table.optimizer) for name, table in plan.inputs.tables.items()}
    # The kernels of replicas have no optimizer.
    kernels = [kernel for rank in run.ranks for kernel in rank.kernels if kernel.kernel != DENSE]
    trained = {table.name: kernel.optimizer for kernel in kernels for table in kernel.tables}
    other = sorted(name for name in trained.keys() & planned.keys() if planned[name] != trained[name])
    if other:
        yield (
            f"another optimizer: the plan was made for {planned[other[0]]} of {first_of(other, SHOWN)}, and "
            f"{trained[other[0]]} trains it: let the planner plan the model as it is trained"
        )


def _kinds(run: ObservedRun, predicted: Predicted | None) -> Iterator[Compared]:
    ranks = [rank.rank for rank in run.ranks]
    for way in ("forward", "backward"):
        expected = None if predicted is None else tuple(getattr(predicted.chosen, f"{way}_ms")[rank] for rank in ranks)
        yield Compared(f"fused kernels, {way}", expected, tuple(rank.kernel_ms(way) for rank in run.ranks))
    # Lookups that the modules did not wait for take the time of their exchanges alone.
    exchanged_ms = sum(one.ms for name, one in run.collectives.items() if name.startswith("lookups"))
    lookups_ms = exchanged_ms if run.lookups_ms is None else run.lookups_ms
    # The time of an exchange beside other work is not predicted.
    for carried, beside in ((OUTPUTS, run.hides_outputs), ("lookups", run.lookups_ms is None)):
        what = f"exchange of {carried}, {'on their way beside other work' if beside else 'of the last rank to come'}"
        expected = None if beside or predicted is None else (_predicted_ms(predicted, carried),) * len(ranks)
        observed_ms = run.outputs_ms if carried == OUTPUTS else lookups_ms
        yield Compared(what, expected, (observed_ms,) * len(ranks))
    for name, one in run.collectives.items():
        yield Compared(f"{name}: until it is there", None, one.span_ms)
        yield Compared(f"{name}: waiting alone", None, one.waited_ms)
    inputs_ms = tuple(rank.median("input_dist") for rank in run.ranks)
    if any(inputs_ms):
        yield Compared("input_dist: until kernels have their lookups", None, inputs_ms)
    inside, outside = [], []
    for at, rank in enumerate(run.ranks):
        model_ms = rank.median("forward") + rank.median("backward")
        away_ms = inputs_ms[at] + sum(one.waited_ms[at] for one in run.outputs.values())
        inside.append(max(0.0, model_ms - rank.median("kernels") - away_ms))
        outside.append(max(0.0, rank.median("step") - model_ms))
    yield Compared("dense layers, and what else is in the model", None, tuple(inside))
    yield Compared("outside of the model: data, dense optimizer", None, tuple(outside))
    yield Compared("the whole step", None, tuple(rank.median("step") for rank in run.ranks))


def _predicted_ms(predicted: Predicted, carried: str) -> float:
    lookups_ms = sum(ms for name, ms in predicted.collectives if name.endswith((" lookups", " bucketing")))
    return lookups_ms if carried == "lookups" else predicted.chosen.collectives_ms - lookups_ms


def _kernel_ratios(run: ObservedRun, predicted: Predicted) -> dict[int, float]:
    """Return observed over predicted kernel time, by rank."""
    observed = {rank.rank: rank.kernel_ms("forward") + rank.kernel_ms("backward") for rank in run.ranks}
    expected = predicted.chosen.rank_ms
    return {rank: ms / expected[rank] for rank, ms in observed.items() if ms and expected[rank]}


def _unseen_kernels(run: ObservedRun, predicted: Predicted) -> Iterator[str]:
    ranks = [rank for rank in run.ranks if predicted.chosen.rank_ms[rank.rank]]
    if unseen := [rank.rank for rank in ranks if not rank.kernel_ms("forward") + rank.kernel_ms("backward")]:
        yield f"no kernel of rank {', '.join(map(str, unseen))} was observed; torch.compile hides them"


def _other_batch_size(run: ObservedRun, plan: SavedPlan) -> Iterator[str]:
    planned, seen = plan.inputs.batch_size, max((feature.samples for feature in run.statistics.values()), default=0)
    if seen and max(planned, seen) > SAME_BATCH * min(planned, seen):
        yield (
            f"another batch size: the plan was made for {planned:,} samples a rank, and batches have {seen:,}; "
            f"give the planner batch_size={seen}"
        )


def _other_lookups(run: ObservedRun) -> Iterator[str]:
    known = run.statistics
    changed = [
        f"{name} ({planned:.3g} -> {known[name].pooling_factor:.3g})"
        for name, planned in run.planned_lookups.items()
        if name in known and abs(known[name].pooling_factor - planned) > OTHER_LOOKUPS * max(planned, 1e-9)
    ]
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        yield f"wrong statistics: lookups per sample are not those of the plan: {', '.join(changed[:SHOWN])}{more}"


def _of_kernels(run: ObservedRun, ratios: dict[int, float]) -> Iterator[str]:
    if not ratios or all(abs(ratio - 1) <= NEAR for ratio in ratios.values()):
        return
    if max(ratios.values()) <= ALIKE * min(ratios.values()):
        mean = sum(ratios.values()) / len(ratios)
        yield f"kernels take {mean:.2f} times the predicted time, on all ranks alike: costs of another machine"
        return
    slowest, fastest = max(ratios, key=lambda rank: ratios[rank]), min(ratios, key=lambda rank: ratios[rank])
    kinds = sorted({kernel.sharding_type for rank in run.ranks if rank.rank == slowest for kernel in rank.kernels})
    yield (
        f"kernels of rank {slowest} ({', '.join(kinds)}) take {ratios[slowest]:.2f} times the predicted time, kernels "
        f"of rank {fastest} {ratios[fastest]:.2f} times: other kernels than the costs know, or another load"
    )


def _of_exchange(run: ObservedRun, predicted: Predicted) -> Iterator[str]:
    expected_ms, observed_ms = _predicted_ms(predicted, OUTPUTS), run.outputs_ms
    if run.hides_outputs:
        yield "other work hides the time of outputs on their way: it is not judged, nor learned"
    elif _exchange_near(predicted, observed_ms):
        return
    elif not observed_ms or not expected_ms:
        yield f"exchange of outputs: {expected_ms:.3f} ms predicted, {observed_ms:.3f} observed"
    else:
        ratio = observed_ms / expected_ms
        side = "slow link, or ranks that share cores" if ratio > 1 else "faster link than was assumed"
        moved = sum(max(one.bytes) for one in run.outputs.values())
        yield (
            f"{side}: outputs take {ratio:.2f} times the predicted time, at {moved / observed_ms / 1e6:.3g} GB/s "
            f"of a rank ({predicted.collectives_source})"
        )


def _exchange_near(predicted: Predicted, observed_ms: float) -> bool:
    expected_ms = _predicted_ms(predicted, OUTPUTS)
    off_ms, small_ms = abs(observed_ms - expected_ms), SMALL * (max(predicted.chosen.rank_ms) + expected_ms)
    return off_ms <= max(NEAR_EXCHANGE * expected_ms, small_ms)


def _verdict(run: ObservedRun, ratios: dict[int, float], predicted: Predicted) -> tuple[str, bool]:
    if not ratios:
        return "no kernel was observed: the prediction is not judged", False
    values = list(ratios.values())
    error = sum(abs(1 / ratio - 1) for ratio in values) / len(values)
    said = f"kernels are predicted {100 * error:.0f} % off ({predicted.cost_source})"
    if error <= NEAR and run.hides_outputs:
        return f"{said}, exchanges are not judged: kernels may be trusted on this hardware", True
    if error <= NEAR and _exchange_near(predicted, run.outputs_ms):
        return f"{said}, exchanges well enough: the prediction may be trusted on this hardware", True
    if error <= NEAR:
        return f"{said}, exchanges are not well predicted: trust kernels, but not plans that split tables", False
    if max(values) <= ALIKE * min(values):
        return f"{said}, all ranks alike: trust the order of tables, but not times, before dreamshard learn", False
    return f"{said}: do not trust the prediction on this hardware before dreamshard learn", False
