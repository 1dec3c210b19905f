# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's sharding options read as workloads and sharding problems.

All that depends on how TorchRec describes a table stands in this package: tables themselves in ``table_reader.py``,
the parts that shards become in ``parts.py``, the collectives that carry their outputs in ``exchanges.py``, the ranks
that they take together in ``units.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import get_ec_index_dedup
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.cost.collectives import Collective, Collectives
from dreamshard_planner.cost.problem import Option, Problem
from dreamshard_planner.problem.exchanges import Links, exchanges_of, wire_bytes
from dreamshard_planner.problem.fused_groups import group_key
from dreamshard_planner.problem.parts import Parts
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.problem.table_reader import TableReader
from dreamshard_planner.problem.units import check_hosts, num_ranks, pinned_positions, units_of
from dreamshard_planner.search_space.input_checks import available_bytes, check_needs
from dreamshard_planner.search_space.kernels import serves
from dreamshard_planner.search_space.legality import known_kernels
from dreamshard_planner.search_space.options import by_table, fqn_of, type_of
from dreamshard_planner.search_space.rank_constraints import LegalRanks
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import Table, Workload, workloads_of


class OptionReader(TableReader):
    """Reads sharding options with the user's constraints and statistics beside them.

    Args:
        constraints: TorchRec's constraints by table name.
        statistics: workload statistics by feature name; they take precedence over pooling factors.
        sharders: consulted for a fused optimizer that is set through ``fused_params``, and for quantized communication.
        legal: where tables may lie; anywhere by default.
        optimizers_attached: to the replicas of data-parallel tables.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        statistics: TableStatistics | None = None,
        sharders: Iterable[ModuleSharder[nn.Module]] = (),
        legal: LegalRanks | None = None,
        optimizers_attached: bool = False,
    ) -> None:
        super().__init__(constraints, statistics, sharders, optimizers_attached)
        self._legal = legal
        # Estimator, proposer, partitioner and perf model ask for the same tables one after the other.
        self._workloads: dict[tuple[Table, int], Workload] = {}

    def read(
        self, options: Sequence[ShardingOption], topology: Topology, links: Links, with_storage: bool = True
    ) -> ReadProblem:
        """The sharding problem of some options, of which each table must take one.

        Args:
            options: of all tables, in any order; a table's options keep theirs.
            topology: what the storage reservation left.
            links: models of its exchanges.
            with_storage: False before storage is estimated: no memory binds then.

        Raises:
            PlannerError: for options that can't be placed: of an unknown kernel, or pinned where TorchRec would not run
                them.
        """
        for option in options:
            known_kernels(fqn_of(option), [option.compute_kernel])
        tables = by_table(options)
        flat = [option for choices in tables.values() for option in choices]
        groups: dict[Any, int] = {}
        parts = Parts()
        read: dict[str, list[Option]] = {fqn: [] for fqn in tables}
        for option, whole in zip(flat, self.workloads(flat, topology), strict=True):
            table = self.table(option, topology)
            key = group_key(option, table, self._config(option), self._fused_params(option))
            group = groups.setdefault(key, len(groups))
            element_bytes = wire_bytes(option, self._sharder(option))
            exchanges = partial(exchanges_of, option, topology=topology, links=links, element_bytes=element_bytes)
            rows = parts.add(option, table, whole, group, exchanges, with_storage)
            choice = Option(units_of(option, rows, topology), option.sharding_type, option.compute_kernel)
            read[fqn_of(option)].append(replace(choice, pinned=pinned_positions(option, choice)))
        check_hosts(flat, topology)
        if with_storage:
            check_needs(tables.values())
        needs_PM, limits_DM, num_rules = parts.storage_PM(topology, with_storage), available_bytes(topology), 0
        if with_storage and self._legal is not None:
            need_PR, room_DR = self._legal.limits(parts.fqns)
            needs_PM, limits_DM = torch.cat([needs_PM, need_PR], 1), torch.cat([limits_DM, room_DR], 1)
            num_rules = need_PR.shape[1]
        spare = [] if parts.columns else [Collective("none", "world", links.all_to_all, links.all_to_all)]
        problem = Problem(
            num_ranks=topology.world_size,
            tables=tuple(tuple(choices) for choices in read.values()),
            names=tuple(tables),
            features_PF=feature_matrix(parts.workloads),
            group_P=torch.tensor(parts.groups, dtype=torch.int64),
            num_groups=max(1, len(groups)),
            needs_PM=needs_PM,
            limits_DM=limits_DM,
            bytes_PC=parts.bytes_PC(),
            collectives=Collectives([*parts.columns, *spare], topology.intra_group_size, links.all_to_all),
            num_rules=num_rules,
        )
        return ReadProblem(
            problem,
            options=tuple(tuple(choices) for choices in tables.values()),
            shard_P=tuple(parts.shards),
            workload_P=tuple(parts.workloads),
            dense_elements_P=torch.tensor(parts.dense_elements, dtype=torch.float64),
            dense_passes_P=torch.tensor(parts.dense_passes, dtype=torch.float64),
            ssd_bytes_P=torch.tensor(parts.ssd_bytes, dtype=torch.float64),
            synced_bytes_P=torch.tensor(parts.synced_bytes, dtype=torch.float64),
        )

    def workloads(self, options: Sequence[ShardingOption], topology: Topology) -> list[Workload]:
        """What each option's *whole* table asks for, at the batch that its kernels see: the local batch of
        data-parallel ranks, one batch of quantized tables, which all ranks serve together, the batch of all ranks
        elsewhere. With index dedup, each rank's batch asks for a row once.
        """
        tables = [self.table(option, topology) for option in options]
        ranks = [
            1 if serves(option.compute_kernel) else num_ranks(type_of(option).batch, topology) for option in options
        ]
        sizes = [option.batch_size * count for option, count in zip(options, ranks, strict=True)]
        workloads = self._whole(list(zip(tables, sizes, strict=True)))
        deduped = [index for index, option in enumerate(options) if self._dedups(option)]
        of_ranks = self._whole([(tables[index], options[index].batch_size) for index in deduped])
        for index, of_rank in zip(deduped, of_ranks, strict=True):
            workloads[index] = workloads[index].deduped(of_rank, ranks[index])
        return workloads

    def _whole(self, keys: Sequence[tuple[Table, int]]) -> list[Workload]:
        """Workloads of tables at batch sizes."""
        new: dict[int, list[Table]] = {}
        for table, batch_size in dict.fromkeys(keys):
            if (table, batch_size) not in self._workloads:
                new.setdefault(batch_size, []).append(table)
        for batch_size, tables in new.items():
            for table, workload in zip(tables, workloads_of(tables, batch_size), strict=True):
                self._workloads[table, batch_size] = workload
        return [self._workloads[key] for key in keys]

    def _dedups(self, option: ShardingOption) -> bool:
        """Whether TorchRec sends a rank's repeated ids of a sequence table once, as its sharder, or a global, asks."""
        sharder = self._sharder(option)
        asks = getattr(sharder, "_use_index_dedup", None)
        return asks is not None and (asks or get_ec_index_dedup())
