# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Constraints at their limits: plans, and errors that name table, limit and remedy; which options are searched."""

from typing import Any

import pytest
from small_models import collection, planner, sequences, table, topology
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType, Topology
from torchrec.distributed.types import KeyValueParams, ShardingType
from torchrec.modules.embedding_tower import EmbeddingTower

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.errors import InputWarning
from dreamshard_planner.plans.comparison import stale_differences
from dreamshard_planner.problem.enumeration import FastEnumerator
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.options import is_torchrecs
from dreamshard_planner.search_space.sharding_types import CW, DP, RW, SLICES_OF_A_STORE, TW, TWRW
from dreamshard_planner.search_space.variants import own_slices

SHARDERS = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
GIB = 2**30


def bags(*sizes: tuple[int, int]) -> nn.Module:
    """Tables t0, t1 ... of so many rows and dims."""
    return nn.ModuleDict({"sparse": collection(*(table(f"t{i}", *size) for i, size in enumerate(sizes)))})


def unpooled(*rows: int) -> nn.Module:
    return nn.ModuleDict({"sequence": sequences(*(table(f"t{i}", count, 64) for i, count in enumerate(rows)))})


def planned(model: nn.Module, constraints: dict[str, ParameterConstraints], sharders=SHARDERS, **arguments):
    """The planner, which has planned."""
    device = arguments.pop("device", "cuda")
    memory = {"hbm_cap": 2 * GIB, "ddr_cap": 2 * GIB} | arguments.pop("memory", {})
    reservation = FixedPercentageStorageReservation(0.1)
    common = {"topology": Topology(4, device, **memory), "storage_reservation": reservation, "constraints": constraints}
    made = planner(**common, **arguments)
    made.plan(model, sharders)
    return made


def refusal(model: nn.Module, constraints: dict[str, ParameterConstraints], sharders=SHARDERS, **arguments) -> str:
    with pytest.raises(PlannerError) as caught:
        planned(model, constraints, sharders, **arguments)
    assert caught.value.error_type in (PlannerErrorType.STRICT_CONSTRAINTS, PlannerErrorType.INSUFFICIENT_STORAGE)
    return str(caught.value)


MIN_PARTITION = "min_partition must be a whole number from 0"
REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"sharding_types": [DP], "compute_kernels": ["fused"]},
        {},
        ["data_parallel: it takes compute kernels ['dense']", "only ['fused'] may be used", "compute_kernels"],
    ),
    (
        {"compute_kernels": ["fused_uvm"]},
        {"device": "cpu"},
        ["may only use compute kernels ['fused_uvm']", "offers ['dense', 'fused']"],
    ),
    ({"sharding_types": ["tablewise"]}, {}, ["tablewise: there is no such type", TW]),
    (
        {"sharding_types": [ShardingType.ROW_WISE]},
        {},
        ["sharding_types of its constraint are strings", "give ShardingType.ROW_WISE.value"],
    ),
    (
        {"sharding_types": "table_row_wise"},
        {},
        ["sharding_types of its constraint are a list", "give ['table_row_wise']"],
    ),
    ({"pooling_factors": 3.0}, {}, ["pooling_factors must be a list, one number per feature, got 3.0"]),
    ({"min_partition": -4}, {}, [MIN_PARTITION, "-4"]),
    ({"min_partition": 2.5}, {}, [MIN_PARTITION, "2.5"]),
    ({"compute_kernels": ["key_value"]}, {"memory": {"ssd_cap": 0}}, ["ssd_cap"]),
    (
        {"compute_kernels": ["key_value"], "sharding_types": [CW], "min_partition": 16},
        {"memory": {"ssd_cap": GIB}},
        [SLICES_OF_A_STORE.text, "min_partition"],
    ),
]
"""Constraint of the table, arguments of :func:`planned`, and what the error says."""


@pytest.mark.parametrize(("constraint", "arguments", "said"), REFUSED)
def test_what_cannot_be_meant_or_kept_is_refused_by_table(
    constraint: dict[str, Any], arguments: dict[str, Any], said: list[str]
) -> None:
    text = refusal(bags((100, 64)), {"t0": ParameterConstraints(**constraint)}, **arguments)
    assert "t0'" in text and all(words in text for words in said), text


