# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints load under other cuts: every value where it belongs, whole or not at all, in little memory.

``tests/distributed/test_moved_training.py`` trains on what comes out.

Shape letters: R rows, D dim.
"""

import os
import pickle
import resource
import signal
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from dreamshard_planner import CheckpointError, load_across_plans, save_across_plans
from dreamshard_planner.across_plans import reading, state_dicts
from dreamshard_planner.across_plans.reading import BoundedReader, describe
from dreamshard_planner.errors import FileError
from tests.cli.test_commands import run, run_json
from tests.faults import ended, files_up_to, start

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS, DIM = 12, 16
WEIGHT = "ebc.embedding_bags.t.weight"
WHOLE = ((0, 0, ROWS, DIM),)


def sharded(size: tuple[int, ...], places: list[tuple[list[int], list[int]]]) -> ShardedTensor:
    shards = [Shard(torch.zeros(sizes), ShardMetadata(at, sizes, "rank:0/cpu")) for at, sizes in places]
    return ShardedTensor._init_from_local_shards(shards, *size)


def fused(cut: Any, per_row: tuple[str, ...] = (), like_weights: tuple[str, ...] = ()) -> dict[str, Any]:
    """A state dict as TorchRec's, of a table in shards: first row, first column, rows and columns of each."""
    columns = sorted({column for _, column, _, _ in cut})
    places = [([row, column], [rows, width]) for row, column, rows, width in cut]
    rows_of_slices = [([columns.index(column) * ROWS + row], [rows]) for row, column, rows, _ in cut]
    states = {f"t.{name}": sharded((ROWS * len(columns),), rows_of_slices) for name in per_row}
    states |= {f"t.{name}": sharded((ROWS, DIM), places) for name in like_weights}
    return {"model": {WEIGHT: sharded((ROWS, DIM), places)}, "optimizer": {"state": {WEIGHT: states}}}


def shards_of(state: dict[str, Any], name: str) -> list[Tensor]:
    return [shard.tensor for shard in state["optimizer"]["state"][WEIGHT][f"t.{name}"].local_shards()]


def states_of(optimizer: str, weight_RD: Tensor) -> dict[str, Tensor]:
    """As the optimizer of a replicated table has them, by name."""
    values_RD = torch.rand_like(weight_RD)
    if optimizer == "row_wise_adagrad":
        return {"sum": values_RD[:, :1].clone(), "step": torch.tensor(7.0)}
    if optimizer == "adagrad":
        return {"sum": values_RD, "step": torch.tensor(7.0)}
    return {"exp_avg": values_RD, "exp_avg_sq": values_RD.square(), "step": torch.tensor(7.0)}


def saved(path: Path, optimizer: str = "row_wise_adagrad", rows: int = ROWS, **others: Any) -> dict[str, Any]:
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


