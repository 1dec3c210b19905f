# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Settings that all tests share."""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dreamshard_planner.environment import load_libc10_first

# Scripts that tests start find this checkout too, installed or not (for the tests themselves: pythonpath in setup.cfg).
_PATHS = (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)
# Tests that train leave nothing behind: no file in a home, and no process that learns.
os.environ["DREAMSHARD_OBSERVE"] = "0"
# Small tensors and several processes on few cores: more threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Typer and rich print for a terminal with colours where these say so, as on a public CI; typer asks at its import.
for _name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERMINAL_WIDTH"):
    os.environ.pop(_name, None)
load_libc10_first()  # tests time kernels: before anything imports torch, as the conftest.py of a folder does
# A later list would count only where no test has started the server yet.
multiprocessing.set_forkserver_preload(["tests.preloaded"])

LONG = (
    "test_ambient.py",
    "test_benchmarks.py",
    "test_cli.py",
    "test_docs.py",
    "test_examples.py",
    "test_fuzz.py",
    "test_mixed_models.py",
    "test_moved_training.py",
    "test_replicas.py",
    "test_sharding_types.py",
    "test_training.py",
)
"""Files with tests of ten seconds and more."""


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the checkpoints and the terminal width of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setenv("DREAMSHARD_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # models are cyclic and hold the group
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", type=int, default=20, help="random mixed models to plan (20)")
    parser.addoption(
        "--cases", type=int, default=50, help="cases of the fuzz tests (50), the same each time unless given"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare torch, and set the number of cases of the fuzz tests."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the process that hands out tests runs none: it would import torch before the others start
    import torch.distributed.optim  # dreamshard_planner imports it early if torch is there already

    torch.set_num_threads(1)
    cases = config.getoption("--cases")
    settings.register_profile(
        "fuzz",
        max_examples=cases,
        derandomize=cases <= 50,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("fuzz")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    # One process takes from the other's last tests when it has none: what is left at the end should be short.
    items.sort(key=lambda item: item.path.name not in LONG)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
