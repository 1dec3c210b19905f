# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Times of training steps on one rank, in bounded memory: of long trainings only every second, fourth, ... step is
timed, the same on all ranks, since they count alike."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_STEPS = 256
"""That are kept."""
NEEDED = ("step", "forward", "backward")
"""Without these an interval between two forward passes is no training step."""

TOGETHER = (" span", " kernels")
"""How names of intervals end that may overlap: of exchanges on their way, and of kernels meanwhile. What any of them
covers counts once, by name and, as ``outputs span together``, over all that carry the same."""

Mark = Any
"""A moment: on a GPU an event of its stream; on a CPU nanoseconds of the host's clock, and of this thread's own."""


class DeviceClock:
    """Moments on a device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        # The clock of a thread says nothing of others that compute for it.
        self._computed = int(torch.get_num_threads() == 1)

    def mark(self) -> Mark:
        """Now."""
        if not self._cuda:
            return time.perf_counter_ns(), time.thread_time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ms(self, start: Mark, end: Mark, computed: bool) -> float:
        """Milliseconds between two; of what one CPU thread ``computed``, those for which it had the core."""
        if self._cuda:
            return start.elapsed_time(end)
        which = self._computed if computed else 0
        return (end[which] - start[which]) * 1e-6

    def reached(self, mark: Mark) -> bool:
        """Whether the device has come so far."""
        return not self._cuda or mark.query()

    def wait(self, mark: Mark) -> None:
        """Until it has."""
        if self._cuda:
            mark.synchronize()


@dataclass
class Step:
    """One that is timed."""

    index: int
    start: Mark = None
    amounts: dict[str, float] = field(default_factory=dict)
    intervals: list[tuple[str, Mark, Mark, bool]] = field(default_factory=list)
    backward_runs: bool = False

    def add(self, name: str, start: Mark, end: Mark, computed: bool = False) -> None:
        """An interval, see :meth:`DeviceClock.elapsed_ms`; those of one name add up, but for :data:`TOGETHER`."""
        self.intervals.append((name, start, end, computed))

    def count(self, name: str, amount: float) -> None:
        """Anything else that adds up."""
        self.amounts[name] = self.amounts.get(name, 0.0) + amount


class StepRecorder:
    """What each kept step took, by name. A step lasts from one forward pass of the model to the next."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.steps = 0
        """That have ended, timed or not."""
        self.current: Step | None = None
        """None while nothing is timed."""
        self._start: Mark = None
        self._stride = 1
        self._pending: deque[Step] = deque()
        self._kept: dict[int, dict[str, float]] = {}

    def next_step(self) -> None:
        """The model's forward pass begins."""
        now = self.clock.mark()
        if self._start is not None:
            if self.current is not None:
                self.current.add("step", self._start, now)
                self._pending.append(self.current)
            self.steps += 1
        self._start = now
        self.current = None if self.steps % self._stride else Step(self.steps, now)
        # The exchange of a step's lookups may end in the next one, and a device be behind.
        while len(self._pending) > 1 and all(self.clock.reached(end) for _, _, end, _ in self._pending[0].intervals):
            self._keep(self._pending.popleft())

    def _keep(self, step: Step) -> None:
        amounts = step.amounts
        together: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, start, end, computed in step.intervals:
            if name.endswith(TOGETHER):
                begun_ms, ended_ms = (self.clock.elapsed_ms(step.start, mark, False) for mark in (start, end))
                of_all = f"{name.partition(' ')[0]} {name.rpartition(' ')[2]} together"
                together[name].append((begun_ms, ended_ms))
                together[of_all].append((begun_ms, ended_ms))
            else:
                step.count(name, self.clock.elapsed_ms(start, end, computed))
        amounts |= {name: covered_ms(intervals) for name, intervals in together.items()}
        if all(name in amounts for name in NEEDED):
            self._kept[step.index] = amounts
        if len(self._kept) > MOST_STEPS:
            self._stride *= 2
            self._kept = {index: kept for index, kept in self._kept.items() if index % self._stride == 0}

    def columns(self) -> tuple[tuple[int, ...], dict[str, tuple[float, ...]]]:
        """Indices of the kept steps, and what they took by name; waits for the device."""
        while self._pending:
            step = self._pending.popleft()
            for _, _, end, _ in step.intervals:
                self.clock.wait(end)
            self._keep(step)
        names = dict.fromkeys(name for kept in self._kept.values() for name in kept)
        columns = {name: tuple(round(kept.get(name, 0.0), 6) for kept in self._kept.values()) for name in names}
        return tuple(self._kept), columns


def covered_ms(intervals: Iterable[tuple[float, float]]) -> float:
    """Time that lies in any of some intervals, each from when to when."""
    covered, until = 0.0, -math.inf
    for begun, ended in sorted(intervals):
        covered += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return covered
