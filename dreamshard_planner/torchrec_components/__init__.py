# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's components as this package makes them, each usable alone with TorchRec's own planner."""
