# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fused kernels compute what plain PyTorch computes, on exactly the inputs asked for, by a fast instruction set.

With ``pytest -m gpu`` on a GPU, else on the CPU. What only a GPU does (queues, events, copies that wait) is tested on
stand-ins for its events.

Shape letters: L lookups, F features, B batch, O outputs, N elements.
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.measured_costs import SetClock
from dreamshard_planner import Checkpoint, DreamShardError
from dreamshard_planner.checkpoints.choice import SHIPPED, checkpoint_notes
from dreamshard_planner.cli import diagnosis
from dreamshard_planner.cost.dataset import CostDataset, other_hardware
from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import DatasetError, TaskError
from dreamshard_planner.measure import hardware, kernels
from dreamshard_planner.measure.hardware import CPU_NAME_VARIABLE, REFERENCE, check_kernels, describe_hardware
from dreamshard_planner.measure.kernels import Arena, FusedKernel, core_use_ns, draw_inputs, time_groups
from dreamshard_planner.measure.sets import REFERENCE_SETS, collect, draw_sets
from dreamshard_planner.support.reproducible import intra_op_threads
from dreamshard_planner.workload.pools import pool_tables
from dreamshard_planner.workload.tables import Workload

REUSE = (0.5, 0.3, 0.2) + (0.0,) * 14
LEARNING_RATE = 1e-3


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def workload(name: str = "a", **changes) -> Workload:
    return replace(Workload(name, 50, 8, 6, 2.5, 8.0, REUSE), **changes)


def small_arena() -> Arena:
    return Arena("cpu", size_bytes=1 << 20)


GROUPS = {
    "mixed dims": [workload(), workload("b", dim=12, rows=7, pooling_factor=1.0, distinct_rows=3.0)],
    "one table": [workload()],
    "one row": [workload(rows=1, distinct_rows=1.0)],
    "shared table": [workload(num_features=3), workload("b")],
    "weighted": [workload(weighted=True), workload("b", weighted=True)],
    "sequence": [workload(pooled=False), workload("b", pooled=False, rows=9, distinct_rows=5.0)],
    "no lookups": [workload(pooling_factor=0.0, distinct_rows=0.0, reuse_histogram=(0.0,) * 17), workload("b")],
}


def plain_output(kernel: FusedKernel, workloads: list[Workload], tables: list[torch.Tensor]) -> torch.Tensor:
    """The kernel's output by torch.nn.functional, from [rows, dim] tables."""
    batch, first, feature, outputs = workloads[0].batch_size, workloads[0], 0, []
    for w, table in zip(workloads, tables, strict=True):
        for _ in range(w.num_features):
            offsets = kernel.offsets_FB[feature * batch : (feature + 1) * batch + 1]
            span = slice(int(offsets[0]), int(offsets[-1]))
            indices_L = kernel.indices_L[span]
            if first.pooled:
                weights_L = kernel.sample_weights_L[span] if w.weighted else None
                starts_B = offsets[:-1] - offsets[0]
                given = {"mode": "sum", "per_sample_weights": weights_L}
                outputs.append(torch.nn.functional.embedding_bag(indices_L, table, starts_B, **given))
            else:
                outputs.append(table[indices_L])
            feature += 1
    return torch.cat(outputs, dim=1 if first.pooled else 0)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_forward_and_sgd_match_plain_torch(group: list[Workload], device: str) -> None:
    kernel = FusedKernel(group, Arena(device, size_bytes=1 << 20), seed=3)
    for _ in range(2):
        tables = [t.clone().requires_grad_() for t in kernel.module.split_embedding_weights()]
        assert [tuple(t.shape) for t in tables] == [(w.rows, w.dim) for w in group]
        expected_O = plain_output(kernel, group, tables)
        torch.testing.assert_close(kernel.forward(), expected_O)
        expected_O.backward(kernel.grad_O)
        kernel.backward()
        for table, updated in zip(tables, kernel.module.split_embedding_weights(), strict=True):
            torch.testing.assert_close(updated, table.detach() - LEARNING_RATE * table.grad, rtol=1e-4, atol=1e-6)
        kernel.move()


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad"])
def test_adagrad_matches_its_formula(optimizer: str) -> None:
    """With a state per row, the mean over its weights, or per weight; wherever the windows lie."""
    group = [workload(optimizer=optimizer), workload("b", dim=4, rows=5, optimizer=optimizer)]
    kernel = FusedKernel(group, small_arena(), seed=1)
    tables = [t.clone().requires_grad_() for t in kernel.module.split_embedding_weights()]
    (states,) = zip(*kernel.module.split_optimizer_states(), strict=True)
    before = [state.clone() for state in states]
    plain_output(kernel, group, tables).backward(kernel.grad_O)
    kernel.forward()
    kernel.backward()
    for table, state, old, new in zip(tables, states, before, kernel.module.split_embedding_weights(), strict=True):
        squares = table.grad.square()
        squares = old + (squares.mean(dim=1) if optimizer == "rowwise_adagrad" else squares.view_as(old))
        step = table.grad / (squares.sqrt() + 1e-8).view(len(table), -1)
        torch.testing.assert_close(state, squares)
        torch.testing.assert_close(new, table.detach() - LEARNING_RATE * step, rtol=1e-5, atol=1e-7)


