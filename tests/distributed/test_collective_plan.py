# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One plan for all ranks, or one error for all ranks."""

import gc
import json
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank
from small_models import collection, planner, table, topology
from tiny import SHARDERS, TinyModel, make_planner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from dreamshard_planner import (
    DistributedModelParallel,
    DreamShardError,
    DreamShardPlanner,
    FeatureStatistics,
    PlacementRules,
    StatisticsError,
    TableStatistics,
    devices,
)
from dreamshard_planner.cost.collectives import LOOKUPS, OPERATIONS, REVISION, CollectiveFit
from dreamshard_planner.errors import InputWarning
from dreamshard_planner.measure import collectives
from dreamshard_planner.measure.collectives import PAYLOADS, measure, read_collectives
from dreamshard_planner.planning import ranks
from tests import pretended
from tests.counted import counted
from tests.faults import ended, start, wait_for


def _planned(made: DreamShardPlanner, sharders: Sequence[Any] = SHARDERS, model: nn.Module | None = None) -> str:
    try:
        return str(made.collective_plan(model or TinyModel(), list(sharders)))
    except (DreamShardError, OSError, PlannerError) as error:
        return str(error)


def _topology(rank: Rank, more: int = 0, memory: int = 2**34) -> Topology:
    return topology(rank.world_size + more, memory, rank.device.type)


def same_plan(rank: Rank) -> str:
    return _planned(make_planner("dreamshard", rank))


def no_room(rank: Rank) -> str:
    made = planner(topology=_topology(rank, memory=1000))
    gc.disable()  # what is gone then, is gone without a collection
    try:
        made.collective_plan(TinyModel(), list(SHARDERS))
    except PlannerError as error:
        text, still_there = str(error), weakref.ref(error)
    # An error in a cycle keeps the process group alive until Python ends, and may abort it.
    assert still_there() is None
    gc.enable()
    return text


