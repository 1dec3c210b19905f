# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Everything that is learned from the measured placements of the paper's experiment, made once and kept.

Shapes: N placements, D devices, X sets, S shards, R representation channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from common.linear_cost import LinearCost
from common.whole_tables import rolled_out
from dreamshard_planner.checkpoints.choice import prior_policy
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig, FitConfig, fit_cost_network
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.search.effort import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.workload.features import PAPER_FEATURES
from paper.networks import (
    PaperCostConfig,
    PaperCostNetwork,
    PaperFit,
    PaperFitConfig,
    PaperPolicy,
    PaperPolicyConfig,
    RecurrentPolicy,
    RecurrentPolicyConfig,
)
from paper.placement_policy import AnyPolicy, greedy_plan
from paper.placement_reinforce import train_policy
from paper.training import Half, Published, Setting, Trained, cost_of, kept, train_on_measured_rewards, train_published
from placements.contests import BYTES_PER_MS, Contest
from placements.placers import rule_starts, searched


@dataclass(frozen=True)
class Model:
    """A cost network and a policy; one greedy roll-out, or with our search on top."""

    compute: ComputeCost
    policy: AnyPolicy | None
    """None for the policy that ships, which no setting trained."""
    search: SearchConfig | None = None

    @torch.no_grad()
    def __call__(self, task: Contest) -> Tensor | None:
        """Device of each table, [S]; None at a dead end."""
        cost = cost_of(task, self.compute)
        drafted = rolled_out(prior_policy(), cost) if self.policy is None else greedy_plan(self.policy, cost)
        if self.search is None:
            return drafted
        return searched(cost, [*([] if drafted is None else [drafted]), *rule_starts(cost)], self.search)


class WithoutCosts(PaperPolicy):
    """The published policy, to which a device is the sum of its tables alone."""

    def logits(self, channels_XDO: Tensor, legal_XD: Tensor, load_XDR: Tensor, shard_XR: Tensor) -> Tensor:
        """As published, with costs of zero."""
        return super().logits(torch.zeros_like(channels_XDO), legal_XD, load_XDR, shard_XR)


class MoreFeatures(PaperCostNetwork):
    """The published network with three features more: what kernels read from memory, and its logarithms."""

    FEATURES = (*PAPER_FEATURES, "distinct_rows", "log2_distinct_rows", "log2_lookups")


class MeanOfTables(PaperCostNetwork):
    """The published network with another reduction over tables."""

    def pool(self, sets: LabelledSets) -> Tensor:
        """The mean over shards, [X, R]."""
        return super().pool(sets) / sets.offsets_X1.diff().clamp_min(1)[:, None]


class MaxOfTables(PaperCostNetwork):
    """The published network with another reduction over tables."""

    def pool(self, sets: LabelledSets) -> Tensor:
        """The maximum over shards, [X, R]; zero of none."""
        representation_SR = self.encode(sets.features_SF)[:, 1:]
        index_SR = sets.set_S[:, None].expand_as(representation_SR)
        zeros_XR = representation_SR.new_zeros(len(sets), representation_SR.shape[1])
        return zeros_XR.scatter_reduce(0, index_SR, representation_SR, "amax", include_self=False)


class SumOfDevices(PaperCostNetwork):
    """The published network with another reduction over devices."""

    def pool_devices(self, pooled_BDR: Tensor) -> Tensor:
        """The sum over devices, [B, R]."""
        return pooled_BDR.sum(-2)


class MeanOfDevices(PaperCostNetwork):
    """The published network with another reduction over devices."""

    def pool_devices(self, pooled_BDR: Tensor) -> Tensor:
        """The mean over devices, [B, R]."""
        return pooled_BDR.mean(-2)


@dataclass(frozen=True)
class Fit:
    """One way to fit the published network to the same placements."""

    network: type[PaperCostNetwork] = PaperCostNetwork
    loss: str = "mean"
    composed: bool = False
    """True if placements are composed of random measured sets, not the measured ones."""


