# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints cut for other plans without ranks: every value where it belongs, whole or not at all, in little memory.

``tests/distributed/test_moved_training.py`` trains on what comes out.

Shape letters: R rows, D dim.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from typer.testing import CliRunner

from dreamshard_planner import CheckpointError, DreamShardPlanner, SavedPlan, load_across_plans, save_across_plans
from dreamshard_planner.across_plans import reading, reads, saving
from dreamshard_planner.across_plans.convert import convert, describe
from dreamshard_planner.across_plans.reading import BoundedReader
from dreamshard_planner.cli import app
from dreamshard_planner.errors import FileError
from dreamshard_planner.plans.plan_file import ShardPlace, TableSharding
from tests.faults import ended, start

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS, DIM = 12, 16
WEIGHT = "ebc.embedding_bags.t.weight"
WHOLE = ((0, 0, 0, ROWS, DIM),)


@cache
def base_plan(rows: int) -> SavedPlan:
    """Of one table, whole."""
    config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])
    model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[config], device=torch.device("meta"))})
    planner = DreamShardPlanner(topology=Topology(4, "cpu"), batch_size=8, stats=[], debug=False)
    planner.plan(model, [EmbeddingBagCollectionSharder()])
    with tempfile.TemporaryDirectory() as folder:
        planner.save_plan(Path(folder) / "plan.json")
        return SavedPlan.load(Path(folder) / "plan.json")


def plan_of(path: Path, *shards: tuple[int, int, int, int, int], rows: int = ROWS) -> SavedPlan:
    """Rank, first row, first column, rows and columns of each shard."""
    places = tuple(ShardPlace(rank, (row, column), (r, c)) for rank, row, column, r, c in shards)
    plan = replace(base_plan(rows), sharding={"ebc": {"t": TableSharding("column_wise", "fused", places)}})
    plan.save(path)
    return SavedPlan.load(path)


def states_of(optimizer: str, weight_RD: Tensor) -> dict[str, Tensor]:
    """As the optimizer of a replicated table has them, by name."""
    values_RD = torch.rand_like(weight_RD)
    if optimizer == "row_wise_adagrad":
        return {"sum": values_RD[:, :1].clone(), "step": torch.tensor(7.0)}
    if optimizer == "adagrad":
        return {"sum": values_RD, "step": torch.tensor(7.0)}
    return {"exp_avg": values_RD, "exp_avg_sq": values_RD.square(), "step": torch.tensor(7.0)}


def saved(path: Path, optimizer: str = "row_wise_adagrad", rows: int = ROWS, **others: Any) -> dict[str, Any]:
    """A whole table, as one process saves it."""
    weight_RD = torch.randn(rows, DIM)
    state = {
        "model": {WEIGHT: weight_RD, "top.bias": torch.randn(5)},
        "optimizer": {"state": {f"dense.{WEIGHT}": states_of(optimizer, weight_RD)}},
    }
    state |= {"epoch": 3, **others}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, Tensor) else 0


