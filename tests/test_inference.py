# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Quantized modules: planned alone and beside trained ones, sharded and run by TorchRec on CPUs with the outputs of the
unsharded model."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import SHARDERS, collection, planned, planner, table, topology
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import PlannerError
from torchrec.inference import dlrm_predict
from torchrec.inference.modules import DEFAULT_SHARDERS, quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.quant.embedding_modules import quant_prep_enable_quant_state_dict_split_scale_bias_for_types
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.errors import PlanError
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search_space.sharding_types import CW, RW, TW

pytestmark = pytest.mark.filterwarnings("ignore")
META = torch.device("meta")


class Model(nn.Module):
    """Four pooled tables and two sequences, quantized to 8 and to 4 bits, scales apart from weights."""

    def __init__(self, pooling: PoolingType = PoolingType.SUM, split: bool = True) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection([table(f"t{i}", 100, 64, pooling=pooling) for i in range(4)])
        self.sequences = EmbeddingCollection(
            [EmbeddingConfig(100, 64, name=f"s{i}", feature_names=[f"s{i}_f0"]) for i in range(2)]
        )
        if split:
            quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
                self, [EmbeddingBagCollection, EmbeddingCollection]
            )
        quantize_inference_model(self, per_table_weight_dtype={"t1": torch.quint4x2, "s1": torch.quint4x2})

    def forward(self, pooled: KeyedJaggedTensor, sequences: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        embeddings = self.sequences(sequences)
        return {**self.bags(pooled).to_dict(), **{name: one.values() for name, one in embeddings.items()}}


@pytest.fixture
def on_cpus() -> Iterator[None]:
    """Propagate devices, as TorchRec's inference example does: else quantized lookups always ask for CUDA."""
    set_propogate_device(True)
    yield
    set_propogate_device(False)


def inputs(features: list[str], seed: int) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 5, (8 * len(features),), generator=(generator := torch.Generator().manual_seed(seed)))
    return KeyedJaggedTensor(features, torch.randint(0, 100, (int(lengths.sum()),), generator=generator), None, lengths)


