# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compare GPUs in a dry run of the planning API of TorchRec 1.9: python examples/planning_api.py

A training job gives the same provider to ProductionPlannerOrchestrator(executor, sku="h100").
"""

from __future__ import annotations

import torch
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dreamshard_planner.torchrec_components.provider import DreamShardProvider

SKUS = ["a100-80", "h100", "b200"]


def main() -> None:
    try:
        from torchrec.distributed.planner.dry_run import DryRunOrchestrator, DryRunRequest
        from torchrec.distributed.planner.executor import DefaultPlannerExecutor
        from torchrec.distributed.planner.types import PlannerSessionContext
    except ModuleNotFoundError:
        print("This TorchRec has no planning API. Install torchrec 1.9 or later.")
        return
    tables = [
        EmbeddingBagConfig(num_embeddings=1_000_000, embedding_dim=128, name=f"t{i}", feature_names=[f"f{i}"])
        for i in range(16)
    ]
    request = DryRunRequest(
        model=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),  # takes no memory
        sharders=get_default_sharders(),
        sku_list=SKUS,
        world_size=8,
        local_world_size=8,
        batch_size=4096,
        training_framework="apf",
    )
    orchestrator = DryRunOrchestrator(DefaultPlannerExecutor(DreamShardProvider()))
    for sku, result in orchestrator.plan(request, PlannerSessionContext(request=request, results={})).items():
        hbm_gib = result.estimated_max_hbm_bytes / 2**30
        outcome = f"{hbm_gib:.1f} GiB on the fullest rank" if result.success else result.planner_failure_reason
        print(f"{sku}: {outcome}")


if __name__ == "__main__":
    main()
