# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Imported by the server from which ranks, and processes to be killed, are forked: imports are most of a short test.
Python hides an ImportError here, and has no path of the tests' own: each rank would then import all by itself."""

import gc

import pytest  # noqa: F401

from dreamshard_planner.environment import load_libc10_first

load_libc10_first()  # as conftest.py
import torch.distributed.optim  # noqa: E402, F401
import torchrec.datasets.random  # noqa: E402, F401
import torchrec.models.dlrm  # noqa: E402, F401

import dreamshard_planner.background  # noqa: E402, F401
import dreamshard_planner.cli  # noqa: E402
import dreamshard_planner.measure.collectives  # noqa: E402, F401
import dreamshard_planner.model_parallel  # noqa: E402, F401
import dreamshard_planner.planner  # noqa: E402
import dreamshard_planner.training  # noqa: E402, F401

gc.freeze()  # else every fork's collections go through all that, and copy its pages
