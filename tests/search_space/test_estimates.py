# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fast enumeration: TorchRec's options and estimates, bit for bit."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.annotations import fwd_comms
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingOffloadStats,
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    ParameterConstraints,
    Perf,
    PlannerError,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import CacheParams, KeyValueParams, MultiPassPrefetchConfig, PipelineType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import RowWiseAdagrad

from dreamshard_planner.search_space.enumeration import (
    FastEnumerator,
    OncePerSize,
    estimate_all,
    torchrec_estimators,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

META = torch.device("meta")
GIB = 1 << 30
OPTIMIZERS = (None, torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)
KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", "dense", "key_value")
SHARDING_TYPES = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")


def random_model(rng: random.Random) -> nn.Module:
    """Tables of 1 to 10^6 rows, pooled, weighted and sequence, with optimizers."""

    def configs(kind, prefix: str, count: int):
        return [
            kind(
                name=f"{prefix}{i}",
                num_embeddings=rng.choice((1, 3, rng.randint(1, 50), rng.randint(1, 10**6))),
                embedding_dim=rng.choice((4, 8, 16, 48, 64, 128, 256, 512)),
                feature_names=[f"{prefix}{i}_{k}" for k in range(rng.choice((1, 1, 3)))],
                data_type=rng.choice((DataType.FP32, DataType.FP16)),
            )
            for i in range(count)
        ]

    def bags(prefix: str, count: int, weighted: bool = False) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(configs(EmbeddingBagConfig, prefix, count), device=META, is_weighted=weighted)

    model = nn.Module()
    model.pooled = bags("p", 3)
    model.weighted = bags("w", 2, weighted=True)
    for i in range(2):  # all tables of one have the same dimension
        setattr(model, f"sequence{i}", EmbeddingCollection(configs(EmbeddingConfig, f"s{i}_", 1), device=META))
    model.other = bags("a", 3)
    for parameter in model.parameters():
        optimizer = rng.choice(OPTIMIZERS)
        if optimizer is not None:
            apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.1})
    return model


def random_topology(rng: random.Random) -> Topology:
    local = rng.choice((1, 2, 4))
    world = local * rng.choice((1, 2, 3))
    memory = [rng.randint(8, 80) * GIB for _ in range(world)]
    return Topology(
        world,
        rng.choice(("cuda", "cuda", "cpu")),
        local_world_size=local,
        ssd_cap=rng.choice((None, GIB)),
        custom_topology_data=rng.choice((None, CustomTopologyData({"hbm_cap": memory, "ddr_cap": memory}, world))),
        uneven_sharding_perf_multiplier=2.0,
    )


def random_constraints(rng: random.Random, model: nn.Module) -> dict[str, ParameterConstraints]:
    features = {}
    for module in model.modules():
        for method in ("embedding_bag_configs", "embedding_configs"):
            for config in getattr(module, method, list)():
                features[config.name] = config.feature_names, config.num_embeddings
    result = {}
    for name, (names, rows) in features.items():
        stats = EmbeddingOffloadStats(0.5, rng.randint(1, 1000), torch.tensor([3.0, 2.0, 1.0]), rows)
        cache = CacheParams(
            load_factor=rng.choice((None, 0.1, 0.37)),
            prefetch_pipeline=rng.choice((None, True)),
            stats=rng.choice((None, stats)),
            multipass_prefetch_config=rng.choice((None, MultiPassPrefetchConfig(num_passes=3))),
        )
        result[name] = ParameterConstraints(
            sharding_types=rng.choice((None, [*SHARDING_TYPES], [*SHARDING_TYPES, "grid_shard"])),
            compute_kernels=rng.choice((None, [*KERNELS])),
            min_partition=rng.choice((None, 4, 32)),
            pooling_factors=[rng.choice((0.3, 1.0, rng.uniform(1, 100))) for _ in names],
            num_poolings=rng.choice((None, [rng.uniform(0.5, 2) for _ in names])),
            batch_sizes=rng.choice((None, [rng.randint(1, 9999) for _ in names])),
            is_weighted=rng.random() < 0.3,
            cache_params=rng.choice((None, cache)),
            output_dtype=rng.choice((None, DataType.FP16)),
            key_value_params=rng.choice((None, KeyValueParams(max_l1_cache_size=1))),
        )
    return {name: constraint for name, constraint in result.items() if rng.random() < 0.8 or len(features[name][0]) > 1}


