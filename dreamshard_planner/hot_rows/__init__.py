# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows of sequence tables: every rank holds the rows that most lookups read, so that these lookups send nothing."""
