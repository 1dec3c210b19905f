# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training steps and exchanged bytes of sequence tables with hot rows on every rank, against row_wise tables.

    torchrun --standalone --nproc_per_node=4 benchmarks/hot_rows.py --record hot-rows.jsonl
    torchrun --standalone --nproc_per_node=1 benchmarks/hot_rows.py --hot-rows 50000 --exponents 1.05 --batch-size 4096

CPU ranks over gloo, one thread each, or a GPU a rank. Two sequence tables with row-wise Adagrad have the same reads by
a power law, at random rows. The planner chooses hot rows from statistics of other batches, within --memory of a rank's
part of the tables. Contenders: tables without and with TorchRec's index dedup, and with hot rows. They train the same
batches in turns (``compare_steps``).

With --hot-rows, so many rows of each table are hot, whatever the planner would choose. On one rank this shows what
splitting takes: nothing is exchanged, and each pass is timed by itself.

With --pooled, table_wise tables of the MLPerf DLRM (multi-hot Criteo) are trained without hot rows. The bytes of their
lookups are the most that hot rows could save, since every sample's vector is sent anyhow.

Bytes are counted where ranks call collectives: the bytes that a rank sends to others, its mean. Those of vectors are
outputs and gradients. FBGEMM has no CPU kernel for index dedup; ``common/dedup_on_cpu.py`` is a slow one, so steps with
it are slower than its bytes suggest.

The exchange of vectors is predicted by collectives that the ranks measure first, as for ``dreamshard calibrate``. Then
the collectives of a step run again, one after the other, from a barrier each, and take as long as the slowest rank.
Both come in rounds, since other work on the machine changes.

Shapes: B samples of a rank, L lookups, D dim, N rounds, C collectives of a step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import trim_mean
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.dedup_on_cpu import dedup_on_cpu
from common.output import append, provenance, quiet
from dlrm.options import Node, cpu_rank
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, TableStatistics, compare_steps
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.hot_rows.sharded import HotIndex, replicate_hot_rows
from dreamshard_planner.measure.collectives import TRIMMED, measure
from dreamshard_planner.workload.lookups import HotRows
from dreamshard_planner.workload.pools import named_pool

FEATURES, BATCHES, COUNTED, PASSES, EXCHANGE_ROUNDS, REPEATS = ["f0", "f1"], 2, 8, 20, 7, 9
BLOCK_SECONDS = 0.3
ROW_WISE, DEDUP, HOT = "row_wise", "row_wise, index dedup", "hot rows"


class Model(nn.Module):
    """The mean of each sequence, or all pooled vectors, of a sample into one linear layer."""

    def __init__(self, rows: list[int], dim: int, is_pooled: bool = False) -> None:
        super().__init__()
        self._is_pooled, kind = is_pooled, EmbeddingBagConfig if is_pooled else EmbeddingConfig
        configs = [
            kind(name=f"t{i}", num_embeddings=count, embedding_dim=dim, feature_names=[f"f{i}"])
            for i, count in enumerate(rows)
        ]
        collection = EmbeddingBagCollection if is_pooled else EmbeddingCollection
        self.ec = collection(configs, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.ec.parameters(), {"lr": 0.1, "eps": 1e-3})
        self.top = nn.Linear(dim * len(rows), 1)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the loss: the square of the output's distance to 1."""
        found, samples = self.ec(batch), batch.stride()
        if self._is_pooled:
            vectors = found.values()
        else:
            vectors = torch.cat([found[name].values().unflatten(0, (samples, -1)).mean(1) for name in FEATURES], 1)
        return (self.top(vectors) - 1).square().mean()


class PowerLaw:
    """Draws batches: the k-th most read row is read as often as k ** -exponent."""

    def __init__(self, rows: int, exponent: float) -> None:
        self.rows = rows
        self._place = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
        self._below = (torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent).cumsum(0)

    def hottest(self, rows: int) -> Tensor:
        """Return the ids of the rows that are read most."""
        return self._place[:rows]

    def ids(self, number: int, generator: torch.Generator) -> Tensor:
        """Return so many lookups."""
        at = torch.rand(number, generator=generator, dtype=torch.float64) * self._below[-1]
        return self._place[torch.searchsorted(self._below, at).clamp_max(self.rows - 1)]


