# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train the joint policy that ships, on tasks of 14 to 240 tables and 4 to 64 ranks of H100s, some short of memory.

    python benchmarks/train_joint_policy.py dreamshard_planner/policy/joint.safetensors

Costs are those of the planner for H100s, by bandwidths; what a policy sees is relative, so that it serves other costs
as well. Tables are drawn by seeds that no benchmark uses.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from common.joint_reinforce import JointReinforceConfig, JointUpdate, save_joint_policy, train_joint_policy
from common.output import provenance
from common.tasks import meta_collection
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.policy.joint_environment import JointTask
from dreamshard_planner.policy.joint_network import JointPolicy, JointPolicyConfig
from dreamshard_planner.search.starts import JointOptions
from dreamshard_planner.search_space.usable_options import usable_options
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.tables import FeatureStatistics, Table

SIZES = ((20, 4), (30, 8), (60, 8), (60, 16), (40, 32), (100, 32), (120, 64), (200, 64))
"""Tables, give or take, and ranks."""
BATCH_SIZES = (512, 2048, 2048, 8192)
META_SHARE, TIGHT_SHARE = 0.65, 0.25
FIRST_SEED, TASKS = 2_001, 80
VALIDATION_SEED, VALIDATION_TASKS = 500_000, 16
GPU_BYTES, HOST_BYTES, RANKS_PER_HOST = 80 * 2**30, 128 * 2**30, 8


def random_pool(seed: int, count: int) -> list[Table]:
    """Tables of log-uniform rows and pooling factors, the pool's range of either and its dims drawn as well."""
    rng = random.Random(seed)
    most_rows = rng.uniform(6.0, 7.7)
    dims = rng.choice([[32, 64, 128, 256], [64, 128], [16, 32, 64, 128, 256, 512]])
    return [
        Table(
            f"t{index}",
            int(10 ** rng.uniform(3, most_rows)),
            rng.choice(dims),
            (FeatureStatistics(10 ** rng.uniform(0, rng.choice([1, 2]))),),
        )
        for index in range(count)
    ]


def cost_of(tables: list[Table], ranks: int, batch_size: int, gpu_bytes: int) -> Cost:
    """Over all types that TorchRec offers for them."""
    hosts = min(RANKS_PER_HOST, ranks)
    topology = Topology(ranks, "cuda", hbm_cap=gpu_bytes, ddr_cap=HOST_BYTES, local_world_size=hosts)
    pooling = {table.name: [feature.pooling_factor for feature in table.features] for table in tables}
    constraints = {name: ParameterConstraints(pooling_factors=factors) for name, factors in pooling.items()}
    model, sharders = torch.nn.Module(), get_default_sharders()
    model.sparse = meta_collection(tables)
    context = replace(PlanningContext.of(topology, constraints), constraints=constraints, sharders=sharders)
    reservation = EmbeddingShardingPlanner(topology, batch_size, stats=[])._storage_reservation
    left = reservation.reserve(topology, batch_size, model, sharders, constraints)
    options = context.enumerator(batch_size, context._torchrec[0]).enumerate(model, sharders)
    return context.cost(context.read(usable_options(options, "cuda"), left))


def drawn(seed: int) -> JointTask | None:
    """A task; None where it does not fit."""
    rng = random.Random(seed)
    wanted, ranks = SIZES[seed % len(SIZES)]
    count = max(10, int(wanted * rng.uniform(0.7, 1.2)))
    year = rng.choice([2021, 2022])
    tables = meta_like(seed, count, year) if rng.random() < META_SHARE else random_pool(seed, count)
    batch_size, gpu_bytes = rng.choice(BATCH_SIZES), GPU_BYTES
    if rng.random() < TIGHT_SHARE:
        needed = sum(table.rows * table.dim * 4 for table in tables) / ranks
        gpu_bytes = min(GPU_BYTES, int(needed * rng.uniform(1.15, 3.0) / 0.85) + 6 * 2**30)
    cost = cost_of(tables, ranks, batch_size, gpu_bytes)
    asked = JointOptions(cost)
    return JointTask(cost, asked) if asked.may_fit else None


def drawn_tasks(first: int, count: int) -> list[JointTask]:
    """Those that fit."""
    return [task for task in map(drawn, range(first, first + count)) if task is not None]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--updates", type=int, default=JointReinforceConfig().updates)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    config, policy = JointReinforceConfig(updates=args.updates), JointPolicy(JointPolicyConfig())
    tasks, validation = drawn_tasks(FIRST_SEED, TASKS), drawn_tasks(VALIDATION_SEED, VALIDATION_TASKS)
    start, wall = time.process_time(), time.monotonic()

    def on_update(update: int, seen: JointUpdate) -> None:
        if (update + 1) % 25 == 0:
            print(update + 1, round(time.monotonic() - wall), seen, flush=True)

    looks: list[tuple[int, float]] = []

    def on_look(update: int, standing: float) -> None:
        looks.append((update, standing))
        print("look", update, round(time.monotonic() - wall), round(standing, 4), flush=True)

    standing = train_joint_policy(policy, tasks, validation, config, on_update, on_look)
    description = {
        **provenance(torch.device("cpu")),
        "reinforce": asdict(config),
        "tasks": len(tasks),
        "validation_tasks": len(validation),
        "looks": looks,
        "standing": standing,
        "seconds": time.process_time() - start,
    }
    save_joint_policy(policy, args.path, description)
    print(description)


if __name__ == "__main__":
    main()
