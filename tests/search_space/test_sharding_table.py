# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The tables of sharding types and of compute kernels: what TorchRec's own sharders say."""

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS
from torchrec.distributed.types import ShardingType

from dreamshard_planner.search_space.sharding_types import KERNELS, SHARDING_TYPES
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
