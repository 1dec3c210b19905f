# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Published methods and rivals kept for comparison, and refinement by measuring."""
