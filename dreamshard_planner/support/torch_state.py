# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Set aside the state of torch and the garbage collector while a plan is made.

A training script may have a default device, a default dtype or autocast in force. The planner's small tensors would
fail under them, or round differently and give another plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def neutral() -> Iterator[None]:
    """Give torch the state of a fresh process; also a decorator.

    Tensors are real, fp32 and on the CPU by default, products of matrices have full precision, gradients are on. The
    caller's state comes back at the end, random numbers included. For threads see :func:`single_thread`.
    """
    with ExitStack() as stack:
        # Modes first, so that the rest does not act on fake tensors.
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
def intra_op_threads(count: int) -> Iterator[None]:
    """Use so many intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


single_thread = partial(intra_op_threads, 1)
"""Use one intra-op thread: tiny matrices gain nothing from more, and rounding must not depend on them."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector; also a decorator, and nests.

    It would scan hundreds of thousands of live objects again and again: a quarter of the time of enumerating, a tenth
    of searching.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
