# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The roofline model: bytes moved over bandwidths, and times that kernels take whatever they move.

It serves topologies that no checkpoint covers, and is what networks for GPUs start from
(:mod:`dreamshard_planner.cost.network`). On GPUs its parameters are fitted to FBGEMM's kernels as an H100 measured
them and as others published them of other cards (``benchmarks/gpu_prior.py``), on CPUs to the shape of what one kind of
CPU measured (``benchmarks/cpu_prior.py``), whatever its speed; nothing of it was measured on the machine at hand.

Shapes: S shards, F features, H latent channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.problem import NOT_MEASURED, ComputeCost, CostSource
from dreamshard_planner.devices import GPUS, card_of, gpu_of
from dreamshard_planner.workload.reuse import bin_mean_reuse
from dreamshard_planner.workload.tables import FEATURE_INDEX, INDEX_BYTES, OUTPUT_BYTES, REUSE_FEATURES, columns

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

SORT_PASSES = 4.0
"""Times that the backward reads and writes the indices while it sorts them (radix sort of int64 keys)."""
TWO_STATES = 2.0
"""Times as long as others that a lookup takes in a GPU's backward where the optimizer has two states (Adam, LAMB): its
kernels hold more, so that fewer run at once. What an H100 measured beside the bytes of the states themselves."""
CACHE_SET_BYTES = 32 * 8
"""Keys that one lookup in a UVM cache compares: FBGEMM's sets are as wide as a warp. Before, the indices are sorted, to
find the distinct ones."""
LINK_BYTES = 64
"""Least bytes of reading a row over the link to the host."""
L2_BYTES = 40e6
"""L2 cache of a GPU that :data:`~dreamshard_planner.devices.GPUS` does not name."""
USUAL_CORES = 0.6
"""Power of its bandwidth by which its multiprocessors and their clock are taken to grow: from V100 to H100 they did."""
GENERATIONS = 3.0
"""Power of these by which kernels take longer for lookups and rows on cards that have fewer than an H100: later
generations, and later versions of FBGEMM, do more in a clock as well. On cards that have more, time shrinks as they
grow."""


