# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Observed steps in bounded memory, in files, merged, and beside what was predicted."""

import json
import logging
import math
import re
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from logged import warned

from dreamshard_planner import Observation, ObservationError, TableStatistics
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.observing import observer
from dreamshard_planner.observing.comparison import compare
from dreamshard_planner.observing.hooks import MOST_STEPS, DeviceClock, Hooks, StepRecorder
from dreamshard_planner.observing.learning import learn, observed_sets
from dreamshard_planner.observing.observation import rank_file
from tests.cli.test_commands import run, run_json
from tests.observing.runs import LOCAL_BATCH, observation, observed_run, of_size, planned_run, rank_steps, with_kernels


def test_long_trainings_keep_few_steps_the_same_on_every_rank() -> None:
    recorders = [StepRecorder(DeviceClock(torch.device("cpu"))) for _ in range(2)]
    for recorder in recorders:
        for _ in range(3 * MOST_STEPS):
            recorder.next_step()
            if recorder.current is not None:
                mark = recorder.clock.mark()
                for name in ("forward", "backward"):
                    recorder.current.add(name, mark, recorder.clock.mark())
                recorder.current.amounts["lookups"] += 2
    (kept, columns), (others, _) = (recorder.columns() for recorder in recorders)
    assert kept == others and MOST_STEPS / 4 < len(kept) <= MOST_STEPS
    assert all(index % 4 == 0 for index in kept) and recorders[0].steps == 3 * MOST_STEPS - 1
    assert set(columns["lookups"]) == {2.0} and all(0 <= ms for ms in columns["step"])


def test_files_of_ranks_and_runs_merge(tmp_path: Path) -> None:
    whole = observation(2)
    for name in ("seen.json", "[seen]", "seen*.json"):
        for rank in range(2):
            part = replace(whole, runs=tuple(replace(run, ranks=(run.ranks[rank],)) for run in whole.runs))
            part.save(rank_file(tmp_path / name, rank))
        assert Observation.load_all([tmp_path / name]) == whole
    assert Observation.load_all([tmp_path / "seen.1.json", tmp_path / "seen.0.json"]).runs == whole.runs
    assert whole.title == "2 runs, 16 steps"
    uneven = replace(whole, runs=(replace(whole.runs[0], world_size=5, hosts=2),))
    assert uneven.topology.local_world_size == 3
    told = run_json("info", tmp_path / "seen.json")
    assert told["kind"] == "observation" and told["runs"] == "2 entries"
    observation(1).save(tmp_path / "seen.2.json")
    with pytest.raises(ObservationError, match=r"seen.0.json, .*seen.2.json: not of one run"):
        Observation.load_all([tmp_path / "seen.json"])


def test_runs_keep_their_batch_sizes_and_statistics_are_of_ranks_with_like_ones() -> None:
    whole = observation(1)
    (run,) = whole.runs
    others = [of_size(run, 2), of_size(run, 1, lookups=2)]
    merged = Observation.merge({one.id: replace(whole, runs=(one,)) for one in (run, *others)})
    assert merged.runs == (run, *others)
    assert len(observed_sets(merged)[0]) == 3 * len(observed_sets(whole)[0])
    parts = (run.ranks[:1], others[0].ranks[1:])
    unequal = Observation.merge({str(one[0].rank): replace(whole, runs=(replace(run, ranks=one),)) for one in parts})
    assert len(unequal.runs[0].ranks) == 2
    assert unequal.runs[0].statistics == TableStatistics(others[0].ranks[1].statistics)  # of the larger batches


RUN, OF_RANK = ("runs", 0), ("runs", 0, "ranks", 0)
KERNEL = (*OF_RANK, "kernels", 0)
DAMAGED = (
    ("hardware", {"device": "cpu", "name": "abacus"}, "hardware: must tell the device, .*, and how many threads"),
    (*RUN, "hosts", 0, r"runs.0.hosts: must be greater than or equal to 1, got 0"),
    (*RUN, "hosts", 3, "has hosts or ranks beyond its 2"),
    (*KERNEL, "sharding_type", "diagonal", "kernels.0.sharding_type: must be one of .*, got 'diagonal'"),
    (*KERNEL, "samples", -1, "kernels.0.samples: must be greater than or equal to 0, got -1"),
    (*KERNEL, "tables", 0, "rows", 0, "tables.0.rows: must be greater than or equal to 1, got 0"),
)


def _changed(document: dict, *place: str | int, to: object) -> dict:
    changed = json.loads(json.dumps(document))
    *containers, last = place
    reduce(getitem, containers, changed)[last] = to
    return changed


