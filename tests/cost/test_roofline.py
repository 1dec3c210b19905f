# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The roofline model: by hand, and against measured and published kernels."""

from dataclasses import replace

import pytest
import torch

import gpu_prior
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import predict_ms
from dreamshard_planner.cost.roofline import AMD_KERNELS, GPU_KERNELS, Kernels, RooflineCost
from dreamshard_planner.workload.features import FEATURE_INDEX, feature_matrix
from dreamshard_planner.workload.tables import Workload

NO_FLOOR = Kernels(forward_launch_ms=0.0, backward_launch_ms=0.0)
ONCE = (1.0,) + (0.0,) * 16
"""Reuse of rows that are read once."""


def cost_ms(roofline: RooflineCost, *workloads: Workload) -> list[float]:
    """Forward and backward of one fused group."""
    return predict_ms(roofline, LabelledSets.of([list(workloads)], torch.ones(1, 2)))[0].tolist()


def test_roofline_by_hand() -> None:
    roofline = RooflineCost(
        memory_bytes_per_ms=1000.0,
        uvm_bytes_per_ms=100.0,
        kernels=Kernels(forward_launch_ms=0.5, backward_launch_ms=1.0),
    )
    workload = Workload("t", 100, 4, 10, 2.0, 20.0, ONCE)
    # 20 rows of 16 bytes, 40 outputs of 4 bytes, 20 indices of 8 bytes.
    forward, backward = cost_ms(roofline, workload)
    assert forward == pytest.approx(0.5 + (20 * 16 + 160 + 160) / 1000)
    # Rows are read and written; gradients read once per lookup, of which 160 bytes are the outputs'; indices sorted.
    assert backward == pytest.approx(1.0 + (2 * 320 + 160 + 4 * 2 * 160) / 1000 + (320 - 160) / 4000)


def test_a_cache_serves_what_it_holds_and_narrow_rows_cost_a_least() -> None:
    kernels = replace(
        NO_FLOOR, cache_speedup=2.0, gradient_speedup=2.0, row_bytes=64.0, update_bytes=64.0, lane_dims=8.0
    )
    workload = Workload("t", 100, 4, 10, 4.0, 20.0, (0.0, 1.0) + (0.0,) * 15)  # 40 lookups of 20 rows

    def ms(tables: int, cache_bytes: float) -> list[float]:
        return cost_ms(RooflineCost(1000.0, 100.0, kernels, cache_bytes), *[workload] * tables)

    rows, outputs, indices = 20 * 64, 160, 40 * 8
    first = rows + outputs + indices
    for tables in (1, 2):
        # The forward's cache holds the rows of a table, one at a time.
        forward, backward = ms(tables, rows)
        assert forward == pytest.approx(tables * (first + rows / 2) / 1000)
        # Gradients are read in passes of 8 columns; the cache holds all of a table's outputs.
        assert backward == pytest.approx(tables * (2 * rows + outputs + 8 * indices + (40 * 32 - outputs) / 2) / 1000)
        forward, backward = ms(tables, outputs / 2)
        assert forward == pytest.approx(tables * (first + rows * (1 - outputs / 4 / rows)) / 1000)
        again = (40 * 32 - outputs) * 0.75
        assert backward == pytest.approx(tables * (2 * rows + outputs + 8 * indices + again) / 1000)


def test_the_gpu_prior_agrees_with_measured_kernels() -> None:
    """The level where the card is known, and the order of every source."""
    sources = gpu_prior.by_source([*gpu_prior.published(), gpu_prior.measured()])
    assert len(sources) == 12
    for source, times in sources.items():
        found = gpu_prior.Agreement.of(times, AMD_KERNELS)
        level = 1.1 if "H100" in source or "recsys" in source else 1.45
        assert any(part.setup.inferred for part in times) or 1 / level < found.factor < level, source
        assert found.error < 0.25, source
        assert found.tau is None or found.tau > 0.9, source


def test_optimizers_take_what_an_h100_measured() -> None:
    """Each within 16 %, also those that no set of tables was measured with."""
    states, seen, times = [FEATURE_INDEX["weight_states"], FEATURE_INDEX["row_states"]], set(), gpu_prior.measured()
    predicted_and_told = times.predicted_and_told(GPU_KERNELS, {}).tolist()
    for label, (predicted, told) in zip(times.labels(), predicted_and_told, strict=True):
        name, direction = label.rsplit(maxsplit=1)
        if direction == "backward" and "optimizer" in name and "sgd" not in name.strip().removesuffix("lars_sgd"):
            shard = times.shard_S[times.set_S == times.names.index(name.strip())][0]
            seen.add(tuple(times.features_UF[shard, states].tolist()))
            assert predicted == pytest.approx(told, rel=0.16), name
    assert seen == {(1, 0), (1, 1), (2, 0)}


def uvm(memory: str, load_factor: float = 0.2, prefetched: bool = False) -> Workload:
    """Half of the rows are read, once each."""
    return Workload(
        "t", 1000, 4, 10, 50.0, 500.0, ONCE,
        memory=memory, cache_load_factor=load_factor, prefetched=prefetched,
    )  # fmt: skip


def test_rows_outside_of_device_memory_cross_the_link() -> None:
    roofline = RooflineCost(1000.0, 100.0, NO_FLOOR)

    def ms(*workloads: Workload) -> list[float]:
        return cost_ms(roofline, *workloads)

    device, uncached, cached = ms(uvm("device")), ms(uvm("uvm")), ms(uvm("uvm_caching"))
    rows, moved = 500 * 16, 500 * 64  # no read of the link is narrower
    assert uncached[0] - device[0] == pytest.approx(moved / 100 - rows / 1000)
    assert uncached[1] - device[1] == pytest.approx(2 * (moved / 100 - rows / 1000))
    features_SF = feature_matrix([uvm("uvm_caching"), uvm("uvm_caching", 1.0), uvm("uvm"), uvm("device")])
    misses = features_SF[:, FEATURE_INDEX["cache_misses"]].tolist()
    assert 0.6 < misses[0] < 0.85 and misses[1:] == [0.0] * 3
    # What misses is taken in before the forward, and as much put out; every lookup searches a set of the cache, once
    # indices are sorted.
    searched = 500 * (4 * 2 * 8 + 256) / 1000
    assert cached[0] - device[0] == pytest.approx(2 * misses[0] * moved / 100 + searched, rel=1e-5)
    assert cached[1] == pytest.approx(device[1])
    everything = ms(uvm("uvm_caching", 1.0))
    assert everything == pytest.approx([device[0] + searched, device[1]])
    larger = [sum(ms(uvm("uvm_caching", factor))) for factor in (0.05, 0.2, 0.5, 1.0)]
    assert larger == sorted(larger, reverse=True) and larger[0] > 1.5 * larger[-1]


def test_prefetching_hides_behind_the_kernels_of_its_group() -> None:
    roofline = RooflineCost(1000.0, 100.0, NO_FLOOR)

    def total_ms(*workloads: Workload) -> float:
        return sum(cost_ms(roofline, *workloads))

    ahead, at_once = uvm("uvm_caching", prefetched=True), uvm("uvm_caching")
    all_cached = total_ms(uvm("uvm_caching", 1.0))
    link_ms = total_ms(at_once) - all_cached
    assert total_ms(ahead) == pytest.approx(max(link_ms, all_cached), rel=1e-5)
    busy = [uvm("device")] * 40
    assert total_ms(ahead, *busy) == pytest.approx(total_ms(*busy) + all_cached, rel=1e-5)
    assert total_ms(at_once, *busy) == pytest.approx(total_ms(*busy) + all_cached + link_ms, rel=1e-5)