def test_a_type_that_an_allowed_kernel_serves_is_left() -> None:
    both = ParameterConstraints(sharding_types=[DP, TW], compute_kernels=["fused", "quant"])
    assert planned(bags((100, 16)), {"t0": both}).options[0].sharding_type == TW


def test_tables_may_have_none_for_a_constraint_and_nothing_else() -> None:
    """As in TorchRec."""
    assert planned(bags((100, 16), (100, 16)), {"t0": None, "t1": ParameterConstraints(sharding_types=[TW])}).options
    with pytest.raises(TypeError, match=r"constraints\['t0'\] must be ParameterConstraints, got dict"):
        planned(bags((100, 16)), {"t0": {"sharding_types": [TW]}})
    with pytest.raises(TypeError, match="constraints must be ParameterConstraints by table name, got list"):
        planned(bags((100, 16)), [ParameterConstraints()])


def test_slices_of_two_widths_in_one_embedding_collection() -> None:
    """TorchRec can't mix them: the one that splits most bytes stays, other tables take another type, or none."""
    constraints = {
        "t0": ParameterConstraints(sharding_types=[CW], min_partition=16),
        "t1": ParameterConstraints(sharding_types=[CW, RW], min_partition=32),
    }
    kinds = {option.name: option.sharding_type for option in planned(unpooled(5000, 100), constraints).options}
    assert kinds == {"t0": CW, "t1": RW}
    kinds = {option.name: option.sharding_type for option in planned(unpooled(100, 5000), constraints).options}
    assert kinds == {"t0": CW, "t1": RW}  # the one that has no other type, however small
    constraints["t1"] = ParameterConstraints(sharding_types=[CW], min_partition=32)
    text = refusal(unpooled(5000, 100), constraints)
    assert "'sequence.t1' may only be sharded column_wise" in text and "another width than the 16" in text
    assert "same min_partition, or allow another sharding type" in text


def test_tables_on_ssds() -> None:
    """A table that a constraint puts into a key-value store is planned, and is dear; none is put there unasked."""
    constraints = {"t0": ParameterConstraints(compute_kernels=["key_value"], min_partition=16)}
    model, ssd = bags((100_000, 64), (100_000, 64)), {"ssd_cap": 10 * GIB}
    made = planned(model, constraints, memory=ssd, exact_training=False)
    kernels = {option.name: option.compute_kernel for option in made.options}
    assert kernels["t0"] == "key_value" and kernels["t1"] in ("fused", "dense")
    (stored,) = [option for option in made.options if option.name == "t0"]
    assert stored.num_shards == 1 or stored.sharding_type not in (CW, "table_column_wise")
    assert stored.total_storage.ssd >= 100_000 * 64 * 4
    alone = {entry.name: entry.alone_ms for entry in made.report().tables}
    assert alone["sparse.t0"] > 3 * alone["sparse.t1"]
    (ssds,) = [entry for entry in made.report().memory if entry.kind == "SSD"]
    assert sum(ssds.used_bytes) == stored.total_storage.ssd
    faster = planned(model, constraints, memory={**ssd, "ssd_mem_bw": 1e9}, exact_training=False)
    assert faster.report().chosen.total_ms < made.report().chosen.total_ms
    unused = planned(model, {"t0": ParameterConstraints([DP])}, memory={"ssd_mem_bw": 0})
    assert unused.report().chosen.total_ms > 0


@pytest.mark.parametrize("kernel", ["ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table"])
def test_virtual_tables(kernel: str) -> None:
    """A table of rows without number, of which memory holds those that are in use."""
    stored = sequences(table("t0", 2**50, 64), use_virtual_table=True, total_num_buckets=2**10)
    model = nn.ModuleDict({"sequence": stored})
    constraint = ParameterConstraints(sharding_types=[RW], compute_kernels=[kernel])
    text = refusal(model, {"t0": constraint})  # a fifth of all rows would be cached
    assert "Tables do not fit" in text and "smaller caches (max_l1_cache_size) would help" in text
    assert planned(model, {"t0": constraint}, [EmbeddingCollectionSharder(fused_params={"cache_sets": 1000})]).options
    constraint.key_value_params = KeyValueParams(max_l1_cache_size=100)
    made = planned(model, {"t0": constraint})
    (option,) = made.options
    assert (option.sharding_type, option.compute_kernel) == (RW, kernel)
    assert [shard.rank for shard in option.shards] == [0, 1, 2, 3] and made.report().chosen.total_ms > 0


