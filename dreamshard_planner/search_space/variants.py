# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Further slices and caches of TorchRec's options, and the options that are allowed and run.

TorchRec enumerates one width of column slices per table (``min_partition``, by default 128 columns) and one cache size
(a fifth of the rows) for tables in host memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.search_space.modules import TableModule
from dreamshard_planner.search_space.options import (
    EnumeratedOption,
    OwnOption,
    by_table,
    counted,
    fqn_of,
    places_of,
    ranks_of,
    refused,
    runs_of,
    type_of,
    unestimated,
)
from dreamshard_planner.search_space.sharding_types import (
    CACHING,
    MISSED_ROWS,
    MOST_CUDA_COLUMNS,
    SHARDING_TYPES,
    CutFacts,
    first_reason,
    is_known,
    kernel_of,
    serves,
)
from dreamshard_planner.support.formatting import first_of, ranks_in_words
from dreamshard_planner.workload.tables import CACHE_LOAD_FACTOR

LEAST_HALF = 16
"""Fewest columns of a half: reading a row costs at least a sector or two of memory."""
COLUMNS_APART = 4
"""FBGEMM's kernels want widths that are multiples of this."""
HEAVY = 0.5
"""Share of a rank's even load from which a table is worth halving."""
CACHE_SHARES = (0.01, 0.05, 0.1, 0.4, 0.7)
"""Cached shares of a table's rows, beside TorchRec's fifth."""


class Halves(OwnOption):
    """Two halves of a table that TorchRec's default width leaves whole."""


def own_slices(option: EnumeratedOption, asked: Collection[str] = ()) -> list[OwnOption]:
    """Return the option with 2, 4, ... slices merged into one, or a single slice halved unless its table is in
    ``asked`` (constraints with a ``min_partition``). All slices stay equal.

    Each slice repeats every lookup, so two slices are often enough. Options of an EmbeddingCollection, whose slices
    must have one width, and of unknown kernels, which an estimator prices as enumerated, get none.
    """
    spec = type_of(option)
    fixed = spec.span != "rank" or isinstance(option.module[1], EmbeddingCollection | nn.EmbeddingBag)
    if fixed or not spec.splits_columns or not is_known(option.compute_kernel):
        return []
    widths = [size[1] for _, size in places_of(option)]
    if len(widths) == 1:
        half, rest = divmod(widths[0], 2)
        even = half % COLUMNS_APART == rest == 0 and half >= LEAST_HALF
        return [_sliced(Halves, option, [half, half])] if even and option.name not in asked else []
    merged = (2**power for power in range(1, len(widths).bit_length() - 1))
    return [
        _sliced(OwnOption, option, np.reshape(widths, (-1, count)).sum(1).tolist())
        for count in merged
        if len(widths) % count == 0
    ]


def _sliced(kind: type[OwnOption], option: EnumeratedOption, widths: Sequence[int]) -> OwnOption:
    result, rows = kind.of(option), runs_of(option)[0].first.size[0]
    starts = accumulate(widths[:-1], initial=0)
    result.shards = [Shard([rows, width], [0, start]) for width, start in zip(widths, starts, strict=True)]
    return result


def without_idle_halves(
    options: list[ShardingOption], alone_ms: Callable[[list[ShardingOption]], list[float]], ranks: int
) -> list[ShardingOption]:
    """Return the options of all tables without halves of light ones, which level nothing between the ranks and take
    time to search."""
    if not any(isinstance(option, Halves) for option in options):
        return options
    least_ms: dict[str, float] = {}
    for option, ms in zip(options, alone_ms(options), strict=True):
        least_ms[fqn_of(option)] = min(ms, least_ms.get(fqn_of(option), math.inf))
    # Twice as many equal tables as ranks are at the limit, but for rounding.
    heavy_ms = (1 + 1e-9) * HEAVY * sum(least_ms.values()) / ranks
    return [option for option in options if not isinstance(option, Halves) or least_ms[fqn_of(option)] > heavy_ms]


LoadFactor = Callable[[ShardingOption], float | None]
"""Returns the load factor that a constraint or the module's ``fused_params`` ask for, or None."""


def other_sizes(options: Iterable[ShardingOption], given: LoadFactor) -> list[ShardingOption]:
    """Return copies of cached options at other cache sizes, without estimates; none for given sizes."""
    return [
        unestimated(_with_share(option, share))
        for option in options
        if option.compute_kernel == CACHING and given(option) is None
        for share in CACHE_SHARES
    ]


