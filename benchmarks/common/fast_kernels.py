# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Imported before torch, this module gives the process FBGEMM's fast CPU kernels."""

from dreamshard_planner.environment import load_libc10_first

load_libc10_first()
import torch.distributed.optim  # noqa: E402, F401 (before there is a process group, as dreamshard_planner does after torch)
