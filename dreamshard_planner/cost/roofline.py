# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The roofline model: bytes moved over bandwidths, nothing learned, nothing measured.

It serves topologies that no checkpoint covers. The first read of a row comes from memory, repeated reads
within a batch from a faster cache; each fused kernel has a launch floor.

Shapes: S shards, F features, H latent channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.model import CostSource
from dreamshard_planner.workload.features import FEATURE_INDEX
from dreamshard_planner.workload.tables import INDEX_BYTES, OUTPUT_BYTES

CACHE_SPEEDUP = 4.0
"""Cache over memory bandwidth. Of the order of published L2 over HBM figures of A100 and H100."""
SORT_PASSES = 4.0
"""Times that the backward reads and writes the indices while it sorts them (radix sort of int64 keys)."""


CACHE_SET_BYTES = 32 * 8
"""Keys that one lookup in a UVM cache compares: FBGEMM's sets are as wide as a warp. Before, the indices are sorted, to
find the distinct ones."""


@dataclass(frozen=True)
class RooflineCost:
    """A :class:`~dreamshard_planner.cost.model.ComputeCost` from bandwidths in bytes per millisecond."""

    memory_bytes_per_ms: float
    uvm_bytes_per_ms: float
    forward_launch_ms: float
    backward_launch_ms: float

    @classmethod
    def of_topology(cls, topology) -> RooflineCost:
        """From the bandwidths of a ``torchrec.distributed.planner.Topology``."""
        on_cpu = topology.compute_device == "cpu"
        return cls(
            memory_bytes_per_ms=topology.ddr_mem_bw if on_cpu else topology.hbm_mem_bw,
            uvm_bytes_per_ms=topology.ddr_mem_bw if on_cpu else topology.hbm_to_ddr_mem_bw,
            # Launch floors: a handful of kernel launches of some 5-10 us each, more in the backward.
            forward_launch_ms=0.02,
            backward_launch_ms=0.06,
        )

    @property
    def source(self) -> CostSource:
        """Names the bandwidths."""
        gb_per_s = self.memory_bytes_per_ms * 1e3 / 1e9
        return CostSource("roofline", f"topology's {gb_per_s:.0f} GB/s, nothing measured")

    def encode(self, features_SF: Tensor) -> Tensor:
        """[S, 4]: count, forward milliseconds, backward milliseconds of each shard without launches, and milliseconds
        that prefetching takes the link to the host beside these."""

        def column(name: str) -> Tensor:
            return features_SF[:, FEATURE_INDEX[name]].double()

        weight_bytes = column("weight_bytes")
        first_reads = column("distinct_elements") * weight_bytes
        repeats = (column("lookup_bytes") - first_reads).clamp_min(0)
        outputs = column("output_elements") * OUTPUT_BYTES
        indices = column("lookups") * INDEX_BYTES
        optimizer_state = column("stateful_optimizer") * column("distinct_rows") * OUTPUT_BYTES * 2

        memory_ms, cache_ms = 1 / self.memory_bytes_per_ms, 1 / (CACHE_SPEEDUP * self.memory_bytes_per_ms)
        # Over the link to the host: rows in unified memory, read in the forward, read and written in the backward; and
        # rows that miss a cache, which takes them in and puts as many others out. Cached rows are updated in the cache.
        uvm, missed = column("uvm"), column("uvm_caching") * column("cache_misses")
        at_once = missed * (1 - column("cache_prefetched"))
        link_ms = 1 / self.uvm_bytes_per_ms
        read_ms = (1 - uvm) * memory_ms + (uvm + at_once) * link_ms
        update_ms = 2 * (1 - uvm) * memory_ms + (2 * uvm + at_once) * link_ms
        ahead = 2 * first_reads * (missed - at_once) * link_ms
        keys = column("uvm_caching") * (SORT_PASSES * 2 * indices + column("lookups") * CACHE_SET_BYTES)

        forward = first_reads * read_ms + repeats * cache_ms + (outputs + indices + keys) * memory_ms
        gradient_reads = column("lookup_elements") * OUTPUT_BYTES
        backward = (
            first_reads * update_ms
            + (outputs + SORT_PASSES * 2 * indices + optimizer_state) * memory_ms
            + (gradient_reads - outputs).clamp_min(0) * cache_ms
        )
        return torch.stack([torch.ones_like(forward), forward, backward, ahead], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """[..., 2]: launch floor plus the sum over shards, nothing for an empty group. What prefetching moves for the
        next batch passes beside the group's kernels, on a stream of its own, so that the group takes the longer of the
        two; the rest of the step, which hides more of it, is not known here. What sticks out delays the forward."""
        launch_2 = latent_XH.new_tensor([self.forward_launch_ms, self.backward_launch_ms])
        kernels_X2 = latent_XH[..., 1:3] + launch_2
        out_X = (latent_XH[..., 3] - kernels_X2.sum(-1)).clamp_min(0)
        kernels_X2 = torch.stack([kernels_X2[..., 0] + out_X, kernels_X2[..., 1]], dim=-1)
        return torch.where(latent_XH[..., :1] > 0, kernels_X2, 0.0)

    glance_ms = group_cost_ms
    glance_channels = None

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """Always that nothing was measured."""
        return ("nothing was measured for this kind of device: costs come from bandwidths alone",)


DENSE_PASSES = 5
"""Times that the table-sized gradient and weights of a data-parallel table pass through memory beside its kernels: the
gradient is zeroed, accumulated and read, the weights are read and written by the optimizer."""
CPU_DENSE_MS_PER_ELEMENT, CPU_FRESH_MS_PER_ELEMENT = 0.6e-6, 1.2e-6
"""Measured on one core of an AMD EPYC (family 25 model 17), with SGD: what gradient and optimizer add to a fused
backward pass, and how much more where each gradient's memory is fresh (``benchmarks/dense_kernels.py``)."""
FRESH_BYTES = 32 << 20
"""From here on, glibc's malloc takes new pages from the system for each gradient."""


def dense_ms(elements_P: Tensor, topology) -> Tensor:
    """Milliseconds that data-parallel tables of so many elements add to the backward, beside their kernels, [P]."""
    if topology.compute_device != "cpu":
        return elements_P * (DENSE_PASSES * OUTPUT_BYTES / topology.hbm_mem_bw)
    fresh_P = elements_P * OUTPUT_BYTES >= FRESH_BYTES
    return elements_P * (CPU_DENSE_MS_PER_ELEMENT + CPU_FRESH_MS_PER_ELEMENT * fresh_P)
