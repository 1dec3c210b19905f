# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The referee of planners that may split tables: contests, contract, measured costs, record."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import compare_placements
from common.measured_costs import SetClock
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.timing import processor_time
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.tables import workloads_of
from placements.placers import Field
from placements.split_contests import HEAT, MAX_POOLING_FACTOR, SplitContest, SplitTask, draw_split_contests
from placements.split_referee import MeasuredShardings, SplitField

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TYPES = ("table_wise", "column_wise")
FIELD = Field()
SPLIT_FIELD = SplitField(FIELD)


def contests(count: int, types: tuple[str, ...] = TYPES) -> list[SplitContest]:
    return draw_split_contests(count, 4, 256, types, FIELD.linear, FIELD.network)


def small(contest: SplitContest) -> SplitContest:
    """Return a contest of its hot tables and a few others."""
    tables = sorted(contest.tables, key=lambda table: table.name not in contest.hot)[:8]
    return replace(contest, tables=tuple(tables))


@pytest.fixture(scope="module")
def tasks() -> list[SplitTask]:
    """An ordinary one, and a hot one in tight memory, of a few tables each."""
    return [SplitTask(small(contest), FIELD.learned) for contest in contests(2)]


def test_hot_tables_exceed_what_a_rank_should_carry() -> None:
    drawn = contests(12)
    assert [contest.tables for contest in drawn[:2]] == [contest.tables for contest in contests(2)]
    kinds = {(contest.pool, contest.tight, bool(contest.hot)) for contest in drawn}
    assert len(kinds) == 12 and {contest.min_partition for contest in drawn} == {8, 16}
    for contest in (contest for contest in drawn if contest.hot):
        cost_ms = FIELD.linear.shard_ms(feature_matrix(workloads_of(contest.tables, contest.batch_size)))
        heat = {t.name: float(ms / cost_ms.mean()) for t, ms in zip(contest.tables, cost_ms, strict=True)}
        heat = {name: ms * contest.ranks / len(contest.tables) for name, ms in heat.items()}
        for table in contest.tables:
            assert table.dim <= 256 and max(f.pooling_factor for f in table.features) <= MAX_POOLING_FACTOR
            if table.name in contest.hot:
                assert HEAT[0] * 0.95 <= heat[table.name] <= HEAT[1] * 1.05
                assert table.dim >= 2 * contest.min_partition


def test_options_are_torchrecs_and_halvings_come_on_top(tasks: list[SplitTask]) -> None:
    for task in tasks:
        for choices, wider in zip(task.allowed.options, task.read.options, strict=True):
            assert wider[: len(choices)] == choices and len(choices) <= 2
            split = [choice for choice in wider if choice.sharding_type == TYPES[1] and choice.num_shards > 1]
            widths = {shard.size[1] for choice in split for shard in choice.shards}
            assert all(width >= task.contest.min_partition for width in widths)
        workload = {w.name: w for w in workloads_of(task.contest.tables, task.contest.batch_size)}
        for part, shard in ((part.workload, part.shard) for part in task.read.parts):
            assert [part.rows, part.dim] == shard.size
            assert part.lookups == pytest.approx(workload[part.name.split(".")[-1]].lookups)


@pytest.mark.parametrize("name", list(SPLIT_FIELD.placers))
def test_contract(name: str, tasks: list[SplitTask]) -> None:
    for task in tasks:
        sharding = SPLIT_FIELD.placers[name](task)
        if sharding is None:
            assert task.contest.tight
            continue
        assert task.cost.problem.fits(sharding)
        assert task is not tasks[0] or sharding == SPLIT_FIELD.placers[name](task)
        if name != "dreamshard":
            allowed = task.allowed.problem.tables
            assert all(option < len(allowed[table]) for table, option in enumerate(sharding.options))


def test_kernels_of_a_rank_are_measured_by_group_and_added(tasks: list[SplitTask]) -> None:
    task = tasks[0]
    start = SPLIT_FIELD.placers["torchrec_whole"](task)
    table, slices = next((t, options) for t, options in enumerate(task.allowed.problem.tables) if len(options) > 1)
    option = next(i for i, one in enumerate(slices) if one.sharding_type == TYPES[1])
    split = start.changed(table, option, (0,) * len(slices[option].units))
    asked: list[tuple[int, ...]] = []

    def clock(sets: list[tuple[int, ...]], repeats: int) -> torch.Tensor:
        asked.extend(sets)
        return torch.tensor([[1.0, 10.0 * len(kernel)] for kernel in sets], dtype=torch.float64)

    measured = MeasuredShardings(task, clock)
    measured.time([start, split], 1)
    units = task.read.problem.tables[table][option].units
    assert measured.sets_of(split)[0][-1] == (units[0].parts[0],) * len(units)  # equal slices, in a kernel of their own
    assert len(asked) == len(set(asked))
    on_rank_0 = sum(len(kernel) for kernel in measured.sets_of(split)[0])
    assert float(measured.rate(split).forward_ms_BD[0, 0]) == 2.0
    assert float(measured.rate(split).backward_ms_BD[0, 0]) == 10.0 * on_rank_0


def test_data_parallel_counts_its_gradient() -> None:
    task = SplitTask(small(contests(1, (*TYPES, "data_parallel"))[0]), FIELD.learned)
    smallest = min(range(8), key=lambda table: task.contest.tables[table].rows)
    options = task.allowed.problem.tables[smallest]
    dense = next(index for index, option in enumerate(options) if option.kernel == "dense")
    found = SPLIT_FIELD.placers["torchrec_whole"](task).changed(smallest, dense, (0,))
    with processor_time():
        measured = MeasuredShardings(task, SetClock(task.read.workload_P, "cpu", Arena("cpu", size_bytes=1 << 26)))
        measured.time([found], 1)
    elements = task.contest.tables[smallest].rows * task.contest.tables[smallest].dim
    kernels_ms = sum(float(measured.set_ms[kernel].sum()) for kernel in measured.sets_of(found)[0])
    added_ms = 0.6e-6 / 4 * 12 * elements  # row-wise Adagrad's passes, as fast as the four that were measured
    assert float(measured.rate(found).device_ms_BD[0, 0]) == pytest.approx(kernels_ms + added_ms, rel=1e-6)


def test_referee_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    record = tmp_path / "record.jsonl"
    command = [
        str(BENCHMARKS / "compare_placements.py"), "--record", str(record), "--batch-size", "256",
        "--sharding-types", ",".join(TYPES), "--placers", "torchrec,torchrec_whole,dreamshard", "--rounds", "2",
        "--processor-time",
    ]  # fmt: skip
    monkeypatch.setattr(compare_placements, "Field", lambda checkpoint, device: FIELD)  # fitted already
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "2"])  # continued, in processes of its own: test_placers.py
    compare_placements.main()
    head, first, second = (json.loads(line) for line in record.read_text().splitlines())
    assert head["settings"]["sharding_types"] == ",".join(TYPES)
    assert (first["task"], second["task"]) == ("1.0", "1.1") and not first["hot"] and second["hot"]
    assert {"torchrec", "dreamshard"} <= set(first["compute_ms"])
    assert all(ms > 0 for ms in first["compute_ms"].values())
    assert first["split_tables"]["torchrec_whole"] == 0
    said = capsys.readouterr().out
    assert "all pools: 2 tasks" in said and "over that of the best plan of whole tables" in said
    monkeypatch.setattr(sys, "argv", [*command, "--sharding-types", "row_wise"])
    with pytest.raises(SystemExit, match="2"):
        compare_placements.main()
    assert "table_wise" in capsys.readouterr().err
