# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training steps that are observed on real ranks: as they are without it, with all times, and nothing left behind. A/B
tests of plans: equal weights and batches, turns that all ranks take alike, and what differs."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from logged import warned
from mixed import Case, MixedModel, TableSpec, _steps, planner_of, sharders
from ranks import Rank, run_on_ranks
from tensordict import TensorDict
from tiny import (
    FEATURES,
    LOCAL_BATCH,
    POOLING_FACTORS,
    SHAPES,
    SHARDERS,
    TinyModel,
    batch,
    batches,
    make_planner,
    shard,
    train,
)
from torch import nn
from torch.nested import nested_tensor_from_jagged
from torchrec.distributed.planner import ParameterConstraints
from torchrec.optim import SGD

from dlrm.job import EveryTypeSharder
from dreamshard_planner import (
    DistributedModelParallel,
    Observation,
    ObservationError,
    StepComparison,
    compare_steps,
    observe,
)
from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.observing.comparison import compare
from dreamshard_planner.observing.hooks import COLLECTIVES, kernels_in, lookups_of
from dreamshard_planner.observing.learning import observed_sets
from dreamshard_planner.observing.observation import ObservedRun
from dreamshard_planner.observing.observer import DEFAULTS
from dreamshard_planner.observing.step_comparison import ratio_interval
from tests import ways
from tests.ways import Batch

STEPS = 6
KINDS = ("table_wise", "column_wise", "row_wise", "data_parallel")


def _hooks(model: nn.Module) -> list[Any]:
    found: list[Any] = [getattr(dist, name) for name in COLLECTIVES]
    modules = [model, *(kernel.emb_module for *_, lookup in lookups_of(model) for kernel in kernels_in(lookup))]
    for module in (*modules, *(module for _, module, *_ in lookups_of(model))):
        found += [len(module._forward_hooks), len(module._forward_pre_hooks), "input_dist" in vars(module)]
    return found


def _observed(rank: Rank, folder: str) -> tuple[list[float], list[float]]:
    planner = make_planner("dreamshard", rank)
    model = shard(planner, rank)
    before = _hooks(model)
    with observe(model, planner, Path(folder) / "observation.json", every=2):
        assert _hooks(model) != before
        losses = train(model, rank, STEPS, 2 * LOCAL_BATCH)
    assert _hooks(model) == before
    with pytest.raises(RuntimeError, match="on purpose"), observe(model):
        raise RuntimeError("on purpose")
    assert _hooks(model) == before
    for other, reason in ((model.module, "no plan to predict"), (nn.Linear(1, 1), "no sharded embeddings")):
        with pytest.raises(ObservationError, match=reason), observe(other, planner):  # on all ranks alike
            pass
    with pytest.raises(ObservationError, match="one at a time"), observe(model), observe(model):
        pass
    assert _hooks(model) == before
    with pytest.raises(StatisticsError, match="0"), observe(model, every=0):
        pass
    assert _hooks(model) == before
    dist.distributed_c10d._get_default_store().set("dreamshard_planner/observe/1 taken.json", b"\xff")
    with pytest.raises(UnicodeDecodeError), observe(model, path=Path(folder) / "taken.json"):
        pass
    assert _hooks(model) == before
    with pytest.raises(ObservationError, match="no training step was seen in 0 calls"), observe(model) as seen:
        seen.observation()
    alone = observe(model, path=Path(folder) / "alone.json") if rank.rank == 0 else nullcontext()
    with alone:
        train(model, rank, 3, 2 * LOCAL_BATCH)
    with observe(model, path=Path(folder) / "both.json", every=1):
        train(model, rank, 3, 2 * LOCAL_BATCH)
        with torch.no_grad():  # of other samples
            model(batch(0, 8 * LOCAL_BATCH, 0, 4 * LOCAL_BATCH, rank.device))
        model.eval()(batch(0, 8 * LOCAL_BATCH, 0, 4 * LOCAL_BATCH, rank.device))
        model.train()
    with pytest.raises(StopIteration), observe(model, path=Path(folder) / "ended.json"):
        train(model, rank, 3, 2 * LOCAL_BATCH)
        next(iter(()))  # as a pipeline ends
    assert _hooks(model) == before
    return losses, train(shard(make_planner("dreamshard", rank), rank), rank, STEPS, 2 * LOCAL_BATCH)


