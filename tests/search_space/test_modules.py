# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Facts of tables from TorchRec's modules and sharders, and models around them that are hard to copy."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from small_models import SHARDERS, collection, managed, planned, planner, sequences, table, topology
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule

from dreamshard_planner.search_space.modules import TableModule, doubtful_tables, shardable_tables, without_weights
from dreamshard_planner.search_space.sharding_types import CPU_OPTIMIZERS, CPU_OUTPUTS, CPU_WEIGHTS
from dreamshard_planner.torchrec_components.compat import sharder_of_tables
from tests.counted import counted


def test_a_copy_without_weights_counts_as_the_model_does() -> None:
    """Parameters that layers share count once; modules that are sharded keep their types."""
    model = nn.Sequential(collection(table("t")), nn.Linear(16, 16), nn.BatchNorm1d(16))
    model.extend([model[1], model[0]])
    bare = without_weights(model, SHARDERS)
    sparse, linear, _, again, shared = map(bare.get_submodule, "01234")
    assert type(sparse) is type(model[0]) and linear is again is not model[1] and sparse is shared is not model[0]
    for what in ("named_parameters", "named_buffers"):
        sizes = [{name: one.shape for name, one in getattr(of, what)()} for of in (model, bare)]
        assert sizes[0] == sizes[1]
    assert {parameter.device.type for parameter in bare.parameters()} == {"meta"}


def test_layers_without_a_size_are_planned_beside_tables() -> None:
    """They get it in the first forward (740)."""
    model = nn.ModuleDict({"sparse": collection(table("t")), "dense": nn.LazyLinear(4), "norm": nn.LazyBatchNorm1d()})
    assert dict(planned(model).saved_plan().tables()).keys() == {"sparse.t"}


ADAGRAD = EmbeddingBagCollectionSharder(
    fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    qcomm_codecs_registry=get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16)),
)


def test_sharders_around_a_sharder_are_read_as_it() -> None:
    """ITEP's do not show the optimizer that tables are trained with."""
    outer = ITEPEmbeddingBagCollectionSharder(ebc_sharder=ADAGRAD)
    assert sharder_of_tables(outer) is ADAGRAD and sharder_of_tables(ADAGRAD) is ADAGRAD
    inside = collection(table("t", 10_000, 256))
    model = nn.Sequential(ITEPEmbeddingBagCollection(inside, GenericITEPModule({"t": 20_000})))
    assert TableModule("0", model[0], outer).exchange_codecs is ADAGRAD.qcomm_codecs_registry
    made = planned(model, [outer], topology=topology(4, device="cuda"))
    (read,) = made.saved_plan().inputs.tables.values()
    assert read.optimizer == "exact_rowwise_adagrad"


def test_ids_that_itep_maps_to_rows_are_not_doubted() -> None:
    inside = collection(table("t", 10_000))
    statistics = counted({"t_f0": (torch.full((64,), 10), torch.arange(20_000)[-640:])}, 64)
    model = nn.Sequential(inside)
    doubts = doubtful_tables(shardable_tables(model, SHARDERS, statistics), "cuda")
    assert [doubt for doubt in doubts if "10,000 rows" in doubt]
    pruned = nn.Sequential(ITEPEmbeddingBagCollection(inside, GenericITEPModule({"t": 20_000})))
    tables = shardable_tables(pruned, [ITEPEmbeddingBagCollectionSharder()], statistics)
    assert doubtful_tables(tables, "cuda") == []


def managed_sequence(buckets: int = 2) -> nn.Module:
    return nn.Sequential(managed(sequences(table("t")), 1000, buckets))


@pytest.mark.parametrize("cost_source", ["auto", "torchrec"])
def test_kernels_of_gpus_are_not_planned_on_cpus(cost_source: str) -> None:
    """Sharders of managed collisions offer them there, and TorchRec's estimator knows none for CPUs."""
    statistics = counted({"t_f0": (torch.ones(64, dtype=torch.int64), torch.randint(10**9, (64,)))}, 64)
    made = planned(managed_sequence(), get_default_sharders(), statistics=statistics, cost_source=cost_source)
    assert [option.compute_kernel for option in made.options] == ["fused"]


class Offers(EmbeddingBagCollectionSharder):
    kernels: list[str]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return self.kernels


@pytest.mark.parametrize(
    ("kernels", "says"), [(["fused_uvm"], "kernels .*fused_uvm.* need GPUs"), ([], "no kernel on cpu")]
)
def test_a_sharder_without_a_kernel_for_the_device_is_named(kernels: list[str], says: str) -> None:
    sharder = Offers()
    sharder.kernels = kernels
    with pytest.raises(PlannerError, match=f"'t' cannot be sharded: Offers offers {says}"):
        planner().plan(collection(table("t")), [sharder])


