# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measurements of fused embedding kernels on the hardware at hand. Only this layer runs FBGEMM."""
