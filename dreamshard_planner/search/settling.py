# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The same shards by cheaper kernels, where that is free: on ranks that are not the bottleneck a search is indifferent
between a table in device memory and one that is read over the link to the host, and a user is not.

Shapes: X parts laid down, M limits, D ranks.
"""

from __future__ import annotations

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Option, Sharding


def settled(cost: Cost, sharding: Sharding) -> Sharding:
    """Tables take the option of the same shards whose parts cost least alone, those that gain most first, as far as
    every rank keeps within its memory; the sharding as it was where that would cost more."""
    problem, new = cost.problem, sharding
    alone_P = cost.single_ms_P.tolist()

    def alone_ms(option: Option) -> float:
        return sum(alone_P[part] for part in option.parts)

    gains = []
    for table, (options, chosen) in enumerate(zip(problem.tables, sharding.options, strict=True)):
        now = options[chosen]
        alike = [index for index, option in enumerate(options) if _same_shards(option, now)]
        cheapest = chosen if len(alike) == 1 else min(alike, key=lambda index: alone_ms(options[index]))
        if cheapest != chosen and alone_ms(options[cheapest]) < alone_ms(now):
            gains.append((alone_ms(options[cheapest]) - alone_ms(now), table, cheapest))
    used_DM = problem.taken(*problem.laid(sharding))
    for _, table, option in sorted(gains):
        changed = new.changed(table, option, new.positions[table])
        with_it_DM = (
            used_DM - problem.taken(*problem.laid(new, [table])) + problem.taken(*problem.laid(changed, [table]))
        )
        if bool(((with_it_DM <= problem.limits_DM) | (with_it_DM <= used_DM)).all()):
            new, used_DM = changed, with_it_DM
    return new if new is sharding or cost.overall_ms(new) <= cost.overall_ms(sharding) else sharding


def _same_shards(one: Option, other: Option) -> bool:
    return (
        one.sharding_type == other.sharding_type
        and one.pinned == other.pinned
        and [unit.span for unit in one.units] == [unit.span for unit in other.units]
    )
