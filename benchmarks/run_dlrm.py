# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train one DLRM under several planners at once and compare their steps.

    torchrun --nproc_per_node=2 benchmarks/run_dlrm.py --planners dreamshard,torchrec,lookup_greedy --json result.json
    torchrun benchmarks/run_dlrm.py                       # one process, nothing to choose
    torchrun --nproc_per_node=8 benchmarks/run_dlrm.py --max-rows 4000000 --train-seconds 300 --json result.json

NCCL where each rank has a GPU, else gloo on CPU, each rank on cores of its own and with one thread. Every planner gets
models of its own with the same weights, and all models train on the same batches, a few steps of one after a few steps
of another in an order that is shuffled anew each round: whatever else the machine does hits all alike. Several models
per planner, since where a model happens to lie in memory changes its steps by some percent, and that is no planner's
merit. Planners:

    dreamshard         this package, with statistics of the batches
    roofline           the same with costs from bandwidths alone, as where nobody measured the hardware
    dreamshard_refined, roofline_refined   the same after --refine-seconds of measuring, on all ranks
    torchrec           TorchRec's planner, given the true pooling factors
    torchrec_default   TorchRec's planner without statistics (pooling factor 1), as most users run it
    lookup_greedy      a greedy rule for whole tables; any other of this package works too
    skewed_0, ...      arbitrary placements of whole tables from balanced to badly skewed, as many as --skewed says:
                       what step_formula.py needs

Planners may use the sharding types that --sharding-types names, whole tables by default, in fused kernels; on CPUs,
row-wise, table-row-wise and grid sharding through a sharder of this benchmark's own, since TorchRec's offers them on
GPUs only. Data-parallel tables lose their in-backward optimizer, in TorchRec, and so train otherwise.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import logging
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import Partitioner, ShardingOption
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm import SIZES, EveryTypeSharder, fill_tables, make_batches, make_model, scale_tables
from dlrm_memory import memory_of_models
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, TableStatistics
from dreamshard_planner.checkpoint import resolve
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.files import check_writable
from dreamshard_planner.measure.collect import REFERENCE_SETS
from dreamshard_planner.measure.hardware import available_bytes
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.ranks import local_ranks
from dreamshard_planner.measure.timing import Samples, pinned, processor_time, rank_cores, time_groups
from dreamshard_planner.placement.rules import RULES
from dreamshard_planner.plugin import RulePartitioner
from dreamshard_planner.plugin.legal import DP, SHARDING_TYPES
from dreamshard_planner.report import Report, ReportEntry
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import Table
from kernel_clock import KernelClock
from provenance import provenance
from step_profile import profile_steps

