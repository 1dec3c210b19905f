# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hooks on a sharded model, and the record of what they see.

Hooks listen to the forward and backward pass, the fused kernels in it, and the collectives that TorchRec calls around
these. All of them are taken off again. The record takes bounded memory: of long trainings only every second, fourth,
... step is timed, the same on all ranks, since they count alike.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner.errors import ObservationError
from dreamshard_planner.torchrec_components import compat

MOST_STEPS = 256
"""That are kept."""
NEEDED = ("step", "forward", "backward")
"""Without these an interval between two forward passes is no training step."""

TOGETHER = (" span", " kernels")
"""How names of intervals end that may overlap: of exchanges on their way, and of kernels meanwhile. What any of them
covers counts once, by name and, as ``outputs span together``, over all that carry the same."""

Mark = Any
"""A moment: on a GPU an event of its stream; on a CPU nanoseconds of the host's clock, and of this thread's own."""

COLLECTIVES = {
    "all_to_all_single": ("all_to_all", "input", 1),
    "reduce_scatter_tensor": ("reduce_scatter", "input", 1),
    "reduce_scatter": ("reduce_scatter", "input_list", 1),
    "all_gather_into_tensor": ("all_gather", "input_tensor", 1),
    "all_gather": ("all_gather", "tensor", 1),
}
"""Functions of ``torch.distributed`` that TorchRec calls: the operation, and the name and place of what is sent."""
CARRIED = {"torchrec.distributed.comm_ops": "outputs", "torchrec.distributed.dist_data": "lookups"}
"""What they carry, by the module that calls them; other callers' are not the embeddings'."""


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


def lookups_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Every sharded module of a model with its path, and each of its lookups with its sharding type."""
    for path, module in get_unwrapped_module(model).named_modules():
        for kind, lookup in compat.lookups_of(module):
            yield path, module, kind, lookup


def kernels_in(lookup: nn.Module) -> list[nn.Module]:
    """TorchRec's modules around each fused or dense kernel."""
    return [module for module in lookup.modules() if hasattr(module, "emb_module") and hasattr(module, "config")]


