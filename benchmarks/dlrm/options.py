# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options of the DLRM benchmarks, and a rank among the others."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner.measure.ranks import local_ranks, rank_cores
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.search.placing import HEURISTICS
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

SIZES = {"small": ((128,), (128, 1)), "mlperf": ((512, 256), (1024, 1024, 512, 256, 1))}
"""Layers below (the last one, of the embedding dim, is added) and above the interaction. ``mlperf`` is the
MLPerf DLRM-DCNv2 model, with its cross network; ``small`` has plain dot products and thin layers: on CPUs,
where dense layers are slow, embeddings stay as visible a part of the step as they are on accelerators."""
ONLY, WITHOUT = "only_", "without_"
"""Before a sharding type: our planner, when it may use that one alone, or each type but that."""
OURS = {
    "dreamshard": {},
    "roofline": {"cost_source": "roofline"},
}
"""Arguments of our planner, by name."""
OPTIMIZERS = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def option(default: Any, text: str) -> Any:
    """Return the field of a setting that is an option of the command."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run; each field is an option of the command."""

    tables: str = option("mlperf_dlrm_dcnv2", "table collection")
    count: int = option(0, "so many tables of the collection, drawn by the seed; 0: all")
    max_rows: int = option(100_000, "scale larger tables down to this many rows")
    dim: int = option(0, "embedding dim of all tables; 0: the collection's, which must be the same for all")
    planners: str = option("dreamshard,torchrec,lookup_greedy", "planners, separated by commas")
    copies: int = option(3, "models per planner")
    steps: int = option(0, "timed steps of each planner, over all its models; 0: 120 on CPU, 1200 on GPUs")
    block: int = option(0, "steps of one model before it is another's turn; 0: 2 on CPU, 20 on GPUs")
    train_seconds: float = option(0.0, "end after the round that is under way then; 0: no limit")
    batch_size: int = option(0, "samples per rank and step; 0: 512 on CPU, 8192 on a GPU")
    hot: float = option(1.0, "multiply the lookups of the table that is read most")
    sharding_types: str = option("table_wise", "what planners may use, separated by commas")
    min_partition: int = option(0, "narrowest column slice; 0: TorchRec's default")
    optimizer: str = option("rowwise_adagrad", f"of the tables, in the backward: {', '.join(OPTIMIZERS)}")
    size: str = option("", f"dense layers: {', '.join(SIZES)}; small on CPU and mlperf on GPUs by default")
    checkpoint: str = option("auto", "of dreamshard")
    processor_time: bool = option(False, "CPU kernels by what their thread computes: others use this machine as well")
    seed: int = option(0, "of weights, data, search and order")
    observe: str = option(
        "", "steps more of a model of each planner are observed: file of dreamshard observed and learn"
    )
    json: str = option("", "write everything to this file")
    report: str = option("", "write the report of dreamshard's plan with figures to this file, .html")

    def __post_init__(self) -> None:
        if min(self.max_rows, self.copies) < 1:
            raise ValueError(f"rows and copies must be at least 1: {self}")
        counts = ("dim", "batch_size", "steps", "block", "train_seconds", "count")
        if min(getattr(self, name) for name in counts) < 0:
            raise ValueError(f"{', '.join(counts)} must be at least 0: {self}")
        if not self.hot > 0 or self.min_partition < 0:
            raise ValueError(f"hot must be above 0 and min_partition at least 0, got {self.hot}, {self.min_partition}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        unknown = [kind for kind in self.kinds if kind not in SHARDING_TYPES]
        if unknown or not self.kinds:
            raise ValueError(f"sharding types must be some of {', '.join(SHARDING_TYPES)}; got {self.sharding_types!r}")
        if self.size not in ("", *SIZES):
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        known = (*OURS, "torchrec", "torchrec_default", *HEURISTICS)
        known += tuple(before + kind for before in (ONLY, WITHOUT) for kind in self.kinds)
        chosen = self.names
        if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(known):
            raise ValueError(f"planners must be some of {', '.join(known)}, each once; got {self.planners!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The planners."""
        return tuple(name.strip() for name in self.planners.split(",") if name.strip())

    @property
    def kinds(self) -> tuple[str, ...]:
        """Sharding types that planners may use."""
        return tuple(kind.strip() for kind in self.sharding_types.split(",") if kind.strip())

    def kinds_of(self, planner: str) -> tuple[str, ...]:
        """Sharding types that this one may use."""
        if planner.startswith(ONLY):
            return (planner.removeprefix(ONLY),)
        return tuple(kind for kind in self.kinds if planner != WITHOUT + kind)

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


def argument_parser(description: str | None, options: type[Any] = Config) -> argparse.ArgumentParser:
    """Return a parser with an option for each field of a dataclass."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in fields(options):
        flag = f"--{one.name.replace('_', '-')}"
        text = f"{one.metadata['help']} (default: {one.default!r})"
        kind = {"action": "store_true"} if one.default is False else {"type": type(one.default)}
        parser.add_argument(flag, **kind, default=one.default, help=text)
    return parser


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


@contextmanager
def cpu_rank() -> Iterator[Node]:
    """Join as a rank with one thread, on cores of its own if there are enough."""
    local_rank, local_world_size = local_ranks()
    with pinned(1, rank_cores(local_rank, local_world_size)):
        yield Node.join()
