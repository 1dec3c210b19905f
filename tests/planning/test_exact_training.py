# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes of reports on the options that exact training excludes."""

from __future__ import annotations

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner import DreamShardPlanner
from tests.small_models import collection, table

SHARDERS = [EmbeddingBagCollectionSharder()]


@pytest.mark.parametrize("cost_source", ["auto", "torchrec"])
def test_torchrecs_plan_over_all_options_is_predicted(cost_source: str) -> None:
    """TorchRec replicates small tables in half precision, which trains them otherwise."""
    model = collection(
        *(table(f"t{i}", 200, 64, data_type=DataType.FP16) for i in range(8)), table("large", 10_000_000, 64)
    )
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    gpus = Topology(16, "cuda", local_world_size=8)
    given = {"topology": gpus, "batch_size": 512, "debug": False, "stats": []}
    given["storage_reservation"] = FixedPercentageStorageReservation(0.1)
    made = DreamShardPlanner(cost_source=cost_source, **given)
    made.plan(model, SHARDERS)
    (note,) = [note for note in made.report().notes if note.code == "beyond_exact_training"]
    theirs = EmbeddingShardingPlanner(**given).plan(model, SHARDERS)
    kinds = {sharding.sharding_type for sharding in theirs.plan[""].values()}
    assert "data_parallel" in kinds and "data_parallel for 9 table(s)" in note.text
    assert note.figures["torchrec_ms"] == pytest.approx(made.predict(theirs).total_ms, rel=1e-6)
    assert note.figures["exact_ms"] == pytest.approx(made.report().chosen.total_ms, rel=1e-6)
    assert f"predicted at {note.figures['torchrec_ms']:.3f} ms" in str(made.report())