class EveryKernelSharder(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [kernel.value for kernel in EmbeddingComputeKernel]


def test_a_sharder_that_offers_unknown_kernels_besides() -> None:
    both = nn.ModuleDict({**bags((100, 16)), **unpooled(100)})  # tables of one name, with sharders of their own
    for model in (both, nn.ModuleDict({name: both[name] for name in ("sequence", "sparse")})):
        for option in planned(model, {}, [EveryKernelSharder(), EmbeddingCollectionSharder()]).options:
            assert option.compute_kernel in ("fused", "fused_uvm", "fused_uvm_caching")


@pytest.mark.parametrize(("ranks", "host"), [(8, 3), (4, 8)])
def test_hosts_that_are_not_whole_hold_no_tables_together(ranks: int, host: int) -> None:
    topology = Topology(ranks, "cuda", local_world_size=host, hbm_cap=GIB, ddr_cap=GIB)

    def made(**constraints: ParameterConstraints) -> DreamShardPlanner:
        planned = planner(topology=topology, constraints=constraints)
        planned.plan(bags((1000, 64), (200_000, 64)), SHARDERS)
        return planned

    assert TWRW not in {option.sharding_type for option in made()._enumerator.last_stored_search_space}
    with pytest.raises(PlannerError, match=f"'sparse.t0' .table_row_wise: {ranks} ranks are no whole number of hosts"):
        made(t0=ParameterConstraints(sharding_types=[TWRW]))


def test_embedding_towers_are_refused_and_planned_without_their_sharders() -> None:
    model = nn.ModuleDict({"tower": EmbeddingTower(bags((1000, 64), (2000, 64))["sparse"], nn.Module())})
    fix = "'tower.t0' is in an embedding tower.*leave EmbeddingTowerSharder and EmbeddingTowerCollectionSharder out"
    with pytest.raises(PlannerError, match=fix):
        planned(model, {}, [EmbeddingTowerSharder(), *SHARDERS])
    made = planned(model, {})
    assert {option.path for option in made.options} == {"tower.embedding"}
    theirs = EmbeddingEnumerator(Topology(4, "cuda"), 64).enumerate(model, [EmbeddingTowerSharder()])
    with pytest.raises(PlannerError, match=fix):
        made._loop.model.rater.read(theirs)


def test_the_qualified_name_beats_the_own_name_and_that_beats_the_default() -> None:
    def only(kind: str) -> ParameterConstraints:
        return ParameterConstraints(sharding_types=[kind])

    model = bags((1000, 16), (1000, 16), (1000, 16))
    keyed = {"*": only(RW), "t0": only(RW), "t1": only(CW), "sparse.t0": only(TW)}
    by_key, by_name = planned(model, keyed), planned(model, {"t0": only(TW), "t1": only(CW), "t2": only(RW)})
    assert {option.name: option.sharding_type for option in by_key.options} == {"t0": TW, "t1": CW, "t2": RW}
    assert not [note for note in by_key.report().notes if note.code == "unused"]
    # Plan file, stale check, digest and replan see the same constraints.
    assert by_key.saved_plan().inputs.constraints == by_name.saved_plan().inputs.constraints
    assert not list(stale_differences(by_name.saved_plan().inputs, by_key.saved_plan().inputs))
    assert by_key.hash_planner_context_inputs_str() == by_name.hash_planner_context_inputs_str()
    moves = by_key.replan(by_name.saved_plan(), steps=1000)
    assert not moves.stale


def test_a_component_alone_finds_constraints_by_all_keys() -> None:
    options = planned(bags((1000, 16), (1000, 16)), {}).options
    topology = Topology(4, "cuda")
    weighted = {"sparse.t0": ParameterConstraints(num_poolings=[3.0]), "*": ParameterConstraints(num_poolings=[2.0])}
    reader = OptionReader(weighted)
    bags_of = {option.name: reader.workloads([option], topology)[0].pooled_vectors for option in options}
    unconstrained = {option.name: OptionReader().workloads([option], topology)[0].pooled_vectors for option in options}
    assert bags_of == {"t0": 3 * unconstrained["t0"], "t1": 2 * unconstrained["t1"]}


def test_tables_of_one_name_cannot_differ_in_their_constraints() -> None:
    model = nn.ModuleDict({name: collection(table("t0", 1000, 16)) for name in "ab"})
    with pytest.raises(PlannerError, match=r"'[ab].t0' and '[ab].t0' have one name and different constraints"):
        planned(model, {"a.t0": ParameterConstraints(sharding_types=[TW])})
    same = {fqn: ParameterConstraints(sharding_types=[TW]) for fqn in ("a.t0", "b.t0")}
    assert {option.sharding_type for option in planned(model, same).options} == {TW}


def test_a_qualified_name_that_the_model_lacks_is_told() -> None:
    with pytest.warns(InputWarning, match="'sparse.zzz' .*; a key is the table's own name, its fully"):
        planned(bags((1000, 16)), {"sparse.zzz": ParameterConstraints()})


def test_slices_of_an_embedding_collection_keep_the_width_that_was_asked_for() -> None:
    """They must be of one width, which lone slices of other tables, however large, do not decide."""
    sizes = {"hot": 1_000_000, "cold": 3_000_000, "small": 100_000}
    hot = ParameterConstraints([TW, CW], min_partition=32, pooling_factors=[200.0])
    others = ParameterConstraints([TW, CW], pooling_factors=[1.0])
    given = {"hot": hot, "cold": others, "small": others}
    made = planner(topology=topology(4, 2**37, "cuda"), constraints=given, cost_source="torchrec")
    made.plan(sequences(*(table(name, rows, 128) for name, rows in sizes.items())), SHARDERS)
    kinds = {option.name: (option.sharding_type, option.num_shards) for option in made.options}
    assert kinds == {"hot": (CW, 4), "cold": (TW, 1), "small": (TW, 1)}


def test_slices_are_merged_by_powers_of_two() -> None:
    constraints = dict.fromkeys("ab", ParameterConstraints(sharding_types=["column_wise"], min_partition=16))
    enumerator = FastEnumerator(topology(), 64, constraints, variants=own_slices)
    options = enumerator.enumerate(collection(table("a", dim=128), table("b", dim=96)), SHARDERS)
    widths = {name: [[s.size[1] for s in o.shards] for o in options if o.name == name] for name in "ab"}
    assert widths == {"a": [[16] * 8, [32] * 4, [64] * 2], "b": [[16] * 6, [32] * 3]}
    for option in options:
        width = option.shards[0].size[1]
        assert [shard.offset[1] for shard in option.shards] == [width * index for index in range(option.num_shards)]
        # TorchRec's estimators have seen them: half the columns, half the weights.
        assert option.total_storage.ddr > 0 and option.total_perf > 0
    assert [is_torchrecs(option) for option in options if option.name == "a"] == [True, False, False]


def _with_a_hot_table(**constraint: int) -> list[int]:
    """Widths of the hot table's slices, of a model whose other tables cost a third as much together, and whose kernels
    outweigh one more exchange."""
    tables = [table("hot", 100_000, 128), *(table(f"t{i}", 10_000, 64) for i in range(6))]
    pooling = {f"{one.name}_f0": FeatureStatistics(3000.0 if one.name == "hot" else 120.0) for one in tables}
    constraints = {"hot": ParameterConstraints(sharding_types=["table_wise", "column_wise"], **constraint)}
    made = planner(topology=topology(3), constraints=constraints, statistics=TableStatistics(pooling))
    plan = made.plan(collection(*tables), SHARDERS)
    (sharding,) = (module["hot"] for module in plan.plan.values())
    return [shard.shard_sizes[1] for shard in sharding.sharding_spec.shards]


def test_a_hot_table_is_halved_unasked() -> None:
    assert _with_a_hot_table() == [64, 64]
    assert _with_a_hot_table(min_partition=128) == [128]
    assert set(_with_a_hot_table(min_partition=32)) <= {32, 64}


@pytest.mark.parametrize(("dim", "halves"), [(16, []), (32, [[16, 16]]), (36, []), (40, [[20, 20]]), (128, [[64, 64]])])
def test_only_widths_that_kernels_run_well_are_halved(dim: int, halves: list[list[int]]) -> None:
    constraints = {"t": ParameterConstraints(sharding_types=["column_wise"])}
    options = FastEnumerator(topology(), 64, constraints, variants=own_slices).enumerate(
        collection(table("t", dim=dim)), SHARDERS
    )
    assert [[shard.size[1] for shard in option.shards] for option in options if not is_torchrecs(option)] == halves