def random_sharders(rng: random.Random) -> list:
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16), device=META)
    fused = {"cache_load_factor": 0.45, "prefetch_pipeline": True}
    return [
        kind(fused_params=rng.choice((None, {}, fused)), qcomm_codecs_registry=rng.choice((None, codecs)))
        for kind in (
            EmbeddingBagCollectionSharder,
            EmbeddingCollectionSharder,
        )
    ]


def by_kind(options: list[ShardingOption]) -> dict[tuple, list[str]]:
    """All that TorchRec says of every option; ``repr`` tells floats apart to the last bit."""
    result = {(o.fqn, o.sharding_type, o.compute_kernel): described(o) for o in options}
    assert len(result) == len(options)
    return result


def described(option: ShardingOption) -> list[str]:
    # The statistics of a cache are copied per table, and have no repr; ours keeps alike shards once.
    told = {**vars(option), "shards": copy.deepcopy(option).shards}
    for name in ("_tensor", "_module", "cache_params", "_runs", "_ranks", "_shards"):
        told.pop(name, None)
    return [f"{k}={v!r}" for k, v in sorted(told.items())]


@pytest.mark.parametrize("seed", range(6))
def test_options_and_estimates_are_those_of_torchrec(seed: int) -> None:
    rng = random.Random(seed)
    model, topology = random_model(rng), random_topology(rng)
    constraints, sharders = random_constraints(rng, model), random_sharders(rng)
    torchrecs = EmbeddingEnumerator(topology, 512, constraints)
    torchrecs._device_memory_sizes = None  # by which its blocks of rows are not those of its lookups
    theirs = torchrecs.enumerate(model, sharders)
    ours = FastEnumerator(topology, 512, constraints).enumerate(model, sharders)
    assert by_kind(ours) == by_kind(theirs)
    assert list(dict.fromkeys(o.fqn for o in ours)) == list(dict.fromkeys(o.fqn for o in theirs))
    kinds = [(o.fqn, o.sharding_type, o.compute_kernel) for o in ours]
    order = {o.fqn: place for place, o in enumerate(ours)}
    assert kinds == sorted(kinds, key=lambda kind: (order[kind[0]], *kind[1:]))

    # Other settings of the same estimators.
    for estimator in (
        EmbeddingPerfEstimator(topology, constraints, is_inference=True),
        EmbeddingStorageEstimator(topology, constraints, is_inference=True),
        EmbeddingStorageEstimator(topology, constraints, rng.choice(list(PipelineType)), rng.random() < 0.5),
        EmbeddingStorageEstimator(topology, constraints, PipelineType.TRAIN_PREFETCH_SPARSE_DIST, True),
    ):
        estimate_all([estimator], theirs, sharders)
        estimate_all([OncePerSize(estimator)], ours, sharders)
        assert by_kind(ours) == by_kind(theirs)


class OffsetsCost(EmbeddingPerfEstimator):
    """Shards of one size differ."""

    def estimate(self, sharding_options, *args, **kwargs) -> None:
        super().estimate(sharding_options, *args, **kwargs)
        for option in sharding_options:
            for shard in option.shards:
                shard.perf += Perf(sum(shard.offset), 0.0, 0.0, 0.0)


class LastShardIsSlow(EmbeddingPerfEstimatorConfig):
    def post_process_perfs(self, shard_perfs, *args, **kwargs):
        return [*shard_perfs[:-1], shard_perfs[-1] + Perf(1.0, 0.0, 0.0, 0.0)]


class OwnNetwork(EmbeddingPerfEstimatorConfig):
    device_bw = 123.0

    @fwd_comms
    def network(self, context) -> float:
        return context.emb_dim * 0.5


