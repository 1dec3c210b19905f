# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure collectives between real ranks, and fit latency and bandwidths.

    torchrun --nproc_per_node=2 -m dreamshard_planner.measure.collectives --out collectives.json

Uses NCCL if each rank has a GPU, else gloo on any core: pinned to one core, gloo waits for a tick of the scheduler. The
all-to-all is that of pooled embeddings, with even splits, or skewed so that one rank sends most. Reduce-scatter and
all-gather are those of row-wise tables, all-reduce that of data-parallel ones. TorchRec's own modules exchange lookups;
bucketing sorts ids into blocks of rows. A sample is the time of the slowest rank. A payload's time is the mean of its
repeats without the slowest and fastest tenth: on CPUs an exchange takes 0.2 ms or a tick more, and steps pay the mean.

Shapes: P payloads, R repeats.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from scipy.stats import trim_mean
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner.cost.collectives import (
    LOOKUPS,
    OPERATIONS,
    REVISION,
    SORTED_BAG,
    CollectiveFit,
    CollectiveModel,
    MeasuredCollectives,
    bag_bytes,
)
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.measure.kernels import freed_memory_kept
from dreamshard_planner.support.documents import parsed
from dreamshard_planner.support.files import check_writable, read_json, write_whole
from dreamshard_planner.support.reproducible import single_thread
from dreamshard_planner.workload.tables import INDEX_BYTES, LENGTH_BYTES

PAYLOADS_BYTES = tuple(2**power for power in range(12, 25))
"""Bytes between two ranks: of an all-to-all, a rank's part of a reduce-scatter, all-reduce or all-gather, lookups from
one peer; of bucketing, a rank's own ids."""
SKEWS = (1.0, 0.5, 0.25, 0.0)
"""Share of the first rank's bytes that each other rank sends in an all-to-all."""
LOOKUP_SKEWS = (1.0, 0.0)
"""Share of the first rank's lookups that each other rank gets."""
FEATURES, LOOKUPS_PER_SAMPLE, ROWS = 4, 10, 100_000  # of the tables of a rank
WARMUP, REPEATS = 2, 31
TRIMMED = 0.1  # share of the repeats left out at either end


@dataclass(frozen=True)
class Payload:
    """One exchange to measure."""

    operation: str
    """One of :data:`~dreamshard_planner.cost.collectives.OPERATIONS` or :data:`~.LOOKUPS`."""
    size_bytes: int
    skew: float = 1.0

    def sends(self, world_size: int, bag_more_bytes: float = 0.0) -> list[int]:
        """Return the bytes that each rank sends each other rank, or gets of lookups with ``bag_more_bytes`` a bag."""
        bag = self._bag_bytes + bag_more_bytes
        size = self.size_bytes if self.operation in OPERATIONS else round(self.samples * FEATURES * bag)
        return [size, *[round(size * self.skew)] * (world_size - 1)]

    @property
    def samples(self) -> int:
        """Samples of a rank's batch of lookups."""
        return max(bool(self.size_bytes), round(self.size_bytes / (FEATURES * self._bag_bytes)))

    @property
    def _bag_bytes(self) -> int:
        return LOOKUPS_PER_SAMPLE * INDEX_BYTES + (LENGTH_BYTES if self.operation == "lookups" else 0)

    def moved_bytes(self, world_size: int, device: str) -> tuple[float, float]:
        """Return the most bytes that any rank sends or receives, and all ranks' sum, as :class:`CollectiveModel`."""
        if self.operation == "bucketing":  # by itself
            return 0.0, self.samples * FEATURES * INDEX_BYTES * (LOOKUPS_PER_SAMPLE + SORTED_BAG * world_size)
        sends = torch.tensor(self.sends(world_size, bag_bytes(device)), dtype=torch.float64)
        per_byte = CollectiveModel(world_size, bytes_per_ms=1.0, latency_ms=0.0)
        return float(per_byte.all_to_all_ms(sends)), float(sends.sum()) * (world_size - 1)


