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
    torchrec           TorchRec's planner, given the true pooling factors
    torchrec_default   TorchRec's planner without statistics (pooling factor 1), as most users run it
    only_data_parallel, without_data_parallel, ...
                       this package's, when it may use this sharding type alone, or all of --sharding-types but this
    lookup_greedy      a greedy rule for whole tables; any other of this package works too

Planners may use the sharding types that --sharding-types names, whole tables by default, in fused kernels; on CPUs,
row-wise, table-row-wise and grid sharding through a sharder of this benchmark's own, since TorchRec's offers them on
GPUs only. Data-parallel tables get an optimizer of the same rule, whichever planner chose them: TorchRec alone would
leave theirs out.
"""

from __future__ import annotations

import gc
import logging
import random
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
import torch.distributed as dist

from common.output import wide_console, write_result
from dlrm.job import Job, make_planners, plan_all, scale_tables
from dlrm.options import Config, Node, argument_parser
from dlrm.results import Result, print_table
from dlrm.steps import Trainee, train_side_by_side
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.ranks import local_ranks, rank_cores
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.plans.page import save_html
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.workload.pools import named_pool


def main() -> None:
    """The command."""
    parser = argument_parser(__doc__)
    try:
        config = Config(**vars(parser.parse_args()))
        for file in filter(None, (config.report, config.observe)):
            check_writable(file)
        local_rank, local_world_size = local_ranks()
    except (ValueError, DreamShardError) as error:
        parser.error(str(error))
    for library in ("", "torch", "torchrec"):  # none says anything here that its user could act on
        logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=library)
    on_cpu = torch.cuda.device_count() < local_world_size
    config = config.on("cpu" if on_cpu else "cuda")
    with pinned(1, rank_cores(local_rank, local_world_size)) if on_cpu else nullcontext():
        result = run(config, Node.join())
    gc.collect()  # models are cyclic and hold the group, whose threads must not outlive Python
    dist.destroy_process_group()
    if result is not None:
        tell(result, "CPU" if on_cpu else "GPU")


def run(config: Config, node: Node) -> Result | None:
    """Plan, train and measure; the result is for rank 0, the others get None."""
    pool = named_pool(config.tables)
    if config.count:
        pool = random.Random(config.seed).sample(pool, min(config.count, len(pool)))
    tables, scaling = scale_tables(pool, config.max_rows, config.dim, config.hot)
    job = Job.of(tables, config, node)
    planners = make_planners(tables, job.batches, config, node)
    planned = plan_all(planners, job.fresh_model, job.sharders, config, node)

    def build(name: str) -> Trainee:
        return job.trainee(planned.plans[name], planned.judge)

    ranks = node.gather(train_side_by_side(build, config, node))
    return None if node.rank else Result.of(ranks, planned, scaling, config, node)


def tell(result: Result, kind: str) -> None:
    """Print and write the result of ranks of some kind."""
    config, console = result.config, wide_console(140)
    print_table(result, console)
    if config.json:
        write_result(Path(config.json), asdict(result), {"report": result.report.to_dict()})
        console.print(f"written: {config.json}")
    if config.report:
        title = f"{config.tables} in a DLRM: {result.world_size} {kind} ranks"
        save_html(result.report, config.report, f"{title}, {config.batch_size:,} samples each")
        console.print(f"The report of dreamshard's plan, with figures: {config.report}")


if __name__ == "__main__":
    main()