def cuts(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    widths = draw(st.sampled_from([(16,), (8, 8), (4, 12), (4, 4, 4, 4), (8, 4, 4)]))
    blocks = draw(st.sampled_from([(12,), (6, 6), (5, 5, 2), (12, 0)]))
    shards, column = [], 0
    for width in widths:
        row = 0
        for block in blocks:
            shards.append((draw(st.integers(0, 3)), row, column, block, width))
            row += block
        column += width
    return shards


@given(
    first=st.composite(cuts)(),
    second=st.composite(cuts)(),
    optimizer=st.sampled_from(["row_wise_adagrad", "adagrad", "adam"]),
)
@settings(max_examples=15, deadline=None)
def test_cut_and_joined_again_a_checkpoint_is_what_it_was(
    first: Any, second: Any, optimizer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cuts")
    state = saved(folder / "0", optimizer)
    for number, shards in enumerate((first, second, WHOLE)):
        convert(folder / str(number), folder / str(number + 1), plan_of(folder / "plan.json", *shards))
    found = zeros_like(state)
    load_across_plans(found, folder / "3")
    if optimizer != "adam":  # a fused Adagrad counts no steps
        own = found["optimizer"]["state"][f"dense.{WEIGHT}"]
        own["step"] = state["optimizer"]["state"][f"dense.{WEIGHT}"]["step"]
    torch.testing.assert_close(found, state)


def test_slices_join_by_width_and_take_what_they_cover(tmp_path: Path) -> None:
    saved(tmp_path / "whole")
    slices = [(0, 0, 0, ROWS, 4), (1, 0, 4, ROWS, 12)]
    convert(tmp_path / "whole", tmp_path / "cut", plan_of(tmp_path / "plan.json", *slices))
    key = f"optimizer.state.{WEIGHT}.t.momentum1"
    nested = {
        "model": {WEIGHT: torch.zeros(ROWS, DIM)},
        "optimizer": {"state": {WEIGHT: {"t.momentum1": torch.zeros(2 * ROWS)}}},
    }
    dcp.load(nested, checkpoint_id=tmp_path / "cut", no_dist=True)
    first, second = torch.rand(ROWS), torch.rand(ROWS)
    nested["optimizer"]["state"][WEIGHT]["t.momentum1"] = torch.cat([first, second])
    assert key in BoundedReader(tmp_path / "cut").read_metadata().state_dict_metadata
    # as two ranks save it: chunks of weights say how columns were cut
    save_as_cut(nested, slices, tmp_path / "trained")
    for number, (shards, expected) in enumerate(
        (
            (WHOLE, [(4 * first + 12 * second) / 16]),
            ([(0, 0, 0, ROWS, 4), (0, 0, 4, ROWS, 8), (0, 0, 12, ROWS, 4)], [first, second, second]),
            ([(0, 0, 0, ROWS, 8), (0, 0, 8, ROWS, 8)], [(first + second) / 2, second]),
        )
    ):
        convert(tmp_path / "trained", tmp_path / str(number), plan_of(tmp_path / "plan.json", *shards))
        found = {"optimizer": {"state": {WEIGHT: {"t.momentum1": torch.zeros(ROWS * len(expected))}}}}
        dcp.load(found, checkpoint_id=tmp_path / str(number), no_dist=True)
        torch.testing.assert_close(found["optimizer"]["state"][WEIGHT]["t.momentum1"], torch.cat(expected))


def save_as_cut(state: dict[str, Any], shards: list[tuple[int, int, int, int, int]], path: Path) -> None:
    """Plain tensors, with weights written in the chunks of these shards."""

    class Planner(saving.PiecesSavePlanner):
        def _pieces(self, item: Any) -> list[Any]:
            if item.index.fqn != f"model.{WEIGHT}":
                return [item]
            result = []
            for _, row, column, rows, columns in shards:
                part = reads.rectangle((row, column), (rows, columns))
                index = dcp.metadata.MetadataIndex(item.index.fqn, part.offsets)
                data = replace(item.tensor_data, chunk=part)
                result.append(dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data))
            return result

        def lookup_object(self, index: Any) -> Any:
            for _, row, column, rows, columns in shards if index.fqn == f"model.{WEIGHT}" else ():
                if tuple(index.offset) == (row, column):
                    return self.state_dict[index.fqn][row : row + rows, column : column + columns]
            return super().lookup_object(index)

    dcp.save(state, checkpoint_id=path, planner=Planner(), no_dist=True)


def test_steps_of_adam_are_not_invented(tmp_path: Path) -> None:
    state = saved(tmp_path / "adam", "adam")
    without = {
        "model": state["model"],
        "optimizer": {"state": {f"dense.{WEIGHT}": dict(state["optimizer"]["state"][f"dense.{WEIGHT}"])}},
    }
    del without["optimizer"]["state"][f"dense.{WEIGHT}"]["step"]
    with pytest.raises(CheckpointError, match=r"table ebc.t, state iter: in the checkpoint, not in the state dict"):
        load_across_plans(zeros_like(without), tmp_path / "adam")
    dcp.save(without, checkpoint_id=tmp_path / "fused", no_dist=True)
    with pytest.raises(CheckpointError, match=r"table ebc.t, state iter: not in the checkpoint.*fresh=\['ebc.t'\]"):
        load_across_plans(zeros_like(state), tmp_path / "fused")


def test_states_that_are_no_tensors_are_carried_as_they_are(tmp_path: Path) -> None:
    """Optimizers of a script's own may count steps in plain numbers."""
    weight_RD = torch.randn(ROWS, DIM)
    states = {"sum": torch.rand(ROWS, 1), "step": 7}
    state = {"model": {WEIGHT: weight_RD}, "optimizer": {"state": {f"dense.{WEIGHT}": states}}}
    save_across_plans(state, tmp_path / "plain")
    loaded = zeros_like(state)
    load_across_plans(loaded, tmp_path / "plain")
    assert loaded["optimizer"]["state"][f"dense.{WEIGHT}"]["step"] == 7
    assert torch.equal(loaded["optimizer"]["state"][f"dense.{WEIGHT}"]["sum"], states["sum"])
    convert(tmp_path / "plain", tmp_path / "cut", plan_of(tmp_path / "plan.json", *WHOLE))
    told = describe(tmp_path / "cut")
    assert told["tables"]["ebc.t"]["states"] == {"momentum1": [ROWS]}
    assert told["others"] == [f"optimizer.state.dense.{WEIGHT}.step"]


def test_nothing_of_an_entry_is_passed_over(tmp_path: Path) -> None:
    """What is no table's: layers, states of their optimizer; entries that the state dict lacks are left alone."""
    state = saved(tmp_path / "saved")
    state["optimizer"]["state"] |= {"dense.top.bias": {"exp_avg": torch.rand(5), "step": 3}}
    state["model"]["low.bias"] = torch.rand(2)
    save_across_plans(state, tmp_path / "whole")
    model, table = {WEIGHT: state["model"][WEIGHT]}, {f"dense.{WEIGHT}": state["optimizer"]["state"][f"dense.{WEIGHT}"]}
    for asked, dropped, told in (
        ({"model": model}, ["model.top"], r"'model.low.bias': in the checkpoint.* in dropped="),
        (
            {"model": state["model"], "optimizer": {"state": table}},
            [],
            r"'.*\.dense.top.bias': .*init_state\(\)",
        ),
        ({"model": state["model"], "optimizer": {"state": {}}}, [], r"table ebc.t, state momentum1: in the checkpoint"),
        ({"model": model}, ["model.tops"], "'model.tops'"),
        ({"model": model}, ["model.top", "model.low.bias"], None),
        (
            {"model": model, "optimizer": {"state": table}},
            ["model.top", "model.low", "optimizer.state.dense.top"],
            None,
        ),
        ({"model": state["model"]}, [], None),
        ({"epoch": 0}, [], None),
    ):
        found = zeros_like(asked)
        if told is None:
            load_across_plans(found, tmp_path / "whole", dropped=dropped)
            assert found == {"epoch": 3} or torch.equal(found["model"][WEIGHT], model[WEIGHT])
            continue
        with pytest.raises(CheckpointError, match=told):
            load_across_plans(found, tmp_path / "whole", dropped=dropped)


def test_states_of_tables_that_are_no_tensors_are_not_passed_over(tmp_path: Path) -> None:
    states = {"exp_avg": torch.rand(ROWS, DIM), "exp_avg_sq": torch.rand(ROWS, DIM)}
    state = {"model": {WEIGHT: torch.randn(ROWS, DIM)}, "optimizer": {"state": {f"dense.{WEIGHT}": states}}}
    asked = zeros_like(state)
    states["step"] = 7
    save_across_plans(state, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"table ebc.t, state iter: in the checkpoint, not in the state dict"):
        load_across_plans(asked, tmp_path / "saved")
    load_across_plans(asked, tmp_path / "saved", fresh=["t"])
    other = plan_of(tmp_path / "plan.json", *WHOLE)
    tables = {"u": other.sharding["ebc"]["t"]}
    inputs = replace(other.inputs, tables={"ebc.u": other.inputs.tables["ebc.t"]})
    other = replace(other, inputs=inputs, alone_ms={}, sharding={"ebc": tables})
    convert(tmp_path / "saved", tmp_path / "cut", other, dropped=["t"], added=["u"])
    assert describe(tmp_path / "cut")["others"] == []


@pytest.mark.parametrize("what", ["convert", "save"])
def test_a_folder_that_cannot_be_written_is_named(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "file").write_text("")
    state, plan = saved(tmp_path / "saved", rows=3000), plan_of(tmp_path / "plan.json", (0, 0, 0, 3000, DIM), rows=3000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    for target, why in ((tmp_path / "file/new", "Not a directory"), (tmp_path / "full", "File too large")):
        with pytest.raises(FileError, match=f"{target}: cannot be written: {why}"):
            convert(tmp_path / "saved", target, plan) if what == "convert" else save_across_plans(state, target)
        assert not target.exists()


def test_tables_come_and_states_start_anew_by_consent(tmp_path: Path) -> None:
    """A state of a value per row for which there is no rule, and a table that the plan alone has."""
    state = {"model": {WEIGHT: torch.randn(ROWS, DIM)}, "optimizer": {"state": {WEIGHT: {"t.odd": torch.rand(ROWS)}}}}
    save_across_plans(state, tmp_path / "saved")
    halves = plan_of(tmp_path / "plan.json", (0, 0, 0, ROWS, 8), (1, 0, 8, ROWS, 8))
    tables = {**halves.sharding["ebc"], "new": halves.sharding["ebc"]["t"]}
    inputs = replace(halves.inputs, tables={**halves.inputs.tables, "ebc.new": halves.inputs.tables["ebc.t"]})
    plan = replace(halves, inputs=inputs, alone_ms={**halves.alone_ms, "ebc.new": 1.0}, sharding={"ebc": tables})
    for consent, told in (
        ({}, "table ebc.new: in .*, not in the checkpoint; if it is new, name it as added"),
        ({"added": ["new"]}, "table ebc.t: state odd: .*no rule.*; or name the table as fresh"),
        ({"added": ["new"], "fresh": ["ebc.tt"]}, "'ebc.tt' .did you mean 'ebc.t'"),
    ):
        with pytest.raises(CheckpointError, match=told):
            convert(tmp_path / "saved", tmp_path / "cut", plan, **consent)
    convert(tmp_path / "saved", tmp_path / "cut", plan, added=["ebc.new"], fresh=["t"])
    told = describe(tmp_path / "cut")["tables"]
    assert list(told) == ["ebc.t"] and told["ebc.t"]["states"] == {} and told["ebc.t"]["column_slices"] == [8, 8]
    loaded = {"model": zeros_like(state)["model"]}
    load_across_plans(loaded, tmp_path / "cut")
    assert torch.equal(loaded["model"][WEIGHT], state["model"][WEIGHT])


def test_large_shards_are_read_and_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 300
    state = saved(tmp_path / "plain", rows=rows)
    monkeypatch.setattr(reads, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(reading, "PIECE_BYTES", 1 << 10)
    found = zeros_like(state)
    load_across_plans(found, tmp_path / "plain")
    torch.testing.assert_close(found, state)
    save_across_plans(state, tmp_path / "pieces")
    entry = BoundedReader(tmp_path / "pieces").read_metadata().state_dict_metadata[f"model.{WEIGHT}"]
    assert [part.sizes[0] for part in entry.chunks] == [16] * 18 + [12]
    found = zeros_like(state)
    dcp.load(found, checkpoint_id=tmp_path / "pieces", no_dist=True)
    torch.testing.assert_close(found, state)


PIECE_BYTES = 4 << 20


def _peak_bytes(folder: Path, plans: list[SavedPlan]) -> None:
    """Of converting the second, when all that has to be imported was, for the first."""
    reads.PIECE_BYTES = reading.PIECE_BYTES = PIECE_BYTES
    for number, plan in enumerate(plans):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        convert(folder / f"saved{number}", folder / f"converted{number}", plan)
    (folder / "peak").write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    plans = []
    for number, rows in enumerate((300_000, 1_200_000)):  # the larger of 73 MiB
        saved(tmp_path / f"saved{number}", rows=rows)
        plans.append(plan_of(tmp_path / "plan.json", (0, 0, 0, rows, 8), (1, 0, 8, rows, 8), rows=rows))
    assert ended(start(_peak_bytes, tmp_path, plans)) == [0]
    # A few pieces, and what the allocator keeps.
    assert int((tmp_path / "peak").read_text()) < 12 * PIECE_BYTES


def _killed(what: str, folder: Path, plan: SavedPlan, count: int) -> None:
    """A process that dies as it writes its nth file."""
    calls = iter(range(count))
    real = saving.WholeWriter.write_data

    def write_data(self: Any, *arguments: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    def rename(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    saving.WholeWriter.write_data, saving.os.rename = write_data, rename
    if what == "convert":
        convert(folder / "saved", folder / "new", plan)
    else:
        save_across_plans({"model": {WEIGHT: torch.zeros(ROWS, DIM)}}, folder / "new")


@pytest.mark.parametrize("what", ["convert", "save"])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_killed_at_any_moment_the_old_one_is_whole_and_the_new_one_absent(
    what: str, count: int, tmp_path: Path
) -> None:
    state = saved(tmp_path / "saved")
    plan = plan_of(tmp_path / "plan.json", *((rank, 0, 4 * rank, ROWS, 4) for rank in range(4)))
    assert ended(start(_killed, what, tmp_path, plan, count)) == [-signal.SIGKILL]
    assert not (tmp_path / "new").exists() and list(tmp_path.glob(".new.*.part"))
    convert(tmp_path / "saved", tmp_path / "new", plan)
    assert not list(tmp_path.glob(".new.*.part"))
    for name in ("saved", "new"):
        found = zeros_like(state)
        load_across_plans(found, tmp_path / name)
        torch.testing.assert_close(found["model"], state["model"])
    with pytest.raises(FileError, match=r"new: exists"):
        save_across_plans(state, tmp_path / "new")


def test_of_two_jobs_that_save_to_one_folder_the_first_to_end_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = saving.WholeWriter.write_data
    began: list[saving.WholeWriter] = []

    def write_data(self: Any, *arguments: Any) -> Any:
        written = real(self, *arguments)
        began.append(saving.WholeWriter(tmp_path / "new"))
        began[0].prepare_global_plan([SavePlan([])])
        return written

    monkeypatch.setattr(saving.WholeWriter, "write_data", write_data)
    save_across_plans({"model": {WEIGHT: torch.ones(ROWS, DIM)}}, tmp_path / "new")
    loaded = {"model": {WEIGHT: torch.zeros(ROWS, DIM)}}
    load_across_plans(loaded, tmp_path / "new")
    assert loaded["model"][WEIGHT].eq(1).all()
    with pytest.raises(FileError, match="new: cannot be written"):
        began[0].finish(Metadata({}), [])
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_is_being_saved_under_a_longer_name_stays(tmp_path: Path) -> None:
    other = saving.WholeWriter(tmp_path / "step.5")
    other.prepare_global_plan([SavePlan([])])
    save_across_plans({"model": {WEIGHT: torch.ones(ROWS, DIM)}}, tmp_path / "step")
    assert sorted(path.name for path in tmp_path.iterdir()) == [Path(other.path).name, "step"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    data = next((tmp_path / "saved").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"saved: a file is missing or damaged"):
        convert(tmp_path / "saved", tmp_path / "new", plan_of(tmp_path / "plan.json", *WHOLE))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "saved"]


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(_Attack()), pickle.dumps({"a": 1})])
def test_foreign_metadata_is_refused_and_runs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "saved")
    (tmp_path / "saved/.metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"saved/.metadata: not the metadata of a checkpoint"):
        describe(tmp_path / "saved")
    assert not (tmp_path / "attacked").exists()


def test_the_command_tells_and_converts(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    plan_of(tmp_path / "plan.json", (0, 0, 0, ROWS, 4), (1, 0, 4, ROWS, 12))
    names = [str(tmp_path / name) for name in ("saved", "new", "plan.json")]
    runner = CliRunner()
    result = runner.invoke(app, ["checkpoint", "convert", *names[:2], "--plan", names[2]])
    assert result.exit_code == 0, result.output
    told = json.loads(runner.invoke(app, ["checkpoint", "info", names[1], "--format", "json"]).stdout)
    table = told["tables"]["ebc.t"]
    assert table["column_slices"] == [4, 12] and table["states"]["momentum1"] == [2 * ROWS]
    assert (table["rows"], table["dim"], table["data_type"]) == (ROWS, DIM, "float32")
    assert "epoch" in told["others"] and "model.top.bias" in told["others"]
    assert "ebc.t" in runner.invoke(app, ["checkpoint", "info", names[0]]).stdout
    again = runner.invoke(app, ["checkpoint", "convert", *names[:2], "--plan", names[2]])
    assert again.exit_code == 1 and "exists" in again.stderr
    plan_of(tmp_path / "plan.json", (0, 0, 0, 99, DIM), rows=99)
    other = runner.invoke(app, ["checkpoint", "convert", names[0], str(tmp_path / "third"), "--plan", names[2]])
    assert (
        other.exit_code == 1
        and "table ebc.t: of size (12, 16) in the checkpoint, (99, 16) in plan.json" in other.stderr
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}', None], ids=str)
def test_what_is_no_plan_is_named_and_nothing_is_written(content: str | None, tmp_path: Path) -> None:
    """None for a plan whose end is missing."""
    saved(tmp_path / "saved")
    plan_of(tmp_path / "odd.json", *WHOLE)
    whole = (tmp_path / "odd.json").read_text()
    (tmp_path / "odd.json").write_text(whole[: len(whole) // 2] if content is None else content)
    names = [str(tmp_path / name) for name in ("saved", "new", "odd.json")]
    result = CliRunner().invoke(app, ["checkpoint", "convert", *names[:2], "--plan", names[2]])
    assert result.exit_code == 1 and "odd.json" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd.json", "saved"]
