# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train: collect -> fit -> improve, then again with placements that the current policy proposes."""

from __future__ import annotations

import datetime
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import prior_policy
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import CostNetworkConfig, fit_cost_network, mape_2, predict_ms
from dreamshard_planner.measure.hardware import hardware_name
from dreamshard_planner.measure.sets import MAX_TABLES, SHARD_SHARE, draw_sets
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.support.formatting import progress_bar
from dreamshard_planner.training.config import TrainingConfig, measure, most_sets, pool_tables
from dreamshard_planner.training.policies import DrawnTask, improve, proposed_sets, validate_policy


def train(config: TrainingConfig, out: str | Path, progress: bool = True) -> Checkpoint:
    """Measure, fit and improve, and write the checkpoint ``out``, with the dataset beside it.

    The same call continues an interrupted training.
    """
    out = Path(out)
    for file in (out, out.with_suffix(".dataset.npz"), out.with_suffix(".test.npz")):
        check_writable(file)
    train_tables, test_tables = pool_tables((*config.pools, *config.extra_pools))
    max_sets = most_sets(config.seconds)
    draw = partial(
        draw_sets, batch_sizes=config.batch_sizes, max_tables=MAX_TABLES, device=config.device, shard_share=SHARD_SHARE
    )
    test_sets, sets = draw(test_tables, max_sets, config.seed + 1), draw(train_tables, max_sets, config.seed)
    folders = [out.with_suffix(".test.blocks")]
    test = measure(config, test_sets, folders[0], config.test_share, progress, once=True)

    datasets: list[CostDataset] = []
    learned: tuple[Checkpoint, list[DrawnTask]] | None = None
    round_share = (1 - config.test_share) / config.rounds
    for round_index in range(config.rounds):
        if learned is not None:
            made, tasks = learned
            sets = proposed_sets(made.policy, tasks, max_sets, config.seed + 100 * round_index, config.device)
        folders.append(out.with_suffix(f".round{round_index}.blocks"))
        datasets.append(measure(config, sets, folders[-1], round_share, progress, once=True))
        learned = learn(config, CostDataset.concatenate(datasets), test, progress)
    assert learned is not None  # there is a round
    learned[0].save(out)  # first, since the blocks still hold all of the datasets
    CostDataset.concatenate(datasets).save(out.with_suffix(".dataset.npz"))
    test.save(out.with_suffix(".test.npz"))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # the datasets hold all of it
    return Checkpoint.load(out)


def learn(
    config: TrainingConfig, train_data: CostDataset, test_data: CostDataset, progress: bool = True
) -> tuple[Checkpoint, list[DrawnTask]]:
    """Fit the cost network to measured sets, train a policy on it, and judge both on held-out tables.

    Returns:
        The checkpoint, and the policy's training tasks.
    """
    train_tables, test_tables = pool_tables(config.pools)
    train_sets, test_sets = LabelledSets.of_dataset(train_data), LabelledSets.of_dataset(test_data, train_data.usual_ms)
    start = start_of(config.start, train_sets)
    with progress_bar("fitting", config.fit.steps(len(train_sets)), progress) as advance:
        network = fit_cost_network(
            train_sets,
            config=replace(config.fit, seed=config.seed),
            on_epoch=lambda _, loss: advance(f"loss {loss:.4f}"),
            start=start.cost if start else None,
        )
    metadata = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "started_from": f"{start.name}, measured on {start.measured_on}" if start else None,
        "hardware": train_data.hardware,
        "hardware_name": hardware_name(train_data.hardware),
        "dataset": {"sets": len(train_data), "digest": train_data.digest, "test_sets": len(test_data)},
        "reference_ms": train_data.usual_ms,
        "collectives": config.collectives,
        "pools": list(config.pools),
        "extra_pools": list(config.extra_pools),
        "batch_sizes": sorted({shard.batch_size for shard in train_data.shards}),
    }
    priced = Checkpoint(prior_policy(), network, metadata)
    tasks, made = improve(config, priced, train_tables, progress)
    errors_2 = mape_2(predict_ms(network, test_sets), test_sets.labels_ms_X2)
    error = [round(value, 4) for value in errors_2.tolist()]
    validation = {"network_mape": error, **validate_policy(made, test_tables, config)}
    return replace(made, metadata={**made.metadata, "validation": validation}), tasks


def train_on_roofline(config: TrainingConfig, out: str | Path) -> Checkpoint:
    """Train a policy from nothing on the roofline model, for topologies where nothing is measured; needs no
    hardware."""
    check_writable(out)
    config = replace(config, device="cuda")
    train_tables, test_tables = pool_tables(config.pools)
    metadata = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {},
        "hardware_name": "nothing: roofline model",
        "pools": list(config.pools),
    }
    untrained = Checkpoint(Policy(PolicyConfig(), config.seed), None, metadata)
    _, made = improve(config, untrained, train_tables, True)
    validation = validate_policy(made, test_tables, config)
    replace(made, metadata={**made.metadata, "validation": validation}).save(out)
    return Checkpoint.load(out)


def start_of(start: Checkpoint | None, train_sets: LabelledSets) -> Checkpoint | None:
    """The checkpoint whose network fitting starts from; None if it has none of today's sizes, or if the sets have a
    prior of their own to start from."""
    if start is None or start.cost is None or train_sets.prior is not None or start.cost.roofline is not None:
        return None
    return start if start.cost.config == CostNetworkConfig() else None
