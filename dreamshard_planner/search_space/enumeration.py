# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's search space, with further options of some tables, and its estimates in a fraction of the time.

TorchRec's estimators read only the size of a shard, and the shards of one option have few sizes, estimated once each.
The estimates are TorchRec's to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import EnumeratedOption, by_table, counted, fqn_of, refused
from dreamshard_planner.search_space.sharding_types import KERNELS, is_known, serves
from dreamshard_planner.support.torch_state import collector_paused
from dreamshard_planner.torchrec_components import compat

TableKey = tuple[int, str]
"""``id`` of a table's module, and the table's name."""
Lengths = Callable[[ShardingOption], list[float]]
"""Returns the ``input_lengths`` of an option."""
SHARDS_AT_ONCE = 2**18
"""Tables times ranks enumerated at once; each takes some 2 KB."""


class OncePerSize(ShardEstimator):
    """Estimates each distinct shard size of an option once; equal shards share the resulting object.

    This holds for ``EmbeddingPerfEstimator`` and ``EmbeddingStorageEstimator`` themselves. Other estimators, and those
    whose hardware configuration overrides ``post_process_perfs``, which sees all shards, are called as they are.
    """

    def __init__(self, estimator: ShardEstimator) -> None:
        self._estimator = estimator

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """See ``torchrec.distributed.planner.types.ShardEstimator``; raises what the wrapped estimator raises."""
        result = compat.estimate_of_size_alone(self._estimator)
        if result is None:
            self._estimator.estimate(sharding_options, *args, **kwargs)
            return
        probes = [copy.copy(option) for option in sharding_options]
        for probe in probes:
            sizes = dict.fromkeys(tuple(shard.size) for shard, _ in counted(probe))
            probe.shards = [Shard([*size], [0] * len(size)) for size in sizes]
        compat.quick(self._estimator).estimate(probes, *args, **kwargs)
        for option, probe in zip(sharding_options, probes, strict=True):
            of_size = {tuple(shard.size): getattr(shard, result) for shard in probe.shards}
            for shard, _ in counted(option):
                setattr(shard, result, of_size[tuple(shard.size)])
            option.is_weighted = probe.is_weighted  # set by the perf estimator


class TrainedOrServed(ShardEstimator):
    """One estimator for trained tables, another for quantized ones; PlannerError if no one prices a kernel."""

    def __init__(self, trained: ShardEstimator, served: ShardEstimator) -> None:
        self._trained, self._served = trained, served

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """See ``torchrec.distributed.planner.types.ShardEstimator``; raises what the two raise."""
        known = [option for option in sharding_options if is_known(option.compute_kernel)]
        self._trained.estimate([one for one in known if not serves(one.compute_kernel)], *args, **kwargs)
        if quantized := [one for one in known if serves(one.compute_kernel)]:
            self._served.estimate(quantized, *args, **kwargs)
        for option in sharding_options:
            if is_known(option.compute_kernel):
                continue
            try:
                self._trained.estimate([option], *args, **kwargs)
            except (RuntimeError, ValueError) as error:
                why = f"TorchRec's estimator raised {type(error).__name__}, {str(error).rstrip('.')}"
                raise unpriced(option, why) from error


def unpriced(option: ShardingOption, why: str) -> PlannerError:
    """Make the error of an option whose kernel is unknown and has no price."""
    return refused(
        f"table {fqn_of(option)!r} is to use compute kernel {option.compute_kernel!r}, whose cost is unknown: {why}. "
        "Give the planner an enumerator with an estimator that sets its perf, or allow one of "
        f"{', '.join(KERNELS)} in the table's ParameterConstraints.compute_kernels."
    )


@contextmanager
def other_lengths(options: Sequence[ShardingOption], lengths: Lengths) -> Iterator[None]:
    """Let estimators see other ``input_lengths`` of some options."""
    held = [option.input_lengths for option in options]
    try:
        for option in options:
            option.input_lengths = lengths(option)
        yield
    finally:
        for option, own in zip(options, held, strict=True):
            option.input_lengths = own


