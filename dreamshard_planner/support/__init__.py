# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""General helpers: files, documents, words for people, equal plans in every process."""
