# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The roofline model: bytes moved over bandwidths, and a few times that kernels take whatever they move.

It serves topologies that no checkpoint covers. On GPUs its few parameters are fitted to what others published of
FBGEMM's kernels on other machines (``benchmarks/gpu_prior.py``), on CPUs to the shape of what one kind of CPU measured
(``benchmarks/cpu_prior.py``), whatever its speed; nothing of it was measured on the machine at hand.

Shapes: S shards, F features, H latent channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dreamshard_planner.cost.compute import NOT_MEASURED, ComputeCost, CostSource, both_passes
from dreamshard_planner.devices import GPUS
from dreamshard_planner.workload.features import FEATURE_INDEX
from dreamshard_planner.workload.tables import INDEX_BYTES, OUTPUT_BYTES

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

SORT_PASSES = 4.0
"""Times that the backward reads and writes the indices while it sorts them (radix sort of int64 keys)."""
CACHE_SET_BYTES = 32 * 8
"""Keys that one lookup in a UVM cache compares: FBGEMM's sets are as wide as a warp. Before, the indices are sorted, to
find the distinct ones."""
L2_BYTES = 40e6
"""Of a GPU that :data:`~dreamshard_planner.devices.GPUS` does not name."""


@dataclass(frozen=True)
class Kernels:
    """How FBGEMM's kernels use a device's bandwidth. Each parameter has a meaning; together they are few enough to be
    fitted to a few dozen published rows."""

    forward_share: float = 1.0
    """Of the memory's bandwidth that the forward reaches."""
    backward_share: float = 1.0
    cache_speedup: float = 4.0
    """Cache over memory bandwidth, for reads of a row after the first where the cache holds what is read."""
    gradient_speedup: float = 4.0
    """The same for gradients, which are read again for every lookup."""
    row_bytes: float = 0.0
    """That reading a row takes at least, however narrow it is, in the forward and in the backward."""
    update_bytes: float = 0.0
    """The same of updating a row, where that is more."""
    lookup_bytes: float = INDEX_BYTES
    """That a lookup takes in the forward beside its row: its index, and what finding the row takes."""
    table_bytes: float = 0.0
    """That each table takes in either direction beside its rows: kernels that go from table to table start anew."""
    lane_dims: float = 0.0
    """Columns that a warp adds up in one pass of the backward: narrower gradients take as long."""
    state_bytes: float = 0.0
    """Of the backward, for each distinct row that has an optimizer state, beside the bytes of both: what reaching one
    scattered word per row takes."""
    row_ns: float = 0.0
    """The same of AMD's GPUs beside that, whose bandwidth does not tell it."""
    link_reads: float = 1.0
    """Times that a lookup of a row in unified memory takes the link to the host in the forward: a GPU caches little of
    another's memory, so that a row read again comes over the link again."""
    link_updates: float = 2.0
    """In the backward, of each distinct row, and of its optimizer state, which stays in the host's memory though rows
    have a cache: there and back; in both directions at once, for all that is known of GPUs."""
    cache_row_ns: float = 0.0
    """Of the forward, for each distinct row looked up in a UVM cache, whether it hits or not: ids are made distinct
    before the cache is searched."""
    forward_launch_ms: float = 0.02
    """Launch floors: a handful of kernels of some 5 to 10 us each, more in the backward."""
    backward_launch_ms: float = 0.06


CPU_KERNELS = Kernels(
    cache_speedup=26.0,
    gradient_speedup=11.0,
    row_bytes=100.0,
    update_bytes=217.0,
    lookup_bytes=22.0,
    table_bytes=41e3,
    lane_dims=42.0,
    forward_launch_ms=0.045,
    backward_launch_ms=0.018,
)
"""Fitted by ``benchmarks/cpu_prior.py`` to sets that an AMD EPYC (family 25 model 17) measured, each optimizer and
direction up to a factor: the level is that of the topology's bandwidth, which one core does not reach."""
GPU_KERNELS = Kernels(
    forward_share=0.87,
    backward_share=0.52,
    cache_speedup=1.65,
    gradient_speedup=1.65,
    row_bytes=100.0,
    lane_dims=176.0,
    state_bytes=440.0,
    link_reads=0.9,
    link_updates=1.6,
    cache_row_ns=4.5,
    forward_launch_ms=0.03,
    backward_launch_ms=0.10,
)
"""Fitted to published rows by ``benchmarks/gpu_prior.py``; the launch floors are those published for a B200."""
AMD_KERNELS = replace(GPU_KERNELS, row_ns=0.9)
"""Of ROCm builds, from rows of one card."""


