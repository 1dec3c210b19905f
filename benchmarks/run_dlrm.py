# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train one DLRM under several planners at once and compare their steps.

    torchrun --nproc_per_node=2 benchmarks/run_dlrm.py --planners dreamshard,torchrec,lookup_greedy --json result.json
    torchrun benchmarks/run_dlrm.py                       # one process, nothing to choose
    torchrun --nproc_per_node=8 benchmarks/run_dlrm.py --max-rows 4000000 --rounds 30 --json result.json

NCCL where each rank has a GPU, else gloo on CPU, each rank on cores of its own and with one thread. Models of all
planners train in turns, see ``compare_steps``. Planners:

    dreamshard         this package, with statistics of the batches
    torchrec           TorchRec's planner, given the true pooling factors
    torchrec_default   TorchRec's planner without statistics (pooling factor 1), as most users run it
    lookup_greedy      a greedy rule for whole tables; any other of this package works too

Planners may use the sharding types that --sharding-types names, whole tables by default, in fused kernels; on CPUs,
row-wise, table-row-wise and grid sharding through a sharder of this benchmark's own, since TorchRec's offers them on
GPUs only. Data-parallel tables get an optimizer of the same rule, whichever planner chose them: TorchRec alone would
leave theirs out.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from common.output import provenance, table_of, wide_console, write_result
from dlrm.job import Job, scale_tables
from dlrm.options import Config, Node, argument_parser, take_cores
from dlrm.steps import training_step
from dreamshard_planner import Report, StepComparison, compare_steps
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.collectives import local_ranks
from dreamshard_planner.planning.page import save_html
from dreamshard_planner.plans.report import noted
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.workload.pools import named_pool

BASE = "torchrec"


def main() -> None:
    """The command."""
    parser = argument_parser(__doc__)
    try:
        config = Config(**vars(parser.parse_args()))
        if config.report:
            check_writable(config.report)
        local_rank, local_world_size = local_ranks()
    except (ValueError, DreamShardError) as error:
        parser.error(str(error))
    for library in ("", "torch", "torchrec"):  # none says anything here that its user could act on
        logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=library)
    on_cpu = torch.cuda.device_count() < local_world_size
    config = config.on("cpu" if on_cpu else "cuda")
    if on_cpu:
        take_cores(local_rank, local_world_size)
    run(config, Node.join())
    gc.collect()  # models are cyclic and hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


def run(config: Config, node: Node) -> None:
    """Plan, train and measure; rank 0 prints and writes the result."""
    tables, scaling = scale_tables(named_pool(config.tables), config.max_rows, config.dim, config.hot)
    job, plans, told = Job.of(tables, config, node), {}, {}
    planners = job.planners()
    for name, planner in planners.items():
        start = time.perf_counter()
        plans[name] = planner.collective_plan(job.fresh_model(), job.sharders, dist.group.WORLD)
        told[name] = {"plan_seconds": time.perf_counter() - start}
    losses: dict[str, list[list[float]]] = {name: [] for name in config.names}

    def build(name: str) -> tuple[nn.Module, Callable[[Iterator[Any]], None]]:
        model, own = job.sharded(plans[name]), []
        progress = training_step(model, node.device)
        losses[name].append(own)
        return model, lambda batches: own.append(progress(batches)[0])

    names = {name: name for name in sorted(config.names, key=lambda name: name != BASE)}
    counts = {"copies": config.copies, "rounds": config.rounds, "block_seconds": config.block_seconds}
    compared = compare_steps(build, names, job.batches, **counts, seed=config.seed)
    apart = max(node.gather(loss_difference([own for of_plan in losses.values() for own in of_plan])))
    if node.rank:
        return
    ours = planners["dreamshard"]
    for name in config.names:
        (shardings,) = plans[name].plan.values()
        (seen,) = compared.observed[name].runs
        predicted = ours.predict(plans[name], name)
        told[name] |= {
            "ranks": {table: sharding.ranks for table, sharding in shardings.items()},
            "types": {table: sharding.sharding_type for table, sharding in shardings.items()},
            "predicted_ms": predicted.total_ms,
            "predicted_rank_ms": predicted.rank_ms,
            "kernels_ms": [rank.kernel_ms("forward") + rank.kernel_ms("backward") for rank in seen.ranks],
            "step_ms": compared.step_ms[name],
            "ratio": compared.ratio(name),
        }
    report = with_steps(ours.report(), compared)
    where = provenance(node.device)
    console = wide_console(140)
    console.print(f"DLRM on {node.world_size} rank(s) x {config.batch_size} samples, {where['hardware']['name']}")
    console.print(f"{scaling}\n\n{compared}\n", highlight=False)
    console.print(predictions({name: told[name] for name in names}))
    console.print(
        f"Predicted: embedding work and its collectives; cost source: {report.cost_source}. Sharding types allowed: "
        f"{', '.join(config.kinds)}; torchrec_default alone has no pooling factors.\n"
        f"Same training: losses of the models differ by at most {apart:.1e}."
    )
    if config.json:
        facts = {"config": asdict(config), "scaling": scaling, "ranks": node.world_size, "loss_difference": apart}
        write_result(Path(config.json), where, facts, {"plans": told, "report": report.to_dict()})
        console.print(f"written: {config.json}")
    if config.report:
        title = f"{config.tables} in a DLRM: {node.world_size} {node.device.type} ranks"
        save_html(report, config.report, f"{title}, {config.batch_size:,} samples each")
        console.print(f"The report of dreamshard's plan, with figures: {config.report}")


def loss_difference(losses: list[list[torch.Tensor]]) -> float:
    """Return the largest difference between losses of two models at one step, of as many steps as all have trained."""
    steps = min(map(len, losses))
    return float(np.ptp([torch.stack(own[:steps]).tolist() for own in losses], axis=0).max())


def with_steps(report: Report, compared: StepComparison) -> Report:
    """Return a report with what was measured in training."""
    base, lines = next(iter(compared.step_ms)), []
    for name, block_ms in compared.step_ms.items():
        ratio = "" if name == base else f", {compared.ratio(name)[1]:.3f} of {base}'s"
        step = f"a step takes {np.median(block_ms):.1f} ms under the plan of {name}"
        lines.append(f"measured in training: {step}{ratio}")
    return report.noting(noted("measurement", lines))


def predictions(told: dict[str, dict[str, Any]]) -> Table:
    """Return predicted beside measured times as a table."""
    table = table_of("Embedding work", "plan", "predicted ms", "predicted per rank", "kernels measured", "planned in s")
    for name, one in told.items():
        ranks_ms = per_rank(one["predicted_rank_ms"]), per_rank(one["kernels_ms"])
        table.add_row(name, f"{one['predicted_ms']:.1f}", *ranks_ms, f"{one['plan_seconds']:.1f}")
    return table


def per_rank(values_ms: list[float], shown: int = 4) -> str:
    """Return the first ranks' milliseconds, and the largest if there are more."""
    text = " ".join(f"{value:.1f}" for value in values_ms[:shown])
    return text if len(values_ms) <= shown else f"{text} ... max {max(values_ms):.1f}"


if __name__ == "__main__":
    main()
