# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Says, while a job trains, when another plan would pay for the steps that remain, by how much, and how sure that is.

Batches of a window are sampled into two sets. By the first one the job is re-planned; by parts of the second one, which
the new plan has not seen, both plans are rated. A gain that is only noise of the first set is not there in the second.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner.errors import DreamShardError, FileError, StatisticsError
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.planning.replanning import check_movable
from dreamshard_planner.plans.replan import Moving, Replan
from dreamshard_planner.support.formatting import first_of, seconds_in_words
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.sampling import EVERY, BatchSampler
from dreamshard_planner.workload.statistics import TableStatistics

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
    """By the first set; None where no feature drifted, or the job is not re-planned for in this window."""
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
        drifted = f"{len(self.drifted)} feature(s) drifted ({first_of(self.drifted, 3)})" if self.drifted else ""
        if self.found is None:
            known = drifted or "no feature is known to have drifted"
            return f"step {self.step:,}: {known} in {self.batches} sampled batches; not re-planned in this window"
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
    one here, and one per window.

    It ends no training: a window that cannot be judged is passed over, and why is logged, as a warning the first time.
    What ``told`` raises is raised.

    Re-planning takes several times as long as planning, on the rank that planned. It happens only where features
    drifted, and after each time without a finding at half as many windows.

    Args:
        planner: of the plan that runs, which it made or loaded.
        steps: that the job still trains.
        every: steps of a window.
        sample_every: batches from one that is counted to the next.
        worth: share of a step's cost that a new plan has to save.
        restart_seconds: what a restart takes, as of :meth:`DreamShardPlanner.replan`.
        bytes_per_s: at which moved bytes come to a rank, likewise.
        told: called with every judgement whose plan pays, on the rank that planned.
        path: of a file to which every judgement is added as a line of JSON.
        group: whose batches count; by default those of the rank that planned alone. Each of its ranks makes a watch,
            and calls it as often.

    Attributes:
        judgements: of the windows so far.

    Raises:
        ValueError: a window in which too few batches are sampled, or a number that cannot be.
        DreamShardError: there is no plan yet, on this rank or on any of the group. Of other ranks than 0, which need
            no plan, only those of a group know.
        PlannerError: the plan is of embedding towers, which are not re-planned.
        FileError: ``path`` cannot be written.
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
        for name, value, least in (("steps", steps, 0), ("sample_every", sample_every, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a whole number from {least}, got {value!r}")
        Moving(bytes_per_s or 1.0, restart_seconds)  # raises where these cannot be
        self._planner, self.steps, self.every, self.sample_every = planner, steps, every, sample_every
        self._worth, self._restart_seconds, self._bytes_per_s = worth, restart_seconds, bytes_per_s
        self._told, self._path, self._ranks = told, path, Ranks()
        if group is not None and dist.get_rank(group) >= 0:
            self._ranks = Ranks(dist.get_rank(group), dist.get_world_size(group), group=group)
        self._pause, self._paused = 1, 0
        self.step, self.judgements = 0, list[Judgement]()
        self._warned: set[tuple[str, type[Exception]]] = set()
        with neutral():
            judges = self._ranks.gather(self._may_judge)
        if not any(judges) and (self._ranks.size > 1 or not dist.is_initialized() or dist.get_rank() == 0):
            planner.saved_plan()  # raises, and says why there is none
        self._judges, self._samples = judges[self._ranks.rank], any(judges)
        self._begin()

    def _may_judge(self) -> bool:
        """Whether this rank has the plan; raises where it could not judge it, or not write."""
        try:
            plan = self._planner.options
        except DreamShardError:
            return False
        check_movable(plan)
        self._write("")
        return True

    def _begin(self) -> None:
        """A new window: the first sampler's batches are planned by, those of the others rate plans."""
        self._samplers = [BatchSampler(every=1) for _ in range(1 + PARTS)]

    def __call__(self, batch: KeyedJaggedTensor) -> None:
        """The sparse features of a batch that is trained on; TypeError for anything else."""
        if not isinstance(batch, KeyedJaggedTensor):
            raise TypeError(f"a watch takes sparse features, a KeyedJaggedTensor, got {type(batch).__name__}")
        if self._samples:
            turn, rest = divmod(self.step, self.sample_every)
            if rest == 0:
                # Every other batch is planned by; the rest goes to the parts in turns.
                with self._going_on("a batch is not counted"):
                    self._samplers[0 if turn % 2 else 1 + turn // 2 % PARTS].add(batch)
        self.step += 1
        if self._samples and self.step % self.every == 0:
            self._end()

    @contextmanager
    def _going_on(self, left_out: str) -> Iterator[None]:
        """Errors that are meant for users end nothing, and are logged: the first of each kind as a warning."""
        try:
            yield
        except (DreamShardError, PlannerError) as error:
            kind = left_out, type(error)
            level = logging.INFO if kind in self._warned else logging.WARNING
            self._warned.add(kind)
            logger.log(level, "step %d: %s, and training goes on: %s", self.step, left_out, error)

    def _end(self) -> None:
        """Of a window: all ranks of the group come to its collective, whatever their batches were."""
        sampled = [TableStatistics({})] * len(self._samplers)
        with self._going_on("this rank's batches of the window are not counted"):
            sampled = [sampler.statistics() for sampler in self._samplers]
        self._begin()
        of_ranks = [sampled] * self._ranks.size
        if self._ranks.size > 1:
            with neutral():
                dist.all_gather_object(of_ranks, sampled, group=self._ranks.group)
        judgement = None
        if self._judges:
            with self._going_on("the window is not judged"):
                first, *parts = map(TableStatistics.merge, zip(*of_ranks, strict=True))
                judgement = self._judged(first, parts)
        if judgement is not None:
            self._tell(judgement)

    def _tell(self, judgement: Judgement) -> None:
        self.judgements.append(judgement)
        logger.log(logging.WARNING if judgement.pays else logging.INFO, "%s", judgement)
        with self._going_on("the judgement is not written"):
            self._write(json.dumps(judgement.to_dict()) + "\n")
        if judgement.pays and self._told is not None:
            self._told(judgement)

    def _write(self, text: str) -> None:
        """At the end of the file, where one is given."""
        if self._path is None:
            return
        try:
            with Path(self._path).open("a") as file:
                file.write(text)
        except OSError as error:
            raise FileError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    @neutral()
    def _judged(self, first: TableStatistics, parts: list[TableStatistics]) -> Judgement:
        """By what was sampled."""
        every = TableStatistics.merge([first, *parts])
        lacking = [name for name in every if not all(name in one for one in (first, *parts))]
        if lacking or not every:
            raise StatisticsError(
                f"too few sampled batches have samples of {f'feature {lacking[0]!r}' if lacking else 'any feature'}: "
                "give a longer window as every=, or a smaller sample_every="
            )
        every.unused(self._planner.lookups_per_sample())  # raises where the model has none of these features
        batches = max(feature.batches for feature in every.values())
        known = self._planner.statistics
        drifted = () if known is None else tuple(feature.name for feature in known.diff(every).drifted)
        judgement = Judgement(self.step, batches, drifted)
        self._paused += 1
        if (known is not None and not drifted) or self._paused < self._pause:
            return judgement
        # Batches may lack features, as of another module: these are taken to be read as before.
        first, *parts = (TableStatistics({**(known or {}), **one}) for one in (first, *parts))
        self._paused, self._pause = 0, 2 * self._pause
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
        self._pause = 1 if pays else self._pause
        return replace(
            judgement,
            found=found,
            now_ms=fmean(now_ms),
            new_ms=fmean(new_ms),
            gain_seconds=fmean(gains),
            sure_seconds=sure,
            pays=pays,
        )