BATCHES_KEPT = 16
"""Distinct batches; training goes round them, so that drawing data costs no time."""
WARMUP_STEPS = 3
MAX_SPLITS_SHOWN = 3
SKEWED = "skewed_"
OURS = {
    "dreamshard": {},
    "roofline": {"cost_source": "roofline"},
}
"""Arguments of our planner, by name."""
REFINED = "_refined"
OPTIMIZERS = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to run; each field is an option of the command."""

    tables: str = _option("mlperf_dlrm_dcnv2", "table collection")
    count: int = _option(0, "so many tables of the collection, drawn by the seed; 0: all")
    max_rows: int = _option(100_000, "scale larger tables down to this many rows")
    dim: int = _option(0, "embedding dim of all tables; 0: the collection's, which must be the same for all")
    planners: str = _option("dreamshard,torchrec,lookup_greedy", "planners, separated by commas")
    skewed: int = _option(0, "placements more, from balanced to badly skewed")
    refine_seconds: float = _option(60.0, "of measuring, for the planners that refine")
    copies: int = _option(3, "models per planner")
    steps: int = _option(0, "timed steps of each planner, over all its models; 0: 120 on CPU, 1200 on GPUs")
    block: int = _option(0, "steps of one model before it is another's turn; 0: 2 on CPU, 20 on GPUs")
    train_seconds: float = _option(0.0, "end after the round that is under way then; 0: no limit")
    batch_size: int = _option(0, "samples per rank and step; 0: 512 on CPU, 8192 on a GPU")
    hot: float = _option(1.0, "multiply the lookups of the table that is read most")
    sharding_types: str = _option("table_wise", "what planners may use, separated by commas")
    min_partition: int = _option(0, "narrowest column slice; 0: TorchRec's default")
    optimizer: str = _option("rowwise_adagrad", f"of the tables, in the backward: {', '.join(OPTIMIZERS)}")
    size: str = _option("", f"dense layers: {', '.join(SIZES)}; small on CPU and mlperf on GPUs by default")
    checkpoint: str = _option("auto", "of dreamshard")
    processor_time: bool = _option(False, "CPU kernels by what their thread computes: others use this machine as well")
    seed: int = _option(0, "of weights, data, search and order")
    profile: int = _option(0, "steps more of a model of each planner under torch's profiler: where their time goes")
    json: str = _option("", "write everything to this file")
    report: str = _option("", "write the report of dreamshard's plan with figures to this file, .html")

    def __post_init__(self) -> None:
        if min(self.max_rows, self.copies) < 1:
            raise ValueError(f"rows and copies must be at least 1: {self}")
        counts = ("dim", "batch_size", "skewed", "steps", "block", "train_seconds", "count", "profile")
        if min(getattr(self, name) for name in counts) < 0:
            raise ValueError(f"{', '.join(counts)} must be at least 0: {self}")
        if not self.refine_seconds > 0:
            raise ValueError(f"refine_seconds must be above 0, got {self.refine_seconds}")
        if not self.hot > 0 or self.min_partition < 0:
            raise ValueError(f"hot must be above 0 and min_partition at least 0, got {self.hot}, {self.min_partition}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        unknown = [kind for kind in self.kinds if kind not in SHARDING_TYPES]
        if unknown or not self.kinds:
            raise ValueError(f"sharding types must be some of {', '.join(SHARDING_TYPES)}; got {self.sharding_types!r}")
        if self.size not in ("", *SIZES):
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        known = (*OURS, *(name + REFINED for name in OURS), "torchrec", "torchrec_default", *RULES)
        chosen = self.names[: len(self.names) - self.skewed]
        if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(known):
            raise ValueError(f"planners must be some of {', '.join(known)}, each once; got {self.planners!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The planners, skewed ones last."""
        chosen = [name.strip() for name in self.planners.split(",") if name.strip()]
        return (*chosen, *(f"{SKEWED}{index}" for index in range(self.skewed)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Sharding types that planners may use."""
        return tuple(kind.strip() for kind in self.sharding_types.split(",") if kind.strip())

    def on(self, kind: str) -> Config:
        """With what is left to the device: ``cpu`` or ``cuda``. Each change of models drains a GPU's queue: blocks are
        longer there."""
        batch_size, size, steps, block = (512, "small", 120, 2) if kind == "cpu" else (8192, "mlperf", 1200, 20)
        return replace(
            self,
            batch_size=self.batch_size or batch_size,
            size=self.size or size,
            steps=self.steps or steps,
            block=self.block or block,
        )

    @property
    def rounds(self) -> int:
        """Blocks of each model."""
        return -(-self.steps // (self.block * self.copies))


@dataclass(frozen=True)
class Node:
    """This process among the others."""

    device: torch.device
    rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def join(cls) -> Node:
        """From torchrun's environment; starts the process group."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, world_size, local, local_world_size = (int(os.environ[name]) for name in names)
        cuda = torch.cuda.device_count() >= local_world_size
        if cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if cuda else "gloo")
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        return cls(device, rank, world_size, local_world_size)

    def topology(self) -> Topology:
        """The devices as TorchRec's planners see them."""
        if self.device.type == "cuda":
            memory = {"hbm_cap": torch.cuda.get_device_properties(self.device).total_memory}
        else:
            host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            memory = {"ddr_cap": host_bytes // self.local_world_size}
        return Topology(self.world_size, self.device.type, local_world_size=self.local_world_size, **memory)

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, thing: Any) -> list[Any]:
        """One thing of every rank, on all ranks."""
        things: list[Any] = [None] * self.world_size
        dist.all_gather_object(things, thing)
        return things


class Trainee:
    """One planner's model in TorchRec's train pipeline."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], node: Node, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._node = node
        self.clock = KernelClock(model, node.device, now)
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        dense_optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.01))
        optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
        self._pipeline = TrainPipelineSparseDist(model, optimizer, node.device)
        self._batches: Iterator[Batch] = itertools.cycle(batches)
        self.losses: list[Tensor] = []
        self.blocks: list[tuple[float, float, float]] = []

    def train(self, steps: int, timed: bool = True) -> None:
        """Train some steps; if timed, keep the milliseconds per step: all, and the kernels' forward and backward."""
        self._node.synchronize()
        dist.barrier()
        self.clock.on = timed
        start = time.perf_counter()
        for _ in range(steps):
            self.losses.append(self._pipeline.progress(self._batches)[0])
        self._node.synchronize()
        step_ms = 1e3 * (time.perf_counter() - start) / steps
        if timed:
            self.blocks.append((step_ms, *self.clock.per_step_ms(steps)))


class SkewedPartitioner(Partitioner):
    """A placement that nobody would choose: tables in an arbitrary order, by rows or by lookups or by neither; the
    first of them on the first rank, the others spread over all ranks.

    The share of the first rank and the order's preference come from the seed: some placements are nearly balanced,
    others nearly all on one rank, some heavy there in forward and others in backward.
    """

    def __init__(self, tables: Sequence[Table], seed: int) -> None:
        generator = np.random.default_rng(seed)
        lookups = [sum(feature.pooling_factor for feature in table.features) for table in tables]
        traits = np.log1p([[table.rows for table in tables], lookups])
        traits = (traits - traits.mean(1, keepdims=True)) / (traits.std(1, keepdims=True) + 1e-9)
        preference = generator.normal(size=2) @ traits + generator.normal(size=len(tables))
        self._order = [tables[index].name for index in np.argsort(preference)]
        self._head = round(len(tables) * generator.uniform(0.0, 0.9))

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank``, whatever the memory."""
        place = {name: index for index, name in enumerate(self._order)}
        for option in proposal:
            option.shards[0].rank = max(place[option.name] - self._head, 0) % storage_constraint.world_size
        return proposal


def ratio_interval(block_ms_CN: np.ndarray, base_ms_KN: np.ndarray, draws: int = 1000) -> tuple[float, float, float]:
    """Ratio of a planner's blocks to the base's between the bounds of its 95 % bootstrap interval.

    The median over the N rounds, in which both were hit by the same spells of the machine, then the geometric mean over
    pairs of one of the planner's C models and one of the base's K; the bootstrap resamples models and rounds.
    """
    logs_CKN = np.log(block_ms_CN)[:, None] - np.log(base_ms_KN)
    copies, base_copies, rounds = logs_CKN.shape
    generator = np.random.default_rng(0)

    def resampled() -> float:
        c, k, n = (generator.integers(size, size=size) for size in (copies, base_copies, rounds))
        return float(np.exp(np.median(logs_CKN[np.ix_(c, k, n)], axis=-1).mean()))

    low, high = np.percentile([resampled() for _ in range(draws)], (2.5, 97.5))
    return float(low), float(np.exp(np.median(logs_CKN, axis=-1).mean())), float(high)


@dataclass(frozen=True)
class PlannerResult:
    """One planner's plan, and what it was like to train on it. Medians and quartiles are over blocks of steps."""

    name: str
    plan_seconds: float
    ranks: dict[str, list[int]]
    """Of each table's shards."""
    split: dict[str, str]
    """Sharding type of each table that is not whole."""
    predicted: ReportEntry
    """By DreamShard's cost model, whoever made the plan."""
    measured: ReportEntry | None
    """Of a refined plan, by what its planner measured."""
    step_ms: tuple[float, float, float]
    """Lower quartile, median, upper quartile; a block takes as long as on its slowest rank."""
    ratio: tuple[float, float, float]
    """Of the step time to the base's, between the bounds of its 95 % interval: :func:`ratio_interval`."""
    forward_ms: tuple[float, ...]
    """Fused kernels of each rank."""
    backward_ms: tuple[float, ...]
    kernel_ratio: tuple[float, float, float]
    """Of the slower rank's kernels to the base's, as :attr:`ratio`."""
    samples_per_second: float
    kernel_ms: tuple[tuple[tuple[float, ...], ...], ...]
    """Forward + backward of the blocks, by rank and model, per step."""
    block_ms: tuple[tuple[float, ...], ...]
    """By model, per step."""
    losses: tuple[float, ...]
    profile: tuple[dict[str, float], ...] = ()
    """Of each rank, milliseconds per step by kind of work, of some steps under torch's profiler."""

    @classmethod
    def of(
        cls,
        name: str,
        times_ms: np.ndarray,
        base_ms: np.ndarray,
        losses: np.ndarray,
        config: Config,
        node: Node,
        plan: dict,
    ) -> PlannerResult:
        """From milliseconds per step [ranks, models, rounds, (step, forward, backward)] of the planner and of the
        base."""
        block_ms, base_block_ms = times_ms[..., 0].max(0), base_ms[..., 0].max(0)
        median_ms = np.median(times_ms, axis=(1, 2))
        kernel_ms, base_kernel_ms = (times[..., 1:].sum(-1) for times in (times_ms, base_ms))
        step_ms = np.percentile(block_ms, (25, 50, 75)).tolist()
        return cls(
            name=name,
            step_ms=tuple(step_ms),
            ratio=ratio_interval(block_ms, base_block_ms),
            forward_ms=tuple(median_ms[:, 1].tolist()),
            backward_ms=tuple(median_ms[:, 2].tolist()),
            kernel_ratio=ratio_interval(kernel_ms.max(0), base_kernel_ms.max(0)),
            kernel_ms=tuple(tuple(map(tuple, of_rank)) for of_rank in kernel_ms.tolist()),
            samples_per_second=config.batch_size * node.world_size / step_ms[1] * 1e3,
            block_ms=tuple(map(tuple, block_ms.tolist())),
            losses=tuple(losses.tolist()),
            **plan,
        )


@dataclass(frozen=True)
class Result:
    """Everything about one run."""

    provenance: dict[str, Any]
    config: Config
    scaling: str
    base: str
    """The planner that ratios refer to."""
    cost_source: str
    loss_difference: float
    """Largest between two models, any step and rank."""
    reference_ms: float
    """Of the reference set, between the steps: median over rounds, mean over ranks."""
    checkpoint_reference_ms: float | None
    """What it took when the checkpoint's kernels were measured; None where they were not."""
    world_size: int
    planners: tuple[PlannerResult, ...]
    report: Report
    """On dreamshard's plan, with what its kernels took in the steps."""

    @property
    def speed(self) -> float | None:
        """How many times as long as then kernels take now, by the reference set; None where nobody knows."""
        usual_ms = self.checkpoint_reference_ms
        return self.reference_ms / usual_ms if usual_ms else None


def with_steps(report: Report, results: Sequence[PlannerResult], base: str) -> Report:
    """A report of dreamshard's plan with what was measured in training, if it trained."""
    mine = next((entry for entry in results if entry.name == "dreamshard"), None)
    steps = tuple(
        f"measured in training: a step takes {entry.step_ms[1]:.1f} ms under the plan of {entry.name}"
        + (f", {entry.ratio[1]:.3f} of {base}'s" if entry.name != base else "")
        for entry in results
    )
    if mine is None:
        return replace(report, notes=(*report.notes, *steps))
    rank_ms = tuple(map(sum, zip(mine.forward_ms, mine.backward_ms, strict=True)))
    measured = replace(
        report.chosen,
        total_ms=max(rank_ms) + report.chosen.collectives_ms,
        rank_ms=rank_ms,
        forward_ms=mine.forward_ms,
        backward_ms=mine.backward_ms,
    )
    return replace(report, measured=measured, notes=(*report.notes, *steps))


def make_planners(
    tables: Sequence[Table], batches: Sequence[Batch], config: Config, node: Node
) -> dict[str, tuple[EmbeddingShardingPlanner, list[ShardingOption]]]:
    """By name: the planner, and a list that holds its plan's options once it has planned.

    ``dreamshard`` is always there, and first; the others are TorchRec's planner with other parts or less knowledge.
    """

    def constraints(kinds: Sequence[str], informed: bool) -> dict[str, ParameterConstraints]:
        return {
            table.name: ParameterConstraints(
                list(kinds),
                ["fused", "dense"] if DP in kinds else ["fused"],
                min_partition=config.min_partition or None,
                **({"pooling_factors": [f.pooling_factor for f in table.features]} if informed else {}),
            )
            for table in tables
        }

    whole = constraints(["table_wise"], informed=True)
    statistics = TableStatistics.from_batches(batch.sparse_features for batch in batches)
    planners = {}
    for name in dict.fromkeys(("dreamshard", *config.names)):
        options: list[ShardingOption] = []
        common = {
            "topology": node.topology(),
            "batch_size": config.batch_size,
            "constraints": constraints(config.kinds, informed=name != "torchrec_default"),
            "callbacks": [lambda plan, options=options: options.extend(plan) or plan],
        }
        if name.removesuffix(REFINED) in OURS:
            ours = OURS[name.removesuffix(REFINED)] | {"statistics": statistics, "seed": config.seed}
            ours["checkpoint"] = config.checkpoint
            if name.endswith(REFINED):
                ours |= {"refine": "measure", "refine_seconds": config.refine_seconds}
            planner = DreamShardPlanner(**common, **ours)
        elif name.startswith("torchrec"):
            planner = EmbeddingShardingPlanner(**common)
        elif name.startswith(SKEWED):
            partitioner = SkewedPartitioner(tables, int(name.removeprefix(SKEWED)))
            planner = EmbeddingShardingPlanner(**common | {"constraints": whole}, partitioner=partitioner)
        else:
            rule = RulePartitioner(name, whole)
            planner = EmbeddingShardingPlanner(**common | {"constraints": whole}, partitioner=rule)
        planners[name] = planner, options
    return planners


def run(config: Config, node: Node) -> Result | None:
    """Plan, train and measure; the result is for rank 0, the others get None."""
    pool = named_pool(config.tables)
    if config.count:
        pool = random.Random(config.seed).sample(pool, min(config.count, len(pool)))
    tables, scaling = scale_tables(pool, config.max_rows, config.dim, config.hot)
    count = min(config.steps, BATCHES_KEPT)
    batches = make_batches(tables, count, config.batch_size, node.rank, node.world_size, config.seed)
    if node.device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]  # else each copy waits for the device
    bare_model = make_model(tables, config.size, config.seed, node.device)
    sharders = [EveryTypeSharder() if needs_every_type(config, node) else EmbeddingBagCollectionSharder()]
    planners = make_planners(tables, batches, config, node)
    judge = planners["dreamshard"][0]

    def fresh_model() -> nn.Module:
        model = copy.deepcopy(bare_model)
        tables_of = model.model.sparse_arch.parameters()
        apply_optimizer_in_backward(OPTIMIZERS[config.optimizer], tables_of, {"lr": 0.01})
        return model

    sharding_plans: dict[str, ShardingPlan] = {}
    plans: dict[str, dict[str, Any]] = {}
    for name, (planner, options) in planners.items():
        start = time.perf_counter()
        with processor_time() if config.processor_time else nullcontext():
            sharding_plans[name] = planner.collective_plan(fresh_model(), sharders, dist.group.WORLD)
        plan_seconds = time.perf_counter() - start
        if node.rank == 0:
            predicted = judge.predict(options, name)
            ranks = {option.name: [shard.rank for shard in option.shards] for option in options}
            split = {option.name: option.sharding_type for option in options if option.sharding_type != "table_wise"}
            plans[name] = {"plan_seconds": plan_seconds, "ranks": ranks, "split": split, "predicted": predicted}
            plans[name]["measured"] = planner.report().measured if name.endswith(REFINED) else None

    known = {name: options for name, (_, options) in planners.items() if name in config.names}
    memory = memory_of_models(known, config.copies, bare_model, node.world_size)
    free_bytes = node.gather(
        available_bytes(node.device) // (1 if node.device.type == "cuda" else node.local_world_size)
    )
    told, fits = node.gather(memory.told(free_bytes))[0]  # plans' options are on the first rank
    if node.rank == 0:
        print(told, file=sys.stderr)
    if not fits:
        raise SystemExit(1)

    order = random.Random(config.seed)
    now = time.thread_time if config.processor_time and node.device.type == "cpu" else time.perf_counter
    arena = Arena(node.device, 2 << 30, seed=config.seed)
    reference = FusedKernel(REFERENCE_SETS[node.device.type], node.device, config.seed, arena)
    reference_ms: list[float] = []
    trainees: dict[tuple[str, int], Trainee] = {}
    models = list(itertools.product(config.names, range(config.copies)))
    for name, index in order.sample(models, len(models)):
        plan = sharding_plans[name]
        model = DistributedModelParallel(fresh_model(), plan=plan, sharders=sharders, device=node.device)
        fill_tables(model, tables, config.seed)
        trainees[name, index] = Trainee(model, batches, node, now)
    for trainee in trainees.values():
        trainee.train(WARMUP_STEPS, timed=False)
    deadline = time.monotonic() + (config.train_seconds or math.inf)
    for count in range(config.rounds):
        if count and any(node.gather(time.monotonic() > deadline)):
            break
        reference_ms.append(float(time_reference(reference, config).median_ms.sum()))
        for name in order.sample(models, len(models)):
            trainees[name].train(config.block)
    profiles = {}
    for name in config.names if config.profile else ():
        profiles[name] = profile_steps(partial(trainees[name, 0].train, timed=False), config.profile)
    blocks = {name: [trainees[name, index].blocks for index in range(config.copies)] for name in config.names}
    losses = {
        name: [torch.stack(trainees[name, index].losses).tolist() for index in range(config.copies)]
        for name in config.names
    }
    ranks = node.gather((blocks, losses, profiles, float(np.median(reference_ms))))
    if node.rank:
        return None
    base = "torchrec" if "torchrec" in config.names else config.names[0]
    times = {name: np.array([blocks[name] for blocks, *_ in ranks]) for name in config.names}
    losses = {
        name: np.array([losses[name] for _, losses, *_ in ranks]) for name in config.names
    }  # [ranks, models, steps]
    for name in profiles:
        plans[name]["profile"] = tuple(of_rank[name] for _, _, of_rank, _ in ranks)
    results = [
        PlannerResult.of(name, times[name], times[base], losses[name].mean((0, 1)), config, node, plans[name])
        for name in config.names
    ]
    return Result(
        provenance=provenance(node.device),
        config=config,
        scaling=f"{config.tables}: {scaling}",
        base=base,
        cost_source=judge.report().cost_source,
        report=with_steps(judge.report(), results, base),
        reference_ms=float(np.mean([reference for *_, reference in ranks])),
        checkpoint_reference_ms=resolve(config.checkpoint, node.device.type).metadata.get("reference_ms"),
        loss_difference=float(np.ptp(np.concatenate(list(losses.values()), axis=1), axis=1).max()),
        world_size=node.world_size,
        planners=tuple(results),
    )


