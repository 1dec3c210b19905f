# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Small random problems over every sharding type, and the cost of their best sharding, by trying all.

Shapes: X shardings, K ways to shard a table (an option and positions of its units), D ranks, G fused groups, H latent
channels.
"""

import itertools
import random
from typing import TypeAlias

import torch
from small_models import collection, table
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.cost.problem import Cost, has_room
from dreamshard_planner.devices import Machine
from dreamshard_planner.search_space.sharding_types import CW, DP, GRID, RW, TW, TWRW

Shape: TypeAlias = tuple[int, int, int, tuple[str, ...]]
"""Ranks, ranks of a host, tables and their types."""
ALL = (TW, CW, RW, DP, TWRW, GRID)
SHAPES: tuple[Shape, ...] = ((2, 1, 4, ALL), (4, 2, 3, ALL), (4, 2, 6, (TW, DP)))


def small_problem(seed: int, cost_source: str) -> tuple[DreamShardPlanner, nn.Module]:
    """A random model of a few tables, and a planner that may shard each in every way."""
    rng = random.Random(seed)
    ranks, ranks_per_host, count, kinds = SHAPES[seed % len(SHAPES)]
    tables = [table(f"t{i}", int(10 ** rng.uniform(1, 6.5)), rng.choice([32, 64])) for i in range(count)]
    constraints = {
        config.name: ParameterConstraints(
            sharding_types=list(kinds), min_partition=32, pooling_factors=[10 ** rng.uniform(0, 1.5)]
        )
        for config in tables
    }
    topology = Machine(ranks_per_host=ranks_per_host, hosts=ranks // ranks_per_host, gpu="h100").topology()
    arguments = {"constraints": constraints, "cost_source": cost_source, "stats": [], "debug": False}
    planner = DreamShardPlanner(topology=topology, batch_size=rng.choice([256, 1024, 4096]), **arguments)
    return planner, collection(*tables)


def planned_and_best_ms(seed: int, cost_source: str) -> tuple[float, float]:
    planner, model = small_problem(seed, cost_source)
    planner.plan(model, [EmbeddingBagCollectionSharder()])
    session = planner._loop.model
    options = session.rater.certain_options(session.search_space)
    cost = session.rater.cost(session.rater.read(options, session.room))
    return planner.report().chosen.total_ms, optimum_ms(cost)


@torch.inference_mode()
def optimum_ms(cost: Cost) -> float:
    """Return the cost of the best sharding within memory, of all that there are."""
    problem, sums = cost.problem, _choices(cost, 0)
    for index in range(1, problem.num_tables):
        pairs = zip(sums, _choices(cost, index), strict=True)
        sums = tuple((sum_X[:, None] + own_K).flatten(0, 1) for sum_X, own_K in pairs)
    latent_XDGH, bytes_XCD, used_XDM = sums
    device_ms_XD = cost.compute.group_cost_ms(latent_XDGH).sum((-1, -2))
    fits_X = has_room(used_XDM, problem.limits_DM).all(-1)
    return float((device_ms_XD.amax(-1) + problem.collectives.ms(bytes_XCD))[fits_X].min())


def _choices(cost: Cost, table: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents [K, D, G, H], bytes sent [K, C, D] and memory [K, D, M] of every way to shard a table."""
    laid = []
    for option in cost.problem.tables[table]:
        places = [range(cost.problem.num_ranks // option.span)] * option.units
        for positions in itertools.product(*places):
            rank_X, part_X = torch.tensor(option.ranks(positions)), torch.tensor(option.parts)
            sums = (
                cost.group_latents(rank_X, part_X),
                cost.bytes_sent(rank_X, part_X),
                cost.problem.taken(rank_X, part_X),
            )
            laid.append(sums)
    return tuple(torch.stack(sums) for sums in zip(*laid, strict=True))
