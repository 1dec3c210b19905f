# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Strategies of the fuzz tests: models with planner arguments, absurd numbers, damaged files."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis.strategies import DrawFn, SearchStrategy
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.workload.ids import MAX_ID, IdHistogram
from tests.ambient_states import STATES
from tests.mixed_models import MixedCase, random_case

states = st.sampled_from([None, *STATES])
"""A name of :data:`STATES`, or torch as it comes."""

cases: SearchStrategy[MixedCase] = st.randoms(use_true_random=False).map(
    lambda rng: random_case(rng, sizes=(1, 1, 2, 3, 5), world_sizes=(1, 2, 2, 3, 4))
)
"""Small models of all kinds, with constraints, statistics and topologies that make sense."""

_NO_NUMBERS = [math.nan, math.inf, -1.0, -math.inf, 1e18, 1e300, "many", None]
_HOSTILE: dict[str, list[Any]] = {
    "sharding_types": [[], ["nonsense"], ["table_wise", "table_wise"]],
    "compute_kernels": [[], ["nonsense"], ["quant"]],
    "min_partition": [0, -4, 1, 3, 7, 10**9],
    "pooling_factors": [[], [1.0] * 7, *([value] for value in _NO_NUMBERS)],
    "num_poolings": [[], [0.0], *([value] for value in _NO_NUMBERS)],
    "batch_sizes": [[], [0], [-3], [10**9], [10**30]],
    "cache_params": [CacheParams(load_factor=factor) for factor in (0.0, -1.0, 7.0, math.nan, None)],
    "device_group": ["tpu", ""],
    "feature_names": [[], ["nobody"]],
    "is_weighted": [True],
}


@dataclass(frozen=True)
class HostileCase:
    """A case of which one thing is none that anybody means."""

    plain: MixedCase
    """The case as anybody means it."""
    case: MixedCase
    subjects: tuple[str, ...]
    """Subjects, one of which an error must name."""
    what: str


@st.composite
def hostile_cases(draw: DrawFn) -> HostileCase:
    """A constraint, statistic, batch size or capacity out of its bounds."""
    case = draw(cases)
    tables = {name.split(".")[-2]: None for name, _ in case.model.named_parameters()}
    kind = draw(st.sampled_from(["constraint", "constraint", "constraint", "statistics", "batch size", "memory"]))
    if kind == "constraint":
        table = draw(st.sampled_from([*tables, "no such table"]))
        field = draw(st.sampled_from(sorted(_HOSTILE)))
        value = draw(st.sampled_from(_HOSTILE[field]))
        before = case.constraints.get(table) or ParameterConstraints()
        constraints = {**case.constraints, table: replace(before, **{field: value})}
        return HostileCase(case, replace(case, constraints=constraints), (table,), f"{field}={value!r} of {table}")
    if kind == "statistics":
        features = dict(case.statistics or {})
        name = draw(st.sampled_from([*features, "nobody"]))
        features[name] = draw(feature_statistics)
        return HostileCase(
            case, replace(case, statistics=TableStatistics(features)), (name, *tables), f"{features[name]}"
        )
    if kind == "batch size":
        size = draw(st.sampled_from([0, -1, 1, 10**6, 2**40, 10**30]))
        return HostileCase(case, replace(case, batch_size=size), ("batch", *tables), f"batch size {size}")
    memory = draw(st.sampled_from([0, -1, 1, 2**63, 10**20, 10**400, math.inf, math.nan, "80GB"]))
    made = {"hbm_cap": memory, "ddr_cap": memory}
    topology = Topology(case.topology.world_size, case.topology.compute_device, **made)
    return HostileCase(
        case, replace(case, topology=topology), ("rank", "memory", "bytes", *tables), f"memory of {memory}"
    )


@st.composite
def _ids(draw: DrawFn) -> IdHistogram | None:
    """In a few places, near and far."""
    ids = sorted(draw(st.lists(st.integers(0, MAX_ID - 1), min_size=1, max_size=6, unique=True)))
    count_R = torch.tensor(draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids))))
    return IdHistogram.of_counts(torch.tensor(ids), count_R)


@st.composite
def _feature_statistics(draw: DrawFn) -> FeatureStatistics:
    """Extreme values that are possible."""
    factor = draw(st.sampled_from([0.0, 5e-324, 1e-9, 0.5, 1.0, 1e5, 1e18, 1e300]))
    batch_size = draw(st.sampled_from([1, 2, 512, 2**40]))
    full = draw(st.integers(0, 16))
    bins = tuple(float(index == full) for index in range(17)) if draw(st.booleans()) else None
    ids = draw(st.none() | _ids())
    distinct = None
    if bins and 0 < factor * batch_size < math.inf and draw(st.booleans()):
        distinct = factor * batch_size * draw(st.sampled_from([1e-12, 0.5, 1.0]))
    return FeatureStatistics(factor, bins, batch_size, distinct or None, ids)


feature_statistics = _feature_statistics()

_huge = st.sampled_from(["[" * 100_000, "9" * 5_000, '{"a":' * 100_000, "1" + "0" * 400, "-1e999", "NaN", "Infinity"])
_leaves = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 10**6, 2**31, 2**63, 2**64, 10**40, 0.5, 1e300, math.nan, math.inf, -math.inf])
    | st.sampled_from(["", "\0", "\ud800", "x" * 10_000, "1", "../../etc/passwd", "nan"])
)
values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
"""Unlikely values in JSON."""


@st.composite
def changed_json(draw: DrawFn, document: Any) -> str:
    """The document with something in it gone, more or something else; seldom no JSON any more."""
    document = copy.deepcopy(document)
    holder: dict = {"all": document}
    container, key = holder, "all"
    while isinstance(container[key], (dict, list)) and container[key] and draw(st.integers(0, 4)):
        container = container[key]
        key = draw(st.sampled_from(sorted(container) if isinstance(container, dict) else range(len(container))))
    change = draw(st.sampled_from(["replace", "replace", "replace", "remove", "repeat", "insert", "huge"]))
    if change == "replace":
        container[key] = draw(values)
    elif change == "remove":
        del container[key]
    elif change == "repeat":
        container[key] = [container[key]] * 2
    elif change == "insert" and isinstance(container[key], dict):
        container[key][draw(st.text(max_size=5))] = draw(values)
    elif change == "huge":
        container[key] = "<here>"
        return json.dumps(holder.get("all", None)).replace('"<here>"', draw(_huge))
    return json.dumps(holder.get("all", None))


@st.composite
def changed_bytes(draw: DrawFn, content: bytes) -> bytes:
    """The content cut short, with other bytes in it, without some, or with more."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        change = draw(st.sampled_from(["cut", "other", "without", "more"]))
        some = draw(st.binary(min_size=1, max_size=9))
        if change == "cut":
            content = content[:at]
        elif change == "other":
            content = content[:at] + some + content[at + len(some) :]
        elif change == "without":
            content = content[:at] + content[at + len(some) :]
        else:
            content = content[:at] + some + content[at:]
    return content
