# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hooks on a sharded model, and the record of the times that they take.

None raises into the training: the first error removes all hooks. The record is bounded: of long trainings it keeps
every second, fourth, ... step, the same on all ranks.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner.errors import ObservationError
from dreamshard_planner.torchrec_components import compat

logger = logging.getLogger(__name__)

MOST_STEPS = 256  # kept
NEEDED = ("step", "forward", "backward")  # of every training step: other calls of the model lack them

Mark = Any
"""A moment: a CUDA event, or on a CPU nanoseconds of the host's clock and of this thread's."""

COLLECTIVES = {
    "all_to_all_single": ("all_to_all", "input"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "all_gather_into_tensor": ("all_gather", "input_tensor"),
    "all_gather": ("all_gather", "tensor"),
}
"""Functions of ``torch.distributed`` that TorchRec calls: operation, and name of the second argument, which is sent."""
CARRIED = {"torchrec.distributed.comm_ops": "outputs", "torchrec.distributed.dist_data": "lookups"}
"""Payload by calling module; calls from elsewhere are not the embeddings'."""


class DeviceClock:
    """Moments on a device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._computed = int(torch.get_num_threads() == 1)  # a thread's clock misses other threads

    def mark(self) -> Mark:
        """Return the present moment."""
        if not self._cuda:
            return time.perf_counter_ns(), time.thread_time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ms(self, start: Mark, end: Mark, computed: bool) -> float:
        """Return milliseconds between two moments; if ``computed`` by one CPU thread, its processor time."""
        if self._cuda:
            return start.elapsed_time(end)
        which = self._computed if computed else 0
        return (end[which] - start[which]) * 1e-6

    def reached(self, mark: Mark, wait: bool = False) -> bool:
        """Return whether the device has come to a moment; ``wait`` until it has."""
        if self._cuda and wait:
            mark.synchronize()
        return not self._cuda or mark.query()


@dataclass
class Step:
    """A step that is timed."""

    index: int
    start: Mark
    amounts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    intervals: list[tuple[str, Mark, Mark, bool]] = field(default_factory=list)
    backward_runs: bool = False

    def add(self, name: str, start: Mark, end: Mark, computed: bool = False) -> None:
        """Add an interval, see :meth:`DeviceClock.elapsed_ms`; of equal names, the union counts."""
        self.intervals.append((name, start, end, computed))


class StepRecorder:
    """Times of each kept step, by name. A step lasts from one forward pass of the model to the next, which may be an
    evaluation."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.steps = 0  # that have ended, timed or not
        self.current: Step | None = None
        self._runs = False  # a step, timed or not
        self._stride = 1
        self._pending: deque[Step] = deque()
        self._kept: dict[int, dict[str, float]] = {}

    def end_step(self, now: Mark) -> None:
        """End the current step, if there is one: the model is evaluated."""
        if self.current is not None:
            self.current.add("step", self.current.start, now)
            self._pending.append(self.current)
        self.steps += self._runs
        self._runs, self.current = False, None

    def next_step(self) -> None:
        """End the current step, since the forward pass of another one begins."""
        # A step's lookups may still be exchanged in the next one, and the device may lag.
        while self._pending and all(self.clock.reached(end) for _, _, end, _ in self._pending[0].intervals):
            self._keep(self._pending.popleft())
        now = self.clock.mark()
        self.end_step(now)
        self._runs, self.current = True, None if self.steps % self._stride else Step(self.steps, now)

    def _keep(self, step: Step) -> None:
        intervals: dict[str, list[list[float]]] = defaultdict(list)
        for name, start, end, computed in step.intervals:
            begun = self.clock.elapsed_ms(step.start, start, False)
            intervals[name].append([begun, begun + self.clock.elapsed_ms(start, end, computed)])
        if all(name in intervals for name in NEEDED) and step.index % self._stride == 0:
            self._kept[step.index] = step.amounts | {name: covered_ms(some) for name, some in intervals.items()}
        if len(self._kept) > MOST_STEPS:
            self._stride *= 2
            self._kept = {index: kept for index, kept in self._kept.items() if index % self._stride == 0}

    def columns(self) -> tuple[tuple[int, ...], dict[str, tuple[float, ...]]]:
        """Return indices of the kept steps, and their amounts by name; waits for the device."""
        while self._pending:
            step = self._pending.popleft()
            for _, _, end, _ in step.intervals:
                self.clock.reached(end, wait=True)
            self._keep(step)
        names = dict.fromkeys(name for kept in self._kept.values() for name in kept)
        columns = {name: tuple(round(kept.get(name, 0.0), 6) for kept in self._kept.values()) for name in names}
        return tuple(self._kept), columns


def covered_ms(intervals: Iterable[list[float]]) -> float:
    """Return the length of the union of intervals."""
    covered, until = 0.0, -math.inf
    for begun, ended in sorted(intervals):
        covered += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return covered


def lookups_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yield path, sharded module, sharding type and lookup of all lookups of a model."""
    for path, module in get_unwrapped_module(model).named_modules():
        for kind, lookup in compat.lookups_of(module):
            yield path, module, kind, lookup


def kernels_in(lookup: nn.Module) -> list[nn.Module]:
    """Return TorchRec's modules around each fused or dense kernel."""
    return [module for module in lookup.modules() if hasattr(module, "emb_module") and hasattr(module, "config")]


def trains(module: nn.Module) -> bool:
    """Return whether a call of a module is a training step's: an evaluation has other batches, and no backward."""
    return module.training and torch.is_grad_enabled()


def guarded(callback: Callable[..., Any], failed: Callable[[Exception], None]) -> Callable[..., Any]:
    """Return a callback that never raises: its first error goes to ``failed`` and disables it."""
    broken = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal broken
        if not broken:
            try:
                return callback(*args, **kwargs)
            except Exception as error:  # an observer's fault must not end a training
                broken = True
                failed(error)
        return None

    return call


class Hooks:
    """Hooks on one model, until :meth:`close`. The first error in one of them closes all, with a warning."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder, self._clock, self._stack = recorder, recorder.clock, ExitStack()
        self._safe, self._closed = partial(guarded, failed=self._fail), False

    def close(self) -> None:
        """Remove all hooks; also from within one."""
        self._recorder.current, self._closed = None, True
        self._stack.close()

    def _fail(self, error: Exception) -> None:
        logger.warning("the observation ends, and training goes on: %s: %s", type(error).__name__, error)
        self.close()

    def _keep(self, *handles: Any) -> None:
        for handle in handles:
            self._stack.callback(handle.remove)

    def listen_to_steps(self, model: nn.Module) -> None:
        """Time training steps, and the forward and backward pass of the whole model in them."""

        def before(*_: Any) -> None:
            if self._closed:  # by another hook of this very call
                return
            if trains(model):
                self._recorder.next_step()
            else:
                self._recorder.end_step(self._clock.mark())

        def after(_module: nn.Module, _given: Any, output: Any) -> None:
            if (step := self._recorder.current) is None:
                return
            step.add("forward", step.start, self._clock.mark())
            trained = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
            if (loss := next(trained, None)) is not None:
                loss.register_hook(self._safe(partial(self._backward, step)))

        self._keep(model.register_forward_pre_hook(self._safe(before)), model.register_forward_hook(self._safe(after)))

    def _backward(self, step: Step, *_: Any) -> None:
        """Time the running backward pass, from the first hook that sees it until the engine is done."""
        if step.backward_runs:
            return
        step.backward_runs, start = True, self._clock.mark()

        def ended() -> None:
            step.backward_runs = False
            step.add("backward", start, self._clock.mark())

        compat.after_backward(self._safe(ended))

    def listen_to_kernel(self, name: str, kernel: Any) -> None:
        """Time forward, and backward with the optimizer, of FBGEMM's module in one of TorchRec's, and count what it
        reads; ``name`` begins the names of both."""
        starts: list[Mark] = []

        def before(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            starts.clear()
            if (step := self._recorder.current) is not None:
                both = {**dict(zip(("indices", "offsets"), given, strict=False)), **named}
                step.amounts[f"{name} lookups"] += both["indices"].numel()
                features = max(1, kernel.config.num_features())
                step.amounts[f"{name} samples"] += (both["offsets"].numel() - 1) // features
                starts.append(self._clock.mark())

        def add(step: Step, way: str, start: Mark) -> None:
            end = self._clock.mark()
            step.add(f"{name} {way}", start, end, computed=True)
            step.add("kernels", start, end)

        def after(_module: nn.Module, _given: Any, output: Tensor) -> None:
            step = self._recorder.current
            if step is None or not starts:
                return
            add(step, "forward", starts.pop())
            if output.grad_fn is not None:
                begun: list[Mark] = []

                def begin(*_: Any) -> None:
                    self._backward(step)
                    begun.append(self._clock.mark())

                output.grad_fn.register_prehook(self._safe(begin))
                output.grad_fn.register_hook(self._safe(lambda *_: add(step, "backward", begun.pop())))

        self._keep(
            kernel.emb_module.register_forward_pre_hook(self._safe(before), with_kwargs=True),
            kernel.emb_module.register_forward_hook(self._safe(after)),
        )

    def listen_to_inputs(self, module: Any, told: Callable[[KeyedJaggedTensor], None]) -> None:
        """Hand a sharded module's lookups of every training step to ``told``, except TensorDicts, and time their way to
        the kernels. A pipeline sends lookups ahead while others compute: that is not timed."""
        input_dist = module.input_dist

        def listened(context: Any, features: Any, *others: Any, **named: Any) -> Any:
            if isinstance(features, KeyedJaggedTensor) and trains(module):
                told(features)
            step, caller = self._recorder.current, sys._getframe(1).f_code
            if step is None or caller is not ShardedModule.forward.__code__:
                return input_dist(context, features, *others, **named)
            start = self._clock.mark()

            def arrived(lookups: Any) -> Any:
                step.add("input_dist", start, self._clock.mark())
                step.amounts["input_dist calls"] += 1
                return lookups

            def sent(arriving: Any) -> Awaitable[Any]:
                arriving.callbacks.append(arrived)
                return arriving

            sending = input_dist(context, features, *others, **named)
            sending.callbacks.append(sent)
            return sending

        module.input_dist = listened
        self._stack.callback(delattr, module, "input_dist")

    def listen_to_collectives(self) -> None:
        """Time TorchRec's collectives in this process; ObservationError if another model's are timed already."""
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
        ended = self._safe(self._begin_collective)(step, CARRIED[caller], function, given, named)
        work = original(*given, **named)
        if ended is None:
            return work
        if work is None:
            ended()
            return None
        return _TimedWork(work, self._clock, ended)

    def _begin_collective(
        self, step: Step, carried: str, function: str, given: tuple[Any, ...], named: dict[str, Any]
    ) -> Callable[..., None]:
        """Count a collective; return what adds its times, given the moment since which this rank waits, if it does."""
        operation, argument = COLLECTIVES[function]
        group, forward = named.get("group"), not compat.is_in_backward()
        if not forward:
            self._backward(step)
        among = "" if (ranks := dist.get_world_size(group)) == dist.get_world_size() else f" of {ranks}"
        way = "" if carried == "lookups" else " forward" if forward else " backward"
        name = f"{carried} {operation}{among}{way}"
        sent = named[argument] if argument in named else given[1]
        splits = named.get("input_split_sizes", given[3] if len(given) > 3 else None)
        step.amounts[f"{name} calls"] += 1
        step.amounts[f"{name} bytes"] += sent_bytes(operation, sent, splits, group)
        known, start = len(step.intervals), self._clock.mark()

        def ended(waits: Mark = None) -> None:
            now = self._clock.mark()
            spans = [("span", start, now)]
            if waits is not None:
                spans += [(kind, *marks) for kind, *marks, _ in step.intervals[known:] if kind == "kernels"]
                step.add(f"{name} waited", waits, now)
            for kind, begun, done in spans:
                step.add(f"{name} {kind}", begun, done)
                step.add(f"{carried} {kind} together", begun, done)

        return self._safe(ended)


class _TimedWork:
    """A collective on its way; its first ``wait`` calls ``ended``."""

    def __init__(self, work: Any, clock: DeviceClock, ended: Callable[[Mark], None]) -> None:
        self._work, self._clock = work, clock
        self._ended: Callable[[Mark], None] | None = ended

    def wait(self, *given: Any, **named: Any) -> Any:
        waits = self._clock.mark()
        result = self._work.wait(*given, **named)
        if self._ended is not None:
            self._ended(waits)
            self._ended = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    __class__ = dist.Work  # type: ignore[assignment]  # TorchRec waits for such instances alone


def sent_bytes(operation: str, sent: Any, splits: list[int] | None, group: dist.ProcessGroup | None) -> float:
    """Return the bytes that a rank sends to other ranks."""
    tensors, ranks = sent if isinstance(sent, list) else [sent], dist.get_world_size(group)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if operation == "all_gather":
        return total * (ranks - 1)
    if not splits or not sum(splits):
        return total * (ranks - 1) / ranks
    return total * (1 - splits[dist.get_rank(group)] / sum(splits))
