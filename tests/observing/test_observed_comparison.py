# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Observed steps beside what was predicted."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamshard_planner import Observation, TableStatistics
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cli import app
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.observing.comparison import compare
from dreamshard_planner.observing.learning import learn
from tests.observing.runs import LOCAL_BATCH, of_size, planned_run


@pytest.mark.parametrize(
    ("factor", "exchange", "lookups", "meaning", "verdict"),
    [
        (1.1, 1.2, 2.0, "", "the prediction may be trusted on this hardware"),
        (3.0, 1.0, 2.0, "kernels take 3.00 times the predicted time, on all ranks alike", "dreamshard learn"),
        (1.0, 4.0, 2.0, "slow link, or ranks that share cores: outputs take 4.00 times", "trust kernels"),
        (1.0, 1.0, 8.0, r"wrong statistics: .* f0 \(8 lookups a sample, now 2\)", "may be"),
    ],
)
def test_a_difference_has_a_meaning_and_a_verdict(
    factor: float, exchange: float, lookups: float, meaning: str, verdict: str
) -> None:
    found = compare(planned_run(factor, exchange, lookups))
    assert verdict in found.verdict and found.trusted == ("may be trusted" in found.verdict)
    assert re.match(
        r"embeddings are about \d+% of the step; the plan is predicted to save \d+% of them", found.embeddings
    )
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


def test_a_plan_for_another_optimizer_is_said() -> None:
    run = planned_run(1.0, 1.0)
    assert run.plan is not None
    planned = next(iter(run.plan.inputs.tables))
    as_planned = replace(run.ranks[0].kernels[0].tables[0], name=planned)
    kernels = (replace(run.ranks[0].kernels[0], tables=(as_planned,)),)
    other = replace(run, ranks=(replace(run.ranks[0], kernels=kernels), run.ranks[1]))
    found = compare(other)
    assert found.trusted is False and "times do not compare" in found.verdict
    assert f"the plan was made for sgd of {planned}, and adagrad trains it" in found.meaning[-1]
    alike = (replace(kernels[0], optimizer="sgd"),)
    assert compare(replace(run, ranks=(replace(run.ranks[0], kernels=alike), run.ranks[1]))).trusted


def test_what_was_not_seen_is_said() -> None:
    run = planned_run(1.0, 1.0)
    unseen = replace(run.ranks[1], kernels=())
    found = compare(replace(run, ranks=(run.ranks[0], unseen)))
    assert "no kernel of rank 1 was observed" in found.meaning[0] and found.trusted
    neither = compare(replace(run, ranks=(replace(run.ranks[0], kernels=()), unseen)))
    assert "no kernel of rank 0, 1 was observed" in neither.meaning[0] and neither.trusted is False
    assert "in the file of rank 0, which is not" in compare(replace(run, ranks=run.ranks[1:], plan=None)).verdict


def test_replicas_are_not_judged() -> None:
    run = planned_run(3.0, 4.0)
    dense = [replace(rank, kernels=tuple(replace(one, kernel="dense") for one in rank.kernels)) for rank in run.ranks]
    found = compare(replace(run, ranks=tuple(dense)))
    assert not found.trusted and "data-parallel" in found.meaning[-1] and "all-reduce" in found.meaning[-1]


def test_another_batch_size_than_the_planned_one_is_said() -> None:
    found = compare(of_size(planned_run(1.0, 1.0), 2))
    (said,) = (text for text in found.meaning if "batch" in text)
    assert f"{LOCAL_BATCH} samples" in said and f"batch_size={2 * LOCAL_BATCH}" in said
    assert found.trusted is False and "times do not compare" in found.verdict
    assert not any("costs of another machine" in text for text in found.meaning)


def test_observed_prints_predicted_beside_observed(tmp_path: Path) -> None:
    run, hardware = planned_run(1.1, 1.0), describe_hardware("cpu", 1)
    Observation(hardware, (run,)).save(tmp_path / "seen.json")
    result = CliRunner().invoke(app, ["observed", str(tmp_path / "seen.json"), "--out", str(tmp_path / "s.json")])
    assert TableStatistics.from_json(tmp_path / "s.json")["f1"].batches == 8
    forward = run.plan.predicted.chosen.forward_ms[1]
    assert result.exit_code == 0 and f"{forward:,.3f} -> {1.1 * forward:,.3f}" in result.stdout
    assert "may be trusted" in result.stdout.replace("\n", " ")
    told = json.loads(CliRunner().invoke(app, ["observed", str(tmp_path / "seen.json"), "--format", "json"]).stdout)
    assert told[0]["trusted"] is True and math.isclose(told[0]["kinds"][0]["predicted_ms"][1], forward)
    Observation(hardware, (replace(run, plan=None),)).save(tmp_path / "bare.json")
    assert "no prediction was kept" in CliRunner().invoke(app, ["observed", str(tmp_path / "bare.json")]).stdout
