# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables with hot rows train as the same tables do without. Checkpoints know nothing of hot rows: any hot set, or none,
loads what any other saved.

Shape letters: B batch (a rank's share), L lookups, D dim.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.dedup_on_cpu import dedup_on_cpu
from dreamshard_planner import load_across_plans, save_across_plans
from dreamshard_planner.hot_rows.sharded import HotRowsSharder, replicate_hot_rows
from tests.distributed.ranks import Rank, run_on_ranks
from tests.ways import Batch, TopLayer, Training, local, saved_state, states_of, train

DIM, STEPS, SAMPLES = 8, 6, 13
TABLES = {"goods": (97, ("seen", "bought")), "shops": (41, ("visited",)), "whole": (30, ("place",))}
"""Rows and features; the last table is table_wise and has no hot rows."""
HOT = {"ec.goods": torch.tensor([96, 0, 5, 63, 64, 65]), "ec.shops": torch.tensor([1, 2, 40])}
FEATURES = ("place", "bought", "extra", "visited", "seen")
"""In the order of batches, which is not that of the tables; no table reads ``extra``."""
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
DRIFTED = {"ec.goods": torch.tensor([1, 5, 50, 96]), "ec.shops": torch.tensor([0, 39])}
"""Some rows stay hot, some become hot, others cool down."""
MOVES: dict[str, tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]] = {
    "to hot": (None, HOT), "from hot": (HOT, None), "drifted": (HOT, DRIFTED)
}  # fmt: skip


class Model(TopLayer):
    def __init__(self, training: Training) -> None:
        super().__init__(DIM * 4)
        kind = DataType.FP16 if training.half else DataType.FP32
        configs = [
            EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=list(features), data_type=kind
            )
            for name, (rows, features) in TABLES.items()
        ]
        self.ec = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(training.optimizer, self.ec.parameters(), dict(training.arguments))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sequences = self.ec(batch.sparse)
        order = [name for _, features in TABLES.values() for name in features]
        pooled = [sequences[name].to_padded_dense(12).tanh().sum(1) for name in order]
        return self.loss_and_logits(pooled, batch.label_B)


def batches(rank: Rank, first: int = 0, steps: int = STEPS) -> Iterator[Batch]:
    """Shares of unequal size with sequences of unequal length, some empty; ids repeat, half of them are hot."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        start = SAMPLES * rank.rank // rank.world_size
        mine = slice(start, SAMPLES * (rank.rank + 1) // rank.world_size)
        ids, lengths = [], []
        for feature in FEATURES:
            name = next((name for name, (_, features) in TABLES.items() if feature in features), None)
            rows = TABLES[name][0] if name else 10
            hot = HOT.get(f"ec.{name}", torch.arange(rows))
            length_B = torch.randint(0, 10, (SAMPLES,), generator=generator)
            cold_L = torch.randint(rows, (int(length_B.sum()),), generator=generator)
            hot_L = hot[torch.randint(len(hot), cold_L.shape, generator=generator)]
            id_L = torch.where(torch.rand(cold_L.shape, generator=generator) < 0.5, hot_L, cold_L)
            ids.append(torch.cat(id_L.split(length_B.tolist())[mine]))
            lengths.append(length_B[mine])
        label_B = torch.randint(2, (SAMPLES,), generator=generator).float()[mine]
        sparse = KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=torch.cat(lengths))
        yield Batch(sparse, label_B).to(rank.device)


def sharded(training: Training, rank: Rank, hot: dict[str, Tensor] | None) -> DistributedModelParallel:
    """TorchRec's own class on a plan with these hot rows, or without any; weights that do not depend on the plan."""
    dedup_on_cpu()
    model = Model(training)
    sharder = HotRowsSharder if hot else EmbeddingCollectionSharder
    sharders = [sharder(use_index_dedup=training.dedup)]
    ways = {name: table_wise(rank=0) if name == "whole" else row_wise() for name in TABLES}
    module_plan = construct_module_sharding_plan(
        model.ec,
        ways,
        sharders[0],
        local_size=rank.world_size,
        world_size=rank.world_size,
        device_type=rank.device.type,
    )
    plan = ShardingPlan({"ec": module_plan})
    if hot:
        plan = replicate_hot_rows(plan, hot)
    made = DistributedModelParallel(model, device=rank.device, plan=plan, sharders=sharders)
    with torch.no_grad():
        for name, value in made.state_dict().items():
            if isinstance(value, ShardedTensor):
                whole = torch.rand(value.size(), generator=torch.Generator().manual_seed(len(name))) - 0.5
                for shard in value.local_shards():
                    (row, _), (rows, _) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    shard.tensor.copy_(whole[row : row + rows])
    return made


def evaluate(model: DistributedModelParallel, rank: Rank) -> list[float]:
    with torch.no_grad():
        return [logit for batch in batches(rank, 50, 2) for logit in model(batch)[1].tolist()]


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
    return {"trained": _train(rank, ["pipeline with dedup"])}


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
