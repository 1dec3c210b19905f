# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train one DLRM under several planners at once and compare their steps.

    torchrun --nproc_per_node=2 benchmarks/run_dlrm.py --planners dreamshard,torchrec,lookup_greedy --json result.json
    torchrun benchmarks/run_dlrm.py                       # one process, nothing to choose

NCCL where each rank has a GPU, else gloo and one thread per rank on CPU. Every planner gets a model of its own with the
same weights, and all models train on the same batches, a few steps of one after a few steps of another in an order that
is shuffled anew each round: whatever else the machine does hits all alike. Planners:

    dreamshard         this package, with statistics of the batches
    torchrec           TorchRec's planner, given the true pooling factors
    torchrec_default   TorchRec's planner without statistics (pooling factor 1), as most users run it
    lookup_greedy      a greedy rule; any other of this package works too

All of them place whole tables (table-wise) in fused kernels, so that only the placement differs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import logging
import os
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as RichTable
from scipy.stats import binom
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm import SIZES, make_batches, make_model, scale_tables
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, TableStatistics
from dreamshard_planner.placement.rules import RULES
from dreamshard_planner.plugin import RulePartitioner
from dreamshard_planner.report import ReportEntry
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import Table
from kernel_clock import KernelClock
from provenance import provenance

BATCHES_KEPT = 16
"""Distinct batches; training goes round them, so that drawing data costs no time."""
WARMUP_STEPS = 3


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to run; each field is an option of the command."""

    tables: str = _option("mlperf_dlrm_dcnv2", "table collection")
    max_rows: int = _option(100_000, "scale larger tables down to this many rows")
    dim: int = _option(0, "embedding dim of all tables; 0: the collection's, which must be the same for all")
    planners: str = _option("dreamshard,torchrec,lookup_greedy", "planners, separated by commas")
    steps: int = _option(120, "timed steps of each planner")
    block: int = _option(2, "steps of one planner before it is another's turn")
    batch_size: int = _option(0, "samples per rank and step; 0: 512 on CPU, 8192 on a GPU")
    size: str = _option("", f"dense layers: {', '.join(SIZES)}; small on CPU and mlperf on GPUs by default")
    seed: int = _option(0, "of weights, data, search and order")
    json: str = _option("", "write everything to this file")

    def __post_init__(self) -> None:
        if min(self.max_rows, self.steps, self.block) < 1 or min(self.dim, self.batch_size) < 0:
            raise ValueError(f"rows, steps and block must be at least 1, dim and batch size at least 0: {self}")
        if self.size not in ("", *SIZES):
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        known = ("dreamshard", "torchrec", "torchrec_default", *RULES)
        if not self.names or len(set(self.names)) != len(self.names) or not set(self.names) <= set(known):
            raise ValueError(f"planners must be some of {', '.join(known)}, each once; got {self.planners!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The planners."""
        return tuple(name.strip() for name in self.planners.split(",") if name.strip())


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
        rank, world_size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        if cuda:
            torch.cuda.set_device(local)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if cuda else "gloo")
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        return cls(device, rank, world_size, int(os.environ["LOCAL_WORLD_SIZE"]))

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

    def __init__(self, model: nn.Module, batches: Sequence[Batch], node: Node) -> None:
        self._node = node
        self.clock = KernelClock(model, node.device)
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


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median between the bounds of its 95 % confidence interval, from order statistics: no distribution assumed."""
    ordered = np.sort(values)
    below = max(int(binom.ppf(0.025, len(ordered), 0.5)) - 1, 0)
    return float(ordered[below]), float(np.median(ordered)), float(ordered[-1 - below])


@dataclass(frozen=True)
class PlannerResult:
    """One planner's plan, and what it was like to train on it. Medians and quartiles are over blocks of steps."""

    name: str
    plan_seconds: float
    ranks: dict[str, int]
    predicted: ReportEntry
    """By DreamShard's cost model, whoever made the plan."""
    step_ms: tuple[float, float, float]
    """Lower quartile, median, upper quartile; a block takes as long as on its slowest rank."""
    ratio: tuple[float, float, float]
    """Of the step time to the base's in the same round: median between the bounds of its 95 % interval."""
    forward_ms: tuple[float, ...]
    """Fused kernels of each rank."""
    backward_ms: tuple[float, ...]
    samples_per_second: float
    block_ms: tuple[float, ...]
    losses: tuple[float, ...]

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
        """From milliseconds per step [ranks, blocks, (step, forward, backward)] of the planner and of the base."""
        block_ms, base_block_ms = times_ms[..., 0].max(0), base_ms[..., 0].max(0)
        median_ms = np.median(times_ms, axis=1)
        step_ms = np.percentile(block_ms, (25, 50, 75)).tolist()
        return cls(
            name=name,
            step_ms=tuple(step_ms),
            ratio=median_interval(block_ms / base_block_ms),
            forward_ms=tuple(median_ms[:, 1].tolist()),
            backward_ms=tuple(median_ms[:, 2].tolist()),
            samples_per_second=config.batch_size * node.world_size / step_ms[1] * 1e3,
            block_ms=tuple(block_ms.tolist()),
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
    """Largest between two planners, any step and rank."""
    world_size: int
    planners: tuple[PlannerResult, ...]


def make_planners(
    tables: Sequence[Table], batches: Sequence[Batch], config: Config, node: Node
) -> dict[str, tuple[EmbeddingShardingPlanner, list[ShardingOption]]]:
    """By name: the planner, and a list that holds its plan's options once it has planned.

    ``dreamshard`` is always there, and first; the others are TorchRec's planner with other parts or less knowledge.
    """
    bare = {t.name: ParameterConstraints(["table_wise"], ["fused"]) for t in tables}
    informed = copy.deepcopy(bare)
    for table in tables:
        informed[table.name].pooling_factors = [feature.pooling_factor for feature in table.features]
    statistics = TableStatistics.from_batches(batch.sparse_features for batch in batches)
    planners = {}
    for name in dict.fromkeys(("dreamshard", *config.names)):
        options: list[ShardingOption] = []
        common = {
            "topology": node.topology(),
            "batch_size": config.batch_size,
            "constraints": bare if name == "torchrec_default" else informed,
            "callbacks": [lambda plan, options=options: options.extend(plan) or plan],
        }
        if name == "dreamshard":
            planner = DreamShardPlanner(**common, statistics=statistics, seed=config.seed)
        elif name.startswith("torchrec"):
            planner = EmbeddingShardingPlanner(**common)
        else:
            planner = EmbeddingShardingPlanner(**common, partitioner=RulePartitioner(name, informed))
        planners[name] = planner, options
    return planners


def run(config: Config, node: Node) -> Result | None:
    """Plan, train and measure; the result is for rank 0, the others get None."""
    tables, scaling = scale_tables(named_pool(config.tables), config.max_rows, config.dim)
    count = min(config.steps, BATCHES_KEPT)
    batches = make_batches(tables, count, config.batch_size, node.rank, node.world_size, config.seed)
    bare_model = make_model(tables, config.size, config.seed, node.device)
    sharders = [EmbeddingBagCollectionSharder()]
    planners = make_planners(tables, batches, config, node)
    judge = planners["dreamshard"][0]
    trainees: dict[str, Trainee] = {}
    plans: dict[str, dict[str, Any]] = {}
    for name, (planner, options) in planners.items():
        model = copy.deepcopy(bare_model)
        apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.01})
        start = time.perf_counter()
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        plan_seconds = time.perf_counter() - start
        if node.rank == 0:
            predicted = judge.predict(options, name)
            ranks = {option.name: option.shards[0].rank for option in options}
            plans[name] = {"plan_seconds": plan_seconds, "ranks": ranks, "predicted": predicted}
        if name in config.names:
            model = DistributedModelParallel(model, plan=plan, sharders=sharders, device=node.device)
            trainees[name] = Trainee(model, batches, node)

    order = random.Random(config.seed)
    for trainee in trainees.values():
        trainee.train(WARMUP_STEPS, timed=False)
    for _ in range(-(-config.steps // config.block)):
        for name in order.sample(list(trainees), len(trainees)):
            trainees[name].train(config.block)
    losses = {name: torch.stack(trainee.losses).tolist() for name, trainee in trainees.items()}
    ranks = node.gather(({name: trainee.blocks for name, trainee in trainees.items()}, losses))
    if node.rank:
        return None
    base = "torchrec" if "torchrec" in trainees else config.names[0]
    times = {name: np.array([blocks[name] for blocks, _ in ranks]) for name in trainees}
    all_losses = np.array([[losses[name] for name in trainees] for _, losses in ranks])
    results = [
        PlannerResult.of(name, times[name], times[base], all_losses[:, i].mean(0), config, node, plans[name])
        for i, name in enumerate(trainees)
    ]
    return Result(
        provenance=provenance(node.device),
        config=config,
        scaling=f"{config.tables}: {scaling}",
        base=base,
        cost_source=judge.report().cost_source,
        loss_difference=float(np.ptp(all_losses, axis=1).max()),
        world_size=node.world_size,
        planners=tuple(results),
    )


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
    console.print(
        f"Medians and quartiles over {len(result.planners[0].block_ms)} blocks of {config.block} steps, planners "
        f"interleaved; x {result.base}: median ratio of blocks of one round, and its 95 % interval. Embedding: fused "
        f"kernels, forward + backward, measured in the steps. Predicted: embedding work and its collectives; cost "
        f"source: {result.cost_source}. All planners place whole tables in fused kernels; torchrec_default alone has "
        f"no pooling factors."
    )
    console.print(f"Same training: losses of the planners differ by at most {result.loss_difference:.1e}.")


def _per_rank(values_ms: Sequence[float], shown: int = 4) -> str:
    text = " ".join(f"{value:.1f}" for value in values_ms[:shown])
    return text if len(values_ms) <= shown else f"{text} ... max {max(values_ms):.1f}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in fields(Config):
        flag = f"--{option.name.replace('_', '-')}"
        text = f"{option.metadata['help']} (default: {option.default!r})"
        parser.add_argument(flag, type=type(option.default), default=option.default, help=text)
    try:
        config = Config(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))
    for library in ("torch", "torchrec"):  # neither says anything here that its user could act on
        logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=library)
    node = Node.join()
    on_cpu = node.device.type == "cpu"
    batch_size, size = (512, "small") if on_cpu else (8192, "mlperf")
    result = run(replace(config, batch_size=config.batch_size or batch_size, size=config.size or size), node)
    gc.collect()  # models are cyclic and hold the group, whose threads must not outlive Python
    dist.destroy_process_group()
    if result is not None:
        console = Console()
        print_table(result, console if console.is_terminal else Console(width=140))
        if config.json:
            Path(config.json).write_text(json.dumps(asdict(result), indent=1) + "\n")
            console.print(f"written: {config.json}")


if __name__ == "__main__":
    main()
