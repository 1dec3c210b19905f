# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which optimizers and which mixtures of sharding types are taken for what."""

import warnings

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from small_models import planner, table, topology
from torchrec import optim
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner.search_space.constraints import AllowedTypes, planning_constraints
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.sharding_types import ELEMENTWISE_OPTIMIZERS
from dreamshard_planner.torchrec_components.compat import optimizer_name


@pytest.mark.parametrize(
    ("optimizer", "name", "elementwise"),
    [
        (torch.optim.SGD, "exact_sgd", True),
        (optim.SGD, "exact_sgd", True),
        (optim.Adagrad, "exact_adagrad", True),
        (torch.optim.Adam, "adam", True),
        (optim.LAMB, "lamb", False),
        (optim.LarsSGD, "lars_sgd", False),
        (optim.PartialRowWiseAdam, "partial_rowwise_adam", False),
        (optim.PartialRowWiseLAMB, "partial_rowwise_lamb", False),
        (optim.RowWiseAdagrad, "exact_rowwise_adagrad", False),
        (torch.optim.RMSprop, "rmsprop", False),
    ],
)
def test_optimizers_have_fbgemms_names(optimizer: type, name: str, elementwise: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.1})
    assert optimizer_name(parameter, {"optimizer": EmbOptimType.ADAM}) == name
    assert (name in ELEMENTWISE_OPTIMIZERS) == elementwise


def test_optimizers_that_no_class_names_are_read_from_arguments() -> None:
    """An explicit kernel beats the class; without one of its own a table has the sharder's or FBGEMM's."""
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    assert optimizer_name(parameter, None) == "exact_sgd"
    assert optimizer_name(parameter, {"optimizer": EmbOptimType.EXACT_ADAGRAD}) == "exact_adagrad"
    kernel = EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD
    apply_optimizer_in_backward(optim.SGD, [parameter], {"lr": 0.1, "optimizer": kernel})
    assert optimizer_name(parameter, None) == "ensemble_rowwise_adagrad"


@pytest.mark.parametrize(("optimizer", "exact"), [(torch.optim.Adagrad, True), (optim.RowWiseAdagrad, False)])
def test_modules_that_bring_an_optimizer_train_with_it(optimizer: type, exact: bool) -> None:
    """Their tables have no mark of it; data-parallel does not take it away."""
    tables, sharders = [table("t", 100, 512)], [FusedEmbeddingBagCollectionSharder()]
    module = FusedEmbeddingBagCollection(tables, optimizer, {"lr": 0.1}, device=torch.device("meta"))
    known = planning_constraints(shardable_tables(module, sharders), None, None, AllowedTypes("cuda"))
    assert ("column_wise" in known["t"].sharding_types) == exact
    named = {"t": ParameterConstraints(sharding_types=["data_parallel"])}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        planner(topology=topology(2, device="cuda"), constraints=named).plan(module, sharders)


class Only(EmbeddingBagCollectionSharder):
    """A user's sharder, which offers few types."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*self.kinds]


@pytest.mark.parametrize(
    ("sharder", "constraint", "kind"),
    [
        (EmbeddingBagCollectionSharder(), ParameterConstraints(compute_kernels=["dense"]), "data_parallel"),
        (Only("data_parallel"), None, "data_parallel"),
        (Only("column_wise"), None, "column_wise"),
    ],
    ids=["kernel", "replicated", "slices"],
)
def test_a_sharder_or_kernels_that_leave_nothing_else_are_consent(
    sharder: EmbeddingBagCollectionSharder, constraint: ParameterConstraints | None, kind: str
) -> None:
    module = EmbeddingBagCollection(tables=[table("t", 1000, 512)], device=torch.device("meta"))
    apply_optimizer_in_backward(optim.RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    made = planner(topology=topology(2, device="cuda"), constraints=constraint and {"t": constraint})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the optimizer that data-parallel takes away
        plan = made.plan(module, [sharder])
    assert plan.plan[""]["t"].sharding_type == kind
    assert any("trains differently" in note.text for note in made.report().notes)
    for offers in (EmbeddingBagCollectionSharder(), Only("row_wise", kind)):  # an exact one, which the planner forbids
        with pytest.raises(PlannerError, match="'t'"):
            planner(topology=topology(2, device="cuda"), sharding_types=(kind,)).plan(module, [offers])