@dataclass(frozen=True)
class RooflineCost(ComputeCost):
    """Costs from bandwidths, in bytes per millisecond."""

    memory_bytes_per_ms: float
    uvm_bytes_per_ms: float
    kernels: Kernels = CPU_KERNELS
    cache_bytes: float = math.inf
    """Of the cache that rows are read from again; infinite: all of them are."""
    source: CostSource = field(init=False, repr=False, compare=False)
    """Names the bandwidths."""

    def __post_init__(self) -> None:
        gb_per_s = self.memory_bytes_per_ms * 1e3 / 1e9
        prior = "" if self.kernels is CPU_KERNELS else "prior from published kernels of other machines, "
        source = CostSource("roofline", f"{prior}topology's {gb_per_s:.0f} GB/s, {NOT_MEASURED}")
        object.__setattr__(self, "source", source)

    @classmethod
    def of_topology(cls, topology: Topology) -> RooflineCost:
        """From the bandwidths of a ``torchrec.distributed.planner.Topology``."""
        if topology.compute_device == "cpu":
            return cls.of_bandwidths("cpu", topology.ddr_mem_bw, topology.ddr_mem_bw)
        return cls.of_bandwidths(topology.compute_device, topology.hbm_mem_bw, topology.hbm_to_ddr_mem_bw)

    @classmethod
    def of_bandwidths(cls, compute_device: str, memory_bytes_per_ms: float, uvm_bytes_per_ms: float) -> RooflineCost:
        """Of a kind of device; one with the memory bandwidth of a known GPU has its L2."""
        if compute_device == "cpu":
            return cls(memory_bytes_per_ms, uvm_bytes_per_ms)
        named = (gpu for gpu in GPUS.values() if gpu.memory_bytes_per_s == memory_bytes_per_ms * 1e3)
        gpu = next(named, None)
        return cls(
            memory_bytes_per_ms=memory_bytes_per_ms,
            uvm_bytes_per_ms=uvm_bytes_per_ms,
            kernels=AMD_KERNELS if torch.version.hip else GPU_KERNELS,
            cache_bytes=L2_BYTES if gpu is None else gpu.l2_bytes,
        )

    def encode(self, features_SF: Tensor) -> Tensor:
        """[S, 5]: count; milliseconds of forward and backward without launches; milliseconds that prefetching takes the
        link to the host beside these; and how many have a backward, which those that only serve have not.

        Reads of a row after its first come from the cache as far as that holds the rows that the shard reads, and those
        of its gradients as far as it holds these: fused kernels go from table to table."""

        def column(name: str) -> Tensor:
            return features_SF[:, FEATURE_INDEX[name]].double()

        kernels = self.kernels
        dim, lookups, distinct_rows = column("dim"), column("lookups"), column("distinct_rows")
        row_bytes = (dim * column("weight_bytes")).clamp_min(kernels.row_bytes)
        first_reads = distinct_rows * row_bytes
        repeats = (lookups - distinct_rows).clamp_min(0) * row_bytes
        outputs = column("output_elements") * OUTPUT_BYTES
        indices, tables = lookups * INDEX_BYTES, torch.full_like(lookups, kernels.table_bytes)
        states = distinct_rows * (1 + column("adagrad") * (dim - 1))
        optimizer_state = column("stateful_optimizer") * states * OUTPUT_BYTES

        forward_ms = 1 / (kernels.forward_share * self.memory_bytes_per_ms)
        backward_ms = 1 / (kernels.backward_share * self.memory_bytes_per_ms)
        # Over the link to the host: rows in unified memory, read in the forward, read and written in the backward; and
        # rows that miss a cache, which takes them in and puts as many others out before the forward. Cached rows are
        # updated in the cache, their optimizer states are not.
        uvm, cached, link_ms = column("uvm"), column("uvm_caching"), 1 / self.uvm_bytes_per_ms
        link_update_ms = kernels.link_updates * link_ms
        update_ms = 2 * (1 - uvm) * backward_ms + uvm * link_update_ms
        state_ms = 2 * (1 - uvm - cached) * backward_ms + (uvm + cached) * link_update_ms
        exchanges = 2 * first_reads * cached * column("cache_misses") * link_ms
        ahead = exchanges * column("cache_prefetched")
        keys = cached * (SORT_PASSES * 2 * indices + lookups * CACHE_SET_BYTES)

        found = lookups * kernels.lookup_bytes
        out_of_memory = first_reads + repeats * self._slowed(first_reads, kernels.cache_speedup)
        forward = (
            out_of_memory * (1 - uvm) * forward_ms
            + (first_reads + repeats) * uvm * kernels.link_reads * link_ms
            + (outputs + found + keys + tables) * forward_ms
            + cached * distinct_rows * (kernels.cache_row_ns * 1e-6)
            + (exchanges - ahead)
        )
        gradient_reads = lookups * dim.clamp_min(kernels.lane_dims) * OUTPUT_BYTES
        backward = (
            distinct_rows * row_bytes.clamp_min(kernels.update_bytes) * update_ms
            + (outputs + SORT_PASSES * 2 * indices + tables) * backward_ms
            + optimizer_state * state_ms
            + column("stateful_optimizer") * distinct_rows * (kernels.row_ns * 1e-6 + kernels.state_bytes * backward_ms)
        )
        again = (gradient_reads - outputs).clamp_min(0) * backward_ms
        backward += again * self._slowed(outputs, kernels.gradient_speedup)
        count, trained = torch.ones_like(forward), 1 - column("served")
        return torch.stack([count, forward, backward * trained, ahead, trained], dim=-1)

    def _slowed(self, bytes_S: Tensor, speedup: float) -> Tensor:
        """Time of reads that find part of so many bytes in the cache, over that of reads out of memory, [S]."""
        hit_S = (self.cache_bytes / bytes_S.clamp_min(1.0)).clamp_max(1.0)
        return 1 - hit_S * (1 - 1 / speedup)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """[..., 2]: launch floor plus the sum over shards, nothing for an empty group. What prefetching moves for the
        next batch passes beside the group's kernels, on a stream of its own, so that the group takes the longer of the
        two; the rest of the step, which hides more of it, is not known here. What sticks out delays the forward."""
        launch_2 = latent_XH.new_tensor([self.kernels.forward_launch_ms, self.kernels.backward_launch_ms])
        kernels_X2 = latent_XH[..., 1:3] + (latent_XH[..., [0, 4]] > 0) * launch_2
        out_X = (latent_XH[..., 3] - both_passes(kernels_X2)).clamp_min(0)
        kernels_X2 = torch.stack([kernels_X2[..., 0] + out_X, kernels_X2[..., 1]], dim=-1)
        return torch.where(latent_XH[..., :1] > 0, kernels_X2, 0.0)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """Always that nothing was measured."""
        if self.kernels is CPU_KERNELS:
            return ("nothing was measured on this device: the level of costs comes from bandwidths alone",)
        return (
            "nothing was measured on this kind of device here: costs are a prior from published kernels of H100, MI350 "
            "and others, scaled by the topology's bandwidths",
        )


