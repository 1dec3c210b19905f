# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""DreamShardPlanner on whole tables, replicas and no tables. Random models: ``test_mixed_models.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.workload.pools import named_pool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHARDERS = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
GIB = 2**30
SLACK = 1e-5
"""Relative: costs are compared after rounding."""


def test_replicas_that_may_be_used_make_no_plan_dearer() -> None:
    """TorchRec's estimates favour few replicas here; a search that adds replicas while they help ends dearer than the
    best plan without any."""
    tables = named_pool("mlperf_dlrm_dcnv2")
    configs = [EmbeddingBagConfig(t.rows, t.dim, name=t.name, feature_names=[t.name]) for t in tables]
    model = EmbeddingBagCollection(configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.01})
    factors = {t.name: ParameterConstraints(pooling_factors=[t.pooling_factor]) for t in tables}
    topology = Topology(8, "cuda", hbm_cap=80 * GIB, ddr_cap=128 * GIB, hbm_mem_bw=3350 * 10**6)

    def cost_ms(attached: bool) -> float:
        planner = DreamShardPlanner(
            topology, 2048, constraints=factors, debug=False, cost_source="torchrec", optimizers_attached=attached
        )
        planner.plan(model, SHARDERS)
        types = {option.sharding_type for option in planner.options}
        assert attached or "data_parallel" not in types
        return planner.report().chosen.total_ms

    assert cost_ms(True) <= cost_ms(False) * (1 + SLACK)


def test_a_model_whose_tables_no_sharder_handles_has_an_empty_plan() -> None:
    model = nn.Module()
    model.sparse = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])],
        device=torch.device("meta"),
    )
    for planner in (DreamShardPlanner, EmbeddingShardingPlanner):
        made = planner(topology=Topology(2, "cuda"), debug=False)
        assert made.plan(model, []).plan == made.plan(nn.Linear(2, 2), SHARDERS).plan == {}
