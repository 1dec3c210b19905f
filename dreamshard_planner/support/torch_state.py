# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The state that torch and the garbage collector keep for a whole thread or process, set aside while a plan is made.

A training script may well have a default device, a default dtype or autocast in force where it asks for a plan. None of
them is meant for the small tensors of a planner, which would fail, or round differently and give another plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def neutral() -> Iterator[None]:
    """The state of a fresh process, also as a decorator: tensors are real, fp32 and on the CPU unless they say
    otherwise, products of matrices are not rounded to less, gradients are on. On the way out, whatever happens, the
    caller's state is back, its random numbers included. Threads count for themselves, see :func:`single_thread`."""
    with ExitStack() as stack:
        # Modes first, so that what follows is not done to fake tensors.
        stack.enter_context(_disable_current_modes())  # FakeTensorMode and all others that intercept operations
        stack.enter_context(torch._C.DisableTorchFunction())  # default devices are a mode of this kind
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch declares its other settings alone
        if matmul.fp32_precision not in ("ieee", "none"):
            stack.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
            matmul.fp32_precision = "ieee"
        yield


@contextmanager
def single_thread() -> Iterator[None]:
    """One intra-op thread: tiny matrices gain nothing from more, and rounding must not depend on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector, which would go through hundreds of thousands of new objects, all in
    use, again and again: a quarter of the time of enumerating, a tenth of searching. Also as a decorator; nests."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
