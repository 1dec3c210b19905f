# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables in host memory, cached on the device: load factors are kept, read and said, and nothing rests on a guess."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_models
from small_models import MB, SHARDERS, TABLE_WISE, collection, table
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import CacheParams, CacheStatistics
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, JsonPlanLoader, SavedPlan, TableStatistics, compare
from dreamshard_planner.workload.reuse import default_reuse

CACHED = "fused_uvm_caching"


@dataclass(frozen=True)
class Cacheability(CacheStatistics):
    """Statistics of a table whose misses fall as its cache grows."""

    expected_lookups: int = 0
    cacheability: float = 0.5

    def expected_miss_rate(self, clf: float) -> float:
        return (1 - clf) ** 2


def model() -> EmbeddingBagCollection:
    return collection(*(table(f"t{i}", 400_000 * (i + 1), 64) for i in range(4)))


def planner(**changes: Any) -> DreamShardPlanner:
    """A planner with all tables in host memory, cached on the device."""
    gpus, left = Topology(2, "cuda", hbm_cap=300 * MB, ddr_cap=2**36), FixedPercentageStorageReservation(0.0)
    caches = [CacheParams(load_factor=0.05, stats=Cacheability(1000 * (4 - i))) for i in range(4)]
    cached = [ParameterConstraints(["table_wise"], [CACHED], cache_params=one) for one in caches]
    constraints = {f"t{i}": constraint for i, constraint in enumerate(cached)}
    given = {"topology": gpus, "constraints": constraints, "storage_reservation": left}
    return small_models.planner(**(given | changes))


def factors(plan) -> dict[str, tuple[str, float | None]]:
    return {
        name: (sharding.compute_kernel, sharding.cache_params and sharding.cache_params.load_factor)
        for name, sharding in plan.plan[""].items()
    }


def test_a_loaded_plan_has_the_caches_and_promotions_that_a_proposer_chose(tmp_path: Path) -> None:
    made = planner(proposer=EmbeddingOffloadScaleupProposer())
    plan, fresh = made.plan(model(), SHARDERS), made.report()
    chosen = factors(plan)
    assert {kernel for kernel, _ in chosen.values()} == {CACHED, "fused"} and len(set(chosen.values())) > 2
    made.save_plan(tmp_path / "plan.json")
    saved = SavedPlan.load(tmp_path / "plan.json")
    again = planner(plan_loader=JsonPlanLoader(tmp_path / "plan.json"), stats=None)
    assert factors(again.plan(model(), SHARDERS)) == chosen
    report = again.report()
    assert report.chosen.total_ms == pytest.approx(fresh.chosen.total_ms, rel=1e-6) and report.memory == fresh.memory
    for given in (plan, saved):
        assert made.predict(given).total_ms == pytest.approx(fresh.chosen.total_ms, rel=1e-6)
    uncached = {name: ParameterConstraints(**TABLE_WISE, compute_kernels=["fused_uvm"]) for name in chosen}
    other = planner(constraints=uncached)
    other.plan(model(), SHARDERS)
    (change,) = [change for change in compare(saved, other.saved_plan()).changes if change.table == "t3"]
    assert f"{CACHED} of load factor {chosen['t3'][1]:.3g} on rank" in change.before


GIB = 2**30


