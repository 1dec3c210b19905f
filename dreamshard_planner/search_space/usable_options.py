# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which of an enumerator's options are searched: those that constraints allow and that run, each once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.search_space.kernels import is_known, kernel_of, serves
from dreamshard_planner.search_space.options import by_table, counted, fqn_of, is_torchrecs, refused, runs_of, type_of
from dreamshard_planner.search_space.sharding_types import (
    MISSED_ROWS,
    MOST_CUDA_COLUMNS,
    SHARDING_TYPES,
    CutFacts,
    first_reason,
)
from dreamshard_planner.support.formatting import first_of


def as_constrained(
    search_space: Sequence[ShardingOption], constraints: Mapping[str, ParameterConstraints]
) -> list[ShardingOption]:
    """The options whose sharding types the constraints allow: a user's own enumerator knows neither these constraints
    nor what exact training leaves out.

    Raises:
        PlannerError: a table has none.
    """
    types: dict[str, Collection[str]] = {}
    for name, constraint in constraints.items():
        if constraint.sharding_types:
            also = [kind for kind, spec in SHARDING_TYPES.items() if spec.runs_as in constraint.sharding_types]
            types[name] = {*constraint.sharding_types, *also}
    kept = [
        option for option in search_space if option.sharding_type in types.get(option.name, (option.sharding_type,))
    ]
    left = by_table(kept)
    for fqn, options in by_table(search_space).items():
        if fqn not in left:
            offered = sorted({option.sharding_type for option in options})
            raise refused(
                f"the enumerator offers table {fqn!r} only {', '.join(offered)}, and DreamShardPlanner may shard it "
                f"{', '.join(sorted(constraints[options[0].name].sharding_types))}: give the planner the enumerator's "
                "constraints as well"
            )
    return kept


def usable_options(search_space: Sequence[ShardingOption], compute_device: str) -> list[ShardingOption]:
    """The options that run, and of several that run alike only one.

    Raises:
        PlannerError: where a table has none, or column widths that one EmbeddingCollection can't mix.
    """
    usable: dict[str, list[ShardingOption]] = {}
    for fqn, options in by_table(search_space).items():
        runs = [option for option in options if broken_cut(option, compute_device) is None]
        if not runs:
            why = "; ".join(sorted({f"{o.sharding_type}: {broken_cut(o, compute_device)}" for o in options}))
            raise refused(
                f"table {fqn!r} may only be sharded in ways that TorchRec cannot run ({why}): allow another type in "
                "its ParameterConstraints.sharding_types, or another kernel in compute_kernels."
            )
        usable[fqn] = runs
    return _one_width_per_collection(_without_lone_parts(usable))


def never_run(search_space: Sequence[ShardingOption], compute_device: str) -> tuple[str, ...]:
    """What TorchRec's own planner might choose and cannot run, in words."""
    tables: dict[tuple[str, str], list[str]] = {}
    for option in filter(is_torchrecs, search_space):
        if reason := broken_cut(option, compute_device):
            tables.setdefault((option.sharding_type, reason), []).append(fqn_of(option))
    return tuple(
        f"{kind} is left out for {first_of(list(dict.fromkeys(names)), 3)}: {reason}; TorchRec's own planner may "
        "choose it, and the plan torchrec, of the options that run, does not"
        for (kind, reason), names in tables.items()
    )


def broken_cut(option: ShardingOption, compute_device: str) -> str | None:
    """Why the option is never proposed, though its type may be; None where it may be as well."""
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
    """Whether some block starts or ends elsewhere than TorchRec's lookup assumes: at multiples of the rows over the
    blocks, rounded up. The lookups of served and of virtual tables know where each block lies. Shards that do not add
    up to the table are placeholders of an enumerator whose user replaces them: TorchRec runs no such shards."""
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


def _without_lone_parts(tables: dict[str, list[ShardingOption]]) -> dict[str, list[ShardingOption]]:
    """The options without those of one slice or block where no table of the module may be in several: that is the whole
    table in a kernel and an exchange of its own. Beside others of that type it shares theirs, unless these would have
    to be as wide, as in an EmbeddingCollection."""

    def is_alone(option: ShardingOption, whole: Collection[str]) -> bool:
        return not type_of(option).is_whole and option.num_shards == 1 and option.compute_kernel in whole

    def joins(option: ShardingOption) -> bool:
        one_width = isinstance(option.module[1], EmbeddingCollection)
        return (option.path, option.sharding_type) in shared and not one_width

    whole = {
        fqn: {option.compute_kernel for option in options if type_of(option).is_whole}
        for fqn, options in tables.items()
    }
    shared = {
        (option.path, option.sharding_type)
        for fqn, options in tables.items()
        for option in options
        if not is_alone(option, whole[fqn])
    }
    # Those that join others last, so that ties go to whole tables.
    return {
        fqn: [one for one in options if not is_alone(one, whole[fqn])]
        + [one for one in options if is_alone(one, whole[fqn]) and joins(one)]
        for fqn, options in tables.items()
    }


def _one_width_per_collection(tables: dict[str, list[ShardingOption]]) -> list[ShardingOption]:
    """The options without column slices of a second width in one EmbeddingCollection, which TorchRec cannot mix. The
    width that stays is the one with most weights among tables that can only be split by columns, else among all."""
    widths: dict[str, Counter[int]] = {}
    forced: dict[str, Counter[int]] = {}
    for options in tables.values():
        only = all(type_of(option).splits_columns for option in options)
        for option in options:
            if type_of(option).splits_columns and isinstance(option.module[1], EmbeddingCollection):
                width = counted(option)[0][0].size[1]
                for counter in (widths, forced) if only else (widths,):
                    counter.setdefault(option.path, Counter())[width] += option.tensor.numel()
    common = {path: _common(forced.get(path, counter)) for path, counter in widths.items()}
    kept = []
    for fqn, options in tables.items():
        fitting = [
            option
            for option in options
            if not type_of(option).splits_columns
            or option.path not in common
            or {shard.size[1] for shard, _ in counted(option)} == {common[option.path]}
        ]
        if not fitting:
            raise refused(
                f"table {fqn!r} may only be sharded column_wise, in slices of another width than "
                f"the {common[options[0].path]} of other tables of its EmbeddingCollection, which TorchRec "
                "can't mix: give them the same min_partition, or allow another sharding type."
            )
        kept += fitting
    return kept


def _common(widths: Counter[int]) -> int:
    return max(widths, key=lambda width: (widths[width], -width))
