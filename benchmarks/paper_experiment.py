# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The DreamShard paper's own experiment on this machine's kernels: train and test tasks of one pool, one dim, one batch
size and one optimizer; the published method beside its baselines, ours, and its own ablations.

    python benchmarks/paper_experiment.py --work paper-experiment.work \\
        --record benchmarks/results/2026-11-22-paper-experiment.jsonl

Half of the Meta-like tables train, half test; tasks of T tables on D devices, each drawn from one half. Training
repeats ten times: measure ten placements that the policy samples, fit the cost network, improve the policy on it.
Placements are measured as the referee (``compare_placements.py``) measures them, collectives are modelled. All that is
learned and measured for learning is kept in ``--work``; each test task appends one line to the record. The same command
continues where it ends, and summarizes; ``--minutes`` ends it in between. ``--steps`` picks some of

    collect    train as published, in every setting and with every seed, and until convergence; measures
    learn      everything that is fitted to the same measurements; measures nothing
    held-out   measure random placements of test tasks: what errors of cost networks are told on
    test       all placers on the test tasks, measured
    report     tables, and a chart beside the record

``--quick`` is a toy that runs through all of it in seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
from rich.console import Console
from torch import Tensor

from common.output import append, commit, lines_of, provenance, quiet, wide_console
from compare_placements import play
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.search.starts import HEURISTICS
from dreamshard_planner.support.formatting import progress_bar
from dreamshard_planner.support.reproducible import single_thread
from paper.models import FITS, MEASURED_REWARDS, Model, Models, Scale, rows
from paper.results import held_out_blocks, held_out_errors, held_out_placements, print_results
from paper.training import Half, Setting, halves, measure_placements
from placements.contests import Contest
from placements.placers import Field

SETTINGS = "20x4,40x4,60x4,80x4,100x4,40x8,80x8"
STEPS = ("collect", "learn", "held-out", "test", "report")
SEEDS = ("measured_seeds", "away_seeds", "converged_seeds", "ablation_seeds")
"""Parts of the scale that the command line names."""
BASELINES = ("random", *HEURISTICS, "torchrec")
QUICK = {
    "settings": "6x2,8x2", "home": "6x2", "seeds": 2, "tasks": 1,
    "batch_size": 32, "rounds": 1, "held_out": 2, "measured_seeds": 1, "away_seeds": 1,
    "ablation_seeds": 1, "converged_seeds": 1,
}  # fmt: skip
QUICK_SCALE = Scale(
    train_tasks=2, iterations=1, converged=2, prefixes=(10,), fit_updates=3, policy_updates=2, repeats=1, epochs=1
)


class OutOfTimeError(Exception):
    """The minutes are over; what was done is kept."""


class PaperField(Field):
    """The baselines of the referee, what ships, and what was trained here for one setting."""

    def __init__(self, models: Models, setting: Setting, seeds: range, device: str) -> None:
        super().__init__(device=device)
        self.predicted_ms: dict[str, float] = {}
        """Each trained model's prediction of the compute of its own placement of the last task."""
        self.placers = {
            **{name: self.placers[name] for name in BASELINES},
            "policy_shipped": self.placers["policy"],
            "default_shipped": self.placers["dreamshard"],
            **{name: partial(self._trained, name, model) for name, model in rows(models, setting, seeds).items()},
        }

    def _trained(self, name: str, model: Model, task: Contest) -> Tensor | None:
        self.predicted_ms.pop(name, None)
        plan = model(task)
        if plan is not None:
            self.predicted_ms[name] = float(self.cost(task, model.compute).rate(plan[None]).device_ms_BD.max())
        return plan


def main() -> None:
    """The command."""
    args = parse()
    quiet()
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")

    def tick() -> None:
        if time.monotonic() > deadline:
            raise OutOfTimeError

    settings, home = [Setting.parse(text) for text in args.settings.split(",")], Setting.parse(args.home)
    scale = QUICK_SCALE if args.quick else Scale()
    scale = replace(scale, **{name: getattr(args, name) for name in SEEDS})
    train_half, test_half = halves(args.batch_size)
    arena = Arena(args.device)
    models = Models(args.work, train_half, scale, home, arena, tick)
    seeds = range(args.seeds)
    with single_thread():
        try:
            if "collect" in args.steps:
                collect(models, settings, seeds)
            if "learn" in args.steps:
                learn(models, settings, seeds, tick)
            if "held-out" in args.steps:
                held_out(models, settings, test_half, args, tick)
            if "test" in args.steps:
                test(models, settings, test_half, seeds, args, tick)
        except OutOfTimeError:
            Console(stderr=True).print("The minutes are over; the same command goes on from here.")
            return
        if "report" in args.steps:
            report(models, settings, test_half, seeds, args)


