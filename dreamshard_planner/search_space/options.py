# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sharding options, whose equal shards are kept once.

Large models on large clusters have millions of shards (options x ranks). TorchRec makes an object, two lists and an
estimate for each, and reads only their sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, islice, repeat
from operator import add
from typing import Any, Self

from torchrec.distributed.planner.types import Perf, PlannerError, PlannerErrorType, Shard, ShardingOption, Storage

from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, ShardingTypeSpec, is_known
from dreamshard_planner.workload.lookups import HotRows

_ATOMS = (str, int, type(None))
"""Immutable types, which need no copy."""


@dataclass(slots=True)
class AlikeShards:
    """Consecutive shards of one option with equal sizes and estimates."""

    first: Shard
    """First shard, with the estimates of all."""
    step: tuple[int, int]
    """Rows and columns from one to the next."""
    count: int = 1

    def offset(self, index: int) -> list[int]:
        """Return the first row and column of a shard."""
        row, column = self.first.offset
        return [row + index * self.step[0], column + index * self.step[1]]

    def all(self) -> list[Shard]:
        """Return each shard as an object of TorchRec's."""
        one = self.first
        return [Shard([*one.size], self.offset(index), one.storage, one.perf) for index in range(self.count)]


def _copied(one: Shard) -> Shard:
    return Shard([*one.size], [*one.offset], one.storage, one.perf, one.rank)


def alike(shards: Iterable[Shard]) -> list[AlikeShards]:
    """Group the shards of one option, without ranks."""
    runs: list[AlikeShards] = []
    for shard in shards:
        if runs:
            run, one = runs[-1], runs[-1].first
            if shard.size == one.size and shard.storage == one.storage and shard.perf == one.perf:
                if run.count == 1:
                    run.step = (shard.offset[0] - one.offset[0], shard.offset[1] - one.offset[1])
                if shard.offset == run.offset(run.count):
                    run.count += 1
                    continue
        runs.append(AlikeShards(shard, (0, 0)))
    return runs


class EnumeratedOption(ShardingOption):
    """TorchRec's option, with shards kept as :class:`AlikeShards` until each is asked for.

    Deep copies, of which TorchRec makes many, share tensor, module and estimates, which it never changes in place.
    """

    _runs: list[AlikeShards] | None
    _shards: list[Shard]

    @classmethod
    def of(cls, option: ShardingOption) -> Self:
        """Return ``option`` with its own attributes, not copied; shards without ranks are grouped."""
        result = cls.__new__(cls)
        result.__dict__.update(vars(option))
        if (shards := result.__dict__.pop("shards", None)) is not None:
            if all(shard.rank is None for shard in shards):
                result._runs = alike(shards)
            else:
                result.shards = shards
        return result

    @property
    def shards(self) -> list[Shard]:
        """All shards; from now on they may be changed one by one."""
        if self._runs is not None:
            self.shards = [*chain.from_iterable(run.all() for run in self._runs)]
        return self._shards

    @shards.setter
    def shards(self, shards: list[Shard]) -> None:
        self._runs, self._shards = None, shards

    @property
    def num_shards(self) -> int:
        return len(self._shards) if self._runs is None else sum(run.count for run in self._runs)

    @property
    def total_perf(self) -> float:
        """Sum over all shards one by one, equal to TorchRec's to the last bit."""
        return total_ms(perf_of(self))

    @property
    def total_storage(self) -> Storage:
        total = Storage(hbm=0, ddr=0, ssd=0)
        for shard, count in counted(self):
            one = shard.storage
            total += Storage(hbm=count * one.hbm, ddr=count * one.ddr, ssd=count * one.ssd)
        return total

    def __hash__(self) -> int:
        shards = tuple(
            (*run.first.size, *run.first.offset, run.first.storage, run.first.perf, run.first.rank, run.count)
            for run in runs_of(self)
        )
        return hash((self.fqn, self.sharding_type, self.compute_kernel, shards, self.cache_params))

    def __deepcopy__(self, memo: dict[int, Any] | None) -> EnumeratedOption:
        result = type(self).of(self)
        for name, value in vars(self).items():
            if name not in ("_tensor", "_module", "_shards", "_runs") and not isinstance(value, _ATOMS):
                setattr(result, name, copy.deepcopy(value, memo))
        if self._runs is None:
            result.shards = [_copied(shard) for shard in self._shards]
        else:
            result._runs = [AlikeShards(_copied(run.first), run.step, run.count) for run in self._runs]
        return result


class OwnOption(EnumeratedOption):
    """An option that TorchRec's enumerator does not offer."""


def is_torchrecs(option: ShardingOption) -> bool:
    """Return whether TorchRec's enumerator offers the option."""
    return not isinstance(option, OwnOption)


def runs_of(option: ShardingOption) -> list[AlikeShards]:
    """Return the option's shards, grouped if it keeps them so."""
    kept = option._runs if isinstance(option, EnumeratedOption) else None
    return [AlikeShards(shard, (0, 0)) for shard in option.shards] if kept is None else kept