def all_sized(plan: list[ShardingOption], given: LoadFactor) -> list[ShardingOption]:
    """Return the plan with a cache size for all cached tables if some have one: TorchRec gives a kernel the mean
    size that its tables name, also for tables that name none."""
    cached = [option for option in plan if option.compute_kernel == CACHING]
    unsized = {fqn_of(option) for option in cached if given(option) is None}
    if len(unsized) in (0, len(cached)):
        return plan
    return [_with_share(option, CACHE_LOAD_FACTOR) if fqn_of(option) in unsized else option for option in plan]


def _with_share(option: ShardingOption, share: float) -> OwnOption:
    result = OwnOption.of(option)
    result.cache_params = replace(option.cache_params or CacheParams(), load_factor=share)
    return result


def _fitting(
    options: Sequence[ShardingOption],
    fits: Callable[[ShardingOption], bool],
    why: Callable[[Sequence[ShardingOption]], str],
) -> list[ShardingOption]:
    """Return the options that fit; PlannerError tells why a table with none has none."""
    kept = [option for option in options if fits(option)]
    left = by_table(kept)
    for fqn, of_table in by_table(options).items():
        if fqn not in left:
            raise refused(f"table {fqn!r} {why(of_table)}")
    return kept


def as_constrained(
    search_space: Sequence[ShardingOption], constraints: Mapping[str, ParameterConstraints]
) -> list[ShardingOption]:
    """Return the options whose types the constraints allow, which a user's own enumerator does not know;
    PlannerError if a table has none."""

    def fits(option: ShardingOption) -> bool:
        types = getattr(constraints.get(option.name), "sharding_types", None)
        spec = SHARDING_TYPES.get(option.sharding_type)
        return not types or option.sharding_type in types or (spec is not None and spec.runs_as in types)

    def why(options: Sequence[ShardingOption]) -> str:
        offered, allowed = {option.sharding_type for option in options}, constraints[options[0].name].sharding_types
        return (
            f"is offered only {', '.join(sorted(offered))} by the enumerator, and DreamShardPlanner may shard it "
            f"{', '.join(sorted(allowed or ()))}: give the planner the enumerator's constraints as well"
        )

    return _fitting(search_space, fits, why)


def usable_options(search_space: Sequence[ShardingOption], compute_device: str) -> list[ShardingOption]:
    """Return the options that run; of options that run alike, one. PlannerError if a table has none, or only slices
    of another width than its EmbeddingCollection's."""

    def why(options: Sequence[ShardingOption]) -> str:
        reasons = sorted({f"{option.sharding_type}: {broken_cut(option, compute_device)}" for option in options})
        return (
            f"may only be sharded in ways that TorchRec cannot run ({'; '.join(reasons)}): allow another type in its "
            "ParameterConstraints.sharding_types, or another kernel in compute_kernels."
        )

    running = _fitting(search_space, lambda option: broken_cut(option, compute_device) is None, why)
    return _one_width_per_collection(_without_lone_parts(running))


def broken_cut(option: ShardingOption, compute_device: str) -> str | None:
    """Return why the option is never proposed though its type may be, or None if it may be as well."""
    reasons, sizes = type_of(option).broken_cuts, [shard.size for shard, _ in counted(option)]
    kernel = option.compute_kernel
    facts = CutFacts(
        kernel,
        compute_device,
        is_bag=isinstance(option.module[1], nn.EmbeddingBag),
        has_slices=sizes[0][1] < option.tensor.shape[1],
        lacks_rows=not all(size[0] for size in sizes),
        is_too_wide=compute_device == "cuda"
        and any(size[1] > MOST_CUDA_COLUMNS for size in sizes)
        and is_known(kernel)
        and not serves(kernel),
        misses_rows=MISSED_ROWS in reasons and misses_rows(option),
    )
    return first_reason(reasons, facts)


