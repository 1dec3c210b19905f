# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A/B tests of plans on two ranks: equal weights and batches, turns that all ranks take alike, and what differs."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Rank, run_on_ranks
from tiny import LOCAL_BATCH, SHAPES, TinyModel, batch, make_planner
from torch import nn
from torchrec.distributed.planner import ParameterConstraints

from dlrm.job import EveryTypeSharder
from dreamshard_planner import DistributedModelParallel, ObservationError, StepComparison, compare_steps
from dreamshard_planner.observing.observer import DEFAULTS
from dreamshard_planner.observing.step_comparison import ratio_interval
from tests.ways import Batch

KINDS = ("table_wise", "row_wise", "data_parallel")
ROUNDS, COPIES = 3, 2


def _compared(rank: Rank) -> tuple[StepComparison, dict[str, list[list[float]]], list[str]]:
    losses: dict[str, list[list[float]]] = defaultdict(list)
    turns: list[str] = []

    def build(kind: str) -> tuple[nn.Module, Any]:
        kinds = {f"t{index}": kind if rows > 1 else "table_wise" for index, (rows, _) in enumerate(SHAPES)}
        constraints = {name: ParameterConstraints([own]) for name, own in kinds.items()}
        planner = make_planner("torchrec", rank, constraints=constraints)
        sharders = [EveryTypeSharder()]
        model = DistributedModelParallel(TinyModel(), device=rank.device, planner=planner, sharders=sharders)
        optimizer = torch.optim.SGD(model.module.top.parameters(), lr=0.1)
        own: list[float] = []
        losses[kind].append(own)

        def step(batches: Iterator[Any]) -> None:
            optimizer.zero_grad()
            loss, _ = model(next(batches))
            loss.backward()
            optimizer.step()
            own.append(loss.item())
            if turns[-1:] != [kind]:
                turns.append(kind)

        return model, step

    first = LOCAL_BATCH * rank.rank
    batches = [batch(index, 2 * LOCAL_BATCH, first, LOCAL_BATCH, rank.device) for index in range(3)]
    plans = {kind: kind for kind in KINDS}
    for wrong, told in (({"rounds": 0}, "'rounds': 0"), ({"plans": {}}, "'plans': 0")):
        with pytest.raises(ValueError, match=told):
            compare_steps(**{"build": build, "plans": plans, "batches": batches} | wrong)
    compared = compare_steps(build, plans, batches, copies=COPIES, rounds=ROUNDS, block_seconds=0.001, observed_steps=4)
    assert not DEFAULTS  # no model goes on being observed
    with pytest.raises(ObservationError, match="no sharded embeddings"):
        compare_steps(lambda _: (nn.Linear(1, 1), next), {"none": None}, batches, block_seconds=0.001)
    measured = {kind: list(losses[kind]) for kind in KINDS}
    inner = {"plans": {"inner": "table_wise"}, "build": lambda kind: _of_inner(*build(kind), batches[0])}
    with pytest.raises(ObservationError, match="plan 'inner': no training step .* or give observed_steps=0"):
        compare_steps(**inner, batches=batches, rounds=1_000_000)  # before all rounds
    compare_steps(**inner, batches=batches, rounds=1, block_seconds=0.001, observed_steps=0)
    with pytest.raises(TypeError, match="a list, .* got list_iterator"):
        compare_steps(build, plans, iter(batches))
    return compared, measured, turns


def _of_inner(model: DistributedModelParallel, _: Any, given: Batch) -> tuple[nn.Module, Any]:
    """A step that calls another module than the observed one."""
    return model, lambda _: model.module(given)[0].backward()


def test_plans_train_alike_in_turns_and_their_work_is_told() -> None:
    (compared, losses, turns), (other, _, other_turns) = run_on_ranks(_compared, world_size=2)
    assert compared.step_ms == other.step_ms and turns == other_turns and compared.block_steps == 2
    assert np.array(list(compared.step_ms.values())).shape == (len(KINDS), COPIES, ROUNDS)
    for kind in KINDS:
        assert len(losses[kind]) == COPIES
        for own in losses[kind]:
            shared = min(len(own), len(losses[KINDS[0]][0]))
            assert shared >= 3 + ROUNDS * compared.block_steps
            assert own[:shared] == pytest.approx(losses[KINDS[0]][0][:shared], rel=1e-4)
    assert set(compared.work("table_wise")) == {
        "table_wise kernels", "lookups all_to_all", "outputs all_to_all forward", "outputs all_to_all backward"
    }  # fmt: skip
    exchanged = {"outputs reduce_scatter forward", "outputs all_gather backward"}
    assert {"row_wise kernels", *exchanged} < set(compared.work("row_wise"))
    assert all(len(seen.runs[0].ranks) == 2 for seen in compared.observed.values())
    (cells,) = [line.split() for line in str(compared).splitlines() if line.startswith("data_parallel kernels")]
    assert cells[2:] == ["-", "-", *compared.work("data_parallel")["data_parallel kernels"].split()]
    assert str(compared).endswith("The all-reduce and the update of data_parallel tables are not shown.")


def test_ratios_are_of_blocks_of_one_round() -> None:
    base = np.random.default_rng(0).uniform(50, 60, size=(3, 20))
    low, ratio, high = ratio_interval(base * 0.9, base)
    assert low < ratio < high and ratio == pytest.approx(0.9, abs=0.02)
    slow_spells = np.where(np.arange(20) % 4 == 0, 3.0, 1.0)  # they hit both, and cancel
    assert ratio_interval(base * 0.9 * slow_spells, base * slow_spells) == pytest.approx((low, ratio, high))


def test_verdicts_follow_the_interval() -> None:
    steps = {"a": [[10.0, 11.0, 10.0]], "b": [[5.0, 5.5, 5.0]], "c": [[20.0, 22.0, 20.0]], "d": [[9.0, 12.0, 10.0]]}
    told = str(StepComparison(steps, 7, {}))
    assert "1 model(s) of each plan, 3 rounds of 7 steps each" in told
    words = {line.split()[0]: line.split()[2:] for line in told.splitlines() if line[:2].strip() in set("abcd")}
    assert words["a"] == [] and words["b"] == ["0.500", "0.500-0.500", "faster"]
    assert words["c"] == ["2.000", "2.000-2.000", "slower"] and words["d"][2:] == ["no", "difference", "shown"]