@dataclass(frozen=True)
class Kernels:
    """Use of a device by FBGEMM's kernels: its bandwidth, and on GPUs its lanes. Each parameter has a meaning; together
    they are few enough to be fitted. Nanoseconds are those of an H100's multiprocessors, of bags and steps those of all
    cards."""

    forward_share: float = 1.0
    """Share of the memory's bandwidth that the forward reaches."""
    backward_share: float = 1.0
    cache_speedup: float = 4.0
    """Cache over memory bandwidth, for reads of a row after the first where the cache holds it."""
    gradient_speedup: float = 4.0
    """Cache over memory bandwidth for gradients, which are read again for every lookup."""
    rows_held: float = 1.0
    """Share of the cache that holds rows: those that are read most."""
    gradients_held: float = 1.0
    """Share of the cache that holds gradients."""
    row_bytes: float = 0.0
    """Least bytes of reading a row."""
    far_row_bytes: float = 0.0
    """More bytes per row if the table is much larger than ``far_table_bytes``, for looking up addresses."""
    far_table_bytes: float = 1e9
    update_bytes: float = 0.0
    """Least bytes of reading or writing a row in the update."""
    update_weight_bytes: float = 0.0
    """Least bytes of one weight in the update."""
    lookup_bytes: float = INDEX_BYTES
    """Bytes of a lookup in the forward beside its row: its index, and finding the row."""
    sequence_bytes: float = 0.0
    """More bytes of a lookup without pooling in the forward, of tables of at most 32 columns: they have their own
    kernel."""
    table_bytes: float = 0.0
    """Bytes of each table in either direction beside its rows: kernels start anew at each table."""
    lane_dims: float = 0.0
    """Columns that a warp adds up in one pass of the backward: narrower gradients take as long."""
    state_bytes: float = 0.0
    """Backward bytes of each distinct row with one optimizer state, beside those of both, for reaching one scattered
    word per row."""
    row_ns: float = 0.0
    """Backward nanoseconds of the same rows on AMD's GPUs, whose bandwidth does not tell it."""
    lookup_ns: float = 0.0
    """Forward time of each lookup, wherever its row is found, and more for each lane of the kernel: all tables of a
    fused kernel take the lanes of its widest one."""
    lookup_lane_ns: float = 0.0
    step_ns: float = 0.0
    """Forward time of each lookup of the longest bags, whose lookups are serial: the GPU is idle while few bags
    last. Memory answers no sooner on later cards."""
    bag_ns: float = 0.0
    """Forward time of each bag, empty or not: mostly FBGEMM's check of ids, which starts as many blocks of threads a
    second on all cards."""
    bag_lane_ns: float = 0.0
    """More for each lane of the kernel, on an H100's multiprocessors."""
    table_ns: float = 0.0
    """Forward time of each table."""
    update_lookup_ns: float = 0.0
    """Backward time of each lookup, and more for each lane."""
    update_lane_ns: float = 0.0
    update_row_ns: float = 0.0
    """Backward time of each distinct row."""
    update_table_ns: float = 0.0
    """Backward time of each table."""
    weighted_lookup_ns: float = 0.0
    """Backward time of each weighted lookup."""
    link_reads: float = 1.0
    """Times that a row of unified memory takes the link to the host in the forward, over its bandwidth."""
    link_repeats: float = 1.0
    """Share of the reads of a row after its first that take the link again: a GPU caches little of another's memory."""
    link_updates: float = 2.0
    """Passes of each distinct row, and of its optimizer state, over the link in the backward: there and back, in
    both directions at once. States stay in the host's memory even if rows have a cache."""
    link_exchanges: float = 2.0
    """Passes of each row that misses a cache: it comes, and another goes."""
    cache_row_ns: float = 0.0
    """Forward time of each distinct row looked up in a UVM cache, hit or miss: ids are made distinct
    before the cache is searched. Nothing tells what other cards take: the root of what they take longer for lookups,
    since memory does half of it."""
    forward_launch_ms: float = 0.02
    """Launch floors: a handful of kernels of some 5 to 10 us each, more in the backward."""
    backward_launch_ms: float = 0.06
    sort_launch_ms: float = 0.0
    """More of the backward if there is much to sort, by the share of lookups over these and ``sort_lookups``."""
    sort_lookups: float = 2500.0


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
    forward_share=0.997,
    backward_share=0.849,
    cache_speedup=1000.0,
    gradient_speedup=8.48,
    rows_held=0.262,
    gradients_held=0.563,
    row_bytes=108.0,
    far_row_bytes=55.3,
    far_table_bytes=135000000.0,
    update_bytes=64.0,
    update_weight_bytes=4.0,
    sequence_bytes=376.0,
    lane_dims=31.7,
    state_bytes=393.0,
    lookup_ns=0.00315,
    lookup_lane_ns=0.000127,
    step_ns=170.0,
    bag_ns=0.254,
    bag_lane_ns=0.00046,
    table_ns=31.7,
    update_lookup_ns=0.0506,
    update_lane_ns=0.000471,
    update_row_ns=0.155,
    update_table_ns=272.0,
    weighted_lookup_ns=0.246,
    link_reads=1.37,
    link_repeats=0.426,
    link_updates=1.53,
    link_exchanges=1.42,
    cache_row_ns=3.87,
    forward_launch_ms=0.0135,
    backward_launch_ms=0.0525,
    sort_launch_ms=0.0697,
    sort_lookups=3570.0,
)
"""Fitted by ``benchmarks/gpu_prior.py`` to what an H100 measured (FBGEMM 1.6) and to what others published of other
cards."""
AMD_KERNELS = replace(GPU_KERNELS, row_ns=0.9)
"""Kernels of ROCm builds, from rows of one card."""
LANES = (32, 64, 128, 256, 512, 1024)
"""That fused kernels take, by their widest table: FBGEMM's warps share a bag between 8, 16 or 32 threads of four
columns each, and take several turns for wider ones."""
_SUMS, _LONGEST = 9, 3e4
"""Latents before those of the lanes; most lookups per bag, beyond any, whose power single precision holds."""


