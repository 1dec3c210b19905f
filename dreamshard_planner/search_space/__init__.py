# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ways in which tables may be sharded: sharding types, kernels, constraints, placement rules, checks of inputs."""
