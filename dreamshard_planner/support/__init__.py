# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What any program needs and no planner is about: files, texts, progress, digests, torch's own state."""
