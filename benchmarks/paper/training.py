# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""DreamShard's training as published: collect, fit and improve, each iteration on placements of the policy so far; and
a policy trained on measured rewards instead.

Shapes: N measured placements, S shards, D devices, E episodes, X sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.measured_costs import MeasuredCosts, SetClock
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import LabelledSets
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.measure.collect import collect
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.policy.environment import TaskBatch
from dreamshard_planner.policy.network import AnyPolicy, roll_out
from dreamshard_planner.policy.reinforce import ReinforceConfig, reinforce_update
from paper.paper_network import PaperCostNetwork, PaperFit, PaperFitConfig
from paper.published import PAPER_REINFORCE, PaperPolicy, PaperPolicyConfig
from paper.setting import Half
from placements.placers import Contest


@dataclass(frozen=True, kw_only=True)
class Published:
    """Hyper-parameters of one training, the published ones by default."""

    iterations: int = 10
    collected: int = 10
    """Placements measured in each."""
    fit_updates: int = 300
    """Of the cost network in each."""
    policy_updates: int = 10
    """In each, of ten episodes of one task."""
    reinforce: ReinforceConfig = PAPER_REINFORCE
    seed: int = 0


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
    """Of each iteration: measuring, fitting and improving."""

    def measured(self, half: Half, placements: int | None = None) -> tuple[LabelledSets, Tensor]:
        """The first so many placements to fit to: their sets, and the placements [N, D] as sets."""
        return labelled_placements(half, self.placements[:placements], self.dataset)


def labelled_placements(
    half: Half, placements: Sequence[Sequence[Sequence[str]]], dataset: CostDataset
) -> tuple[LabelledSets, Tensor]:
    """Sets of placements with their measured milliseconds, an empty one last, and the placements [N, D] as sets."""
    sets = [group for placement in placements for group in placement if group]
    number = iter(range(len(sets)))
    index_ND = torch.tensor([[next(number) if group else len(sets) for group in one] for one in placements])
    labels_X2 = torch.cat([dataset.forward_backward_ms[: len(sets)], torch.zeros(1, 2, dtype=torch.float64)])
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
        return held.select(range(len(sets)))
    return collect(sets, folder, device=arena.device, repeats=repeats, seed=seed, progress=False, arena=arena)


