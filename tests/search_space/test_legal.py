# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Optimizers, mixtures and cuts that TorchRec or FBGEMM get wrong, and what replicas do: plans instead, and errors. The
tables of sharding types and of compute kernels: what TorchRec's own sharders say, and one more row."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from small_models import MB, SHARDERS, collection, planner, table, topology
from torch import nn
from torchrec import optim
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS, EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ModuleSharder,
    ParameterConstraints,
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import SGD, Adagrad, Adam
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, ShardingGroups, TableStatistics
from dreamshard_planner.planning.page import save_html
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search_space.constraints import AllowedTypes, planning_constraints
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.replica_rules import in_backward_arguments, why_not_replicas
from dreamshard_planner.search_space.sharding_types import (
    CW,
    DP,
    ELEMENTWISE_OPTIMIZERS,
    GRID,
    HALF_REPLICAS,
    KERNELS,
    LATE_MEANS,
    MIXED_MEAN,
    MOST_CUDA_COLUMNS,
    RW,
    SHARDING_TYPES,
    TWRW,
    VARIED_GRIDS,
    WEIGHTED_MEANS,
    Exchange,
    ShardingTypeSpec,
)
from dreamshard_planner.torchrec_components.compat import optimizer_name
from dreamshard_planner.workload.tables import MEMORIES


@pytest.mark.parametrize(
    ("optimizer", "name", "elementwise"),
    [
        (torch.optim.SGD, "exact_sgd", True),
        (optim.SGD, "exact_sgd", True),
        (optim.Adagrad, "exact_adagrad", True),
        (torch.optim.Adam, "adam", True),
        (optim.LAMB, "lamb", False),
        (optim.LarsSGD, "lars_sgd", False),
        (optim.PartialRowWiseAdam, "partial_rowwise_adam", False),
        (optim.PartialRowWiseLAMB, "partial_rowwise_lamb", False),
        (optim.RowWiseAdagrad, "exact_rowwise_adagrad", False),
        (torch.optim.RMSprop, "rmsprop", False),
    ],
)
def test_optimizers_have_fbgemms_names(optimizer: type, name: str, elementwise: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.1})
    assert optimizer_name(parameter, {"optimizer": EmbOptimType.ADAM}) == name
    assert (name in ELEMENTWISE_OPTIMIZERS) == elementwise


def test_optimizers_that_no_class_names_are_read_from_arguments() -> None:
    """An explicit kernel beats the class; without one of its own a table has the sharder's or FBGEMM's."""
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    assert optimizer_name(parameter, None) == "exact_sgd"
    assert optimizer_name(parameter, {"optimizer": EmbOptimType.EXACT_ADAGRAD}) == "exact_adagrad"
    kernel = EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD
    apply_optimizer_in_backward(optim.SGD, [parameter], {"lr": 0.1, "optimizer": kernel})
    assert optimizer_name(parameter, None) == "ensemble_rowwise_adagrad"


@pytest.mark.parametrize(("optimizer", "exact"), [(torch.optim.Adagrad, True), (optim.RowWiseAdagrad, False)])
def test_modules_that_bring_an_optimizer_train_with_it(optimizer: type, exact: bool) -> None:
    """Their tables have no mark of it; data-parallel does not take it away."""
    tables, sharders = [table("t", 100, 512)], [FusedEmbeddingBagCollectionSharder()]
    module = FusedEmbeddingBagCollection(tables, optimizer, {"lr": 0.1}, device=torch.device("meta"))
    known = planning_constraints(shardable_tables(module, sharders), None, AllowedTypes(topology(device="cuda")))
    assert ("column_wise" in known["t"].sharding_types) == exact
    named = {"t": ParameterConstraints(sharding_types=["data_parallel"])}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        planner(topology=topology(2, device="cuda"), constraints=named).plan(module, sharders)


