# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sets of shards to measure, and what data-parallel tables cost beside their kernels."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.planner import Topology

from dreamshard_planner.cost.roofline import CPU_DENSE_PASSES, FRESH_BYTES, dense_ms
from dreamshard_planner.errors import TaskError
from dreamshard_planner.measure.collect import draw_sets, set_work
from dreamshard_planner.measure.kernels import FusedKernel, check_group
from dreamshard_planner.measure.shards import MAX_ROW_BLOCKS, MAX_SLICES, draw_mixed_sets, draw_shard_sets
from dreamshard_planner.training import QUICK, pool_tables
from dreamshard_planner.workload.tables import OUTPUT_BYTES, FeatureStatistics, Table

TABLES = [
    Table(f"t{i}", rows=1000 * (i + 1), dim=(4, 8, 64, 256)[i % 4], features=(FeatureStatistics(float(i % 9)),))
    for i in range(40)
]
OF_NAME = {table.name: table for table in TABLES}


def draw(*kinds: str, count: int = 150) -> list:
    return draw_shard_sets(TABLES, count, 1, (64, 256), kinds=kinds)


@pytest.mark.parametrize("kind", ["column", "row", "grid"])
def test_every_set_fits_one_kernel(kind: str) -> None:
    for group in draw(kind):
        check_group(group)


def test_column_slices_repeat_every_lookup() -> None:
    narrow = 0
    for group in draw("column"):
        names = [shard.name for shard in group]
        for shard in group:
            table = OF_NAME[shard.name]
            assert shard.rows == table.rows and shard.pooling_factor == table.pooling_factor
            assert shard.dim % 4 == 0 and (shard.dim <= table.dim / 2 or table.dim == 4)
            assert names.count(shard.name) <= min(MAX_SLICES, max(1, table.dim // shard.dim))
            narrow += shard.dim == 4 < table.dim
    assert narrow > 20


def test_row_blocks_have_their_share_of_lookups_and_rows() -> None:
    even = skewed = nearly_empty = 0
    for group in draw("row"):
        blocks = {round(OF_NAME[shard.name].rows / shard.rows) for shard in group}
        assert max(blocks) <= MAX_ROW_BLOCKS * 1.2
        for shard in group:
            table = OF_NAME[shard.name]
            assert shard.dim == table.dim and 1 <= shard.rows <= table.rows / 2
            assert shard.distinct_rows <= min(shard.lookups, shard.rows) + 1e-6
            if table.pooling_factor:
                share = shard.pooling_factor / table.pooling_factor
                alike = share == pytest.approx(shard.rows / table.rows, rel=0.02)
                even, skewed = even + alike, skewed + (not alike)
                nearly_empty += shard.pooling_factor < 0.1
    assert even > 100 and skewed > 50 and nearly_empty > 50


def test_grids_are_both_and_draws_repeat() -> None:
    shards = [shard for group in draw("grid") for shard in group]
    cut = [s for s in shards if s.dim < OF_NAME[s.name].dim and s.rows < OF_NAME[s.name].rows]
    assert len(cut) > len(shards) / 3
    assert draw("grid", "row", count=20) == draw("grid", "row", count=20)


def test_sets_stay_within_the_work_asked_for() -> None:
    sets = draw_shard_sets(TABLES, 60, 3, (256,), max_work=2e5)
    assert all(set_work(group) <= 2e5 or len(group) == 1 for group in sets)


def test_a_share_of_all_sets_is_of_shards() -> None:
    sets = draw_mixed_sets(TABLES, 100, 3, (256,), shard_share=0.25)
    whole = [all((s.rows, s.dim) == (OF_NAME[s.name].rows, OF_NAME[s.name].dim) for s in group) for group in sets]
    assert whole[0] and whole.count(False) == pytest.approx(25, abs=3)
    assert draw_mixed_sets(TABLES, 10, 3, (256,), shard_share=0.25) == sets[:10]
    assert draw_mixed_sets(TABLES, 7, 3, (256,), shard_share=0) == draw_sets(TABLES, 7, 3, (256,))
    with pytest.raises(TaskError, match="between 0 and 1, got 2"):
        draw_mixed_sets(TABLES, 7, 3, shard_share=2)


def test_trainings_measure_shards() -> None:
    tables = pool_tables(QUICK.pools)[0]
    rows = {table.name: table.rows for table in tables}
    sets = QUICK.draw_sets(tables, 40, seed=0)
    assert sum(any(shard.rows < rows[shard.name] for shard in group) for group in sets) >= 2


def test_shards_of_one_table_run_as_one_kernel() -> None:
    group = max(draw("column"), key=len)
    kernel = FusedKernel(group, "cpu")
    output = kernel.forward()
    assert output.shape == (group[0].batch_size, sum(shard.num_features * shard.dim for shard in group))
    kernel.backward()


def test_large_gradients_cost_more_per_element_on_cpu() -> None:
    elements_P = torch.tensor([0.0, FRESH_BYTES / OUTPUT_BYTES / 2, FRESH_BYTES / OUTPUT_BYTES], dtype=torch.float64)
    nothing, small, large = dense_ms(elements_P, CPU_DENSE_PASSES, Topology(2, "cpu")).tolist()
    assert nothing == 0 and large > 4 * small > 0
    cuda = Topology(2, "cuda", hbm_mem_bw=1e9)
    assert dense_ms(elements_P, 7, cuda).tolist() == pytest.approx([7 * 4 * n / 1e9 for n in elements_P.tolist()])
