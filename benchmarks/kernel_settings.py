# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fused kernels in settings that measured sets leave out: any optimizer, unified memory, caches, hot rows.

    python benchmarks/kernel_settings.py --json benchmarks/data/h100_settings.json      # on a machine with a GPU
    python benchmarks/gpu_prior.py                                                       # predicted beside measured

Around one base setting (10 tables of a million rows, dim 128, 16,384 samples with 20 lookups that follow Zipf's law,
row-wise Adagrad), one property varies at a time. The tables of a setting are equal, and allocated by FBGEMM itself, so
that unified memory and caches are the real ones. Every run reads another of several batches, and caches have seen them
all before the first timed one. Rows have the form of ``data/published_gpu.json``.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.measure.timing import time_groups
from fused_kernels import copy_gb_per_s

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "lars_sgd": EmbOptimType.LARS_SGD,
}
LOCATIONS = {
    "device": EmbeddingLocation.DEVICE,
    "uvm": EmbeddingLocation.MANAGED,
    "uvm_caching": EmbeddingLocation.MANAGED_CACHING,
}
LINK_GB_PER_S = 64.0
"""One direction of the PCIe 5 link to the host, by its specification."""


@dataclass(frozen=True)
class Setting:
    """Equal tables, and how a batch reads each."""

    tables: int = 10
    rows: int = 1_000_000
    dim: int = 128
    batch: int = 16_384
    pooling: int = 20
    pooled: bool = True
    weight_bytes: int = 4
    zipf: float = 1.05
    optimizer: str = "rowwise_adagrad"
    memory: str = "device"
    cache_load_factor: float = 1.0

    @property
    def lookups(self) -> int:
        """Of one table."""
        return self.batch * self.pooling


BASE = Setting()
SWEEPS: dict[str, tuple[Any, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "dim": (4, 8, 16, 32, 64, 256, 512),
    "zipf": (0.0, 0.6, 0.9, 1.2, 1.5),
    "batch": (128, 512, 2048, 8192, 65_536),
    "pooling": (1, 5, 60),
    "tables": (1, 3, 30),
    "rows": (1_000, 10_000, 100_000),
    "weight_bytes": (2,),
    "pooled": (False,),
}


def settings() -> list[Setting]:
    """All of them: the sweeps with and without an optimizer state, then with hardly any row read twice, then weights on
    the host."""
    swept = [replace(BASE, **{name: value}) for name, values in SWEEPS.items() for value in values]
    plain = [replace(each, optimizer="sgd") for each in swept if each.optimizer == BASE.optimizer]
    cold = [replace(BASE, zipf=0.0, optimizer=name) for name in OPTIMIZERS if name != BASE.optimizer]
    cold += [
        replace(BASE, zipf=0.0, optimizer=name, dim=dim) for name, dim in product(("sgd", "rowwise_adagrad"), (16, 64))
    ]
    slow = replace(BASE, batch=4096)
    hosted = [replace(slow, memory="uvm", optimizer=name) for name in ("sgd", "rowwise_adagrad", "adam")]
    hosted += [replace(slow, memory="uvm", dim=dim) for dim in (16, 64)] + [replace(slow, memory="uvm", zipf=0.0)]
    # With Zipf's law the rows of all batches together fit a part of a table, so that nothing would ever miss.
    cached = replace(slow, memory="uvm_caching")
    hosted += [cached, *(replace(cached, cache_load_factor=load, zipf=0.0) for load in (0.05, 0.2, 0.5, 1.0))]
    return list(dict.fromkeys([BASE, *swept, *cold, *hosted, *plain]))


def quick(setting: Setting) -> Setting:
    """The same as small as it gets, to try the flow."""
    return replace(setting, rows=min(setting.rows, 5_000), batch=min(setting.batch, 64), tables=min(setting.tables, 2))


class Settled:
    """A setting's kernel on batches of its own, as :func:`time_groups` runs it."""

    def __init__(self, setting: Setting, device: torch.device, batches: int, seed: int) -> None:
        self.device, on_cpu = device, device.type == "cpu"
        location = EmbeddingLocation.HOST if on_cpu else LOCATIONS[setting.memory]
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(setting.rows, setting.dim, location, compute)] * setting.tables,
            weights_precision=SparseType.FP16 if setting.weight_bytes == 2 else SparseType.FP32,
            output_dtype=SparseType.FP32,
            optimizer=OPTIMIZERS[setting.optimizer],
            pooling_mode=PoolingMode.SUM if setting.pooled else PoolingMode.NONE,
            cache_load_factor=setting.cache_load_factor,
            learning_rate=1e-3,
            device=device,
        )
        self.module.init_embedding_weights_uniform(-0.05, 0.05)
        generator = torch.Generator(device).manual_seed(seed)
        drawn = [_ids(setting, generator) for _ in range(batches)]
        # Of each table in each batch: exact, since the tail of Zipf's law is not.
        self.distinct_rows = (
            sum(ids_L.unique().numel() for ids_TL in drawn for ids_L in ids_TL) / batches / setting.tables
        )
        self._batches = cycle([ids_TL.flatten() for ids_TL in drawn])
        bags = setting.tables * setting.batch
        self._offsets_B = torch.arange(bags + 1, device=device) * setting.pooling
        columns = setting.tables * setting.dim if setting.pooled else setting.dim
        outputs = setting.batch if setting.pooled else bags * setting.pooling
        self._gradient_BD = torch.rand((outputs, columns), generator=generator, device=device) - 0.5
        self.move()
        for _ in range(batches):
            self.forward()
            self.backward()
            self.move()

    def move(self) -> None:
        """To the next batch."""
        self._ids_N = next(self._batches)

    def forward(self) -> Tensor:
        """Run it once."""
        self._output_BD = self.module(self._ids_N, self._offsets_B)
        return self._output_BD

    def backward(self) -> None:
        """With the optimizer."""
        self._output_BD.backward(self._gradient_BD)
        del self._output_BD