@dataclass(frozen=True)
class RooflineCost(ComputeCost):
    """Costs from bandwidths, in bytes per millisecond."""

    memory_bytes_per_ms: float
    uvm_bytes_per_ms: float
    kernels: Kernels = CPU_KERNELS
    cache_bytes: float = math.inf
    """Cache that rows are read from again; infinite: it holds all of them."""
    slowness: float = 1.0
    """Times as long as on an H100 that kernels take for lookups, rows and tables, beside what memory takes."""
    source: CostSource = field(init=False, repr=False, compare=False)
    """Names the bandwidths."""

    def __post_init__(self) -> None:
        gb_per_s = self.memory_bytes_per_ms * 1e3 / 1e9
        prior = "" if self.kernels is CPU_KERNELS else "prior from kernels of an H100 and others, "
        source = CostSource("roofline", f"{prior}topology's {gb_per_s:.0f} GB/s, {NOT_MEASURED}")
        object.__setattr__(self, "source", source)

    @classmethod
    def of_topology(cls, topology: Topology) -> RooflineCost:
        """Read the bandwidths of a ``torchrec.distributed.planner.Topology``."""
        if topology.compute_device == "cpu":
            return cls.of_bandwidths("cpu", topology.ddr_mem_bw, topology.ddr_mem_bw)
        bandwidths = topology.hbm_mem_bw, topology.hbm_to_ddr_mem_bw
        return cls.of_bandwidths(topology.compute_device, *bandwidths, card_of(topology))

    @classmethod
    def of_bandwidths(
        cls, compute_device: str, memory_bytes_per_ms: float, uvm_bytes_per_ms: float, card: str | None = None
    ) -> RooflineCost:
        """Make the cost of a kind of device. A listed card brings its L2 and multiprocessors; those of others are
        scaled by bandwidth.

        Args:
            compute_device: ``cpu``, ``cuda`` or ``mtia``.
            memory_bytes_per_ms: of the device's memory.
            uvm_bytes_per_ms: of the link to the host's memory.
            card: the driver's name.
        """
        if compute_device == "cpu":
            return cls(memory_bytes_per_ms, uvm_bytes_per_ms)
        h100 = GPUS["h100"]
        if (name := gpu_of(card)) is None:
            cache_bytes, fewer = L2_BYTES, (h100.memory_bytes_per_s / (memory_bytes_per_ms * 1e3)) ** USUAL_CORES
        else:
            cache_bytes, fewer = GPUS[name].l2_bytes, h100.multiprocessor_hz / GPUS[name].multiprocessor_hz
        kernels = AMD_KERNELS if torch.version.hip else GPU_KERNELS
        slowness = fewer**GENERATIONS if fewer > 1 else fewer
        return cls(memory_bytes_per_ms, uvm_bytes_per_ms, kernels, cache_bytes, slowness)

    @classmethod
    def of_card(cls, name: str) -> RooflineCost:
        """Make the cost of a card by its own name, such as ``NVIDIA H100 80GB HBM3``; unlisted cards count as an
        H100."""
        gpu = GPUS[gpu_of(name) or "h100"]
        return cls.of_bandwidths("cuda", gpu.memory_bytes_per_s / 1e3, gpu.host_bytes_per_s / 1e3, gpu.cards[0])

    @property
    def channels(self) -> int:
        """Number of latent channels."""
        return _SUMS + len(LANES) - 1 if self._has_lanes else 5

    @property
    def _has_lanes(self) -> bool:
        return self.kernels.lookup_lane_ns > 0

    def encode(self, features_SF: Tensor) -> Tensor:
        """[S, 5], on GPUs [S, 8 + lanes]: count; milliseconds of forward and backward without launches; those that
        prefetching takes the link to the host beside these; how many have a backward, which those that only serve have
        not. On GPUs milliseconds of forward and backward for each lane of the kernel; a power of the lookups per bag;
        lookups with a backward; and for each number of lanes but the last a count of those that need more.

        Reads of a row after its first come from the cache as far as that holds the rows that the shard reads most, and
        those of its gradients as far as it holds these: fused kernels go from table to table."""

        def column(name: str) -> Tensor:
            return features_SF[:, FEATURE_INDEX[name]].double()

        kernels = self.kernels
        dim, lookups, distinct_rows = column("dim"), column("lookups"), column("distinct_rows")
        weight_bytes = column("weight_bytes")
        far = column("size") / (column("size") + kernels.far_table_bytes)
        row_bytes = (dim * weight_bytes).clamp_min(kernels.row_bytes) + kernels.far_row_bytes * far
        first_reads = distinct_rows * row_bytes
        repeats, missed = self._repeats(features_SF, row_bytes)
        link_row_bytes = (dim * weight_bytes).clamp_min(LINK_BYTES)
        outputs = column("output_elements") * OUTPUT_BYTES
        indices, tables = lookups * INDEX_BYTES, torch.full_like(lookups, kernels.table_bytes)
        weight_states, row_states = column("weight_states"), column("row_states")
        optimizer_state = distinct_rows * (weight_states * dim + row_states) * OUTPUT_BYTES
        scattered = row_states * distinct_rows
        narrow_sequence = column("sequence") * (dim <= LANES[0])
        ns, cache_ns = 1e-6 * self.slowness, 1e-6 * math.sqrt(self.slowness)

        forward_ms = 1 / (kernels.forward_share * self.memory_bytes_per_ms)
        backward_ms = 1 / (kernels.backward_share * self.memory_bytes_per_ms)
        # Over the link to the host: rows in unified memory, read in the forward, read and written in the backward; and
        # rows that miss a cache, which takes them in and puts as many others out before the forward. Cached rows are
        # updated in the cache, their optimizer states are not.
        uvm, cached, link_ms = column("uvm"), column("uvm_caching"), 1 / self.uvm_bytes_per_ms
        link_update_ms = kernels.link_updates * link_ms
        state_ms = 2 * (1 - uvm - cached) * backward_ms + (uvm + cached) * link_update_ms
        misses = distinct_rows * cached * column("cache_misses")
        exchanges = kernels.link_exchanges * misses * link_row_bytes * link_ms
        ahead = exchanges * column("cache_prefetched")
        keys = cached * (SORT_PASSES * 2 * indices + lookups * CACHE_SET_BYTES)

        found = lookups * kernels.lookup_bytes
        out_of_memory = first_reads + (missed + (repeats - missed) / kernels.cache_speedup) * row_bytes
        over_link = (distinct_rows + repeats * kernels.link_repeats) * link_row_bytes * kernels.link_reads
        forward = (
            out_of_memory * (1 - uvm) * forward_ms
            + over_link * uvm * link_ms
            + (outputs + found + keys + tables + narrow_sequence * lookups * kernels.sequence_bytes) * forward_ms
            + cached * distinct_rows * kernels.cache_row_ns * cache_ns
            + kernels.table_ns * ns
            + (exchanges - ahead)
        )
        gradient_reads = lookups * dim.clamp_min(kernels.lane_dims) * OUTPUT_BYTES
        updated_bytes = (dim * weight_bytes.clamp_min(kernels.update_weight_bytes)).clamp_min(kernels.update_bytes)
        backward = (
            distinct_rows * (updated_bytes * 2 * (1 - uvm) * backward_ms + link_row_bytes * uvm * link_update_ms)
            + (outputs + SORT_PASSES * 2 * indices + tables) * backward_ms
            + optimizer_state * state_ms
            + scattered * (kernels.row_ns * 1e-6 + kernels.state_bytes * backward_ms)
            + (distinct_rows * kernels.update_row_ns + kernels.update_table_ns) * ns
            + lookups * column("weighted") * kernels.weighted_lookup_ns * ns
        )
        again = (gradient_reads - outputs).clamp_min(0) * backward_ms
        held = (kernels.gradients_held * self.cache_bytes / outputs.clamp_min(1.0)).clamp_max(1.0)
        backward += again * (1 - held * (1 - 1 / kernels.gradient_speedup))
        count, trained = torch.ones_like(forward), 1 - column("served")
        if not self._has_lanes:
            return torch.stack([count, forward, backward * trained, ahead, trained], dim=-1)
        bags = column("samples")  # empty ones take as long
        pooling = lookups / bags.clamp_min(1.0)
        forward += lookups * kernels.lookup_ns * ns + bags * kernels.bag_ns * 1e-6
        updates = torch.where(weight_states + row_states > 1, TWO_STATES * lookups, lookups)
        backward += updates * kernels.update_lookup_ns * ns
        forward_lane = (lookups * kernels.lookup_lane_ns + bags * kernels.bag_lane_ns) * ns
        backward_lane = updates * kernels.update_lane_ns * ns * trained
        longest = pooling.clamp_max(_LONGEST) ** 4  # the fourth root of whose sum stands for the maximum
        sums = [forward, backward * trained, ahead, trained, forward_lane, backward_lane, longest, lookups * trained]
        lanes_SL = dim[:, None] > dim.new_tensor(LANES[:-1])
        return torch.cat([torch.stack([count, *sums], dim=-1), lanes_SL.double()], dim=-1)

    def _repeats(self, features_SF: Tensor, row_bytes_S: Tensor) -> tuple[Tensor, Tensor]:
        """Reads of rows after their first, and those of them that no cache serves, [S] each: the cache holds what is
        read most."""
        lookups_S1, distinct_S1 = features_SF[:, columns(("lookups", "distinct_rows"))].double().split(1, dim=1)
        repeats_S = (lookups_S1 - distinct_S1).clamp_min(0)[:, 0]
        if math.isinf(self.cache_bytes):
            return repeats_S, torch.zeros_like(repeats_S)
        share_SK = features_SF[:, columns(REUSE_FEATURES)].double()
        reads_SK = share_SK * bin_mean_reuse()
        rows_SK = share_SK / share_SK.sum(1, keepdim=True).clamp_min(1e-9) * distinct_S1
        reads_SK *= lookups_S1 / reads_SK.sum(1, keepdim=True).clamp_min(1e-9)
        again_SK = (reads_SK - rows_SK).clamp_min(0)
        room_S1 = (self.kernels.rows_held * self.cache_bytes / row_bytes_S)[:, None]
        hotter_SK = rows_SK.flip(1).cumsum(1).flip(1) - rows_SK
        held_SK = ((room_S1 - hotter_SK) / rows_SK.clamp_min(1e-9)).clamp(0, 1)
        missed_S = (again_SK * (1 - held_SK)).sum(1) / again_SK.sum(1).clamp_min(1e-9)
        return repeats_S, repeats_S * missed_S

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """[..., 2]: launch floor plus the sum over shards, and what the lanes of the widest take all of them; nothing
        for an empty group. What prefetching moves for the next batch passes beside the group's kernels, on a stream of
        its own, so that the group takes the longer of the two; the rest of the step, which hides more of it, is not
        known here. What sticks out delays the forward."""
        # In numpy, whose calls cost a third of torch's: a search rates few groups at a time, thousands of times.
        kernels, latent_HX = self.kernels, np.ascontiguousarray(latent_XH.detach().movedim(-1, 0).numpy())
        count_X, forward_X, backward_X, ahead_X, trained_X = latent_HX[:5]
        forward_X = forward_X + kernels.forward_launch_ms
        if self._has_lanes:
            forward_lane_X, backward_lane_X, longest_X, updates_X = latent_HX[5:_SUMS]
            widest_X = np.array(LANES, latent_HX.dtype)[(latent_HX[_SUMS:] > 0.5).sum(0)]
            longest_X, updates_X = np.maximum(longest_X, 0), np.maximum(updates_X, 0)
            steps_X = np.sqrt(np.sqrt(longest_X))
            forward_X = forward_X + forward_lane_X * widest_X + steps_X * kernels.step_ns * 1e-6
            sorted_X = kernels.sort_launch_ms * updates_X / (updates_X + kernels.sort_lookups)
            # A GPU's backward returns at once where nothing was looked up.
            backward_X = (backward_X + kernels.backward_launch_ms) * (updates_X > 1e-3)
            backward_X = backward_X + backward_lane_X * widest_X + sorted_X
        else:
            backward_X = np.where(trained_X > 0, backward_X + kernels.backward_launch_ms, backward_X)
        forward_X = forward_X + np.maximum(ahead_X - forward_X - backward_X, 0)
        ms_X2 = np.stack([forward_X, backward_X], axis=-1)
        ms_X2[count_X <= 0] = 0
        return torch.from_numpy(ms_X2)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """Always that nothing was measured."""
        if self.kernels is CPU_KERNELS:
            return ("nothing was measured on this device: the level of costs comes from bandwidths alone",)
        return (
            "nothing was measured on this kind of device here: costs are a prior from kernels of H100, MI350 and "
            "others, scaled by the topology's bandwidths",
        )


