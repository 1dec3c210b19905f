# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Embedding towers: all tables of one on one host, and everything else around them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.search_space.sharding_types import TWCW, TWRW

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHARDERS = [EmbeddingTowerSharder(), EmbeddingTowerCollectionSharder(), EmbeddingBagCollectionSharder()]
GIB = 2**30


class Interaction(nn.Module):
    """An interaction of a tower's embeddings; it is never run."""


def bags(prefix: str, *rows: int, dim: int = 64) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"{prefix}{i}", num_embeddings=count, embedding_dim=dim, feature_names=[f"{prefix}{i}_f"]
        )
        for i, count in enumerate(rows)
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def towers() -> nn.Module:
    """One tower, a collection of three, and tables of no tower."""
    model = nn.Module()
    model.tower = EmbeddingTower(bags("a", 10_000, 20_000, 30_000, dim=256), Interaction())
    model.towers = EmbeddingTowerCollection(
        [EmbeddingTower(bags(f"b{i}_", 10_000, 50_000), Interaction()) for i in range(3)]
    )
    model.pooled = bags("p", *range(1000, 7000, 1000))
    return model


def planner(ranks: int, host: int, memory: int = 32 * GIB, **arguments) -> DreamShardPlanner:
    return DreamShardPlanner(
        topology=Topology(ranks, "cuda", local_world_size=host, hbm_cap=memory, ddr_cap=memory),
        batch_size=64,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=[],
        debug=False,
        **arguments,
    )


@pytest.mark.parametrize("cost_source", ["auto", "torchrec"])
@pytest.mark.parametrize(("ranks", "host"), [(4, 4), (4, 2), (8, 2), (4, 1), (1, 1)])
def test_tables_of_a_tower_share_a_host(ranks: int, host: int, cost_source: str) -> None:
    made = planner(ranks, host, cost_source=cost_source, least_gain=0.0)
    plan = made.plan(towers(), SHARDERS)
    hosts: dict[str, set[int]] = {}
    for option in made.options:
        if option.dependency:
            hosts.setdefault(option.dependency, set()).update(shard.rank // host for shard in option.shards)
        if option.sharding_type == TWRW:
            assert [shard.rank % host for shard in option.shards] == list(range(host))
    assert hosts.keys() == {"tower", "towers.tower_0", "towers.tower_1", "towers.tower_2"}
    assert all(len(where) == 1 for where in hosts.values())
    assert ranks == host or len(set().union(*hosts.values())) > 1  # they spread over hosts
    assert set(plan.plan) == {"tower", "towers", "pooled"}
    report = made.report()
    assert made.predict(made.options).total_ms == pytest.approx(report.chosen.total_ms, rel=1e-6)
    assert all(report.chosen.total_ms <= rival.total_ms * (1 + 1e-5) + 1e-9 for rival in report.rivals)
    assert "torchrec" in {rival.name for rival in report.rivals}


def test_constraints_of_towers_hold() -> None:
    constraints = {
        "a0": ParameterConstraints(sharding_types=[TWRW]),
        "a1": ParameterConstraints(sharding_types=[TWCW], min_partition=64, compute_kernels=["fused_uvm"]),
    }
    made = planner(4, 2, constraints=constraints)
    made.plan(towers(), SHARDERS)
    options = {option.name: option for option in made.options}
    assert options["a0"].sharding_type == TWRW
    assert (options["a1"].sharding_type, options["a1"].compute_kernel) == (TWCW, "fused_uvm")
    assert all(shard.size[1] >= 64 for shard in options["a1"].shards)


def test_a_plan_that_tears_a_tower_apart_is_not_rated() -> None:
    made = planner(4, 2)
    made.plan(towers(), SHARDERS)
    torn = copy.deepcopy(made.options)
    option = next(option for option in torn if option.name == "a0")
    for shard in option.shards:
        shard.rank = (shard.rank + 2) % 4
    with pytest.raises(PlannerError, match="of 'tower' are on hosts"):
        made.predict(torn)


def test_towers_that_no_host_holds() -> None:
    with pytest.raises(PlannerError, match=r"'tower\.a2'.* needs .* bytes"):
        planner(4, 2, memory=2**22).plan(towers(), SHARDERS)


@pytest.mark.parametrize(("ranks", "host"), [(8, 3), (4, 8)])
def test_hosts_that_are_not_whole_hold_no_tables_together(ranks: int, host: int) -> None:
    model = nn.Module()
    model.pooled = bags("p", 1000, 200_000)
    made = planner(ranks, host)
    made.plan(model, SHARDERS)
    assert TWRW not in {option.sharding_type for option in made._enumerator.last_stored_search_space}
    reason = f"{ranks} ranks are no whole number of hosts of {host}"
    with pytest.raises(PlannerError, match=f"'pooled.p0' .table_row_wise: {reason}"):
        planner(ranks, host, constraints={"p0": ParameterConstraints(sharding_types=[TWRW])}).plan(model, SHARDERS)
    with pytest.raises(PlannerError, match=f"'towers?.* belongs on one host, and {reason}: give Topology"):
        planner(ranks, host).plan(towers(), SHARDERS)