class Only(EmbeddingBagCollectionSharder):
    """A user's sharder, which offers few types."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*self.kinds]


@pytest.mark.parametrize(
    ("sharder", "constraint", "kind"),
    [
        (EmbeddingBagCollectionSharder(), ParameterConstraints(compute_kernels=["dense"]), "data_parallel"),
        (Only("data_parallel"), None, "data_parallel"),
        (Only("column_wise"), None, "column_wise"),
    ],
    ids=["kernel", "replicated", "slices"],
)
def test_a_sharder_or_kernels_that_leave_nothing_else_are_consent(
    sharder: EmbeddingBagCollectionSharder, constraint: ParameterConstraints | None, kind: str
) -> None:
    module = collection(table("t", 1000, 512), optimizer=optim.RowWiseAdagrad)
    made = planner(topology=topology(2, device="cuda"), constraints=constraint and {"t": constraint})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the optimizer that data-parallel takes away
        plan = made.plan(module, [sharder])
    assert plan.plan[""]["t"].sharding_type == kind
    assert any("trains differently" in note.text for note in made.report().notes)
    for offers in (EmbeddingBagCollectionSharder(), Only("row_wise", kind)):  # an exact one, which the planner forbids
        with pytest.raises(PlannerError, match="'t'"):
            planner(topology=topology(2, device="cuda"), sharding_types=(kind,)).plan(module, [offers])


GPUS = topology(2, 2**36, "cuda")


@pytest.mark.parametrize("kinds", [None, [CW], [GRID]])
def test_gpus_train_no_shards_that_are_too_wide(kinds: list[str] | None) -> None:
    wide = {f"wide{dim}": table(f"wide{dim}", 1000, dim) for dim in (1024, 1536, 2048, 4096)}
    constraints = dict.fromkeys(wide, ParameterConstraints(sharding_types=kinds))
    model = collection(*wide.values(), table("small", 1000, 64), optimizer=SGD)
    for sharding in planner(topology=GPUS, constraints=constraints).plan(model, SHARDERS).plan[""].values():
        assert max(shard.shard_sizes[1] for shard in sharding.sharding_spec.shards) <= MOST_CUDA_COLUMNS


def test_a_wide_table_that_must_not_be_sliced_is_refused_on_gpus_with_a_way_out() -> None:
    model = collection(table("wide", 1000, 2048), optimizer=RowWiseAdagrad)
    on_cpus = planner(sharding_types=["table_wise"]).plan(model, SHARDERS).plan[""]
    assert on_cpus["wide"].sharding_type == "table_wise"  # CPUs train any width
    with pytest.raises(PlannerError, match=r"'wide'.*1,024 columns.*min_partition.*exact_training=False"):
        planner(topology=GPUS).plan(model, SHARDERS)
    made = planner(topology=GPUS, exact_training=False)
    assert made.plan(model, SHARDERS).plan[""]["wide"].sharding_type == CW
    wide = {"wide": ParameterConstraints(min_partition=2048)}
    with pytest.raises(PlannerError, match=r"'wide'.*1,024 columns"):
        planner(topology=GPUS, exact_training=False, constraints=wide).plan(model, SHARDERS)


def carried(weights: bool) -> TableStatistics:
    """Statistics of batches with weights or without."""
    lengths, ids = torch.ones(128, dtype=torch.int64), torch.arange(128)
    batch = KeyedJaggedTensor(["mean_f0", "sum_f0"], ids, torch.rand(128) if weights else None, lengths=lengths)
    return TableStatistics.merge([TableStatistics.from_batches([batch])] * 2)


@pytest.mark.parametrize("kind", [RW, TWRW])
def test_means_of_batches_with_weights_keep_out_of_blocks_of_rows(kind: str) -> None:
    model = collection(table("mean", 1000, 16, pooling=PoolingType.MEAN), table("sum", 1000, 16))
    told: list[dict[str, Any]] = [
        {"statistics": carried(True)},
        {"constraints": {"mean": ParameterConstraints(is_weighted=True)}},
    ]
    for settings in told:
        with pytest.raises(PlannerError, match=WEIGHTED_MEANS.text) as error:
            planner(topology=GPUS, sharding_types=[kind], **settings).plan(model, SHARDERS)
        assert "'mean'" in str(error.value)
    made = planner(topology=GPUS, sharding_types=[kind], statistics=carried(False))
    assert {one.sharding_type for one in made.plan(model, SHARDERS).plan[""].values()} == {kind}


def test_grid_takes_varied_batches_where_torchrec_does() -> None:
    model = collection(table("t", 1000, 256))
    named = {"t": ParameterConstraints(sharding_types=[GRID], batch_sizes=[32])}
    if hasattr(GridPooledEmbeddingDist, "_preprocess_batch_size_per_rank_per_feature"):
        assert planner(topology=GPUS, constraints=named).plan(model, SHARDERS).plan[""]["t"].sharding_type == GRID
        return
    with pytest.raises(PlannerError, match=VARIED_GRIDS.text[:40]):
        planner(topology=GPUS, constraints=named).plan(model, SHARDERS)
    varied = TableStatistics(
        {"t_f0": FeatureStatistics(1.0, batch_size=8), "u_f0": FeatureStatistics(1.0, batch_size=64)}
    )
    model = collection(table("t", 1000, 256), table("u", 1000, 256))
    with pytest.raises(PlannerError, match=VARIED_GRIDS.text[:40]):
        planner(topology=GPUS, sharding_types=[GRID], statistics=varied).plan(model, SHARDERS)


@pytest.mark.parametrize("half", [DataType.FP16, DataType.BF16])
def test_replicas_of_half_precision_say_why_they_are_left_out(half: DataType) -> None:
    model = collection(table("narrow", 1000, 16, data_type=half), optimizer=SGD)
    with pytest.raises(PlannerError) as error:
        planner(sharding_types=[DP], optimizers_attached=True).plan(model, SHARDERS)
    assert HALF_REPLICAS.text in str(error.value)


MEAN = PoolingType.MEAN
RANK_MB = 1024


def rows_of(megabytes: int) -> int:
    """Return the rows of a table with four columns."""
    return megabytes * MB // 16


def model(large_mb: int, **arguments) -> nn.Module:
    large = collection(table("large", rows_of(large_mb), 4, pooling=MEAN), table("small", 100, 4), **arguments)
    other = collection(table("mean", 100, 4, pooling=MEAN), table("sum", 100, 4))
    return nn.ModuleDict({"large": large, "other": other})


def types_of(plan) -> dict[str, str]:
    return {name: sharding.sharding_type for module in plan.plan.values() for name, sharding in module.items()}


def gpus(**arguments):
    return planner(topology=topology(2, RANK_MB * MB, "cuda"), **arguments)


def test_means_keep_out_of_rows_and_a_table_that_fits_there_alone_is_refused_until_its_constraint_asks() -> None:
    assert types_of(gpus().plan(model(400), SHARDERS))["large"] not in LATE_MEANS
    asks = r"\(sharding_types=\['row_wise'\] in its constraint puts all tables of the module in rows\)"
    with pytest.raises(PlannerError, match=f"'large.large' may not be .*row_wise, table_row_wise: {MIXED_MEAN} {asks}"):
        gpus().plan(model(1100), SHARDERS)
    rows = {"large": ParameterConstraints(sharding_types=["row_wise"])}
    types = types_of(gpus(constraints=rows).plan(model(1100), SHARDERS))
    assert types["large"] == "row_wise" and types["small"] in LATE_MEANS and types["mean"] not in LATE_MEANS


def test_the_table_is_named_that_keeps_a_module_out_of_rows() -> None:
    whole = {"small": ParameterConstraints(sharding_types=["table_wise"])}
    why = f"'large.large' may not be .*row_wise, table_row_wise: {MIXED_MEAN}, and table 'large.small' may be neither"
    with pytest.raises(PlannerError, match=why):
        gpus(constraints=whole).plan(model(1100), SHARDERS)
    with pytest.raises(PlannerError, match="'large.large' may not be .*: TorchRec divides weighted means by"):
        gpus().plan(model(1100, weighted=True), SHARDERS)


@pytest.mark.parametrize(
    ("optimizer", "arguments", "reason"),
    [
        (SGD, {"lr": 0.1}, None),
        (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.0}, None),
        (RowWiseAdagrad, {"lr": 0.1, "eps": 0.0}, "not a number"),
        (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}, "weight_decay"),
        (Adam, {"lr": 0.1}, "adam"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, "momentum"),
    ],
)
def test_reasons_name_what_stands_in_the_way(optimizer: type, arguments: dict[str, Any], reason: str | None) -> None:
    model = collection(table("t", 100, 8))
    apply_optimizer_in_backward(optimizer, model.parameters(), arguments)
    (parameter,) = model.parameters()
    found = why_not_replicas(in_backward_arguments(parameter, None), parameter.dtype, model)
    assert found is None if reason is None else reason in found


def test_modules_without_collections_and_tables_without_optimizers_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    assert "no in-backward" in why_not_replicas(in_backward_arguments(parameter, None), torch.float32)
    given = in_backward_arguments(parameter, {"optimizer": EmbOptimType.EXACT_SGD})
    assert why_not_replicas(given, torch.float32) is None
    assert "EmbeddingBag is no" in why_not_replicas(given, torch.float32, torch.nn.EmbeddingBag(2, 4))


def replicated(optimizer: type, **settings: Any) -> Any:
    """A planner of many small tables on two hosts, where replicas pay by TorchRec's estimates, and its plan."""
    model = collection(*(table(f"t{index}", 200, 64) for index in range(6)), optimizer=optimizer)
    made = planner(topology=Topology(16, "cuda", local_world_size=8), cost_source="torchrec", **settings)
    plan = made.plan(model, [EmbeddingBagCollectionSharder()]).plan[""]
    return made, {sharding.sharding_type for sharding in plan.values()}


