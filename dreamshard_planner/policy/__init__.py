# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP, the policy that acts in it, and how it is trained."""
