# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cards for tests that replace ``devices.read_card``."""

from dreamshard_planner.devices import Card

H100 = Card("NVIDIA H100 80GB HBM3", 84_987_740_160, (9, 0), 3352e9)
A100 = Card("NVIDIA A100-SXM4-40GB", 42_405_855_232, (8, 0), 1555e9)
ADA = Card("NVIDIA RTX 6000 Ada Generation", 50_962_169_856, (8, 9), 960e9)
"""Not listed."""
L40 = Card("NVIDIA L40", 47_685_566_464, (8, 9))
"""Not listed, from a driver that hides the memory clock."""
