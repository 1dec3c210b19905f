# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plan on gloo ranks that pretend to have GPUs, and print the report of ``DreamShardPlanner()``:

    torchrun --nproc_per_node=2 tests/distributed/pretended_job.py 1 H100 A100

Arguments: ranks of a host, then the card of each rank in turn (names in ``tests/pretended.py``).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

sys.path.append(str(Path(__file__).parents[2]))
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, driver
from tests import pretended


def tables(device: str = "meta") -> EmbeddingBagCollection:
    """Twelve tables."""
    made = [EmbeddingBagConfig(400_000 + 50_000 * i, 64, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(12)]
    return EmbeddingBagCollection(tables=made if device == "meta" else made[:2], device=torch.device(device))


def main(on_host: str, *cards: str) -> None:
    """Plan, shard, and print."""
    logging.basicConfig()
    warnings.simplefilter("error", FutureWarning)
    os.environ["LOCAL_WORLD_SIZE"] = on_host
    dist.init_process_group("gloo")
    card = getattr(pretended, cards[dist.get_rank() % len(cards)])
    driver.read_card, driver.compute_device = lambda: card, lambda: "cuda"
    planner = DreamShardPlanner(stats=[], effort="quick")
    planner.collective_plan(tables())
    if dist.get_rank() == 0:
        print(planner.report())
    # This job's devices are CPUs, whatever its planner would take by default.
    model = DistributedModelParallel(tables("cpu"), device=torch.device("cpu"))
    if dist.get_rank() == 0:
        placements = {str(s.placement) for p in model.plan.plan[""].values() for s in p.sharding_spec.shards}
        print(f"placed on {sorted(placements)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    gc.collect()  # models are cyclic and hold the process group, whose threads must not outlive Python
