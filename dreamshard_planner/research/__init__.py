# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Published methods that are kept for comparison."""
