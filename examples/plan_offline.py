# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plan for two hosts of eight H100s without any of them, and keep the plan: python examples/plan_offline.py

The job that trains loads the file: DreamShardPlanner(plan_loader=JsonPlanLoader("plan.json")), see reuse_plan.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.devices import Machine

ROWS = [40_000_000, 20_000_000, 8_000_000, 2_000_000, 500_000] * 6
LOOKUPS = [1.0, 40.0, 12.0, 5.0, 80.0] * 6
"""Per sample; known only from the data, so the planner is told (or given statistics)."""


def main(out: Path) -> None:
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=128, name=f"t{i}", feature_names=[f"f{i}"])
        for i, rows in enumerate(ROWS)
    ]
    model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))  # takes no memory
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.02})
    constraints = {f"t{i}": ParameterConstraints(pooling_factors=[lookups]) for i, lookups in enumerate(LOOKUPS)}
    planner = DreamShardPlanner(
        topology=Machine(ranks_per_host=8, hosts=2, gpu="h100").topology(), batch_size=4096, constraints=constraints
    )
    planner.plan(model, get_default_sharders())
    print(planner.report())
    print(planner.explain())  # the slowest rank, and what would help it
    planner.save_plan(out)
    print(f"plan for 16 ranks: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "plan.json"))
