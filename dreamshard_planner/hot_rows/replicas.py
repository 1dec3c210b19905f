# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Replicas of hot rows on one rank, trained by the rule of their tables.

The sharded table stays whole. A hot row keeps its place there, which no lookup reads: each step copies this rank's part
of the updated replicas to it, and replicas are read from there after a load. So checkpoints know nothing of hot rows.

Shapes: K hot rows of all tables, R rows of a shard, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import data_type_to_dtype

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.search_space.replica_rules import FUSED_DEFAULTS, ReplicaRule, replica_rule, why_not_replicas
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.lookups import HotRows

_ALIVE: WeakSet[HotReplicas] = WeakSet()


@dataclass(frozen=True)
class _Copy:
    """A tensor of the hot rows of one table, and of the same rows in this rank's shard."""

    replica: Tensor
    """[K, ...]."""
    shard: Tensor
    """[R, ...]: the kernel's own memory."""
    mine: Tensor
    """Hot rows that lie in this rank's shard."""
    place: Tensor
    """Their rows in the shard."""

    def write(self) -> None:
        """Copy this rank's hot rows into its shard."""
        self.shard[self.place] = self.replica[self.mine]

    def read(self, group: dist.ProcessGroup) -> None:
        """Copy the hot rows from the shards of all ranks."""
        self.replica.zero_()
        self.replica[self.mine] = self.shard[self.place]
        dist.all_reduce(self.replica, group=group)

    def same(self) -> Tensor:
        """Return whether this rank's shard has its hot rows, bit by bit, as a tensor."""
        bits = torch.int32 if self.replica.itemsize == 4 else torch.int16
        return (self.replica[self.mine].view(bits) == self.shard[self.place].view(bits)).all()


@dataclass(frozen=True)
class _HotTable:
    """Hot rows of one table on this rank."""

    kernel: SplitTableBatchedEmbeddingBagsCodegen
    rule: ReplicaRule
    eps: float
    weight: _Copy
    state: _Copy | None

    @property
    def copies(self) -> list[_Copy]:
        return [self.weight] if self.state is None else [self.weight, self.state]

    def update(self, gradient_KD: Tensor) -> None:
        """One step by the gradient of all ranks."""
        weight_KD = self.weight.replica
        computed_KD = weight_KD.float()  # float32 weights themselves
        state = None if self.state is None else self.state.replica
        self.rule.update(computed_KD, gradient_KD, state, self.kernel.get_learning_rate(), self.eps)
        if computed_KD is not weight_KD:
            weight_KD.copy_(computed_KD)
        for copy in self.copies:
            copy.write()


def why_not_hot_rows(arguments: Mapping[str, Any], dtype: torch.dtype, device: str) -> str | None:
    """Return why hot rows could not be trained as the other rows of a table are; None if they can.

    Args:
        arguments: of the table's fused kernel, with its ``"optimizer"``.
        dtype: of the weights.
        device: type of device.
    """
    if reason := why_not_replicas(arguments, torch.float32):
        return reason
    if dtype not in (torch.float32, torch.float16):
        return f"its weights are {str(dtype).removeprefix('torch.')}"
    if dtype == torch.float16 and device != "cpu" and arguments.get("stochastic_rounding", True):
        return "its float16 weights are rounded at random; set stochastic_rounding=False"
    return None


