# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What may be chosen for a table: sharding types, constraints, rules of placement, input checks."""
