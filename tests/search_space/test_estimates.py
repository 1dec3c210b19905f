# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fast enumeration: TorchRec's options and estimates, bit for bit."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.annotations import fwd_comms
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.problem.enumeration import FastEnumerator, PerfEstimator, StorageEstimator
from dreamshard_planner.problem.reader import OptionReader
from tests.mixed_models import mixed_case


def case_of(seed: int) -> tuple[nn.Module, list[ModuleSharder[nn.Module]], Topology, dict[str, ParameterConstraints]]:
    """A random model, sharders that quantize what they send, and constraints that leave all types and kernels."""
    case = mixed_case(seed)
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16), device=torch.device("meta"))
    fused = {"cache_load_factor": 0.45, "prefetch_pipeline": True}
    sharders = [
        EmbeddingBagCollectionSharder(fused, codecs if seed % 2 else None),
        EmbeddingCollectionSharder(None, None if seed % 2 else codecs),
    ]
    constraints = {
        name: replace(given, sharding_types=None, compute_kernels=None, num_poolings=None)
        for name, given in case.constraints.items()
    }
    return case.model, sharders, case.topology, constraints


def estimators(topology: Topology, constraints: dict[str, ParameterConstraints] | None = None) -> list[ShardEstimator]:
    """Ours, without the memory that TorchRec misses."""
    storage = StorageEstimator(topology, constraints, OptionReader())
    storage._missing = lambda *_: Storage(0, 0)
    return [PerfEstimator(topology, constraints), storage]


def by_kind(options: list[ShardingOption]) -> dict[tuple, list[str]]:
    """All that TorchRec says of every option; ``repr`` tells floats apart to the last bit."""
    result = {(o.fqn, o.sharding_type, o.compute_kernel): described(o) for o in options}
    assert len(result) == len(options)
    return result


def described(option: ShardingOption) -> list[str]:
    # The statistics of a cache are copied per table, and have no repr; ours keeps alike shards once.
    told = {**vars(option), "shards": copy.deepcopy(option).shards}
    for name in ("_tensor", "_module", "cache_params", "_runs", "_shards"):
        told.pop(name, None)
    return [f"{k}={v!r}" for k, v in sorted(told.items())]


@pytest.mark.parametrize("seed", range(4))
def test_options_and_estimates_are_those_of_torchrec(seed: int) -> None:
    model, sharders, topology, constraints = case_of(seed)
    theirs = EmbeddingEnumerator(topology, 512, constraints).enumerate(model, sharders)
    ours = FastEnumerator(topology, 512, constraints, estimators(topology, constraints)).enumerate(model, sharders)
    assert by_kind(ours) == by_kind(theirs)
    assert list(dict.fromkeys(o.fqn for o in ours)) == list(dict.fromkeys(o.fqn for o in theirs))
    kinds = [(o.fqn, o.sharding_type, o.compute_kernel) for o in ours]
    order = {o.fqn: place for place, o in enumerate(ours)}
    assert kinds == sorted(kinds, key=lambda kind: (order[kind[0]], *kind[1:]))


class LastShardIsSlow(EmbeddingPerfEstimatorConfig):
    def post_process_perfs(self, shard_perfs, *args, **kwargs):
        return [*shard_perfs[:-1], shard_perfs[-1] + Perf(1.0, 0.0, 0.0, 0.0)]


class OwnNetwork(EmbeddingPerfEstimatorConfig):
    device_bw = 123.0

    @fwd_comms
    def network(self, context) -> float:
        return context.emb_dim * 0.5


def test_tables_enumerated_in_parts_have_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all shards at once would fill the memory: in TorchRec's order, and known when asked again."""
    model, sharders, topology, _ = case_of(1)
    at_once = FastEnumerator(topology, 64).enumerate(model, sharders)
    monkeypatch.setattr("dreamshard_planner.problem.enumeration.SHARDS_AT_ONCE", 2 * topology.world_size)
    enumerator = FastEnumerator(topology, 64)
    for _ in range(2):
        in_parts = enumerator.enumerate(model, sharders)
        assert len({option.fqn for option in in_parts}) > 2
        for listed in (in_parts, enumerator.last_stored_search_space):
            assert [described(option) for option in listed] == [described(option) for option in at_once]
            assert [option.fqn for option in listed] == [option.fqn for option in at_once]
        assert all(one is not other for one, other in zip(in_parts, enumerator.last_stored_search_space, strict=True))


@pytest.mark.parametrize("config", [LastShardIsSlow, OwnNetwork])
def test_hardware_that_the_user_registered_keeps_its_say(
    config: type[EmbeddingPerfEstimatorConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sharders, _, _ = case_of(1)
    topology = Topology(4, "cuda", local_world_size=2)
    default = FastEnumerator(topology, 512, None, estimators(topology)).enumerate(model, sharders)
    monkeypatch.setitem(EmbeddingPerfEstimatorFactory._registry, DEFAULT_PERF_ESTIMATOR, config)
    theirs = EmbeddingEnumerator(topology, 512).enumerate(model, sharders)
    ours = FastEnumerator(topology, 512, None, estimators(topology)).enumerate(model, sharders)
    assert by_kind(ours) == by_kind(theirs) != by_kind(default)
