# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's plan is kept where lookups are guessed and a searched plan gains little."""

from typing import Any

import pytest
from small_models import collection, table
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim import SGD

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics

SIZES = ((900, 64), (50_000, 16), (7_000, 128), (30_000, 32), (400, 16), (100_000, 64), (12_000, 8), (2_000, 32))


def model(*sizes: tuple[int, int]) -> Any:
    return collection(*(table(f"t{index}", *size) for index, size in enumerate(sizes)), optimizer=SGD)


def ranks(plan: Any) -> dict[str, Any]:
    return {name: (sharding.sharding_type, sharding.ranks) for name, sharding in plan.plan[""].items()}


def planned(sizes: Any = SIZES, **settings: Any) -> tuple[DreamShardPlanner, dict[str, Any]]:
    topology = Topology(2, "cpu", ddr_cap=2**35)
    planner = DreamShardPlanner(topology=topology, batch_size=256, stats=[], debug=False, **settings)
    return planner, ranks(planner.plan(model(*sizes), get_default_sharders()))


def torchrecs() -> dict[str, Any]:
    planner = EmbeddingShardingPlanner(
        topology=Topology(2, "cpu", ddr_cap=2**35), batch_size=256, stats=[], debug=False
    )
    return ranks(planner.plan(model(*SIZES), get_default_sharders()))


@pytest.mark.parametrize("types", [None, ("table_wise",)])
def test_a_plan_by_guessed_lookups_has_to_gain(types: Any) -> None:
    searched, others = planned(sharding_types=types, least_gain=0.0)
    kept, plan = planned(sharding_types=types)
    assert plan == torchrecs() != others
    gain = 1 - searched.report().chosen.total_ms / kept.report().chosen.total_ms
    assert 0 <= gain < 0.03
    rivals = {rival.name: rival.total_ms for rival in kept.report().rivals}
    assert rivals["searched"] == pytest.approx(searched.report().chosen.total_ms)
    assert rivals["torchrec"] == pytest.approx(kept.report().chosen.total_ms)
    notes = [str(note) for note in kept.report().notes if "least_gain" in str(note)]
    assert len(notes) == 1 and f"{100 * gain:.2f} %" in notes[0] and "statistics" in notes[0]
    assert not any("least_gain" in str(note) for note in searched.report().notes)
    assert {name: (sharding.sharding_type, [shard.rank for shard in sharding.shards])
            for name, sharding in kept.saved_plan().tables()} == plan  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        {"statistics": TableStatistics({"t3_f0": FeatureStatistics(4.0)})},
        {"constraints": {"t3": ParameterConstraints(pooling_factors=[4.0])}},
        {"cost_source": "torchrec"},
        {"least_gain": 0.0},
    ],
)
def test_costs_decide_where_more_is_known(told: dict[str, Any]) -> None:
    made, _ = planned(**told)
    report = made.report()
    assert report.chosen.total_ms <= min(rival.total_ms for rival in report.rivals) * (1 + 1e-6)
    assert not any("least_gain" in str(note) for note in report.notes)


def test_what_gains_more_is_taken() -> None:
    made, plan = planned([(300, 16)] * 6, optimizers_attached=True)
    rivals = {rival.name: rival.total_ms for rival in made.report().rivals}
    assert made.report().chosen.total_ms < 0.97 * rivals["torchrec"]
    assert {kind for kind, _ in plan.values()} == {"data_parallel"}
    kept, plan = planned([(300, 16)] * 6, optimizers_attached=True, least_gain=0.99)
    assert {kind for kind, _ in plan.values()} == {"table_wise"}
    assert kept.report().chosen.total_ms == pytest.approx(rivals["torchrec"])


def test_estimates_of_a_kept_plan_are_by_our_costs() -> None:
    """TorchRec's statistics print them, and callbacks read them."""
    sizes = [(2_000_000, 64), (5_000_000, 128), (100_000, 32), (3_000, 64), (700_000, 64), (9_000_000, 32)]

    def made(**settings: Any) -> DreamShardPlanner:
        topology, left = Topology(8, "cuda", local_world_size=4), FixedPercentageStorageReservation(0.0)
        given = {"topology": topology, "batch_size": 256, "storage_reservation": left, "stats": [], "debug": False}
        planner = DreamShardPlanner(**given, **settings)
        planner.plan(model(*sizes), get_default_sharders())
        return planner

    kept = made(least_gain=0.9)
    assert any("least_gain" in str(note) for note in kept.report().notes)
    alike = {one.name: ParameterConstraints(sharding_types=[one.sharding_type]) for one in kept.options}
    searched = {one.name: one.total_perf for one in made(least_gain=0.0, constraints=alike).options}
    assert {one.name: one.total_perf for one in kept.options} == pytest.approx(searched)