def load_blocks(folder: Path) -> CostDataset:
    """Load all blocks that one rank has measured, in the order in which it did."""
    paths = sorted(folder.glob("*.npz"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return CostDataset.concatenate([CostDataset.load(path) for path in paths])


def train_published(
    config: Published,
    half: Half,
    tasks: Sequence[Contest],
    folder: Path,
    arena: Arena,
    repeats: int,
    on_iteration: Callable[[], None],
    measured: Trained | None = None,
) -> Trained:
    """As published; what is interrupted goes on where it was when called again with the same arguments.

    With placements that another training ``measured``, nothing is collected, and only the networks are trained anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    devices = tasks[0].task.problem.num_ranks
    fit_config = PaperFitConfig(
        updates=config.iterations * config.fit_updates,
        devices=devices,
        bytes_per_ms=tasks[0].collectives.bytes_per_ms,
        seed=config.seed,
    )
    fit = PaperFit(fit_config, half.features_SF)
    network, policy = fit.network, PaperPolicy(PaperPolicyConfig(), config.seed)
    policy.initialize(half.features_SF)
    done = folder / "placements.json"
    if done.exists():
        network.load_state_dict(load_file(folder / "network.safetensors"))
        policy.load_state_dict(load_file(folder / "policy.safetensors"))
        dataset = CostDataset.load(folder / "dataset.npz")
        record = json.loads(done.read_text())
        network.eval().requires_grad_(False)
        return Trained(network, policy, record["placements"], dataset, record["seconds"])

    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.reinforce.learning_rate)
    placements: list[list[list[str]]] = []
    timed = (
        folder / "seconds.json"
    )  # of iterations that an earlier call ran; now they only repeat what needs no kernels
    seconds: list[float] = json.loads(timed.read_text()) if timed.exists() else []
    for iteration in range(config.iterations):
        start = time.monotonic()
        remaining = 1 - iteration / config.iterations
        wanted = (iteration + 1) * config.collected
        if measured is None:
            while len(placements) < wanted:
                placement = sampled_placement(policy, network, _any(tasks, generator), generator)
                if placement is not None:
                    placements.append(placement)
            dataset = measure_placements(half, placements, folder / "measured.blocks", arena, repeats, config.seed)
        else:
            placements, dataset = measured.placements[:wanted], measured.dataset
        train, index_ND = labelled_placements(half, placements, dataset)
        fit.descend(train, config.fit_updates, index_ND)
        for group in optimizer.param_groups:
            group["lr"] = config.reinforce.learning_rate * remaining
        for _ in range(config.policy_updates):
            improve_once(policy, optimizer, cost_of(_any(tasks, generator), network), config.reinforce, generator)
        if iteration == len(seconds):
            seconds.append(time.monotonic() - start)
            timed.write_text(json.dumps(seconds))
        on_iteration()
    for name, module in (("network", network), ("policy", policy)):
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
    looks: Sequence[int],
    on_look: Callable[[int, dict[str, float]], None],
    on_update: Callable[[], None],
) -> None:
    """Train ``policy`` in place without an estimated MDP: every episode's placement is measured, once.

    Args:
        policy: any.
        compute: what the state's costs come from.
        tasks: to train on.
        arena: of the kernels.
        config: updates, episodes, rate.
        looks: numbers of updates after which ``on_look`` is called, with the number and what it has taken so far:
            ``placements`` measured, ``minutes`` in all.
        on_look: see there.
        on_update: called after each update.
    """
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    start, measured = time.monotonic(), 0
    for update in range(config.updates):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - update / config.updates)
        task = _any(tasks, generator)
        clock = SetClock(task.task.workloads, arena.device, arena, seed=config.seed)
        cost = MeasuredReward(cost_of(task, compute), clock)
        improve_once(policy, optimizer, cost, config, generator)
        measured += config.episodes_per_task
        on_update()
        if update + 1 in looks:
            on_look(update + 1, {"placements": measured, "minutes": (time.monotonic() - start) / 60})


class MeasuredReward(Cost):
    """A cost whose rewards are measured; what the state shows stays predicted."""

    def __init__(self, cost: Cost, clock: SetClock) -> None:
        super().__init__(cost.problem, cost.compute)
        self._measured = MeasuredCosts(cost, clock)

    def reward_ms(self, assignment_BS: Tensor) -> Tensor:
        """As measured, one run of each set."""
        self._measured.time(list(assignment_BS), 1)
        return torch.cat([self._measured.rate(one).overall_ms_B for one in assignment_BS])


def improve_once(
    policy: AnyPolicy,
    optimizer: torch.optim.Optimizer,
    cost: Cost,
    config: ReinforceConfig,
    generator: torch.Generator,
) -> None:
    """One REINFORCE update on sampled episodes of one task."""
    with torch.no_grad():
        batch = TaskBatch.collate([cost])
    unknown_T = torch.full((1,), torch.nan)
    reinforce_update(policy, optimizer, batch, config, config.entropy_weight, generator, unknown_T)


def cost_of(task: Contest, compute: ComputeCost) -> Cost:
    """What placements of a task cost."""
    with torch.no_grad():
        return Cost(task.task.problem.over(task.collectives), compute)


@torch.no_grad()
def sampled_placement(
    policy: AnyPolicy, compute: ComputeCost, task: Contest, generator: torch.Generator
) -> list[list[str]] | None:
    """Names of the tables of each device in one sampled episode; None at a dead end."""
    environment = roll_out(policy, TaskBatch.collate([cost_of(task, compute)]), 1, generator).environment
    if not bool(environment.alive_E[0]):
        return None
    return named_placement(task, environment.assignments(0)[0])


def named_placement(task: Contest, assignment_S: Tensor) -> list[list[str]]:
    """Names of the tables of each device."""
    groups: list[list[str]] = [[] for _ in range(task.task.problem.num_ranks)]
    for table, device in zip(task.tables, assignment_S.tolist(), strict=True):
        groups[device].append(table.name)
    return groups


def _any(tasks: Sequence[Contest], generator: torch.Generator) -> Contest:
    return tasks[int(torch.randint(len(tasks), (1,), generator=generator))]
