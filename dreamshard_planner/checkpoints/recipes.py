# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Recipes: what is learned, how, and how plans are made with it. Checkpoints, training and planner ask nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dreamshard_planner.support.registry import Registry

if TYPE_CHECKING:  # the command line asks for names alone, and has no time for torch
    from dreamshard_planner.cost.fit import LabelledSets
    from dreamshard_planner.cost.network import AnyCostNetwork
    from dreamshard_planner.policy.network import AnyPolicy
    from dreamshard_planner.policy.reinforce import ReinforceConfig
    from dreamshard_planner.search.local_search import SearchConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A cost network, a policy network, how both are trained, and the search that plans with them.

    Networks are modules of torch, made from a configuration, which they keep as ``config``: a dataclass of whole
    numbers from 1, its defaults those of a training. Cost networks are an
    :class:`~dreamshard_planner.cost.network.AnyCostNetwork`, policies an
    :class:`~dreamshard_planner.policy.network.AnyPolicy`. A recipe becomes known, to checkpoints and planners as well,
    by ``RECIPES[recipe.name] = recipe``.
    """

    name: str
    cost: Callable[[Any], AnyCostNetwork]
    cost_config: type[Any]
    policy: Callable[..., AnyPolicy]
    """Of its configuration and a ``seed``."""
    policy_config: type[Any]
    fit: Callable[[LabelledSets, Any, Callable[[int, float], None]], AnyCostNetwork]
    """``(train, fit_config, on_step)`` -> a cost network fitted to these sets; calls ``on_step`` with number and loss
    of each step."""
    fit_from: Callable[[LabelledSets, Any, Callable[[int, float], None], AnyCostNetwork], AnyCostNetwork] | None = None
    """The same with a network to start from, if the recipe can."""
    fit_config: Any
    """Its ``steps(sets)`` says how many steps fitting so many training sets takes."""
    quick_fit_config: Any
    """To try the flow in seconds."""
    reinforce: ReinforceConfig
    search: SearchConfig | None = None
    """Of moves and swaps; None for one policy roll-out and nothing else."""
    sharding_types: tuple[str, ...] | None = None
    """That a planner uses where it is not told; None for all."""
    cost_over_prior: Callable[[Any], AnyCostNetwork] | None = None
    """What ``fit`` makes of sets that have a ``prior``, if that is another network: of the same configuration, with a
    state named ``prior``."""

    def with_updates(self, updates: int | None) -> Recipe:
        """The same with another number of policy updates; None: as it is."""
        return self if updates is None else replace(self, reinforce=replace(self.reinforce, updates=updates))

    def quick(self) -> Recipe:
        """The same, made in seconds and of no use for planning."""
        reinforce = replace(self.reinforce, updates=5, tasks_per_update=2, episodes_per_task=4)
        return replace(self, fit_config=self.quick_fit_config, reinforce=reinforce)


RECIPES: Registry[Recipe] = Registry(
    default="dreamshard_planner.checkpoints.default_recipe:DEFAULT",
    paper="dreamshard_planner.research.published:PAPER",
    autoshard="dreamshard_planner.research.published:AUTOSHARD",
)
"""``default`` is ours, ``paper`` is DreamShard as published, ``autoshard`` the recurrent policy of AutoShard on our
cost network, for comparison."""
