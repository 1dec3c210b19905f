# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What is said of drift while a job trains."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from logged import logged
from torchrec.distributed.planner.types import PlannerError
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardError, DriftWatch, TableStatistics
from dreamshard_planner.errors import FileError
from tests.planning.test_replan import SHARDERS, model, planner
from tests.search_space.test_towers import SHARDERS as TOWER_SHARDERS
from tests.search_space.test_towers import planner as tower_planner
from tests.search_space.test_towers import towers

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


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    with logged("watch") as kept:
        yield kept


def test_drift_is_told_by_log_callback_and_file(tmp_path: Path, records: list[logging.LogRecord]) -> None:
    told: list = []
    made, watch = watched(0, told=told.append, path=tmp_path / "watch.jsonl")
    saved = made.saved_plan()
    for batch in [*batches(16, 7), *batches(16, 8, onto_rank_0(made))]:
        watch(batch)
    calm, alarm = watch.judgements
    assert not calm.pays and alarm.pays and told == [alarm]
    assert set(alarm.drifted) <= set(NAMES) and len(alarm.drifted) > 4 and alarm.batches == 16
    assert alarm.new_ms < alarm.now_ms and 0 < alarm.sure_seconds <= alarm.gain_seconds
    assert alarm.found.steps == 10**9 - 32 and not alarm.found.stays and made.saved_plan() == saved
    assert [(record.levelname, record.getMessage()) for record in records] == [("WARNING", str(alarm))]
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


def of_ones(names: list[str], samples: int = BATCH) -> KeyedJaggedTensor:
    """One lookup per sample, of row 1."""
    one = torch.ones(samples * len(names), dtype=torch.long)
    return KeyedJaggedTensor(names, one, lengths=one)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([of_ones(NAMES[: 1 + step % 4]) for step in range(16)], "'b_f0'"),
        ([of_ones(["nobodys"])] * 16, "'nobodys'"),
        ([of_ones(NAMES, 0)] * 16, "samples of any feature"),
        ([of_ones(NAMES, 2 + step) for step in range(16)], "'a_f0'"),
    ],
    ids=["other keys", "other features", "no samples", "other sizes"],
)
def test_what_cannot_be_judged_is_a_warning_once_and_ends_nothing(
    given: list[KeyedJaggedTensor], said: str, records: list[logging.LogRecord]
) -> None:
    _, watch = watched(0)
    for batch in [*given, *given]:
        watch(batch)
    first = next(record for record in records if said in record.getMessage())
    kind = first.getMessage().split(",")[0].split(": ")[1]
    of_kind = [record for record in records if kind in record.getMessage()]
    assert [record for record in of_kind if record.levelno == logging.WARNING] == [first]
    for batch in batches(16, 7):
        watch(batch)
    assert watch.judgements[-1].batches == 16


def test_a_file_that_can_no_longer_be_written_hides_no_judgement(tmp_path: Path) -> None:
    told: list = []
    path = tmp_path / "watch.jsonl"
    made, watch = watched(0, told=told.append, path=path)
    path.unlink()
    path.mkdir()
    for batch in batches(16, 8, onto_rank_0(made)):
        watch(batch)
    assert told == watch.judgements and len(told) == 1


def test_features_that_batches_lack_are_read_as_before() -> None:
    made, watch = watched(0)
    given = [batch.split([7, 1])[1] for batch in batches(16, 8, POOLING[::-1])]
    for batch in given:
        watch(batch)
    (judgement,) = watch.judgements
    assert judgement.drifted == ("h_f0",)
    as_now = TableStatistics({**made.statistics, **TableStatistics.from_batches(given)})
    expected_ms = made.predict(made.saved_plan(), statistics=as_now).total_ms
    assert judgement.now_ms == pytest.approx(expected_ms, rel=0.02)


def test_what_can_be_known_at_the_start_is_refused(tmp_path: Path) -> None:
    made, _ = watched(0)
    with pytest.raises(ValueError, match="every 100th is sampled, has fewer than 8 batches"):
        DriftWatch(made, steps=100, every=700)
    for wrong in ({"steps": 1.5}, {"steps": -1}, {"sample_every": 0}, {"restart_seconds": -2.0}, {"bytes_per_s": -3.0}):
        with pytest.raises(ValueError, match=re.escape(str(*wrong.values()))):
            DriftWatch(made, **{"steps": 100, **wrong})
    with pytest.raises(FileError, match="nowhere"):
        DriftWatch(made, steps=100, path=tmp_path / "nowhere" / "watch.jsonl")
    with pytest.raises(DreamShardError, match="plan first"):
        DriftWatch(planner(), steps=100)
    with pytest.raises(TypeError, match="dict"):
        DriftWatch(made, steps=100)({"f0": [1, 2]})
    of_towers = tower_planner(1, 1)
    of_towers.plan(towers(), TOWER_SHARDERS)
    with pytest.raises(PlannerError, match="towers"):
        DriftWatch(of_towers, steps=100)
