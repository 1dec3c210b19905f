# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What tables ask of a device: value types, statistics from batches, features, pools."""
