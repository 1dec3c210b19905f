# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Workloads of tables: value types, statistics from batches, features, pools."""