def drawn(laws: list[PowerLaw], lookups: list[int], batch_size: int, number: int, seed: int) -> list[KeyedJaggedTensor]:
    """Return batches of a rank, whose feature i reads a table by law i."""
    generator, names = torch.Generator().manual_seed(seed), [f"f{i}" for i in range(len(laws))]
    lengths = torch.tensor(lookups, dtype=torch.int32).repeat_interleave(batch_size)
    return [
        KeyedJaggedTensor(
            names,
            torch.cat([law.ids(count * batch_size, generator) for law, count in zip(laws, lookups, strict=True)]),
            lengths=lengths,
        )
        for _ in range(number)
    ]


class Exchanges:
    """Counts the bytes that a rank sends to others in collectives that Python calls, and keeps these to run again."""

    INPUTS = {"all_to_all_single": "input", "all_reduce": "tensor"}

    def __init__(self) -> None:
        self.sent_bytes = {"lookups": 0.0, "vectors": 0.0}
        self._kept: list[Callable[[], Any]] | None = None
        for name in self.INPUTS:
            setattr(dist, name, partial(self._counted, name, getattr(dist, name)))

    def of_step(self, step: Callable[[], Any]) -> list[Callable[[], Any]]:
        """Count the bytes of a step alone, and return its collectives of vectors."""
        self.sent_bytes, self._kept = dict.fromkeys(self.sent_bytes, 0.0), (kept := [])
        step()
        self._kept = None
        return kept

    def _counted(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        arguments = signature(call).bind(*given, **named).arguments
        sent = arguments[self.INPUTS[name]]
        kind = "vectors" if sent.is_floating_point() else "lookups"
        if splits := arguments.get("input_split_sizes"):
            others = 1 - splits[dist.get_rank()] / max(1, sum(splits))
        else:
            others = (1 - 1 / dist.get_world_size()) * (2 if name == "all_reduce" else 1)  # a ring's
        self.sent_bytes[kind] += others * sent.nbytes
        if kind == "vectors" and self._kept is not None:
            copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
            self._kept.append(partial(call, **{**copies, "async_op": False}))
        return call(*given, **named)


def alone_ms(steps: dict[str, list[Callable[[], Any]]], repeats: int) -> dict[str, float]:
    """Return the milliseconds of each step's collectives, run one after the other."""
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    with torch.no_grad():
        for _ in range(repeats):
            for name, calls in steps.items():
                times[name].append([timed_ms(call, dist.barrier, lambda: None) for call in calls])
    found = {}
    for name, ms_RC in times.items():
        slowest_RC = torch.tensor(ms_RC, dtype=torch.float64)
        dist.all_reduce(slowest_RC, op=dist.ReduceOp.MAX)
        found[name] = float(trim_mean(slowest_RC.numpy(), TRIMMED, axis=0).sum())
    return found


class Contender:
    """A sharded model in training."""

    def __init__(
        self, name: str, args: argparse.Namespace, law: PowerLaw, statistics: TableStatistics | None, node: Node
    ) -> None:
        self._settings = {
            "batch_size": args.batch_size,
            "statistics": statistics,
            "constraints": {f"t{i}": ParameterConstraints(sharding_types=["row_wise"]) for i in range(len(FEATURES))},
            "hot_rows_bytes": int(rank_bytes(args, node) * args.memory) if name == HOT and statistics else 0,
            "optimizers_attached": True,
            "debug": False,
        }
        self.planner = DreamShardPlanner(**self._settings)
        sharders = [EmbeddingCollectionSharder(use_index_dedup=name == DEDUP)]
        self._made, self._topology = partial(Model, [args.rows] * len(FEATURES), args.dim), node.topology()
        model = self._made()
        plan = self.planner.collective_plan(model, sharders, dist.group.WORLD)
        if name == HOT and args.hot_rows:
            plan = replicate_hot_rows(plan, {f"ec.t{i}": law.hottest(args.hot_rows) for i in range(len(FEATURES))})
        self.model = DistributedModelParallel(model, device=node.device, plan=plan, sharders=sharders)
        self._plan, self._sharders, self._synchronize = plan, sharders, node.synchronize
        parameters = [value for name, value in self.model.named_parameters() if name.startswith("top.")]
        self._optimizer = torch.optim.SGD(parameters, lr=0.1)

    def vectors_ms(self, checkpoint: Checkpoint) -> float:
        """Predict the milliseconds of the exchange of vectors by a checkpoint's collectives."""
        planner = DreamShardPlanner(self._topology, checkpoint=checkpoint, **self._settings)
        planner.read(self._made(), self._sharders)
        told = planner.saved_plan(self._plan).predicted.collectives
        return sum(ms for name, ms in told if not name.endswith((" lookups", " bucketing")))

    def step(self, batches: Iterator[KeyedJaggedTensor]) -> None:
        """Train one step."""
        self._optimizer.zero_grad()
        self.model(next(batches)).backward()
        self._optimizer.step()

    def passes_ms(self, batch: KeyedJaggedTensor) -> list[float]:
        """Return the median milliseconds of a forward and of a backward pass, each waited for."""
        ms_N2 = []
        for _ in range(PASSES):
            loss: list[Tensor] = []
            forward_ms = timed_ms(lambda loss=loss: loss.append(self.model(batch)), self._synchronize)
            ms_N2.append([forward_ms, timed_ms(loss[0].backward, self._synchronize)])
        return np.median(ms_N2, 0).tolist()


def rank_bytes(args: argparse.Namespace, node: Node) -> float:
    """Return the bytes of a rank's part of the tables."""
    return len(FEATURES) * args.rows * (args.dim + 1) * 4 / node.world_size


def timed_ms(call: Callable[[], Any], begin: Callable[[], Any], end: Callable[[], Any] | None = None) -> float:
    """Return the milliseconds of a call, from when it may begin until its end; both wait for a device by default."""
    begin()
    start = time.perf_counter()
    call()
    (end or begin)()
    return 1e3 * (time.perf_counter() - start)


def split_alone(
    args: argparse.Namespace, law: PowerLaw, contenders: dict[str, Contender], batch: KeyedJaggedTensor, node: Node
) -> dict[str, Any]:
    """Return milliseconds of single passes, and of routing alone, with the share of lookups that are of hot rows."""
    hot = {f"t{i}": HotRows(law.hottest(args.hot_rows), args.rows) for i in range(len(FEATURES))}
    index = HotIndex(hot, list(hot), node.device)
    routing_ms = [timed_ms(lambda: index.route(batch), node.synchronize) for _ in range(PASSES)]
    return {
        "passes_ms": {name: one.passes_ms(batch) for name, one in contenders.items()},
        "routing_ms": float(np.median(routing_ms)),
        "hot_share": len(index.route(batch).position_H) / len(batch.values()),
    }


def sent_bytes(exchanges: Exchanges, node: Node) -> dict[str, float]:
    """Return the counted bytes by kind, mean over ranks."""
    counted = dict(exchanges.sent_bytes)
    mean_2 = torch.tensor([*counted.values()], dtype=torch.float64, device=node.device) / node.world_size
    dist.all_reduce(mean_2)
    return dict(zip(counted, mean_2.tolist(), strict=True))


def pooled(args: argparse.Namespace, exponent: float, node: Node, exchanges: Exchanges) -> dict[str, Any]:
    """Count the bytes of pooled tables, and the share of their lookups whose rows are read once or more."""
    tables = named_pool("mlperf_dlrm_dcnv2")
    rows = [min(args.rows, table.rows) for table in tables]
    lookups = [round(table.features[0].pooling_factor) for table in tables]
    laws = [PowerLaw(count, exponent) for count in rows]
    (batch,) = drawn(laws, lookups, args.batch_size, 1, seed=node.rank)
    statistics = TableStatistics.from_batches(
        drawn(laws, lookups, args.batch_size, COUNTED, seed=100 + node.rank)
    ).all_gather()
    constraints = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(len(rows))}
    planner = DreamShardPlanner(batch_size=args.batch_size, constraints=constraints, debug=False)
    model = Model(rows, args.dim, is_pooled=True)
    sharded = DistributedModelParallel(
        model, device=node.device, plan=planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    )
    exchanges.of_step(lambda: sharded(batch.to(node.device)).backward())
    sent = sent_bytes(exchanges, node)
    hot = sum(sum(reads for reads in one.hot.reads if reads >= 1) for one in statistics.values() if one.hot)
    return {
        "exponent": exponent,
        "lookups": sum(lookups) * args.batch_size,
        "sent_bytes": sent,
        "share_of_lookups": sent["lookups"] / sum(sent.values()),
        "hot_share": hot / (sum(lookups) * args.batch_size),
    }