def needs_every_type(config: Config, node: Node) -> bool:
    """Whether planners may use a type that TorchRec's own sharder does not offer on this device."""
    return not set(config.kinds) <= set(EmbeddingBagCollectionSharder().sharding_types(node.device.type))


def time_reference(kernel: FusedKernel, config: Config) -> Samples:
    """The set that every collection times beside its sets: how fast the machine is just now."""
    with processor_time() if config.processor_time else nullcontext():
        return time_groups([kernel], repeats=3)[0]


def print_table(result: Result, console: Console) -> None:
    """The result for people."""
    config = result.config
    ranks = "1 rank" if result.world_size == 1 else f"{result.world_size} ranks"
    table = RichTable(title=f"DLRM on {ranks} x {config.batch_size} samples, {result.provenance['hardware']['name']}")
    headings = ("planner", "step ms", "IQR", f"x {result.base}", "95 %", "embedding ms per rank", "samples/s")
    for heading in (*headings, "predicted ms", "per rank"):
        table.add_column(heading, justify="left" if heading == "planner" else "right")
    for entry in result.planners:
        embedding = [f + b for f, b in zip(entry.forward_ms, entry.backward_ms, strict=True)]
        table.add_row(
            entry.name,
            f"{entry.step_ms[1]:.1f}",
            f"{entry.step_ms[0]:.1f}-{entry.step_ms[2]:.1f}",
            f"{entry.ratio[1]:.3f}",
            f"{entry.ratio[0]:.3f}-{entry.ratio[2]:.3f}",
            _per_rank(embedding),
            f"{entry.samples_per_second:,.0f}",
            f"{entry.predicted.total_ms:.2f}",
            _per_rank(entry.predicted.rank_ms),
        )
    console.print(result.scaling)
    console.print(table)
    blocks = len(result.planners[0].block_ms[0])
    console.print(
        f"{config.copies} model(s) per planner, {blocks} blocks of {config.block} steps each, interleaved: medians and "
        f"quartiles of blocks; x {result.base}: ratio of blocks of one round, and its 95 % interval over models and "
        f"rounds. Embedding: fused kernels, forward + backward, measured in the steps. Predicted: embedding work and "
        f"its collectives; cost source: {result.cost_source}. Sharding types allowed: {', '.join(config.kinds)}, in "
        f"fused kernels; torchrec_default alone has no pooling factors."
    )
    print_profiles(result, console)
    for entry in result.planners:
        if entry.split:
            shown = list(entry.split.items())[:MAX_SPLITS_SHOWN]
            split = ", ".join(f"{name} {kind} over ranks {entry.ranks[name]}" for name, kind in shown)
            more = ", ..." if len(entry.split) > len(shown) else ""
            console.print(f"{entry.name} splits {len(entry.split)} table(s): {split}{more}")
    base = next(entry for entry in result.planners if entry.name == result.base)
    slowest = max(f + b for f, b in zip(base.forward_ms, base.backward_ms, strict=True))
    console.print(f"Embedding kernels are {slowest / base.step_ms[1]:.0%} of {result.base}'s step on its slower rank.")
    if result.speed is not None:
        hour = ", ".join(
            f"{entry.name} {_per_rank([ms * result.speed for ms in entry.predicted.rank_ms])}"
            for entry in result.planners
            if entry.predicted.rank_ms
        )
        console.print(
            f"Speed of the hour: the reference set takes {result.reference_ms:.2f} ms, {result.speed:.2f} times what "
            f"it took when the checkpoint's kernels were measured. Predicted per rank at that speed: {hour}."
        )
    console.print(f"Same training: losses of the models differ by at most {result.loss_difference:.1e}.")


