# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's options and modules as tables, workloads and fused groups; work of the shards of sequence tables and of
cached tables.

Shapes: P parts, N indices.
"""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from small_models import SHARDERS, collection, output_bytes_P, planned, planner, sequences, table, topology
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, set_ec_index_dedup
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim import PartialRowWiseAdam, RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.cost.collectives import CPU_BAG_BYTES
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.constraints import AllowedTypes, planning_constraints
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.workload.tables import FEATURE_INDEX, Workload

WHOLE_ALONE = AllowedTypes(topology(1), ("table_wise",))


def test_pooling_factors_come_from_statistics_then_constraints_then_torchrec() -> None:
    tables = table("a", features=3), table("b", features=2), table("c")
    model = nn.ModuleDict({"sparse": collection(*tables)})
    given = {"a": ParameterConstraints(pooling_factors=[2.0, 3.0, 4.0]), "b": ParameterConstraints()}
    statistics = TableStatistics({"a_f1": FeatureStatistics(30.0), "c_f0": FeatureStatistics(0.0)})
    expanded = planning_constraints(shardable_tables(model, SHARDERS, statistics), given, WHOLE_ALONE)
    assert expanded["a"].pooling_factors == [2.0, 30.0, 4.0]
    assert expanded["b"].pooling_factors == [1.0, 1.0]
    assert expanded["c"].pooling_factors == [0.0]
    assert all(constraint.sharding_types == ["table_wise"] for constraint in expanded.values())
    assert given["a"].pooling_factors == [2.0, 3.0, 4.0] and given["a"].sharding_types is None  # copies


@pytest.mark.parametrize(
    ("given", "expected"),
    [([2.0, 3.0, 4.0], {"a.t": [2.0, 3.0, 4.0], "b.t": [7.0]}), ([5.0], {"a.t": [5.0, 5.0, 5.0], "b.t": [7.0]})],
)
def test_tables_of_one_name_may_have_other_features(given: list[float], expected: dict) -> None:
    other = EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["x"])
    model = nn.ModuleDict({"a": collection(table("t", features=3)), "b": collection(other)})
    lookups = {"t": ParameterConstraints(pooling_factors=given)}
    made = planned(model, constraints=lookups, statistics=TableStatistics({"x": FeatureStatistics(7.0)}))
    assert {option.fqn: option.input_lengths for option in made.options} == expected
    for what, values in (("pooling_factors", [1.0, 2.0]), ("num_poolings", [2.0]), ("batch_sizes", [8, 8, 8])):
        constraints = {"t": ParameterConstraints(**{what: values})}
        with pytest.raises(PlannerError, match=r"tables \['a.t', 'b.t'\] have one name and \[1, 3\] features.*" + what):
            planner(constraints=constraints).plan(model, SHARDERS)


def test_tables_of_one_name_share_their_sharding_types() -> None:
    """TorchRec takes an empty list for no constraint."""
    model = nn.ModuleDict({"a": collection(table("t")), "b": sequences(table("t", 50, 8))})
    sharders = [*SHARDERS, EmbeddingCollectionSharder()]
    rules = {"t": ParameterConstraints(sharding_types=["table_column_wise", "row_wise"])}  # one for each
    with pytest.raises(PlannerError, match="no sharding type is left for table 'a.t' and 'b.t'") as caught:
        planning_constraints(shardable_tables(model, sharders), rules, AllowedTypes(topology()))
    assert "row_wise" in str(caught.value) and "table_column_wise" in str(caught.value)


def test_options_become_workloads() -> None:
    plain = table("a", features=2), table("b", data_type=DataType.FP16), table("c", pooling=PoolingType.MEAN)
    model = nn.ModuleDict({"plain": collection(*plain), "weighted": collection(table("d", dim=32), weighted=True)})
    constraints = {"a": ParameterConstraints(pooling_factors=[2.0, 3.0], num_poolings=[1.0, 3.0], batch_sizes=[64, 16])}
    expanded = planning_constraints(shardable_tables(model, SHARDERS), constraints, WHOLE_ALONE)
    options = EmbeddingEnumerator(topology(4), batch_size=64, constraints=expanded).enumerate(model, SHARDERS)
    reader = OptionReader(expanded, None, SHARDERS)
    by_name = {workload.name: workload for workload in reader.workloads(options, topology(4))}
    shared = by_name["plain.a"]
    assert shared.batch_size == 4 * 64 and shared.num_features == 2
    # The second feature has a quarter of the batch and three poolings per sample.
    assert shared.lookups == pytest.approx(4 * 64 * (2.0 + 0.75 * 3.0))
    assert shared.output_elements == pytest.approx(4 * 64 * 1.75 * 16)
    assert by_name["plain.b"].weight_bytes == 2 and by_name["plain.a"].weight_bytes == 4
    assert by_name["weighted.d"].weighted and not shared.weighted
    problem = PlanRater(PlannedRanks.of(topology(4)), reader).read(options).problem
    group = dict(zip(problem.names, problem.group_P.tolist(), strict=True))
    # Precision, pooling and weightedness each make a kernel of their own.
    assert problem.num_groups == 4 and len(set(group.values())) == 4
    row = problem.features_PF[problem.names.index("weighted.d")]
    assert row[FEATURE_INDEX["dim"]] == 32 and row[FEATURE_INDEX["weighted"]] == 1
    # One rank's batch of pooled vectors of 16 floats.
    assert output_bytes_P(problem)[problem.names.index("plain.a")] == 64 * 1.75 * 16 * 4
    # An all-to-all for each module, and one of its lookups.
    expected = [f"{path} table_wise {name}" for path in ("weighted", "plain") for name in ("all-to-all", "lookups")]
    assert [collective.name for collective in problem.collectives.collectives] == expected
    # How many lookups they are, lengths, ids, and weights, one exchange after the other.
    weighted, plain = (problem.collectives.collectives[index].forward.latency_ms for index in (1, 3))
    assert weighted == pytest.approx(plain * 4 / 3)
    # Ids, weights where there are any, and for each pooled vector a length, and what putting it in order takes.
    bag = 4 + CPU_BAG_BYTES
    assert problem.bytes_PC[problem.names.index("weighted.d"), 1] == 64 * (1 * (8 + 4) + bag)
    assert problem.bytes_PC[problem.names.index("plain.a"), 3] == 64 * ((2.0 + 0.75 * 3.0) * 8 + 1.75 * bag)


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


def bag_model(optimizer: type | None = None) -> nn.Module:
    return nn.ModuleDict({"sparse": collection(table("t", ROWS, DIM), optimizer=optimizer)})


CACHED = {"sharding_types": ["table_wise"], "compute_kernels": ["fused_uvm_caching"], "pooling_factors": [30.0]}


def test_load_factors_of_options_and_sharders_decide_what_misses() -> None:
    def misses(sharder: EmbeddingBagCollectionSharder, **constraint) -> tuple[float, float]:
        (workload,), found = read(bag_model(), sharder, device="cuda", **CACHED, **constraint)
        row_F = found.problem.features_PF[0]
        assert row_F[FEATURE_INDEX["uvm_caching"]] == 1
        return workload.cache_load_factor, float(row_F[FEATURE_INDEX["cache_misses"]])

    half = EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.5})
    default, fused = misses(EmbeddingBagCollectionSharder()), misses(half)
    own = misses(half, cache_params=CacheParams(load_factor=0.9))
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
    model = bag_model(optimizer)
    kinds = {"sharding_types": ["table_wise"], "compute_kernels": ["fused"]}
    _, found = read(model, EmbeddingBagCollectionSharder(), None, "cuda", **kinds)
    assert [part.synced_bytes for part in found.parts] == [ROWS * values_per_row * 4]


def test_feature_processors_make_lookups_weighted() -> None:
    processors = {"t_f0": PositionWeightedModule(max_feature_length=8)}
    around = FeatureProcessedEmbeddingBagCollection(collection(table("t"), weighted=True), processors)
    model, sharder = nn.ModuleDict({"sparse": around}), FeatureProcessedEmbeddingBagCollectionSharder()
    workloads, _ = read(model, sharder, sharding_types=["table_wise"], compute_kernels=["fused"])
    assert [workload.weighted for workload in workloads] == [True]


def test_bytes_on_the_wire_are_what_is_sent() -> None:
    def output_bytes(sharder: EmbeddingBagCollectionSharder, **constraint) -> float:
        _, found = read(bag_model(), sharder, sharding_types=["table_wise"], compute_kernels=["fused"], **constraint)
        return float(output_bytes_P(found.problem))

    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    assert output_bytes(*SHARDERS) == SAMPLES * DIM * 4
    assert output_bytes(*SHARDERS, output_dtype=DataType.FP16) == SAMPLES * DIM * 2
    halves = [EmbeddingBagCollectionSharder({"output_dtype": half}) for half in (SparseType.FP16, DataType.FP16)]
    for sharder in (EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs), *halves):
        assert output_bytes(sharder) == SAMPLES * DIM * 2
