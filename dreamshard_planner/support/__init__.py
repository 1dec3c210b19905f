# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""General helpers: files, texts, numbers, progress, digests, torch's own state."""