def exchange_of_round(
    args: argparse.Namespace, contenders: dict[str, Contender], steps: dict[str, list[Callable[[], Any]]], node: Node
) -> dict[str, tuple[float, float]]:
    """Measure collectives, and return predicted and measured milliseconds of the exchange of vectors."""
    known, shipped = measure(node.device, seconds=args.measure_seconds), resolve("auto", node.device.type)
    checkpoint = replace(shipped, metadata={**shipped.metadata, "collectives": known})
    took_ms = alone_ms({name: steps[name] for name in contenders}, REPEATS)
    return {name: (one.vectors_ms(checkpoint), took_ms[name]) for name, one in contenders.items()}


def measured(args: argparse.Namespace, exponent: float, node: Node, exchanges: Exchanges) -> dict[str, Any]:
    """Train all contenders on reads by one power law."""
    law, statistics = PowerLaw(args.rows, exponent), None
    draw = partial(drawn, [law] * len(FEATURES), [args.lookups] * len(FEATURES), args.batch_size)
    if not args.hot_rows:
        statistics = TableStatistics.from_batches(draw(COUNTED, seed=100 + node.rank)).all_gather()
    batches = [one.to(node.device) for one in draw(BATCHES, seed=node.rank)]
    names = (ROW_WISE, HOT) if args.hot_rows else (ROW_WISE, DEDUP, HOT)
    contenders = {name: Contender(name, args, law, statistics, node) for name in names}
    bytes_sent: dict[str, float] = {}
    steps: dict[str, list[Callable[[], Any]]] = {}
    for name, contender in contenders.items():
        contender.step(iter(batches))
        steps[name] = exchanges.of_step(lambda model=contender.model: model(batches[0]).backward())
        bytes_sent[name] = sum(sent_bytes(exchanges, node).values())
    exchanged = [
        exchange_of_round(args, {name: contenders[name] for name in (ROW_WISE, HOT)}, steps, node)
        for _ in range(EXCHANGE_ROUNDS if node.world_size > 1 else 0)
    ]
    counts = {"copies": 1, "rounds": args.rounds, "block_seconds": BLOCK_SECONDS, "observed_steps": 0}
    compared = compare_steps(lambda one: (one.model, one.step), contenders, batches, **counts)
    told: dict[str, Any] = {
        "exponent": exponent,
        "rows": args.rows,
        "dim": args.dim,
        "lookups": args.batch_size * args.lookups,
        "sent_bytes": bytes_sent,
        "step_ms": {name: float(np.median(ms)) for name, ms in compared.step_ms.items()},
        "step_over_row_wise": {name: compared.ratio(name) for name in contenders},
    }
    if args.hot_rows:
        return told | {"hot_rows": args.hot_rows} | split_alone(args, law, contenders, batches[0], node)
    if node.rank:
        return told
    predicted = {"rows": 0.0, "memory_bytes": 0.0}
    for note in contenders[HOT].planner.report().notes:
        predicted |= note.figures if note.code == "hot_rows" else {}
    return {
        **told,
        "exchange_predicted_measured_ms": exchanged,
        "hot_rows": predicted["rows"],
        "memory_share": predicted["memory_bytes"] / rank_bytes(args, node),
        "sent_over_row_wise": {name: sent / bytes_sent[ROW_WISE] for name, sent in bytes_sent.items()},
        "predicted": predicted,
        "predicted_over_counted_bytes": predicted["after_bytes"] / bytes_sent[HOT] if predicted["rows"] else None,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=256, help="of a rank")
    parser.add_argument("--lookups", type=int, default=200, help="of a sample, by each table")
    parser.add_argument("--memory", type=float, default=0.05, help="most memory for hot rows, over a rank's tables")
    parser.add_argument("--hot-rows", type=int, default=0, help="of each table; 0: the planner chooses")
    parser.add_argument("--exponents", default="1.05,0.8,0", help="of the power laws; 0: all rows alike")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--measure-seconds", type=float, default=15, help="to measure collectives, a round")
    parser.add_argument("--pooled", action="store_true", help="count the bytes of pooled tables, up to --rows each")
    parser.add_argument("--record", type=Path, help="add lines to this file")
    args = parser.parse_args()
    quiet()
    dedup_on_cpu()
    node = cpu_rank()
    exchanges = Exchanges()
    for exponent in map(float, args.exponents.split(",")):
        told = (pooled if args.pooled else measured)(args, exponent, node, exchanges)
        if node.rank == 0:
            print(json.dumps(told, indent=1), flush=True)
            if args.record:
                append(args.record, provenance(node.device) | told)


if __name__ == "__main__":
    main()
