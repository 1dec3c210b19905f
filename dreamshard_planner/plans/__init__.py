# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans once they are made: the report, the file, comparisons, pages."""
