# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A stored plan is loaded for the inputs that it was made from, and for no others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import small_models
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from small_models import SHARDERS, collection, planned, planner, ranks_of, table, topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlanLoader, PlannerError, ShardingOption

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.support.reproducible import canonical
from dreamshard_planner.workload.reuse import NUM_REUSE_BINS


def statistics(factor: float = 3.0, first_bin: float = 0.5, batch_size: int = 64) -> TableStatistics:
    bins = (first_bin, 1 - first_bin) + (0.0,) * (NUM_REUSE_BINS - 2)
    return TableStatistics({f"t{i}_f0": FeatureStatistics(factor, bins, batch_size) for i in range(4)})


def model(rows: int = 1000, dim: int = 16, **arguments):
    return collection(*(table(f"t{i}", rows * (i + 1), dim, **arguments) for i in range(4)))


def made(**changes) -> tuple[DreamShardPlanner, object]:
    """A planner that has planned, and its plan."""
    given = changes.pop("model", None) or model()
    planner = small_models.planner(**({"statistics": statistics()} | changes))
    return planner, planner.plan(given, SHARDERS)


CHANGES: dict[str, Callable[[], dict]] = {
    "rows": lambda: {"model": model(rows=1001)},
    "weighted": lambda: {"model": collection(*(table(f"t{i}", 1000 * (i + 1)) for i in range(4)), weighted=True)},
    "memory": lambda: {"topology": topology(memory=2**34 + 1)},
    "batch size": lambda: {"batch_size": 65},
    "reservation": lambda: {"storage_reservation": FixedPercentageStorageReservation(0.2)},
    "pooling factors": lambda: {"statistics": statistics(factor=3.5)},
    "constraints": lambda: {"constraints": {"t1": ParameterConstraints(num_poolings=[2.0])}},
    "cost source": lambda: {"cost_source": "torchrec"},
    "effort": lambda: {"effort": "default"},
    "partitioner": lambda: {"partitioner": GreedyPerfPartitioner()},
}


class Stored(PlanLoader):
    """A plan as it was made, by the hash of what it was made from."""

    def __init__(self, planner: DreamShardPlanner) -> None:
        self.options = {option.storage_hash(): option for option in planner.options}
        self.context = planner.hash_planner_context_inputs_str()

    def load(self) -> dict[int, ShardingOption]:
        return self.options

    def plan_context_hash(self) -> str:
        return self.context

    def get_plan_id(self) -> str:
        return "a plan"


@pytest.fixture(scope="module")
def stored() -> Stored:
    return Stored(made()[0])


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_made_from_anything_else_is_not_loaded(change: str, stored: Stored) -> None:
    with pytest.raises(PlannerError, match="Planner input context mismatch"):
        made(plan_loader=stored, **CHANGES[change]())


def test_a_plan_made_from_the_same_is_loaded() -> None:
    planner, plan = made()
    assert {rank for ranks in ranks_of(plan).values() for rank in ranks} == {0, 1}
    for option in planner.options:  # a plan that nobody would make again
        option.shards[0].rank = 0
    again, loaded = made(plan_loader=Stored(planner))
    assert {rank for ranks in ranks_of(loaded).values() for rank in ranks} == {0}
    assert again.hash_planner_context_inputs_str() == planner.hash_planner_context_inputs_str()
    assert again.hash_planner_context_inputs() == int(planner.hash_planner_context_inputs_str(), 16)
    assert any("plan_loader" in note.text for note in again.report().notes)


def test_the_order_of_constraints_and_statistics_does_not_count() -> None:
    constraints = {f"t{i}": ParameterConstraints(num_poolings=[2.0]) for i in range(4)}
    turned = dict(reversed(constraints.items()))
    features = TableStatistics(dict(reversed(dict(statistics()).items())))
    one, other = made(constraints=constraints)[0], made(constraints=turned, statistics=features)[0]
    assert one.hash_planner_context_inputs_str() == other.hash_planner_context_inputs_str()


def test_texts_of_inputs_tell_them_apart() -> None:
    texts = [1, 1.0, "1", True, None, [1], {1}, {1: 1}, EmbOptimType.ADAM, torch.ones(1), torch.ones(2), torch.float32]
    texts += [np.arange(2000) == 1, np.arange(2000) == 1000, partial(int, base=2), partial(int, base=8)]
    assert len({canonical(text) for text in texts}) == len(texts)
    assert canonical({"b": 1, "a": {3, 2}}) == canonical({"a": {2, 3}, "b": 1})
    endless: list = []
    endless.append(endless)
    with pytest.raises(ValueError, match="hold themselves: list"):
        canonical(endless)


@pytest.mark.parametrize(
    ("factors", "expected"), [(None, [1.0, 1.0, 1.0]), ([5.0], [5.0, 5.0, 1.0]), ([5.0, 2.0], [5.0, 2.0, 1.0])]
)
def test_torchrecs_costs_are_those_of_its_own_lengths(factors: list[float] | None, expected: list[float]) -> None:
    """It takes one pooling factor for that of a table with several features, where memory is for each of these."""
    ranks, module = topology(2, device="cuda"), collection(table("t", 5000, 64, features=2), table("u", 5000, 64))
    given = None if factors is None else {"t": ParameterConstraints(pooling_factors=factors)}
    theirs = EmbeddingEnumerator(ranks, 64, given).enumerate(module, SHARDERS)
    perfs = {(o.name, o.sharding_type, o.compute_kernel): [shard.perf for shard in o.shards] for o in theirs}
    settings = {"cost_source": "torchrec", "sharding_types": ("table_wise", "row_wise")}
    planner = planned(module, topology=ranks, constraints=given, **settings)
    for o in planner.options:
        assert [shard.perf for shard in o.shards] == perfs[o.name, o.sharding_type, o.compute_kernel]
    assert planner.lookups_per_sample() == dict(zip(["t_f0", "t_f1", "u_f0"], expected, strict=True))


def test_a_shared_feature_has_the_most_lookups_of_its_tables() -> None:
    tables = [replace(table(name), feature_names=["shared"]) for name in "tu"]
    given = {"t": ParameterConstraints(pooling_factors=[5.0])}
    made = planner(constraints=given)
    made.read(collection(*tables), SHARDERS)
    assert made.lookups_per_sample() == {"shared": 5.0}
