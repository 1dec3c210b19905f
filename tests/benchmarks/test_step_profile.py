# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Where the time of a step goes: kinds of work by the names of what runs."""

from __future__ import annotations

import pytest
import torch

from dlrm.step_profile import DENSE, kind_of, profile_steps


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fbgemm::split_embedding_codegen_forward_cpu", "embedding forward"),
        ("fbgemm::split_embedding_backward_codegen_rowwise_adagrad_cpu", "embedding backward"),
        (
            "autograd::engine::evaluate_function: torch::autograd::CppNode<SplitLookupFunction_sgd_Op>",
            "embedding backward",
        ),
        ("All2All_Pooled_Wait", "output exchange, forward"),
        ("All2All_Pooled_WaitBackward", "output exchange, backward"),
        ("## all2all_data:kjt lengths ##", "input exchange"),
        ("aten::bmm", None),
    ],
)
def test_names_tell_the_kind_of_work(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_operators_belong_to_the_range_around_them() -> None:
    square = torch.ones(64, 64)

    def train(steps: int) -> None:
        for _ in range(steps):
            square @ square
            with torch.profiler.record_function("Optimizer.step#SGD.step"):
                square @ square

    spent = profile_steps(train, 3)
    assert set(spent) == {DENSE, "optimizer"} and min(spent.values()) > 0
