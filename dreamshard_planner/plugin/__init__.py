# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's seams, each usable alone with TorchRec's own planner."""

from dreamshard_planner.plugin.estimator import DreamShardEstimator
from dreamshard_planner.plugin.joint_proposer import JointProposer
from dreamshard_planner.plugin.partitioner import DreamShardPartitioner, RulePartitioner
from dreamshard_planner.plugin.perf_model import DreamShardPerfModel
from dreamshard_planner.plugin.proposer import TableWiseProposer

__all__ = [
    "DreamShardEstimator",
    "DreamShardPartitioner",
    "DreamShardPerfModel",
    "JointProposer",
    "RulePartitioner",
    "TableWiseProposer",
]
