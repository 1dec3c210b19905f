# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints: learned costs and policies as versioned files, shipped ones and the user's own."""