class HotReplicas:
    """Replicas of all hot rows of a sharded module.

    Args:
        module: sharded; all tables with hot rows are row_wise in fused kernels.
        hot: hot rows by table.

    Raises:
        DreamShardError: a table's optimizer, kernel or process group does not allow hot rows; names the table.
    """

    def __init__(self, module: ShardedEmbeddingCollection, env: ShardingEnv, hot: Mapping[str, HotRows]) -> None:
        if type(env) is not ShardingEnv or env.process_group is None:
            raise DreamShardError(f"hot rows need one process group of all ranks, got {type(env).__name__}.")
        self._group = env.process_group
        found = {table.name: (table, kernel, place) for table, kernel, place in _fused_tables(module)}
        if missing := sorted(hot.keys() - found.keys()):
            raise DreamShardError(f"hot rows need compute kernel 'fused', which {', '.join(missing)} lack.")
        self.tables = [_hot_table(*found[name], rows) for name, rows in hot.items()]
        self._sizes = [len(rows) for rows in hot.values()]
        device = self.tables[0].weight.shard.device
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._stale = True
        self._changed = (
            f"The shards of {', '.join(hot)} or their optimizer states changed, but their hot rows did not. Load with "
            "load_across_plans, or call load_state_dict on the model last, after all else is loaded."
        )
        self.in_state_dict = compat.sharded_values(module, hot)
        """Values of the tables in the module's state dict."""
        _ALIVE.add(self)

    def __len__(self) -> int:
        return sum(self._sizes)

    @property
    def device(self) -> torch.device:
        return self._anchor.device

    def read_later(self) -> None:
        """Read the replicas from the shards before the next forward. Call it on all ranks."""
        self._stale = True

    def rows(self) -> Tensor:
        """Return the hot rows of all tables as they are now, float32 [K, D]. The backward updates the replicas."""
        with torch.no_grad():
            for copy in (copy for table in self.tables for copy in table.copies):
                if self._stale:
                    copy.read(self._group)
                else:  # nobody changed the shards alone; the device checks it without waiting
                    torch._assert_async(copy.same(), self._changed)
        self._stale = False
        rows_KD: Tensor = _Rows.apply(self._anchor, self)  # type: ignore[no-untyped-call]
        return rows_KD

    def reduce_and_update(self, gradient_KD: Tensor) -> None:
        """Add up the gradients of all ranks beside the rest of the backward, then update the replicas."""
        gradient_KD = gradient_KD.to(torch.float32, copy=True)
        work = dist.all_reduce(gradient_KD, group=self._group, async_op=True)
        compat.after_backward(partial(self._update, work, gradient_KD))

    @torch.no_grad()
    def _update(self, work: dist.Work, gradient_KD: Tensor) -> None:
        work.wait()
        if get_gradient_division():  # as TorchRec's exchanges do with gradients of sharded tables
            gradient_KD.div_(self._group.size())
        for table, part_KD in zip(self.tables, gradient_KD.split(self._sizes), strict=True):
            table.update(part_KD)


class _Rows(torch.autograd.Function):
    """The hot rows; their gradient goes to the replicas."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, replicas: HotReplicas) -> Tensor:
        ctx.replicas = replicas
        return torch.cat([table.weight.replica.float() for table in replicas.tables])

    @staticmethod
    def backward(ctx: Any, gradient_KD: Tensor) -> tuple[None, None]:
        ctx.replicas.reduce_and_update(gradient_KD)
        return None, None


def read_after_load(loaded: Iterable[object]) -> None:
    """Read hot rows before the next forward if values of a state dict were loaded in place. Call it on all ranks."""
    values = {id(value) for value in loaded}
    for replicas in _ALIVE:
        if any(id(value) in values for value in replicas.in_state_dict):
            replicas.read_later()


def _fused_tables(
    module: ShardedEmbeddingCollection,
) -> Iterator[tuple[ShardedEmbeddingTable, BatchedFusedEmbedding, int]]:
    """Yield the tables of a module that lie in fused kernels, with the kernel and their number in it."""
    for _, lookup in compat.lookups_of(module):
        for kernel in lookup.modules():
            if type(kernel) is BatchedFusedEmbedding:
                config: GroupedEmbeddingConfig = kernel.config
                for number, table in enumerate(config.embedding_tables):
                    yield table, kernel, number


def _hot_table(table: ShardedEmbeddingTable, kernel: BatchedFusedEmbedding, number: int, hot: HotRows) -> _HotTable:
    arguments, tbe = kernel.config.fused_params or {}, kernel.emb_module
    # Behind autograd, as the kernel: a forward may come before the update by the gradient of an earlier one.
    weight_RD = tbe.split_embedding_weights()[number].data
    rule = replica_rule(arguments)
    reason = why_not_hot_rows(arguments, data_type_to_dtype(table.data_type), weight_RD.device.type)
    if rule is None or reason:
        raise DreamShardError(f"table {table.name!r} cannot have hot rows: {reason}.")
    first = 0 if table.local_metadata is None else table.local_metadata.shard_offsets[0]
    mine = ((hot.ids >= first) & (hot.ids < first + len(weight_RD))).nonzero().squeeze(1)
    place = (hot.ids[mine] - first).to(weight_RD.device)
    mine = mine.to(weight_RD.device)
    weight = _Copy(weight_RD.new_empty(len(hot), weight_RD.shape[1]), weight_RD, mine, place)
    state = None
    if rule.state is not None:
        shard = tbe.split_optimizer_states()[number][0].data.view(len(weight_RD), -1)
        replica = rule.state(weight.replica.float())
        state = _Copy(replica, shard.squeeze(1) if replica.dim() == 1 else shard, mine, place)
    return _HotTable(tbe, rule, float(arguments.get("eps", FUSED_DEFAULTS["eps"])), weight, state)
