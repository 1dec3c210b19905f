# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The setting of the DreamShard paper (one pool, one dim, one batch size, one optimizer; tasks of a number of tables on
a number of devices), and its training as published: collect, fit and improve, each iteration on placements of the
policy so far; and a policy trained on measured rewards instead.

Shapes: N measured placements, S shards (tables), D devices, E episodes, X sets, F features.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.measured_costs import MeasuredCosts, SetClock
from common.whole_tables import Task, over, problem_of
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.problem import ComputeCost, Cost
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import collect
from dreamshard_planner.workload.pools import pool_tables
from dreamshard_planner.workload.tables import Table, Workload, feature_matrix, workloads_of
from paper.networks import PaperCostNetwork, PaperFit, PaperPolicy
from paper.placement_mdp import PlacementCost
from paper.placement_policy import AnyPolicy, played
from paper.placement_reinforce import EPISODES, ReinforceConfig, reinforce_update
from placements.contests import BYTES_PER_MS, Contest

POOL = "meta_like_2021"
MEMORY_BYTES = 5e9
"""Bytes of a device, as published; tables count as fp16 there, whatever they are trained in."""
FP16_BYTES = 2


@dataclass(frozen=True, order=True)
class Setting:
    """Tables and devices of a task; written ``40x4``."""

    tables: int
    devices: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From ``TABLESxDEVICES``."""
        tables, _, devices = text.partition("x")
        if not (tables.isdecimal() and devices.isdecimal() and int(tables) and int(devices) > 1):
            raise ValueError(f"a setting is TABLESxDEVICES, e.g. 40x4, got {text!r}")
        return cls(int(tables), int(devices))

    def __str__(self) -> str:
        return f"{self.tables}x{self.devices}"


@dataclass(frozen=True)
class Half:
    """Half of the pool: the tables that train, or those that test."""

    tables: tuple[Table, ...]
    batch_size: int
    number: int = field(repr=False)

    @cached_property
    def workloads(self) -> list[Workload]:
        """One per table."""
        return workloads_of(self.tables, self.batch_size)

    @cached_property
    def features_SF(self) -> Tensor:
        """Features of all tables, [S, F]."""
        return feature_matrix(self.workloads)

    def tasks(self, setting: Setting, count: int) -> list[Contest]:
        """The first ``count`` of this half's tasks: random tables, the same for everybody."""
        generator = torch.Generator().manual_seed(10_000 * setting.tables + 100 * setting.devices + self.number)
        tasks = []
        for index in range(count):
            chosen = torch.randperm(len(self.tables), generator=generator)[: setting.tables].tolist()
            tables = tuple(self.tables[table] for table in chosen)
            workloads = tuple(self.workloads[table] for table in chosen)
            problem = problem_of(workloads, setting.devices)
            capacity_bytes = int(MEMORY_BYTES * tables[0].weight_bytes / FP16_BYTES)
            problem = replace(problem, limits_DM=torch.full_like(problem.limits_DM, capacity_bytes))
            model = CollectiveModel(setting.devices, BYTES_PER_MS)
            name = f"{setting}.{index}"
            tasks.append(Contest(name, str(setting), tables, Task(workloads, problem), self.batch_size, False, model))
        return tasks

    def labelled(self, sets: Sequence[Sequence[str]], labels_ms_X2: Tensor) -> LabelledSets:
        """Measured sets of tables by name; empty ones may be among them."""
        index_S = torch.tensor([self._index[name] for group in sets for name in group], dtype=torch.int64)
        lengths = torch.tensor([0, *(len(group) for group in sets)])
        return LabelledSets(self.features_SF[index_S], lengths.cumsum(0), labels_ms_X2.float())

    @cached_property
    def _index(self) -> dict[str, int]:
        return {table.name: index for index, table in enumerate(self.tables)}

    def workloads_named(self, names: Sequence[str]) -> list[Workload]:
        """Return the workloads of tables by name."""
        return [self.workloads[self._index[name]] for name in names]


