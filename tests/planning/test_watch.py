# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What is said of drift while a job trains."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DriftWatch, TableStatistics
from tests.planning.test_replan import SHARDERS, model, planner

NAMES = [f"{name}_f0" for name in "abcdefgh"]
POOLING = (90, 60, 40, 20, 9, 6, 4, 1)
BATCH = 64


def batches(count: int, seed: int, pooling: tuple[int, ...] = POOLING) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    mean_FB = torch.tensor(pooling, dtype=torch.float)[:, None].expand(-1, BATCH)
    made = []
    for _ in range(count):
        lengths = torch.poisson(mean_FB, generator=generator).long().flatten()
        ids = (torch.rand(int(lengths.sum()), generator=generator) ** 2 * 4000).long()
        made.append(KeyedJaggedTensor(NAMES, ids, lengths=lengths))
    return made


def watched(seed: int, **settings):
    """A planner whose plan was made with what batches of the seed have, watched with windows of 16 batches."""
    made = planner(
        statistics=TableStatistics.from_batches(batches(16, seed)),
        checkpoint="roofline",  # with exchanges by bandwidths alone: what is measured may outweigh these kernels
        sharding_types=["table_wise"],
    )
    made.plan(model(), SHARDERS)
    return made, DriftWatch(made, steps=10**9, every=16, sample_every=1, **settings)


def onto_rank_0(made) -> tuple[int, ...]:
    """Pooling factors by which the tables of one rank become hot."""
    plan = made.saved_plan().sharding["sparse"]
    return tuple(60 if plan[name].shards[0].rank == 0 else 2 for name in "abcdefgh")


def test_data_that_does_not_drift_is_no_alarm() -> None:
    _, watch = watched(0)
    for batch in batches(32, 100):
        watch(batch)
    assert [judgement.step for judgement in watch.judgements] == [16, 32]
    assert not any(judgement.pays for judgement in watch.judgements)


def test_drift_is_told_by_log_callback_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list = []
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append
    monkeypatch.setattr(logging.getLogger("dreamshard_planner.watch"), "handlers", [handler])
    made, watch = watched(0, told=told.append, path=tmp_path / "watch.jsonl")
    saved = made.saved_plan()
    for batch in [*batches(16, 7), *batches(16, 8, onto_rank_0(made))]:
        watch(batch)
    calm, alarm = watch.judgements
    assert not calm.pays and alarm.pays and told == [alarm]
    assert set(alarm.drifted) <= set(NAMES) and len(alarm.drifted) > 4 and alarm.batches == 16
    assert alarm.new_ms < alarm.now_ms and 0 < alarm.sure_seconds <= alarm.gain_seconds
    assert alarm.found.steps == 10**9 - 32 and not alarm.found.stays and made.saved_plan() == saved
    assert [(record.levelname, record.getMessage()) for record in logged] == [("WARNING", str(alarm))]
    assert "another plan pays" in str(alarm)
    lines = [json.loads(line) for line in (tmp_path / "watch.jsonl").read_text().splitlines()]
    assert [line["pays"] for line in lines] == [False, True] and lines[1]["found"]["chosen"]["tables"] > 0


def test_what_does_not_pay_is_no_alarm_and_is_planned_for_ever_more_seldom() -> None:
    made, _ = watched(0)
    watch = DriftWatch(made, steps=96, every=16, sample_every=1, restart_seconds=3600.0)
    for batch in batches(6 * 16, 3, POOLING[::-1]):
        watch(batch)
    assert not any(judgement.pays for judgement in watch.judgements)
    planned_for = [judgement.found is not None for judgement in watch.judgements]
    assert planned_for == [True, False, True, False, False, False]


def test_a_rank_that_did_not_plan_samples_nothing() -> None:
    watch = DriftWatch(planner(), steps=100, every=16, sample_every=1)
    for batch in batches(16, 0):
        watch(batch)
    assert watch.step == 16 and watch.judgements == [] and watch._samplers[0].seen == 0


def test_a_window_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="every 100th is sampled, has fewer than 8 batches"):
        DriftWatch(planner(), steps=100, every=700)