def cuts(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    widths = draw(st.sampled_from([(16,), (8, 8), (4, 12), (4, 4, 4, 4), (8, 4, 4)]))
    blocks = draw(st.sampled_from([(12,), (6, 6), (5, 5, 2)]))
    return [
        (row, column, block, width)
        for width, column in zip(widths, accumulate(widths, initial=0), strict=False)
        for block, row in zip(blocks, accumulate(blocks, initial=0), strict=False)
    ]


PER_ROW = {"row_wise_adagrad": ("momentum1",)}
LIKE_WEIGHTS = {"adagrad": ("momentum1",), "adam": ("momentum1", "exp_avg_sq")}


@pytest.mark.usefixtures("group")
@given(
    first=st.composite(cuts)(),
    second=st.composite(cuts)(),
    optimizer=st.sampled_from(["row_wise_adagrad", "adagrad", "adam"]),
)
@settings(max_examples=15, deadline=None)
def test_cut_and_joined_again_a_checkpoint_is_what_it_was(
    first: Any, second: Any, optimizer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Sharded, nothing counts steps."""
    folder, fresh = tmp_path_factory.mktemp("cuts"), ["t"] if optimizer == "adam" else []
    state = saved(folder / "0", optimizer)
    for number, cut in enumerate((first, second)):
        found = fused(cut, PER_ROW.get(optimizer, ()), LIKE_WEIGHTS.get(optimizer, ()))
        found["model"]["top.bias"], found["epoch"] = torch.zeros(5), 0
        load_across_plans(found, folder / str(number), fresh=fresh)
        save_across_plans(found, folder / str(number + 1))
    found = zeros_like(state)
    load_across_plans(found, folder / "2", fresh=fresh)
    for of in (found, state):
        del of["optimizer"]["state"][f"dense.{WEIGHT}"]["step"]
    torch.testing.assert_close(found, state)


@pytest.mark.usefixtures("group")
def test_slices_join_by_width_and_take_what_they_cover(tmp_path: Path) -> None:
    """``prev_iter`` is the same in every slice, and no mean of integers may round it."""
    names = ("momentum1", "prev_iter")
    state = fused(((0, 0, ROWS, 4), (0, 4, ROWS, 12)), names)
    for shard in (*shards_of(state, "momentum1"), shards_of(state, "prev_iter")[0]):
        shard.uniform_()
    shards_of(state, "prev_iter")[1].copy_(shards_of(state, "prev_iter")[0])
    save_across_plans(state, tmp_path / "trained")
    first, second = shards_of(state, "momentum1")
    for cut, expected in (
        (WHOLE, [(4 * first + 12 * second) / 16]),
        (((0, 0, ROWS, 4), (0, 4, ROWS, 8), (0, 12, ROWS, 4)), [first, second, second]),
        (((0, 0, ROWS, 8), (0, 8, ROWS, 8)), [(first + second) / 2, second]),
    ):
        found = fused(cut, names)
        load_across_plans(found, tmp_path / "trained")
        torch.testing.assert_close(shards_of(found, "momentum1"), expected)
        assert all(torch.equal(shard, shards_of(state, "prev_iter")[0]) for shard in shards_of(found, "prev_iter"))


def test_steps_of_adam_are_not_invented(tmp_path: Path) -> None:
    state = saved(tmp_path / "adam", "adam")
    name, states = f"dense.{WEIGHT}", state["optimizer"]["state"][f"dense.{WEIGHT}"]
    without = {key: value for key, value in states.items() if key != "step"}
    without = {"model": state["model"], "optimizer": {"state": {name: without}}}
    with pytest.raises(CheckpointError, match=r"table ebc.t, state iter: in the checkpoint, not in the state dict"):
        load_across_plans(zeros_like(without), tmp_path / "adam")
    dcp.save(without, checkpoint_id=tmp_path / "fused", no_dist=True)
    with pytest.raises(CheckpointError, match=r"table ebc.t, state iter: not in the checkpoint.*fresh=\['ebc.t'\]"):
        load_across_plans(zeros_like(state), tmp_path / "fused")
    states["step"] = 7  # as some scripts count
    save_across_plans(state, tmp_path / "number")
    with pytest.raises(CheckpointError, match=r"table ebc.t, state iter: in the checkpoint, not in the state dict"):
        load_across_plans(zeros_like(without), tmp_path / "number")
    load_across_plans(zeros_like(without), tmp_path / "number", fresh=["t"])


def test_nothing_of_an_entry_is_passed_over(tmp_path: Path) -> None:
    """Layers and their optimizer's states must all load; entries that the state dict lacks are left alone."""
    state = saved(tmp_path / "saved")
    state["optimizer"]["state"] |= {"dense.top.bias": {"exp_avg": torch.rand(5), "step": 3}}
    state["model"]["low.bias"] = torch.rand(2)
    save_across_plans(state, tmp_path / "whole")
    model, table = {WEIGHT: state["model"][WEIGHT]}, {f"dense.{WEIGHT}": state["optimizer"]["state"][f"dense.{WEIGHT}"]}
    without_layers = ["model.top", "model.low", "optimizer.state.dense.top"]
    for asked, dropped, told in (
        ({"model": model}, ["model.top"], r"'model.low.bias': in the checkpoint.* in dropped="),
        ({"model": state["model"], "optimizer": {"state": table}}, [], r"'.*\.dense.top.bias': .*init_state\(\)"),
        ({"model": state["model"], "optimizer": {"state": {}}}, [], r"table ebc.t, state momentum1: in the checkpoint"),
        ({"model": model}, ["model.tops"], "'model.tops'"),
        ({"model": model}, ["model.top", "model.low.bias"], None),
        ({"model": model, "optimizer": {"state": table}}, without_layers, None),
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


def test_tables_of_another_size_damaged_files_and_folders_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    state = saved(tmp_path / "saved")
    longer = {"model": {**state["model"], WEIGHT: torch.zeros(99, DIM)}}
    with pytest.raises(CheckpointError, match=r"table ebc.t: of size \(12, 16\) in the checkpoint, \(99, 16\) here"):
        load_across_plans(longer, tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"nowhere.*no file .metadata"):
        load_across_plans(zeros_like(state), tmp_path / "nowhere")
    data = next((tmp_path / "saved").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"saved: a file is missing or damaged"):
        load_across_plans({"model": zeros_like(state["model"])}, tmp_path / "saved")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = {"model": {WEIGHT: torch.zeros(3000, DIM)}}
    for target, why in ((tmp_path / "file/new", "Not a directory"), (tmp_path / "full", "File too large")):
        with files_up_to(100_000), pytest.raises(FileError, match=f"{target}: cannot be written: {why}"):
            save_across_plans(state, target)
        assert not target.exists()


@pytest.mark.usefixtures("group")
def test_states_without_a_rule_and_tables_start_anew_by_consent(tmp_path: Path) -> None:
    """Nothing says what other column slices make of a state of one value per row."""
    state = {"model": {WEIGHT: torch.randn(ROWS, DIM)}, "optimizer": {"state": {WEIGHT: {"t.odd": torch.rand(ROWS)}}}}
    save_across_plans(state, tmp_path / "saved")
    for consent, told in (
        ({}, r"table ebc.t, state odd: .*no rule.*; or pass fresh=\['ebc.t'\]"),
        ({"fresh": ["ebc.tt"]}, "'ebc.tt' .did you mean 'ebc.t'"),
        ({"added": ["t"]}, "state odd: .*no rule"),
    ):
        with pytest.raises(CheckpointError, match=told):
            load_across_plans(fused(((0, 0, ROWS, 8), (0, 8, ROWS, 8)), ("odd",)), tmp_path / "saved", **consent)
    for consent, carried in (({"fresh": ["t"]}, True), ({"added": ["t"], "dropped": ["ebc.t"]}, False)):
        found = fused(((0, 0, ROWS, 8), (0, 8, ROWS, 8)), ("odd",))
        load_across_plans(found, tmp_path / "saved", **consent)
        assert not any(shard.any() for shard in shards_of(found, "odd"))
        whole_RD = torch.cat([shard.tensor for shard in found["model"][WEIGHT].local_shards()], dim=1)
        assert torch.equal(whole_RD, state["model"][WEIGHT] * carried)
    without = {"model": fused(WHOLE)["model"], "optimizer": {"state": {}}}
    load_across_plans(without, tmp_path / "saved", added=["t"], dropped=["t"])


def test_large_shards_are_read_and_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 300
    state = saved(tmp_path / "plain", rows=rows, transposed=torch.rand(DIM, rows).T)
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


def _peak_bytes(folder: Path, sizes: list[int]) -> None:
    """Write the peak of loading the last table. Everything that has to be imported is, for the first."""
    reading.PIECE_BYTES = PIECE_BYTES
    for rows in sizes:
        state = {"model": {WEIGHT: torch.ones(rows, DIM)}}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        load_across_plans(state, folder / str(rows), dropped=["model.top"])
    (folder / "peak").write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    sizes = [300_000, 1_200_000]  # the larger of 73 MiB
    for rows in sizes:
        saved(tmp_path / str(rows), rows=rows)
    assert ended(start(_peak_bytes, tmp_path, sizes)) == [0]
    # A few pieces, and what the allocator keeps.
    assert int((tmp_path / "peak").read_text()) < 12 * PIECE_BYTES


def _killed(folder: Path, count: int) -> None:
    calls = iter(range(count))
    real = state_dicts.WholeWriter.write_data

    def write_data(self: Any, *arguments: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    def rename(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    state_dicts.WholeWriter.write_data, state_dicts.os.rename = write_data, rename
    save_across_plans({"model": {WEIGHT: torch.zeros(ROWS, DIM)}}, folder / "new")


@pytest.mark.parametrize("count", [0, 1])
def test_killed_at_any_moment_the_old_one_is_whole_and_the_new_one_absent(count: int, tmp_path: Path) -> None:
    state = saved(tmp_path / "saved")
    assert ended(start(_killed, tmp_path, count)) == [-signal.SIGKILL]
    assert not (tmp_path / "new").exists() and list(tmp_path.glob(".new.*.part"))
    save_across_plans(state, tmp_path / "new")
    assert not list(tmp_path.glob(".new.*.part"))
    for name in ("saved", "new"):
        found = zeros_like(state)
        load_across_plans(found, tmp_path / name)
        torch.testing.assert_close(found["model"], state["model"])
    with pytest.raises(FileError, match=r"new: exists"):
        save_across_plans(state, tmp_path / "new")


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


@pytest.mark.usefixtures("group")
def test_the_command_describes_a_checkpoint(tmp_path: Path) -> None:
    state = fused(((0, 0, ROWS, 4), (0, 4, ROWS, 12)), ("momentum1",))
    save_across_plans({**state, "top.bias": torch.zeros(5), "epoch": 3}, tmp_path / "saved")
    told = run_json("info", tmp_path / "saved")
    table = told["tables"]["ebc.t"]
    assert table["column_slices"] == [4, 12] and table["states"]["momentum1"] == [2 * ROWS]
    assert (table["rows"], table["dim"], table["data_type"]) == (ROWS, DIM, "float32")
    assert told["others"] == ["epoch", "top.bias"]
    assert "ebc.t" in run("info", tmp_path / "saved").stdout