def large(count: int, gib: float, ddr_gib: int = 128, **changes: Any) -> DreamShardPlanner:
    """Tables of so many GiB on 8 GPUs of 80, planned by bandwidths; the planner after planning."""
    tables = collection(*(table(f"t{i}", int(gib * GIB) // 256, 64) for i in range(count)))
    topology = Topology(8, "cuda", hbm_cap=80 * GIB, ddr_cap=ddr_gib * GIB, local_world_size=8, hbm_mem_bw=3e9)
    return small_models.planned(tables, topology=topology, batch_size=2048, **changes)


def kernels(made: DreamShardPlanner) -> Counter[str]:
    return Counter(entry.kernel for entry in made.report().tables)


def told(made: DreamShardPlanner) -> bool:
    """Return whether the report says that a popularity is assumed."""
    notes = [note for note in made.report().notes if note.code == "assumption"]
    return any("popularity of rows is assumed to fall as rank to the power 1.05" in str(note) for note in notes)


def read(gib: float, exponents: list[float], pooling_factor: float, batch_size: int) -> TableStatistics:
    """Statistics of tables whose rows are read by power laws with these exponents."""
    rows, features = int(gib * GIB) // 256, {}
    for index, exponent in enumerate(exponents):
        bins_TK, distinct_T = default_reuse([rows], [pooling_factor * batch_size], exponent)
        features[f"t{index}_f0"] = FeatureStatistics(
            pooling_factor, tuple(bins_TK[0].tolist()), batch_size=batch_size, distinct_rows=float(distinct_T)
        )
    return TableStatistics(features)


def test_what_fits_into_device_memory_stays_there_unless_somebody_knows_better() -> None:
    """Twelve tables of 36 GiB level out over eight ranks only where four of them are cached in host memory."""
    whole = {f"t{i}": ParameterConstraints(min_partition=64) for i in range(12)}
    made = large(12, 36, constraints=whole)
    assert kernels(made) == {"fused": 12} and not told(made)
    allowed = {name: ParameterConstraints(compute_kernels=["fused", CACHED], min_partition=64) for name in whole}
    asked = large(12, 36, constraints=allowed)
    assert kernels(asked)[CACHED] > 0 and told(asked)
    assert asked.report().chosen.total_ms < made.report().chosen.total_ms
    known = large(12, 36, constraints=whole, statistics=read(36, [1.05] * 12, 1.0, 2048))
    assert kernels(known)[CACHED] > 0 and not told(known)
    crowded = large(12, 60)  # does not fit
    (note,) = [note for note in crowded.report().notes if "popularity" in str(note)]
    assert told(crowded) and note.figures == {"tables": kernels(crowded)[CACHED], "exponent": 1.05}


def test_where_host_memory_is_the_limit_the_error_says_so() -> None:
    short = r"need 3,120.\d\d GiB of DDR, the 8 ranks have 1,600.00 GiB: 1,520.\d\d GiB"
    with pytest.raises(PlannerError, match=short):
        large(40, 104, ddr_gib=200)
    only = {f"t{i}": ParameterConstraints(compute_kernels=["fused_uvm"]) for i in range(12)}
    with pytest.raises(PlannerError, match="DDR") as caught:
        large(12, 104, constraints=only)
    assert "GiB of HBM" not in str(caught.value)


def sizes_of(made: DreamShardPlanner) -> set[float | None]:
    tables = made.saved_plan().sharding[""].values()
    return {table.cache_load_factor for table in tables if table.kernel == CACHED}


def test_caches_have_the_size_that_serves_the_plan_unless_somebody_gave_one() -> None:
    """Smaller caches fit if caches of a fifth of all rows do not."""
    known = read(400, [0.601 + 0.1 * index for index in range(8)], 10.0, 16_384)
    only = {f"t{i}": ParameterConstraints(compute_kernels=[CACHED]) for i in range(8)}
    chosen = large(8, 400, ddr_gib=1024, statistics=known, constraints=only, effort="default")
    assert len(sizes_of(chosen)) > 1 and None not in sizes_of(chosen)
    assert all(max(memory.used_bytes) <= min(memory.limit_bytes) for memory in chosen.report().memory)

    def with_factor(factor: float) -> DreamShardPlanner:
        asked = ParameterConstraints(compute_kernels=[CACHED], cache_params=CacheParams(load_factor=factor))
        return large(8, 400, ddr_gib=1024, statistics=known, constraints=dict.fromkeys(only, asked))

    given = with_factor(0.05)
    assert sizes_of(given) == {0.05}
    assert chosen.report().chosen.total_ms < given.report().chosen.total_ms
    with pytest.raises(PlannerError, match="HBM"):
        with_factor(0.2)
