# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Times of training steps, kernel by kernel and collective by collective, and costs corrected by them."""