def raw(weights: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The bytes of weights, and how many weights are in one."""
    return (weights.view(torch.uint8), weights.N) if hasattr(weights, "elem") else (weights, 1)


def copy_weights(quantized: nn.Module, sharded: nn.Module) -> None:
    """Weights, scales and biases of the unsharded model to every shard; scales of column slices are copies."""
    whole = quantized.state_dict()
    for name, tensor in sharded.state_dict().items():
        if name not in whole or ".tbes." in name:
            continue
        if isinstance(tensor, list):
            for one in tensor:
                one.copy_(whole[name])
            continue
        shards = (
            [(one.tensor, *one.metadata.shard_offsets, *one.metadata.shard_sizes) for one in tensor.local_shards()]
            if isinstance(tensor, ShardedTensor)
            else [(tensor, 0, 0, *tensor.shape)]
        )
        (source, packed) = raw(whole[name])
        for shard, row, column, rows, columns in shards:
            raw(shard)[0].copy_(source[row : row + rows, column // packed : (column + columns) // packed])


@pytest.mark.parametrize("pooled, sequence", [(TW, TW), (RW, RW), (CW, TW)])
@pytest.mark.usefixtures("on_cpus")
def test_a_sharded_model_computes_what_the_quantized_one_does(pooled: str, sequence: str) -> None:
    model = Model().eval()
    constraints = {
        name: ParameterConstraints(sharding_types=[sequence if name.startswith("s") else pooled], min_partition=32)
        for name in ("t0", "t1", "t2", "t3", "s0", "s1")
    }
    made = planner(batch_size=8, constraints=constraints)
    plan = made.plan(model, DEFAULT_SHARDERS)
    kinds = {name: one.sharding_type for module in plan.plan.values() for name, one in module.items()}
    assert kinds == {name: constraint.sharding_types[0] for name, constraint in constraints.items()}
    sharded, _ = shard_quant_model(copy.deepcopy(model), world_size=2, sharding_device="cpu", sharding_plan=plan)
    copy_weights(model, sharded)
    arguments = inputs([f"t{i}_f0" for i in range(4)], 1), inputs(["s0_f0", "s1_f0"], 2)
    with torch.no_grad():
        expected, found = model(*arguments), sharded(*arguments)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
    assert made.report().chosen.backward_ms == (0.0, 0.0)


@pytest.mark.usefixtures("on_cpus")
def test_torchrecs_own_example_with_this_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized DLRM, planned, sharded, traced, scripted and run by TorchRec's predict factory."""
    planners = []

    def ours(**arguments: object) -> DreamShardPlanner:
        planners.append(DreamShardPlanner(**arguments))
        return planners[-1]

    monkeypatch.setattr("torchrec.distributed.planner.EmbeddingShardingPlanner", ours)
    features = ["a", "b", "c"]
    batch = type("Batch", (), {"dense_features": torch.rand(8, 13), "sparse_features": inputs(features, 3)})
    config = dlrm_predict.DLRMModelConfig([32, 16], 13, 16, features, [100] * 3, None, [32, 1], batch)
    module = dlrm_predict.DLRMPredictFactory(config).create_predict_module(world_size=1, device="cpu")
    values = {"float_features": batch.dense_features}
    values |= {"id_list_features.lengths": batch.sparse_features.lengths()}
    values |= {"id_list_features.values": batch.sparse_features.values()}
    assert module(values)["default"].shape == (8,)
    assert {table.kernel for table in planners[0].report().tables} == {"quant"}


def plan_of(module: nn.Module, device: str = "cpu", sharders=DEFAULT_SHARDERS, **arguments) -> DreamShardPlanner:
    arguments = {"cost_source": "roofline", "batch_size": 512, "topology": topology(device=device)} | arguments
    return planned(nn.ModuleDict({"m": module}), sharders, **arguments)


def bags(data_type: DataType, **arguments) -> QuantEmbeddingBagCollection:
    config = EmbeddingBagConfig(10**6, 128, "t", data_type=data_type, feature_names=["f"], **arguments)
    return QuantEmbeddingBagCollection([config], False, META, quant_state_dict_split_scale_bias=True)


def test_fewer_bits_are_read_faster_and_nothing_goes_backward() -> None:
    many = TableStatistics({"f": FeatureStatistics(50.0)})
    costs = {}
    for bits in (DataType.INT2, DataType.INT4, DataType.INT8, DataType.FP16):
        chosen = plan_of(bags(bits), "cuda", statistics=many).report().chosen
        assert chosen.backward_ms == (0.0, 0.0)
        costs[bits] = chosen.total_ms
    assert sorted(costs, key=costs.get) == list(costs)
    many = TableStatistics({"t_f0": FeatureStatistics(50.0)})
    trained = plan_of(collection(table("t", 10**6, 128)), "cuda", SHARDERS, statistics=many).report().chosen
    assert min(trained.forward_ms) > 0 and max(trained.backward_ms) > 0


def test_all_ranks_serve_one_batch_together() -> None:
    """Twice the ranks do not look up twice as much, as they do in training."""
    workload = {}
    for ranks in (2, 8):
        made = plan_of(bags(DataType.INT8), topology=topology(ranks), cost_source="auto", sharding_types=[TW])
        (workload[ranks],) = made._loop.model.rater.read(made.options[:1]).workload_P
    assert workload[2] == workload[8] and workload[2].lookups == 512


def test_what_torchrec_would_not_run_is_refused_and_says_why() -> None:
    """Its planner plans all of these; sharded, the first asserts, the second returns other columns, the third sums of
    means, and the fourth does not exist."""
    config = EmbeddingBagConfig(1000, 64, "t", data_type=DataType.INT8, feature_names=["f"])
    rows_with_scales = QuantEmbeddingBagCollection([config], False, META)
    of_sequences = EmbeddingConfig(1000, 64, "t", data_type=DataType.INT8, feature_names=["f"])
    sequences = QuantEmbeddingCollection([of_sequences], META, quant_state_dict_split_scale_bias=True)
    cases = [
        (rows_with_scales, RW, [type(DEFAULT_SHARDERS[0])()], "scales lie apart from weights"),
        (rows_with_scales, CW, DEFAULT_SHARDERS, "its columns are bytes"),
        (bags(DataType.INT8, pooling=PoolingType.MEAN), RW, DEFAULT_SHARDERS, "adds up the means"),
        (sequences, CW, DEFAULT_SHARDERS, "no such sharding of quantized sequences on CPUs"),
    ]
    for module, kind, sharders, reason in cases:
        constraints = {"t": ParameterConstraints(sharding_types=[kind], min_partition=32)}
        with pytest.raises(PlannerError, match=f"no sharding type is left for table 'm.t' .*{reason}"):
            plan_of(module, sharders=sharders, constraints=constraints)


def test_a_report_tells_served_tables_from_trained_ones(tmp_path: Path) -> None:
    model = nn.ModuleDict({"served": bags(DataType.INT8), "trained": collection(table("u", 1000, 64))})
    made = planned(model, [*DEFAULT_SHARDERS, *SHARDERS])
    made.save_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="'served.t' is quantized"):
        job_of(SavedPlan.load(tmp_path / "plan.json"))
    text = str(made.report())
    assert "the model has quantized tables" in text and "nothing was measured" in text
    assert "costs were" not in text  # of the network, which is not in use
    assert {table.kernel for table in made.report().tables} == {"quant", "fused"}