DENSE_PASSES = {"sgd": 8, "rowwise_adagrad": 12, "adagrad": 16, "partial_rowwise_adam": 16, "adam": 23, "other": 16}
"""Times that a data-parallel table's size passes through memory beside its kernels, by optimizer: the gradient is
zeroed, read and written into DDP's bucket, read and written by DDP's division by the number of ranks, and read by an
optimizer that reads and writes all weights; row-wise Adagrad reads it once more, and passes over its squares; one with
a state for every weight passes over that, and a temporary, eight times; Adam over two of them, and its temporaries, 15
times. An H100 takes 8.6, 12.4 and 17.5 of them, but for Adam (``benchmarks/results/h100.md``)."""
CPU_DENSE_MS_PER_ELEMENT, CPU_FRESH_MS_PER_ELEMENT = 0.6e-6, 1.2e-6
"""Measured on one core of an AMD EPYC (family 25 model 17), with SGD and without DDP: what four such passes add to a
fused backward pass, and how much more where each gradient's memory is fresh
(``benchmarks/results/cost-network.md``)."""
CPU_DENSE_PASSES = 4
FRESH_BYTES = 32 << 20
"""Size from which glibc's malloc takes new pages from the system for each gradient."""


def dense_ms(elements: float, passes: float, topology: Topology) -> float:
    """Milliseconds that a data-parallel table adds to the backward, beside its kernel.

    Args:
        elements: of the table-sized gradient.
        passes: times that as many pass through memory; see :data:`DENSE_PASSES`.
        topology: with its bandwidths.
    """
    if topology.compute_device != "cpu":
        return elements * passes * (OUTPUT_BYTES / topology.hbm_mem_bw)
    is_fresh = elements * OUTPUT_BYTES >= FRESH_BYTES
    return elements * (CPU_DENSE_MS_PER_ELEMENT / CPU_DENSE_PASSES * passes + CPU_FRESH_MS_PER_ELEMENT * is_fresh)