def test_attached_optimizers_open_data_parallel() -> None:
    closed, kinds = replicated(Adagrad)
    assert "data_parallel" not in kinds
    assert any("leaves out" in str(note) and "data_parallel for 6" in str(note) for note in closed.report().notes)
    attached, kinds = replicated(Adagrad, optimizers_attached=True)
    assert "data_parallel" in kinds and not any("trains differently" in str(note) for note in attached.report().notes)
    assert attached.report().chosen.total_ms < closed.report().chosen.total_ms


NAMED = {f"t{index}": ParameterConstraints(sharding_types=["data_parallel"]) for index in range(6)}


def test_optimizers_that_replicas_cannot_follow_keep_it_closed() -> None:
    made, kinds = replicated(Adam, optimizers_attached=True)
    assert "data_parallel" not in kinds
    with pytest.warns(UserWarning, match="takes the in-backward optimizer away"):
        made, kinds = replicated(Adam, optimizers_attached=True, constraints=NAMED)
    notes = [str(note) for note in made.report().notes]
    assert kinds == {"data_parallel"} and any("no optimizer of its replicas" in note for note in notes)
    with pytest.raises(PlannerError, match="no optimizer of its replicas does"):
        replicated(Adam, optimizers_attached=True, sharding_types=["data_parallel"])