def test_steps_are_observed_on_all_ranks_and_train_as_without_it(every_job: list[dict[str, Any]], folder: Path) -> None:
    for observed, plain in (of_rank["plain"] for of_rank in every_job):
        assert observed == pytest.approx(plain)
    assert {file.name for file in folder.glob("observation*")} == {"observation.0.json", "observation.1.json"}
    (both,) = Observation.load_all([folder / "both.json"]).runs  # whatever one rank observed before
    assert both.steps == 3 and {(one.samples, one.batches) for one in both.statistics.values()} == {(LOCAL_BATCH, 6)}
    assert Observation.load_all([folder / "ended.json"]).steps == 2  # whatever ends the batches
    observation = Observation.load_all([folder / "observation.json"])
    (run,) = observation.runs
    assert run.steps == STEPS - 1 and [rank.rank for rank in run.ranks] == [0, 1]
    assert run.plan is not None and run.planned_lookups == dict(zip(FEATURES, map(float, POOLING_FACTORS), strict=True))

    # What kernels are is what the plan says, and what they read is what all ranks' batches have.
    tables = {table.name: (rank.rank, table.size) for rank in run.ranks for k in rank.kernels for table in k.tables}
    planned = {name: (of.shards[0].rank, of.shards[0].size) for name, of in run.plan.tables()}
    assert tables == planned and len(tables) == len(SHAPES)
    for name, lookups in zip(FEATURES, POOLING_FACTORS, strict=True):
        assert run.statistics[name].pooling_factor == lookups and run.statistics[name].batches == 6
    for rank in run.ranks:
        for index, kernel in enumerate(rank.kernels):
            assert kernel.samples == 2 * LOCAL_BATCH and kernel.optimizer == "rowwise_adagrad"
            asked = sum(workload.lookups for workload in kernel.workloads(run.statistics))
            assert asked == pytest.approx(read := rank.median(f"kernel {index} lookups"))
            sent = sum(workload.lookup_bytes for workload in kernel.workloads(run.statistics))
            assert kernel.lookup_bytes(read) == pytest.approx(sent)
        inside = rank.median("forward") + rank.median("backward")
        assert 0 < rank.kernel_ms("forward") + rank.kernel_ms("backward") < inside < rank.median("step")

    # Of each rank's outputs, the other rank's samples leave it; gradients come back.
    sent = {
        rank.rank: sum(table.dim * len(table.features) * LOCAL_BATCH * 4 for k in rank.kernels for table in k.tables)
        for rank in run.ranks
    }
    assert run.collectives["outputs all_to_all forward"].bytes == (sent[0], sent[1])
    assert run.collectives["outputs all_to_all backward"].bytes == (sent[1], sent[0])
    # Ids and lengths go to the rank that computes them; before, how many they are.
    asked = [
        sum(one.lookup_bytes for kernel in rank.kernels for one in kernel.workloads(run.statistics)) / 2
        for rank in run.ranks
    ]
    assert run.collectives["lookups all_to_all"].bytes == pytest.approx((asked[1] + 24, asked[0] + 24))
    assert set(run.collectives) == {"outputs all_to_all forward", "outputs all_to_all backward", "lookups all_to_all"}
    for one in run.collectives.values():
        assert 0 < one.ms <= min(one.span_ms) * (1 + 1e-9) and all(map(float.__le__, one.waited_ms, one.span_ms))
    # The model waits for its lookups; of the rank that waits least, that takes longer than their exchange alone.
    assert all(set(rank.columns["input_dist calls"]) == {1.0} for rank in run.ranks)
    assert 0 < run.lookups_ms <= min(rank.median("input_dist") for rank in run.ranks) * (1 + 1e-9)
    for rank, waited_ms in zip(run.ranks, run.collectives["lookups all_to_all"].waited_ms, strict=True):
        assert waited_ms < rank.median("input_dist") < rank.median("forward")
    compared = compare(run)
    assert not any("another optimizer" in text for text in compared.meaning)
    assert compared.trusted is not None and compared.kinds[0].predicted_ms == run.plan.predicted.chosen.forward_ms


def _of_torchrecs_plan(rank: Rank) -> tuple[ObservedRun, ObservedRun, list[str]]:
    """Predicted by a planner that has only read the model, and by one that knows none."""
    model = shard(make_planner("torchrec", rank), rank)
    reader, knows_none = make_planner("dreamshard", rank), make_planner("dreamshard", rank)
    reader.read(TinyModel(), SHARDERS)
    runs = []
    with warned("observing.observer") as said:
        for planner in (reader, knows_none):
            with observe(model, planner, every=1) as seen:
                train(model, rank, 3, 2 * LOCAL_BATCH)
            runs += seen.observation().runs
    return *runs, said


