# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables in TorchRec's modules around collections: they have the names of plans, whatever those are called in state
dicts, and what maps ids to their rows goes with its row block, or nowhere.

``tests/distributed/test_moved_modules.py`` trains such modules.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from dreamshard_planner import CheckpointError, DreamShardPlanner, SavedPlan, load_across_plans, save_across_plans
from dreamshard_planner.across_plans import reads
from dreamshard_planner.across_plans.convert import convert, describe
from dreamshard_planner.across_plans.layout import table_names
from dreamshard_planner.across_plans.reading import BoundedReader

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


def tower(*tables: str) -> nn.Module:
    return EmbeddingTower(collection(*tables), nn.Linear(DIM, 1))


def towers(*tables: str) -> nn.Module:
    return EmbeddingTowerCollection([tower(table) for table in tables])


SHARDERS = (
    EmbeddingBagCollectionSharder(),
    FeatureProcessedEmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingBagCollectionSharder(),
    EmbeddingTowerSharder(),
    EmbeddingTowerCollectionSharder(),
)


def plan_of(path: Path, model: nn.Module, ranks: int = 1) -> SavedPlan:
    """For a GPU: TorchRec shards managed collisions on no other device."""
    planner = DreamShardPlanner(topology=Topology(ranks, "cuda"), batch_size=8, stats=[], debug=False)
    planner.plan(model, list(SHARDERS))
    planner.save_plan(path)
    return SavedPlan.load(path)


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


@pytest.mark.parametrize(
    ("kind", "beside"),
    [(collection, ()), (processed, (PROCESSOR,)), (managed, ()), (tower, ()), (towers, ("model.x.towers.2",))],
)
def test_a_module_around_tables_is_carried_dropped_and_added_by_the_names_of_its_plan(
    kind, beside: tuple[str, ...], tmp_path: Path
) -> None:
    """Also processors of features and a tower's interaction, which no plan names."""
    small, large = model_of(x=kind("a", "b")), model_of(x=kind("a", "b", "c"))
    first = saved(tmp_path / "small", small)
    plan = plan_of(tmp_path / "small.json", small)
    assert sorted(plan.inputs.tables) == ["x.a", "x.b"]
    convert(first, tmp_path / "cut", plan)
    loaded = blank(small)
    load_across_plans(loaded, tmp_path / "cut")
    torch.testing.assert_close(loaded["model"], dict(small.state_dict()))

    second = saved(tmp_path / "large", large)
    with pytest.raises(CheckpointError, match=r"x\.c"):
        convert(second, tmp_path / "dropped", plan)
    convert(second, tmp_path / "dropped", plan, dropped=["x.c", *beside])
    loaded = blank(small)
    load_across_plans(loaded, tmp_path / "dropped")
    assert all(torch.equal(loaded["model"][key], large.state_dict()[key]) for key in loaded["model"])

    plan = plan_of(tmp_path / "large.json", large)
    with pytest.raises(CheckpointError, match=r"table x\.c: .*not in the checkpoint"):
        convert(first, tmp_path / "added", plan)
    convert(first, tmp_path / "added", plan, added=["x.c"])
    loaded = blank(small)
    load_across_plans(loaded, tmp_path / "added")
    torch.testing.assert_close(loaded["model"], dict(small.state_dict()))


@pytest.mark.parametrize(("kind", "beside"), [(collection, ()), (processed, (PROCESSOR,))])
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
    plan = plan_of(tmp_path / "plan.json", model)
    first = saved(tmp_path / "saved", model)
    assert sorted(describe(first)["tables"]) == sorted(plan.inputs.tables)
    convert(first, tmp_path / "cut", plan)
    loaded = blank(model)
    load_across_plans(loaded, tmp_path / "cut")
    torch.testing.assert_close(loaded["model"], dict(model.state_dict()))

    fewer = plan_of(tmp_path / "fewer.json", model_of(x=own, x2y=plain["x2y"]))
    convert(first, tmp_path / "fewer", fewer, dropped=["x2.a", "embedding.a", "xembedding.a"])
    assert sorted(describe(tmp_path / "fewer")["tables"]) == sorted(fewer.inputs.tables)


BUFFERS = "model.x._managed_collision_collection._managed_collision_modules"


def test_what_maps_ids_to_rows_is_cut_for_no_other_row_blocks(tmp_path: Path) -> None:
    model = model_of(x=managed("a", "b"))
    first = saved(tmp_path / "saved", model)
    plan = plan_of(tmp_path / "plan.json", model, ranks=2)
    told = rf"table x\.a: {BUFFERS}\.a\._mch_.*rows 0-23 in the checkpoint.* 0-11, 12-23 here"
    with pytest.raises(CheckpointError, match=told):
        convert(first, tmp_path / "cut", plan)
    with pytest.raises(CheckpointError, match=r"table x\.b"):
        convert(first, tmp_path / "cut", plan, dropped=["x.a"], added=["x.a"])
    assert not (tmp_path / "cut").exists()


def test_tables_with_managed_collisions_start_anew_by_consent(tmp_path: Path) -> None:
    model = model_of(x=managed("a"), y=collection("b"))
    first = saved(tmp_path / "saved", model)
    convert(first, tmp_path / "cut", plan_of(tmp_path / "plan.json", model, ranks=2), dropped=["x.a"], added=["x.a"])
    told = describe(tmp_path / "cut")
    assert list(told["tables"]) == ["y.b"] and told["others"] == []
    loaded = blank(model)
    load_across_plans(loaded, tmp_path / "cut", added=["a"])
    for key, value in loaded["model"].items():
        expected = model.state_dict()[key]
        assert torch.equal(value, expected if key.startswith("y.") else torch.zeros_like(expected)), key


def test_weights_are_not_carried_without_what_maps_ids_to_them(tmp_path: Path) -> None:
    model = model_of(x=managed("a"))
    without = {key: value for key, value in model.state_dict().items() if "_mch_remapped_ids" not in key}
    save_across_plans({"model": without}, tmp_path / "saved")
    for added in ((), ("x.a",)):
        with pytest.raises(CheckpointError, match=rf"{BUFFERS}\.a\._mch_remapped_ids_mapping: not in the checkpoint"):
            load_across_plans(blank(model), tmp_path / "saved", added=added)


def test_row_blocks_are_told_by_large_buffers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are saved and converted in pieces."""
    model = model_of(x=managed("a"))
    monkeypatch.setattr(reads, "PIECE_BYTES", 64)
    first = saved(tmp_path / "saved", model)
    convert(first, tmp_path / "cut", plan_of(tmp_path / "plan.json", model))
    for path in (first, tmp_path / "cut"):
        entries = BoundedReader(path).read_metadata().state_dict_metadata
        assert [tuple(part.sizes) for part in entries[f"{BUFFERS}.a._mch_counts"].chunks] == [(ROWS,)]
        loaded = blank(model)
        load_across_plans(loaded, path)
        torch.testing.assert_close(loaded["model"], dict(model.state_dict()))


def test_processors_without_a_state_are_told_by_the_plan() -> None:
    key = "e._embedding_bag_collection.embedding_bags.t.weight"
    assert table_names([key], {"e"}) == {key: "e.t"}
    assert table_names([key], {"e._embedding_bag_collection"}) == {key: "e._embedding_bag_collection.t"}
    assert table_names([key]) == {key: "e._embedding_bag_collection.t"}
