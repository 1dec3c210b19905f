# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which optimizers and which mixtures of sharding types are taken for what."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import optim
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner.plugin.legal import ELEMENTWISE_OPTIMIZERS, optimizer_name, without_mixed_means


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


def test_an_explicit_kernel_has_precedence_over_the_class() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    kernel = EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD
    apply_optimizer_in_backward(optim.SGD, [parameter], {"lr": 0.1, "optimizer": kernel})
    assert optimizer_name(parameter, None) == "ensemble_rowwise_adagrad"


def test_without_one_of_its_own_a_table_has_the_sharders_or_fbgemms() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 4))
    assert optimizer_name(parameter, None) == "exact_sgd"
    assert optimizer_name(parameter, {"optimizer": EmbOptimType.EXACT_ADAGRAD}) == "exact_adagrad"


def test_mean_pooling_by_rows_tolerates_no_other_types() -> None:
    tw, cw, rw, twrw = "table_wise", "column_wise", "row_wise", "table_row_wise"
    assert without_mixed_means({"a": [rw, tw], "b": [rw, cw]}, ["a"]) == {"a": [tw], "b": [rw, cw]}
    assert without_mixed_means({"a": [rw, twrw], "b": [rw, cw]}, ["a"]) == {"a": [rw, twrw], "b": [rw]}
    assert without_mixed_means({"a": [rw], "b": [tw]}, ["a"]) == {"a": [rw], "b": []}
    assert without_mixed_means({"a": [rw, tw]}, ["a"]) == {"a": [rw, tw]}
    assert without_mixed_means({"a": [rw, tw], "b": [rw]}, []) == {"a": [rw, tw], "b": [rw]}
