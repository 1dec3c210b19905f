# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measuring on either kind of device: ``pytest -m gpu`` on a machine with one, the same on the CPU everywhere.

What only a GPU does (queues, events, copies that wait) is tested on stand-ins for its events.
"""

from pathlib import Path

import pytest
import torch

from common.measured_costs import SetClock
from dreamshard_planner.measure import kernels
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.measure.kernels import Arena, FusedKernel, draw_inputs
from dreamshard_planner.measure.sets import collect, draw_sets
from dreamshard_planner.workload.pools import pool_tables
from tests.measure.test_kernels import workload


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


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
    distinct = len(indices_L.unique())
    assert distinct == 2048


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
    kernel = FusedKernel([workload()], Arena("cpu", size_bytes=1 << 20))
    monkeypatch.setattr(kernel, "move", lambda: moves.append(1))
    cuda = kernels._CudaRuns(torch.device("cpu"))
    first = cuda(kernel)
    assert len(moves) == runs
    second = cuda(kernel)  # behind as many flushes at once
    assert len(moves) == runs + 1
    samples_ms, reference_ms, launch_bound_N = cuda.samples([[(first, second)]])
    assert samples_ms.tolist() == reference_ms.tolist() == [[[2.0, 2.0]]] and launch_bound_N.tolist() == [share]