def misses_rows(option: ShardingOption) -> bool:
    """Return whether a block starts or ends elsewhere than TorchRec's lookup assumes: at equal blocks, rounded up.

    The lookups of served and of virtual tables know their blocks. Shards that do not add up to the table are
    placeholders of an enumerator, which TorchRec does not run.
    """
    kernel, runs = kernel_of(option.compute_kernel), runs_of(option)
    rows, columns = option.tensor.shape
    held = sum(math.prod(run.first.size) * run.count for run in runs)
    if kernel.serves or kernel.virtual or held != rows * columns:
        return False
    blocks = max(1, option.num_shards * runs[0].first.size[1] // columns)
    most, index = -(-rows // blocks), 0
    for run in runs:
        for which in {0, run.count - 1}:
            start = min((index + which) % blocks * most, rows)
            if (run.offset(which)[0], run.first.size[0]) != (start, min(most, rows - start)):
                return True
        index += run.count
    return False


def _without_lone_parts(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Leave out options of one slice or block, which are whole tables, unless they share an exchange with others."""
    whole = {(option.fqn, option.compute_kernel) for option in options if type_of(option).is_whole}
    kept, lone = list[ShardingOption](), list[ShardingOption]()
    for option in options:
        is_part = option.num_shards == 1 and not type_of(option).is_whole
        (lone if is_part and (option.fqn, option.compute_kernel) in whole else kept).append(option)
    shared = {(option.path, option.sharding_type) for option in kept}
    return kept + [  # last, so that ties go to whole tables
        option
        for option in lone
        if (option.path, option.sharding_type) in shared and not isinstance(option.module[1], EmbeddingCollection)
    ]


def _one_width_per_collection(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Keep one width of slices per EmbeddingCollection: with most weights of tables that must be split, else of all."""

    def width(option: ShardingOption) -> int | None:
        in_slices = type_of(option).splits_columns and isinstance(option.module[1], EmbeddingCollection)
        return counted(option)[0][0].size[1] if in_slices else None

    free = {option.fqn for option in options if not type_of(option).splits_columns}
    weights: dict[str, Counter[tuple[bool, int]]] = {}
    for option in options:
        if (columns := width(option)) is not None:
            weights.setdefault(option.path, Counter())[option.fqn not in free, columns] += option.tensor.numel()
    common = {
        path: max(of_width, key=lambda one: (one[0], of_width[one], -one[1]))[1] for path, of_width in weights.items()
    }
    return _fitting(
        options,
        lambda option: (
            width(option) is None or {shard.size[1] for shard, _ in counted(option)} == {common[option.path]}
        ),
        lambda options: (
            f"may only be sharded column_wise, in slices of another width than the {common[options[0].path]} of other "
            "tables of its EmbeddingCollection, which TorchRec can't mix: give them the same min_partition, or allow "
            "another sharding type."
        ),
    )


def mixed_exchanges(
    plan: Sequence[ShardingOption], sharders: Sequence[ModuleSharder[nn.Module]], world_size: int
) -> list[str]:
    """Return an error for each exchange in which the ranks of a plan would send different types, unless it is
    quantized.

    A rank sends the common type of its tables, float32 without tables, and expects the same of all others.
    """
    sharder_of = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    exchanged: dict[tuple[str, str], list[tuple[ShardingOption, torch.dtype]]] = {}
    for option in plan:
        path, module = option.module
        owner = TableModule(path, module, sharder_of.get(sharder_name(type(module))))
        alike = type_of(option).is_replicated or serves(option.compute_kernel)
        if not alike and not owner.exchange_codecs:
            output = owner.output_type(option.output_dtype)
            exchanged.setdefault((option.path, option.sharding_type), []).append((option, output))
    texts = []
    for (path, kind), tables in exchanged.items():
        types: dict[int | None, torch.dtype] = {}
        for option, output in tables:
            for rank in {*ranks_of(option)}:
                types[rank] = torch.promote_types(types.get(rank, output), output)
        sent: dict[torch.dtype, list[int]] = {}
        for rank in range(world_size):
            sent.setdefault(types.get(rank, torch.float32), []).append(rank)
        if len(sent) == 1:
            continue
        named = first_of([f"{fqn_of(option)!r} {_name(output)}" for option, output in tables])
        by_ranks = ", ".join(f"{_name(output)} by {ranks_in_words(ranks)}" for output, ranks in sent.items())
        texts.append(
            f"TorchRec cannot exchange the {kind} outputs of module {path!r}, since ranks would send different types: "
            f"{by_ranks} (float32 by ranks without such a table). Its tables put out {named}: leave output_dtype out "
            "of their constraints and sharder, or allow them row_wise alone."
        )
    return texts


def _name(output: torch.dtype) -> str:
    return str(output).removeprefix("torch.")
