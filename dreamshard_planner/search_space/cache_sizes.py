# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Caches of other sizes for tables in host memory: TorchRec gives all the same, a fifth of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import CacheParams

from dreamshard_planner.search_space.alike_shards import OwnOption
from dreamshard_planner.search_space.kernels import CACHING, in_host_memory
from dreamshard_planner.search_space.options import fqn_of
from dreamshard_planner.workload.tables import CACHE_LOAD_FACTOR

SHARES = (0.01, 0.05, 0.1, 0.4, 0.7)
"""Shares of a table's rows, beside TorchRec's fifth."""


def other_sizes(options: Iterable[ShardingOption], given: Callable[[ShardingOption], float | None]) -> list[OwnOption]:
    """Return each option of a cache whose size no user gave, at other sizes and without estimates. Towers stay as they
    are.

    Args:
        options: of an enumerator.
        given: the load factor that a constraint or the module's ``fused_params`` ask for.
    """
    sized = [
        _with_share(option, share)
        for option in options
        if option.compute_kernel == CACHING and not option.dependency and given(option) is None
        for share in SHARES
    ]
    for option in sized:
        option.forget_estimates()
    return sized


def all_sized(plan: list[ShardingOption], given: Callable[[ShardingOption], float | None]) -> list[ShardingOption]:
    """A plan that names TorchRec's fifth as well, where it names the size of some cache: TorchRec gives a kernel the
    mean of the sizes that its tables name, also for those that name none.

    Args:
        plan: one option for every table; itself where nothing changes.
        given: see :func:`other_sizes`.
    """
    cached = [option for option in plan if option.compute_kernel == CACHING]
    unsized = {fqn_of(option) for option in cached if given(option) is None}
    if len(unsized) in (0, len(cached)):
        return plan
    return [_with_share(option, CACHE_LOAD_FACTOR) if fqn_of(option) in unsized else option for option in plan]


def uses_host_memory(plan: Iterable[ShardingOption]) -> bool:
    """Whether some table lies there, cached or not."""
    return any(in_host_memory(option.compute_kernel) for option in plan)


def _with_share(option: ShardingOption, share: float) -> OwnOption:
    result = OwnOption.of(option)
    result.cache_params = replace(option.cache_params or CacheParams(), load_factor=share)
    return result
