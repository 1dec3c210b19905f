# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables with hot rows train as the same tables do without."""

from typing import Any

import pytest
import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.distributed.ranks import Rank, run_on_ranks
from tests.hot_rows.training import HOT, STEPS, batches, evaluate, sharded
from tests.ways import Training, local, states_of, train

ROW_WISE = (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3})
TRAININGS = {
    "sgd": Training(),
    "adagrad": Training(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
    "row-wise adagrad": Training(*ROW_WISE),
    "summed gradients": Training(divides=False),
    "half": Training(half=True),
    "half, row-wise adagrad": Training(*ROW_WISE, half=True),
    "dedup": Training(*ROW_WISE, dedup=True),
    "pipeline": Training(*ROW_WISE, way="pipeline"),
    "pipeline with dedup": Training(*ROW_WISE, way="pipeline", dedup=True),
    "accumulation": Training(*ROW_WISE, way="accumulation"),
    "schedule": Training(way="schedule"),
    "ahead": Training(*ROW_WISE, way="ahead"),
}
ON_FOUR = ("row-wise adagrad", "pipeline with dedup", "accumulation")


def _train(rank: Rank, names: list[str]) -> dict[str, dict[str, Any]]:
    """Losses, logits and shards of each training, without and with hot rows."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for kind, hot in (("whole", None), ("hot", HOT)):
            model = sharded(TRAININGS[name], rank, hot)
            losses = train(TRAININGS[name], model, batches(rank))
            shards = local({**model.state_dict(), **states_of(model)})
            found.setdefault(name, {})[kind] = losses, evaluate(model, rank), shards
    return found


@pytest.mark.parametrize(("ranks", "names"), [(2, list(TRAININGS)), (4, list(ON_FOUR))])
def test_training_equals_that_of_whole_tables(ranks: int, names: list[str]) -> None:
    """Ten steps. The shards hold the hot rows too once somebody has taken the state dict."""
    for of_rank in run_on_ranks(_train, names, world_size=ranks):
        for name in names:
            (losses, logits, shards), (hot_losses, hot_logits, hot_shards) = of_rank[name].values()
            tolerance = 2e-3 if "half" in name else 1e-6  # a float16 weight may round the other way
            assert len(losses) == STEPS, name
            assert hot_losses == pytest.approx(losses, abs=tolerance), name
            assert hot_logits == pytest.approx(logits, abs=10 * tolerance), name
            assert hot_shards.keys() == shards.keys(), name
            for key, shard in shards.items():
                difference = (hot_shards[key] - shard).abs().max().item() if shard.numel() else 0.0
                assert difference <= tolerance, (name, key, difference)