def test_too_few_buckets_of_managed_collisions_are_refused_with_the_remedy() -> None:
    with pytest.raises(PlannerError, match=r"'t' has uneven buckets .* a multiple of the 2 ranks, such as buckets=2"):
        planner().plan(managed_sequence(buckets=1), get_default_sharders())


def test_embedding_modules_without_a_sharder_are_named_in_the_report() -> None:
    model = nn.ModuleDict(
        {"pooled": collection(table("t")), "positions": nn.Embedding(9, 4), "words": nn.Sequential(nn.Embedding(9, 4))}
    )
    made = planned(model)
    told = [note.text for note in made.report().notes if note.code == "unused"]
    assert told == ["2 embedding module(s) have no sharder and are not in the plan: 'positions', 'words.0'"]


def test_a_module_in_two_places_is_warned_of() -> None:
    model = nn.ModuleDict(
        {tower: nn.ModuleDict({"bags": shared}) for shared in [collection(table("t"))] for tower in "ab"}
    )
    (doubt,) = doubtful_tables(shardable_tables(model, SHARDERS), "cuda")
    assert doubt.startswith("table 'a.bags.t' is also in 'b.bags', the same module, which TorchRec shards once")


def test_features_without_names_are_told_by_their_table() -> None:
    model = nn.ModuleDict({"one": nn.EmbeddingBag(100, 16, mode="sum", device="meta")})
    made = planned(model, [EmbeddingBagSharder()])
    (told,) = [note.text for note in made.report().notes if "one lookup per sample" in note.text]
    assert "1 of 1 features (of table 'one.weight')" in told


@pytest.mark.parametrize(
    "optimizer, data_type, says",
    [
        (torch.optim.Adam, DataType.FP32, "in-backward optimizer adam, and FBGEMM's CPU kernels have exact_sgd"),
        (torch.optim.SGD, DataType.BF16, "weights of bfloat16, and FBGEMM's CPU kernels train float32 and float16"),
        (torch.optim.Adagrad, DataType.FP16, None),
    ],
)
def test_tables_that_cpu_kernels_cannot_train_are_warned_of(
    optimizer: type, data_type: DataType, says: str | None
) -> None:
    model = collection(table("t", data_type=data_type), table("o", data_type=data_type), optimizer=optimizer)
    assert doubtful_tables(shardable_tables(model, SHARDERS), "cuda") == []
    doubts = doubtful_tables(shardable_tables(model, SHARDERS), "cpu")
    assert len(doubts) == (says is not None)
    assert all("table 't' (and 1 more) has" in doubt and str(says) in doubt for doubt in doubts)
    replicated = dict.fromkeys("to", ParameterConstraints(sharding_types=["data_parallel"]))
    doubts = doubtful_tables(shardable_tables(model, SHARDERS), "cpu", replicated)
    assert len(doubts) == (data_type is DataType.BF16)


def test_facts_on_cpu_kernels_are_those_of_this_fbgemm() -> None:
    def trains(**arguments: Any) -> bool:
        try:
            made = SplitTableBatchedEmbeddingBagsCodegen(
                [(8, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)], **arguments
            )
            made(torch.tensor([0, 1]), torch.tensor([0, 2])).sum().backward()
        except (AssertionError, NotImplementedError):
            return False
        return True

    assert {one.name.lower() for one in EmbOptimType if trains(optimizer=one)} == set(CPU_OPTIMIZERS)
    types = [one for one in SparseType if one in (SparseType.FP32, SparseType.FP16, SparseType.BF16)]
    trained = {str(one.as_dtype()).removeprefix("torch.") for one in types if trains(weights_precision=one)}
    assert trained == set(CPU_WEIGHTS)
    put_out = {str(one.as_dtype()).removeprefix("torch.") for one in types if trains(output_dtype=one)}
    assert put_out == set(CPU_OUTPUTS)


@pytest.mark.parametrize("by_sharder", [True, False])
def test_outputs_that_cpu_kernels_cannot_give_are_warned_of(by_sharder: bool) -> None:
    model = collection(table("t"))
    params = {"output_dtype": SparseType.BF16 if by_sharder else SparseType.FP16}
    sharders = [EmbeddingBagCollectionSharder(fused_params=params)]
    constraints = {} if by_sharder else {"t": ParameterConstraints(output_dtype=DataType.BF16)}
    assert doubtful_tables(shardable_tables(model, sharders), "cuda", constraints) == []
    (doubt,) = doubtful_tables(shardable_tables(model, sharders), "cpu", constraints)
    assert "table 't' has outputs of bfloat16, and FBGEMM's fused kernels on CPUs give float32 and float16" in doubt
