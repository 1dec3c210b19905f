# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints of TorchRec's modules around collections: their tables have the names of plans, managed collisions stay
where they were or are refused by name, and feature processors move with all else.

Shape letters: N ids, D dim.
"""

from pathlib import Path

import pytest
import small_models
import torch
from small_models import collection, table
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import CheckpointError, SavedPlan, load_across_plans, save_across_plans
from dreamshard_planner.across_plans.reading import describe
from tests.distributed.ranks import Rank, run_on_ranks
from tests.ways import saved_state

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS, DIM, IDS, STEPS = 48, 8, 1000, 6
TRAINED_IDS = torch.arange(7, IDS, 50)
SHARDERS = (
    EmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingBagCollectionSharder(),
    FeatureProcessedEmbeddingBagCollectionSharder(),
)


def plain(*tables: str, weighted: bool = False) -> EmbeddingBagCollection:
    return collection(*(table(name, ROWS, DIM) for name in tables), weighted=weighted, device="cpu")


def processed(*tables: str) -> nn.Module:
    processors = {f"{table}_f0": PositionWeightedModule(max_feature_length=3) for table in tables}
    return FeatureProcessedEmbeddingBagCollection(plain(*tables, weighted=True), processors)


def managed(*tables: str) -> nn.Module:
    return small_models.managed(plain(*tables), ROWS, buckets=6, input_hash_size=IDS)


def names_planned(path: Path, model: nn.Module) -> list[str]:
    """Return the names of tables in a plan. TorchRec shards managed collisions on GPUs alone."""
    planner = small_models.planned(model, SHARDERS, topology=Topology(1, "cuda"), batch_size=8)
    planner.save_plan(path)
    return sorted(SavedPlan.load(path).inputs.tables)


def model_of(**modules: nn.Module) -> nn.Module:
    model = nn.ModuleDict(modules)
    for number, parameter in enumerate(model.parameters()):
        nn.init.uniform_(parameter, generator=torch.Generator().manual_seed(number))
    return model


def saved(path: Path, model: nn.Module) -> Path:
    save_across_plans({"model": model.state_dict()}, path)
    return path


def blank(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    return {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}


PROCESSOR = "model.x._feature_processors.c_f0.position_weight"


@pytest.mark.parametrize(("kind", "beside"), [(plain, ()), (processed, (PROCESSOR,)), (managed, ())])
def test_loading_takes_the_names_of_plans(kind, beside: tuple[str, ...], tmp_path: Path) -> None:
    small, large = model_of(x=kind("a", "b")), model_of(x=kind("a", "b", "c"))
    first, second = saved(tmp_path / "small", small), saved(tmp_path / "large", large)
    bigger, smaller = blank(large), blank(small)
    refusals = [
        (bigger, first, {}, r"table x\.c: .*added=\['x\.c'\]"),
        (smaller, second, {}, r"table x\.c: .*dropped="),
    ]
    if beside:
        refusals += [
            (bigger, first, {"added": ["x.c"]}, "position_weight: not in the checkpoint.*added="),
            (smaller, second, {"dropped": ["x.c"]}, "position_weight': in the checkpoint, not in the.*dropped="),
        ]
    for state, path, consent, told in refusals:
        with pytest.raises(CheckpointError, match=told):
            load_across_plans(state, path, **consent)
    load_across_plans(bigger, first, added=["x.c", *beside])
    for key, value in bigger["model"].items():
        assert torch.equal(value, small.state_dict().get(key, torch.zeros_like(value)))
    load_across_plans(smaller, second, dropped=["x.c", *beside])
    assert all(torch.equal(value, large.state_dict()[key]) for key, value in smaller["model"].items())


def test_tables_that_are_called_alike_are_told_apart(tmp_path: Path) -> None:
    """Modules of a model's own may have the names that TorchRec gives to what is within its modules, and one module's
    name may begin another's."""
    own = nn.ModuleDict({"_embedding_bag_collection": plain("a"), "_embedding_module": plain("a")})
    others = {name: plain("a") for name in ("embedding", "x2y", "xembedding")}
    model = model_of(x=own, x2=processed("a"), **others)
    first = saved(tmp_path / "saved", model)
    assert sorted(describe(first)["tables"]) == names_planned(tmp_path / "plan.json", model)
    loaded = blank(model)
    load_across_plans(loaded, first)
    torch.testing.assert_close(loaded["model"], dict(model.state_dict()))

    loaded = blank(nn.ModuleDict({"x": own, "x2y": others["x2y"]}))
    beside = "model.x2._feature_processors.a_f0.position_weight"
    load_across_plans(loaded, first, dropped=["x2.a", "embedding.a", "xembedding.a", beside])
    assert loaded["model"] and all(
        torch.equal(value, model.state_dict()[key]) for key, value in loaded["model"].items()
    )