def test_half_precision_weights() -> None:
    kernel = FusedKernel([workload(weight_bytes=2)], small_arena())
    (table,) = kernel.module.split_embedding_weights()
    assert table.dtype == torch.float16
    expected_O = plain_output(kernel, [workload()], [table.float()])
    torch.testing.assert_close(kernel.forward(), expected_O)
    kernel.backward()


@pytest.mark.parametrize(("pooling", "lookups"), [(0.0, 0), (1e-3, 1), (2.5, 15), (2.45, 15), (40.0, 240)])
def test_inputs_have_the_exact_lookups(pooling: float, lookups: int) -> None:
    reuse = REUSE if pooling else (0.0,) * 17
    w = workload(pooling_factor=pooling, num_features=2, reuse_histogram=reuse, distinct_rows=min(8.0, lookups))
    indices_L, lengths_FB = draw_inputs(w, torch.Generator().manual_seed(0))
    assert indices_L.shape == (lookups,) and indices_L.dtype == torch.int64
    assert lengths_FB.shape == (12,) and int(lengths_FB.sum()) == lookups
    assert not lookups or (int(indices_L.min()) >= 0 and int(indices_L.max()) < w.rows)


def test_a_table_has_the_same_inputs_in_every_group_and_process() -> None:
    arena = small_arena()
    alone = FusedKernel([workload()], arena, seed=5)
    together = FusedKernel([workload("b", dim=4), workload(dim=16)], arena, seed=5)
    private = FusedKernel([workload()], small_arena(), seed=5)
    other_seed = FusedKernel([workload()], arena, seed=6)
    assert torch.equal(alone.indices_L, together.indices_L[-15:])
    assert torch.equal(alone.indices_L, private.indices_L)
    assert not torch.equal(alone.indices_L, other_seed.indices_L)


