# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Everything that a machine with GPUs can tell, in a given time and one folder.

    make gpu MINUTES=25                  # python benchmarks/gpu.py --minutes 25
    make gpu DEVICE=cpu MINUTES=3        # the same on two CPU ranks

Stages follow each other, each in a process of its own with a share of the minutes and a log; what one leaves over goes
to those behind it. A stage that fails is told and the others go on; the exit status is 1 then. The same command again
continues: stages that are done are left alone, others go on with what they have recorded. ``--stages`` repeats some.

The folder (by default ``benchmarks/results/`` and the name of the device) ends with ``environment.json``,
``stages.json``, ``report.md``, the results of all stages, and the checkpoint, whose name says which device it is for:
in ``dreamshard_planner/checkpoints`` it is what planners with ``checkpoint="auto"`` take on that device.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from common.output import named
from common.provenance import ROOT, commit, provenance
from dreamshard_planner.checkpoints.checkpoint import measured_name, shipped
from dreamshard_planner.errors import CheckpointError, FileError
from dreamshard_planner.support.files import check_writable, write_whole

BENCHMARKS = Path(__file__).parent
LOG_LINES = 40
"""Of each stage in the report: the tables that it ends with."""
STATES = {"done": "green", "failed": "red", "timed out": "red", "skipped": "yellow"}