class Trained(nn.Module):
    """A table with managed collisions, and one with a weight for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.p = managed("managed"), processed("processed")
        # On CPUs no kernel evicts rows of an optimizer that has states.
        for module, optimizer in ((self.m, torch.optim.SGD), (self.p, RowWiseAdagrad)):
            tables = [weight for name, weight in module.named_parameters() if "embedding_bags" in name]
            apply_optimizer_in_backward(optimizer, tables, {"lr": 0.1})

    def forward(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        managed = KeyedJaggedTensor(["managed_f0"], ids_N, lengths=torch.ones_like(ids_N))
        lengths_N = 1 + ids_N % 3
        rows = ids_N.repeat_interleave(lengths_N) % ROWS
        processed = KeyedJaggedTensor(["processed_f0"], rows, torch.ones(len(rows)), lengths_N)
        return self.m(managed)[0].wait()["managed_f0"], self.p(processed).wait()["processed_f0"]


def sharded(rank: Rank, whole: bool) -> tuple[DistributedModelParallel, dict[str, dict]]:
    """The model and its state; ``whole``: the processed table, on the first rank; else by rows."""
    torch.manual_seed(rank.world_size)
    model, ways = Trained(), {"managed": row_wise(), "processed": table_wise(rank=0) if whole else row_wise()}
    plan = {
        path: construct_module_sharding_plan(
            module, {name: ways[name]}, sharder, rank.world_size, rank.world_size, rank.device.type
        )
        for path, module, name, sharder in (
            ("m", model.m, "managed", SHARDERS[1]),
            ("p", model.p, "processed", SHARDERS[2]),
        )
    }
    made = DistributedModelParallel(model, device=rank.device, plan=ShardingPlan(plan), sharders=list(SHARDERS))
    return made, saved_state(made)


def outputs_ND(model: DistributedModelParallel) -> list[Tensor]:
    model.eval()
    return [output_ND.detach() for output_ND in model(TRAINED_IDS)]


def _load(rank: Rank, folder: Path, anew: tuple[str, ...] = ()) -> list[Tensor]:
    model, state = sharded(rank, whole=False)
    load_across_plans(state, folder, added=anew, dropped=anew)
    return outputs_ND(model)


def _train_and_load(rank: Rank, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    model, state = sharded(rank, whole=True)
    dense = [parameter for name, parameter in model.named_parameters() if "position_weight" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        managed_ND, processed_ND = model(TRAINED_IDS)
        (managed_ND + 2 * processed_ND).square().sum().backward()
        optimizer.step()
    save_across_plans(state, folder)
    return outputs_ND(model), _load(rank, folder)


def _load_by_consent(rank: Rank, folder: Path) -> tuple[str, list[Tensor]]:
    with pytest.raises(CheckpointError) as refused:
        _load(rank, folder)
    return str(refused.value), _load(rank, folder, ("m.managed",))


def test_managed_collisions_stay_and_feature_processors_move(tmp_path: Path) -> None:
    """On other ranks ids would be given wrong rows: managed tables start anew there, by consent."""
    trained, loaded = run_on_ranks(_train_and_load, tmp_path / "saved", world_size=2)[0]
    assert all(len(output_ND.unique(dim=0)) > 3 for output_ND in trained)
    torch.testing.assert_close(loaded, trained)

    told, moved = run_on_ranks(_load_by_consent, tmp_path / "saved", world_size=1)[0]
    assert all(part in told for part in ("table m.managed", "_mch_sorted_raw_ids", "rows 0-23, 24-47", "0-47"))
    assert "dropped=['m.managed'] and added=['m.managed']" in told and "processed" not in told
    torch.testing.assert_close(moved[1], trained[1])