class Hooks:
    """What listens to one model; to be closed."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder, self._clock, self._stack = recorder, recorder.clock, ExitStack()

    def close(self) -> None:
        """Take all off."""
        self._stack.close()

    def listen_to_steps(self, model: nn.Module) -> None:
        """Forward and backward pass of the whole model, and where one step ends and the next begins."""
        starts: list[Mark] = []

        def before(*_: Any) -> None:
            self._recorder.next_step()
            starts[:] = [self._clock.mark()]

        def after(_module: nn.Module, _given: Any, output: Any) -> None:
            step = self._recorder.current
            if step is None:
                return
            step.add("forward", starts[0], self._clock.mark())
            trained = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
            if (loss := next(trained, None)) is not None:
                loss.register_hook(partial(self._backward, step))

        self._keep(model.register_forward_pre_hook(before), model.register_forward_hook(after))

    def _backward(self, step: Step, *_: Any) -> None:
        """Within the backward pass, which begins where something is first seen of it, at the loss if that is what the
        model gives; it ends where the engine has nothing left to do."""
        if step.backward_runs:
            return
        step.backward_runs, start = True, self._clock.mark()

        def ended() -> None:
            step.backward_runs = False
            step.add("backward", start, self._clock.mark())

        compat.after_backward(ended)

    def listen_to_kernel(self, name: str, kernel: nn.Module, called: Callable[[Step, Tensor, Tensor], None]) -> None:
        """Forward, and backward with the optimizer, of one of FBGEMM's modules.

        Args:
            name: of its times.
            kernel: FBGEMM's.
            called: told of the indices and offsets of timed calls.
        """
        starts: list[Mark] = []

        def before(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            starts.clear()
            if self._recorder.current is not None:
                both = {**dict(zip(("indices", "offsets"), given, strict=False)), **named}
                called(self._recorder.current, both["indices"], both["offsets"])
                starts.append(self._clock.mark())

        def after(_module: nn.Module, _given: Any, output: Tensor) -> None:
            step = self._recorder.current
            if step is None or not starts:
                return
            self._add_kernel(step, f"{name} forward", starts.pop())
            if output.grad_fn is not None:
                begun: list[Mark] = []

                def begin(*_: Any) -> None:
                    self._backward(step)
                    begun.append(self._clock.mark())

                output.grad_fn.register_prehook(begin)
                output.grad_fn.register_hook(lambda *_: self._add_kernel(step, f"{name} backward", begun.pop()))

        self._keep(kernel.register_forward_pre_hook(before, with_kwargs=True), kernel.register_forward_hook(after))

    def _add_kernel(self, step: Step, name: str, start: Mark) -> None:
        end = self._clock.mark()
        step.add(name, start, end, computed=True)
        step.add("kernels", start, end)

    def listen_to_inputs(self, module: Any, told: Callable[[KeyedJaggedTensor], None]) -> None:
        """What a sharded module is asked to look up, at every step, unless by a TensorDict; and how long that takes to
        get to its kernels where its forward pass asks and waits. A pipeline asks ahead, while others compute: that is
        not timed."""
        input_dist = module.input_dist

        def listened(context: Any, features: Any, *others: Any, **named: Any) -> Any:
            if isinstance(features, KeyedJaggedTensor):
                told(features)
            step, caller = self._recorder.current, sys._getframe(1).f_code
            if step is None or caller is not ShardedModule.forward.__code__:
                return input_dist(context, features, *others, **named)
            start = self._clock.mark()

            def arrived(lookups: Any) -> Any:
                step.add("input_dist", start, self._clock.mark())
                step.count("input_dist calls", 1)
                return lookups

            def sent(arriving: Awaitable[Any]) -> Awaitable[Any]:
                arriving.callbacks.append(arrived)
                return arriving

            sending = input_dist(context, features, *others, **named)
            sending.callbacks.append(sent)
            return sending

        module.input_dist = listened
        self._stack.callback(delattr, module, "input_dist")

    def listen_to_collectives(self) -> None:
        """TorchRec's, of this process: of one model at a time."""
        for function in COLLECTIVES:
            original = getattr(dist, function)
            if isinstance(original, partial):
                raise ObservationError("another model of this process is observed: train and observe one at a time")
            setattr(dist, function, partial(self._collective, function, original))
            self._stack.callback(setattr, dist, function, original)

    def _collective(self, function: str, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        step, caller = self._recorder.current, sys._getframe(1).f_globals.get("__name__", "")
        if step is None or caller not in CARRIED:
            return original(*given, **named)
        operation, argument, place = COLLECTIVES[function]
        group = named.get("group")
        forward = not compat.is_in_backward()
        if not forward:
            self._backward(step)
        name = _name(CARRIED[caller], operation, forward, dist.get_world_size(group))
        sent = named[argument] if argument in named else given[place]
        splits = named.get("input_split_sizes", given[3] if len(given) > 3 else None)
        step.count(f"{name} calls", 1)
        step.count(f"{name} bytes", sent_bytes(operation, sent, splits, group))
        known, start = len(step.intervals), self._clock.mark()
        work = original(*given, **named)
        if work is None:
            step.add(f"{name} span", start, self._clock.mark())
            return None
        return _Listened(work, self._clock, step, name, start, known)

    def _keep(self, *handles: Any) -> None:
        for handle in handles:
            self._stack.callback(handle.remove)


class _Listened:
    """A collective on its way: ``span`` lasts until it has been waited for, ``kernels`` are those that ran meanwhile,
    ``waited`` is the wait alone."""

    def __init__(self, work: Any, clock: Any, step: Step, name: str, start: Mark, known: int) -> None:
        self._work, self._clock, self._step, self._name, self._start = work, clock, step, name, start
        self._known = known

    def wait(self, *given: Any, **named: Any) -> Any:
        """As the work itself."""
        before = self._clock.mark()
        result = self._work.wait(*given, **named)
        if self._start is not None:
            after = self._clock.mark()
            for kind, begun, ended, _ in self._step.intervals[self._known :]:
                if kind == "kernels":
                    self._step.add(f"{self._name} kernels", begun, ended)
            self._step.add(f"{self._name} span", self._start, after)
            self._step.add(f"{self._name} waited", before, after)
            self._start = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    __class__ = dist.Work  # type: ignore[assignment]  # TorchRec waits for such instances alone


def _name(carried: str, operation: str, forward: bool, ranks: int) -> str:
    """As ``outputs all_to_all forward``; of fewer than all ranks, how many they are."""
    among = "" if ranks == dist.get_world_size() else f" of {ranks}"
    way = "" if carried == "lookups" else " forward" if forward else " backward"
    return f"{carried} {operation}{among}{way}"


def sent_bytes(operation: str, sent: Any, splits: list[int] | None, group: dist.ProcessGroup | None) -> float:
    """That a rank sends to the others: its own part stays."""
    tensors, ranks = sent if isinstance(sent, list) else [sent], dist.get_world_size(group)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if operation == "all_gather":
        return total * (ranks - 1)
    if not splits or not sum(splits):
        return total * (ranks - 1) / ranks
    return total * (1 - splits[dist.get_rank(group)] / sum(splits))
