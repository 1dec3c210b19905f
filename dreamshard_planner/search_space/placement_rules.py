# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Rules of the user's on where tables lie, whatever that costs: together, apart, on certain ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlacementRules:
    """Rules that every plan keeps; for ``DreamShardPlanner(placement_rules=...)``.

    Tables are named as in TorchRec's constraints, by their own names (then all tables of that name are meant), or by
    fully qualified ones.

    Args:
        together: groups of tables, each group whole on one rank. Groups that share a table are one.
        apart: groups of tables of which no rank holds two shards, be they of two tables or of one.
        on_ranks: ranks that may hold shards of a table.

    Raises:
        ValueError: a group has fewer than two tables, tables are both together and apart, or a rank is no rank.

    Example::

        PlacementRules(together=[("user", "item")], apart=[("hot_1", "hot_2")], on_ranks={"private": [0, 1]})
    """

    together: Sequence[Sequence[str]] = ()
    apart: Sequence[Sequence[str]] = ()
    on_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "together", _merged(_groups("together", self.together)))
        object.__setattr__(self, "apart", _groups("apart", self.apart))
        object.__setattr__(self, "on_ranks", {name: _ranks(name, ranks) for name, ranks in self.on_ranks.items()})
        for group in self.together:
            for other in self.apart:
                both = sorted(set(group) & set(other))
                if len(both) > 1:
                    raise ValueError(f"tables {both} are to be together and apart")

    @property
    def names(self) -> list[str]:
        """All tables that some rule names, each once."""
        return list(
            dict.fromkeys([name for group in (*self.together, *self.apart) for name in group] + [*self.on_ranks])
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the same for the same rules in another order."""
        return {
            "together": sorted(map(list, self.together)),
            "apart": sorted(map(list, self.apart)),
            "on_ranks": {name: list(ranks) for name, ranks in sorted(self.on_ranks.items())},
        }


def _groups(what: str, groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    checked = []
    for group in groups:
        if isinstance(group, str) or not all(isinstance(name, str) for name in group) or len(set(group)) < 2:
            raise ValueError(f"{what} takes groups of two tables or more, such as [('a', 'b')]; got {group!r}")
        checked.append(tuple(sorted(set(group))))
    return tuple(checked)


def _merged(groups: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    merged: list[set[str]] = []
    for group in map(set, groups):
        for other in [other for other in merged if other & group]:
            merged.remove(other)
            group |= other
        merged.append(group)
    return tuple(tuple(sorted(group)) for group in merged)


def _ranks(name: str, ranks: Sequence[int]) -> tuple[int, ...]:
    ranks = [ranks] if isinstance(ranks, int) else list(ranks)
    if not ranks or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
        raise ValueError(f"on_ranks of table {name!r} must be ranks from 0 on, at least one; got {ranks!r}")
    return tuple(sorted(set(ranks)))
