# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Work of the shards of sequence tables and of cached tables, as TorchRec's options describe them.

Shapes: P parts, N indices.
"""

import pytest
import torch
from small_models import collection, output_bytes_P, sequences, table
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, set_ec_index_dedup
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams
from torchrec.optim import PartialRowWiseAdam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import TableStatistics
from dreamshard_planner.cost.collectives import CPU_BAG_BYTES
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.workload.tables import FEATURE_INDEX, Workload

ROWS, DIM, SAMPLES, LENGTH, RANKS = 10_000, 32, 128, 20, 4


def read(model, sharder, statistics=None, device="cpu", **constraint) -> tuple[list[Workload], ReadProblem]:
    """The only table's options of the constraint."""
    topology = Topology(RANKS, device, hbm_cap=2**34)
    constraints = {"t": ParameterConstraints(**constraint)}
    options = EmbeddingEnumerator(topology, SAMPLES, constraints).enumerate(model, [sharder])
    reader = OptionReader(constraints, statistics, [sharder])
    rater = PlanRater(PlannedRanks.of(topology), reader, "roofline")
    return reader.workloads(options, topology), rater.read(options)


def sequence_model() -> nn.Module:
    return nn.ModuleDict({"sequence": sequences(table("t", ROWS, DIM))})


def draw(seed: int) -> KeyedJaggedTensor:
    """One rank's batch, with ids sorted by frequency."""
    generator = torch.Generator().manual_seed(seed)
    edge_R = ((torch.arange(ROWS, dtype=torch.float64) + 1) ** -1.2).cumsum(0)
    uniform_N = torch.rand(SAMPLES * LENGTH, dtype=torch.float64, generator=generator) * edge_R[-1]
    lengths = torch.full((SAMPLES,), LENGTH)
    return KeyedJaggedTensor(["t_f0"], torch.searchsorted(edge_R, uniform_N), lengths=lengths)


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "row_wise"])
def test_sequence_tables_exchange_a_vector_for_each_lookup(sharding_type: str) -> None:
    given = {"sharding_types": [sharding_type], "min_partition": 16, "pooling_factors": [float(LENGTH)]}
    workloads, found = read(sequence_model(), EmbeddingCollectionSharder(), **given)
    (option,) = found.problem.tables[0]
    parts = option.parts
    assert len(parts) == {"table_wise": 1, "column_wise": 2, "row_wise": RANKS}[sharding_type]
    collectives = {one.name.rsplit(" ", 1)[1]: one for one in found.problem.collectives.collectives}
    expected = ["all-to-all", "lookups", *(["bucketing"] if sharding_type == "row_wise" else [])]
    assert list(collectives) == expected and {one.over for one in collectives.values()} == {"world"}
    assert [name for name, one in collectives.items() if one.backward is None] == expected[1:]
    sent = dict(zip(expected, found.problem.bytes_PC[parts].sum(0).tolist(), strict=True))
    # All of one rank's lookups come back to it as vectors, whoever sends them.
    assert sent["all-to-all"] == pytest.approx(SAMPLES * LENGTH * DIM * 4)
    # Column slices and row blocks each get a length for every sample; slices every id, and blocks one of them.
    ids, lengths = SAMPLES * LENGTH * 8, SAMPLES * (4 + CPU_BAG_BYTES) * len(parts)
    repeated = len(parts) if sharding_type == "column_wise" else 1
    assert sent["lookups"] == pytest.approx(repeated * ids + lengths)
    # Every bag is in each block.
    sorted_bytes = ids + 0.2 * SAMPLES * RANKS * 8
    assert sent.get("bucketing", sorted_bytes) == pytest.approx(sorted_bytes)
    if sharding_type != "row_wise":
        lookups_P = found.problem.features_PF[parts, FEATURE_INDEX["lookups"]]
        assert lookups_P.tolist() == [workloads[0].lookups] * len(parts)


