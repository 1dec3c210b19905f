# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What sets of tables, and placements of them, cost: measured datasets, the cost network, and the one formula."""