def test_a_plan_that_no_planner_of_ours_made_is_observed(found: list[dict[str, Any]]) -> None:
    (read, unknown, said), (_, of_rank_1, nothing) = (of_rank["torchrec's plan"] for of_rank in found)
    assert read.plan is not None
    assert read.planned_lookups == dict(zip(FEATURES, map(float, POOLING_FACTORS), strict=True))
    assert unknown.plan is None and unknown.planned_lookups == {} and unknown.ranks[0].steps == 2
    assert of_rank_1.id == unknown.id and of_rank_1.ranks[0].steps == 2 and nothing == []
    assert len(said) == 1 and "no prediction is kept beside what is observed: there is no plan" in said[0]


def _without_samples(rank: Rank, folder: str) -> list[str]:
    """Rank 1 has batches without samples; then the model is called without training."""
    planner = make_planner("dreamshard", rank)
    model = shard(planner, rank)
    with warned("observing.observer") as said:
        for name, trains in (("trained", True), ("called", False)):
            with observe(model, planner, Path(folder) / f"{name}.json", every=1), torch.set_grad_enabled(trains):
                for step in range(4):
                    loss, _ = model(batch(step, LOCAL_BATCH, 0, LOCAL_BATCH * (1 - rank.rank), rank.device))
                    if trains:
                        loss.nan_to_num().backward()
    return said


def _of_a_tensor_dict(rank: Rank) -> tuple[int, int]:
    model = shard(make_planner("torchrec", rank), rank)
    with observe(model, every=1) as seen:
        for step in range(4):
            given = batch(step, LOCAL_BATCH, 0, LOCAL_BATCH, rank.device)
            jagged = {
                name: nested_tensor_from_jagged(one.values(), one.offsets(), one.lengths())
                for name, one in given.sparse.to_dict().items()
            }
            model(ways.Batch(TensorDict(jagged), given.label_B))[0].backward()
    ((of_rank,),) = (run.ranks for run in seen.observation().runs)
    return of_rank.steps, len(of_rank.statistics)


def _job(rank: Rank, folder: str) -> dict[str, Any]:
    """All trainings; on GPUs the plain ones alone."""
    plain = _observed(rank, folder)
    if rank.device.type == "cuda":
        return {"plain": plain}
    return {
        "plain": plain,
        "torchrec's plan": _of_torchrecs_plan(rank),
        "without samples": _without_samples(rank, folder),
        "tensor dict": _of_a_tensor_dict(rank),
        "ways": _of_ways(rank),
        "every type": _of_every_type(rank),
    }


