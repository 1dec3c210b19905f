# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Quantized modules: planned alone and beside trained ones, never dearer than TorchRec's by its own estimates of
inference, sharded and run by TorchRec on CPUs with the outputs of the unsharded model.

``pytest tests/test_inference.py --models 2000`` plans 100 random models.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
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
from dreamshard_planner.search.reshards import ShardingState
from dreamshard_planner.search_space.sharding_types import CW, RW, TW
from dreamshard_planner.search_space.usable_options import usable_options

pytestmark = pytest.mark.filterwarnings("ignore")
META = torch.device("meta")
BLOCK = 5
"""Random models in one test."""
NO_RESERVATION = FixedPercentageStorageReservation(percentage=0.0)


class Model(nn.Module):
    """Four pooled tables and two sequences, quantized to 8 and to 4 bits, scales apart from weights."""

    def __init__(self, pooling: PoolingType = PoolingType.SUM, split: bool = True) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=100, embedding_dim=64, name=f"t{i}", feature_names=[f"f{i}"], pooling=pooling
                )
                for i in range(4)
            ]
        )
        self.sequences = EmbeddingCollection(
            tables=[
                EmbeddingConfig(num_embeddings=100, embedding_dim=64, name=f"s{i}", feature_names=[f"g{i}"])
                for i in range(2)
            ]
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
    """Eight samples."""
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
    topology = Topology(world_size=2, compute_device="cpu")
    planner = DreamShardPlanner(topology=topology, batch_size=8, constraints=constraints)
    plan = planner.plan(model, DEFAULT_SHARDERS)
    kinds = {name: one.sharding_type for module in plan.plan.values() for name, one in module.items()}
    assert kinds == {name: constraint.sharding_types[0] for name, constraint in constraints.items()}
    sharded, _ = shard_quant_model(copy.deepcopy(model), world_size=2, sharding_device="cpu", sharding_plan=plan)
    copy_weights(model, sharded)
    arguments = inputs([f"f{i}" for i in range(4)], 1), inputs(["g0", "g1"], 2)
    with torch.no_grad():
        expected, found = model(*arguments), sharded(*arguments)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
    assert planner.report().chosen.backward_ms == (0.0, 0.0)


@pytest.mark.usefixtures("on_cpus")
def test_torchrecs_own_example_with_this_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized DLRM, planned, sharded, traced, scripted and run by TorchRec's predict factory."""
    planners = []

    def planner(**arguments: object) -> DreamShardPlanner:
        planners.append(DreamShardPlanner(**arguments))
        return planners[-1]

    monkeypatch.setattr("torchrec.distributed.planner.EmbeddingShardingPlanner", planner)
    features = ["a", "b", "c"]
    batch = type("Batch", (), {"dense_features": torch.rand(8, 13), "sparse_features": inputs(features, 3)})
    config = dlrm_predict.DLRMModelConfig([32, 16], 13, 16, features, [100] * 3, None, [32, 1], batch)
    module = dlrm_predict.DLRMPredictFactory(config).create_predict_module(world_size=1, device="cpu")
    values = {"float_features": batch.dense_features}
    values |= {"id_list_features.lengths": batch.sparse_features.lengths()}
    values |= {"id_list_features.values": batch.sparse_features.values()}
    assert module(values)["default"].shape == (8,)
    assert {table.kernel for table in planners[0].report().tables} == {"quant"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        models = metafunc.config.getoption("models") // 20
        blocks = [range(first, min(first + BLOCK, models)) for first in range(0, models, BLOCK)]
        metafunc.parametrize("seeds", blocks, ids=[f"{seeds[0]}-{seeds[-1]}" for seeds in blocks])


def test_random_quantized_models(seeds: range) -> None:
    """A plan wherever TorchRec finds one that it can run, and never dearer by its estimates; alone and beside trained
    modules."""
    for seed in seeds:
        rng = random.Random(seed)
        model, topology, constraints, statistics = random_model(rng)
        sharders = [*DEFAULT_SHARDERS, EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        common = {"topology": topology, "batch_size": 64, "storage_reservation": NO_RESERVATION, "debug": False}
        cost_source = rng.choice(["auto", "torchrec"])
        ours = DreamShardPlanner(**common, constraints=constraints, statistics=statistics, cost_source=cost_source)
        try:
            ours.plan(model, sharders)
        except PlannerError as error:
            assert "no sharding type is left" in str(error) or "Tables do not fit" in str(error), (seed, error)
            allowed = ours._constraints if "Tables do not fit" in str(error) else None
            assert allowed is None or torchrec_plan(model, sharders, allowed, **common) is None, (seed, str(error))
            continue
        theirs = torchrec_plan(model, sharders, ours._constraints, **common)
        if theirs is None:
            continue
        assert ours.predict(ours.options).total_ms <= ours.predict(theirs).total_ms * (1 + 1e-5), seed
        if cost_source == "torchrec":
            assert ours._perf_model.rate(ours.options) <= ours._perf_model.rate(theirs) * (1 + 1e-5), seed
        for option in ours.options:
            if option.compute_kernel.startswith("quant"):
                assert all(shard.perf.bwd_compute + shard.perf.bwd_comms == 0 for shard in option.shards), seed


def torchrec_plan(model, sharders, constraints, **common):
    """Return the plan of TorchRec's planner, by its estimates of inference if all modules are quantized."""
    topology = common["topology"]
    served = not any(type(module) in (EmbeddingBagCollection, EmbeddingCollection) for module in model.modules())
    perf = EmbeddingPerfEstimator(topology=topology, constraints=constraints, is_inference=served)
    storage = EmbeddingStorageEstimator(topology=topology, constraints=constraints)
    enumerator = EmbeddingEnumerator(topology, 64, constraints, [perf, storage])
    proposers = [GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer()]  # a grid would take minutes
    planner = EmbeddingShardingPlanner(
        **common, constraints=constraints, enumerator=enumerator, proposer=proposers, stats=[]
    )
    try:
        planner.plan(model, sharders)
    except PlannerError:
        return None
    return planner._best_plan


def random_model(
    rng: random.Random,
) -> tuple[nn.Module, Topology, dict[str, ParameterConstraints], TableStatistics | None]:
    """1 to 20 tables of 2 to 32 bits in up to three modules, one of which may be trained, on 2 to 8 ranks."""
    device, ranks = rng.choice(["cpu", "cuda", "cuda"]), rng.choice([2, 2, 4, 8])
    model, size, constraints, features = nn.Module(), 0, {}, {}
    for index, kind in enumerate(rng.choices(["bags", "bags", "sequences", "trained"], k=rng.choice([1, 1, 2, 3]))):
        width, own = rng.choice([16, 64, 128]), []
        config = EmbeddingConfig if kind == "sequences" else EmbeddingBagConfig
        for number in range(rng.choice([1, 3, 7])):
            name = f"t{index}_{number}"
            rows, dim = int(10 ** rng.uniform(2, 6)), width if kind == "sequences" else rng.choice([16, 32, 64, 256])
            bits = rng.choice([DataType.INT8, DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16])
            bits = DataType.FP32 if kind == "trained" else bits
            pooling = {} if kind == "sequences" else {"pooling": rng.choice([PoolingType.SUM, PoolingType.MEAN])}
            own.append(config(rows, dim, name, data_type=bits, feature_names=[f"{name}_f"], **pooling))
            size += rows * dim * (4 if kind == "trained" else 1)
            if rng.random() < 0.3:
                features[f"{name}_f"] = FeatureStatistics(10 ** rng.uniform(-1, 2))
            if rng.random() < 0.3:
                types = rng.choice([None, [TW], [RW, TW], [CW, TW], [RW]])
                constraints[name] = ParameterConstraints(sharding_types=types, min_partition=rng.choice([None, 16]))
        if kind == "trained":
            module = EmbeddingBagCollection(own, device=META)
        elif kind == "bags":
            split = rng.random() < 0.7
            module = QuantEmbeddingBagCollection(own, False, META, quant_state_dict_split_scale_bias=split)
        else:
            module = QuantEmbeddingCollection(own, META, quant_state_dict_split_scale_bias=rng.random() < 0.7)
        setattr(model, f"m{index}", module)
    memory = 2**36 if rng.random() < 0.5 else int(size / ranks * rng.uniform(0.5, 3)) + 2**21
    topology = Topology(world_size=ranks, compute_device=device, hbm_cap=memory, ddr_cap=memory)
    return model, topology, constraints, TableStatistics(features) if features else None


def plan_of(module: nn.Module, device: str = "cpu", sharders=DEFAULT_SHARDERS, **arguments):
    """Plan by bandwidths, on two ranks."""
    arguments = {"cost_source": "roofline", "batch_size": 512} | arguments
    planner = DreamShardPlanner(topology=Topology(world_size=2, compute_device=device), debug=False, **arguments)
    planner.plan(nn.ModuleDict({"m": module}), sharders)
    return planner


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
    trained = EmbeddingBagCollection([EmbeddingBagConfig(10**6, 128, "t", feature_names=["f"])], device=META)
    trained = plan_of(trained, "cuda", [EmbeddingBagCollectionSharder()], statistics=many).report().chosen
    assert min(trained.forward_ms) > 0 and max(trained.backward_ms) > 0


def test_all_ranks_serve_one_batch_together() -> None:
    """Twice the ranks do not look up twice as much, as they do in training."""
    workload = {}
    for ranks in (2, 8):
        planner = DreamShardPlanner(
            topology=Topology(world_size=ranks, compute_device="cpu"), batch_size=512, sharding_types=[TW]
        )
        planner.plan(nn.ModuleDict({"m": bags(DataType.INT8)}), DEFAULT_SHARDERS)
        (workload[ranks],) = planner._loop.model.context.read(planner.options[:1]).workload_P
    assert workload[2] == workload[8] and workload[2].lookups == 512


def test_what_torchrec_would_not_run_is_refused_and_says_why() -> None:
    """Its planner plans all of these; sharded, the first asserts, the second returns other columns, the third sums of
    means, and the fourth does not exist."""
    config = EmbeddingBagConfig(1000, 64, "t", data_type=DataType.INT8, feature_names=["f"])
    rows_with_scales = QuantEmbeddingBagCollection([config], False, META)
    sequences = EmbeddingConfig(1000, 64, "t", data_type=DataType.INT8, feature_names=["f"])
    cases = [
        (rows_with_scales, RW, [type(DEFAULT_SHARDERS[0])()], "scales lie apart from weights"),
        (rows_with_scales, CW, DEFAULT_SHARDERS, "its columns are bytes"),
        (bags(DataType.INT8, pooling=PoolingType.MEAN), RW, DEFAULT_SHARDERS, "adds up the means"),
        (
            QuantEmbeddingCollection([sequences], META, quant_state_dict_split_scale_bias=True),
            CW,
            DEFAULT_SHARDERS,
            "no such sharding of quantized sequences on CPUs",
        ),
    ]
    for module, kind, sharders, reason in cases:
        constraints = {"t": ParameterConstraints(sharding_types=[kind], min_partition=32)}
        with pytest.raises(PlannerError, match=f"no sharding type is left for table 'm.t' .*{reason}"):
            plan_of(module, sharders=sharders, constraints=constraints)


def test_a_report_tells_served_tables_from_trained_ones(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {
            "served": bags(DataType.INT8),
            "trained": EmbeddingBagCollection([EmbeddingBagConfig(1000, 64, "u", feature_names=["g"])], device=META),
        }
    )
    planner = DreamShardPlanner(topology=Topology(world_size=2, compute_device="cpu"), batch_size=64, debug=False)
    planner.plan(model, [*DEFAULT_SHARDERS, EmbeddingBagCollectionSharder()])
    planner.save_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="'served.t' is quantized"):
        job_of(SavedPlan.load(tmp_path / "plan.json"))
    text = str(planner.report())
    assert "the model has quantized tables" in text and "nothing was measured" in text
    assert "costs were" not in text  # of the network, which is not in use
    assert {table.kernel for table in planner.report().tables} == {"quant", "fused"}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside trained tables"])
def test_the_search_reckons_as_the_formula_does(beside: bool) -> None:
    """Its sums leave a group where nothing is left of it, which the count of shards tells."""
    tables = [EmbeddingBagConfig(100_000 * (i + 1), 64, f"t{i}", feature_names=[f"f{i}"]) for i in range(4)]
    quantized = quantize_inference_model(nn.Sequential(EmbeddingBagCollection(tables)))
    model, sharders = nn.ModuleDict({"served": quantized}), [*DEFAULT_SHARDERS]
    if beside:
        trained = [EmbeddingBagConfig(50_000, 64, f"u{i}", feature_names=[f"g{i}"]) for i in range(2)]
        model["trained"] = EmbeddingBagCollection(trained, device=META)
        sharders.append(EmbeddingBagCollectionSharder())
    planner = DreamShardPlanner(topology=Topology(2, "cpu"), batch_size=512, stats=[], debug=False)
    planner.plan(model, sharders)
    assert planner.report().cost_source.startswith("roofline")
    built = planner._model()
    read = built.context.read(usable_options(built.search_space, "cpu"), built.left)
    cost = built.context.cost(read)
    sharding = read.sharding(planner.options)
    state = ShardingState(cost, sharding, 1.0)
    for table, options in enumerate(read.problem.tables):
        tried = state.tried([(table, option) for option in range(len(options))])
        expected = [cost.overall_ms(sharding.changed(*changes[0])) for changes in tried.changes]
        assert tried.overall_Q.tolist() == pytest.approx([ms * 1e5 for ms in expected], abs=1)