def test_what_is_no_observation_of_this_hardware_is_refused_by_name(tmp_path: Path) -> None:
    good, file = tmp_path / "good.json", tmp_path / "other.json"
    observation(1).save(good)
    document = json.loads(good.read_text())
    short = json.loads(good.read_text())
    short["runs"][0]["ranks"][0]["columns"]["step"] = [1.0]
    for content, reason in (
        ({"format": "another"}, "no dreamshard_planner observation: its 'format' is not"),
        ({**document, "version": 1}, r"version 1 is older than this package reads \(4\): observe again"),
        ({**document, "extra": 1}, "unknown key 'extra'"),
        ({**document, "runs": []}, "holds no run"),
        (short, "'step' has 1 values of 8 steps"),
        *((_changed(document, *place, to=to), reason) for *place, to, reason in DAMAGED),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ObservationError, match=f"other.json: .*{reason}"):
            Observation.load_all([good, file])
    file.write_text(good.read_text()[:-9])
    with pytest.raises(ObservationError, match=r"other.json: not a JSON file, or a truncated one"):
        Observation.load(file)
    observation(1, name="another processor").save(file)
    with pytest.raises(ObservationError, match=r"other.json: observed on .*another processor.*, not on .*good.json"):
        Observation.load_all([good, file])
    with pytest.raises(ObservationError, match="nowhere.json: no such file"):
        Observation.load_all([tmp_path / "nowhere.json"])


def test_a_collective_takes_what_the_last_rank_to_come_waits() -> None:
    name, steps = "outputs all_to_all forward", 5
    spans = {0: (9.0, 9.0, 9.0, 5.0, 2.0), 1: (9.0, 9.0, 9.0, 1.0, 3.0)}
    ranks = [
        rank_steps(0, rank, steps=steps, **{f"{name} span": spans[rank], f"{name} waited": (0.5,) * steps})
        for rank in range(2)
    ]
    one = observed_run("a", *ranks).collectives[name]  # the first three steps are not counted
    assert (one.ms, one.span_ms, one.waited_ms) == (1.5, (3.5, 2.0), (0.5, 0.5))
    kernels = {f"{name} kernels": (0.0, 0.0, 0.0, 0.5, 1.5)}  # of other sharding types, while it is on its way
    beside = [replace(one, columns=one.columns | kernels) for one in ranks]
    assert observed_run("a", *beside).collectives[name].ms == 0.5  # 1 - 0.5 and 2 - 1.5
    late = replace(ranks[1], kept=(0, 1, 2, 4, 5))
    assert observed_run("a", ranks[0], late).collectives[name].ms == 1.0  # step 4 alone is of both


def test_a_failing_hook_ends_the_observation_and_not_the_training() -> None:
    model, recorder = torch.nn.Linear(2, 1), StepRecorder(DeviceClock(torch.device("cpu")))
    hooks = Hooks(recorder)
    hooks.listen_to_steps(model)
    recorder.clock.mark = lambda: 1 / 0
    with warned("observing.hooks") as told:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None and not model._forward_hooks and not model._forward_pre_hooks
    assert told == ["the observation ends, and training goes on: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize(
    ("factor", "exchange", "lookups", "meaning", "verdict"),
    [
        (1.1, 1.2, 2.0, "", "the prediction may be trusted on this hardware"),
        (3.0, 1.0, 2.0, "kernels take 3.00 times the predicted time, on all ranks alike", "dreamshard learn"),
        (1.0, 4.0, 2.0, "slow link, or ranks that share cores: outputs take 4.00 times", "trust kernels"),
        (1.0, 1.0, 8.0, r"wrong statistics: .* f0 \(8 -> 2\)", "may be"),
    ],
)
def test_a_difference_has_a_meaning_and_a_verdict(
    factor: float, exchange: float, lookups: float, meaning: str, verdict: str
) -> None:
    found = compare(planned_run(factor, exchange, lookups))
    assert verdict in found.verdict and found.trusted == ("may be trusted" in found.verdict)
    share = r"embeddings are about \d+% of the step; the plan is predicted to save \d+% of them"
    assert re.match(share, found.embeddings)
    assert len(found.meaning) == bool(meaning) and all(re.search(meaning, text) for text in found.meaning)


def test_outputs_beside_other_work_are_not_judged_nor_learned(tmp_path: Path) -> None:
    run = planned_run(1.0, 400.0)
    waited = {"outputs all_to_all forward waited": (0.01,) * 8}
    hidden = replace(run, ranks=tuple(replace(rank, columns=rank.columns | waited) for rank in run.ranks))
    assert hidden.hides_outputs and not run.hides_outputs
    found = compare(hidden)
    assert found.trusted and "exchanges are not judged" in found.verdict and "other work" in found.meaning[-1]
    told = next(kind for kind in found.kinds if kind.what.startswith("exchange of outputs"))
    assert told.predicted_ms is None and told.observed_ms[0] > 0
    assert not compare(run).trusted
    seen = Observation(describe_hardware("cpu", 1), (hidden, replace(hidden, id="b")))
    learned = learn(resolve("roofline", "cpu"), seen, tmp_path / "learned.safetensors", force=True)
    assert learned.metadata["collectives"] is None