@pytest.fixture(scope="module")
def folder(launch: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def every_job(launch: Callable[..., list[Any]], folder: Path) -> list[dict[str, Any]]:
    """By rank."""
    return launch(_job, str(folder), world_size=2)


@pytest.fixture
def found(every_job: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rank, of trainings that GPUs do not have."""
    if len(every_job[0]) == 1:
        pytest.skip("on CPUs alone")
    return every_job


def test_a_job_goes_on_where_there_is_nothing_to_tell(found: list[dict[str, Any]], folder: Path) -> None:
    for (said,) in (of_rank["without samples"] for of_rank in found):
        assert "called.json" in said and "no training step" in said
    (run,) = Observation.load_all([folder / "trained.json"]).runs
    assert [len(rank.statistics) for rank in run.ranks] == [len(FEATURES), 0]
    assert run.statistics[FEATURES[0]].batches == 4
    assert not list(folder.glob("called*")) and all(rank.steps == 3 for rank in run.ranks)


def test_of_a_tensor_dict_times_alone_are_observed(found: list[dict[str, Any]]) -> None:
    assert [of_rank["tensor dict"] for of_rank in found] == [(3, 0)] * 2


def _of_ways(rank: Rank) -> dict[str, ObservedRun]:
    found = {}
    for way in ("combined", "pipeline"):
        model = shard(make_planner("torchrec", rank), rank)
        with observe(model) as seen:
            ways.train(ways.Training(way=way), model, batches(rank, range(STEPS), 2 * LOCAL_BATCH))
        (found[way],) = seen.observation().runs
    return found


def test_what_lookups_take_in_a_pipeline_is_not_told(found: list[dict[str, Any]]) -> None:
    ranks = [of_rank["ways"] for of_rank in found]
    alone, pipeline = (
        replace(ranks[0][way], ranks=tuple(of_rank for one in ranks for of_rank in one[way].ranks))
        for way in ("combined", "pipeline")
    )
    assert alone.lookups_ms > 0 and pipeline.lookups_ms is None
    assert not any(name.startswith("input_dist") for rank in pipeline.ranks for name in rank.columns)
    assert alone.collectives.keys() == pipeline.collectives.keys() >= {"lookups all_to_all"}
    for run in (alone, pipeline):
        assert all(rank.median("kernels") > 0 for rank in run.ranks if rank.kernels)


CASE = Case(
    {
        "bags": {kind: TableSpec(60, 16, (kind,), 4 if kind == "column_wise" else None) for kind in KINDS},
        "sequence": {"sequence_rows": TableSpec(50, 8, ("row_wise",))},
    },
    SGD,
    stock=False,
)


def _of_every_type(rank: Rank) -> Observation:
    planner = planner_of(CASE, rank.world_size, rank.world_size)
    model = DistributedModelParallel(MixedModel(CASE), device=rank.device, sharders=sharders(CASE), planner=planner)
    with observe(model, planner, every=1) as seen:
        _steps(CASE, model, rank, [])
    return seen.observation()


def test_every_sharding_type_is_observed(found: list[dict[str, Any]]) -> None:
    (run,) = Observation.merge({str(rank): of_rank["every type"] for rank, of_rank in enumerate(found)}).runs
    assert {name for name in run.collectives if not name.startswith("lookups")} == {
        f"outputs {operation} {way}"
        for operation, way in (
            ("all_to_all", "forward"),
            ("all_to_all", "backward"),
            ("reduce_scatter", "forward"),
            ("all_gather", "backward"),
        )
    }
    asked, read = Counter(), Counter()
    for rank in run.ranks:
        for index, kernel in enumerate(rank.kernels):
            read[kernel.sharding_type, kernel.pooled] += rank.median(f"kernel {index} lookups")
            asked[kernel.sharding_type, kernel.pooled] += sum(one.lookups for one in kernel.workloads(run.statistics))
            assert rank.median(f"kernel {index} forward") > 0 and rank.median(f"kernel {index} backward") > 0
    assert set(read) == {*((kind, True) for kind in KINDS), ("row_wise", False)}
    for kind, lookups in asked.items():
        assert lookups == pytest.approx(read[kind], rel=0.2), kind
    assert run.lookups_ms > 0 and {kernel.module for rank in run.ranks for kernel in rank.kernels} == {*CASE.modules}
    _, kinds, left_out = observed_sets(Observation({}, (run,)))
    assert kinds and "data_parallel" not in kinds
    assert any("data_parallel" in reason and "replicas" in reason for reason in left_out)


COMPARED = ("table_wise", "row_wise", "data_parallel")
ROUNDS, COPIES = 3, 2


def _compared(rank: Rank) -> tuple[StepComparison, dict[str, list[list[float]]], list[str]]:
    losses: dict[str, list[list[float]]] = defaultdict(list)
    turns: list[str] = []

    def build(kind: str) -> tuple[nn.Module, Any]:
        kinds = {f"t{index}": kind if rows > 1 else "table_wise" for index, (rows, _) in enumerate(SHAPES)}
        constraints = {name: ParameterConstraints([own]) for name, own in kinds.items()}
        planner = make_planner("torchrec", rank, constraints=constraints)
        sharders = [EveryTypeSharder()]
        model = DistributedModelParallel(TinyModel(), device=rank.device, planner=planner, sharders=sharders)
        optimizer = torch.optim.SGD(model.module.top.parameters(), lr=0.1)
        own: list[float] = []
        losses[kind].append(own)

        def step(batches: Iterator[Any]) -> None:
            optimizer.zero_grad()
            loss, _ = model(next(batches))
            loss.backward()
            optimizer.step()
            own.append(loss.item())
            if turns[-1:] != [kind]:
                turns.append(kind)

        return model, step

    first = LOCAL_BATCH * rank.rank
    batches = [batch(index, 2 * LOCAL_BATCH, first, LOCAL_BATCH, rank.device) for index in range(3)]
    plans = {kind: kind for kind in COMPARED}
    for wrong, told in (({"rounds": 0}, "'rounds': 0"), ({"plans": {}}, "'plans': 0")):
        with pytest.raises(ValueError, match=told):
            compare_steps(**{"build": build, "plans": plans, "batches": batches} | wrong)
    compared = compare_steps(build, plans, batches, copies=COPIES, rounds=ROUNDS, block_seconds=0.001, observed_steps=4)
    assert not DEFAULTS  # no model goes on being observed
    with pytest.raises(ObservationError, match="no sharded embeddings"):
        compare_steps(lambda _: (nn.Linear(1, 1), next), {"none": None}, batches, block_seconds=0.001)
    measured = {kind: list(losses[kind]) for kind in COMPARED}
    inner = {"plans": {"inner": "table_wise"}, "build": lambda kind: _of_inner(*build(kind), batches[0])}
    with pytest.raises(ObservationError, match="plan 'inner': no training step .* or give observed_steps=0"):
        compare_steps(**inner, batches=batches, rounds=1_000_000)  # before all rounds
    compare_steps(**inner, batches=batches, rounds=1, block_seconds=0.001, observed_steps=0)
    with pytest.raises(TypeError, match="a list, .* got list_iterator"):
        compare_steps(build, plans, iter(batches))
    return compared, measured, turns


def _of_inner(model: DistributedModelParallel, _: Any, given: Batch) -> tuple[nn.Module, Any]:
    """A step that calls another module than the observed one."""
    return model, lambda _: model.module(given)[0].backward()


def test_plans_train_alike_in_turns_and_their_work_is_told() -> None:
    (compared, losses, turns), (other, _, other_turns) = run_on_ranks(_compared, world_size=2)
    assert compared.step_ms == other.step_ms and turns == other_turns and compared.block_steps == 2
    assert np.array(list(compared.step_ms.values())).shape == (len(COMPARED), COPIES, ROUNDS)
    for kind in COMPARED:
        assert len(losses[kind]) == COPIES
        for own in losses[kind]:
            shared = min(len(own), len(losses[COMPARED[0]][0]))
            assert shared >= 3 + ROUNDS * compared.block_steps
            assert own[:shared] == pytest.approx(losses[COMPARED[0]][0][:shared], rel=1e-4)
    assert set(compared.work("table_wise")) == {
        "table_wise kernels", "lookups all_to_all", "outputs all_to_all forward", "outputs all_to_all backward"
    }  # fmt: skip
    exchanged = {"outputs reduce_scatter forward", "outputs all_gather backward"}
    assert {"row_wise kernels", *exchanged} < set(compared.work("row_wise"))
    assert all(len(seen.runs[0].ranks) == 2 for seen in compared.observed.values())
    (cells,) = [line.split() for line in str(compared).splitlines() if line.startswith("data_parallel kernels")]
    assert cells[2:] == ["-", "-", *compared.work("data_parallel")["data_parallel kernels"].split()]
    assert str(compared).endswith("The all-reduce and the update of data_parallel tables are not shown.")


def test_ratios_are_of_blocks_of_one_round() -> None:
    base = np.random.default_rng(0).uniform(50, 60, size=(3, 20))
    low, ratio, high = ratio_interval(base * 0.9, base)
    assert low < ratio < high and ratio == pytest.approx(0.9, abs=0.02)
    slow_spells = np.where(np.arange(20) % 4 == 0, 3.0, 1.0)  # they hit both, and cancel
    assert ratio_interval(base * 0.9 * slow_spells, base * slow_spells) == pytest.approx((low, ratio, high))


def test_verdicts_follow_the_interval() -> None:
    steps = {"a": [[10.0, 11.0, 10.0]], "b": [[5.0, 5.5, 5.0]], "c": [[20.0, 22.0, 20.0]], "d": [[9.0, 12.0, 10.0]]}
    told = str(StepComparison(steps, 7, {}))
    assert "1 model(s) of each plan, 3 rounds of 7 steps each" in told
    words = {line.split()[0]: line.split()[2:] for line in told.splitlines() if line[:2].strip() in set("abcd")}
    assert words["a"] == [] and words["b"] == ["0.500", "0.500-0.500", "faster"]
    assert words["c"] == ["2.000", "2.000-2.000", "slower"] and words["d"][2:] == ["no", "difference", "shown"]