def plan_of_a_sharding_group(rank: Rank) -> str:
    """In 2D parallelism, all groups follow a plan for the ranks of one."""
    return _planned(planner(topology=topology(rank.world_size // 2, device=rank.device.type)))


def wrong_size(rank: Rank) -> str:
    return _planned(planner(topology=_topology(rank, more=1)))


def other_device(rank: Rank) -> str:
    other = planner(topology=topology(rank.world_size, device="cpu" if rank.device.type == "cuda" else "cuda"))
    with pytest.raises(DreamShardError) as caught:
        DistributedModelParallel(TinyModel(), device=rank.device, planner=other)
    return str(caught.value)


def other_rows(rank: Rank) -> str:
    """The rows of a table follow a rank's own data."""
    return _planned(planner(topology=_topology(rank)), model=collection(table("t", 1000 + rank.rank)))


class LockedError(ValueError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


ENDED, STRICT = "DreamShardError: planning on rank 0 ended with", "PlannerError STRICT_CONSTRAINTS: too strict"
ERRORS: dict[str, tuple[Callable[[], BaseException], str, str]] = {
    "locked": (lambda: LockedError("it is locked"), "LockedError: it is locked", f"{ENDED} LockedError: it is locked"),
    "planner": (lambda: PlannerError("too strict", PlannerErrorType.STRICT_CONSTRAINTS), STRICT, STRICT),
    "statistics": (
        lambda: StatisticsError("feature 'f'"),
        "StatisticsError: feature 'f'",
        "DreamShardError: feature 'f'",
    ),
    "interrupt": (KeyboardInterrupt, "KeyboardInterrupt: ", f"{ENDED} KeyboardInterrupt: "),
}
"""Errors of rank 0, as they are there and on the other ranks."""


def raised(rank: Rank) -> dict[str, str]:
    """Return the error that each error on rank 0 becomes; ranks go on."""
    found = {}
    for name, (make, *_) in ERRORS.items():

        def fail(options: list, make=make) -> list:
            raise make()

        try:
            planner(topology=_topology(rank), callbacks=[fail]).collective_plan(TinyModel(), list(SHARDERS))
        except BaseException as error:
            kind = f" {error.error_type.name}" if isinstance(error, PlannerError) else ""
            found[name] = f"{type(error).__name__}{kind}: {error}"
        dist.barrier()
    return found


def ranks_given_other_things(rank: Rank) -> str:
    if rank.rank == 0:
        return same_plan(rank)
    return _planned(planner(topology=_topology(rank, more=1, memory=1000)), sharders=())


def in_states(rank: Rank) -> list[str]:
    """Plans made where torch's ambient state is another one, and without."""
    made, model, plans = make_planner("dreamshard", rank), TinyModel(), []
    for state in (nullcontext(), torch.device("meta"), torch.inference_mode(), FakeTensorMode()):
        with state:
            plans.append(str(made.collective_plan(model, list(SHARDERS))))
    return plans


def _data(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(100 * (rank + 1), (40 * (rank + 1),), generator=torch.Generator().manual_seed(rank))
    return {"f": (torch.full((40,), rank + 1), ids)}


def gathered_statistics(rank: Rank) -> tuple[dict[str, FeatureStatistics], str]:
    own = counted(_data(rank.rank), batch_size=20)
    one_alone = (own if rank.rank == 0 else TableStatistics({})).all_gather()
    assert dict(one_alone) == dict(counted(_data(0), batch_size=20))
    with pytest.raises(StatisticsError) as error:
        counted(_data(rank.rank), batch_size=20 if rank.rank else 5).all_gather()
    return dict(own.all_gather()), str(error.value)


SMALL = tuple(payload for payload in PAYLOADS if payload.size_bytes < 1 << 16)


def measured_collectives(rank: Rank) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "PAYLOADS", SMALL)
        return json.dumps(measure(rank.device, local_world_size=1, seconds=0.0))


def hardware_of_each(rank: Rank) -> tuple[str, list[int]]:
    """Host memory of the ranks of the default topology, and the plan; only rank 0 plans without a topology."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "total_bytes", lambda: (rank.rank + 1) << 34)
        made = planner(topology=None if rank.rank == 0 else _topology(rank))
        return _planned(made), [device.storage.ddr for device in made._topology.devices]


def hardware_unread(rank: Rank) -> str:
    def fail() -> int:
        raise OSError("no memory to tell")

    with pytest.MonkeyPatch.context() as patch:
        made = planner(topology=None)
        if rank.rank == 1:
            patch.setattr(ranks, "total_bytes", fail)
        return _planned(made)


def devices_by_default(rank: Rank) -> list[tuple[str, int, int]]:
    found = []
    for sees_a_gpu in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda sees=sees_a_gpu: sees)
            read = DreamShardPlanner()._topology
        found.append((read.compute_device, read.world_size, read.local_world_size))
    return found


def pretended_cards(rank: Rank) -> str:
    card = (pretended.H100, pretended.A100)[rank.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "read_card", lambda: card)
        patch.setattr(devices, "device_of_ranks", lambda: "cuda")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        made = planner(topology=None)
        _planned(made)
    model = DistributedModelParallel(TinyModel(), device=rank.device)  # this job's own devices are CPUs
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return str(made.report()) if rank.rank == 0 else ""


EVERYWHERE = (
    same_plan,
    no_room,
    plan_of_a_sharding_group,
    wrong_size,
    other_device,
    other_rows,
    raised,
    ranks_given_other_things,
    in_states,
    gathered_statistics,
    measured_collectives,
)
ON_CPUS = (hardware_of_each, hardware_unread, devices_by_default, pretended_cards)


def _run(rank: Rank) -> dict[str, Any]:
    return {check.__name__: check(rank) for check in (EVERYWHERE + ON_CPUS * (rank.device.type == "cpu"))}


@pytest.fixture(scope="module")
def told(launch: Callable[..., list[Any]]) -> dict[str, list[Any]]:
    """By check, what it found on each rank; all in one job."""
    by_rank = launch(_run)
    return {check: [found[check] for found in by_rank] for check in by_rank[0]}


@pytest.fixture
def told_on_cpus(told: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if "hardware_of_each" not in told:
        pytest.skip("NCCL ranks have GPUs")
    return told


@pytest.mark.parametrize("check", ["same_plan", "plan_of_a_sharding_group", "ranks_given_other_things"])
def test_all_ranks_get_one_plan(check: str, told: dict[str, list[Any]]) -> None:
    """Also all sharding groups; and only what rank 0 was given counts."""
    plans = told[check]
    assert plans[0].count("table_wise") == 8 and len(set(plans)) == 1


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ("no_room", r"'embeddings\.t0'(.|\n)* are missing"),
        ("wrong_size", "has {0} ranks, which are no whole number of sharding groups of the {1} ranks"),
        (
            "other_device",
            r"^the planner's topology is for c\w+, and the model for c\w+: give Topology compute_device='c",
        ),
        (
            "other_rows",
            r"^table 't' is of \[1000, 16\] rows and columns on rank 0 and of \[1001, 16\] rows and columns on",
        ),
    ],
)
def test_all_ranks_get_the_error(check: str, says: str, told: dict[str, list[Any]]) -> None:
    (text,), ranks = set(told[check]), len(told[check])
    assert re.search(says.format(ranks, ranks + 1), text), text


@pytest.mark.parametrize(("on_host", "pods", "says"), [(2, 1, None), (4, 1, "groups of 2"), (2, 2, "POD_SIZE=2")])
def test_hosts_that_torchrec_does_not_form_are_refused(
    on_host: int, pods: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchRec groups ranks by the environment, and not by the plan."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    four = Topology(4, "cuda", local_world_size=on_host, pod_size=pods)
    rows = {"t": ParameterConstraints(sharding_types=["table_row_wise"])}
    plan = planner(topology=four, constraints=rows).plan(collection(table("t")), list(SHARDERS))
    with pytest.raises(DreamShardError, match=f"^t lie over 4 ranks each .*{says}") if says else nullcontext():
        ranks.check_hosts(plan, four)


def test_gpus_are_those_of_the_hosts_that_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topology without hosts has a single one, whose fourth GPU no rank has (225, 3569)."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    four, rules = Topology(4, "cuda"), PlacementRules(on_ranks={"t": [3]})
    plan = planner(topology=four, placement_rules=rules).plan(collection(table("t")), list(SHARDERS))
    with pytest.warns(InputWarning, match="4 ranks on a host, and LOCAL_WORLD_SIZE is 2: .* local_world_size=2"):
        ranks.place_on_hosts(plan, four)
    assert str(plan.plan[""]["t"].sharding_spec.shards[0].placement) == "rank:3/cuda:1"


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_of_rank_0_reaches_all_ranks(name: str, told: dict[str, list[Any]]) -> None:
    first, *others = (of_rank[name] for of_rank in told["raised"])
    _, on_rank_0, elsewhere = ERRORS[name]
    assert first == on_rank_0 and others == [elsewhere] * len(others)


def test_plans_are_sent_in_any_state_of_torch(told: dict[str, list[Any]]) -> None:
    assert len({plan for plans in told["in_states"] for plan in plans}) == 1


def test_rank_0_plans_for_the_hardware_of_all_ranks(told_on_cpus: dict[str, list[Any]]) -> None:
    (plan, memory), (of_the_other, _) = told_on_cpus["hardware_of_each"]
    assert memory == [1 << 33, 2 << 33] and "table_wise" in plan and plan == of_the_other
    assert told_on_cpus["hardware_unread"] == ["rank 1 failed: OSError: no memory to tell", "no memory to tell"]


def test_ranks_with_different_cards_are_planned_for(told_on_cpus: dict[str, list[Any]]) -> None:
    report, _ = told_on_cpus["pretended_cards"]
    named = "1 x NVIDIA H100 80GB HBM3 and 1 x NVIDIA A100-SXM4-40GB on 2 hosts, read from the driver"
    assert f"Planned for {named}: 42.4 to 85.0 GB each at 1,555 GB/s (the slowest card's)" in report
    assert "25 GB/s between hosts" in report


def test_statistics_of_all_ranks_are_those_of_all_data(told: dict[str, list[Any]]) -> None:
    ranks = told["gathered_statistics"]
    expected = dict(TableStatistics.merge([counted(_data(rank), batch_size=20) for rank in range(len(ranks))]))
    for gathered, error in ranks:
        assert gathered == expected and "do not merge" in error
    if len(ranks) == 2:
        assert expected["f"].pooling_factor == 1.5


def test_gloo_ranks_compute_on_cpus_wherever_they_run(told_on_cpus: dict[str, list[Any]]) -> None:
    assert told_on_cpus["devices_by_default"] == [[("cpu", 2, 2)] * 2] * 2


def test_collectives_are_measured_between_ranks(told: dict[str, list[Any]], tmp_path: Path) -> None:
    results = told["measured_collectives"]
    assert len(set(results)) == 1  # the slowest rank's time, on every rank
    path = tmp_path / "collectives.json"
    path.write_text(results[0])
    measured = read_collectives(path)
    assert set(measured["fits"]) == {*OPERATIONS, *LOOKUPS}
    assert measured["hosts"] == measured["world_size"] == len(results)
    times_ms = [sample[-1] for sample in json.loads(results[0])["samples_ms"]]
    assert len(times_ms) == len(SMALL) and min(times_ms) > 0 and "samples_ms" not in measured


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace('"revision": 3', '"revision": 4'), "revision must be 3, got 4: measure"),
        (
            lambda text: text.replace('"bytes_per_ms": 2.0', '"bytes_per_ms": -1'),
            "fits.*bytes_per_ms must be a number from",
        ),
        (lambda text: text.replace('"all_reduce"', '"reduce"'), "must be one of all_to_all, .*'reduce'"),
        (lambda text: re.sub(', "bucketing": {[^}]*}', "", text), "fits lack bucketing"),
        (lambda text: text.replace('"relative_error"', '"error"', 1), "error"),
        (lambda text: text.replace("abacus", ""), "hardware must have a device and a name"),
    ],
)
def test_damaged_measurements_are_refused(damage: Callable[[str], str], reason: str, tmp_path: Path) -> None:
    fit = CollectiveFit(latency_ms=1.0, bytes_per_ms=2.0, shared_bytes_per_ms=3.0, relative_error=0.1)
    path = tmp_path / "collectives.json"
    hardware, fits = {"device": "cpu", "name": "abacus"}, dict.fromkeys((*OPERATIONS, *LOOKUPS), asdict(fit))
    measured = {"backend": "gloo", "world_size": 2, "hardware": hardware, "fits": fits, "revision": REVISION}
    path.write_text(damage(json.dumps(measured)))
    with pytest.raises(DreamShardError, match=f"collectives.json: .*{reason}"):
        read_collectives(path)


def plan_on(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Plan together; rank 0 takes until the file ``go`` is there."""

    def pause(options: list) -> list:
        (folder / "planning").touch()
        while not (folder / "go").exists():
            time.sleep(0.005)
        return options

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    made = planner(topology=topology(world_size), callbacks=[pause])
    (folder / f"ready{rank}").touch()
    try:
        made.collective_plan(TinyModel(), list(SHARDERS))
        outcome = "a plan"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    (folder / f"outcome{rank}").write_text(outcome)


@pytest.mark.parametrize(("world_size", "lost", "stop"), [(3, 2, signal.SIGKILL), (2, 0, signal.SIGINT)])
def test_no_rank_waits_for_a_lost_one(world_size: int, lost: int, stop: int, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(plan_on, rank, world_size, store.port, tmp_path) for rank in range(world_size)]
    awaited = [tmp_path / "planning", *(tmp_path / f"ready{rank}" for rank in range(world_size))]
    wait_for(lambda: all(path.exists() for path in awaited), *ranks)
    os.kill(ranks[lost].pid, stop)
    if stop == signal.SIGKILL:
        ended(ranks[lost])
    (tmp_path / "go").touch()
    ended(*ranks)
    outcomes = {path.name: path.read_text() for path in tmp_path.glob("outcome*")}
    if stop == signal.SIGKILL:
        assert set(outcomes) == {"outcome0", "outcome1"} and outcomes["outcome0"].startswith("RuntimeError: ")
    else:
        assert outcomes["outcome0"].startswith("KeyboardInterrupt")
        assert outcomes["outcome1"] == "DreamShardError: planning on rank 0 ended with KeyboardInterrupt: "