PAYLOADS = tuple(
    [Payload("all_to_all", size, skew) for size in PAYLOADS_BYTES for skew in SKEWS]
    + [Payload(operation, size) for operation in OPERATIONS[1:] for size in PAYLOADS_BYTES]
    + [Payload("lookups", size, skew) for size in PAYLOADS_BYTES[::2] for skew in LOOKUP_SKEWS]
    + [Payload("bucketing", size) for size in (0, 0, *PAYLOADS_BYTES[::2])]
)


def read_collectives(path: Path) -> dict[str, Any]:
    """Return what the command wrote to a file, without the samples, for checkpoints; raises ``DreamShardError`` with
    its name for any other file."""
    measured: dict[str, Any] = read_json(path, DreamShardError)
    parsed(MeasuredCollectives, measured, f"{path}: no measurement of collectives", DreamShardError)
    return {name: value for name, value in measured.items() if name != "samples_ms"}


def measure(device: torch.device, local_world_size: int | None = None, seconds: float = math.inf) -> dict[str, Any]:
    """Time all payloads on the initialised process group, interleaved, and fit; every rank gets the same result.

    Its ``fits`` are of the operations, its ``samples_ms`` operation, bytes, skew and milliseconds of each payload.

    Args:
        device: of this rank.
        local_world_size: ranks on a host. Default: all of them.
        seconds: stop after the first repeat that ends later; the same on all ranks.
    """
    deadline = time.monotonic() + seconds
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        raise ValueError("collectives need at least two ranks: torchrun --nproc_per_node=2")
    times: list[list[float]] = []
    generator = torch.Generator().manual_seed(0)
    late_1 = torch.zeros(1, device=device)
    while len(times) < WARMUP + REPEATS and not (late_1 and len(times) > WARMUP):
        order = torch.randperm(len(PAYLOADS), generator=generator).tolist()
        timed = {index: _one(PAYLOADS[index], rank, world_size, device) for index in order}
        times.append([timed[index] for index in range(len(PAYLOADS))])
        late_1.fill_(time.monotonic() > deadline)
        dist.all_reduce(late_1, op=dist.ReduceOp.MAX)
    times_RP = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(times_RP, op=dist.ReduceOp.MAX)
    times_RP = times_RP[WARMUP:].cpu()
    time_P = torch.as_tensor(trim_mean(times_RP.numpy(), TRIMMED, axis=0))
    fits = {}
    for operation in (*OPERATIONS, *LOOKUPS):
        chosen = [index for index, payload in enumerate(PAYLOADS) if payload.operation == operation]
        moved = [PAYLOADS[index].moved_bytes(world_size, device.type) for index in chosen]
        slowest_P, total_P = torch.tensor(moved, dtype=torch.float64).unbind(-1)
        if operation == "bucketing":
            fits[operation] = CollectiveFit.of_sorting(total_P, time_P[chosen])
        else:
            fits[operation] = CollectiveFit.to_samples(slowest_P, total_P, time_P[chosen])
    samples = zip(PAYLOADS, time_P.tolist(), strict=True)
    result = {
        "backend": dist.get_backend(),
        "world_size": world_size,
        "hosts": -(-world_size // (local_world_size or world_size)),
        "hardware": describe_hardware(device, torch.get_num_threads()),
        "fits": {operation: asdict(fit) for operation, fit in fits.items()},
        "samples_ms": [(one.operation, one.size_bytes, one.skew, payload_ms) for one, payload_ms in samples],
        "revision": REVISION,
    }
    results = [result]
    dist.broadcast_object_list(results, src=0, device=device)  # least squares may differ in its last bits between ranks
    return results[0]


# One collective, renamed in torch 2.13.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _one(payload: Payload, rank: int, world_size: int, device: torch.device) -> float:
    """Return milliseconds of one collective on this rank."""
    if payload.operation in LOOKUPS:
        return _lookups(payload, world_size, device)
    sends = [size // 4 for size in payload.sends(world_size)]
    inputs = [sends[rank] if peer != rank else 0 for peer in range(world_size)]
    outputs = [sends[peer] if peer != rank else 0 for peer in range(world_size)]
    elements, one, every = {"all_to_all": (sum(inputs), sum(outputs))}, sends[rank], sum(sends)
    elements |= {"all_gather": (one, every), "reduce_scatter": (every, one), "all_reduce": (0, every)}
    sent, received = elements[payload.operation]
    send, receive = torch.ones(sent, device=device), torch.zeros(received, device=device)
    run: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: dist.all_to_all_single(receive, send, outputs, inputs),
        "reduce_scatter": lambda: _reduce_scatter(receive, send),
        "all_gather": lambda: dist.all_gather_into_tensor(receive, send),
        "all_reduce": lambda: dist.all_reduce(receive),
    }
    return _timed(run[payload.operation], device)


def _lookups(payload: Payload, world_size: int, device: torch.device) -> float:
    """Return milliseconds until the ranks that compute a batch of lookups have them in order; or of sorting its ids."""
    features = [FEATURES, *[round(FEATURES * payload.skew)] * (world_size - 1)]
    sorting = payload.operation == "bucketing"
    exchanged = _batch(sum(features), 1 if sorting else payload.samples, device)
    own = _batch(FEATURES, payload.samples, device) if sorting and payload.samples else None
    block_sizes = torch.full((FEATURES,), -(-ROWS // world_size), device=device)
    order = list(range(sum(features)))
    order_tensor = torch.tensor(order, dtype=torch.int32, device=device)
    exchange = KJTAllToAll(pg=dist.group.WORLD, splits=features)

    def run() -> None:
        if own is not None:
            bucketize_kjt_before_all2all(own, num_buckets=world_size, block_sizes=block_sizes)
        # A module brings its features into the order of the ranks that hold their tables.
        exchange(exchanged.permute(order, order_tensor)).wait().wait()

    return _timed(run, device)


def _batch(features: int, samples: int, device: torch.device) -> KeyedJaggedTensor:
    """Return a batch of random lookups."""
    lengths = torch.full((features * samples,), LOOKUPS_PER_SAMPLE, dtype=torch.int32, device=device)
    ids = torch.randint(ROWS, (len(lengths) * LOOKUPS_PER_SAMPLE,), device=device)
    return KeyedJaggedTensor.from_lengths_sync([f"f{index}" for index in range(features)], ids, lengths)


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Start on all ranks together, and return milliseconds until this one's device is done."""
    cuda = device.type == "cuda"
    dist.barrier(device_ids=[device.index] if cuda else None)
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    run()
    if cuda:
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) * 1e-6


def local_ranks() -> tuple[int, int]:
    """Return this process's rank on its host, and the ranks of the host; raises DreamShardError without torchrun."""
    try:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except KeyError as error:
        raise DreamShardError(
            "torchrun has to start this, one process for each rank: "
            "torchrun --standalone --nproc_per_node=2 SCRIPT, or with -m MODULE for a module"
        ) from error


def main(
    out: Annotated[Path | None, typer.Option(help="Write the fit to this JSON file.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Stop when they have passed; default: 31 repeats.")] = math.inf,
) -> None:
    """Measure on the ranks that torchrun started; rank 0 prints."""
    try:
        local_rank, local_world_size = local_ranks()
        if out is not None:
            check_writable(out)
    except DreamShardError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error
    cuda = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    with freed_memory_kept(), single_thread():
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        result = measure(device, local_world_size=local_world_size, seconds=seconds)
    if dist.get_rank() == 0:
        typer.echo(json.dumps({name: told for name, told in result.items() if name != "samples_ms"}, indent=1))
        if out is not None:
            write_whole(out, json.dumps(result) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
