# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Contests in which tables may be split: TorchRec's own options of real modules, the same for all placers.

A contest is one of :func:`contests.draw_contests`, with the sharding types and the ``min_partition`` that all
placers have. In every second one, one or two tables are *hot*: read so often, or so wide, that each alone exceeds what
a rank should carry.

Shapes: S tables, F features, P parts, M limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from common.linear_cost import LinearCost
from common.tasks import feature_names, meta_collection
from common.whole_tables import problem_of
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.enumeration import estimate_all, torchrec_estimators
from dreamshard_planner.search_space.options import EnumeratedOption
from dreamshard_planner.search_space.sharding_types import DP, TW
from dreamshard_planner.search_space.usable_options import own_slices, usable_options
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import Table, workloads_of
from placements.contests import draw_contests, least_capacity_bytes

HEAT = (1.5, 4.0)
"""Cost of a hot table, by the linear cost, over the mean of the ranks."""
MOST_OF_ALL = 0.75
"""Share of the whole cost that hot tables have at most."""
HOT_RANKS = 4
"""At least: of two ranks, a table that dear is nearly all that there is to place. Two hot tables take more."""
MAX_POOLING_FACTOR = 300.0
"""Per feature: what the network was measured with."""
WIDTHS = (64, 128, 192, 256)
"""Dims that hot tables may be widened to, where lookups alone would leave the measured range."""
FEWEST_TABLES = 10
ROOMY = 4.0
"""Memory of a rank in a task that is not tight, over the least in which whole tables fit."""


@dataclass(frozen=True)
class SplitContest:
    """Tables, ranks and memory, and what all placers may do with them."""

    name: str
    pool: str
    tables: tuple[Table, ...]
    hot: tuple[str, ...]
    """Names of the hot tables; none in an ordinary contest."""
    ranks: int
    tight: bool
    batch_size: int
    """Samples that a kernel of a whole table sees: of all ranks."""
    min_partition: int
    sharding_types: tuple[str, ...]


def heat(
    tables: Sequence[Table],
    ranks: int,
    batch_size: int,
    min_dim: int,
    linear: LinearCost,
    network: ComputeCost,
    generator: torch.Generator,
) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """Tables of which one or two are hot, within what the network was measured with, and their names.

    Where nothing within that range is hot among so many tables, there are fewer of them.

    Args:
        tables: of the contest.
        ranks: that carry them.
        batch_size: of the kernels.
        min_dim: hot tables are at least so wide: narrower ones can't be split.
        linear: what tables cost.
        network: knows its range.
        generator: of which tables, and how hot.
    """

    def random() -> float:
        return float(torch.rand(1, generator=generator))

    count = 2 if ranks > HOT_RANKS and random() < 0.5 else 1
    most = min(HEAT[1], MOST_OF_ALL * ranks / count)
    wanted = [HEAT[0] + (most - HEAT[0]) * random() for _ in range(count)]
    tables = [tables[index] for index in torch.randperm(len(tables), generator=generator).tolist()]
    cost_ms = linear.shard_ms(feature_matrix(workloads_of(tables, batch_size))).tolist()
    hottest = [_read_more(table, WIDTHS[-1], _most(table)) for table in tables]
    hottest_ms = linear.shard_ms(feature_matrix(workloads_of(hottest, batch_size))).tolist()
    rest_share = 1 - sum(wanted) / ranks
    kept = len(tables)
    while kept >= FEWEST_TABLES:
        for first in range(kept - count + 1):
            chosen = range(first, first + count)
            rest_ms = sum(cost_ms[:kept]) - sum(cost_ms[i] for i in chosen)
            targets = [times * rest_ms / rest_share / ranks for times in wanted]
            if any(hottest_ms[i] < ms for i, ms in zip(chosen, targets, strict=True)):
                continue
            hotter = [
                _at_cost(tables[i], ms, batch_size, min_dim, linear, network)
                for i, ms in zip(chosen, targets, strict=True)
            ]
            if None not in hotter:
                drawn = [*tables[:first], *hotter, *tables[first + count : kept]]
                order = torch.randperm(kept, generator=generator).tolist()
                return tuple(drawn[i] for i in order), tuple(table.name for table in hotter)
        kept = int(0.9 * kept)
    raise RuntimeError(f"no {count} of {len(tables)} tables can be made {wanted} times the mean of {ranks} ranks")


