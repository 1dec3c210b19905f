# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables in TorchRec's modules around collections have the names of plans, and their buffers are carried with them.

``tests/distributed/test_moved_modules.py`` trains such modules.
"""

from pathlib import Path

import pytest
import small_models
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from dreamshard_planner import CheckpointError, SavedPlan, load_across_plans, save_across_plans
from dreamshard_planner.across_plans.reading import describe

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS, DIM = 24, 16
CPU = torch.device("cpu")


def collection(*tables: str, weighted: bool = False) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=table, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"of_{table}"])
        for table in tables
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=CPU)


def processed(*tables: str) -> nn.Module:
    processors = {f"of_{table}": PositionWeightedModule(max_feature_length=4) for table in tables}
    return FeatureProcessedEmbeddingBagCollection(collection(*tables, weighted=True), processors)


def managed(*tables: str) -> nn.Module:
    bags = collection(*tables)
    modules = {
        table: MCHManagedCollisionModule(ROWS, CPU, DistanceLFU_EvictionPolicy(), eviction_interval=2, buckets=2)
        for table in tables
    }
    return ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection(modules, bags.embedding_bag_configs())
    )


SHARDERS = (
    EmbeddingBagCollectionSharder(),
    FeatureProcessedEmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingBagCollectionSharder(),
)


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


def blank(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}


PROCESSOR = "model.x._feature_processors.of_c.position_weight"


@pytest.mark.parametrize(("kind", "beside"), [(collection, ()), (processed, (PROCESSOR,)), (managed, ())])
def test_loading_takes_the_names_of_plans(kind, beside: tuple[str, ...], tmp_path: Path) -> None:
    small, large = model_of(x=kind("a", "b")), model_of(x=kind("a", "b", "c"))
    first, second = saved(tmp_path / "small", small), saved(tmp_path / "large", large)
    bigger, smaller = blank(large), blank(small)
    with pytest.raises(CheckpointError, match=r"table x\.c: .*added=\['x\.c'\]"):
        load_across_plans(bigger, first)
    load_across_plans(bigger, first, added=["x.c", *beside])
    for key, value in bigger["model"].items():
        assert torch.equal(value, small.state_dict().get(key, torch.zeros_like(value)))
    if beside:
        with pytest.raises(CheckpointError, match=r"position_weight: not in the checkpoint.*added="):
            load_across_plans(bigger, first, added=["x.c"])
    with pytest.raises(CheckpointError, match=r"table x\.c: .*dropped="):
        load_across_plans(smaller, second)
    if beside:
        with pytest.raises(
            CheckpointError, match=r"position_weight': in the checkpoint, not in the state dict.*dropped="
        ):
            load_across_plans(smaller, second, dropped=["x.c"])
    load_across_plans(smaller, second, dropped=["x.c", *beside])
    assert all(torch.equal(value, large.state_dict()[key]) for key, value in smaller["model"].items())


def test_tables_that_are_called_alike_are_told_apart(tmp_path: Path) -> None:
    """Modules of a model's own may have the names that TorchRec gives to what is within its modules, and one module's
    name may begin another's."""
    own = nn.ModuleDict({"_embedding_bag_collection": collection("a"), "_embedding_module": collection("a")})
    plain = {name: collection("a") for name in ("embedding", "x2y", "xembedding")}
    model = model_of(x=own, x2=processed("a"), **plain)
    first = saved(tmp_path / "saved", model)
    assert sorted(describe(first)["tables"]) == names_planned(tmp_path / "plan.json", model)
    loaded = blank(model)
    load_across_plans(loaded, first)
    torch.testing.assert_close(loaded["model"], dict(model.state_dict()))

    loaded = blank(nn.ModuleDict({"x": own, "x2y": plain["x2y"]}))
    beside = "model.x2._feature_processors.of_a.position_weight"
    load_across_plans(loaded, first, dropped=["x2.a", "embedding.a", "xembedding.a", beside])
    assert loaded["model"] and all(
        torch.equal(value, model.state_dict()[key]) for key, value in loaded["model"].items()
    )
