# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The search over how tables are split and where their shards go."""