def parse() -> argparse.Namespace:
    """Command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=SETTINGS, help="TABLESxDEVICES, separated by commas")
    parser.add_argument("--home", default="40x4", help="setting of ablations, and the one that is transferred from")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of everything")
    parser.add_argument("--measured-seeds", type=int, default=3, help="of these; the others only fit networks anew")
    parser.add_argument("--away-seeds", type=int, default=3, help="of these, in settings other than home")
    parser.add_argument("--converged-seeds", type=int, default=3, help="of these, until convergence; all at home")
    parser.add_argument("--ablation-seeds", type=int, default=3, help="of these, with everything but the main rows too")
    parser.add_argument("--tasks", type=int, default=50, help="test tasks of each setting")
    parser.add_argument("--held-out", type=int, default=50, help="random placements of test tasks, by setting")
    parser.add_argument("--batch-size", type=int, default=512, help="samples that a kernel sees")
    parser.add_argument("--rounds", type=int, default=3, help="times that each placement is measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is learned; continued")
    parser.add_argument("--record", type=Path, required=True, help="a JSON line per test task; continued")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of them, separated by commas")
    parser.add_argument("--minutes", type=float, help="end after so many, to be continued")
    parser.add_argument("--quick", action="store_true", help="a toy, in seconds")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    args.steps = args.steps.split(",")
    args.seed = 0  # of the referee
    if unknown := sorted(set(args.steps) - set(STEPS)):
        parser.error(f"--steps must be some of {', '.join(STEPS)}; got {', '.join(unknown)}")
    return args


def collect(models: Models, settings: list[Setting], seeds: range) -> None:
    """Everything that measures in order to learn."""
    lengths = {"published": models.scale.iterations, "converged": models.scale.converged}
    runs = [(setting, kind) for kind in lengths for setting in settings]
    measured = seeds[: models.scale.measured_seeds]
    with progress_bar("training as published", len(measured) * (len(runs) + 1), True) as advance:
        for seed in measured:
            for setting, kind in runs:
                if seed in models.seeds(setting, measured) and kind in models.kinds(setting, seed):
                    models.published(setting, seed, lengths[kind])
                advance(f"{setting}, seed {seed}")
            if seed < models.scale.ablation_seeds:
                models.model(f"{MEASURED_REWARDS}@{models.looks[-1]}", models.home, seed)
            advance(f"measured rewards, seed {seed}")


def learn(models: Models, settings: list[Setting], seeds: range, tick: Callable[[], None]) -> None:
    """Everything that is learned from these measurements; what is not measured yet is left out."""
    kinds = [
        (kind, setting, seed)
        for seed in seeds
        for setting in settings
        if seed in models.seeds(setting, seeds)
        for kind in models.kinds(setting, seed)
    ]
    fits = [(fit, seed) for seed in seeds[: models.scale.ablation_seeds] for fit in FITS]
    with progress_bar("learning", len(kinds) + len(fits), True) as advance:
        for kind, setting, seed in kinds:
            if models.is_measured(kind, setting, seed):
                models.model(kind, setting, seed)
            advance(f"{kind}, {setting}, seed {seed}")
            tick()
        for fit, seed in fits:
            if models.is_measured("published", models.home, seed):
                models.fitted(fit, models.home, seed)
            advance(f"fit: {fit}, seed {seed}")
            tick()


def held_out(
    models: Models, settings: list[Setting], half: Half, args: argparse.Namespace, tick: Callable[[], None]
) -> None:
    """Measure random placements of test tasks; those of home a second time in the end, as a bar for errors."""
    with progress_bar("held-out placements", len(settings) + 1, True) as advance:
        for setting, again in [*((setting, False) for setting in settings), (models.home, True)]:
            placements = held_out_placements(half, setting, args.held_out)
            folder = held_out_blocks(args.work, setting, again)
            for count in range(5, len(placements) + 5, 5):
                measure_placements(half, placements[:count], folder, models.arena, 5, seed=0)
                tick()
            advance(str(setting))


def test(
    models: Models,
    settings: list[Setting],
    half: Half,
    seeds: range,
    args: argparse.Namespace,
    tick: Callable[[], None],
) -> None:
    """All placers on the test tasks."""
    records, fields = read(args), {}
    played = {record["task"] for record in records[1:]}
    args.record.parent.mkdir(parents=True, exist_ok=True)
    if not records:
        head = {"settings": settings_of(args), "scale": asdict(models.scale)}
        append(args.record, head | provenance(models.arena.device))
    with progress_bar("test tasks", len(settings) * args.tasks, True, len(played)) as advance:
        for index, setting in product(range(args.tasks), settings):
            task = half.tasks(setting, index + 1)[index]
            if task.name in played:
                continue
            if setting not in fields:
                fields[setting] = PaperField(models, setting, seeds, args.device)
            field = fields[setting]
            record = play(task, field, list(field.placers), models.arena, args)
            append(args.record, record | {"predicted_compute_ms": field.predicted_ms})
            advance(task.name)
            tick()


def report(models: Models, settings: list[Setting], half: Half, seeds: range, args: argparse.Namespace) -> None:
    """Tables for people, figures beside the record."""
    records = read(args)
    errors = held_out_errors(models, settings, half, seeds, args.held_out, args.work)
    taken = {
        f"{seed}": {str(look): models.rewards_taken(seed, look) for look in models.looks}
        for seed in seeds[: models.scale.ablation_seeds]
    }
    seconds = {
        f"{setting}#{seed}": sum(models.published(setting, seed, models.scale.iterations).seconds)
        for setting in settings
        for seed in models.seeds(setting, seeds[: models.scale.measured_seeds])
    }
    summary = {"commit": commit(), "errors": errors, "measured_rewards": taken, "training_seconds": seconds}
    args.record.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    chart = args.record.with_suffix(".png")
    print_results(records[1:], summary, settings, models.home, wide_console(180), chart)


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings in which a record must agree to be continued."""
    names = ("seeds", *SEEDS, "home", "batch_size", "rounds", "device", "quick")
    return {name: str(getattr(args, name)) for name in names}


def read(args: argparse.Namespace) -> list[dict]:
    """Lines of the record; ends the program where they were made with other settings."""
    records = lines_of(args.record)
    if records and records[0]["settings"] != settings_of(args):
        raise SystemExit(f"{args.record}: recorded with other settings: {records[0]['settings']}")
    return records


if __name__ == "__main__":
    main()
