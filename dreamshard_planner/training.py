# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learning: collect -> fit -> improve, then again with placements that the current policy proposes.

The only part that needs hardware is the collection; everything after it works on the dataset.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.checkpoint import RECIPES, Checkpoint
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import (
    FitConfig,
    LabelledSets,
    calibrate_cost_network,
    fit_cost_network,
    mape_2,
    predict_ms,
)
from dreamshard_planner.cost.linear import LinearCost
from dreamshard_planner.cost.model import ComputeCost, PlacementCost
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.paper import PaperCostNetwork, PaperFitConfig, fit_paper_network
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.files import check_writable
from dreamshard_planner.measure.collect import BATCH_SIZES, MAX_SET_WORK, collect, draw_sets, set_work
from dreamshard_planner.measure.journals import remove_journals
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.placement.environment import TaskBatch
from dreamshard_planner.placement.policy import (
    AnyPolicy,
    PolicyConfig,
    greedy_plan,
    roll_out,
)
from dreamshard_planner.placement.reinforce import ReinforceConfig, UpdateStatistics, train_policy
from dreamshard_planner.placement.rules import RULES, place_by_rule
from dreamshard_planner.placement.tasks import TaskConfig, draw_tasks, problem_of
from dreamshard_planner.progress import progress_bar
from dreamshard_planner.workload.pools import named_pool, split_tables
from dreamshard_planner.workload.tables import Table, Workload

MAX_SETS_PER_SECOND = 30
"""More than any machine measures; sets are drawn for this rate."""

BANDWIDTHS = (2e9 / 1e3, 600e9 / 1e3)
"""All-to-all bytes per millisecond of training tasks, log-uniform: from Ethernet (2 GB/s) to NVLink (600 GB/s). A
policy does not observe the bandwidth, so it learns what is good on average; the search afterwards knows it."""

SPLIT_SEED = 0
"""Of the halves of every pool. No option: a table that one training holds out must not teach another."""

WITH_ROOM = TaskConfig(heaviest=0.6)
"""Tasks in which placing decides: in random ones one table alone is mostly the bottleneck."""

