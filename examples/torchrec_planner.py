# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's own planner with one part of ours, the partitioner: python examples/torchrec_planner.py

TorchRec's enumerator, proposers and estimates decide how tables are split; ranks are chosen by policy and search.
"""

from __future__ import annotations

import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.devices import Machine
from dreamshard_planner.torchrec_components.components import DreamShardPartitioner, rater

ROWS, LOOKUPS = [100_000, 50_000, 20_000, 5_000, 1_000, 100], [20.0, 1.0, 5.0, 50.0, 10.0, 1.0]


def main() -> None:
    tables = [EmbeddingBagConfig(num_embeddings=rows, embedding_dim=64, name=f"t{i}", feature_names=[f"f{i}"])
              for i, rows in enumerate(ROWS)]  # fmt: skip
    model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    sharders, topology = get_default_sharders(), Machine(ranks_per_host=2, device="cpu").topology()
    constraints = {
        f"t{i}": ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[lookups])
        for i, lookups in enumerate(LOOKUPS)
    }
    reservation = FixedPercentageStorageReservation(percentage=0.15)
    common = {"topology": topology, "batch_size": 512, "constraints": constraints, "storage_reservation": reservation}
    plans = {
        "TorchRec": EmbeddingShardingPlanner(**common).plan(model, sharders),
        "TorchRec with our partitioner": EmbeddingShardingPlanner(
            **common, partitioner=DreamShardPartitioner(rater(topology, constraints))
        ).plan(model, sharders),
    }
    judge = DreamShardPlanner(**common)
    plans["DreamShardPlanner"] = judge.plan(model, sharders)
    for name, plan in plans.items():
        print(f"{name:30}  {judge.predict(plan).total_ms:.3f} ms of embedding work per step, predicted")


if __name__ == "__main__":
    main()
