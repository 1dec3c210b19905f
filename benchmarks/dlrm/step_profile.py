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

from dreamshard_planner.observing.trace import DENSE, kind_of

REST = "between operators"
"""Of the training thread, outside of any operator: Python, and waiting of the pipeline."""


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