class WithLengths(ShardEstimator):
    """An estimator that sees other ``input_lengths`` of some tables, by name."""

    def __init__(self, estimator: ShardEstimator, lengths: Mapping[str, list[float]]) -> None:
        self._estimator, self._lengths = estimator, lengths

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """See ``torchrec.distributed.planner.types.ShardEstimator``; raises what the other estimator raises."""
        with other_lengths(sharding_options, lambda option: self._lengths.get(option.name, option.input_lengths)):
            self._estimator.estimate(sharding_options, *args, **kwargs)


def torchrec_estimators(
    topology: Topology, constraints: dict[str, ParameterConstraints] | None = None
) -> list[ShardEstimator]:
    """Return ``EmbeddingEnumerator``'s perf and storage estimators, faster; quantized tables have inference perf."""
    perf, storage = compat.default_estimators(topology, constraints)
    served = type(perf)(topology=topology, constraints=constraints, is_inference=True)
    return [TrainedOrServed(OncePerSize(perf), OncePerSize(served)), OncePerSize(storage)]


def estimate_all(
    estimators: Iterable[ShardEstimator],
    sharding_options: list[ShardingOption],
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> None:
    """Let every estimator set its part of every shard, in place, for any TorchRec version."""
    arguments = compat.sharders_for_estimators(sharders)
    for estimator in estimators:
        estimator.estimate(sharding_options, **arguments)


def sharding_only(tables: Collection[TableKey], sharder: ModuleSharder[nn.Module]) -> ModuleSharder[nn.Module]:
    """Return a copy of a sharder that offers only some tables."""

    def shardable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
        offered = sharder.shardable_parameters(module)
        return {name: parameter for name, parameter in offered.items() if (id(module), name) in tables}

    some = copy.copy(sharder)
    vars(some)["shardable_parameters"] = shardable_parameters
    return some


class FastEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, with ``variants`` of its options, and with equal blocks of rows also on ranks of unequal
    memory.

    A table's options are sorted by sharding type and kernel, since TorchRec's order changes with Python's hash seed.
    ``lengths`` are by default those of the constraints.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        *,
        variants: Callable[[EnumeratedOption], Sequence[EnumeratedOption]] = lambda _: (),
        lengths: Lengths | None = None,
    ) -> None:
        super().__init__(topology, batch_size, constraints, estimator)
        # TorchRec would cut row_wise tables by the memory of each rank, and its lookup assumes equal blocks.
        self._device_memory_sizes = None
        self._estimators: list[ShardEstimator] = [OncePerSize(estimator) for estimator in self._estimators]
        self._variants, self._lengths, self._enumerating = variants, lengths, False

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """See ``torchrec.distributed.planner.types.Enumerator``."""
        tables = [*dict.fromkeys((id(table.owner.module), table.name) for table in shardable_tables(module, sharders))]
        at_once = max(1, SHARDS_AT_ONCE // self._world_size)
        options: list[ShardingOption] = []
        stored: list[ShardingOption] = []
        self._enumerating = True
        try:
            with collector_paused():
                # Some at a time, since TorchRec makes all their shards before equal ones are grouped.
                for first in range(0, len(tables), at_once):
                    some = frozenset(tables[first : first + at_once])
                    options += super().enumerate(module, [sharding_only(some, sharder) for sharder in sharders])
                    stored += self.last_stored_search_space or []
        except ValueError as error:
            if not compat.tells_of_buckets(error):
                raise
            raise refused(
                f"{error} Give the table's managed collision module a number of buckets that is a multiple of the "
                f"{self._world_size} ranks, such as buckets={self._world_size}."
            ) from error
        finally:
            self._enumerating = False
        self._last_stored_search_space, self._last_stored_sharders = stored, sharders
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """See ``torchrec.distributed.planner.types.Enumerator``."""
        if self._enumerating:
            # In place: ``enumerate`` copies and returns this list.
            sharding_options[:] = self._with_variants(sharding_options)
        if self._lengths is not None:
            for option in sharding_options:
                option.input_lengths = self._lengths(option)
        super().populate_estimates(sharding_options)

    def _with_variants(self, options: list[ShardingOption]) -> list[ShardingOption]:
        chosen: list[ShardingOption] = []
        for of_table in by_table(options).values():
            ways: list[ShardingOption] = []
            for option in map(EnumeratedOption.of, of_table):
                ways += [option, *self._variants(option)]
            chosen += sorted(ways, key=lambda way: (way.sharding_type, way.compute_kernel, -way.num_shards))
        return chosen
