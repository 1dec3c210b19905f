# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's options and modules as tables, workloads and fused groups."""

import pytest
import torch
from small_models import SHARDERS, collection, output_bytes_P, planned, planner, sequences, table, topology
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.cost.collectives import CPU_BAG_BYTES
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.constraints import AllowedTypes, planning_constraints
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.workload.tables import FEATURE_INDEX

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


def workloads_and_problem(model: nn.Module, sharders, constraints=None):
    expanded = planning_constraints(shardable_tables(model, sharders), constraints, WHOLE_ALONE)
    options = EmbeddingEnumerator(topology(), batch_size=64, constraints=expanded).enumerate(model, sharders)
    rater = PlanRater(PlannedRanks.of(topology()), OptionReader(expanded, None, sharders))
    return rater.reader.workloads(options, topology()), rater.read(options).problem


def test_feature_processors_make_lookups_weighted() -> None:
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.modules.feature_processor_ import PositionWeightedModule
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    processors = {"t0_f0": PositionWeightedModule(max_feature_length=8)}
    around = FeatureProcessedEmbeddingBagCollection(collection(table("t0"), weighted=True), processors)
    model = nn.ModuleDict({"sparse": around})
    workloads, _ = workloads_and_problem(model, [FeatureProcessedEmbeddingBagCollectionSharder()])
    assert [workload.weighted for workload in workloads] == [True]


def test_bytes_on_the_wire_are_what_is_sent() -> None:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    model = nn.ModuleDict({"sparse": collection(table("t0"))})

    def output_bytes(sharders, **constraint) -> float:
        _, problem = workloads_and_problem(model, sharders, {"t0": ParameterConstraints(**constraint)})
        return float(output_bytes_P(problem))

    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    quantized = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    )
    assert output_bytes(SHARDERS) == 64 * 16 * 4
    assert output_bytes(SHARDERS, output_dtype=DataType.FP16) == 64 * 16 * 2
    assert output_bytes([quantized]) == 64 * 16 * 2
    for half in (SparseType.FP16, DataType.FP16):
        assert output_bytes([EmbeddingBagCollectionSharder(fused_params={"output_dtype": half})]) == 64 * 16 * 2