def _most(table: Table) -> float:
    """Return the factor by which lookups may grow within :data:`MAX_POOLING_FACTOR`."""
    return MAX_POOLING_FACTOR / max(1e-3, *(feature.pooling_factor for feature in table.features))


def _read_more(table: Table, dim: int, share: float) -> Table:
    """Another width, and so many times the lookups, as if so many batches were read at once: histogram and distinct
    rows belong to the same lookups as before."""
    features = [
        replace(f, pooling_factor=f.pooling_factor * share, batch_size=max(1, round(f.batch_size / share)))
        for f in table.features
    ]
    return replace(table, dim=dim, features=tuple(features))


def _at_cost(
    table: Table, target_ms: float, batch_size: int, min_dim: int, linear: LinearCost, network: ComputeCost
) -> Table | None:
    """The table with so many lookups, and where need be so wide, that it costs that much; None beyond what the network
    was measured with."""

    def features_of(dim: int, share: float) -> Tensor:
        return feature_matrix(workloads_of([_read_more(table, dim, share)], batch_size))

    def too_dear(dim: int, share: float) -> bool:
        return float(linear.shard_ms(features_of(dim, share))) > target_ms

    for dim in [d for d in (table.dim, *WIDTHS) if d >= max(table.dim, min_dim)]:
        low, high = _most(table) * 2.0**-10, _most(table)
        if too_dear(dim, low) or not too_dear(dim, high):
            continue
        for _ in range(16):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if too_dear(dim, middle) else (middle, high)
        features_SF = features_of(dim, low)
        if not network.notes(features_SF, network.encode(features_SF).double()):
            return _read_more(table, dim, low)
    return None


