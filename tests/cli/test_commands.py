# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ``dreamshard`` command: every command in every format, in this process where that is the same; streams,
interruptions, and disks that fill up in processes of their own."""

import importlib
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from small_models import table_list
from typer.testing import CliRunner

from dreamshard_planner import FeatureStatistics, TableStatistics, __version__
from dreamshard_planner.checkpoints.choice import SHIPPED
from dreamshard_planner.cli import app
from dreamshard_planner.cli.app import Panel
from dreamshard_planner.cli.options import COST_SOURCES as NAMED_COSTS
from dreamshard_planner.cli.options import Effort, SearchOptions, bytes_per_s, size_bytes, whole
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.planning.rater import COST_SOURCES
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search.effort import EFFORTS
from dreamshard_planner.workload.lookups import IdHistogram
from tests.faults import dreamshard, ended, start, wait_for

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "tables.json")
MEASURED = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu-test.npz"
SMALL = ("--tables", EXAMPLE, "--gpus-per-node", "2", "--gpu", "h100", "--batch-size", "256", "--effort", "quick",
         "--sharding-types", "table_wise")  # fmt: skip
ON_CPU = ("--ranks", "2", "--device", "cpu", "--memory", "64GB", "--batch-size", "64", "--effort", "quick")
MEASURING = ("learn", "observed", "train", "collect", "fit", "calibrate")
"""Commands that test_cli.py and the tests of observing run."""


def run(*arguments: str | Path, status: int = 0):
    """Run a command in this process."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: str | Path, status: int = 0) -> Any:
    """Return what a command prints as JSON."""
    return json.loads(run(*arguments, "--format", "json", status=status).stdout)


def commands(of: typer.Typer = app) -> Iterator[typer.models.CommandInfo]:
    yield from of.registered_commands
    for group in of.registered_groups:
        yield from commands(group.typer_instance)


@cache
def whole_program() -> Any:
    return typer.main.get_command(app)