def test_tables_larger_than_the_arena_run_inside_it() -> None:
    arena = Arena("cpu", size_bytes=4 << 20)
    capacity = arena.weights(torch.float32).numel()
    huge = workload(rows=10**9, dim=8)
    kernel = FusedKernel([huge, workload("b", rows=100_000), workload("c", rows=100_000)], arena)
    assert kernel.module.rows_per_table.tolist() == [capacity // 8, 100_000, 100_000]
    assert int(kernel.indices_L.max()) < capacity // 8
    for _ in range(20):
        kernel.move()
        starts = kernel.module.weights_physical_offsets
        sizes = [rows * dim for rows, dim, _, _ in kernel.module.embedding_specs]
        assert all(s >= 0 and s + n <= capacity and s % 64 == 0 for s, n in zip(starts, sizes, strict=True))
        assert kernel.module.weights_host.data_ptr() == arena.weights(torch.float32).data_ptr()
        kernel.forward()
        kernel.backward()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        *(
            ([workload(), workload("odd", **{field: value})], f"table 'odd'.*{field}")
            for field, value in (("batch_size", 7), ("optimizer", "rowwise_adagrad"))
        ),
        ([], "at least one table"),
        ([workload(pooled=False), workload("odd", pooled=False, dim=4)], "'odd'.*dim is 4, not 8"),
        *(
            ([workload("odd", **field)], "table 'odd': measured kernels have dims")
            for field in (
                {"dim": 6},
                {"weight_bytes": 1},
                {"pooled": False, "weighted": True},
                {"memory": "uvm"},
                {"optimizer": "adam"},
            )
        ),
    ],
)
def test_kernels_that_do_not_exist_are_refused(group: list[Workload], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        FusedKernel(group, small_arena())


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux does not count it")
def test_time_in_which_others_have_the_core_is_counted() -> None:
    before_ns, cores = core_use_ns(), os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for process in (0, other.pid):
            os.sched_setaffinity(process, {min(cores)})
        while (core_use_ns() - before_ns)[1] < 1e8:
            kernel = FusedKernel([workload("a")], small_arena())
            kernel.forward()
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    assert (core_use_ns() - before_ns)[0] > 0


def test_time_groups_keeps_every_sample() -> None:
    arena = small_arena()
    kernels = [FusedKernel(group, arena) for group in (GROUPS["one table"], GROUPS["mixed dims"])]
    timed = time_groups(kernels, kernels[0], repeats=3)
    assert timed.samples_ms.shape == timed.reference_ms.shape == (2, 3, 2)
    assert bool((timed.samples_ms > 0).all() and (timed.reference_ms > 0).all())
    with pytest.raises(TaskError, match="0 repeats"):
        time_groups(kernels, kernels[0], repeats=0)


def test_processor_time_leaves_out_what_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FusedKernel(GROUPS["one table"], small_arena())
    forward = kernel.forward

    def waiting() -> torch.Tensor:
        time.sleep(0.2)  # the thread computes nothing, as if another process had the core
        return forward()

    monkeypatch.setattr(kernel, "forward", waiting)
    with intra_op_threads(1):
        by_thread = time_groups([kernel], kernel, repeats=1, warmup=0)
    with intra_op_threads(2):
        by_clock = time_groups([kernel], kernel, repeats=1, warmup=0)
    assert 0 < by_thread.samples_ms[0, 0, 0] < by_clock.samples_ms[0, 0, 0] - 100


def test_hardware_names_what_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = describe_hardware("cpu", threads=1)
    assert hardware["device"] == "cpu" and hardware["threads"] == 1 and hardware["torch"] == torch.__version__
    assert all(isinstance(value, (str, int)) for value in hardware.values())
    assert "'threads': 1" in other_hardware(hardware, describe_hardware("cpu", threads=2))
    for given in ("abacus", ""):
        monkeypatch.setenv(CPU_NAME_VARIABLE, given)
        hardware = describe_hardware("cpu", threads=1)
        assert hardware["name"] == hardware["cpu"] != "" and (hardware["name"] == "abacus") == (given == "abacus")


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that FBGEMM found no instruction set in this process."""
    monkeypatch.setattr(hardware, "instruction_set", lambda: REFERENCE)


def test_doctor_asks_a_python_that_ignores_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libtorch.so").write_bytes(b"cpuinfo_initialize")
    (tmp_path / "platform.py").write_text("raise RuntimeError")
    monkeypatch.setattr(diagnosis, "torch_library", lambda name: tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert "FBGEMM on CPU" in [finding.subject for finding in diagnosis._cpu()]


def test_reference_kernels_are_not_measured(reference: None, tmp_path: Path) -> None:
    with pytest.raises(DreamShardError, match="slow reference kernels.*LD_PRELOAD=.*libc10.so"):
        collect([REFERENCE_SETS["cpu"]], tmp_path, repeats=1, arena=Arena("cpu", size_bytes=1 << 26))
    assert not list(tmp_path.glob("block*"))
    kernel = FusedKernel(GROUPS["one table"], small_arena())
    with pytest.raises(DreamShardError, match="nothing was measured"):
        time_groups([kernel], kernel, 1)
    check_kernels("cuda")


def test_plans_for_cpus_tell_of_reference_kernels_and_other_releases(
    reference: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.load(SHIPPED / "cpu.safetensors")
    cpu, cuda = (Machine(ranks_per_host=1, device=device).topology() for device in ("cpu", "cuda"))
    assert "slow reference kernels" in checkpoint_notes(checkpoint, cpu, uses_network=False)[0]
    assert checkpoint_notes(checkpoint, cuda, uses_network=False) == ()
    monkeypatch.setattr(hardware, "instruction_set", lambda: "avx2")
    here = describe_hardware("cpu", 1)
    assert here["instruction_set"] == "avx2"

    def notes(**measured: str | int) -> list[str]:
        made = replace(checkpoint, metadata={**checkpoint.metadata, "hardware": {**here, **measured}})
        return [note for note in checkpoint_notes(made, cpu) if note.startswith("costs were measured with")]

    assert notes() == []
    (note,) = notes(torch="2.1.0", instruction_set="avx512")
    assert note == (
        "costs were measured with torch 2.1.0, instruction set avx512; "
        f"this environment has torch {here['torch']}, instruction set avx2"
    )
    del here["instruction_set"]  # as in older files
    assert notes() == []


def test_files_of_different_instruction_sets_are_kept_apart_and_older_files_go_with_any() -> None:
    here = {**describe_hardware("cpu", 1), "instruction_set": "avx2"}
    old = {name: value for name, value in here.items() if name != "instruction_set"}
    sets = [REFERENCE_SETS["cpu"]]
    hardware = (here, old, {**here, "instruction_set": "avx512"})
    of = [CostDataset.from_sets(sets, [[[1.0, 2.0]]], one) for one in hardware]
    assert len(CostDataset.concatenate(of[:2])) == 2
    with pytest.raises(DatasetError, match="avx512"):
        CostDataset.concatenate([of[0], of[2]])


def test_moves_that_are_brought_to_the_device_together_are_as_drawn(device: str) -> None:
    arena = Arena(device, size_bytes=1 << 20)
    group = [workload(num_features=2, optimizer="rowwise_adagrad"), workload("b", optimizer="rowwise_adagrad")]
    kernel = FusedKernel(group, arena)
    assert [offsets_F.tolist() for _, offsets_F in kernel._moves] == [[a, a, b] for (a, b), _ in kernel._moves]
    assert {offsets_F.device.type for _, offsets_F in kernel._moves} == {device}
    places = set()
    for _ in range(70):  # more than come at once
        kernel.move()
        assert kernel.module.weights_offsets.tolist() == [kernel.module.weights_physical_offsets[t] for t in (0, 0, 1)]
        places.add(kernel.module.weights_offsets[0].item())
    assert len(places) > 60


def test_inputs_are_drawn_on_the_device(device: str) -> None:
    wanted = workload(rows=10_000, batch_size=512, pooling_factor=8.0, distinct_rows=2048.0)
    with torch.device("meta"):  # whatever forgets to say where it is made is nowhere
        indices_L, lengths_FB = draw_inputs(wanted, torch.Generator(device).manual_seed(0))
    assert (indices_L.device.type, lengths_FB.device.type) == (device, device)
    assert (len(indices_L), int(lengths_FB.sum())) == (4096, 4096)
    assert len(indices_L.unique()) == 2048


def test_sets_are_measured_on_the_device(device: str, tmp_path: Path) -> None:
    tables = pool_tables(["merlin_tiny"])[0]
    sets = draw_sets(tables, 4, seed=0, batch_sizes=(64,), max_tables=4, device=device)
    arena = Arena(device, size_bytes=1 << 26)
    data = collect(sets, tmp_path / "blocks", device, repeats=2, progress=False, arena=arena)
    assert data.hardware == describe_hardware(device, 1)
    assert data.samples_ms.shape == data.reference_ms.shape == (4, 2, 2)
    clock = SetClock([w for group in sets[:1] for w in group], arena)
    samples = clock.samples([(0,)], repeats=2)
    assert 0 <= samples.launch_bound_N <= 1 and bool((samples.samples_ms > 0).all())


class _Event:
    """A CUDA event as the host sees it: the device reaches a start in the time of so many flushes."""

    reached_before: int
    flushes = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.flushed, _Event.flushes = _Event.flushes, 0

    def query(self) -> bool:
        return self.flushed < _Event.reached_before

    def elapsed_time(self, end: object) -> float:
        return 2.0


@pytest.mark.parametrize(("reached_before", "runs", "share"), [(1, 1, 0.0), (4, 3, 0.0), (99, 5, 1.0)])
def test_launch_bound_runs_get_a_longer_head_start(
    reached_before: int, runs: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernels, "_FLUSH_BYTES", 1)
    monkeypatch.setattr(_Event, "reached_before", reached_before, raising=False)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda _: setattr(_Event, "flushes", _Event.flushes + 1))
    moves = []
    kernel = FusedKernel([workload()], small_arena())
    monkeypatch.setattr(kernel, "move", lambda: moves.append(1))
    cuda = kernels._CudaRuns(torch.device("cpu"))
    first = cuda(kernel)
    assert len(moves) == runs
    second = cuda(kernel)  # behind as many flushes at once
    assert len(moves) == runs + 1
    samples_ms, reference_ms, launch_bound_N = cuda.samples([[(first, second)]])
    assert samples_ms.tolist() == reference_ms.tolist() == [[[2.0, 2.0]]] and launch_bound_N.tolist() == [share]
