# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Kinds of work in a trace of ``torch.profiler``, of a job that need not know of this package: by the names that
TorchRec and FBGEMM give to what runs.

On a host's thread each moment belongs to the innermost operator or range that is running, and that to the kind of work
of itself or of the nearest one around it that tells. What a GPU runs is told apart from that.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamshard_planner.errors import ObservationError
from dreamshard_planner.support.files import read_json

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
GPU_KINDS = {
    "embedding backward": r"(split|dense)_embedding\w*backward",
    "embedding forward": r"(split|dense)_embedding\w*forward|bounds_check_indices",
    "all-to-all": r"nccl\w*(SendRecv|AllToAll)",
    "reduce-scatter": r"nccl\w*ReduceScatter",
    "all-gather": r"nccl\w*AllGather",
    "all-reduce": r"nccl\w*AllReduce",
}
"""Kinds of what a GPU runs, by names of kernels; whatever else it runs is :data:`DENSE`."""
STEPS = (r"ProfilerStep#\d+", r"## forward( \d+)? ##")
"""Of these ranges the first that a trace has tells how many steps it holds; else the optimizer that is called least."""
OPTIMIZER = "Optimizer.step#"
UNREAD = (
    "which tables lie in which kernel, what they look up, and how long a rank waits for the others inside an exchange: "
    "dreamshard learn needs observe(model, planner)"
)


def kind_of(name: str) -> str | None:
    """Kind of work of an operator or range; None where its name tells nothing."""
    if LOOKUP_NODE in name and name.startswith("autograd::engine"):
        return "embedding backward"
    matches = [(len(start), kind) for kind, starts in KINDS.items() for start in starts if name.startswith(start)]
    return max(matches)[1] if matches else None


@dataclass(frozen=True)
class Trace:
    """What a trace tells, in milliseconds of a step."""

    rank: int
    world_size: int
    steps: int
    host_ms: dict[str, float]
    """Of the thread that runs most; on a CPU times at which it computes or waits, beside a GPU those of launches."""
    gpu_ms: dict[str, float]
    """Empty where none ran."""
    unread: str = UNREAD

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read the JSON of ``export_chrome_trace``; ObservationError names the file and what it lacks."""
        document = read_json(path, ObservationError)
        events = document.get("traceEvents") if isinstance(document, dict) else None
        if not isinstance(events, list):
            raise ObservationError(f"{path}: no trace of torch.profiler: it has no list of 'traceEvents'")
        spans = [event for event in events if isinstance(event, dict) and _is_span(event)]
        steps = _steps(spans)
        if not steps:
            raise ObservationError(
                f"{path}: no training step is marked: call step() of the profiler after each, or train in TorchRec's "
                "pipeline, or with an optimizer of torch"
            )
        host = _host_us(event for event in spans if event.get("cat") in ("cpu_op", "user_annotation"))
        gpu = _gpu_us(event for event in spans if event.get("cat") == "kernel")
        if not (host.keys() | gpu.keys()) - {DENSE, "optimizer"}:
            raise ObservationError(f"{path}: nothing of TorchRec or FBGEMM runs in it")
        info = document.get("distributedInfo") or {}
        host_ms, gpu_ms = ({kind: us / 1e3 / steps for kind, us in of.most_common()} for of in (host, gpu))
        return cls(info.get("rank", 0), info.get("world_size", 1), steps, host_ms, gpu_ms)


def is_trace(path: Path) -> bool:
    """Whether a file's first kilobytes look like one."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 16)
    except OSError:
        return False
    return b'"schemaVersion"' in start or b'"traceEvents"' in start


def _is_span(event: Mapping[str, Any]) -> bool:
    numbers = isinstance(event.get("ts"), int | float) and isinstance(event.get("dur"), int | float)
    return event.get("ph") == "X" and isinstance(event.get("name"), str) and numbers


def _steps(spans: Iterable[Mapping[str, Any]]) -> int:
    names = [event["name"] for event in spans if event.get("cat") in ("cpu_op", "user_annotation")]
    counts = (sum(re.fullmatch(pattern, name) is not None for name in names) for pattern in STEPS)
    optimizers = Counter(name for name in names if name.startswith(OPTIMIZER))
    return next(filter(None, counts), min(optimizers.values(), default=0))


def _host_us(spans: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Of the thread with most of them; a range of the profiler's own has no kind."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in spans:
        threads[event.get("tid")].append(event)
    mine = max(threads.values(), key=len, default=[])
    total: Counter[str] = Counter()
    around: list[tuple[float, str]] = []  # end and kind of what is running, the outermost first
    for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        outer = around[-1][1] if around else DENSE
        kind = kind_of(event["name"]) or outer
        total[kind] += event["dur"]
        if around:
            total[outer] -= event["dur"]
        around.append((event["ts"] + event["dur"], kind))
    return total


def _gpu_us(spans: Iterable[Mapping[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for event in spans:
        kinds = (kind for kind, pattern in GPU_KINDS.items() if re.search(pattern, event["name"]))
        total[next(kinds, DENSE)] += event["dur"]
    return total
