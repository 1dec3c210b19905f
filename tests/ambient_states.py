# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""States that a training script may have torch in when it asks for a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Halved(TorchFunctionMode):
    """Every floating-point result in half precision."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.half() if isinstance(result, torch.Tensor) and result.is_floating_point() else result


STATES: dict[str, Callable[[], AbstractContextManager]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: default_device("meta"),
    "default device cuda": lambda: default_device("cuda:0"),
    "with device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "fake tensors": FakeTensorMode,
    "function mode": Halved,
    "matmul precision": lambda: matmul_precision("medium"),
}
