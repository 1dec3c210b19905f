# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints know nothing of hot rows: any hot set, or none, loads what any other saved."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import load_across_plans, save_across_plans
from tests.distributed.ranks import Rank, run_on_ranks
from tests.hot_rows.training import HOT, STEPS, batches, evaluate, sharded
from tests.ways import Training, saved_state, train

TRAINING = Training(RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3})
DRIFTED = {"ec.goods": torch.tensor([1, 5, 50, 96]), "ec.shops": torch.tensor([0, 39])}
"""Some rows stay hot, some become hot, others cool down."""
MOVES: dict[str, tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]] = {
    "to hot": (None, HOT), "from hot": (HOT, None), "drifted": (HOT, DRIFTED)
}  # fmt: skip


def _resume(rank: Rank, folder: str) -> dict[str, tuple[list[float], list[float]]]:
    """Losses and logits of a whole run, and of runs that went on under another hot set."""
    through = sharded(TRAINING, rank, None)
    found = {"through": (train(TRAINING, through, batches(rank)), evaluate(through, rank))}
    for name, (first, then) in MOVES.items():
        before, after = sharded(TRAINING, rank, first), sharded(TRAINING, rank, then)
        losses = train(TRAINING, before, batches(rank, 0, STEPS // 2))
        save_across_plans(saved_state(before), f"{folder}/{name}")
        train(TRAINING, after, batches(rank, 30, 1))  # what is loaded replaces hot rows in use
        load_across_plans(saved_state(after), f"{folder}/{name}")
        losses += train(TRAINING, after, batches(rank, STEPS // 2, STEPS // 2))
        found[name] = losses, evaluate(after, rank)
    return found


def test_training_resumes_under_another_hot_set(tmp_path: Path) -> None:
    for of_rank in run_on_ranks(_resume, str(tmp_path), world_size=2):
        losses, logits = of_rank.pop("through")
        for name, (resumed, resumed_logits) in of_rank.items():
            assert resumed == pytest.approx(losses, abs=1e-6), name
            assert resumed_logits == pytest.approx(logits, abs=1e-5), name


def _save(rank: Rank, folder: str) -> None:
    """Save trainings without and with hot rows."""
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


def test_training_goes_on_after_a_rank_is_lost(tmp_path: Path) -> None:
    run_on_ranks(_save, str(tmp_path), world_size=4)
    for (losses, logits), (hot_losses, hot_logits) in run_on_ranks(_load, str(tmp_path), world_size=3):
        assert hot_losses == pytest.approx(losses, abs=1e-6)
        assert hot_logits == pytest.approx(logits, abs=1e-5)


def _plain_load(rank: Rank, folder: str) -> tuple[list[float], list[float], str]:
    """Logits of a saved model, of one loaded by torch alone, and the error if nobody tells the model."""
    saved, loaded = sharded(TRAINING, rank, HOT), sharded(TRAINING, rank, HOT)
    train(TRAINING, saved, batches(rank))
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    evaluate(loaded, rank)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    with pytest.raises(RuntimeError) as error:
        evaluate(loaded, rank)
    loaded.load_state_dict(state)
    return evaluate(saved, rank), evaluate(loaded, rank), str(error.value)


def test_load_state_dict_renews_hot_rows(tmp_path: Path) -> None:
    for saved, loaded, error in run_on_ranks(_plain_load, str(tmp_path / "plain"), world_size=1):
        assert loaded == saved
        assert all(word in error for word in ("goods", "shops", "load_across_plans", "load_state_dict")), error