@pytest.mark.parametrize("seed", range(2))
def test_tables_enumerated_in_parts_have_the_same_options(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all shards at once would fill the memory: in TorchRec's order, and known when asked again."""
    rng = random.Random(seed)
    model, topology, sharders = random_model(rng), random_topology(rng), random_sharders(rng)
    at_once = FastEnumerator(topology, 64).enumerate(model, sharders)
    monkeypatch.setattr("dreamshard_planner.search_space.enumeration.SHARDS_AT_ONCE", 2 * topology.world_size)
    enumerator = FastEnumerator(topology, 64)
    for _ in range(2):
        in_parts = enumerator.enumerate(model, sharders)
        assert len({option.fqn for option in in_parts}) > 2
        for listed in (in_parts, enumerator.last_stored_search_space):
            assert [described(option) for option in listed] == [described(option) for option in at_once]
            assert [option.fqn for option in listed] == [option.fqn for option in at_once]
        assert all(one is not other for one, other in zip(in_parts, enumerator.last_stored_search_space, strict=True))


@pytest.mark.parametrize("own", ["subclass", "all shards", "annotated", "on the instance"])
def test_estimators_of_the_user_keep_their_say(own: str) -> None:
    rng = random.Random(1)
    model, topology, sharders = random_model(rng), Topology(4, "cuda", local_world_size=2), random_sharders(rng)
    if own == "subclass":
        estimator = OffsetsCost(topology)
    else:
        config = {"all shards": LastShardIsSlow, "annotated": OwnNetwork}.get(own, EmbeddingPerfEstimatorConfig)()
        if own == "on the instance":
            config.device_bw = 77.0
        estimator = EmbeddingPerfEstimatorFactory.create_with_config(config, topology=topology)
    theirs = EmbeddingEnumerator(topology, 512, estimator=estimator).enumerate(model, sharders)
    ours = FastEnumerator(topology, 512, estimator=estimator).enumerate(model, sharders)
    assert by_kind(ours) == by_kind(theirs)
    estimate_all(torchrec_estimators(topology)[:1], theirs, sharders)
    assert by_kind(ours) != by_kind(theirs)


def test_default_estimators_are_those_of_the_installed_enumerator() -> None:
    rng = random.Random(2)
    model, topology, sharders = random_model(rng), Topology(4, "cuda", local_world_size=2), random_sharders(rng)
    constraints = random_constraints(rng, model)
    theirs = EmbeddingEnumerator(topology, 512, constraints).enumerate(model, sharders)
    ours = copy.deepcopy(theirs)
    for option in ours:
        for shard in option.shards:
            shard.perf = shard.storage = None
    estimate_all(torchrec_estimators(topology, constraints), ours, sharders)
    assert by_kind(ours) == by_kind(theirs)


def test_a_failing_estimate_leaves_the_shards() -> None:
    rng = random.Random(3)
    model, topology, sharders = random_model(rng), Topology(4, "cuda", local_world_size=2), random_sharders(rng)
    options = FastEnumerator(topology, 512).enumerate(model, sharders)
    before = by_kind(options)
    options[-1].compute_kernel, right = "none such", options[-1].compute_kernel
    with pytest.raises(PlannerError, match="'none such', whose cost is unknown"):
        estimate_all(torchrec_estimators(topology), options, sharders)
    options[-1].compute_kernel = right
    assert by_kind(options) == before


def test_copies_are_independent_and_estimates_outlive_planning() -> None:
    rng = random.Random(4)
    model, topology, sharders = random_model(rng), Topology(4, "cuda", local_world_size=2), random_sharders(rng)
    enumerator = FastEnumerator(topology, 512)
    first = enumerator.enumerate(model, sharders)
    before = by_kind(first)
    assert [vars(shard) for option in copy.deepcopy(first) for shard in option.shards] == [
        vars(shard) for option in first for shard in option.shards
    ]
    for option in first:
        option.input_lengths[0] = 99.0
        for shard in option.shards:
            shard.rank, shard.size[0] = 3, 7
    assert by_kind(enumerator.enumerate(model, sharders)) == before
    EmbeddingShardingPlanner(topology=topology, batch_size=512, enumerator=enumerator).plan(model, sharders)
    assert by_kind(enumerator.enumerate(model, sharders)) == before


def test_options_are_prepared_before_they_are_estimated() -> None:
    rng = random.Random(5)
    model, topology, sharders = random_model(rng), Topology(4, "cuda", local_world_size=2), random_sharders(rng)

    def prepare(option: ShardingOption) -> None:
        assert option.shards[0].perf is None
        option.input_lengths = [7.0]

    constraints = {name: ParameterConstraints(pooling_factors=[7.0]) for name in ("p0", "p1", "p2", "s0_0", "a0")}
    theirs = EmbeddingEnumerator(topology, 512, constraints).enumerate(model, sharders)
    ours = FastEnumerator(topology, 512, prepare=prepare).enumerate(model, sharders)
    assert by_kind([o for o in ours if o.name in constraints]) == by_kind([o for o in theirs if o.name in constraints])
