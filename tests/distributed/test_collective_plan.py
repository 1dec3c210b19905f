# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One plan for all ranks, or one error for all ranks."""

from __future__ import annotations

import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT_SECONDS, Rank, run_on_ranks
from tiny import SHARDERS, TinyModel, make_planner
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from dreamshard_planner import DreamShardError, DreamShardPlanner, StatisticsError
from dreamshard_planner.cost.collectives import (
    CPU_BAG_BYTES,
    LOOKUPS,
    MAX_BYTES_PER_MS,
    OPERATIONS,
    REVISION,
    CollectiveFit,
    fits_of,
)
from dreamshard_planner.measure.collectives import FEATURES, LOOKUPS_PER_SAMPLE, PAYLOADS, MeasuredCollectives, Payload
from dreamshard_planner.planning import hardware
from dreamshard_planner.planning.collective import MAX_SHARE_OF_TIMEOUT, Failure
from dreamshard_planner.workload.tables import INDEX_BYTES, LENGTH_BYTES


def _same_plan(rank: Rank) -> str:
    planner = make_planner("dreamshard", rank)
    return str(planner.collective_plan(TinyModel(rank.device), list(SHARDERS)))


def _no_room(rank: Rank) -> str:
    memory = "hbm_cap" if rank.device.type == "cuda" else "ddr_cap"
    planner = DreamShardPlanner(topology=Topology(rank.world_size, rank.device.type, **{memory: 1000}))
    gc.disable()  # what is gone then, is gone without a collection
    try:
        planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
    except PlannerError as error:
        text, still_there = str(error), weakref.ref(error)
    assert (
        still_there() is None
    )  # an error in a cycle keeps the process group alive until Python ends, and may abort it
    return text


