# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's sharding options read as tables, fused groups, collectives and parts; and the way back."""