PAPER_REINFORCE = ReinforceConfig(
    updates=100, tasks_per_update=1, episodes_per_task=10, learning_rate=5e-4, entropy_weight=0.001, looks=0
)
"""Ten iterations of ten updates of ten episodes of one task, as published."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One training from nothing."""

    pools: tuple[str, ...] = ("meta_like_2021", "merlin_tiny", "merlin_small")
    """Table pools; half of the tables of each are held out."""
    extra_pools: tuple[str, ...] = ("broad",)
    """Measured like ``pools``, so that the cost network knows its bounds, but not what the policy trains on."""
    device: str = "cpu"
    threads: int = 1
    """Intra-op threads of the measured kernels: what one rank has."""
    seconds: float = 300.0
    """Time for measuring, held-out sets included."""
    rounds: int = 2
    """Times that collect, fit and improve follow each other."""
    test_share: float = 0.15
    """Share of the time that goes into sets of held-out tables."""
    repeats: int = 3
    batch_sizes: tuple[int, ...] | None = None
    """Samples that the measured kernels see; default: ``BATCH_SIZES`` of the device."""
    max_set_tables: int = 100
    """Tables of the largest random set."""
    arena_bytes: int | None = None
    """Memory for the weights of measured kernels; larger tables are folded into it. Default: that of ``Arena``."""
    num_tasks: int = 200
    """Tasks that the policy trains on."""
    validation_tasks: int = 60
    """Tasks of held-out tables that it is judged on."""
    tasks: TaskConfig = WITH_ROOM
    network: CostNetworkConfig = field(default_factory=CostNetworkConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    recipe: str = "default"
    """``default``, or ``paper`` for the networks and hyper-parameters as published."""
    paper_fit: PaperFitConfig = field(default_factory=PaperFitConfig)
    paper_reinforce: ReinforceConfig = field(default_factory=lambda: PAPER_REINFORCE)
    collectives: dict[str, Any] | None = None
    """What ``python -m dreamshard_planner.measure.collectives`` measured; kept in the checkpoint."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        if not self.seconds > 0 or self.rounds < 1 or not 0 < self.test_share < 1:
            raise ValueError(f"seconds, rounds and test_share must be positive, got {asdict(self)}")

    def draw_sets(self, tables: Sequence[Table], num_sets: int, seed: int) -> list[list[Workload]]:
        """Random sets to measure."""
        return draw_sets(tables, num_sets, seed, self.batch_sizes, self.max_set_tables, device=self.device)


QUICK = TrainingConfig(
    pools=("merlin_tiny", "mlperf_dlrm_dcnv2"),
    extra_pools=(),
    seconds=8.0,
    rounds=1,
    batch_sizes=(256,),
    arena_bytes=1 << 26,
    num_tasks=8,
    validation_tasks=4,
    tasks=replace(WITH_ROOM, max_tables=12),
    fit=FitConfig(epochs=10),
    reinforce=ReinforceConfig(updates=5, tasks_per_update=2, episodes_per_task=4),
    paper_fit=PaperFitConfig(updates=20),
)
"""Runs through all of it in seconds; nothing that it makes is worth planning with."""


def train(config: TrainingConfig, out: str | Path, progress: bool = True, ranks: Ranks | None = None) -> Checkpoint:
    """Measure, fit and improve, and write the checkpoint ``out``; the dataset is kept beside it.

    An interrupted training, started again with the same settings, continues its measurements. All ``ranks`` measure,
    the first one does the rest.
    """
    out, ranks = Path(out), ranks or Ranks()
    for file in (out, out.with_suffix(".dataset.npz"), out.with_suffix(".test.npz")):
        check_writable(file)
    train_tables, test_tables = pool_tables((*config.pools, *config.extra_pools))
    max_sets = most_sets(config.seconds, ranks)
    test_sets = config.draw_sets(test_tables, max_sets, config.seed + 1)
    train_sets = config.draw_sets(train_tables, max_sets, config.seed)
    journals = [out.with_suffix(".test.journal")]
    test = _measure_once(config, test_sets, journals[0], config.test_share, progress, ranks)

    datasets: list[CostDataset] = []
    round_share = (1 - config.test_share) / config.rounds
    learned: tuple[Checkpoint, list[PricedTask]] | None = None

    def proposed() -> list[list[Workload]]:
        checkpoint, tasks = learned
        return proposed_sets(checkpoint.policy, tasks, max_sets, config.seed + 100 * round_index, config.device)

    for round_index in range(config.rounds):
        sets = ranks.from_first(proposed) if round_index else train_sets
        journals.append(out.with_suffix(f".round{round_index}.journal"))
        datasets.append(_measure_once(config, sets, journals[-1], round_share, progress, ranks))
        if ranks.leads:
            learned = learn(config, CostDataset.concatenate(datasets), test, progress)

    def saved() -> Checkpoint:
        checkpoint, _ = learned
        checkpoint.save(out)  # first, since the journals still have all of the datasets
        CostDataset.concatenate(datasets).save(out.with_suffix(".dataset.npz"))
        test.save(out.with_suffix(".test.npz"))
        for journal in journals:
            _finished(journal).unlink(missing_ok=True)
        return Checkpoint.load(out)

    checkpoint = ranks.from_first(saved)
    remove_journals(journals, ranks)  # all they hold is in the datasets
    return checkpoint


def calibrate(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    seconds: float = 60.0,
    device: str = "cpu",
    threads: int = 1,
    collectives: dict[str, Any] | None = None,
    seed: int = 0,
    progress: bool = True,
    ranks: Ranks | None = None,
) -> Checkpoint:
    """Fit a checkpoint's cost network on to this machine with few measurements, and write the result ``out``. All
    ``ranks`` measure, the first one does the rest.

    A quarter of the time goes into sets of held-out tables, which tell the error before and after (in the metadata
    under ``calibration``, with what of the network was ``changed``). The policy stays as it is: what it observes is
    relative to the task's own cost. Collectives of other hardware are dropped in favour of ``collectives``, if given.

    An interrupted calibration, started again with the same settings, continues its measurements, and says so.

    Raises:
        CheckpointError: the checkpoint has no cost network of recipe ``default``, or doesn't say what it was fitted to.
        DatasetError: an interrupted calibration with other settings left its journals there.
        FileError: ``out`` cannot be written; before anything is measured.
    """
    out, network, ranks = Path(out), checkpoint.cost, ranks or Ranks()
    check_writable(out)
    if not isinstance(network, CostNetwork):
        raise CheckpointError(f"{checkpoint.name}: holds no cost network of recipe 'default' to calibrate")
    if lacking := [key for key in ("batch_sizes", "pools", "extra_pools") if key not in checkpoint.metadata]:
        raise CheckpointError(f"{checkpoint.name}: does not say what it was fitted to: no {', '.join(lacking)}")
    known_sizes = tuple(checkpoint.metadata["batch_sizes"])  # a minute has no time for the largest
    config = TrainingConfig(
        pools=tuple(checkpoint.metadata["pools"]),
        extra_pools=tuple(checkpoint.metadata["extra_pools"]),
        batch_sizes=tuple(size for size in known_sizes if size in BATCH_SIZES[device]) or known_sizes,
        device=device,
        threads=threads,
        seconds=seconds,
        seed=seed,
    )
    train_tables, test_tables = pool_tables((*config.pools, *config.extra_pools))
    max_sets = most_sets(seconds, ranks)
    parts = (("calibrate", train_tables, 0.75), ("check", test_tables, 0.25))
    journals = [out.with_suffix(f".{name}.journal") for name, *_ in parts]
    data = [
        _measure(config, config.draw_sets(tables, max_sets, seed + 31 * part), journals[part], share, progress, ranks)
        for part, (_, tables, share) in enumerate(parts)
    ]
    calibrated = ranks.from_first(lambda: _calibrated(checkpoint, out, data, collectives, seed))
    remove_journals(journals, ranks)  # another calibration is of the machine as it is then
    return calibrated


def _calibrated(
    checkpoint: Checkpoint,
    out: Path,
    data: Sequence[CostDataset],
    collectives: dict[str, Any] | None,
    seed: int,
) -> Checkpoint:
    """Fit on to measured sets, ``data[0]``, check on ``data[1]``, and write."""
    network = checkpoint.cost
    sets, check = (labelled(part, data[0].usual_ms) for part in data)
    calibrated, changed = calibrate_cost_network(network, sets, seed)
    errors = {
        f"{when}_mape": [round(value, 4) for value in mape_2(predict_ms(cost, check), check.labels_ms_X2).tolist()]
        for when, cost in (("before", network), ("after", calibrated))
    }
    known = checkpoint.metadata.get("collectives")
    if known is not None and all(known["hardware"][key] == data[0].hardware[key] for key in ("device", "name")):
        collectives = collectives or known
    before, here = checkpoint.metadata.get("hardware_name", "?"), hardware_name(data[0].hardware)
    metadata = {
        **checkpoint.metadata,
        "collectives": collectives,
        "hardware": data[0].hardware,
        "hardware_name": f"{before}, calibrated on {here}",
        "reference_ms": data[0].usual_ms,
        "calibration": {
            "from": checkpoint.name,
            "changed": changed,
            "sets": len(sets),
            "check_sets": len(check),
            **errors,
        },
    }
    Checkpoint(checkpoint.policy, calibrated, metadata).save(out)
    return Checkpoint.load(out)


def learn(
    config: TrainingConfig, train_data: CostDataset, test_data: CostDataset, progress: bool = True
) -> tuple[Checkpoint, list[PricedTask]]:
    """Fit the cost network to measured sets, train a policy on it, and judge both on held-out tables.

    Returns:
        The checkpoint, and the policy's training tasks.
    """
    train_tables, test_tables = pool_tables(config.pools)
    train_sets, test_sets = labelled(train_data), labelled(test_data, train_data.usual_ms)
    network = fit(config, train_sets, progress)
    policy, statistics, tasks = improve(config, network, train_tables, progress)
    metadata = {
        "recipe": config.recipe,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": train_data.hardware,
        "hardware_name": hardware_name(train_data.hardware),
        "dataset": {"sets": len(train_data), "digest": train_data.digest, "test_sets": len(test_data)},
        "reference_ms": train_data.usual_ms,
        "collectives": config.collectives,
        "pools": list(config.pools),
        "extra_pools": list(config.extra_pools),
        "batch_sizes": np.unique(train_data.columns["batch_size"]).tolist(),
        "validation": {
            **validate_cost(network, train_sets, test_sets),
            **validate_policy(policy, network, test_tables, config),
        },
        "reinforce": asdict(statistics[-1]),
    }
    return Checkpoint(policy, network, metadata), tasks


def fit(config: TrainingConfig, train_sets: LabelledSets, progress: bool) -> CostNetwork | PaperCostNetwork:
    """Fit the recipe's cost network."""
    total = config.paper_fit.updates if config.recipe == "paper" else config.fit.passes(len(train_sets))
    with progress_bar("fitting", total, progress) as advance:

        def on_step(_: int, loss: float) -> None:
            advance(f"loss {loss:.4f}")

        if config.recipe == "paper":
            return fit_paper_network(train_sets, config.paper_fit, on_step)
        return fit_cost_network(train_sets, config.network, config.fit, on_step)


def train_on_roofline(config: TrainingConfig, out: str | Path, progress: bool = True) -> Checkpoint:
    """Train a policy on the roofline model, for topologies where nothing is measured; needs no hardware."""
    check_writable(out)
    from torchrec.distributed.planner.types import Topology

    config = replace(config, device="cuda")
    train_tables, test_tables = pool_tables(config.pools)
    roofline = RooflineCost.of_topology(Topology(world_size=1, compute_device=config.device))
    policy, statistics, _ = improve(config, roofline, train_tables, progress)
    metadata = {
        "recipe": config.recipe,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": {},
        "hardware_name": "nothing: roofline model",
        "pools": list(config.pools),
        "validation": validate_policy(policy, roofline, test_tables, config),
        "reinforce": asdict(statistics[-1]),
    }
    checkpoint = Checkpoint(policy, None, metadata)
    checkpoint.save(out)
    return Checkpoint.load(out)


def improve(
    config: TrainingConfig, compute: ComputeCost, tables: Sequence[Table], progress: bool
) -> tuple[AnyPolicy, list[UpdateStatistics], list[PricedTask]]:
    """Train a policy by REINFORCE on the estimated MDP of ``compute``."""
    make_policy, policy_config, *_ = RECIPES[config.recipe]
    policy = make_policy(config.policy if config.recipe == "default" else policy_config(), seed=config.seed)
    reinforce = config.paper_reinforce if config.recipe == "paper" else config.reinforce
    tasks = priced_tasks(compute, tables, config.num_tasks, config.tasks, config.seed, config.device)
    costs = [task.cost for task in tasks]
    policy.initialize(torch.cat([cost.problem.features_SF for cost in costs]))
    with progress_bar("improving the policy", reinforce.updates, progress) as advance:
        statistics = train_policy(
            policy, costs, reinforce, lambda _, update: advance(f"{update.over_best_rule:.3f} x the best rule")
        )
    return policy, statistics, tasks


def proposed_sets(
    policy: AnyPolicy, tasks: Sequence[PricedTask], num_sets: int, seed: int, device: str = "cpu"
) -> list[list[Workload]]:
    """What the policy puts on one device in sampled placements of its training tasks: sets worth measuring,
    because planning will meet their like."""
    generator = torch.Generator().manual_seed(seed)
    samples = -(-num_sets // len(tasks))
    sets = []
    for task in tasks:
        environment = roll_out(policy, TaskBatch.collate([task.cost]), samples, generator).environment
        assignment_ES = environment.assignments(0)[environment.alive_E]
        device_E = torch.randint(task.cost.problem.num_devices, (len(assignment_ES),), generator=generator)
        for chosen_S in (assignment_ES == device_E[:, None]).tolist():
            sets.append([workload for workload, chosen in zip(task.workloads, chosen_S, strict=True) if chosen])
    order = torch.randperm(len(sets), generator=generator).tolist()
    return [sets[index] for index in order if sets[index] and set_work(sets[index]) <= MAX_SET_WORK[device]]


@dataclass(frozen=True)
class PricedTask:
    """A task of the policy's training with its cost."""

    workloads: tuple[Workload, ...]
    cost: PlacementCost


@torch.no_grad()
def priced_tasks(
    compute: ComputeCost, tables: Sequence[Table], num_tasks: int, config: TaskConfig, seed: int, device: str = "cpu"
) -> list[PricedTask]:
    """Random tasks over ``tables``, for that kind of device, with their costs."""

    def single_ms(workloads: Sequence[Workload]) -> Tensor:
        return PlacementCost(problem_of(workloads, 1), compute, CollectiveModel(1, BANDWIDTHS[0])).single_ms_S

    low, high = (math.log(bandwidth) for bandwidth in BANDWIDTHS)
    share_T = torch.rand(num_tasks, generator=torch.Generator().manual_seed(seed)).tolist()
    priced = []
    for task, share in zip(draw_tasks(tables, num_tasks, config, seed, single_ms, device), share_T, strict=True):
        collectives = CollectiveModel(task.problem.num_devices, math.exp(low + (high - low) * share))
        priced.append(PricedTask(task.workloads, PlacementCost(task.problem, compute, collectives)))
    return priced


def validate_cost(network: ComputeCost, train_sets: LabelledSets, test_sets: LabelledSets) -> dict[str, Any]:
    """Mean absolute percentage errors on sets of held-out tables, beside the linear baseline's."""
    labels = test_sets.labels_ms_X2
    network_2 = mape_2(predict_ms(network, test_sets), labels)
    linear_2 = mape_2(predict_ms(LinearCost.fit(train_sets), test_sets), labels)
    return {
        "network_mape": [round(value, 4) for value in network_2.tolist()],
        "linear_mape": [round(value, 4) for value in linear_2.tolist()],
    }


def validate_policy(
    policy: AnyPolicy, compute: ComputeCost, tables: Sequence[Table], config: TrainingConfig
) -> dict[str, Any]:
    """Predicted cost of one greedy roll-out over each rule's, on tasks of held-out tables.

    Geometric means over the tasks that both place; infeasible tasks are counted.
    """
    tasks = priced_tasks(compute, tables, config.validation_tasks, config.tasks, config.seed + 7, config.device)
    costs = [task.cost for task in tasks]
    policy_ms, rule_ms = [], {rule: [] for rule in RULES}
    with torch.no_grad():
        for cost in costs:
            policy_ms.append(rated_ms(cost, greedy_plan(policy, cost)))
            for rule in RULES:
                rule_ms[rule].append(rated_ms(cost, place_by_rule(cost.problem, rule)))
    ours = torch.tensor(policy_ms)
    ratios = {}
    for rule, values in rule_ms.items():
        theirs = torch.tensor(values)
        both = ours.isfinite() & theirs.isfinite()
        ratios[rule] = round(float((ours[both] / theirs[both]).log().mean().exp()), 4)
    infeasible = {rule: int(torch.tensor(values).isinf().sum()) for rule, values in rule_ms.items()}
    return {
        "policy_over_rule": ratios,
        "infeasible": {"policy": int(ours.isinf().sum()), **infeasible},
        "tasks": config.validation_tasks,
    }


def rated_ms(cost: PlacementCost, assignment_S: Tensor | None) -> float:
    """Predicted overall cost of one placement; infinite where there is none."""
    return float("inf") if assignment_S is None else float(cost.rate(assignment_S[None]).overall_ms_B[0])


def pool_tables(pools: Sequence[str]) -> tuple[list[Table], list[Table]]:
    """Training and held-out tables of named pools; disjoint, and the same halves whoever asks."""
    train_tables, test_tables = [], []
    for name in pools:
        train_part, test_part = split_tables(named_pool(name), SPLIT_SEED)
        train_tables += train_part
        test_tables += test_part
    return train_tables, test_tables


def labelled(data: CostDataset, usual_ms: float | None = None) -> LabelledSets:
    return LabelledSets.of_dataset(data, usual_ms)


def hardware_name(hardware: dict[str, Any]) -> str:
    """Processor and threads, for people."""
    return f"{hardware.get('name', hardware.get('device', '?'))}, {hardware.get('threads', '?')} thread(s)"


def _finished(journal: Path) -> Path:
    return journal.with_suffix(".finished")


def most_sets(seconds: float, ranks: Ranks) -> int:
    """Sets to draw for so much time: more than are measured in it."""
    return ranks.size * int(seconds * MAX_SETS_PER_SECOND) + 1


def _measure_once(
    config: TrainingConfig,
    sets: Sequence[Sequence[Workload]],
    journal: Path,
    share: float,
    progress: bool,
    ranks: Ranks,
) -> CostDataset:
    """Measure for this share of the time. What an earlier run finished is read only: more sets there would lead to
    other networks, and so to other sets in later rounds than that run has measured."""
    finished = ranks.from_first(_finished(journal).is_file)
    dataset = _measure(config, sets, journal, 0.0 if finished else share, progress, ranks)
    if ranks.leads:
        _finished(journal).touch()
    return dataset


def _measure(
    config: TrainingConfig,
    sets: Sequence[Sequence[Workload]],
    journal: Path,
    share: float,
    progress: bool,
    ranks: Ranks,
) -> CostDataset:
    """Memory for kernels is taken for the measuring alone: what follows needs it."""
    device = ranks.device(config.device)
    arena = Arena(device, config.arena_bytes, seed=config.seed)
    try:
        return collect(
            sets,
            journal,
            device=device,
            threads=config.threads,
            repeats=config.repeats,
            seed=config.seed,
            seconds=config.seconds * share,
            progress=progress,
            arena=arena,
            ranks=ranks,
        )
    finally:
        arena.release()
