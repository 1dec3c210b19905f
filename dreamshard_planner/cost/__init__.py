# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs of sets of tables and of plans: measured datasets, the cost network, and the one formula."""
