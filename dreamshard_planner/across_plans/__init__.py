# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints of sharded models that load under any plan of the same tables, with the states of their optimizers."""
