# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What fused embedding kernels really cost on the hardware at hand. The only layer that runs FBGEMM."""
