# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Types of outputs that ranks exchange. TorchRec sets them table by table, and takes all ranks of an exchange to send
one: a rank sends the common type of its tables, float32 where it has none, and expects the same of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.search_space.kernels import serves
from dreamshard_planner.search_space.modules import exchange_codecs, fused_params, output_type
from dreamshard_planner.search_space.options import fqn_of, ranks_of, type_of
from dreamshard_planner.support.formatting import first_of, ranks_in_words


def mixed_exchanges(
    plan: Sequence[ShardingOption], sharders: Sequence[ModuleSharder[nn.Module]], world_size: int
) -> list[str]:
    """Return a text for every sharding type of a module of whose outputs ranks would send different types.

    Args:
        plan: with ranks.
        sharders: of its modules; what they quantize before it is sent is of one type.
        world_size: ranks of the plan.
    """
    exchanged: dict[tuple[str, str], list[tuple[ShardingOption, torch.dtype]]] = {}
    for option, output in _outputs(plan, sharders):
        exchanged.setdefault((option.path, option.sharding_type), []).append((option, output))
    texts = []
    for (path, kind), tables in exchanged.items():
        if len(sent := _sent(tables, world_size)) == 1:
            continue
        named = first_of([f"{fqn_of(option)!r} {_name(output)}" for option, output in tables])
        by_ranks = ", ".join(f"{_name(output)} by {ranks_in_words(ranks)}" for output, ranks in sent.items())
        texts.append(
            f"TorchRec cannot exchange the {kind} outputs of module {path!r}, since ranks would send different types: "
            f"{by_ranks} (float32 by ranks without such a table). Its tables put out {named}: leave output_dtype out "
            "of their constraints and sharder, or allow them row_wise alone."
        )
    return texts


def _outputs(
    options: Iterable[ShardingOption], sharders: Sequence[ModuleSharder[nn.Module]]
) -> Iterator[tuple[ShardingOption, torch.dtype]]:
    """The type of what each table puts out, where ranks exchange that as it is."""
    sharder_of = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    for option in options:
        sharder = sharder_of.get(sharder_name(type(option.module[1])))
        quantizes = bool(exchange_codecs(sharder))
        # Towers exchange within their host.
        if type_of(option).is_replicated or serves(option.compute_kernel) or option.dependency or quantizes:
            continue
        yield option, output_type(fused_params(option.module[1], sharder, option.output_dtype))


def _sent(tables: Sequence[tuple[ShardingOption, torch.dtype]], world_size: int) -> dict[torch.dtype, list[int]]:
    """The ranks that send outputs of each type."""
    types: dict[int, torch.dtype] = {}
    for option, output in tables:
        for rank in {rank for rank in ranks_of(option) if rank is not None}:
            types[rank] = torch.promote_types(types.get(rank, output), output)
    sent: dict[torch.dtype, list[int]] = {}
    for rank in range(world_size):
        sent.setdefault(types.get(rank, torch.float32), []).append(rank)
    return sent


def _name(output: torch.dtype) -> str:
    return str(output).removeprefix("torch.")
