# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans do not depend on torch's global state, the process, its hash seed or its number of threads."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from small_models import SHARDERS, collection, ranks_of, table, topology
from small_models import planner as make_planner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, StatisticsError, TableStatistics
from dreamshard_planner.checkpoints.choice import shipped
from dreamshard_planner.workload import reuse
from tests.mixed_models import mixed_case
from tests.planning.test_context import made


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[], AbstractContextManager]] = {
    "float16": lambda: default_dtype(torch.float16),
    "default device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "fake tensors": FakeTensorMode,
}
"""States that a training script may have torch in when it asks for a plan."""
CACHES = (shipped, reuse.bin_mean_reuse, reuse._probabilities_at, reuse._mixture)


def described() -> tuple:
    made = torch.ones(2, device="cpu")
    return (
        type(made),
        made.dtype,
        made.is_inference(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(),
        torch.get_rng_state().tolist() if type(made) is torch.Tensor and made.dtype != torch.float16 else None,
    )


HISTOGRAM = (0.5, 0.3, 0.2) + (0.0,) * 14
STATISTICS = TableStatistics(
    {f"t{i}_f0": FeatureStatistics(2.0**i, HISTOGRAM if i % 2 else None, 256) for i in range(5)}
)


def model() -> nn.Module:
    return collection(*(table(f"t{i}", 300 * (i + 1) ** 3, 8 << i % 4) for i in range(5)))


def plan_of(given) -> tuple:
    planner = make_planner(topology=topology(3), statistics=STATISTICS)
    plan = planner.plan(given, SHARDERS)
    predicted = planner.predict(planner.options)
    return ranks_of(plan), planner.report().to_dict(), predicted.total_ms


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture(scope="module")
def without_a_state() -> tuple:
    forget()
    return plan_of(model())


@pytest.mark.parametrize("state", STATES)
def test_plans_do_not_depend_on_the_state(state: str, without_a_state: tuple) -> None:
    forget()
    given = model()
    with STATES[state]():
        before = described()
        inside = plan_of(given)
        assert described() == before
    assert inside == plan_of(given) == without_a_state  # the second with what was cached inside
    forget()


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_batches_without_data_are_refused(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        empty = KeyedJaggedTensor(["a"], torch.zeros(3, dtype=torch.int64), lengths=torch.ones(3, dtype=torch.int64))
        with pytest.raises(StatisticsError, match=r"batch 0, of features \['a'\], has no data"):
            TableStatistics.from_batches([empty])


def test_a_model_of_fake_tensors_is_planned(without_a_state: tuple) -> None:
    with FakeTensorMode():
        fake = EmbeddingBagCollection(tables=model().embedding_bag_configs(), device=torch.device("cpu"))
        inside = plan_of(fake)
    assert inside == without_a_state


def plans_told() -> str:
    told = [made()[0].hash_planner_context_inputs_str()]
    told.append(str(made(topology=topology(device="cuda"))[0].hash_planner_context_inputs()))
    case = mixed_case(12)
    planner = case.planner(effort="quick")
    planner.plan(case.model, case.sharders)
    told += [str((o.fqn, o.sharding_type, o.compute_kernel, [s.rank for s in o.shards])) for o in planner.options]
    told.append(str(planner.report()))
    return "\n".join(told)


ELSEWHERE = """
import torch, warnings
warnings.simplefilter("ignore")
torch.set_default_dtype(torch.float16)
import torchrec
torch.set_default_device("meta")
from dreamshard_planner.workload import reuse
torch.set_default_dtype(torch.float32)
torch.set_default_device(None)
torch.set_num_threads(2)
from tests.test_ambient import plans_told
print(plans_told(), end="")
"""
"""Another process with two threads, where torch is in another state while the package is imported."""


def test_plans_and_hashes_are_the_same_in_every_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", ELSEWHERE], env=environment, capture_output=True, text=True)
    told = plans_told()
    assert result.stdout == told, result.stderr
    assert len(told.split()[0]) == 64 and "milliseconds" in told
