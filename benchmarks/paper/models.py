# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Everything that is learned from the measured placements of the paper's experiment, made once and kept.

Shapes: N placements, D devices, X sets, S shards, R representation channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.linear_cost import LinearCost
from common.whole_tables import rolled_out
from dreamshard_planner.checkpoints.choice import prior_policy
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig, FitConfig, fit_cost_network
from dreamshard_planner.cost.problem import ComputeCost
from dreamshard_planner.measure.kernels import Arena
from paper.networks import PaperCostNetwork, PaperFit, PaperPolicy, RecurrentPolicy
from paper.placement_policy import AnyPolicy, played
from paper.placement_reinforce import ReinforceConfig, train_policy
from paper.training import (
    Half,
    Scale,
    Setting,
    Trained,
    cost_of,
    kept,
    labelled_placements,
    train_on_measured_rewards,
    train_published,
)
from placements.contests import Contest
from placements.placers import searched


@dataclass(frozen=True)
class Model:
    """A cost network and a policy; one greedy roll-out, or with our search on top."""

    compute: ComputeCost
    policy: AnyPolicy | None
    """None for the policy that ships, which no setting trained."""
    searches: bool = False

    @torch.no_grad()
    def __call__(self, task: Contest) -> Tensor | None:
        """Device of each table, [S]; None at a dead end."""
        cost = cost_of(task, self.compute)
        drafted = rolled_out(prior_policy(), cost) if self.policy is None else played(self.policy, cost)
        return searched(cost, drafted) if self.searches else drafted


class WithoutCosts(PaperPolicy):
    """The published policy, to which a device is the sum of its tables alone."""

    def logits(self, channels_XDO: Tensor, legal_XD: Tensor, load_XDR: Tensor, shard_XR: Tensor) -> Tensor:
        """As published, with costs of zero."""
        return super().logits(torch.zeros_like(channels_XDO), legal_XD, load_XDR, shard_XR)


FITS: dict[str, dict[str, Any]] = {
    "published": {},
    "squared milliseconds": {"loss": "raw"},
    "relative errors": {"loss": "relative"},
    "placements composed of measured sets": {"composed": True},
    "composed, relative": {"loss": "relative", "composed": True},
    "three more features": {"more_features": ("distinct_rows", "log2_distinct_rows", "log2_lookups")},
    "mean over tables": {"over_tables": "mean"},
    "maximum over tables": {"over_tables": "amax"},
    "sum over devices": {"over_devices": "sum"},
    "mean over devices": {"over_devices": "mean"},
}
"""Ways to fit the published network to the same placements: its arguments, those of the fit, and whether placements are
composed of random measured sets."""
LOOKS = (20, 50, 100)
"""Updates on measured rewards after which the policy is kept."""
LONGER = 5
"""Times the published episodes, where a policy is trained for longer."""
MEASURED_REWARDS = "measured_rewards"