@pytest.mark.parametrize("by_global", [False, True])
def test_index_dedup_asks_for_a_row_once_per_rank(by_global: bool) -> None:
    batches = [draw(seed) for seed in range(RANKS)]
    statistics = TableStatistics.from_batches(batches)
    # TorchRec's operator for it runs on GPUs only.
    kinds = {"device": "cuda", "sharding_types": ["row_wise", "table_wise"], "compute_kernels": ["fused"]}
    plain, _ = read(sequence_model(), EmbeddingCollectionSharder(), statistics, **kinds)
    set_ec_index_dedup(by_global)
    try:
        sharder = EmbeddingCollectionSharder(use_index_dedup=not by_global)
        deduped, found = read(sequence_model(), sharder, statistics, **kinds)
    finally:
        set_ec_index_dedup(False)
    sent_N = torch.cat([batch.values().unique() for batch in batches])
    for before, after in zip(plain, deduped, strict=True):
        assert after.lookups == pytest.approx(len(sent_N), rel=0.01) and after.lookups < before.lookups / 2
        assert after.distinct_rows == before.distinct_rows == pytest.approx(len(sent_N.unique()), rel=0.05)
        assert after.output_elements == pytest.approx(len(sent_N) * DIM, rel=0.01)
    (row_wise,) = [option for option in found.problem.tables[0] if option.sharding_type == "row_wise"]
    block = ROWS // RANKS
    expected = (torch.bincount(sent_N // block, minlength=RANKS) * DIM * 4 / RANKS).tolist()
    assert row_wise.units == 1
    bytes_B = output_bytes_P(found.problem)[row_wise.parts].tolist()
    assert bytes_B == pytest.approx(expected, rel=0.1, abs=0.01 * sum(expected))


def bag_model() -> nn.Module:
    return nn.ModuleDict({"sparse": collection(table("t", ROWS, DIM))})


CACHED = {"sharding_types": ["table_wise"], "compute_kernels": ["fused_uvm_caching"], "pooling_factors": [30.0]}


def test_load_factors_of_options_and_sharders_decide_what_misses() -> None:
    def misses(sharder: EmbeddingBagCollectionSharder, **constraint) -> tuple[float, float]:
        (workload,), found = read(bag_model(), sharder, device="cuda", **CACHED, **constraint)
        row_F = found.problem.features_PF[0]
        assert row_F[FEATURE_INDEX["uvm_caching"]] == 1
        return workload.cache_load_factor, float(row_F[FEATURE_INDEX["cache_misses"]])

    default = misses(EmbeddingBagCollectionSharder())
    fused = misses(EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.5}))
    own = misses(
        EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.5}),
        cache_params=CacheParams(load_factor=0.9),
    )
    assert [default[0], fused[0], own[0]] == [0.2, 0.5, 0.9]
    assert 1 > default[1] > fused[1] > own[1] > 0


@pytest.mark.parametrize("own", [None, False, True])
@pytest.mark.parametrize("fused", [None, False, True])
def test_prefetching_is_read_as_torchrec_does(own: bool | None, fused: bool | None) -> None:
    sharder = EmbeddingBagCollectionSharder(fused_params=None if fused is None else {"prefetch_pipeline": fused})
    constraint = {} if own is None else {"cache_params": CacheParams(prefetch_pipeline=own)}
    (workload,), found = read(bag_model(), sharder, device="cuda", **CACHED, **constraint)
    expected = bool(fused) if own is None else own
    assert workload.prefetched == expected
    assert float(found.problem.features_PF[0, FEATURE_INDEX["cache_prefetched"]]) == expected


@pytest.mark.parametrize(
    ("optimizer", "values_per_row"),
    [
        (torch.optim.SGD, 32),
        (RowWiseAdagrad, 32 + 1),
        (torch.optim.Adagrad, 2 * 32),
        (torch.optim.Adam, 3 * 32),
        (PartialRowWiseAdam, 2 * 32 + 1),
    ],
)
def test_weights_and_all_states_are_averaged_with_replicas(optimizer: type, values_per_row: int) -> None:
    """A row has 32 weights, and the states of its optimizer, each of 4 bytes."""
    model = bag_model()
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    kinds = {"sharding_types": ["table_wise"], "compute_kernels": ["fused"]}
    _, found = read(model, EmbeddingBagCollectionSharder(), None, "cuda", **kinds)
    assert [part.synced_bytes for part in found.parts] == [ROWS * values_per_row * 4]