def _ids(setting: Setting, generator: torch.Generator) -> Tensor:
    """[T, L] of one batch; a table's hot rows lie anywhere in it."""
    device = generator.device
    shape = (setting.tables, setting.lookups)
    if not setting.zipf:
        return torch.randint(setting.rows, shape, generator=generator, device=device)
    share_R = torch.arange(1, setting.rows + 1, device=device, dtype=torch.float64) ** -setting.zipf
    until_R = share_R.cumsum(0)
    drawn_TL = torch.rand(shape, generator=generator, device=device, dtype=torch.float64) * until_R[-1]
    ranks_TL = torch.searchsorted(until_R, drawn_TL).clamp_max(setting.rows - 1)
    # The same order in every batch, so that a cache can hold the hot ones.
    fixed = torch.Generator(device).manual_seed(0)
    orders_TR = [torch.randperm(setting.rows, generator=fixed, device=device) for _ in range(setting.tables)]
    return torch.stack([order_R[ranks_L] for order_R, ranks_L in zip(orders_TR, ranks_TL, strict=True)])


def measure(setting: Setting, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """What a row has beside its setting; where FBGEMM has no kernel for it, why."""
    try:
        kernel = Settled(setting, device, args.batches, args.seed)
        timed = time_groups([kernel], args.repeats, warmup=2)[0]
    except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    forward_ms, backward_ms = timed.median_ms.tolist()
    return {
        "distinct_rows": kernel.distinct_rows,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "spread": timed.spread.tolist(),
        "launch_bound": timed.launch_bound,
    }


def name_of(setting: Setting) -> str:
    """What it has that the base has not."""
    differing = {name: value for name, value in asdict(setting).items() if value != getattr(BASE, name)}
    return ", ".join(f"{name} {value}" for name, value in differing.items()) or "base"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batches", type=int, default=12, help="that runs take in turn")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no setting later than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="everything as small as it gets, to try the flow")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    device, deadline, rows = torch.device(args.device), time.monotonic() + args.seconds, []
    origin = provenance(device) | {"card": card(device), "copy_gb_per_s": copy_gb_per_s(device)}
    table = table_of("fused kernels, median ms", "setting", "forward", "backward")
    for setting in settings():
        if time.monotonic() > deadline:
            break
        setting = quick(setting) if args.quick else setting
        found = measure(setting, device, args)
        rows.append({"name": name_of(setting)} | asdict(setting) | found)
        write_result(args.json, origin, {"rows": rows})
        times = (
            [found["failed"], ""]
            if "failed" in found
            else [f"{found[f'{way}_ms']:.3f}" for way in ("forward", "backward")]
        )
        table.add_row(name_of(setting), *times)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    wide_console().print(table)


def card(device: torch.device) -> dict[str, Any]:
    """What else a row of ``published_gpu.json`` says of it."""
    if device.type == "cpu":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {"card": properties.name, "l2_mb": properties.L2_cache_size / 1e6, "host_gb_per_s": LINK_GB_PER_S}


if __name__ == "__main__":
    main()