@dataclass(frozen=True)
class Node:
    """What the stages run on, and where they write."""

    device: str
    name: str
    """Of the card or processor, as checkpoints are named."""
    ranks: int
    out: Path
    minutes: float
    """For all stages together."""
    grace_seconds: float = 120.0
    """What a stage may take beside its share: imports, model building, the end of what it is at."""
    quick: bool = False
    """Everything as small as it gets, to try the flow."""

    @property
    def checkpoint(self) -> Path:
        """What the stage of this name makes."""
        return self.out / f"{self.name}.safetensors"

    @property
    def planned_with(self) -> str:
        """That checkpoint, if there is one, else the one that ships."""
        return str(self.checkpoint) if self.checkpoint.is_file() else "auto"

    def python(self, *arguments: object) -> list[str]:
        """A command of one process."""
        return [sys.executable, *map(str, arguments)]

    def torchrun(self, *arguments: object) -> list[str]:
        """A command of all ranks."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return self.python(*launcher, *arguments)


Command = Callable[[Node, float], "list[str] | str"]
"""What a stage runs in so many seconds, or why there is nothing to run."""


@dataclass(frozen=True)
class Stage:
    """One part of the whole."""

    name: str
    share: float
    """Of the minutes, relative to the other stages."""
    what: str
    command: Command


def tests(node: Node, seconds: float) -> list[str]:
    """Of kernels on the device, and of collectives where there are GPUs for them."""
    chosen = ["-m", "gpu"] if node.device == "cuda" else ["-m", "not gpu", ROOT / "tests" / "measure" / "test_gpu.py"]
    return node.python("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *chosen)


def kernels(node: Node, seconds: float) -> list[str]:
    script = BENCHMARKS / "fused_kernels.py"
    few = ["--repeats=1", "--sweeps=dim"] if node.quick else []
    options = [f"--device={node.device}", f"--seconds={seconds:.0f}", f"--json={node.out / 'fused-kernels.json'}"]
    return node.python(script, *options, *few)


def collectives(node: Node, seconds: float) -> list[str] | str:
    if node.ranks < 2:
        return "one GPU: nobody to exchange with"
    options = [f"--out={node.out / 'collectives.json'}", f"--seconds={seconds:.0f}"]
    return node.torchrun("-m", "dreamshard_planner.measure.collectives", *options)


def checkpoint(node: Node, seconds: float) -> list[str]:
    """Half of the time is for measuring, and half for fitting twice and training the policy twice. A training goes on
    with the same options only."""
    measured = node.out / "collectives.json"
    measuring = 2.0 if node.quick else max(1.0, seconds / 2)
    options = [f"--device={node.device}", f"--out={node.checkpoint}", f"--seconds={measuring:.0f}"]
    options += [f"--collectives={measured}"] if measured.is_file() else []
    options += ["--quick"] if node.quick else [f"--updates={max(20, min(300, round(12 * node.minutes)))}"]
    return node.torchrun("-m", "dreamshard_planner", "train", *options)


def accuracy(node: Node, seconds: float) -> list[str]:
    script = BENCHMARKS / "cost_accuracy.py"
    options = [f"--device={node.device}", f"--checkpoint={node.planned_with}", f"--data={node.out}", "--measure"]
    options += ["--no-singles", f"--seconds={seconds:.0f}", f"--json={node.out / 'cost-accuracy.json'}"]
    options += [f"--train={node.checkpoint.with_suffix('.dataset.npz')}"]
    return node.python(script, *options, *(["--sets=12", "--rounds=1"] if node.quick else []))


def _referee(node: Node, record: str, seconds: float, *options: str) -> list[str]:
    """Placements measured by one device that stands for several."""
    batch_size = 512 if node.device == "cpu" else 16384
    fixed = [f"--device={node.device}", f"--checkpoint={node.planned_with}", f"--batch-size={batch_size}"]
    record += ".jsonl" if node.checkpoint.is_file() else "-shipped.jsonl"
    fixed += ["--oracle-seconds=0", f"--record={node.out / record}", f"--seconds={seconds:.0f}"]
    return node.python(BENCHMARKS / "compare_placements.py", *fixed, *options)


def placements(node: Node, seconds: float) -> list[str]:
    placers = "dreamshard,policy,search_alone,torchrec,torchrec_default,size_greedy,size_lookup_greedy"
    options = ["--tasks=1", "--rounds=1"] if node.quick else ["--tasks=60", "--rounds=5"]
    return _referee(node, "placements", seconds, f"--placers={placers}", "--refine-seconds=0", *options)


def refine(node: Node, seconds: float) -> list[str]:
    options = ["--tasks=1", "--rounds=1"] if node.quick else ["--tasks=12", "--rounds=5"]
    budget = 1 if node.quick else 5 if seconds < 60 else 15
    options += ["--placers=dreamshard,torchrec", f"--refine-seconds={budget}", "--seed=2"]
    return _referee(node, "refined", seconds, *options)


def steps(node: Node, seconds: float) -> list[str]:
    rows = 100_000 if node.device == "cpu" else 1_000_000
    options = [f"--checkpoint={node.planned_with}", f"--max-rows={rows}", f"--train-seconds={seconds / 2:.0f}"]
    options += ["--planners=dreamshard,torchrec,torchrec_default", f"--json={node.out / 'steps.json'}"]
    options += ["--copies=1", "--steps=4", "--batch-size=32"] if node.quick else ["--copies=2"]
    return node.torchrun(BENCHMARKS / "run_dlrm.py", *options)


STAGES = (
    Stage("tests", 0.08, "tests of what only this device can do", tests),
    Stage("kernels", 0.06, "fused kernels against the copy bandwidth", kernels),
    Stage("collectives", 0.05, "collectives between all ranks", collectives),
    Stage("checkpoint", 0.45, "measured sets, cost network and policy", checkpoint),
    Stage("accuracy", 0.08, "cost of sets of held-out tables, predicted and measured", accuracy),
    Stage("placements", 0.12, "placements of held-out tables, measured", placements),
    Stage("refine", 0.06, "placements refined by measurement against those predicted", refine),
    Stage("steps", 0.10, "training steps of a DLRM under several planners", steps),
)


@dataclass
class Outcome:
    """What became of a stage."""

    state: str
    note: str = ""
    command: str = ""
    commit: str = ""
    seconds: float = 0.0
    status: int | None = None
    log: str = ""


@dataclass
class Record:
    """Outcomes by stage, kept in a file that is written anew after each."""

    path: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Record:
        """What earlier runs left."""
        known = json.loads(path.read_text()) if path.is_file() else {}
        return cls(path, {name: Outcome(**outcome) for name, outcome in known.items()})

    def note(self, stage: Stage, outcome: Outcome) -> None:
        """Write it down."""
        self.outcomes[stage.name] = outcome
        write_whole(
            self.path, json.dumps({name: asdict(each) for name, each in self.outcomes.items()}, indent=1) + "\n"
        )


def run(stage: Stage, node: Node, seconds: float) -> Outcome:
    """Run a stage's command; past its share and ``grace_seconds`` it is ended."""
    command = stage.command(node, seconds)
    if isinstance(command, str):
        return Outcome("skipped", command)
    log = node.out / f"{stage.name}.log"
    paths = (str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    begin = time.monotonic()
    with log.open("a") as file:
        file.write(f"$ {_told(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds + node.grace_seconds)
            state = "failed" if status else "done"
        except subprocess.TimeoutExpired:
            status, state = None, "timed out"
        finally:
            _end(process)
    took = time.monotonic() - begin
    note = "" if state == "done" else _last_line(log)
    if state == "timed out":
        note = f"ended after {took:.0f} s, with {seconds:.0f} s of its own"
    return Outcome(state, note, _told(command), commit(), took, status, log.name)


def _told(command: Sequence[str]) -> str:
    """To be typed in the project's folder."""
    return shlex.join("python" if part == sys.executable else part.replace(f"{ROOT}{os.sep}", "") for part in command)


def _end(process: subprocess.Popen) -> None:
    """The process and all that it started: asked first, so that torchrun ends its ranks."""
    for sent, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sent)
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def run_all(stages: Sequence[Stage], node: Node, record: Record, console: Console) -> None:
    """Run stages one after the other; each gets its share of the time that is left."""
    deadline = time.monotonic() + 60 * node.minutes
    for index, stage in enumerate(stages):
        left = max(0.0, deadline - time.monotonic())
        seconds = max(1.0, left * stage.share / sum(other.share for other in stages[index:]))
        console.print(f"{stage.name}: {stage.what}, about {seconds:.0f} s ...")
        outcome = run(stage, node, seconds)
        record.note(stage, outcome)
        colour = STATES[outcome.state]
        console.print(f"  [{colour}]{outcome.state}[/] after {outcome.seconds:.0f} s", outcome.note, highlight=False)


def environment(device: str) -> dict[str, Any]:
    """Machine, versions and devices; raises where this torch cannot use the device at all."""
    versions = {each.metadata["Name"]: each.version for each in distributions()}
    described = provenance(torch.device(device)) | {"packages": dict(sorted(versions.items()))}
    if device == "cuda":
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        described |= {
            "cards": [f"{card.name}, {card.total_memory / 1e9:.0f} GB" for card in cards],
            "architectures": torch.cuda.get_arch_list(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        if shutil.which("nvidia-smi"):
            links = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
            described["links"] = links.stdout.splitlines()
    return described


def report(node: Node, record: Record, described: dict[str, Any]) -> str:
    """The whole, in Markdown."""
    hardware = described["hardware"]
    versions = ", ".join(f"{name} {hardware[name]}" for name in ("torch", "fbgemm", "torchrec"))
    lines = [
        f"# {hardware['name']}",
        "",
        f"{node.ranks} rank(s); {versions}, commit {described['commit']}; {described['date']}. "
        f"Details: environment.json, stages.json.",
        "",
        "| stage | what | outcome | seconds | log |",
        "|---|---|---|---|---|",
    ]
    for stage in STAGES:
        outcome = record.outcomes.get(stage.name, Outcome("not run"))
        told = f"{outcome.state}: {outcome.note}" if outcome.note else outcome.state
        lines.append(f"| {stage.name} | {stage.what} | {told} | {outcome.seconds:.0f} | {outcome.log} |")
    try:
        made = shipped(node.out, node.device, "default", node.name if node.device == "cuda" else None)
        if made.name != node.checkpoint.name:
            raise CheckpointError(f"{node.checkpoint.name} is missing")
        lines += ["", f"`cp {_told([str(node.checkpoint)])} dreamshard_planner/checkpoints/` makes `auto` take it."]
        lines += ["It says of itself:"]
        lines += ["", "```json", json.dumps(made.metadata["validation"], indent=1), "```"]
    except CheckpointError as error:
        lines += ["", f"No checkpoint: {error}"]
    for stage in STAGES:
        outcome = record.outcomes.get(stage.name)
        if outcome is not None and outcome.log:
            end = [line.rstrip() for line in (node.out / outcome.log).read_text(errors="replace").splitlines()]
            lines += ["", f"## {stage.name}", "", "```", *end[-LOG_LINES:], "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all stages together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--grace-seconds", type=float, default=120.0, help="for a stage beside its share, to start and end"
    )
    parser.add_argument("--out", type=Path, help="folder of the results; default: by device")
    parser.add_argument("--stages", default="", help=f"some of {','.join(names)}, done or not; default: all not done")
    parser.add_argument("--quick", action="store_true", help="everything as small as it gets, to try the flow")
    args = parser.parse_args(arguments)
    wanted = named(args.stages)
    if unknown := set(wanted) - set(names):
        parser.error(f"--stages must be some of {', '.join(names)}; got {', '.join(sorted(unknown))}")
    if not args.minutes > 0:
        parser.error(f"--minutes must be above 0, got {args.minutes}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU that this torch can use; --device cpu tries the same on CPU ranks")
    described = environment(args.device)
    name = measured_name(args.device, described["hardware"]["name"])
    ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    out = (args.out or BENCHMARKS / "results" / name).resolve()
    node = Node(args.device, name, ranks, out, args.minutes, args.grace_seconds, args.quick)
    try:
        node.out.mkdir(parents=True, exist_ok=True)
        check_writable(node.out / "stages.json")
    except (OSError, FileError) as error:
        parser.error(f"--out: {error}")
    write_whole(node.out / "environment.json", json.dumps(described, indent=1) + "\n")
    record = Record.open(node.out / "stages.json")
    done = {name for name, outcome in record.outcomes.items() if outcome.state == "done"}
    chosen = [stage for stage in STAGES if stage.name in (wanted or set(names) - done)]
    console = Console()
    run_all(chosen, node, record, console)
    write_whole(node.out / "report.md", report(node, record, described))
    table = RichTable(title=f"{described['hardware']['name']}: {node.out}")
    for heading in ("stage", "outcome", "seconds"):
        table.add_column(heading)
    for name, outcome in record.outcomes.items():
        table.add_row(name, f"[{STATES[outcome.state]}]{outcome.state}[/]", f"{outcome.seconds:.0f}")
    console.print(table)
    return int(any(outcome.state in ("failed", "timed out") for outcome in record.outcomes.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stages are ended too
    raise SystemExit(main())
