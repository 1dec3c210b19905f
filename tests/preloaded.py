# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Imported by the server from which ranks, and processes to be killed, are forked: imports are most of a short test."""

import gc

import pytest  # noqa: F401
import torchrec  # noqa: F401

import dreamshard_planner.cli
import dreamshard_planner.planner
import dreamshard_planner.training  # noqa: F401

gc.freeze()  # else every fork's collections go through all that, and copy its pages
