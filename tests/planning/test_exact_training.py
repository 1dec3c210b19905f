# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes of reports on the sharding types that exact training leaves out."""

from __future__ import annotations

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner.plans.report import Note
from tests.small_models import collection, planner, table


def notes_of(**arguments) -> list[Note]:
    """On three tables, two of which have several column slices; a constraint names types of the third."""
    model = collection(table("a", 200, 256), table("b", 300, 256), table("named", 100))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    constraints = {"named": ParameterConstraints(sharding_types=["table_wise", "data_parallel"])}
    made = planner(topology=Topology(2, "cuda"), constraints=constraints, **arguments)
    made.plan(model, [EmbeddingBagCollectionSharder()])
    return [note for note in made.report().notes if note.code == "beyond_exact_training"]


def test_the_report_names_the_types_that_exact_training_leaves_out() -> None:
    (note,) = notes_of()
    assert "column_wise for 2 table(s), data_parallel for 2 table(s)" in note.text
    assert "exact_training=False allows" in note.text and not note.figures


def test_replicas_that_keep_their_optimizer_are_not_left_out() -> None:
    (note,) = notes_of(optimizers_attached=True)
    assert "column_wise for 2 table(s)" in note.text and "data_parallel" not in note.text


def test_nothing_is_left_out_without_exact_training() -> None:
    assert notes_of(exact_training=False) == []
