# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which sharding types may be proposed for a table: all but those that TorchRec gets wrong, or whose training differs,
by the reasons of :mod:`~dreamshard_planner.search_space.sharding_types`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface

from dreamshard_planner.search_space.kernels import is_known, kernel_of, serves
from dreamshard_planner.search_space.modules import Quantized
from dreamshard_planner.search_space.options import counted, runs_of, type_of
from dreamshard_planner.search_space.sharding_types import MOST_CUDA_COLUMNS, SHARDING_TYPES, Case, Reason
from dreamshard_planner.torchrec_components import compat


@dataclass(frozen=True)
class Situation:
    """What decides whether a table may be sharded by some type."""

    module: Any
    config: Any
    """``EmbeddingBagConfig`` or ``EmbeddingConfig``; None where the module has none."""
    compute_device: str
    optimizer: str
    """Of :func:`optimizer_name`."""
    attached: bool = False
    """Whether in-backward optimizers are attached to the replicas of data-parallel tables."""
    replicas_follow: bool = False
    """Whether replicas of the table can then follow its own, see ``replica_rules.py``."""
    quantized: Quantized | None = None
    """How it is stored, where it is quantized."""
    varied_batches: bool = False
    """Whether features of its module are known to come in batches of different sizes."""
    in_groups: bool = False
    """Whether the ranks form several sharding groups (2D parallelism)."""
    weighted_batches: bool = False
    """Whether batches are known to carry weights of lookups, which the module need not ask for."""
    dtype: torch.dtype = torch.float32
    """Type of the table's weights."""

    @property
    def grid_takes_varied_batches(self) -> bool:
        """Whether the installed TorchRec runs grid_shard on batches whose size varies by feature."""
        return compat.grid_takes_varied_batches()

    @property
    def replicas_are_updated(self) -> bool:
        """Whether the replicas of a data-parallel table get an optimizer that does what the table's own would."""
        return self.attached and self.replicas_follow

    @property
    def is_mean(self) -> bool:
        return is_mean(self.config)

    @property
    def is_weighted(self) -> bool:
        return self.weighted_batches or is_weighted(self.module)

    @property
    def is_sequence(self) -> bool:
        return any(isinstance(child, EmbeddingCollectionInterface) for child in self.module.modules())

    @property
    def bag_mode(self) -> str | None:
        """Of an ``nn.EmbeddingBag``; None for other modules."""
        return self.module.mode if isinstance(self.module, nn.EmbeddingBag) else None


