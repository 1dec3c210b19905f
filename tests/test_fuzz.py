# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Damaged and hostile files of every kind are read or refused.

``make fuzz`` tries a thousand, other ones each time; ``pytest tests/test_fuzz.py --cases N`` tries N.
"""

import copy
import io
import json
import math
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import DrawFn
from safetensors.torch import load_file, save
from small_models import SHARDERS, planned, planner, small_model
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner import (
    Checkpoint,
    CheckpointError,
    DatasetError,
    DreamShardError,
    FeatureStatistics,
    PlanError,
    SavedPlan,
    StatisticsError,
    TableStatistics,
    TaskError,
)
from dreamshard_planner.checkpoints.checkpoint import FORMAT, VERSION
from dreamshard_planner.checkpoints.choice import SHIPPED
from dreamshard_planner.cost.collectives import OPERATIONS, REVISION, CollectiveFit
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.measure.collectives import read_collectives
from dreamshard_planner.offline.jobs import read_table_list
from dreamshard_planner.workload.lookups import IdHistogram
from tests.faults import PATIENCE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SPARE_BYTES = 4 << 30
"""Memory that a hostile file may take: less than its claims, more than torch's threads."""


def share(of_all: float) -> settings:
    return settings(max_examples=max(1, round(settings().max_examples * of_all)))


@contextmanager
def bounded() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])

    def hangs(*_: object) -> None:
        raise AssertionError(f"took more than {PATIENCE_SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, hangs)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used_pages * resource.getpagesize() + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


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
    for _ in range(draw(st.integers(1, 3))):
        at, some = draw(st.integers(0, len(content))), draw(st.binary(max_size=9))
        left_out = draw(st.sampled_from([0, 5, len(some), len(content)]))
        content = content[:at] + some + content[at + left_out :]
    return content


STATISTICS = TableStatistics(
    {
        "t0_f0": FeatureStatistics(2.0, (0.5, 0.3, 0.2) + (0.0,) * 14, 64, 60.0, IdHistogram.even(999)),
        "t1_f0": FeatureStatistics(0.0),
    }
)
COLLECTIVES = {
    "backend": "gloo",
    "world_size": 2,
    "hardware": {"device": "cpu", "name": "abacus"},
    "fits": dict.fromkeys(OPERATIONS, asdict(CollectiveFit(0.1, 1e6, 1e7, 0.05))),
    "revision": REVISION,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good file of each kind of JSON."""
    made = tmp_path_factory.mktemp("files")
    STATISTICS.to_json(made / "statistics.json")
    shutil.copy(Path(__file__).parents[1] / "examples" / "tables.json", made)
    (made / "collectives.json").write_text(json.dumps(COLLECTIVES))
    planned(small_model()).save_plan(made / "plan.json")
    return made


JSON_FILES: dict[str, tuple[type[DreamShardError], Callable[[Path], Any]]] = {
    "statistics": (StatisticsError, TableStatistics.from_json),
    "tables": (TaskError, read_table_list),
    "collectives": (DreamShardError, read_collectives),
    "plan": (PlanError, SavedPlan.load),
}


def loaded(path: Path, error: type[DreamShardError], load: Callable[[Path], Any]) -> Any:
    """Return a file's content, or None if it is refused with the right error."""
    try:
        with bounded():
            return load(path)
    except error as refused:
        assert type(refused) is error and str(path) in str(refused) and len(str(refused)) < 3000
        str(refused).encode(errors="strict")
        return None


@share(0.2)
@given(data=st.data(), kind=st.sampled_from(sorted(JSON_FILES)))
def test_json_files_are_read_or_refused(data: st.DataObject, kind: str, folder: Path) -> None:
    content, path = (folder / f"{kind}.json").read_bytes(), folder / "changed.json"
    if data.draw(st.integers(0, 3), "bytes or JSON"):
        path.write_bytes(data.draw(changed_json(json.loads(content))).encode(errors="surrogatepass"))
    else:
        path.write_bytes(data.draw(changed_bytes(content)))
    found = loaded(path, *JSON_FILES[kind])
    if kind == "statistics" and found is not None:
        try:
            made = planner(statistics=found)
            made.plan(small_model(), SHARDERS)
        except (PlannerError, StatisticsError) as error:
            assert any(name in str(error) for name in (*found, "t0", "t1", "t2", "t3"))
        else:
            assert math.isfinite(made.report().chosen.total_ms)


def description_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["description"])


TENSORS, DESCRIPTION = load_file(SHIPPED / "cpu.safetensors"), description_of(SHIPPED / "cpu.safetensors")


@share(0.15)
@given(data=st.data())
def test_checkpoints_are_used_or_refused(data: st.DataObject, folder: Path) -> None:
    path = folder / "changed.safetensors"
    path.write_bytes(data.draw(changed_bytes((SHIPPED / "roofline.safetensors").read_bytes())))
    checkpoint = loaded(path, CheckpointError, Checkpoint.load)
    if checkpoint is None:
        return
    report = planned(small_model(), checkpoint=checkpoint).report()
    assert math.isfinite(report.chosen.total_ms) and str(report) and checkpoint.digest()


def test_what_files_claim_is_not_believed(folder: Path) -> None:
    """These cases once took terabytes, or minutes."""
    path = folder / "claims.safetensors"
    for changes in ({"policy": {"hidden": 10**6}}, {"cost": {"members": 10**6}}, {"cost": {"table_hidden": 4096}}):
        description = {key: {**DESCRIPTION[key], **change} for key, change in changes.items()}
        header = {"format": FORMAT, "version": str(VERSION), "description": json.dumps({**DESCRIPTION, **description})}
        path.write_bytes(save(TENSORS, metadata=header))
        assert loaded(path, CheckpointError, Checkpoint.load) is None
    claimed = io.BytesIO()
    np.lib.format.write_array_header_1_0(claimed, {"descr": "<f8", "fortran_order": False, "shape": (10**11,)})
    with zipfile.ZipFile(folder / "claims.npz", "w") as archive:
        archive.writestr("rows.npy", claimed.getvalue())
    assert loaded(folder / "claims.npz", DatasetError, CostDataset.load) is None