def _plan_of_a_sharding_group(rank: Rank) -> str:
    """In 2D parallelism, all groups follow a plan for the ranks of one."""
    planner = DreamShardPlanner(topology=Topology(rank.world_size // 2, rank.device.type))
    return str(planner.collective_plan(TinyModel(rank.device), list(SHARDERS)))


def _wrong_size(rank: Rank) -> str:
    planner = DreamShardPlanner(topology=Topology(rank.world_size + 1, rank.device.type))
    try:
        planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
    except DreamShardError as error:
        return str(error)
    return "a plan"


class ReluctantError(Exception):
    """Pickles, and fails to unpickle."""

    def __init__(self, table: str, missing: int) -> None:
        super().__init__(f"{table} lacks {missing}")


class LockedError(ValueError):
    """Does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def _local_error() -> Exception:
    class LocalError(Exception):
        pass

    return LocalError("only here")


ERRORS = {
    "local": _local_error,
    "reluctant": lambda: ReluctantError("t0", 7),
    "locked": lambda: LockedError("it is locked"),
    "planner": lambda: PlannerError("too strict", PlannerErrorType.STRICT_CONSTRAINTS),
    "statistics": lambda: StatisticsError("feature 'f'"),
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
}


def _raised(rank: Rank) -> dict[str, tuple[str, str, str | None]]:
    """Type, text and, of a PlannerError, its type, of what each error on rank 0 becomes; and that ranks go on."""
    found = {}
    for name, make in ERRORS.items():

        def fail(options: list, make=make) -> list:
            raise make()

        planner = DreamShardPlanner(topology=Topology(rank.world_size, rank.device.type), callbacks=[fail])
        try:
            planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
        except BaseException as error:
            found[name] = type(error).__name__, str(error), getattr(getattr(error, "error_type", None), "name", None)
        dist.barrier()
    return found


def test_every_error_of_rank_0_reaches_all_ranks(launch: Callable[..., list[Any]]) -> None:
    first, *others = launch(_raised)
    assert first == {
        "local": ("LocalError", "only here", None),
        "reluctant": ("ReluctantError", "t0 lacks 7", None),
        "locked": ("LockedError", "it is locked", None),
        "planner": ("PlannerError", "too strict", "STRICT_CONSTRAINTS"),
        "statistics": ("StatisticsError", "feature 'f'", None),
        "interrupt": ("KeyboardInterrupt", "", None),
        "exit": ("SystemExit", "3", None),
    }
    ended = "planning on rank 0 ended with"
    for other in others:
        assert other == {
            "local": ("DreamShardError", f"{ended} _local_error.<locals>.LocalError: only here", None),
            "reluctant": ("DreamShardError", f"{ended} ReluctantError: t0 lacks 7", None),
            "locked": ("ValueError", "LockedError: it is locked", None),
            "planner": ("PlannerError", "too strict", "STRICT_CONSTRAINTS"),
            "statistics": ("StatisticsError", "feature 'f'", None),
            "interrupt": ("DreamShardError", f"{ended} KeyboardInterrupt: ", None),
            "exit": ("DreamShardError", f"{ended} SystemExit: 3", None),
        }


def test_an_error_without_a_text_is_told_as_well() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    told = pickle.loads(pickle.dumps(Failure.of(SilentError()))).error()
    assert type(told) is DreamShardError and str(told).endswith("SilentError: its text cannot be read: RuntimeError")


class Unsendable(int):
    """A rank that does not pickle, or does not unpickle."""

    def __new__(cls, value: int, fails_there: bool) -> Unsendable:
        made = super().__new__(cls, value)
        made.fails_there = fails_there
        return made

    def __reduce__(self) -> Any:
        if not self.fails_there:
            raise TypeError("cannot pickle this rank")
        return Unsendable, (0,)


def _unsendable_plan(rank: Rank) -> list[str]:
    found = []
    for fails_there in (False, True):

        def disturb(options: list, fails_there=fails_there) -> list:
            options[0].shards[0].rank = Unsendable(0, fails_there)
            return options

        planner = DreamShardPlanner(topology=Topology(rank.world_size, rank.device.type), callbacks=[disturb])
        try:
            planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
        except DreamShardError as error:
            found.append(str(error))
        dist.barrier()
    return found


def test_a_plan_that_does_not_pickle_is_an_error_on_all_ranks(launch: Callable[..., list[Any]]) -> None:
    results = launch(_unsendable_plan)
    assert all(result == results[0] for result in results)
    sent = "the plan cannot be sent to the other ranks, it does not pickle (TypeError: "
    assert results[0][0] == f"{sent}cannot pickle this rank)"
    assert results[0][1].startswith(sent) and "fails_there" in results[0][1]


def _ranks_given_other_things(rank: Rank) -> str:
    """Only what rank 0 was given counts."""
    if rank.rank == 0:
        planner, given = make_planner("dreamshard", rank), list(SHARDERS)
    else:
        memory = "hbm_cap" if rank.device.type == "cuda" else "ddr_cap"
        planner = DreamShardPlanner(topology=Topology(rank.world_size + 1, rank.device.type, **{memory: 1000}))
        given = []
    return str(planner.collective_plan(TinyModel(rank.device), given))


def test_only_what_rank_0_was_given_counts(launch: Callable[..., list[Any]]) -> None:
    plans = launch(_ranks_given_other_things)
    assert plans[0].count("table_wise") == 8 and len(set(plans)) == 1


def _asking_for(rank: Rank, requests: list[dict[str, Any]]) -> list[str]:
    """What becomes of planning that may take so many seconds."""
    found = []
    for request in requests:
        planner = DreamShardPlanner(topology=Topology(rank.world_size, rank.device.type), **request)
        try:
            planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
            found.append("a plan")
        except DreamShardError as error:
            found.append(str(error))
    return found


def test_planning_as_long_as_the_others_wait_is_refused(launch: Callable[..., list[Any]]) -> None:
    patience = TIMEOUT_SECONDS // 2  # of the groups of these tests
    most = MAX_SHARE_OF_TIMEOUT * patience
    results = launch(_asking_for, [{"search_seconds": most - 1}, {"search_seconds": most + 1}])
    assert [result[0] for result in results] == ["a plan"] * len(results)
    for result in results:
        assert f"rank 0 may plan for {most + 1:g} s" in result[1]
        assert f"the other ranks wait for {patience} s" in result[1] and f"give less than {most:g} s" in result[1]


def _hardware_of_each(rank: Rank) -> tuple[str, list[int]]:
    """Host memory of the ranks of the default topology, and the plan; only rank 0 plans without a topology."""
    hardware.total_bytes = lambda: (rank.rank + 1) << 34
    topology = None if rank.rank == 0 else Topology(rank.world_size, "cpu")
    planner = DreamShardPlanner(topology=topology, stats=[])
    plan = planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
    return str(plan), [device.storage.ddr for device in planner._topology.devices]


def test_rank_0_plans_for_the_hardware_of_all_ranks() -> None:
    results = run_on_ranks(_hardware_of_each, world_size=2)
    assert results[0][1] == [1 << 33, 2 << 33] and results[0][0] == results[1][0]


def _hardware_unread(rank: Rank) -> str:
    """The second rank cannot read its hardware."""

    def fail() -> int:
        raise OSError("no memory to tell")

    planner = DreamShardPlanner(stats=[])
    if rank.rank == 1:
        hardware.total_bytes = fail
    try:
        planner.collective_plan(TinyModel(rank.device), list(SHARDERS))
    except (DreamShardError, OSError) as error:
        return str(error)
    return "a plan"


def test_a_rank_that_cannot_read_its_hardware_is_an_error_on_all() -> None:
    results = run_on_ranks(_hardware_unread, world_size=2)
    assert results == ["rank 1 failed: OSError: no memory to tell", "no memory to tell"]


def _in_state(rank: Rank) -> list[str]:
    """Plans made where torch's ambient state is another one, and without."""
    planner, model = make_planner("dreamshard", rank), TinyModel(rank.device)
    plans = [str(planner.collective_plan(model, list(SHARDERS)))]
    for state in (torch.device("meta"), torch.inference_mode(), FakeTensorMode()):
        with state:
            plans.append(str(planner.collective_plan(model, list(SHARDERS))))
    return plans


def test_plans_are_sent_in_any_state_of_torch(launch: Callable[..., list[Any]]) -> None:
    results = launch(_in_state)
    assert len({plan for plans in results for plan in plans}) == 1


def _devices_by_default(rank: Rank, sees_a_gpu: bool) -> tuple[str, int, int]:
    torch.cuda.is_available = lambda: sees_a_gpu
    topology = DreamShardPlanner()._topology
    return topology.compute_device, topology.world_size, topology.local_world_size


@pytest.mark.parametrize("sees_a_gpu", [False, True])
def test_gloo_ranks_compute_on_cpus_wherever_they_run(sees_a_gpu: bool) -> None:
    assert run_on_ranks(_devices_by_default, sees_a_gpu, world_size=2) == [("cpu", 2, 2)] * 2


def test_all_ranks_get_one_plan(launch: Callable[..., list[Any]]) -> None:
    plans = launch(_same_plan)
    assert plans[0].count("table_wise") == 8 and len(set(plans)) == 1


def test_all_ranks_get_the_error(launch: Callable[..., list[Any]]) -> None:
    errors = launch(_no_room)
    assert len(set(errors)) == 1 and "are missing" in errors[0] and "embeddings.t0" in errors[0]


def test_all_sharding_groups_get_one_plan(launch: Callable[..., list[Any]]) -> None:
    plans = launch(_plan_of_a_sharding_group)
    assert plans[0].count("table_wise") == 8 and len(set(plans)) == 1


def test_a_topology_of_another_size_is_an_error(launch: Callable[..., list[Any]]) -> None:
    errors = launch(_wrong_size)
    text = f"has {len(errors)} ranks, which are no whole number of sharding groups of the {len(errors) + 1} ranks"
    assert all(text in error for error in errors)


def _measured_collectives(rank: Rank) -> str:
    from dreamshard_planner.measure.collectives import measure

    return json.dumps(asdict(measure(rank.device, local_world_size=1, seconds=0.0)))


def test_collectives_are_measured_between_ranks(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    results = launch(_measured_collectives)
    assert len(set(results)) == 1  # the slowest rank's time, on every rank
    path = tmp_path / "collectives.json"
    path.write_text(results[0])
    measured = MeasuredCollectives.load(path)
    assert set(measured.fits) == {*OPERATIONS, *LOOKUPS} and measured.world_size == len(results)
    times_ms = [sample[-1] for sample in measured.samples_ms]
    assert len(times_ms) == len(PAYLOADS) and min(times_ms) > 0
    assert measured.hosts == measured.metadata()["hosts"] == len(results)
    assert "samples_ms" not in measured.metadata()


def test_all_reduces_measured_before_are_read_as_what_they_were_of() -> None:
    """Revision 1 sent an n-th of what was counted, which took as long as it takes a slower link to send all of it."""
    fits = {operation: asdict(CollectiveFit(1.0, 8.0, MAX_BYTES_PER_MS, 0.1)) for operation in OPERATIONS}
    document = {"backend": "gloo", "world_size": 4, "hardware": {"device": "cpu", "name": "abacus"}, "fits": fits}
    before, now = fits_of(document), fits_of(document | {"revision": REVISION})
    assert now["all_reduce"] == now["all_to_all"] == before["all_to_all"]
    assert before["all_reduce"] == CollectiveFit(1.0, 2.0, MAX_BYTES_PER_MS, 0.1)


@pytest.mark.parametrize(("device", "more_bytes"), [("cpu", CPU_BAG_BYTES), ("cuda", 0.0)])
def test_lookups_measured_before_bags_counted_take_as_long_as_they_took(device: str, more_bytes: float) -> None:
    """As the same payload, of ten ids a bag, is counted now."""
    fits = {operation: asdict(CollectiveFit(1.0, 8e3, 4e3, 0.1)) for operation in (*OPERATIONS, *LOOKUPS)}
    document = {"backend": "any", "world_size": 2, "hardware": {"device": device, "name": "abacus"}, "fits": fits}
    before, now = fits_of(document | {"revision": 2}), fits_of(document | {"revision": REVISION})
    payload = Payload("lookups", 2**20)
    slowest, total = payload.moved_bytes(2, device)
    bags = payload.samples * FEATURES
    assert slowest == bags * (LOOKUPS_PER_SAMPLE * INDEX_BYTES + LENGTH_BYTES + more_bytes)
    told_ms = bags * 84 * (1 / 8e3 + 2 / 4e3)
    assert slowest / before["lookups"].bytes_per_ms + total / before["lookups"].shared_bytes_per_ms == pytest.approx(
        told_ms
    )
    assert {name: before[name] == now[name] for name in before} == dict.fromkeys(before, True) | {
        "lookups": more_bytes == 0
    }


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace('"revision": 3', '"revision": 4'), "revision must be 1 to 3, got 4: a newer"),
        (lambda text: text[:50], "not a JSON file"),
        (lambda text: text.replace("fits", "fit"), "not a measurement.*fits"),
        (lambda text: text.replace('"bytes_per_ms": 2.0', '"bytes_per_ms": -1'), "bytes_per_ms must be a number"),
        (lambda text: text.replace('"all_reduce"', '"reduce"'), "fits lack all_reduce"),
        (lambda text: text.replace('"bucketing"', '"sorting"'), "fits lack bucketing"),
        (lambda text: text.replace('"lookups": {', '"lookups": 0, "_": {'), "fits lack lookups"),
        (lambda text: f"[{text}]", "must be a mapping"),
    ],
)
def test_damaged_measurements_are_refused(damage: Callable[[str], str], reason: str, tmp_path: Path) -> None:
    fit = CollectiveFit(latency_ms=1.0, bytes_per_ms=2.0, shared_bytes_per_ms=3.0, relative_error=0.1)
    path = tmp_path / "collectives.json"
    hardware, fits = {"device": "cpu", "name": "abacus"}, dict.fromkeys((*OPERATIONS, *LOOKUPS), fit)
    path.write_text(damage(json.dumps(asdict(MeasuredCollectives("gloo", 2, hardware, fits, ())))))
    with pytest.raises(DreamShardError, match=f"collectives.json: .*{reason}"):
        MeasuredCollectives.load(path)
