# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Advice on TorchRec's index dedup, by which a rank asks for each row of a sequence table once per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.hot_rows.choice import LEAST_GAIN
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.plans.report import Note
from dreamshard_planner.problem.parts import HOT_LOOKUP_PASSES
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.options import hot_rows_of, with_hot_rows
from dreamshard_planner.torchrec_components import compat

SORTED_BYTES = 150
"""Bytes of memory traffic that tell repeated lookups from others, for each lookup."""


def dedup_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note if index dedup is predicted to lower the cost of a plan by :data:`LEAST_GAIN`.

    It needs counted reuse of every sequence table, and CUDA: FBGEMM has no CPU kernel for it.

    Args:
        model: of the plan.
        plan: one option with ranks for every table.
    """
    plan = [with_hot_rows(option, None) if hot_rows_of(option) else option for option in plan]
    context, statistics, topology = model.context, model.settings.statistics, model.ranks.topology
    sequences = [option for option in plan if type(option.module[1]) is EmbeddingCollection]
    features = {name for option in sequences for name in context.reader.declared(option).features}
    if (
        model.settings.cost_source == "torchrec"
        or topology.compute_device == "cpu"
        or topology.world_size == 1
        or not features
    ):
        return ()
    if statistics is None or any(
        name not in statistics or statistics[name].reuse_histogram is None for name in features
    ):
        return ()
    plain = [
        one for one in model.sharders if isinstance(one, EmbeddingCollectionSharder) and not compat.dedups_ids(one)
    ]
    if not plain:
        return ()
    sharders = [
        EmbeddingCollectionSharder(one.fused_params, one.qcomm_codecs_registry, use_index_dedup=True)
        if one in plain
        else one
        for one in model.sharders
    ]
    reader = OptionReader(context.constraints, statistics, sharders)
    before_ms = context.rated(plan).total_ms
    after_ms = replace(context, reader=reader, sharders=sharders).rated(plan).total_ms
    after_ms += sum(
        sum(context.reader.pooling_factors(option))
        * option.batch_size
        * (SORTED_BYTES + HOT_LOOKUP_PASSES * 4 * int(option.tensor.shape[1]))
        for option in sequences
    ) / float(topology.hbm_mem_bw)
    if after_ms > before_ms * (1 - LEAST_GAIN):
        return ()
    text = (
        f"TorchRec's index dedup, EmbeddingCollectionSharder(use_index_dedup=True), is predicted to lower the step "
        f"from {before_ms:.3f} to {after_ms:.3f} ms without hot rows: each rank's batch then asks for a row once"
    )
    return (Note("index_dedup", text, {"before_ms": before_ms, "dedup_ms": after_ms}),)