def halves(batch_size: int, dim: int = 16, weight_bytes: int = 4) -> tuple[Half, Half]:
    """Training and test half of the pool, the same as in the training of what ships; SGD, all of one dim."""
    parts = pool_tables((POOL,))
    train, test = (
        tuple(replace(table, dim=dim, weight_bytes=weight_bytes, optimizer="sgd") for table in part) for part in parts
    )
    return Half(train, batch_size, 0), Half(test, batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Size of the experiment; the defaults are the whole one."""

    train_tasks: int = 50
    iterations: int = 10
    collected: int = 10
    """Placements measured in each."""
    converged: int = 40
    """Iterations that convergence takes."""
    prefixes: tuple[int, ...] = (10, 30, 100)
    """Measured placements, the first ones of the converged training, of the learning curve."""
    fit_updates: int = 300
    policy_updates: int = 10
    """Both in each iteration."""
    repeats: int = 2
    """Timed runs of each set in training."""
    epochs: int = 120
    """Epochs of our cost network."""
    measured_seeds: int = 3
    """Trainings that measure placements of their own; the others learn from those of the first."""
    away_seeds: int = 3
    """Trainings in settings other than home."""
    converged_seeds: int = 3
    """Number of these that go on until convergence."""
    ablation_seeds: int = 3
    """Trainings in which more is learned than what stands in the table of results."""


@dataclass(frozen=True)
class Trained:
    """Networks, and what was measured for them."""

    network: PaperCostNetwork
    policy: PaperPolicy
    placements: list[list[list[str]]]
    """Names of the tables of each device, in the order of measuring."""
    dataset: CostDataset
    """The sets of the placements that are not empty, in that order."""
    seconds: list[float]
    """Seconds of each iteration: measuring, fitting and improving."""


def labelled_placements(
    half: Half, placements: Sequence[Sequence[Sequence[str]]], dataset: CostDataset
) -> tuple[LabelledSets, Tensor]:
    """Sets of placements with their measured milliseconds, an empty one last, and the placements [N, D] as sets."""
    sets = [group for placement in placements for group in placement if group]
    number = iter(range(len(sets)))
    index_ND = torch.tensor([[next(number) if group else len(sets) for group in one] for one in placements])
    labels_X2 = torch.cat([dataset.median_ms()[: len(sets)], torch.zeros(1, 2, dtype=torch.float64)])
    return half.labelled([*sets, []], labels_X2), index_ND


def kept(path: Path, module: nn.Module, make: Callable[[nn.Module], None]) -> nn.Module:
    """``module`` as it was made once and kept in ``path``."""
    if path.exists():
        module.load_state_dict(load_file(path))
    else:
        make(module)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({name: value.contiguous() for name, value in module.state_dict().items()}, partial)
        partial.replace(path)
    return module.eval()


def measure_placements(
    half: Half, placements: Sequence[Sequence[Sequence[str]]], folder: Path, arena: Arena, repeats: int, seed: int
) -> CostDataset:
    """Measure the sets of some placements that the folder does not hold yet; return those of these placements alone."""
    sets = [half.workloads_named(group) for placement in placements for group in placement if group]
    if any(folder.glob("*.npz")) and len(held := load_blocks(folder)) > len(sets) and held.sets[: len(sets)] == sets:
        samples_ms, reference_ms = held.samples_ms[: len(sets)], held.reference_ms[: len(sets)]
        return CostDataset.from_sets(sets, samples_ms, held.hardware, reference_ms, seed)
    return collect(sets, folder, device=arena.device, repeats=repeats, seed=seed, progress=False, arena=arena)


def load_blocks(folder: Path) -> CostDataset:
    """Load all blocks that one rank has measured, in the order in which it did."""
    paths = sorted(folder.glob("*.npz"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return CostDataset.concatenate([CostDataset.load(path) for path in paths])


def train_published(
    scale: Scale,
    iterations: int,
    seed: int,
    half: Half,
    tasks: Sequence[Contest],
    folder: Path,
    arena: Arena,
    on_iteration: Callable[[], None],
    measured: Trained | None = None,
) -> Trained:
    """As published; what is interrupted goes on where it was when called again with the same arguments.

    With placements that another training ``measured``, nothing is collected, and only the networks are trained anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network, policy = PaperCostNetwork(seed), PaperPolicy(seed)
    modules, done = {"network": network, "policy": policy}, folder / "placements.json"
    if done.exists():
        for name, module in modules.items():
            module.load_state_dict(load_file(folder / f"{name}.safetensors"))
        record, dataset = json.loads(done.read_text()), CostDataset.load(folder / "dataset.npz")
        return Trained(network.requires_grad_(False), policy, record["placements"], dataset, record["seconds"])

    devices = tasks[0].task.problem.num_ranks
    fit = PaperFit(devices, iterations * scale.fit_updates, half.features_SF, seed, network)
    policy.initialize(half.features_SF)
    generator, config = torch.Generator().manual_seed(seed), ReinforceConfig()
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    placements: list[list[list[str]]] = []
    # Iterations that an earlier call ran only repeat what needs no kernels.
    timed = folder / "seconds.json"
    seconds: list[float] = json.loads(timed.read_text()) if timed.exists() else []
    for iteration in range(iterations):
        start = time.monotonic()
        wanted = (iteration + 1) * scale.collected
        if measured is None:
            while len(placements) < wanted:
                task = _any(tasks, generator)
                if (plan := played(policy, cost_of(task, network), generator)) is not None:
                    placements.append(named_placement(task, plan))
            dataset = measure_placements(half, placements, folder / "measured.blocks", arena, scale.repeats, seed)
        else:
            placements, dataset = measured.placements[:wanted], measured.dataset
        train, index_ND = labelled_placements(half, placements, dataset)
        fit.descend(train, scale.fit_updates, index_ND)
        for _ in range(scale.policy_updates):
            cost = cost_of(_any(tasks, generator), network)
            reinforce_update(policy, optimizer, cost, config, generator, 1 - iteration / iterations)
        if iteration == len(seconds):
            seconds.append(time.monotonic() - start)
            timed.write_text(json.dumps(seconds))
        on_iteration()
    for name, module in modules.items():
        save_file(module.state_dict(), folder / f"{name}.safetensors")
    dataset.save(folder / "dataset.npz")
    done.write_text(json.dumps({"placements": placements, "seconds": seconds}))
    return Trained(network.requires_grad_(False), policy, placements, dataset, seconds)


def train_on_measured_rewards(
    policy: AnyPolicy,
    compute: ComputeCost,
    tasks: Sequence[Contest],
    arena: Arena,
    config: ReinforceConfig,
    on_update: Callable[[int, int, float], None],
) -> None:
    """Train ``policy`` in place without an estimated MDP: every episode's placement is measured, once. ``compute`` is
    what the state's costs come from. ``on_update`` is called with the number of updates so far, and the placements
    measured and minutes that they took."""
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    start = time.monotonic()
    for update in range(config.updates):
        task = _any(tasks, generator)
        clock = SetClock(task.task.workloads, arena, seed=config.seed)
        cost = MeasuredReward(cost_of(task, compute), clock)
        reinforce_update(policy, optimizer, cost, config, generator, 1 - update / config.updates)
        on_update(update + 1, EPISODES * (update + 1), (time.monotonic() - start) / 60)


class MeasuredReward(PlacementCost):
    """A cost whose rewards are measured; what the state shows stays predicted."""

    def __init__(self, cost: Cost, clock: SetClock) -> None:
        super().__init__(cost.problem, cost.compute)
        self._measured = MeasuredCosts(cost, clock)

    def reward_ms(self, assignment_BS: Tensor) -> Tensor:
        """As measured, one run of each set."""
        self._measured.time(list(assignment_BS), 1)
        return torch.cat([self._measured.rate(one).overall_ms_B for one in assignment_BS])


def cost_of(task: Contest, compute: ComputeCost) -> PlacementCost:
    """Return the costs of placements of a task."""
    with torch.no_grad():
        return PlacementCost(over(task.task.problem, task.collectives), compute)


def named_placement(task: Contest, assignment_S: Tensor) -> list[list[str]]:
    """Names of the tables of each device."""
    groups: list[list[str]] = [[] for _ in range(task.task.problem.num_ranks)]
    for table, device in zip(task.tables, assignment_S.tolist(), strict=True):
        groups[device].append(table.name)
    return groups


def _any(tasks: Sequence[Contest], generator: torch.Generator) -> Contest:
    return tasks[int(torch.randint(len(tasks), (1,), generator=generator))]