class Models:
    """All networks, by setting, seed and kind; trained when first asked for, then read from ``folder``."""

    def __init__(
        self, folder: Path, half: Half, scale: Scale, home: Setting, arena: Arena, tick: Callable[[], None]
    ) -> None:
        self.folder, self.half, self.scale, self.home, self.arena, self._tick = folder, half, scale, home, arena, tick
        self._tasks = lru_cache(maxsize=None)(lambda setting: half.tasks(setting, scale.train_tasks))
        self.published = lru_cache(maxsize=None)(self._published)
        self.model = lru_cache(maxsize=None)(self._model)

    def _published(self, setting: Setting, seed: int, iterations: int) -> Trained:
        measured = None if seed < self.scale.measured_seeds else self.published(setting, 0, iterations)
        folder, tasks = self._of(setting, seed) / f"published-{iterations}", self._tasks(setting)
        return train_published(self.scale, iterations, seed, self.half, tasks, folder, self.arena, self._tick, measured)

    def _of(self, setting: Setting, seed: int) -> Path:
        return self.folder / f"{setting}-{seed}"

    def is_measured(self, kind: str, setting: Setting, seed: int) -> bool:
        """True if all that this kind learns from is measured."""
        if kind.startswith(MEASURED_REWARDS):
            return (self._of(setting, seed) / f"{MEASURED_REWARDS}-{self.looks[-1]}.safetensors").exists()
        iterations = self._iterations(kind == "converged" or "@" in kind)
        measured = seed if seed < self.scale.measured_seeds else 0
        return (self._of(setting, measured) / f"published-{iterations}" / "placements.json").exists()

    def _model(self, kind: str, setting: Setting, seed: int) -> Model:
        """By kind: see :meth:`kinds`; ``published@30`` is of the first 30 placements of the converged training."""
        name, _, count = kind.partition("@")
        if name == MEASURED_REWARDS:
            return self._measured_rewards(setting, seed)[int(count)]
        if name == "published" and count:
            network = self.fitted("published", setting, seed, int(count))
            return Model(network, self._policy("paper", network, setting, seed, f"published-of-{count}"))
        if name in ("default", "default_policy", "default_cost"):
            network = self.ours(setting, seed, int(count or 0))
            if name == "default_cost":
                return Model(network, self._policy("paper", network, setting, seed, "paper-on-default"))
            return Model(network, None, name == "default")
        trained = self.published(setting, seed, self._iterations(name == "converged"))
        if name in ("published", "converged", "published_search"):
            return Model(trained.network, trained.policy, name == "published_search")
        made = {"autoshard": "recurrent", "without_costs": "without_costs", "longer_policy": "longer"}[name]
        return Model(trained.network, self._policy(made, trained.network, setting, seed, f"{made}-on-published"))

    def _iterations(self, converged: object) -> int:
        return self.scale.converged if converged else self.scale.iterations

    def kinds(self, setting: Setting, seed: int) -> tuple[str, ...]:
        """Return the models that are trained in a setting; more at home."""
        kinds = ("published", "autoshard", "published_search", "default_policy", "default")
        if setting == self.home or seed < self.scale.converged_seeds:
            kinds += ("converged",)
        if setting != self.home or seed >= self.scale.ablation_seeds:
            return kinds
        kinds += ("default_cost", "without_costs", "longer_policy")
        kinds += tuple(f"{MEASURED_REWARDS}@{look}" for look in self.looks)
        return kinds + tuple(f"{name}@{count}" for count in self.scale.prefixes for name in ("published", "default"))

    def seeds(self, setting: Setting, seeds: Sequence[int]) -> Sequence[int]:
        """Return the seeds that are trained in a setting."""
        return seeds if setting == self.home else seeds[: self.scale.away_seeds]

    @cached_property
    def looks(self) -> tuple[int, ...]:
        """Updates on measured rewards at which the policy is kept."""
        updates = self.scale.iterations * self.scale.policy_updates
        return tuple(sorted({max(1, updates * look // max(LOOKS)) for look in LOOKS}))

    def fitted(self, fit: str, setting: Setting, seed: int, count: int | None = None) -> PaperCostNetwork:
        """The published network, fitted in one of the ways of :data:`FITS` to the placements of the training as
        published, or to the first ``count`` of the converged one."""
        ways, updates = dict(FITS[fit]), self.scale.iterations * self.scale.fit_updates
        composed, loss = ways.pop("composed", False), ways.pop("loss", "mean")
        path = self._of(setting, seed) / f"fit-{fit.replace(' ', '-')}-{count or 'all'}.safetensors"

        def make(network: PaperCostNetwork) -> None:
            sets, index_ND = self._measured(setting, seed, count)
            fit = PaperFit(setting.devices, updates, self.half.features_SF, seed, network, loss)
            fit.descend(sets, updates, None if composed else index_ND)

        return kept(path, PaperCostNetwork(seed, **ways), make).requires_grad_(False)

    def ours(self, setting: Setting, seed: int, count: int = 0) -> CostNetwork:
        """Our cost network, fitted to the same."""
        network, config = CostNetwork(CostNetworkConfig(), seed), FitConfig(epochs=self.scale.epochs, seed=seed)

        def make(network: CostNetwork) -> None:
            fitted = fit_cost_network(self.sets(setting, seed, count), network.config, config)
            network.load_state_dict(fitted.state_dict())

        kept(self._of(setting, seed) / f"default-{count or 'all'}.safetensors", network, make)
        return network.requires_grad_(False)

    def linear(self, setting: Setting, seed: int) -> LinearCost:
        """The additive cost, fitted to the same."""
        return LinearCost.fit(self.sets(setting, seed))

    def sets(self, setting: Setting, seed: int, count: int = 0) -> LabelledSets:
        """Measured sets of the training as published, or of the first ``count`` placements of the converged one; none
        is empty."""
        sets, _ = self._measured(setting, seed, count)
        return sets.select(torch.arange(len(sets) - 1))

    def _measured(self, setting: Setting, seed: int, count: int | None) -> tuple[LabelledSets, Tensor]:
        trained = self.published(setting, seed, self._iterations(count))
        return labelled_placements(self.half, trained.placements[: count or None], trained.dataset)

    def _policy(self, made: str, compute: ComputeCost, setting: Setting, seed: int, name: str) -> AnyPolicy:
        """A policy trained on the estimated MDP of ``compute``, for as many episodes as published, or for longer."""
        updates = self.scale.iterations * self.scale.policy_updates * (LONGER if made == "longer" else 1)
        config = ReinforceConfig(updates=updates, seed=seed)
        policy = {"without_costs": WithoutCosts, "recurrent": RecurrentPolicy}.get(made, PaperPolicy)(seed)

        def make(policy: AnyPolicy) -> None:
            policy.initialize(self.half.features_SF)
            train_policy(policy, [cost_of(task, compute) for task in self._tasks(setting)], config)

        return kept(self._of(setting, seed) / f"policy-{name}.safetensors", policy, make)

    def _measured_rewards(self, setting: Setting, seed: int) -> dict[int, Model]:
        """Policies after some updates on measured rewards; the state's costs are those of the published network."""
        network = self.published(setting, seed, self.scale.iterations).network
        paths = {look: self._of(setting, seed) / f"{MEASURED_REWARDS}-{look}.safetensors" for look in self.looks}
        policy = PaperPolicy(seed)
        if not all(path.exists() for path in paths.values()):
            policy.initialize(self.half.features_SF)
            config = ReinforceConfig(updates=self.scale.iterations * self.scale.policy_updates, seed=seed)

            def on_update(update: int, placements: int, minutes: float) -> None:
                self._tick()
                if update in paths:
                    paths[update].unlink(missing_ok=True)
                    kept(paths[update], policy, lambda _: None)
                    paths[update].with_suffix(".txt").write_text(f"{placements} {minutes:.2f}\n")

            train_on_measured_rewards(policy, network, self._tasks(setting), self.arena, config, on_update)
        return {look: Model(network, kept(path, PaperPolicy(seed), _missing)) for look, path in paths.items()}

    def rewards_taken(self, seed: int, look: int) -> tuple[int, float]:
        """Measured placements and minutes until that look."""
        path = self._of(self.home, seed) / f"{MEASURED_REWARDS}-{look}.txt"
        placements, minutes = path.read_text().split()
        return int(placements), float(minutes)


def _missing(module: torch.nn.Module) -> None:
    raise RuntimeError(f"{type(module).__name__} was to be kept by now")


def rows(models: Models, setting: Setting, seeds: Sequence[int]) -> dict[str, Model]:
    """Return the placers of a setting's test tasks: all that was trained there, and what was trained at home; named
    ``kind#seed``, from home ``kind<home#seed``."""
    found = {
        f"{kind}#{seed}": models.model(kind, setting, seed)
        for seed in models.seeds(setting, seeds)
        for kind in models.kinds(setting, seed)
    }
    if setting != models.home:
        for kind in ("published", "converged", "default"):
            found |= {f"{kind}<{models.home}#{seed}": models.model(kind, models.home, seed) for seed in seeds}
    return found
