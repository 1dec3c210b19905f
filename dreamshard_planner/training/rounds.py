# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train: collect -> fit -> improve, then again with placements that the current policy proposes.

Tasks are priced by a checkpoint; policies are trained on them, and judged on unseen tables.
"""

from __future__ import annotations

import copy
import datetime
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import prior_policy
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets, other_hardware
from dreamshard_planner.cost.network import FitConfig, fit_cost_network, mape_2, predict_ms
from dreamshard_planner.cost.problem import MEMORY_KINDS, Cost
from dreamshard_planner.devices import make_topology
from dreamshard_planner.errors import DatasetError
from dreamshard_planner.measure.hardware import hardware_name
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import (
    BATCH_SIZES,
    MAX_TABLES,
    SHARD_SHARE,
    collect,
    draw_sets,
    most_sets,
    random_limit,
    random_optimizer,
    set_work,
)
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.policy.network import Policy, PolicyConfig, roll_out
from dreamshard_planner.policy.reinforce import ReinforceConfig, train_policy
from dreamshard_planner.policy.task import WHOLE_TYPES, ShardingTask
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.starts import HEURISTICS, OptionTotals, place_by_heuristic
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, TW
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.support.formatting import progress_bar
from dreamshard_planner.support.reproducible import neutral
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.pools import pool_tables
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import Table, Workload

RANKS_PER_HOST = 8
TIGHT_SHARE = 0.25
"""Share of the tasks in which memory binds."""
FILL = (1.15, 3.0)
"""Memory of a rank over an even share of the tables, there."""
AMPLE_BYTES = 2**50
"""Memory of a rank while a task is read; its own is drawn afterwards."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One training."""

    pools: tuple[str, ...] = ("meta_like_2021", "merlin_tiny", "merlin_small")
    """Table pools; half of the tables of each are held out."""
    extra_pools: tuple[str, ...] = ("broad",)
    """Pools for the cost network only, to widen its bounds; the policy does not train on them."""
    device: str = "cpu"
    threads: int = 1
    """Intra-op threads of the measured kernels: those of one rank."""
    seconds: float = 300.0
    """Time for measuring, held-out sets included."""
    rounds: int = 2
    """Times that collect, fit and improve follow each other."""
    test_share: float = 0.15
    """Share of the time that goes into sets of held-out tables."""
    repeats: int = 2
    """Timed runs of each set. Costs of other sets gain more by more sets than by more runs of each."""
    batch_sizes: tuple[int, ...] | None = None
    """Samples that the measured kernels see; default: ``BATCH_SIZES`` of the device."""
    arena_bytes: int | None = None
    """Memory for the weights of measured kernels; larger tables are folded into it. Default: that of ``Arena``."""
    num_tasks: int = 60
    """Tasks that the policy trains on."""
    validation_tasks: int = 30
    """Tasks of held-out tables that it is judged on."""
    task_tables: tuple[int, int] = (8, 80)
    """Fewest and most tables of a task; counts are log-uniform between."""
    task_ranks: tuple[int, ...] = (2, 4, 8, 16, 32)
    fit: FitConfig = FitConfig()
    reinforce: ReinforceConfig = ReinforceConfig()
    start: Checkpoint | None = None
    """Checkpoint whose cost network to start from: on CPUs, of this package's size. On an Intel Xeon, after five
    minutes, a start reduced the error of rare tables from 13 to 15 % to 9 %."""
    collectives: dict[str, Any] | None = None
    """Result of ``python -m dreamshard_planner.measure.collectives``, kept in the checkpoint."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.rounds < 1 or not 0 < self.test_share < 1:
            raise ValueError(
                "seconds and rounds must be positive, test_share between 0 and 1, got "
                f"{self.seconds}, {self.rounds} and {self.test_share}"
            )


QUICK = TrainingConfig(
    pools=("merlin_tiny", "mlperf_dlrm_dcnv2"),
    extra_pools=(),
    seconds=8.0,
    rounds=1,
    batch_sizes=(256,),
    arena_bytes=1 << 26,
    num_tasks=8,
    validation_tasks=4,
    task_tables=(8, 12),
    task_ranks=(2, 4),
    fit=FitConfig(epochs=10),
    reinforce=ReinforceConfig(updates=5, looks=1, tasks_per_update=2, episodes_per_task=4),
)
"""Settings that try the whole flow in seconds; the result is not worth planning with."""


@dataclass(frozen=True)
class DrawnTask:
    """A task of a policy's training, and the workloads of its parts."""

    read: ReadProblem
    task: ShardingTask