class SplitTask:
    """A contest as TorchRec sees it: module, sharder, topology, constraints; and the sharding problem that it poses.

    TorchRec has one width per table: the least from ``min_partition`` on that divides its dim (``allowed``). Our
    planner has two, four, ... of these slices as well (``read``).

    Args:
        contest: what to build.
        checkpoint: whose network and links rate shardings.
        device: compute device of the topology.
        capacity_bytes: of a rank; by default what the contest's tightness says.
    """

    def __init__(
        self, contest: SplitContest, checkpoint: Checkpoint, device: str = "cpu", capacity_bytes: int | None = None
    ) -> None:
        self.contest, self._device = contest, device
        self.local_batch_size = contest.batch_size // contest.ranks
        if self.local_batch_size * contest.ranks != contest.batch_size:
            raise ValueError(f"a batch of {contest.batch_size} can't be shared evenly by {contest.ranks} ranks")
        self.module = nn.ModuleDict({"sparse": _module(contest.tables)})
        self.sharders = [EmbeddingBagCollectionSharder()]
        self.constraints = self.constraints_with(contest.sharding_types, known=True)
        features = {
            name: feature
            for table in contest.tables
            for name, feature in zip(feature_names(table), table.features, strict=True)
        }
        self.statistics = TableStatistics(features)
        self.topology = self._topology(1 << 50)
        self.reader = OptionReader(self.constraints, self.statistics, self.sharders)
        options = self._enumerate(self.constraints)
        self.storages = {_key(option): [shard.storage for shard in option.shards] for option in options}
        allowed = usable_options(options, "cpu")
        self.topology = self._topology(capacity_bytes or self._capacity_bytes(allowed))
        self.context = PlanRater(self.topology, self.reader, checkpoint)
        self.allowed: ReadProblem = self.context.read(allowed)
        self.read: ReadProblem = self.context.read([*allowed, *self._halvings(allowed)])
        self.cost = self.context.cost(self.read)

    def _enumerate(self, constraints: dict[str, ParameterConstraints]) -> list[ShardingOption]:
        enumerator = EmbeddingEnumerator(self.topology, self.local_batch_size, constraints)
        return enumerator.enumerate(self.module, self.sharders)

    def _halvings(self, allowed: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Slices that are two, four, ... of TorchRec's side by side, as our planner has them."""
        asked = {name for name, constraint in self.constraints.items() if constraint.min_partition}
        halvings = [halved for option in allowed for halved in own_slices(EnumeratedOption.of(option), asked)]
        estimate_all(torchrec_estimators(self.topology, self.constraints), halvings, self.sharders)
        return halvings

    def _topology(self, capacity_bytes: int) -> Topology:
        ranks = self.contest.ranks
        return Topology(ranks, self._device, ddr_cap=capacity_bytes, hbm_cap=capacity_bytes, local_world_size=ranks)

    def _capacity_bytes(self, options: Sequence[ShardingOption]) -> int:
        """Room for whole tables, as TorchRec counts it: just, or four times that."""
        contest = self.contest
        whole = [self.storages[_key(option)][0] for option in options if option.sharding_type == TW]
        sizes_SM = torch.tensor([[storage.ddr + storage.hbm] for storage in whole])
        problem = problem_of(workloads_of(contest.tables, contest.batch_size), contest.ranks)
        least = least_capacity_bytes(replace(problem, needs_PM=sizes_SM))
        return int(least * (1.0 if contest.tight else ROOMY))

    def constraints_with(self, sharding_types: Sequence[str], known: bool) -> dict[str, ParameterConstraints]:
        """The contest's constraints with these sharding types; pooling factors as they are, or TorchRec's default."""
        kernels = ["fused", "dense"] if DP in sharding_types else ["fused"]
        return {
            table.name: ParameterConstraints(
                sharding_types=list(sharding_types),
                compute_kernels=kernels,
                min_partition=self.contest.min_partition,
                pooling_factors=[f.pooling_factor if known else 1.0 for f in table.features],
            )
            for table in self.contest.tables
        }

    def sharding(self, plan: ShardingPlan) -> Sharding:
        """Read a TorchRec plan as a sharding of the problem: types, shards and ranks as TorchRec would run them."""
        (tables,) = plan.plan.values()
        options, positions = [], []
        for choices in self.read.options:
            chosen, spec = tables[choices[0].name], tables[choices[0].name].sharding_spec
            sizes = None if spec is None else [list(shard.shard_sizes) for shard in spec.shards]
            # One column slice is the whole table.
            kind = TW if sizes is not None and len(sizes) == 1 else chosen.sharding_type
            (option,) = (
                index
                for index, choice in enumerate(choices)
                if (choice.sharding_type, choice.compute_kernel) == (kind, chosen.compute_kernel)
                and (sizes is None or [list(shard.size) for shard in choice.shards] == sizes)
            )
            options.append(option)
            positions.append((0,) if chosen.sharding_type == DP else tuple(chosen.ranks))
        return Sharding(tuple(options), tuple(positions))


class SameStorage(EmbeddingEnumerator):
    """TorchRec's enumerator with the storage of true pooling factors, so that all placers have the same memory to
    fill."""

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        *,
        storages: dict[tuple[str, str, str], list[Storage]],
    ) -> None:
        super().__init__(topology, batch_size, constraints)
        self._storages = storages

    def enumerate(self, *args, **kwargs) -> list[ShardingOption]:  # noqa: ANN002, ANN003
        options = super().enumerate(*args, **kwargs)
        for option in options:
            for shard, storage in zip(option.shards, self._storages[_key(option)], strict=True):
                shard.storage = storage
        return options


def _key(option: ShardingOption) -> tuple[str, str, str]:
    return option.name, option.sharding_type, option.compute_kernel


def _module(tables: Sequence[Table]) -> EmbeddingBagCollection:
    """On meta, with the optimizer that the tables name."""
    module = meta_collection(tables)
    optimizers: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "rowwise_adagrad": RowWiseAdagrad}
    for table in tables:
        parameter = module.embedding_bags[table.name].weight
        apply_optimizer_in_backward(optimizers[table.optimizer], [parameter], {"lr": 0.01})
    return module


def draw_split_contests(
    count: int,
    seed: int,
    batch_size: int,
    sharding_types: Sequence[str],
    linear: LinearCost,
    network: ComputeCost,
) -> list[SplitContest]:
    """Every second contest is hot, such that each pool is met hot and ordinary, in loose and in tight memory."""
    contests = []
    for index, base in enumerate(draw_contests(count, seed, batch_size)):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        min_partition = (8, 16)[int(torch.randint(2, (1,), generator=generator))]
        ranks, tables, hot = base.task.problem.num_ranks, base.tables, ()
        if (index + index // 6) % 2:
            ranks = max(ranks, HOT_RANKS)
            tables, hot = heat(tables, ranks, batch_size, 2 * min_partition, linear, network, generator)
        contests.append(
            SplitContest(
                base.name, base.pool, tables, hot, ranks, base.tight, batch_size, min_partition, tuple(sharding_types)
            )
        )
    return contests
