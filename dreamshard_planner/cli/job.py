# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The options that say what to plan, on which devices, and by which costs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreamshard_planner.cli.options import (
    COUNT,
    RATE,
    SECONDS,
    SEED,
    SIZE,
    CostSourceName,
    Device,
    EffortOption,
    listed,
    ranks_of,
)
from dreamshard_planner.devices import GPUS, Machine

if TYPE_CHECKING:
    from dreamshard_planner.offline.jobs import Job
    from dreamshard_planner.plans.plan_file import SavedPlan
    from dreamshard_planner.problem.sharding_groups import ShardingGroups
    from dreamshard_planner.search_space.placement_rules import PlacementRules
    from dreamshard_planner.workload.statistics import TableStatistics

TABLES = typer.Option(
    help="What to plan: a .json list of tables, a function that returns the model (module:function), or a "
    "shipped collection (mlperf_dlrm_dcnv2, merlin_small, meta_like_2021, ...).",
    metavar="SOURCE",
)
RANKS = COUNT("--gpus", "--ranks", help="Ranks of each node.")
BATCH_SIZE = COUNT(help="Samples in the batch of one rank.")
BESIDE_PLAN = ("statistics", "checkpoint", "cost_source", "seed", "effort", "search_seconds")
"""Options that may be given beside a plan, which says all else."""


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Of every command that plans; some know otherwise what to plan."""

    tables: Annotated[str | None, TABLES] = None
    gpus: Annotated[int | None, RANKS] = None
    batch_size: Annotated[int | None, BATCH_SIZE] = None
    nodes: Annotated[int, COUNT(help="Hosts.")] = 1
    gpu: Annotated[
        str | None, typer.Option(help=f"Model of GPU, for its memory and bandwidths: {', '.join(GPUS)}.")
    ] = None
    device: Annotated[Device, typer.Option(help="What trains.")] = Device.cuda
    hbm: Annotated[int | None, SIZE("--hbm", "--memory", help="Memory of one rank, as 80GB.")] = None
    hbm_bandwidth: Annotated[float | None, RATE(help="To that memory, as 2039GB/s.")] = None
    host_memory: Annotated[int | None, SIZE(help="A GPU's part of its host's memory.")] = None
    intra_bandwidth: Annotated[float | None, RATE(help="Of a rank to those of its host, one direction.")] = None
    inter_bandwidth: Annotated[float | None, RATE(help="Of a rank to other hosts, one direction.")] = None
    reserve: Annotated[
        float | None,
        typer.Option(min=0, max=0.99, help="Share of the memory kept for all else; default: TorchRec's estimate."),
    ] = None
    statistics: Annotated[Path | None, typer.Option(help="How features read their tables, of dreamshard stats.")] = None
    checkpoint: Annotated[str, typer.Option(help="auto: your own for this machine, else what ships.")] = "auto"
    cost_source: Annotated[CostSourceName, typer.Option(help="Whose costs.")] = CostSourceName.auto
    sharding_types: Annotated[
        str | None, typer.Option(help="TorchRec's names of the types to use, separated by commas; default: all.")
    ] = None
    together: Annotated[
        list[str] | None,
        typer.Option(help="Tables that must lie on one rank; may be given several times.", metavar="TABLE,TABLE,..."),
    ] = None
    apart: Annotated[
        list[str] | None,
        typer.Option(
            help="Tables of which no rank may hold two shards; may be given several times.", metavar="TABLE,TABLE,..."
        ),
    ] = None
    on_ranks: Annotated[
        list[str] | None,
        typer.Option(
            help="The ranks that may hold a table, as user_id=0,2,4-7; may be given several times.",
            metavar="TABLE=RANKS",
        ),
    ] = None
    sharding_group: Annotated[int | None, COUNT(help="Ranks of a sharding group (2D parallelism).")] = None
    sync_interval: Annotated[int, COUNT(help="Batches between two averagings of its replicas.")] = 1
    exact_training: Annotated[bool, typer.Option(help="Leave out sharding types that change what is trained.")] = True
    seed: Annotated[int, SEED(help="Of the search.")] = 0
    effort: EffortOption = None
    search_seconds: Annotated[
        float | None, SECONDS(min=0.01, help="Cap on the search; reading and rating the tables comes on top.")
    ] = None

    def machine(self, ranks_per_host: int) -> Machine:
        """What is to train."""
        if self.device is Device.cpu and self.host_memory is not None:
            raise typer.BadParameter("--host-memory is of GPUs' hosts: give CPU ranks' memory as --memory")
        return Machine(
            ranks_per_host=ranks_per_host,
            hosts=self.nodes,
            device=self.device.value,
            gpu=None if self.gpu is None else self.gpu.lower(),
            memory_bytes=self.hbm,
            memory_bytes_per_s=self.hbm_bandwidth,
            host_memory_bytes=self.host_memory,
            intra_bytes_per_s=self.intra_bandwidth,
            inter_bytes_per_s=self.inter_bandwidth,
        )

    def job(self) -> Job:
        """Read; mistakes in it are found before anything is planned."""
        if self.tables is None or self.gpus is None or self.batch_size is None:
            missing = [flag(name) for name in ("tables", "gpus", "batch_size") if getattr(self, name) is None]
            raise typer.BadParameter(f"give a plan, or what to plan: {', '.join(missing)} missing")
        machine, rules = self.machine(self.gpus), self.placement_rules()
        from dreamshard_planner.offline.jobs import Job, read_model

        model = read_model(self.tables)
        if (statistics := self.statistics_read()) is not None:
            model = model.with_statistics(statistics)
        settings = {
            "checkpoint": self.checkpoint,
            "cost_source": self.cost_source.value,
            "sharding_types": None if self.sharding_types is None else self.sharding_types_named(),
            "exact_training": self.exact_training,
            "optimizers_attached": True,  # the plan is for this package's DistributedModelParallel
            "placement_rules": rules,
            "sharding_groups": self.sharding_groups(),
            "seed": self.seed,
            "search_seconds": self.search_seconds,
            **({} if self.effort is None else {"effort": self.effort.value}),
        }
        return _doubted(
            Job(model=model, machine=machine, batch_size=self.batch_size, reserve=self.reserve, settings=settings)
        )

    def sharding_groups(self) -> ShardingGroups | None:
        """Of 2D parallelism; None where all ranks are one."""
        if self.sharding_group is None:
            if self.sync_interval != 1:
                raise typer.BadParameter("--sync-interval is of sharding groups: give --sharding-group as well")
            return None
        from dreamshard_planner.problem.sharding_groups import ShardingGroups

        return ShardingGroups(size=self.sharding_group, sync_interval=self.sync_interval)

    def given(self) -> set[str]:
        """Names of options that are not at their default."""
        return {entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default}

    def given_beside(self, plan: str | Path) -> dict[str, Any]:
        """What options add to a plan that says what to plan, by name."""
        given = self.given() - {"plan"}
        if twice := sorted(given.difference(BESIDE_PLAN)):
            raise typer.BadParameter(f"{plan} says what to plan: leave out {', '.join(map(flag, twice))}")
        return {name: getattr(self, name) for name in given - {"statistics"}}

    def job_of(self, saved: SavedPlan, statistics: TableStatistics | None) -> Job:
        """The job that a plan was made for, with checkpoint, costs and search as options say."""
        from dreamshard_planner.offline.from_plan import job_of

        own = self.given_beside(saved.name)
        job = job_of(saved, statistics)
        return _doubted(replace(job, settings={**job.settings, **own}))

    def statistics_read(self) -> TableStatistics | None:
        """Those of the file that was given."""
        if self.statistics is None:
            return None
        from dreamshard_planner.workload.statistics import TableStatistics

        return TableStatistics.from_json(self.statistics)

    def placement_rules(self) -> PlacementRules | None:
        """Where tables must lie; None where that is free."""
        if not (self.together or self.apart or self.on_ranks):
            return None
        from dreamshard_planner.search_space.placement_rules import PlacementRules

        on_ranks: dict[str, list[int]] = {}
        for text in self.on_ranks or ():
            name, equals, ranks = text.rpartition("=")
            if not equals or not name.strip():
                raise typer.BadParameter(f"--on-ranks {text!r}: give a table and its ranks, as user_id=0,2,4-7")
            if on_ranks.setdefault(name.strip(), found := ranks_of(ranks)) is not found:
                raise typer.BadParameter(f"--on-ranks names table {name.strip()!r} twice")
        groups = {
            name: [listed(text) for text in given or ()]
            for name, given in (("together", self.together), ("apart", self.apart))
        }
        try:
            return PlacementRules(**groups, on_ranks=on_ranks)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def sharding_types_named(self) -> tuple[str, ...]:
        """Those asked for."""
        from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

        types = listed(self.sharding_types or "")
        unknown = [kind for kind in types if kind not in SHARDING_TYPES]
        if unknown or not types:
            raise typer.BadParameter(
                f"--sharding-types: {unknown[0] if unknown else self.sharding_types!r} is none of "
                f"{', '.join(SHARDING_TYPES)}"
            )
        return types


@dataclass(frozen=True, kw_only=True)
class JobOptions(PlanningOptions):
    """Of commands that are told what to plan."""

    tables: Annotated[str, TABLES] = field()
    gpus: Annotated[int, RANKS] = field()
    batch_size: Annotated[int, BATCH_SIZE] = field()


@dataclass(frozen=True, kw_only=True)
class PlanOrJobOptions(PlanningOptions):
    """Of commands that also take what to plan from a plan."""

    plan: Annotated[
        Path | None, typer.Argument(help="A plan, .json, that says what to plan; or give --tables and the others.")
    ] = None

    def job(self) -> Job:
        """The plan's, with statistics, checkpoint, costs and search as options say."""
        if self.plan is None:
            return super().job()
        self.given_beside(self.plan)
        return self.job_of(load_plan(self.plan), self.statistics_read())


def load_plan(path: Path) -> SavedPlan:
    """Of a file."""
    from dreamshard_planner.plans.plan_file import SavedPlan

    return SavedPlan.load(path)


def tell_other_statistics(saved: SavedPlan, known: TableStatistics | None, given: Path | None) -> None:
    """On stderr, where others were given than a plan was made with; PlanError where the plan's are not known."""
    from dreamshard_planner.offline.from_plan import check_statistics

    if told := check_statistics(saved, known, given is not None):
        typer.echo(f"note: {told}", err=True)


def _doubted(job: Job) -> Job:
    """Tells on stderr what of a job is hardly meant."""
    for text in job.doubtful:
        typer.echo(f"note: {text}", err=True)
    return job


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