def test_what_was_planned_for_another_optimizer_batch_size_or_ranks_does_not_compare() -> None:
    run = planned_run(1.0, 1.0)
    planned = next(iter(run.plan.inputs.tables))
    tables = (replace(run.ranks[0].kernels[0].tables[0], name=planned),)
    found = compare(with_kernels(run, tables=tables))
    assert found.trusted is False and "times do not compare" in found.verdict
    assert f"the plan was made for sgd of {planned}, and adagrad trains it" in found.meaning[-1]
    assert compare(with_kernels(run, tables=tables, optimizer="sgd")).trusted
    found = compare(of_size(run, 2))
    (said,) = (text for text in found.meaning if "batch" in text)
    assert f"{LOCAL_BATCH} samples" in said and f"batch_size={2 * LOCAL_BATCH}" in said
    assert found.trusted is False and "times do not compare" in found.verdict
    assert not any("costs of another machine" in text for text in found.meaning)
    ranks = tuple(replace(of_rank, rank=rank) for rank, of_rank in enumerate((*run.ranks, *run.ranks)))
    found = compare(replace(run, world_size=4, ranks=ranks))
    assert found.verdict == "the prediction is for 2 ranks, and rank 3 was observed: times do not compare"
    assert found.trusted is None and all(kind.predicted_ms is None for kind in found.kinds)
    assert compare(replace(run, world_size=4)).trusted  # a model on the first two ranks


def test_what_one_rank_lacks_or_is_slow_at_is_said_and_replicas_are_not_judged() -> None:
    run = planned_run(1.0, 1.0)
    unseen = replace(run.ranks[1], kernels=())
    found = compare(replace(run, ranks=(run.ranks[0], unseen)))
    assert "no kernel of rank 1 was observed" in found.meaning[0] and found.trusted
    neither = compare(replace(run, ranks=(replace(run.ranks[0], kernels=()), unseen)))
    assert "no kernel of rank 0, 1 was observed" in neither.meaning[0] and neither.trusted is False
    slow = {name: tuple(2 * ms for ms in values) for name, values in run.ranks[1].columns.items() if "kernel" in name}
    uneven = compare(replace(run, ranks=(run.ranks[0], replace(run.ranks[1], columns=run.ranks[1].columns | slow))))
    assert "kernels of rank 1 (table_wise) take 2.00 times the predicted time" in uneven.meaning[0]
    assert uneven.trusted is False and ": do not trust the prediction on this hardware" in uneven.verdict
    assert "in the file of rank 0, which is not" in compare(replace(run, ranks=run.ranks[1:], plan=None)).verdict
    # As observed, whatever optimizer the script has attached.
    found = compare(with_kernels(planned_run(3.0, 4.0), kernel="dense", optimizer="other"))
    (said,) = found.meaning
    assert not found.trusted and "data-parallel" in said and "all-reduce" in said


def test_a_wrong_number_of_steps_is_warned_of_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(observer.VARIABLE, "many")
    monkeypatch.setattr(observer.dist, "is_initialized", lambda: True)
    said = []
    monkeypatch.setattr(observer.logger, "log", lambda level, text, *values: said.append((level, text % values)))
    for rank in range(3):
        monkeypatch.setattr(observer.dist, "get_rank", lambda rank=rank: rank)
        observer.begin(torch.nn.Module(), None)
    assert [level for level, _ in said] == [logging.WARNING, logging.INFO, logging.INFO]
    assert all("'many'" in text and "training goes on" in text for _, text in said)


def test_observed_prints_predicted_beside_observed(tmp_path: Path) -> None:
    seen, hardware = planned_run(1.1, 1.0), describe_hardware("cpu", 1)
    Observation(hardware, (seen,)).save(tmp_path / "seen.json")
    result = run("observed", tmp_path / "seen.json", "--out", tmp_path / "s.json")
    assert TableStatistics.from_json(tmp_path / "s.json")["f1"].batches == 8
    forward = seen.plan.predicted.chosen.forward_ms[1]
    assert f"{forward:,.3f} -> {1.1 * forward:,.3f}" in result.stdout
    assert "may be trusted" in result.stdout.replace("\n", " ")
    told = run_json("observed", tmp_path / "seen.json")
    assert told[0]["trusted"] is True and math.isclose(told[0]["kinds"][0]["predicted_ms"][1], forward)
    Observation(hardware, (replace(seen, plan=None),)).save(tmp_path / "bare.json")
    assert "no prediction was kept" in run("observed", tmp_path / "bare.json").stdout
