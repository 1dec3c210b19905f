# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure the all-to-all of pooled embeddings between real ranks, and fit latency and bandwidth.

    torchrun --nproc_per_node=2 -m dreamshard_planner.measure.collectives --out collectives.json

NCCL where each rank has a GPU, else gloo. Each rank sends to every other; splits are even, or skewed so that one
rank sends most. A sample is the time of the slowest rank.

Shapes: P payloads, R repeats.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel

PAYLOADS_BYTES = tuple(2**power for power in range(12, 25))
"""Bytes from one rank to one peer."""
SKEWS = (1.0, 0.25, 0.0)
"""What all ranks but the first send, as a share of what it sends."""


@dataclass(frozen=True)
class CollectiveFit:
    """Fitted latency and bandwidth of an all-to-all, with what it was fitted on."""

    latency_ms: float
    bytes_per_ms: float
    backend: str
    world_size: int
    relative_error: float
    """Median relative error of the fit."""
    samples_ms: tuple[tuple[float, float], ...]
    """Bytes of the slowest rank, and the median milliseconds."""


def measure(device: torch.device, repeats: int = 15) -> CollectiveFit:
    """Time all payloads on the initialised process group, interleaved, and fit; on every rank the same result."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        raise ValueError("collectives need at least two ranks: torchrun --nproc_per_node=2")
    cases = [(payload, skew) for payload in PAYLOADS_BYTES for skew in SKEWS]
    times_RP = torch.zeros(repeats + 2, len(cases), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for repeat in range(len(times_RP)):  # the first two warm up
        for case in torch.randperm(len(cases), generator=generator).tolist():
            payload, skew = cases[case]
            sends = [payload if sender == 0 else round(payload * skew) for sender in range(world_size)]
            times_RP[repeat, case] = _one(sends, rank, device)
    dist.all_reduce(times_RP := times_RP.to(device), op=dist.ReduceOp.MAX)
    median_P = times_RP[2:].cpu().median(0).values
    bytes_P = torch.tensor([_slowest_bytes(payload, skew, world_size) for payload, skew in cases])
    fitted = [fit(bytes_P, median_P)]
    dist.broadcast_object_list(fitted, src=0)  # least squares may differ in its last bits between ranks
    latency_ms, bytes_per_ms, error = fitted[0]
    return CollectiveFit(
        latency_ms=latency_ms,
        bytes_per_ms=bytes_per_ms,
        backend=dist.get_backend(),
        world_size=world_size,
        relative_error=error,
        samples_ms=tuple(zip(bytes_P.tolist(), median_P.tolist(), strict=True)),
    )


def fit(bytes_P: Tensor, time_ms_P: Tensor) -> tuple[float, float, float]:
    """Latency in ms, bandwidth in bytes/ms and median relative error of ``latency + bytes / bandwidth``, by relative
    least squares."""
    design = torch.stack([torch.ones_like(time_ms_P), bytes_P.double()], dim=-1) / time_ms_P[:, None]
    latency, slope = torch.linalg.lstsq(design, torch.ones(len(design), 1, dtype=torch.float64)).solution[:, 0].tolist()
    latency, slope = max(latency, 1e-6), max(slope, 1e-15)
    error = ((latency + slope * bytes_P) / time_ms_P - 1).abs().median()
    return latency, 1 / slope, float(error)


def _slowest_bytes(payload: int, skew: float, world_size: int) -> float:
    """What :class:`CollectiveModel` counts: the most that any rank sends or receives."""
    sends = torch.tensor([payload, *[round(payload * skew)] * (world_size - 1)], dtype=torch.float64)
    one_ms_per_byte = CollectiveModel(world_size, bytes_per_ms=1.0, latency_ms=0.0)
    return float(one_ms_per_byte.all_to_all_ms(sends)[0])


def _one(sends: list[int], rank: int, device: torch.device) -> float:
    """Milliseconds of one all-to-all in which rank r sends ``sends[r]`` bytes to every other rank."""
    world_size = len(sends)
    inputs = [sends[rank] // 4 if peer != rank else 0 for peer in range(world_size)]
    outputs = [sends[peer] // 4 if peer != rank else 0 for peer in range(world_size)]
    send, receive = torch.ones(sum(inputs), device=device), torch.empty(sum(outputs), device=device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    dist.all_to_all_single(receive, send, outputs, inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) * 1e-6


def main(out: Annotated[Path | None, typer.Option(help="Write the fit to this JSON file.")] = None) -> None:
    """Measure on the ranks that torchrun started; rank 0 prints."""
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    result = measure(device)
    if dist.get_rank() == 0:
        text = json.dumps(asdict(result))
        typer.echo(text)
        if out is not None:
            out.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
