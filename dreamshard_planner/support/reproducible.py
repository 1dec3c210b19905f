# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Equal plans in every process: digests of their inputs, and the state of torch set aside while they are made.

A training script may have a default device, a default dtype or autocast in force. The planner's small tensors would
fail under them, or round differently and give another plan.
"""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MAX_DEPTH = 32


def digest(value: Any) -> str:
    """Return the SHA-256 of :func:`canonical` in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any, depth: int = MAX_DEPTH) -> str:
    """Return a text that is equal for equal values in every process.

    It has no addresses and no order of sets and dictionaries; tensors count by their bytes, other objects by type and
    attributes. Raises ValueError for values that hold themselves, or nest deeper than :data:`MAX_DEPTH`.
    """
    if depth == 0:
        raise ValueError(f"values nest deeper than {MAX_DEPTH} levels, or hold themselves: {type(value).__name__}")
    if value is None or isinstance(value, (str, bytes, bool, int, float)) and not isinstance(value, Enum):
        return repr(value)
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"tensor({value.dtype}, {tuple(value.shape)}, {hashlib.sha256(data).hexdigest()})"

    def inner(part: Any) -> str:
        return canonical(part, depth - 1)

    if isinstance(value, (np.generic, np.ndarray)):
        plain = value.tolist()
        return repr(value) if type(plain) is type(value) else inner(plain)
    if isinstance(value, partial):
        return inner((value.func, value.args, value.keywords))
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{inner(key)}: {inner(part)}" for key, part in value.items())) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, Sequence):
        numbers = (int, float)  # hundreds of them, in histograms of ids
        return "[" + ", ".join(repr(part) if type(part) in numbers else inner(part) for part in value) + "]"
    if hasattr(value, "__qualname__"):  # classes and functions
        return _name(value)
    if is_dataclass(value):
        return f"{_name(type(value))}({inner({field.name: getattr(value, field.name) for field in fields(value)})})"
    if hasattr(value, "__dict__"):
        return f"{_name(type(value))}({inner(vars(value))})"
    return _ADDRESS.sub("", repr(value))


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


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
