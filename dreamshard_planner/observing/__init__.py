# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What training steps really take, kernel by kernel and collective by collective, and what that teaches the costs."""