DENSE_PASSES = {"sgd": 8, "rowwise_adagrad": 9, "adagrad": 16, "other": 16}
"""Times that a data-parallel table's size passes through memory beside its kernels, by optimizer: the gradient is
zeroed, read and written into DDP's bucket, read and written by DDP's division by the number of ranks, and read by an
optimizer that reads and writes all weights; row-wise Adagrad reads it once more, and one with a state for every weight
passes over that, and a temporary, eight times."""
CPU_DENSE_MS_PER_ELEMENT, CPU_FRESH_MS_PER_ELEMENT = 0.6e-6, 1.2e-6
"""Measured on one core of an AMD EPYC (family 25 model 17), with SGD and without DDP: what four such passes add to a
fused backward pass, and how much more where each gradient's memory is fresh (``benchmarks/dense_kernels.py``)."""
CPU_DENSE_PASSES = 4
FRESH_BYTES = 32 << 20
"""From here on, glibc's malloc takes new pages from the system for each gradient."""


def dense_ms(elements_P: Tensor, passes_P: Tensor | float, topology: Topology) -> Tensor:
    """Milliseconds that data-parallel tables of so many elements add to the backward, beside their kernels, [P].

    Args:
        elements_P: of the table-sized gradient.
        passes_P: times that as many pass through memory; see :data:`DENSE_PASSES`.
        topology: with its bandwidths.
    """
    if topology.compute_device != "cpu":
        return elements_P * passes_P * (OUTPUT_BYTES / topology.hbm_mem_bw)
    fresh_P = elements_P * OUTPUT_BYTES >= FRESH_BYTES
    return elements_P * (CPU_DENSE_MS_PER_ELEMENT / CPU_DENSE_PASSES * passes_P + CPU_FRESH_MS_PER_ELEMENT * fresh_P)
