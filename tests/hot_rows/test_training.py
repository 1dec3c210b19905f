# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables with hot rows train as the same tables do without. Checkpoints know nothing of hot rows: any hot set, or none,
loads what any other saved."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import load_across_plans, save_across_plans
from tests.distributed.ranks import Rank, run_on_ranks
from tests.hot_rows.training import HOT, STEPS, batches, evaluate, sharded
from tests.ways import Training, local, saved_state, states_of, train

ROW_WISE = (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3})
TRAININGS = {
    "adagrad": Training(torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
    "row-wise adagrad": Training(*ROW_WISE),
    "summed gradients": Training(divides=False),
    "half, row-wise adagrad": Training(*ROW_WISE, half=True),
    "pipeline with dedup": Training(*ROW_WISE, way="pipeline", dedup=True),
    "accumulation": Training(*ROW_WISE, way="accumulation"),
    "schedule": Training(way="schedule"),
    "ahead": Training(*ROW_WISE, way="ahead"),
}
TRAINING = TRAININGS["row-wise adagrad"]
ON_FOUR = ("row-wise adagrad", "pipeline with dedup")
DRIFTED = {"ec.goods": torch.tensor([1, 5, 50, 96]), "ec.shops": torch.tensor([0, 39])}
"""Some rows stay hot, some become hot, others cool down."""
MOVES: dict[str, tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]] = {
    "to hot": (None, HOT), "from hot": (HOT, None), "drifted": (HOT, DRIFTED)
}  # fmt: skip


def _train(rank: Rank, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Losses, logits and shards of each training, without and with hot rows."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for kind, hot in (("whole", None), ("hot", HOT)):
            model = sharded(TRAININGS[name], rank, hot)
            losses = train(TRAININGS[name], model, batches(rank))
            shards = local({**model.state_dict(), **states_of(model)})
            found.setdefault(name, {})[kind] = losses, evaluate(model, rank), shards
    return found


def _move(rank: Rank, folder: str) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for name, (first, then) in MOVES.items():
        before, after = sharded(TRAINING, rank, first), sharded(TRAINING, rank, then)
        losses = train(TRAINING, before, batches(rank, 0, STEPS // 2))
        save_across_plans(saved_state(before), f"{folder}/{name}")
        train(TRAINING, after, batches(rank, 30, 1))  # what is loaded replaces hot rows in use
        load_across_plans(saved_state(after), f"{folder}/{name}")
        losses += train(TRAINING, after, batches(rank, STEPS // 2, STEPS // 2))
        found[name] = losses, evaluate(after, rank)
    return found


def _save(rank: Rank, folder: str) -> None:
    for name, hot in (("whole", None), ("hot", HOT)):
        model = sharded(TRAINING, rank, hot)
        train(TRAINING, model, batches(rank, 0, STEPS // 2))
        save_across_plans(saved_state(model), f"{folder}/{name}")


def _load(rank: Rank, folder: str) -> list[tuple[list[float], list[float]]]:
    """Losses and logits of the ranks that are left: whole tables go on whole, hot rows with another hot set."""
    found = []
    for name, hot in (("whole", None), ("hot", DRIFTED)):
        model = sharded(TRAINING, rank, hot)
        load_across_plans(saved_state(model), f"{folder}/{name}")
        found.append((train(TRAINING, model, batches(rank, STEPS // 2, STEPS // 2)), evaluate(model, rank)))
    return found


def _plain_load(rank: Rank, folder: str) -> tuple[list[float], list[float], str]:
    """Logits of a saved model, of one loaded by torch alone, and the error if nobody tells the model."""
    saved, loaded = sharded(TRAINING, rank, HOT), sharded(TRAINING, rank, HOT)
    train(TRAINING, saved, batches(rank, 0, 3))
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    evaluate(loaded, rank)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    with pytest.raises(RuntimeError) as error:
        evaluate(loaded, rank)
    loaded.load_state_dict(state)
    return evaluate(saved, rank), evaluate(loaded, rank), str(error.value)


def _on_four(rank: Rank, folder: str) -> dict[str, Any]:
    _save(rank, folder)
    return {"trained": _train(rank, ON_FOUR)}


def _on_two(rank: Rank, folder: str) -> dict[str, Any]:
    """Also the loading of what four saved."""
    return {
        "trained": _train(rank, TRAININGS),
        "moved": _move(rank, folder),
        "ranks lost": _load(rank, folder),
        "plain": _plain_load(rank, f"{folder}/plain"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("hot"))
    return {ranks: run_on_ranks(job, folder, world_size=ranks) for ranks, job in ((4, _on_four), (2, _on_two))}


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_that_of_whole_tables(ranks: int, found: dict[int, list[dict[str, Any]]]) -> None:
    """The shards hold the hot rows too once somebody has taken the state dict."""
    for of_rank in found[ranks]:
        for name, trained in of_rank["trained"].items():
            (losses, logits, shards), (hot_losses, hot_logits, hot_shards) = trained.values()
            tolerance = 2e-3 if "half" in name else 1e-6  # a float16 weight may round the other way
            assert len(losses) == STEPS, name
            assert hot_losses == pytest.approx(losses, abs=tolerance), name
            assert hot_logits == pytest.approx(logits, abs=10 * tolerance), name
            assert hot_shards.keys() == shards.keys(), name
            for key, shard in shards.items():
                difference = (hot_shards[key] - shard).abs().max().item() if shard.numel() else 0.0
                assert difference <= tolerance, (name, key, difference)


def test_training_resumes_under_another_hot_set(found: dict[int, list[dict[str, Any]]]) -> None:
    for of_rank in found[2]:
        losses, logits, _ = of_rank["trained"]["row-wise adagrad"]["whole"]
        for name, (resumed, resumed_logits) in of_rank["moved"].items():
            assert resumed == pytest.approx(losses, abs=1e-6), name
            assert resumed_logits == pytest.approx(logits, abs=1e-5), name


def test_training_goes_on_after_ranks_are_lost(found: dict[int, list[dict[str, Any]]]) -> None:
    for (losses, logits), (hot_losses, hot_logits) in (of_rank["ranks lost"] for of_rank in found[2]):
        assert hot_losses == pytest.approx(losses, abs=1e-6)
        assert hot_logits == pytest.approx(logits, abs=1e-5)


def test_load_state_dict_renews_hot_rows(found: dict[int, list[dict[str, Any]]]) -> None:
    for saved, loaded, error in (of_rank["plain"] for of_rank in found[2]):
        assert loaded == saved
        assert all(word in error for word in ("goods", "shops", "load_across_plans", "load_state_dict")), error