def print_profiles(result: Result, console: Console) -> None:
    """Where the time of a step goes, beside what was predicted of it."""
    profiled = [entry for entry in result.planners if entry.profile]
    if not profiled:
        return
    kinds = dict.fromkeys(kind for entry in profiled for of_rank in entry.profile for kind in of_rank)
    table = RichTable(
        title=f"Milliseconds of a step by kind of work, each rank; {result.config.profile} steps profiled"
    )
    for heading in ("kind of work", *(entry.name for entry in profiled)):
        table.add_column(heading, justify="left" if heading == "kind of work" else "right")
    for kind in kinds:
        table.add_row(kind, *(_per_rank([of_rank.get(kind, 0.0) for of_rank in entry.profile]) for entry in profiled))
    table.add_section()
    table.add_row("predicted: embedding", *(_per_rank(entry.predicted.rank_ms) for entry in profiled))
    table.add_row("predicted: collectives", *(f"{entry.predicted.collectives_ms:.1f}" for entry in profiled))
    console.print(table)


def _per_rank(values_ms: Sequence[float], shown: int = 4) -> str:
    text = " ".join(f"{value:.1f}" for value in values_ms[:shown])
    return text if len(values_ms) <= shown else f"{text} ... max {max(values_ms):.1f}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in fields(Config):
        flag = f"--{option.name.replace('_', '-')}"
        text = f"{option.metadata['help']} (default: {option.default!r})"
        kind = {"action": "store_true"} if option.default is False else {"type": type(option.default)}
        parser.add_argument(flag, **kind, default=option.default, help=text)
    try:
        config = Config(**vars(parser.parse_args()))
        if config.report:
            check_writable(config.report)
        local_rank, local_world_size = local_ranks()
    except (ValueError, DreamShardError) as error:
        parser.error(str(error))
    for library in ("torch", "torchrec"):  # neither says anything here that its user could act on
        logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=library)
    on_cpu = torch.cuda.device_count() < local_world_size
    config = config.on("cpu" if on_cpu else "cuda")
    with pinned(1, rank_cores(local_rank, local_world_size)) if on_cpu else nullcontext():
        result = run(config, Node.join())
    gc.collect()  # models are cyclic and hold the group, whose threads must not outlive Python
    dist.destroy_process_group()
    if result is not None:
        console = Console()
        print_table(result, console if console.is_terminal else Console(width=140))
        if config.json:
            document = asdict(result) | {"report": result.report.to_dict()}
            Path(config.json).write_text(json.dumps(document, indent=1) + "\n")
            console.print(f"written: {config.json}")
        if config.report:
            title = f"{config.tables} in a DLRM: {result.world_size} {'CPU' if on_cpu else 'GPU'} ranks"
            result.report.save_html(config.report, f"{title}, {config.batch_size:,} samples each")
            console.print(f"The report of dreamshard's plan, with figures: {config.report}")


if __name__ == "__main__":
    main()
