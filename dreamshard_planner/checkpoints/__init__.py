# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What was learned, in one versioned file each: what ships, and the user's own."""