@dataclass(frozen=True)
class Cut:
    """What decides whether a table may be cut as one option does."""

    option: ShardingOption
    compute_device: str

    @property
    def is_bag(self) -> bool:
        """Whether the table is an ``nn.EmbeddingBag``."""
        return isinstance(self.option.module[1], nn.EmbeddingBag)

    @property
    def kernel(self) -> str:
        return self.option.compute_kernel

    @property
    def has_slices(self) -> bool:
        """Whether no shard has all columns."""
        return counted(self.option)[0][0].size[1] < self.option.tensor.shape[1]

    @property
    def lacks_rows(self) -> bool:
        """Whether some shard has none."""
        return not all(shard.size[0] for shard, _ in counted(self.option))

    @property
    def is_too_wide(self) -> bool:
        """Whether a GPU would train more columns at once than FBGEMM's kernels can."""
        wide = any(shard.size[1] > MOST_CUDA_COLUMNS for shard, _ in counted(self.option))
        return self.compute_device == "cuda" and wide and is_known(self.kernel) and not serves(self.kernel)

    @property
    def misses_rows(self) -> bool:
        """Whether some block starts or ends elsewhere than TorchRec's lookup assumes: at multiples of the rows over the
        blocks, rounded up. The lookups of served and of virtual tables know where each block lies. Shards that do not
        add up to the table are placeholders of an enumerator whose user replaces them: TorchRec runs no such shards."""
        kernel, runs = kernel_of(self.kernel), runs_of(self.option)
        rows, columns = self.option.tensor.shape
        held = sum(math.prod(run.first.size) * run.count for run in runs)
        if kernel.serves or kernel.virtual or held != rows * columns:
            return False
        blocks = max(1, self.option.num_shards * runs[0].first.size[1] // columns)
        most, index = -(-rows // blocks), 0
        for run in runs:
            for which in {0, run.count - 1}:
                start = min((index + which) % blocks * most, rows)
                if (run.offset(which)[0], run.first.size[0]) != (start, min(most, rows - start)):
                    return True
            index += run.count
        return False


def is_mean(config: Any) -> bool:
    """Whether a table's config asks for mean pooling."""
    return getattr(config, "pooling", None) is PoolingType.MEAN


def is_weighted(module: nn.Module) -> bool:
    """Also where it only wraps such a module: feature processors give the lookups weights."""
    says = (getattr(child, "is_weighted", None) for child in module.modules())
    return any(is_weighted() for is_weighted in says if callable(is_weighted))


MIXED_MEAN = (
    "TorchRec divides the output of every table of the module that is not row_wise or table_row_wise once more, where "
    "one that is has mean pooling"
)
"""Broken as well, but of a module's tables together: see :func:`without_mixed_means`."""
LATE_MEANS = frozenset(kind for kind, spec in SHARDING_TYPES.items() if spec.divides_means_late)
"""The types of which some tables have mean pooling only where all tables of their module have one of these."""


def broken(sharding_type: str, situation: Situation) -> str | None:
    """Why the type is never proposed for such a table; None where it may be."""
    return _holding(SHARDING_TYPES[sharding_type].broken, situation)


def inexact(sharding_type: str, situation: Situation) -> str | None:
    """What the type changes in the training of such a table; None where the table trains as a whole one would."""
    return _holding(SHARDING_TYPES[sharding_type].inexact, situation)


def broken_cut(option: ShardingOption, compute_device: str) -> str | None:
    """Why the option is never proposed, though its type may be; None where it may be as well."""
    return _holding(type_of(option).broken_cuts, Cut(option, compute_device))


def _holding(reasons: tuple[Reason[Case], ...], case: Case) -> str | None:
    return next((reason.text for reason in reasons if reason.holds(case)), None)


def without_mixed_means(
    types: Mapping[str, Collection[str]], means: Collection[str], in_rows: bool = False
) -> dict[str, list[str]]:
    """The types that the tables of one module may be given whatever the others are: a mean-pooled table in blocks of
    rows leaves no other type to any table of its module, see :data:`MIXED_MEAN`.

    Args:
        types: what each table may be by itself.
        means: the tables with mean pooling.
        in_rows: whether blocks of rows are wanted, of all tables.

    Returns:
        By table; blocks of rows where they are wanted or some mean-pooled table may be nothing else, no such blocks of
        mean-pooled tables elsewhere. A list may be empty.
    """
    kept = {name: list(kinds) for name, kinds in types.items()}
    if len(types) == 1:
        return kept
    if means and in_rows or any(LATE_MEANS.issuperset(types[name]) for name in means):
        return {name: [kind for kind in kinds if kind in LATE_MEANS] for name, kinds in kept.items()}
    return kept | {name: [kind for kind in kept[name] if kind not in LATE_MEANS] for name in means}


def optimizer_name(parameter: torch.Tensor, fused_params: dict[str, Any] | None) -> str:
    """FBGEMM's name, in lower case, of a table's in-backward optimizer: set on the parameter
    (``apply_optimizer_in_backward``) or in the sharder's fused parameters; by default FBGEMM's SGD. The name of its
    class, where TorchRec knows no such kernel."""
    optimizer = (fused_params or {}).get("optimizer")
    if classes := compat.optimizer_classes(parameter):
        # As TorchRec: an argument of this name has precedence over the class.
        optimizer = compat.optimizer_arguments(parameter).get("optimizer")
        if optimizer is None:
            try:
                optimizer = optimizer_type_to_emb_opt_type(classes[0])
            except ValueError:
                return classes[0].__name__.lower()
    return "exact_sgd" if optimizer is None else getattr(optimizer, "name", str(optimizer)).lower()