def improve(
    config: TrainingConfig, checkpoint: Checkpoint, tables: Sequence[Table], progress: bool
) -> tuple[list[DrawnTask], Checkpoint]:
    """Train a copy of the checkpoint's policy for its costs by REINFORCE; return the tasks, and the checkpoint with the
    trained policy and the figures of the last update."""
    tasks = drawn_tasks(checkpoint, tables, config.num_tasks, config, config.seed)
    policy = copy.deepcopy(checkpoint.policy).requires_grad_(True)
    reinforce = replace(config.reinforce, seed=config.seed)
    with progress_bar("improving the policy", reinforce.updates, progress) as advance:
        statistics = train_policy(
            policy,
            [drawn.task for drawn in tasks],
            reinforce,
            lambda _, update: advance(f"{update.relative_cost:.3f} x level"),
        )
    metadata = {**checkpoint.metadata, "reinforce": asdict(statistics[-1])}
    return tasks, replace(checkpoint, policy=policy.requires_grad_(False), metadata=metadata)


@neutral()
@torch.no_grad()
def drawn_tasks(
    checkpoint: Checkpoint, tables: Sequence[Table], num_tasks: int, config: TrainingConfig, seed: int
) -> list[DrawnTask]:
    """Return random tasks over ``tables``, priced by the checkpoint, with all sharding types that TorchRec offers;
    draws that fit nowhere are left out."""
    rng, tasks = random.Random(seed), []
    fewest, most = (math.log(min(count, len(tables))) for count in config.task_tables)
    for _ in range(num_tasks):
        count, ranks = round(math.exp(rng.uniform(fewest, most))), rng.choice(config.task_ranks)
        batch_size = max(1, rng.choice(config.batch_sizes or BATCH_SIZES[config.device]) // ranks)
        read, cost = _read(checkpoint, rng.sample(list(tables), count), ranks, batch_size, config.device)
        if rng.random() < TIGHT_SHARE:
            cost = _short_of_memory(cost, rng.uniform(*FILL), config.device)
        asked = OptionTotals(cost)
        if asked.may_fit:
            tasks.append(DrawnTask(read, ShardingTask(cost, asked)))
    return tasks


def _read(
    checkpoint: Checkpoint, tables: Sequence[Table], ranks: int, batch_size: int, device: str
) -> tuple[ReadProblem, Cost]:
    """Return the options of some tables, and their costs, on ranks with any amount of memory."""
    memory = dict.fromkeys(("HBM", "DDR"), [AMPLE_BYTES] * ranks)
    topology = make_topology(ranks, device, min(RANKS_PER_HOST, ranks), rank_memory_bytes=memory)
    configs: list[EmbeddingBagConfig] = []
    statistics: dict[str, FeatureStatistics] = {}
    for table in tables:
        known = {f"{table.name}.{index}": feature for index, feature in enumerate(table.features)}
        configs.append(
            EmbeddingBagConfig(
                name=table.name, num_embeddings=table.rows, embedding_dim=table.dim, feature_names=[*known]
            )
        )
        statistics |= known
    model, sharders = nn.Module(), get_default_sharders()
    model.sparse = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    reader = OptionReader(statistics=TableStatistics(statistics), sharders=sharders)
    rater = PlanRater(PlannedRanks.of(topology, checkpoint), reader, sharders=sharders)
    options = rater.enumerator(batch_size).enumerate(model, sharders)
    read = rater.read(rater.usable_options(options))
    return read, rater.cost(read)


def _short_of_memory(cost: Cost, fill: float, device: str) -> Cost:
    """Return the costs on ranks whose memory is ``fill`` times an even share of the whole tables."""
    problem, kind = cost.problem, MEMORY_KINDS.index("HBM" if device == "cuda" else "DDR")
    whole_bytes = [
        max(int(problem.needs_PM[option.parts, kind].sum()) for option in options if option.sharding_type == TW)
        for options in problem.tables
    ]
    limits_DM = problem.limits_DM.clone()
    limits_DM[:, kind] = int(fill * sum(whole_bytes) / problem.num_ranks)
    return Cost(replace(problem, limits_DM=limits_DM), cost.compute, cost.latent_PH)


def proposed_sets(
    policy: Policy, tasks: Sequence[DrawnTask], num_sets: int, seed: int, device: str = "cpu"
) -> list[list[Workload]]:
    """Return fused groups of single ranks in sampled plans of the training tasks, with random optimizers: sets worth
    measuring, because planning will meet their like."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    samples, sets = -(-num_sets // len(tasks)), []
    for drawn in tasks:
        problem, workload_P = drawn.task.problem, drawn.read.workload_P
        options = (option for options in problem.tables for option in options)
        replicas = [option.parts for option in options if SHARDING_TYPES[option.sharding_type].is_replicated]
        fused = {part for part, workload in enumerate(workload_P) if workload.memory == "device"}.difference(*replicas)
        for sharding in roll_out(policy, drawn.task, samples, generator).shardings():
            if sharding is None:
                continue
            rank_X, part_X = problem.laid(sharding)
            groups: dict[int, list[Workload]] = {}
            for part in part_X[rank_X == rng.integers(problem.num_ranks)].tolist():
                if part in fused:
                    groups.setdefault(int(problem.group_P[part]), []).append(workload_P[part])
            optimizer = random_optimizer(rng)
            sets += [[replace(workload, optimizer=optimizer) for workload in held] for held in groups.values()]
    shuffled = (sets[i] for i in rng.permutation(len(sets)))
    return [held for held in shuffled if set_work(held) <= random_limit(device, rng)][:num_sets]


@torch.no_grad()
def validate_policy(checkpoint: Checkpoint, tables: Sequence[Table], config: TrainingConfig) -> dict[str, Any]:
    """Return the predicted cost of greedy roll-outs over that of each heuristic, on tasks of held-out tables.

    All leave tables whole that find room so; the policy splits others, and heuristics place its parts. Geometric means
    over the tasks that both place; infeasible tasks are counted.
    """
    tasks = drawn_tasks(checkpoint, tables, config.validation_tasks, config, config.seed + 7)
    infeasible = dict.fromkeys(("policy", *HEURISTICS), 0)
    logs: dict[str, list[float]] = {name: [] for name in HEURISTICS}
    for drawn in tasks:
        cost = drawn.task.cost
        task = ShardingTask(cost, OptionTotals(cost), WHOLE_TYPES)
        sharding = roll_out(checkpoint.policy, task, 1).shardings()[0]
        if sharding is None:
            infeasible["policy"] += 1
            continue
        chosen = cost.chosen(sharding)
        for name in HEURISTICS:
            if (rank_S := place_by_heuristic(chosen.cost.problem, name)) is None:
                infeasible[name] += 1
            else:
                logs[name].append(math.log(cost.overall_ms(sharding) / cost.overall_ms(chosen.placed(rank_S))))
    ratios = {name: round(math.exp(sum(some) / max(1, len(some))), 4) for name, some in logs.items()}
    return {"policy_over_rule": ratios, "infeasible": infeasible, "tasks": len(tasks)}


def train(config: TrainingConfig, out: str | Path, progress: bool = True) -> Checkpoint:
    """Measure, fit and improve, and write the checkpoint ``out``, with the dataset beside it.

    The same call continues an interrupted training.
    """
    out = Path(out)
    for file in (out, out.with_suffix(".dataset.npz"), out.with_suffix(".test.npz")):
        check_writable(file)
    train_tables, test_tables = pool_tables((*config.pools, *config.extra_pools))
    max_sets, batch_sizes, device = most_sets(config.seconds), config.batch_sizes, config.device
    test_sets, sets = (
        draw_sets(tables, max_sets, seed, batch_sizes, MAX_TABLES, device=device, shard_share=SHARD_SHARE)
        for tables, seed in ((test_tables, config.seed + 1), (train_tables, config.seed))
    )
    parts = ["test", *(f"round{index}" for index in range(config.rounds))]
    folders = [out.with_suffix(f".{part}.blocks") for part in parts]

    def measure(part: int, sets: Sequence[Sequence[Workload]], share: float) -> CostDataset:
        """Measure for a share of the time; only read what an earlier run finished before it began the next part: more
        sets would change the networks, and so the sets of later rounds."""
        is_finished = any(folder.exists() for folder in folders[part + 1 :])
        seconds, arena = 0.0 if is_finished else share * config.seconds, Arena(device, config.arena_bytes, config.seed)
        return collect(
            sets, folders[part], device, config.threads, config.repeats, config.seed, seconds, progress, arena=arena
        )

    test = measure(0, test_sets, config.test_share)
    round_share = (1 - config.test_share) / config.rounds
    datasets = [measure(1, sets, round_share)]
    made, tasks = learn(config, datasets[0], test, progress)
    for index in range(1, config.rounds):
        sets = proposed_sets(made.policy, tasks, max_sets, config.seed + 100 * index, device)
        datasets.append(measure(1 + index, sets, round_share))
        made, tasks = learn(config, CostDataset.concatenate(datasets), test, progress)
    made.save(out)  # first, since the blocks still hold all of the datasets
    CostDataset.concatenate(datasets).save(out.with_suffix(".dataset.npz"))
    test.save(out.with_suffix(".test.npz"))
    for folder in reversed(folders):  # a part is finished while a later one's folder exists
        shutil.rmtree(folder, ignore_errors=True)  # the datasets hold all of it
    return Checkpoint.load(out)


def learn(
    config: TrainingConfig, train_data: CostDataset, test_data: CostDataset, progress: bool = True
) -> tuple[Checkpoint, list[DrawnTask]]:
    """Fit the cost network to measured sets, train a policy on it, and judge both on held-out tables.

    Returns:
        The checkpoint, and the policy's training tasks.

    Raises:
        DatasetError: the held-out sets are of other hardware.
    """
    train_sets, test_sets = LabelledSets.of_dataset(train_data), LabelledSets.of_dataset(test_data, train_data.usual_ms)
    if differing := other_hardware(test_data.hardware, train_data.hardware):
        raise DatasetError(f"the held-out sets were measured on {differing}, as the others")
    start = config.start
    fit = replace(config.fit, seed=config.seed)
    network = fit_cost_network(train_sets, config=fit, start=start.cost if start else None, progress=progress)
    errors_2 = mape_2(predict_ms(network, test_sets), test_sets.labels_ms_X2)
    metadata = {
        "started_from": f"{start.name}, measured on {start.measured_on}" if start else None,
        "hardware": train_data.hardware,
        "hardware_name": hardware_name(train_data.hardware),
        "dataset": {"sets": len(train_data), "digest": train_data.digest, "test_sets": len(test_data)},
        "reference_ms": train_data.usual_ms,
        "collectives": config.collectives,
        "extra_pools": list(config.extra_pools),
        "batch_sizes": sorted({shard.batch_size for shard in train_data.shards}),
        "validation": {"network_mape": [round(value, 4) for value in errors_2.tolist()]},
    }
    return _with_policy(config, Checkpoint(prior_policy(), network, metadata), progress)


def train_on_roofline(config: TrainingConfig, out: str | Path) -> Checkpoint:
    """Train a policy from nothing on the roofline model, for topologies where nothing is measured; needs no
    hardware."""
    check_writable(out)
    config = replace(config, device="cuda")
    metadata = {"hardware": {}, "hardware_name": "nothing: roofline model"}
    made, _ = _with_policy(config, Checkpoint(Policy(PolicyConfig(), config.seed), None, metadata), True)
    made.save(out)
    return Checkpoint.load(out)


def _with_policy(config: TrainingConfig, checkpoint: Checkpoint, progress: bool) -> tuple[Checkpoint, list[DrawnTask]]:
    """Train the checkpoint's policy for its costs, and judge it on held-out tables; return the tasks as well."""
    train_tables, test_tables = pool_tables(config.pools)
    tasks, made = improve(config, checkpoint, train_tables, progress)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    validation = made.metadata.get("validation", {}) | validate_policy(made, test_tables, config)
    told = {"created": now, "pools": list(config.pools), "validation": validation}
    return replace(made, metadata={**made.metadata, **told}), tasks
