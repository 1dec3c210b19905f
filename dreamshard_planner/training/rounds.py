# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train: collect -> fit -> improve, then again with placements that the current policy proposes."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import prior_policy
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import fit_cost_network, mape_2, predict_ms
from dreamshard_planner.measure.hardware import hardware_name
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import MAX_TABLES, SHARD_SHARE, collect, draw_sets, most_sets
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.training.policies import DrawnTask, TrainingConfig, improve, proposed_sets, validate_policy
from dreamshard_planner.workload.pools import pool_tables
from dreamshard_planner.workload.tables import Workload


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
    """
    train_sets, test_sets = LabelledSets.of_dataset(train_data), LabelledSets.of_dataset(test_data, train_data.usual_ms)
    start = config.start
    fit = replace(config.fit, seed=config.seed)
    network = fit_cost_network(train_sets, config=fit, start=start.cost if start else None, progress=progress)
    errors_2 = mape_2(predict_ms(network, test_sets), test_sets.labels_ms_X2)
    metadata = {
        **_made_now(config),
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
    metadata = {**_made_now(config), "hardware": {}, "hardware_name": "nothing: roofline model"}
    made, _ = _with_policy(config, Checkpoint(Policy(PolicyConfig(), config.seed), None, metadata), True)
    made.save(out)
    return Checkpoint.load(out)


def _made_now(config: TrainingConfig) -> dict[str, Any]:
    """Return metadata of every training."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": now, "pools": list(config.pools)}


def _with_policy(config: TrainingConfig, checkpoint: Checkpoint, progress: bool) -> tuple[Checkpoint, list[DrawnTask]]:
    """Train the checkpoint's policy for its costs, and judge it on held-out tables; return the tasks as well."""
    train_tables, test_tables = pool_tables(config.pools)
    tasks, made = improve(config, checkpoint, train_tables, progress)
    validation = checkpoint.metadata.get("validation", {}) | validate_policy(made, test_tables, config)
    return replace(made, metadata={**made.metadata, "validation": validation}), tasks
