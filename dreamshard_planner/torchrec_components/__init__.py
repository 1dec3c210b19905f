# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's components as this package makes them, each usable alone with TorchRec's own planner."""

from dreamshard_planner.torchrec_components.estimator import DreamShardEstimator
from dreamshard_planner.torchrec_components.joint_proposer import JointProposer
from dreamshard_planner.torchrec_components.partitioner import DreamShardPartitioner, RulePartitioner
from dreamshard_planner.torchrec_components.perf_model import DreamShardPerfModel
from dreamshard_planner.torchrec_components.proposer import TableWiseProposer

__all__ = [
    "DreamShardEstimator",
    "DreamShardPartitioner",
    "DreamShardPerfModel",
    "JointProposer",
    "RulePartitioner",
    "TableWiseProposer",
]
