# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Says, while a job trains, when another plan would pay for the steps that remain, by how much, and how sure that is.

Batches of a window are sampled into two sets. By the first one the job is re-planned; by parts of the second one, which
the new plan has not seen, both plans are rated. A gain that is only noise of the first set is not there in the second.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.plans.replan import Replan
from dreamshard_planner.support.formatting import first_of, seconds_in_words
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.sampling import EVERY, BatchSampler
from dreamshard_planner.workload.statistics import TableStatistics

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

logger = logging.getLogger(__name__)

PARTS = 4
"""That the second set is rated in."""
SURE = 4.541
"""Standard errors below the mean of so many parts that a gain lies above with 99 % probability (Student's t)."""


@dataclass(frozen=True)
class Judgement:
    """On one window."""

    step: int
    """Training steps done."""
    batches: int
    """Sampled in the window, by all that were gathered."""
    drifted: tuple[str, ...]
    """Features that changed since the plan was made, the most first; all are judged where it had no statistics."""
    found: Replan | None = None
    """By the first set; None where no feature drifted."""
    now_ms: float | None = None
    """Of the plan that runs, per step, by the second set."""
    new_ms: float | None = None
    """Of the other one."""
    gain_seconds: float = 0.0
    """Over the steps that remain, moving included: the mean over the parts of the second set."""
    sure_seconds: float = 0.0
    """What the gain exceeds with 99 % probability, as far as the parts tell."""
    pays: bool = False
    """Whether that is above nothing, and the gain per step worth it."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the plan."""
        plain = asdict(replace(self, found=None))
        return {**plain, "found": None if self.found is None else self.found.to_dict()}

    def __str__(self) -> str:
        if self.found is None:
            return f"step {self.step:,}: no feature drifted in {self.batches} sampled batches"
        drifted = f"{len(self.drifted)} feature(s) drifted ({first_of(self.drifted, 3)})" if self.drifted else ""
        verdict = "another plan pays" if self.pays else "the plan may stay"
        return (
            f"step {self.step:,}: {verdict}; {drifted or 'the plan was made without statistics'}; {self.new_ms:.3f} ms "
            f"per step instead of {self.now_ms:.3f}, {seconds_in_words(self.gain_seconds)} over the "
            f"{self.found.steps:,} steps that remain, moving included (99 % sure of "
            f"{seconds_in_words(self.sure_seconds)})"
        )


class DriftWatch:
    """Watches the batches of a job. Call it with the sparse features of every batch; it keeps a bounded sample, and at
    the end of each window the rank that planned judges it. There is no collective unless a group is given, and then
    one per window.

    Re-planning takes several times as long as planning, on the rank that planned. It happens only where features
    drifted, and after each time without a finding at half as many windows.

    Args:
        planner: of the plan that runs, which it made or loaded.
        steps: that the job still trains.
        every: steps of a window.
        sample_every: batches from one that is counted to the next.
        worth: share of a step's cost that a new plan has to save.
        restart_seconds, bytes_per_s: what moving takes, as of :meth:`DreamShardPlanner.replan`.
        told: called with every judgement whose plan pays, on the rank that planned.
        path: of a file to which every judgement is added as a line of JSON.
        group: whose batches count; by default those of the rank that planned alone.

    Attributes:
        judgements: of the windows so far.

    Raises:
        ValueError: a window in which too few batches are sampled.
    """

    def __init__(
        self,
        planner: DreamShardPlanner,
        steps: int,
        *,
        every: int = 10_000,
        sample_every: int = EVERY,
        worth: float = 0.05,
        restart_seconds: float = 60.0,
        bytes_per_s: float | None = None,
        told: Callable[[Judgement], None] | None = None,
        path: str | Path | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 2 * PARTS * sample_every:
            raise ValueError(
                f"a window of {every} steps, of which every {sample_every}th is sampled, has fewer than {2 * PARTS} "
                "batches: give a longer one as every=, or a smaller sample_every="
            )
        self._planner, self.steps, self.every, self.sample_every = planner, steps, every, sample_every
        self._worth, self._restart_seconds, self._bytes_per_s = worth, restart_seconds, bytes_per_s
        self._told, self._path, self._group = told, path, group
        self._pause, self._paused = 1, 0
        self.step, self.judgements = 0, list[Judgement]()
        try:
            planner.saved_plan()
            self._judges = True
        except DreamShardError:
            self._judges = False
        self._begin()

    def _begin(self) -> None:
        """A new window: the first sampler's batches are planned by, those of the others rate plans."""
        self._samplers = [BatchSampler(every=1) for _ in range(1 + PARTS)]

    def __call__(self, batch: KeyedJaggedTensor) -> None:
        """The sparse features of a batch that is trained on."""
        if self._judges or self._group is not None:
            turn, rest = divmod(self.step, self.sample_every)
            if rest == 0:
                # Every other batch is planned by; the rest goes to the parts in turns.
                self._samplers[0 if turn % 2 else 1 + turn // 2 % PARTS].add(batch)
        self.step += 1
        if self.step % self.every == 0:
            self._end()

    def _end(self) -> None:
        """Of a window."""
        if not (self._judges or self._group is not None):
            return
        sampled = [sampler.statistics() for sampler in self._samplers]
        self._begin()
        if self._group is not None:
            sampled = [one.all_gather(self._group) for one in sampled]
        if not self._judges:
            return
        judgement = self._judged(sampled[0], sampled[1:])
        self.judgements.append(judgement)
        logger.log(logging.WARNING if judgement.pays else logging.INFO, "%s", judgement)
        if self._path is not None:
            with Path(self._path).open("a") as file:
                file.write(json.dumps(judgement.to_dict()) + "\n")
        if judgement.pays and self._told is not None:
            self._told(judgement)

    @neutral()
    def _judged(self, first: TableStatistics, parts: list[TableStatistics]) -> Judgement:
        """By what was sampled."""
        every = TableStatistics.merge([first, *parts])
        batches = max((feature.batches for feature in every.values()), default=0)
        known = self._planner.statistics
        drifted = () if known is None else tuple(feature.name for feature in known.diff(every).drifted)
        judgement = Judgement(self.step, batches, drifted)
        self._paused += 1
        if (known is not None and not drifted) or self._paused < self._pause:
            return judgement
        found = self._planner.replan(
            self._planner.saved_plan(),
            steps=max(0, self.steps - self.step),
            statistics=first,
            restart_seconds=self._restart_seconds,
            bytes_per_s=self._bytes_per_s,
        )
        now_ms, new_ms = ([self._planner.predict(plan, statistics=part).total_ms for part in parts]
                          for plan in (self._planner.saved_plan(), found.plan))  # fmt: skip
        gains = [
            found.steps * (now - new) / 1e3 - found.chosen.moving_seconds
            for now, new in zip(now_ms, new_ms, strict=True)
        ]
        sure = fmean(gains) - SURE * stdev(gains) / math.sqrt(PARTS)
        pays = sure > 0 and fmean(new_ms) <= (1 - self._worth) * fmean(now_ms)
        self._paused, self._pause = 0, 1 if pays else 2 * self._pause
        return replace(
            judgement,
            found=found,
            now_ms=fmean(now_ms),
            new_ms=fmean(new_ms),
            gain_seconds=fmean(gains),
            sure_seconds=sure,
            pays=pays,
        )