def counted(option: ShardingOption) -> list[tuple[Shard, int]]:
    """Return the shards that hold estimates, and how many equal shards each stands for."""
    return [(run.first, run.count) for run in runs_of(option)]


def unestimated(option: ShardingOption) -> ShardingOption:
    """Return a copy without estimates."""
    option = copy.deepcopy(option)
    for shard, _ in counted(option):
        shard.perf = shard.storage = None
    return option


def places_of(option: ShardingOption) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return offset and size of each shard, as (row, column) and (rows, columns)."""
    places = []
    for run in runs_of(option):
        rows, columns = run.first.size
        for row, column in map(run.offset, range(run.count)):
            places.append(((row, column), (rows, columns)))
    return places


def ranks_of(option: ShardingOption) -> list[int | None]:
    """Return the rank of each shard."""
    return [run.first.rank for run in runs_of(option) for _ in range(run.count)]


def set_ranks(option: ShardingOption, ranks: Sequence[int | None] | None) -> None:
    """Set the ranks of all shards, which are kept one by one from now on; None to remove them."""
    for shard, rank in zip(option.shards, repeat(None) if ranks is None else ranks, strict=ranks is not None):
        shard.rank = rank


def perf_of(option: ShardingOption) -> list[Perf]:
    """Return the perf of each shard."""
    return [*chain.from_iterable(repeat(shard.perf, count) for shard, count in counted(option))]


def total_ms(perfs: Iterable[Perf]) -> float:
    """Return the sum of some shards, one by one: ``sum`` is more exact than TorchRec from Python 3.12 on."""
    return reduce(add, (perf.total for perf in perfs), 0)


def set_perf(option: ShardingOption, perf: Sequence[Perf]) -> None:
    """Set the perf of all shards; grouped shards share it."""
    left, kept = iter(perf), counted(option)
    perf_of = [[*islice(left, count)] for _, count in kept]
    if any(one is not of_run[0] for of_run in perf_of for one in of_run):  # equal sizes, different perf
        kept, perf_of = [(shard, 1) for shard in option.shards], [[one] for one in perf]
    for (shard, _), of_run in zip(kept, perf_of, strict=True):
        shard.perf = of_run[0]


refused = partial(PlannerError, error_type=PlannerErrorType.STRICT_CONSTRAINTS)
"""Makes the error of constraints, options or rules that leave no plan."""
lacks_room = partial(PlannerError, error_type=PlannerErrorType.INSUFFICIENT_STORAGE)
"""Makes the error of tables that do not fit."""
cannot_lie_so = partial(PlannerError, error_type=PlannerErrorType.PARTITION)
"""Makes the error of shards on ranks on which TorchRec does not run them."""


def tower_refused(fqn: str) -> PlannerError:
    """Make the error of a table of an embedding tower."""
    return refused(
        f"table {fqn!r} is in an embedding tower, whose tables TorchRec wants on one host: leave EmbeddingTowerSharder "
        "and EmbeddingTowerCollectionSharder out of the sharders, and its tables are sharded as all others are"
    )


def fqn_of(option: ShardingOption) -> str:
    """Return the fully qualified name of the table, without TorchRec's leading dot if the module is the model."""
    return option.fqn.removeprefix(".")


def type_of(option: ShardingOption) -> ShardingTypeSpec:
    """Return the row of the option's sharding type; PlannerError if it is unknown."""
    return spec_of(option.sharding_type, fqn_of(option))


def spec_of(sharding_type: str, fqn: str) -> ShardingTypeSpec:
    """Return the row of a sharding type; PlannerError, naming the table, if it is unknown."""
    if sharding_type not in SHARDING_TYPES:
        raise refused(f"table {fqn!r}: unknown sharding type {sharding_type!r}; known are {', '.join(SHARDING_TYPES)}")
    return SHARDING_TYPES[sharding_type]


def hot_rows_of(option: ShardingOption) -> HotRows | None:
    """Return the rows of the option's table that every rank holds; None without any."""
    return getattr(option, "hot_rows", None)


def with_hot_rows(option: ShardingOption, hot: HotRows | None) -> ShardingOption:
    """Return a copy with these hot rows and without estimates, which depend on them."""
    option = unestimated(option)
    option.hot_rows = hot
    return option


def by_table(options: Iterable[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """Group options by the fully qualified names of their tables, in the given order."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in options:
        tables.setdefault(fqn_of(option), []).append(option)
    return tables


def same_option(one: ShardingOption, other: ShardingOption) -> bool:
    """Return whether two options of one table are equal; options of an unknown kernel also differ by estimates."""
    one_way, other_way = (
        (option.sharding_type, option.compute_kernel, option.cache_load_factor, option.num_shards, hot_rows_of(option))
        for option in (one, other)
    )
    if one_way != other_way or is_known(one.compute_kernel):
        return one_way == other_way
    return [(shard.perf, shard.storage) for shard in one.shards] == [
        (shard.perf, shard.storage) for shard in other.shards
    ]