def test_replicas_of_several_sharding_groups_train_otherwise() -> None:
    """They follow the gradient of all groups at once, where other tables are averaged after a step of each group's."""
    groups = {"optimizers_attached": True, "sharding_groups": ShardingGroups(size=8)}
    made, kinds = replicated(SGD, **groups)
    assert "data_parallel" not in kinds
    made, kinds = replicated(SGD, constraints=NAMED, **groups)
    assert kinds == {"data_parallel"} and any("gradient of all groups" in str(note) for note in made.report().notes)


VARIED = TableStatistics({f"t{index}_f0": FeatureStatistics(1.0, batch_size=8 * index) for index in (2, 3)})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"constraints": {"t3": ParameterConstraints(batch_sizes=[32])}}, "varies by feature"),
        ({"constraints": {"t3": ParameterConstraints(output_dtype=DataType.FP16)}}, "no optimizer of its replicas"),
        ({"statistics": VARIED}, "varies by feature"),
    ],
)
def test_what_replicas_would_do_otherwise_keeps_it_closed(settings: dict[str, Any], reason: str) -> None:
    everywhere = ["row_wise", "data_parallel"]  # else ranks may send outputs of different types
    made, _ = replicated(SGD, optimizers_attached=True, sharding_types=everywhere, **settings)
    kinds = {option.name: option.sharding_type for option in made.options}
    assert kinds["t3"] != "data_parallel"
    assert ("data_parallel" in kinds.values()) == ("constraints" in settings)
    with pytest.raises(PlannerError, match=reason):
        replicated(SGD, optimizers_attached=True, sharding_types=["data_parallel"], **settings)


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


@pytest.mark.usefixtures("toy")
def test_a_new_type_is_a_row(tmp_path: Path) -> None:
    """From its options to ranks, report, page and file."""
    model = nn.ModuleDict({"sparse": collection(*(table(f"t{i}", 1000, 64) for i in range(3)))})
    four = Topology(2 * HOST, "cuda", local_world_size=HOST, hbm_cap=2**34, ddr_cap=2**34)
    types = {"t0": TOY, "t1": TOY, "t2": "table_wise"}
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in types.items()}
    made = planner(topology=four, constraints=constraints, enumerator=ToyEnumerator(four, 64))
    sharding = made.plan(model, [ToySharder()]).plan["sparse"]
    assert all(sharding[name].ranks in ([0, 1], [2, 3]) for name in ("t0", "t1"))
    report = made.report()
    assert report.sharding_types == {TOY: 2, "table_wise": 1}
    assert report.chosen.collectives_ms > 0 and TOY in str(made.explain())
    save_html(report, tmp_path / "report.html")
    assert TOY in (tmp_path / "report.html").read_text()
    made.save_plan(tmp_path / "plan.json")
    saved = SavedPlan.load(tmp_path / "plan.json")
    assert dict(saved.tables())["sparse.t0"].label == f"{TOY} on ranks {'0-1' if 0 in sharding['t0'].ranks else '2-3'}"
