# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The tables of sharding types and of compute kernels: what TorchRec's own sharders say, and one more row."""

import copy
from pathlib import Path

import pytest
from small_models import collection, table
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS, EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ModuleSharder,
    ParameterConstraints,
    Perf,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.planning.page import save_html
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search_space.sharding_types import KERNELS, SHARDING_TYPES, Exchange, ShardingTypeSpec
from dreamshard_planner.workload.tables import MEMORIES

STOCK = {"pooled_on": EmbeddingBagCollectionSharder, "sequence_on": EmbeddingCollectionSharder}


def test_there_is_a_row_for_every_type_of_torchrecs() -> None:
    assert SHARDING_TYPES.keys() == {kind.value for kind in ShardingType}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("module", STOCK)
def test_torchrecs_sharders_offer_what_the_rows_say(module: str, device: str) -> None:
    sharder = STOCK[module]()
    offered = {kind for kind, spec in SHARDING_TYPES.items() if device in getattr(spec, module)}
    assert offered == set(sharder.sharding_types(device))
    for kind in offered:
        assert set(sharder.compute_kernels(kind, device)) <= set(SHARDING_TYPES[kind].kernels)


def test_there_is_a_row_for_every_kernel_that_they_offer() -> None:
    offered = {kernel for kind in SHARDING_TYPES for kernel in STOCK["pooled_on"]().compute_kernels(kind, "cuda")}
    assert offered <= KERNELS.keys()
    stores = {kernel.value for kernel in GUARDED_COMPUTE_KERNELS}
    assert {name for name in offered if KERNELS[name].store} == stores & offered
    assert {kernel.memory for kernel in KERNELS.values()} == set(MEMORIES)


TOY = "host_column_wise"
HOST = 2
"""Ranks."""


class ToySharder(EmbeddingBagCollectionSharder):
    """Offers one more type."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), TOY]


class ToyEnumerator(EmbeddingEnumerator):
    """Knows one more way to shard a table: half its columns on each rank of a host."""

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        options = super().enumerate(module, [EmbeddingBagCollectionSharder()])
        return [*options, *(_halves(option) for option in options if option.sharding_type == "table_wise")]


def _halves(option: ShardingOption) -> ShardingOption:
    toy = copy.copy(option)
    (whole,) = option.shards
    rows, half = whole.size[0], whole.size[1] // HOST
    perf = Perf(1.0, 1.0, 1.0, 1.0)
    toy.sharding_type, toy.partition_by = TOY, "host"
    toy.shards = [Shard([rows, half], [0, half * i], whole.storage, perf) for i in range(HOST)]
    return toy


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row: slices meet in their host, and whole rows go on to the others."""
    spec = ShardingTypeSpec(
        "the ranks of one host, a column slice each",
        span="host",
        splits_columns=True,
        exchanges=(Exchange("host", "all_gather", "reduce_scatter"), Exchange("across", "all_to_all", "all_to_all")),
        pooled_on=("cpu", "cuda"),
    )
    monkeypatch.setitem(SHARDING_TYPES, TOY, spec)


TOPOLOGY = Topology(2 * HOST, "cuda", local_world_size=HOST, hbm_cap=2**34, ddr_cap=2**34)
SAMPLES = 512


def toy_model() -> nn.Module:
    return nn.ModuleDict({"sparse": collection(*(table(f"t{i}", 1000, 64) for i in range(3)))})


@pytest.mark.usefixtures("toy")
def test_a_new_type_is_a_row(tmp_path: Path) -> None:
    """From its options to ranks, report, page and file."""

    types = {"t0": TOY, "t1": TOY, "t2": "table_wise"}
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in types.items()}
    enumerator = ToyEnumerator(TOPOLOGY, SAMPLES)
    arguments = {"constraints": constraints, "enumerator": enumerator, "stats": [], "debug": False}
    made = DreamShardPlanner(topology=TOPOLOGY, batch_size=SAMPLES, **arguments)
    sharding = made.plan(toy_model(), [ToySharder()]).plan["sparse"]
    assert all(sharding[name].ranks in ([0, 1], [2, 3]) for name in ("t0", "t1"))
    report = made.report()
    assert report.sharding_types == {TOY: 2, "table_wise": 1}
    assert report.chosen.collectives_ms > 0 and TOY in str(made.explain())
    save_html(report, tmp_path / "report.html")
    assert TOY in (tmp_path / "report.html").read_text()
    made.save_plan(tmp_path / "plan.json")
    saved = SavedPlan.load(tmp_path / "plan.json")
    assert dict(saved.tables())["sparse.t0"].label == f"{TOY} on ranks {'0-1' if 0 in sharding['t0'].ranks else '2-3'}"
