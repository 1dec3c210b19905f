# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One planning pass: from a model and a topology to a plan, its rivals, and what is to be said of it."""