FITS = {
    "published": Fit(),
    "squared milliseconds": Fit(loss="raw"),
    "relative errors": Fit(loss="relative"),
    "placements composed of measured sets": Fit(composed=True),
    "composed, relative": Fit(loss="relative", composed=True),
    "three more features": Fit(MoreFeatures),
    "mean over tables": Fit(MeanOfTables),
    "maximum over tables": Fit(MaxOfTables),
    "sum over devices": Fit(SumOfDevices),
    "mean over devices": Fit(MeanOfDevices),
}
LOOKS = (20, 50, 100)
"""Updates on measured rewards after which the policy is kept."""
LONGER = 5
"""Times the published episodes, where a policy is trained for longer."""
MEASURED_REWARDS = "measured_rewards"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Size of the experiment; the defaults are the whole one."""

    train_tasks: int = 50
    iterations: int = 10
    converged: int = 40
    """Iterations that convergence takes."""
    prefixes: tuple[int, ...] = (10, 30, 100)
    """Measured placements, the first ones of the converged training, of the learning curve."""
    fit_updates: int = 300
    policy_updates: int = 10
    """Both in each iteration."""
    repeats: int = 2
    """Timed runs of each set in training."""
    epochs: int = 120
    """Epochs of our cost network."""
    measured_seeds: int = 3
    """Trainings that measure placements of their own; the others learn from those of the first."""
    away_seeds: int = 3
    """Trainings in settings other than home."""
    converged_seeds: int = 3
    """Number of these that go on until convergence."""
    ablation_seeds: int = 3
    """Trainings in which more is learned than what stands in the table of results."""


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
        config = Published(
            iterations=iterations,
            fit_updates=self.scale.fit_updates,
            policy_updates=self.scale.policy_updates,
            seed=seed,
        )
        folder, scale = self._of(setting, seed) / f"published-{iterations}", self.scale
        measured = None if seed < scale.measured_seeds else self.published(setting, 0, iterations)
        return train_published(
            config, self.half, self._tasks(setting), folder, self.arena, scale.repeats, self._tick, measured
        )

    def _of(self, setting: Setting, seed: int) -> Path:
        return self.folder / f"{setting}-{seed}"

    def is_measured(self, kind: str, setting: Setting, seed: int) -> bool:
        """True if all that this kind learns from is measured."""
        if kind.startswith(MEASURED_REWARDS):
            return (self._of(setting, seed) / f"{MEASURED_REWARDS}-{self.looks[-1]}.safetensors").exists()
        of_converged = kind == "converged" or "@" in kind
        iterations = self.scale.converged if of_converged else self.scale.iterations
        measured = seed if seed < self.scale.measured_seeds else 0
        return (self._of(setting, measured) / f"published-{iterations}" / "placements.json").exists()

    def _model(self, kind: str, setting: Setting, seed: int) -> Model:
        """By kind: see :meth:`kinds`; ``published@30`` is of the first 30 placements of the converged training."""
        scale, (name, _, count) = self.scale, kind.partition("@")
        if name == "published" and not count:
            trained = self.published(setting, seed, scale.iterations)
            return Model(trained.network, trained.policy)
        if name == "converged":
            trained = self.published(setting, seed, scale.converged)
            return Model(trained.network, trained.policy)
        if name == MEASURED_REWARDS:
            return self._measured_rewards(setting, seed)[int(count)]
        if name == "published":
            network = self.fitted("published", setting, seed, int(count))
            return Model(network, self._policy("paper", network, setting, seed, f"published-of-{count}"))
        network = self.ours(setting, seed, int(count or 0)) if name.startswith("default") else None
        if name in ("default", "default_policy", "default_cost"):
            if name == "default_cost":
                return Model(network, self._policy("paper", network, setting, seed, "paper-on-default"))
            return Model(network, None, DEFAULT_SEARCH if name == "default" else None)
        trained = self.published(setting, seed, scale.iterations)
        if name == "published_search":
            return Model(trained.network, trained.policy, DEFAULT_SEARCH)
        made = {"autoshard": "recurrent", "without_costs": "without_costs", "longer_policy": "longer"}[name]
        return Model(trained.network, self._policy(made, trained.network, setting, seed, f"{made}-on-published"))

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
        chosen, scale = FITS[fit], self.scale
        iterations = scale.converged if count else scale.iterations
        path = self._of(setting, seed) / f"fit-{fit.replace(' ', '-')}-{count or 'all'}.safetensors"

        def make(network: PaperCostNetwork) -> None:
            sets, index_ND = self.published(setting, seed, iterations).measured(self.half, count)
            updates = scale.iterations * scale.fit_updates
            config = PaperFitConfig(
                updates=updates, devices=setting.devices, bytes_per_ms=BYTES_PER_MS, loss=chosen.loss, seed=seed
            )
            placements_ND = None if chosen.composed else index_ND
            PaperFit(config, self.half.features_SF, network).descend(sets, updates, placements_ND)

        return kept(path, chosen.network(PaperCostConfig(), seed), make).requires_grad_(False)

    def ours(self, setting: Setting, seed: int, count: int = 0) -> CostNetwork:
        """Our cost network, fitted to the same."""
        network, config = CostNetwork(CostNetworkConfig(), seed), FitConfig(epochs=self.scale.epochs, seed=seed)

        def make(network: CostNetwork) -> None:
            network.load_state_dict(
                fit_cost_network(self.sets(setting, seed, count), network.config, config).state_dict()
            )

        kept(self._of(setting, seed) / f"default-{count or 'all'}.safetensors", network, make)
        return network.requires_grad_(False)

    def linear(self, setting: Setting, seed: int) -> LinearCost:
        """The additive cost, fitted to the same."""
        return LinearCost.fit(self.sets(setting, seed))

    def sets(self, setting: Setting, seed: int, count: int = 0) -> LabelledSets:
        """Measured sets of the training as published, or of the first ``count`` placements of the converged one; none
        is empty."""
        trained = self.published(setting, seed, self.scale.converged if count else self.scale.iterations)
        sets, _ = trained.measured(self.half, count or None)
        return sets.select(torch.arange(len(sets) - 1))

    def _policy(self, made: str, compute: ComputeCost, setting: Setting, seed: int, name: str) -> AnyPolicy:
        """A policy trained on the estimated MDP of ``compute``, for as many episodes as published, or for longer."""
        updates = self.scale.iterations * self.scale.policy_updates * (LONGER if made == "longer" else 1)
        published = replace(Published().reinforce, updates=updates, seed=seed)
        policy, config = {
            "paper": lambda: (PaperPolicy(PaperPolicyConfig(), seed), published),
            "longer": lambda: (PaperPolicy(PaperPolicyConfig(), seed), published),
            "without_costs": lambda: (WithoutCosts(PaperPolicyConfig(), seed), published),
            "recurrent": lambda: (RecurrentPolicy(RecurrentPolicyConfig(), seed), published),
        }[made]()

        def make(policy: AnyPolicy) -> None:
            policy.initialize(self.half.features_SF)
            train_policy(policy, [cost_of(task, compute) for task in self._tasks(setting)], config)

        return kept(self._of(setting, seed) / f"policy-{name}.safetensors", policy, make)

    def _measured_rewards(self, setting: Setting, seed: int) -> dict[int, Model]:
        """Policies after some updates on measured rewards; the state's costs are those of the published network."""
        network = self.published(setting, seed, self.scale.iterations).network
        paths = {look: self._of(setting, seed) / f"{MEASURED_REWARDS}-{look}.safetensors" for look in self.looks}
        policy = PaperPolicy(PaperPolicyConfig(), seed)
        if not all(path.exists() for path in paths.values()):
            policy.initialize(self.half.features_SF)
            updates = self.scale.iterations * self.scale.policy_updates
            config = replace(Published().reinforce, updates=updates, seed=seed)

            def on_look(look: int, taken: dict[str, float]) -> None:
                paths[look].unlink(missing_ok=True)
                kept(paths[look], policy, lambda _: None)
                paths[look].with_suffix(".txt").write_text(f"{taken['placements']} {taken['minutes']:.2f}\n")

            tasks = self._tasks(setting)
            train_on_measured_rewards(policy, network, tasks, self.arena, config, self.looks, on_look, self._tick)
        return {
            look: Model(network, kept(path, PaperPolicy(PaperPolicyConfig(), seed), _missing))
            for look, path in paths.items()
        }

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
