# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Where the time of a training step goes, by kind of work, from ``torch.profiler``.

Each moment of the training thread belongs to the innermost operator or range that is running, and that to the kind of
work of itself or of the nearest one around it that tells. On CPU these are the moments at which the rank computes or
waits; on CUDA those at which the host launches or waits, beside which kernels run on streams of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile

KINDS: dict[str, tuple[str, ...]] = {
    "embedding backward": ("fbgemm::split_embedding_backward", "fbgemm::dense_embedding_backward", "backward: lookup"),
    "embedding forward": ("fbgemm::split_embedding", "fbgemm::dense_embedding", "fbgemm::bounds_check", "[lookup]"),
    "output exchange, forward": ("## All2All_Pooled_fwd", "All2All_Pooled_Wait", "All2All_Pooled_Req", "[output_dist]")
    + ("ReduceScatter", "## EmbeddingBagCollectionAwaitable", "All2All_Seq", "## EmbeddingCollectionAwaitable"),
    "output exchange, backward": ("## All2All_Pooled_bwd", "All2All_Pooled_ReqBackward", "All2All_Pooled_WaitBackward")
    + ("ReduceScatterBaseReqBackward", "ReduceScatterBaseWaitBackward", "AllGather"),
    "input exchange": ("## all2all_data", "## start_sparse_data_dist", "## wait_sparse_data_dist", "[input_dist]")
    + ("## KJT", "## Splits", "## FusedKJT", "[splits_dist]", "## runtime_forward_assemble_KJT"),
    "dense all-reduce": ("c10d::allreduce", "torch::distributed::reducer"),
    "optimizer": ("Optimizer.step", "## zero_grad"),
    "batch to device": ("## copy_batch", "## load_batch"),
}
"""Kinds of work by how the names of their operators and ranges begin; the longest such beginning counts."""
LOOKUP_NODE = "SplitLookupFunction"
DENSE = "dense layers"
REST = "between operators"
"""Of the training thread, outside of any operator: Python, and waiting of the pipeline."""


def kind_of(name: str) -> str | None:
    """Kind of work of an operator or range; None where its name tells nothing."""
    if LOOKUP_NODE in name and name.startswith("autograd::engine"):
        return "embedding backward"
    matches = [(len(start), kind) for kind, starts in KINDS.items() for start in starts if name.startswith(start)]
    return max(matches)[1] if matches else None


def by_kind(events: Iterable[Any]) -> Counter[str]:
    """Microseconds of each kind of work in the events of one thread."""
    total: Counter[str] = Counter()
    for event in events:
        around, kind = event, None
        while around is not None and kind is None:
            kind, around = kind_of(around.name), around.cpu_parent
        total[kind or DENSE] += event.self_cpu_time_total
    return total


def profile_steps(train: Callable[[int], None], steps: int) -> dict[str, float]:
    """Milliseconds per step of each kind of work, the largest first, on this rank; ``train`` trains so many steps."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(steps)
    events = [event for event in profiler.events() if not event.is_async]
    training_thread = Counter(event.thread for event in events).most_common(1)[0][0]
    mine = by_kind(event for event in events if event.thread == training_thread)
    return {kind: microseconds / 1e3 / steps for kind, microseconds in mine.most_common()}
