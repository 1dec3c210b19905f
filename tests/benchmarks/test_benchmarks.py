# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placement methods, the paper, training steps, and ``make gpu``: ``tests/cli/test_cli.py`` runs two more commands."""

import gzip
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import compare_placements
import fused_kernels
import gpu
import gpu_contest
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.measure import kernels
from dreamshard_planner.training import TrainingConfig
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.pools import pool_tables
from dreamshard_planner.workload.tables import Table, workloads_of
from fastest_plan import verdict
from fused_kernels import BASE, SWEEPS, moved_bytes
from paper.results import by_kind, compared, pooled, strongest_rule
from paper.training import Setting, halves
from paper_experiment import main
from placements.contests import POOLS, Contest, draw_contests
from placements.placers import Field
from tests.torchrun import forked

FIELD = Field()
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling more memory takes longer than what is measured in it here."""
    monkeypatch.setattr(kernels, "_ARENA_BYTES", 1 << 26)


@pytest.fixture(scope="module")
def contests() -> list[Contest]:
    """One of each pool, the second with tight memory."""
    return draw_contests(3, seed=4, batch_size=128)


@pytest.mark.parametrize("pool", POOLS[1:])
@pytest.mark.parametrize("name", list(FIELD.placers))
def test_contract(name: str, pool: str, contests: list[Contest]) -> None:
    contest = contests[POOLS.index(pool)]
    problem = contest.task.problem
    plan = FIELD.placers[name](contest)
    if plan is None:
        assert contest.tight  # with loose memory everyone finds something
        return
    assert plan.shape == (problem.num_parts,) and plan.dtype == torch.int64
    assert 0 <= plan.min() and plan.max() < problem.num_ranks
    assert bool(problem.fits(plan[None])[0])
    assert contest is not contests[2] or torch.equal(plan, FIELD.placers[name](contest))


def test_referee_measures_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    record = tmp_path / "record.jsonl"
    command = ["compare_placements.py", "--record", str(record), "--batch-size", "32"]
    command += ["--placers", "torchrec,size_greedy,dreamshard", "--rounds", "1"]
    for tasks in "12":
        monkeypatch.setattr(sys, "argv", [*command, "--tasks", tasks])
        compare_placements.main()
    head, first, second = (json.loads(line) for line in record.read_text().splitlines())
    assert head["hardware"]["torch"] and (first["task"], second["task"]) == ("1.0", "1.1")
    assert {"torchrec", "dreamshard"} <= set(first["compute_ms"])
    assert all(ms > 0 for ms in first["compute_ms"].values())
    assert record.with_suffix(".png").stat().st_size > 10_000 and "all pools: 2 tasks" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "3", "--seed", "9"])
    with pytest.raises(SystemExit, match="2"):
        compare_placements.main()
    assert "recorded with other settings" in capsys.readouterr().err


def test_halves_share_no_table_and_are_those_of_the_shipped_training() -> None:
    train, test = halves(batch_size=64)
    assert len(train.tables) == len(test.tables) == 428
    assert {t.dim for t in train.tables + test.tables} == {16}
    shipped = {table.name for table in pool_tables(TrainingConfig().pools)[0]}
    for setting in (Setting(20, 4), Setting(80, 8)):
        trained, tested = (
            {table.name for task in half.tasks(setting, 5) for table in task.tables} for half in (train, test)
        )
        assert trained <= shipped and not tested & shipped
        assert all(len(task.tables) == setting.tables for task in test.tasks(setting, 5))
    assert [t.tables for t in test.tasks(setting, 3)] == [t.tables for t in test.tasks(setting, 5)][:3]
    with pytest.raises(ValueError, match="TABLESxDEVICES, e.g. 40x4, got '40x'"):
        Setting.parse("40x")


def test_figures_by_hand() -> None:
    rules = {"size_greedy": 8.0, "dim_greedy": 5.0, "lookup_greedy": 4.0, "size_lookup_greedy": 6.0}
    tasks = [
        {"pool": "4x2", "overall_ms": {**rules, "a#0": 2.0, "a#1": 8.0, "b#0": 1.0}, "infeasible": []},
        {"pool": "4x2", "overall_ms": {**rules, "a#0": 1.0, "a#1": 1.0}, "infeasible": ["b#0"]},
        {"pool": "6x2", "overall_ms": rules, "infeasible": []},
    ]
    for task in tasks:
        task["compute_ms"] = task["overall_ms"]
    kinds = by_kind(tasks, "4x2")
    assert kinds["a"].tolist() == [[2, 1], [8, 1]] and np.isnan(kinds["b"][0, 1])
    assert strongest_rule(kinds) == "lookup_greedy"
    assert strongest_rule({rule: kinds[rule] for rule in ("size_greedy", "dim_greedy")}) == "dim_greedy"  # old records
    assert compared(kinds, "a", "lookup_greedy")[0] == pytest.approx(0.5)  # tasks 1 and 1/4
    assert compared(kinds, "b", "lookup_greedy")[0] == pytest.approx(0.25)  # of the one that it places
    away = {**rules, "a<4x2#0": 32.0}
    tables = {"4x2": kinds, "6x2": by_kind([{**tasks[2], "overall_ms": away, "compute_ms": away}], "6x2")}
    assert pooled(tables, "a<4x2")[0] == pytest.approx((1 * 1 / 4 * 8) ** (1 / 3))  # tasks 1, 1/4 and, away, 8


def test_quick_run_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    record, work = tmp_path / "record.jsonl", tmp_path / "work"

    def run(*options: str) -> str:
        command = ["paper_experiment.py", "--quick", "--work", str(work), "--record", str(record)]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        main()
        return "".join(capsys.readouterr())

    assert "goes on from here" in run("--minutes", "0.0001")
    assert not record.exists() and list(work.rglob("measured.blocks")) and not list(work.rglob("placements.json"))
    text = run()

    measured = {shard.name for path in work.rglob("dataset.npz") for shard in CostDataset.load(path).shards}
    train, test = halves(batch_size=32)
    assert measured and measured <= {table.name for table in train.tables}
    head, *tasks = (json.loads(line) for line in record.read_text().splitlines())
    assert head["hardware"]["torch"] and [task["task"] for task in tasks] == ["6x2.0", "8x2.0"]
    kinds = {"random", "torchrec", "published#0", "autoshard#0", "default#0", "default_shipped"}
    assert kinds | {"converged#0", "without_costs#0", "measured_rewards@2#0", "published@10#0"} <= set(
        tasks[0]["overall_ms"]
    )
    assert kinds | {"converged#0", "published<6x2#0", "converged<6x2#0"} <= set(tasks[1]["overall_ms"])
    summary = json.loads(record.with_suffix(".json").read_text())
    assert {"published", "default", "linear"} <= {row["cost"] for row in summary["errors"]}
    assert record.with_suffix(".png").stat().st_size > 10_000 and "published<6x2" in text


def test_scripts_know_all_options_that_the_commands_give(tmp_path: Path) -> None:
    lines = gpu.commands("cuda", 8, tmp_path, "nvidia-x", 25)
    assert list(lines) == ["tests", "kernels", "collectives", "checkpoint", "accuracy", "placements", "steps"]
    assert "collectives" not in gpu.commands("cuda", 1, tmp_path, "nvidia-x", 25)
    for line in lines.values():
        before, _, after = line.partition(".py ")
        if "compare_placements" in before or "fused_kernels" in before or "cost_accuracy" in before:
            script = Path(f"{shlex.split(before)[-1]}.py")
            known = re.findall(r'"(--[a-z-]+)"', script.read_text())
            given = re.findall(r"(?<= )--[a-z-]+", f" {after}")
            assert len(given) > 1 and set(given) <= set(known), script.name


def test_moved_bytes_by_hand() -> None:
    shape = replace(BASE, tables=3, dim=8, pooling=4, reuse_bin=1)
    workloads = shape.workloads(batch_size=10, optimizer="sgd")
    # Of each table: 40 lookups of 20 rows, each read twice; 10 outputs.
    assert [(w.lookups, w.distinct_rows, w.output_elements) for w in workloads] == [(40, 20, 80)] * 3
    forward, backward = moved_bytes(workloads)
    assert forward == 3 * (40 * 8 + 40 * 8 * 4 + 80 * 4)
    assert backward == 3 * (40 * 8 + 80 * 4 + 2 * 20 * 8 * 4)


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    options = ["--sweeps", "tables", "--batch-size", "16", "--repeats", "1", "--json", str(tmp_path / "r.json")]
    monkeypatch.setattr(sys, "argv", ["fused_kernels.py", *options])
    fused_kernels.main()
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["shape"]["tables"] for row in result["rows"]] == list(SWEEPS["tables"])
    assert f"{result['copy_gb_per_s']:.1f} GB/s" in capsys.readouterr().out
    (base,) = [row for row in result["rows"] if row["shape"]["tables"] == BASE.tables]
    forward, _ = moved_bytes(BASE.workloads(16, "rowwise_adagrad"))
    assert base["gb_per_s"][0] == pytest.approx(forward / base["ms"][0] / 1e6)


def test_each_rank_takes_the_sum_of_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tables = [Table(f"t{index}", 1000, 16, (FeatureStatistics(4.0),)) for index in range(3)]
    catalogue = gpu_contest.Catalogue()
    indices = [catalogue.indices([workload])[0] for workload in workloads_of(tables, 64)]
    shared = {"predicted_ms": [1.0, 1.0], "exchange_ms": 0.5, "ended": True, "extra_ms": [0.0, 0.25]}
    plans = {
        gpu_contest.BASE: {**shared, "kernels": [[indices[:2]], [indices[2:]]]},
        gpu_contest.OURS: {**shared, "kernels": [[indices[:2], indices[2:]], []]},
    }
    task = {"task": "small", "plans": plans, "workloads": [json.loads(row) for row in catalogue.rows]}
    file, record = tmp_path / "kernels.json.gz", tmp_path / "record.jsonl"
    with gzip.open(file, "wt") as out:
        json.dump({"commit": "", "date": "", "fields": gpu_contest.Catalogue.NAMES, "tasks": [task]}, out)
    command = ["gpu_contest.py", "measure", str(file), "--record", str(record), "--device", "cpu", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", command)
    gpu_contest.main()
    told = json.loads(record.read_text().splitlines()[1])["plans"]
    apart, joined = (told[name]["measured_ms"] for name in (gpu_contest.BASE, gpu_contest.OURS))
    assert joined[0] == pytest.approx([sum(of_rank) for of_rank in zip(*apart, strict=True)])
    assert joined[1] == [0.0, 0.0] and gpu_contest.slowest_ms(told[gpu_contest.OURS]) == pytest.approx(sum(joined[0]))
    assert "kernels over TorchRec's" in capsys.readouterr().out


def test_two_ranks_under_several_planners(tmp_path: Path) -> None:
    planners = ["dreamshard", "lookup_greedy"]
    file = tmp_path / "result.json"
    options = ["--max-rows=500", "--dim=8", "--batch-size=8", "--rounds=2", "--block-seconds=0.001", "--copies=2"]
    options += ["--batches=2", f"--planners={','.join(planners)}"]
    options += [f"--json={file}", f"--report={tmp_path / 'report.html'}"]
    done = forked(FOLDER / "run_dlrm.py", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["ranks"] == 2 and result["loss_difference"] < 1e-5
    assert list(result["plans"]) == planners
    for name, entry in result["plans"].items():
        assert len(entry["ranks"]) == 26 and {rank for (rank,) in entry["ranks"].values()} == {0, 1}
        assert set(entry["types"].values()) == {"table_wise"}
        assert [len(block_ms) for block_ms in entry["step_ms"]] == [2, 2]  # two models of two blocks
        assert entry["ratio"] == sorted(entry["ratio"])
        assert len(entry["kernels_ms"]) == len(entry["predicted_rank_ms"]) == 2
        assert min(entry["kernels_ms"] + entry["predicted_rank_ms"]) > 0
        assert name in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "under the plan of lookup_greedy" in page
    assert done.stdout.replace("\n", "").rstrip().endswith("report.html")
    assert "cost source" in done.stdout and "cut to 500 rows" in done.stdout


STEADY = {"torchrec_default": 100.0, "dreamshard": 80.0, "size_greedy": 120.0}
ROW = {
    "same_as": {name: name for name in STEADY} | {"torchrec": "torchrec_default"},
    "step_ms": {name: [[ms] * 4] * 2 for name, ms in STEADY.items()},
    "predicted_ms": {
        "shipped": {"torchrec_default": 50.0, "torchrec": 50.0, "dreamshard": 46.0, "size_greedy": 70.0},
        "learned": {"torchrec_default": 50.0, "torchrec": 50.0, "dreamshard": 55.0, "size_greedy": 70.0},
    },
}


def test_the_plan_predicted_fastest_is_picked_and_steps_are_predicted_from_the_base() -> None:
    told = verdict(ROW, "shipped")
    assert (told["picked"], told["is_fastest"], told["over_fastest"]) == ("dreamshard", True, pytest.approx(1.0))
    assert told["by_chance"] == pytest.approx(1 / 3)
    assert told["step_error"] == pytest.approx((16 / 80 + 0 / 120) / 2)  # 96 for 80, 120 for 120


def test_a_wrong_pick_is_behind_the_fastest_unless_they_tie() -> None:
    told = verdict(ROW, "learned")
    assert (told["picked"], told["is_fastest"]) == ("torchrec_default", False)
    assert told["over_fastest"] == pytest.approx(1.25)
    noisy = {"torchrec_default": [[80.0, 90.0, 70.0, 82.0]] * 2, "dreamshard": [[81.0, 79.0, 80.0, 78.0]] * 2}
    assert verdict(ROW | {"step_ms": noisy}, "learned")["is_fastest"]


def test_two_ranks_plan_learn_and_continue_a_record(tmp_path: Path) -> None:
    options = ["--models=1", "--first-model=28", "--observed-steps=8", "--rounds=1", "--block-seconds=0.001"]
    options += [f"--record={tmp_path / 'rows.jsonl'}"]
    for _ in range(2):  # the second run only reads
        done = forked(FOLDER / "fastest_plan.py", *options)
        assert done.returncode == 0, done.stderr
        assert "picked the fastest" in done.stdout
    _, row = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["model"], row["ranks"], len(row["same_as"])) == (28, 2, 7)
    assert set(row["step_ms"]) == set(row["same_as"].values())
    assert row["predicted_ms"]["shipped"].keys() == row["predicted_ms"]["learned"].keys() == row["same_as"].keys()
