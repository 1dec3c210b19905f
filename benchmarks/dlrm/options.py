# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options of the DLRM benchmarks, and a rank among the others."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner.measure.collectives import local_ranks
from dreamshard_planner.search.starts import HEURISTICS
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

SIZES = {"small": ((128,), (128, 1)), "mlperf": ((512, 256), (1024, 1024, 512, 256, 1))}
"""Layers below (the last one, of the embedding dim, is added) and above the interaction. ``mlperf`` is the
MLPerf DLRM-DCNv2 model, with its cross network; ``small`` has plain dot products and thin layers: on CPUs,
where dense layers are slow, embeddings stay as visible a part of the step as they are on accelerators."""
PLANNERS = ("dreamshard", "torchrec", "torchrec_default", *HEURISTICS)
OPTIMIZERS = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def option(default: Any, text: str) -> Any:
    """Return the field of a setting that is an option of the command."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run; each field is an option of the command."""

    tables: str = option("mlperf_dlrm_dcnv2", "table collection")
    max_rows: int = option(100_000, "scale larger tables down to this many rows")
    dim: int = option(0, "embedding dim of all tables; 0: the collection's, which must be the same for all")
    planners: str = option("dreamshard,torchrec,lookup_greedy", "planners, separated by commas")
    copies: int = option(3, "models per planner")
    rounds: int = option(12, "blocks of steps of each model")
    block_seconds: float = option(0.3, "length of a block, before it is another model's turn")
    batches: int = option(16, "distinct batches; training goes round them")
    batch_size: int = option(0, "samples per rank and step; 0: 512 on CPU, 8192 on a GPU")
    hot: float = option(1.0, "multiply the lookups of the table that is read most")
    sharding_types: str = option("table_wise", "what planners may use, separated by commas")
    min_partition: int = option(0, "narrowest column slice; 0: TorchRec's default")
    optimizer: str = option("rowwise_adagrad", f"of the tables, in the backward: {', '.join(OPTIMIZERS)}")
    size: str = option("", f"dense layers: {', '.join(SIZES)}; small on CPU and mlperf on GPUs by default")
    checkpoint: str = option("auto", "of dreamshard")
    seed: int = option(0, "of weights, data, search and order")
    json: str = option("", "write everything to this file")
    report: str = option("", "write the report of dreamshard's plan with figures to this file, .html")

    def __post_init__(self) -> None:
        known = {"planners": PLANNERS, "sharding_types": SHARDING_TYPES, "optimizer": OPTIMIZERS, "size": ("", *SIZES)}
        for name, names in known.items():
            given = getattr(self, name)
            if not {one.strip() for one in given.split(",")} <= set(names):
                raise ValueError(f"{name} must be one of {', '.join(names)}, got {given!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The planners."""
        return tuple(dict.fromkeys(name.strip() for name in self.planners.split(",")))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Sharding types that planners may use."""
        return tuple(kind.strip() for kind in self.sharding_types.split(","))

    def on(self, kind: str) -> Config:
        """Return these settings with the ones that are left to the device: ``cpu`` or ``cuda``."""
        batch_size, size = (512, "small") if kind == "cpu" else (8192, "mlperf")
        return replace(self, batch_size=self.batch_size or batch_size, size=self.size or size)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with an option for each field of the settings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in fields(Config):
        text = f"{one.metadata['help']} (default: {one.default!r})"
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(one.default), default=one.default, help=text)
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


def take_cores(local_rank: int, local_world_size: int) -> None:
    """Compute with one thread, on cores of this rank's own if its host has enough."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= local_world_size:
        os.sched_setaffinity(0, cores[local_rank::local_world_size])


def cpu_rank() -> Node:
    """Join as a rank with one thread, on cores of its own if there are enough."""
    take_cores(*local_ranks())
    return Node.join()