def parse(*arguments: str) -> None:
    """All of a command line but doing it."""
    command = whole_program()
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, list(arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the examples of the help texts name, and others."""
    folder = tmp_path_factory.mktemp("files")
    ones = (1.0,) + (0.0,) * 16
    names = ("user_id", "item_id", "brand")
    monday = {name: FeatureStatistics(4.0, ones, 256, 1024.0) for name in names}
    for name in ("monday", "today"):
        TableStatistics(monday).to_json(folder / f"{name}.json")
    tuesday = TableStatistics({**monday, "user_id": FeatureStatistics(8.0, ones, 256, 2048.0)})
    tuesday.to_json(folder / "tuesday.json")
    tuesday.to_json(folder / "statistics.json")
    run("plan", *SMALL, "--sharding-types", "table_wise,row_wise", "--out", folder / "before.json")
    run("plan", *SMALL, "--out", folder / "after.json")
    shutil.copy(folder / "after.json", folder / "plan.json")
    return folder


def test_help_and_version_load_no_torch_and_every_other_import_is_late() -> None:
    """In a process of its own, as users run it."""
    code = "import sys; from dreamshard_planner.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    for arguments in (("--version",), ("plan", "--help")):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "False"
        assert f"dreamshard {__version__}" in result.stdout or "--batch-size" in result.stdout


def options_of(command: Any, panel: str | None = None) -> list[str]:
    """Spellings of a command's options in one panel of its help."""
    options = [one for one in command.params if one.param_type_name == "option" and one.rich_help_panel == panel]
    return [spelling for option in options for spelling in option.opts]


def test_help_shows_at_most_ten_options_first_and_one_vocabulary() -> None:
    assert tuple(COST_SOURCES) == NAMED_COSTS and tuple(EFFORTS) == get_args(Effort)
    group = typer.main.get_command(app)
    panels = [group.commands[name].rich_help_panel for name in group.list_commands(None)]
    assert [panel for panel, _ in itertools.groupby(panels)] == [panel.value for panel in Panel]
    stats = group.commands.pop("stats")
    every = {**group.commands, **stats.commands}
    for name, command in every.items():
        assert len(options_of(command)) <= 10, name
    rating = {"--costs", "--effort", "--seed", "--search-seconds"}
    for name in ("plan", "what-if", "replan", "diff"):
        assert rating <= {*options_of(every[name]), *options_of(every[name], "Advanced")}, name


@pytest.mark.parametrize("info", list(commands()), ids=lambda info: info.name or info.callback.__name__)
def test_every_command_has_help_with_an_example_that_works(
    info: typer.models.CommandInfo, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(info.epilog.removeprefix("Example: "))
    assert program == "dreamshard" and info.epilog.startswith("Example: ")
    words = arguments[:2] if arguments[0] == "stats" else arguments[:1]
    assert "Example:" in run(*words, "--help").stdout
    if words[0] in MEASURING:
        return parse(*arguments)
    if words == ["stats", "parquet"]:
        pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
        columns = {"clicks": [[1, 2, 2]] * 9000, "label": [0.5] * 9000, "user": [7] * 9000}
        parquet.write_table(pyarrow.table(columns), folder / "day0.parquet")
    done = run(*arguments, *(("--effort", "quick") if words == ["plan"] else ()))
    assert done.stdout and (words != ["stats", "parquet"] or "hold no lists: user; name" in done.stderr)
    if words[0] not in ("plan", "doctor", "what-if", "replan"):  # of which there is JSON in other tests
        assert run_json(*arguments)


def test_plan_tells_where_costs_and_bandwidths_come_from() -> None:
    document = run_json("plan", *SMALL[:4], *SMALL[6:])
    (note,) = [note["text"] for note in document["report"]["notes"] if "TorchRec's defaults" in note["text"]]
    assert "hbm_cap" in note and "hbm_mem_bw" in note and "644 GB/s" in note
    named = run_json("plan", *SMALL, "--gpu", "a100-80")
    assert not [note for note in named["report"]["notes"] if "TorchRec's defaults" in note["text"]]
    assert "2039 GB/s" in named["report"]["cost_source"] and named["ranks"] == 2
    assert named["plan"]["format"] == "dreamshard_planner plan"


def test_plan_of_cpu_ranks_with_statistics_and_of_a_function(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run("plan", *SMALL, "--statistics", folder / "tuesday.json").stdout
    assert "sequences_64.history" in shown and "TorchRec" in shown
    (tmp_path / "my_model.py").write_text(
        f"from dreamshard_planner.offline import read_model\ndef make():\n    return read_model({EXAMPLE!r}).module\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    document = run_json("plan", "--tables", "my_model:make", *ON_CPU)
    assert len(document["report"]["tables"]) == 8 and document["machine"] == "2 CPU ranks"


def test_what_is_shown_of_many_ranks_and_tables_and_long_names_is_short(tmp_path: Path) -> None:
    names, file = ["t" * 3000, *(f"t{index}" for index in range(20))], str(tmp_path / "plan.json")
    listed = table_list(tmp_path, *({"name": name, "num_embeddings": 1000, "embedding_dim": 16} for name in names))
    job = ("--tables", listed, "--gpus-per-node", "9", "--gpu", "h100", "--batch-size", "8")
    planned = run("plan", *job, "--sharding-types", "table_wise", "--effort", "quick", "--out", file)
    shown = run("report", file).stdout
    for few in (planned.stdout, shown):
        assert "the 20 costliest of 21" in few and few.count("table_wise   ") == 20
    lengths = map(len, (planned.stdout + shown + run("explain", file).stdout).split())
    assert max(lengths) < 220  # a line below a heading
    assert len(run_json("report", file)["predicted"]["chosen"]["forward_ms"]) == 9


@pytest.mark.parametrize(
    ("status", "line", "reason"),
    [
        (1, "--tables mlperf_dlrm", "did you mean 'mlperf_dlrm_dcnv2'"),
        (1, f"--tables {__file__}", "test_commands.py: a list of tables is"),
        (1, "--tables no_such_module:make", "no_such_module:make: ModuleNotFoundError"),
        (1, "--tables os:absent", "os:absent: AttributeError"),
        (1, "--tables json:loads", "json:loads: TypeError"),
        (1, "--tables os:getcwd", "os:getcwd must return the model, a torch.nn.Module, got str"),
        (1, "--memory 1GB --host-memory 1GB", "do not fit"),
        (1, "--nodes 2 --gpu l4", "network"),
        (1, "--gpu h10", "unknown GPU 'h10' (did you mean 'h100'?): known are a100-40, a100-80,"),
        (1, "--costs gone.safetensors", "gone.safetensors: no such checkpoint"),
        (1, "--on-ranks brand=1-2", "table 'brand' names rank 2; there are ranks 0 to 1"),
        (1, "--batch-size 9e15", "batch_size must be a whole number from 1 to 1,099,511,627,776"),
        (1, "--gpus-per-node 1e9", "up to 32,768 ranks, not for 1,000,000,000"),
        (1, "info gone.json", "gone.json: no such file"),
        (1, f"calibrate --costs {SHIPPED / 'roofline.safetensors'} --out x", "dreamshard train --device cpu"),
        (1, "calibrate --tables os:getcwd --out x", "os:getcwd must return the model"),
        (1, "stats parquet gone.parquet --batch-size 8 --out x.json", "gone.parquet"),
        (2, "train --out nowhere/x.safetensors", "nowhere"),
        (2, "train --quick", "--out"),
        (2, "train --out x.safetensors --seconds -1", "--seconds"),
        (2, "collect --out x.npz --batch-sizes 12,many", "many"),
        (2, "--memory 80", "80GiB"),
        (2, "--batch-size 1.5", "'1.5' is no whole number"),
        (2, "--sharding-types row_wise,diagonal", "diagonal"),
        (2, "--together brand", "groups of two tables"),
        (2, "--on-ranks brand", "give a table and its ranks"),
        (2, "--on-ranks brand=3-0", "'3-0' is neither a rank"),
        (2, "--on-ranks brand=0 --on-ranks brand=1", "names table 'brand' twice"),
        (2, "--inter-bandwidth 200Gb", "200Gb/s"),
        (2, f"--memory {'9' * 400}GB", "no size up to 1,048,576TiB"),
        (2, "--search-seconds nan", "--search-seconds"),
        (2, "fit --dataset x.npz --test-dataset y.npz --quick", "--out"),
        (2, "what-if plan.json --vary colour=1", "colour"),
        (2, "what-if plan.json --vary gpus-per-node=two", "two"),
        (2, "--sync-interval 4", "--sharding-group"),
        (2, "--device cpu --host-memory 1GB", "--host-memory"),
        (2, "--format xml", "xml"),
        (2, "calibrate --threads 99999999", "this machine has"),
        (2, "calibrate --statistics x.json", "give --tables or --plan"),
        (2, "calibrate --tables merlin_tiny --plan x.json", "give --tables or --plan"),
        (2, "replan plan.json --steps 9 --restart-seconds inf", "--restart-seconds"),
        (2, "--intra-bandwidth .00000001kb/s", "no bandwidth from 1 byte"),
    ],
)
def test_mistakes_are_named_and_nothing_is_done(
    status: int, line: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong input is one line and status 1, a wrong command line status 2. A line of options is one of ``plan``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    result = run(*(("plan", *SMALL) if line.startswith("-") else ()), *shlex.split(line), status=status)
    assert reason in result.stderr and result.stdout == "" and not list(tmp_path.iterdir())
    if status == 1:
        *working, told = result.stderr.strip().splitlines()
        assert told.startswith("error: ") and reason in told
        assert all(line.startswith("planning ") for line in working)


def test_sizes_and_rates_have_units() -> None:
    assert (size_bytes("80GB"), size_bytes("80 GiB"), size_bytes("1.5tb")) == (80 * 10**9, 80 * 2**30, 1.5 * 10**12)
    assert (size_bytes("80G"), size_bytes("1.5 gi")) == (80 * 10**9, 1.5 * 2**30)
    assert (whole("8192"), whole("1e6"), whole("1.5E3"), whole(7)) == (8192, 10**6, 1500, 7)
    assert (bytes_per_s("25GB/s"), bytes_per_s("200Gb/s"), bytes_per_s("200Gbps")) == (25e9, 25e9, 25e9)
    for text in ("80", "GB", "8..0GB", "80 sheep"):
        with pytest.raises(typer.BadParameter, match="80GiB"):
            size_bytes(text)


def test_info_tells_the_kind_of_each_file(folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "x.json"
    foreign.write_text("[1]")
    files = {"plan": folder / "plan.json", "statistics": folder / "monday.json", "tables": EXAMPLE, "dataset": MEASURED}
    for kind, source in (*files.items(), ("checkpoint", "auto"), ("checkpoint", SHIPPED / "cpu.safetensors")):
        assert run_json("info", source)["kind"] == kind
        assert kind in run("info", source).stdout
    assert run_json("info", "auto", "--device", "cpu")["hardware"]["device"] == "cpu"
    assert "no kind" in run("info", foreign, status=1).stderr
    assert re.search(r"total_ms +[\d.]+", run("info", folder / "plan.json").stdout)
    page = run("info", "auto").stdout
    assert re.search(r"error +\d+% forward, \d+% backward, on held-out sets of all kinds", page)
    assert re.search(r"all_to_all +[\d.]+ ms and [\d,.]+ GB/s of a rank", page) and "000,000,000" not in page


def test_doctor_names_the_checkpoint_and_what_cuda_lacks() -> None:
    import torch

    found = {finding["subject"]: finding for finding in run_json("doctor")}
    assert found["torch"]["found"] == importlib.metadata.version("torch") and found["torchrec"]["verdict"] == "ok"
    assert "cpu.safetensors" in found["costs on cpu"]["found"]
    if not torch.cuda.is_available():
        assert found["CUDA"]["verdict"] == "note" and "roofline" in found["costs on cuda"]["found"]
        assert "plans for NVIDIA H100 80GB HBM3 use a network" in found["costs on cuda"]["advice"]


def test_doctor_says_what_to_install_and_fails_where_nothing_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from dreamshard_planner import environment
    from dreamshard_planner.cli import diagnosis

    def broken(name: str):
        if name.startswith("torchrec"):
            raise ImportError("libc10.so: cannot open shared object file")
        return importlib.import_module(name)

    monkeypatch.setattr(diagnosis, "import_module", broken)
    found = run_json("doctor", status=1)
    (torchrec,) = [finding for finding in found if finding["subject"] == "torchrec"]
    assert torchrec["verdict"] == "broken" and "libc10.so" in torchrec["found"]
    assert torchrec["advice"] == environment.how_to_install(environment.TORCHREC)


def test_explain_tells_of_a_rank_of_a_plan_by_default_of_the_slowest(folder: Path) -> None:
    plan = folder / "plan.json"
    document = run_json("explain", plan)
    assert document["rank"] == max(range(2), key=lambda rank: document["rank_ms"][rank]) and document["tables"]
    predicted = json.loads(plan.read_text())["predicted"]["chosen"]
    assert document["total_ms"] == pytest.approx(predicted["total_ms"], rel=1e-4)
    other = run("explain", folder / "after.json", "--rank", "1").stdout
    assert "Rank 1 of 2" in other and "    moved: " in other
    assert "rank 7" in run("explain", plan, "--rank", "7", status=1).stderr.lower()
    lost = run("replan", plan, "--steps", "9", "--lost", "1,9", status=2).stderr
    assert "--lost 9: the ranks of plan.json are 0 to 1" in lost
    given = ("--steps", "9", "--tables", "os:getcwd")
    assert "os:getcwd must return the model" in run("replan", plan, *given, status=1).stderr
    assert "foreign.json" in run("explain", folder / "foreign.json", status=1).stderr


def test_commands_keep_effort_and_seed_of_a_plan_unless_they_are_told_others(tmp_path: Path) -> None:
    listed = table_list(tmp_path, *({"name": name, "num_embeddings": 1000, "embedding_dim": 16} for name in "abc"))
    job = ("--tables", listed, *SMALL[2:6], "--batch-size", "64", "--sharding-types", "table_wise")
    first, again = str(tmp_path / "first.json"), str(tmp_path / "again.json")
    run("plan", *job, "--out", first)
    assert "effort" not in SavedPlan.load(first).inputs.settings
    for plan, given in ((first, ("--effort", "quick")), (again, ())):
        run("replan", plan, "--steps", "9", *given, "--out", again)
        assert SavedPlan.load(again).inputs.settings["effort"] == "quick"
    assert "fast" in run("plan", *job, "--effort", "fast", status=2).stderr
    assert SearchOptions().settings() == {} and SearchOptions(seed=0).settings() == {"seed": 0}


def test_plans_are_written_out_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has numbers side by side: plans of thousands of tables have megabytes of it."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich knows a terminal
    monkeypatch.setenv("COLUMNS", "200")
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    done = run("plan", *SMALL, "--format", "json", "--out", plan, "--html", page)
    assert f"planning {EXAMPLE} for 2 NVIDIA H100 SXM" in done.stderr
    shown, saved = json.loads(done.stdout), json.loads(plan.read_text())
    assert shown["plan"] == saved and "nvidia-h100-80gb-hbm3" in shown["report"]["cost_source"]
    assert f"{shown['report']['chosen']['total_ms']:.3f} ms" in page.read_text()
    assert "256 samples each" in page.read_text()
    told = run("report", plan, "--html", page, "--format", "json").stdout
    assert json.loads(told) == saved and "plan.json" in page.read_text()
    assert all(max(map(len, text.splitlines())) > 100 for text in (done.stdout, told))
    refused = run("report", plan, "--html", tmp_path, status=2).output
    assert "cannot be written" in re.sub(r"\W+", " ", refused)


def test_tables_that_are_hardly_meant_are_told_before_planning(tmp_path: Path) -> None:
    entries = [("odd", 1e3, 63), ("swapped", 64, 8_340), ("fine", 100, 64)]
    listed = ({"name": name, "num_embeddings": rows, "embedding_dim": dim} for name, rows, dim in entries)
    tables, statistics = table_list(tmp_path, *listed), tmp_path / "statistics.json"
    TableStatistics({"fine": FeatureStatistics(4.0, ids=IdHistogram.even(5000), batch_size=256)}).to_json(statistics)
    job = ("--tables", tables, "--batch-size", "1e2", "--effort", "quick", "--statistics", statistics)
    done = run("plan", *job, "--gpus-per-node", "2", "--gpu", "h100", "--format", "json")
    told = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert len(told) == 3 and "'pooled.odd' has dim 63" in done.stderr and "multiple of 4" in done.stderr
    assert "'pooled.swapped' has 64 rows of dim 8,340: perhaps these have changed places" in done.stderr
    assert "'pooled.fine' has 100 rows, and statistics of its feature 'fine' count ids up to 4,999" in done.stderr
    document = json.loads(done.stdout)
    assert document["batch_size"] == 100 and "Warning" not in done.stderr
    assert "dim 63" in " ".join(note["text"] for note in document["report"]["notes"])
    on_cpu = run("plan", *job, *ON_CPU, "--format", "json").stderr
    assert "dim 63" not in on_cpu and "dim 8,340" in on_cpu


def test_rules_of_the_command_line_are_kept(tmp_path: Path) -> None:
    rules = ("--together", "user_id,item_id,city", "--apart", "brand,category", "--on-ranks", "country=1")
    plan = tmp_path / "plan.json"
    report = run_json("plan", *SMALL, *rules, "--on-ranks", "city=0-0", "--out", plan)["report"]
    ranks = {table["name"].partition(".")[2]: table["ranks"] for table in report["tables"]}
    assert ranks["user_id"] == ranks["item_id"] == ranks["city"] == [0] and ranks["country"] == [1]
    assert not set(ranks["brand"]) & set(ranks["category"])
    fewer, more = run_json("what-if", plan, "--vary", "gpus-per-node=1,4")["sweeps"]["ranks"]
    assert "there are ranks 0 to 0" in fewer["reason"] and more["total_ms"] > 0


def test_what_if_varies_what_is_asked(folder: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "tight.json")
    run("plan", *SMALL, "--memory", "14GB", "--host-memory", "1GB", "--out", plan)
    document = run_json("what-if", plan, "--vary", "gpus-per-node=1", "--vary", "ranks=4,1", "--vary", "nodes=2")
    base, (tight, wide), (hosts,) = document["base"], *document["sweeps"].values()
    assert "H100" in base["machine"] and (base["ranks"], base["batch_size"]) == (2, 256)
    assert (tight["ranks"], wide["ranks"]) == (1, 4) and wide["total_ms"] > 0
    assert tight["total_ms"] is None and "do not fit" in tight["reason"]
    assert [*document["sweeps"]] == ["ranks", "hosts"] and hosts["value"] == 2
    given = ("--vary", "gpus-per-node=1", "--vary", "gpu=h200", "--vary", "intra-bandwidth=100GB/s")
    shown = run("what-if", plan, *given)
    assert all(words in shown.stdout for words in ("effort quick", "not fit", "gpu h200", "intra-bandwidth 100.0 GB/s"))
    sweeps = run_json("what-if", folder / "plan.json")["sweeps"]
    values = {axis: [point["value"] for point in points] for axis, points in sweeps.items()}
    slow, fast = values.pop("intra_bytes_per_s")
    assert values == {"ranks": [1, 4], "batch_size": [128, 512]} and fast == 4 * slow
    run("plan", *SMALL[:2], *ON_CPU, "--out", plan)
    assert "\nranks 1 " in run("what-if", plan, "--vary", "ranks=1").stdout
    wrong = run("what-if", plan, "--vary", "gpu=h20", status=2).stderr
    assert "unknown GPU 'h20' (did you mean 'h200'?)" in " ".join(wrong.replace("│", "").split())


def test_drift_and_what_planning_again_gains(folder: Path) -> None:
    files = (str(folder / "monday.json"), str(folder / "tuesday.json"))
    shown = run("stats", "diff", *files).stdout
    assert "1 of 3 features drifted" in shown and "user_id" in shown and "item_id" not in shown
    plan = str(folder / "of_monday.json")
    run("plan", *SMALL, "--statistics", files[0], "--out", plan)
    told = run("stats", "diff", "--plan", plan, files[1], "--worth", "1", "--effort", "quick").stdout
    assert "Verdict: keep the plan. By tuesday.json, " in told and "1 of 3 features drifted" in told
    again = run_json("stats", "diff", "--plan", plan, *files, "--worth", "0", status=3)
    assert again["verdict"] == "plan again" and again["replanning"]["again_ms"] <= again["replanning"]["keep_ms"]
    document = json.loads(Path(plan).read_text())
    none = {**document, "inputs": {**document["inputs"], "features": {}, "statistics": None}}
    (folder / "none.json").write_text(json.dumps(none))
    without = run("stats", "diff", "--plan", folder / "none.json", files[1], status=1).stderr
    assert "none.json holds no statistics, so no drift can be seen: give the statistics that it was made" in without
    assert "give two files of statistics, or --plan" in run("stats", "diff", files[0], status=2).stderr
    merged = str(folder / "merged.json")
    run("stats", "merge", *files, "--out", merged)
    assert TableStatistics.from_json(merged)["user_id"].pooling_factor == 6.0


@pytest.mark.parametrize(("stop", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (None, 1)])
def test_what_is_stopped_or_finds_the_disk_full_loses_nothing(stop: int | None, status: int, tmp_path: Path) -> None:
    folder, said = tmp_path / "out", tmp_path / "stderr"
    folder.mkdir()
    blocks = folder / "x.blocks"
    command = ["collect", "--out", str(folder / "x.npz"), "--pools", "merlin_tiny", "--sets", "400"]
    process, held = start(dreamshard, command, said, None if stop else 1_500), 0

    def sets() -> int:
        return sum(len(CostDataset.load(path)) for path in blocks.glob("block-*.npz"))

    if stop:
        wait_for(lambda: sets() > 0, process)
        held = sets()
        os.kill(process.pid, stop)
    assert ended(process) == [status]
    text = said.read_text()
    assert "Traceback" not in text and sets() >= held and [path.name for path in folder.iterdir()] == [blocks.name]
    assert stop or f"error: {blocks / 'block-0.npz'}: cannot be written: File too large" in text


def test_stdout_is_for_data_whatever_libraries_print() -> None:
    code = (
        "import ctypes; from dreamshard_planner import cli\nlibrary = ctypes.CDLL(None)\n"
        "cli.app = lambda: (library.puts(b'solver says'), library.fflush(None), print('data'))\ncli.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("data\n", "solver says\n")


@pytest.mark.parametrize(
    ("stdout", "status", "shown", "said"),
    [
        ("", 0, r"\xfc", ""),
        (">&-", 0, "", ""),
        (">/dev/full", 1, "", "error: standard output cannot be written: No space left on device\n"),
    ],
    ids=["ASCII", "closed", "full"],
)
def test_data_goes_to_any_stdout_or_the_exit_status_tells(stdout: str, status: int, shown: str, said: str) -> None:
    code = (
        "from dreamshard_planner import cli\nfrom dreamshard_planner.cli.app import Result, facts, show\n"
        "cli.app = lambda: show(Result({}, [facts({'name': chr(252)}, 'title')]), 'table')\ncli.main()"
    )
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = f"exec {shlex.join([sys.executable, '-c', code])} {stdout}"
    result = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (status, said) and shown in result.stdout
