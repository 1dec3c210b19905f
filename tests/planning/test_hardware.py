# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The topology that is read from drivers, with cards in the place of a driver's."""

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_models import SHARDERS, collection, table
from torchrec.distributed.planner.types import ParameterConstraints, Topology

from dreamshard_planner import DreamShardError, DreamShardPlanner, SavedPlan, devices
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.devices import GB, GPUS, Card, card_of, cores_of
from dreamshard_planner.measure import hardware
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.planning.ranks import RankHardware, from_all, from_first, hardware_in_words, read_topology
from tests.faults import ended, start
from tests.pretended import A100, ADA, H100, L40

HOST_BYTES = 1000 * GB
TABLES = collection(table("t0"), table("t1"))


def read(monkeypatch: pytest.MonkeyPatch, on_host: int, *cards: Card | None) -> tuple[Topology, str]:
    """The topology of ranks with these cards, and its description."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_host))
    ranks = [RankHardware(card, HOST_BYTES) for card in cards]
    topology = read_topology("cpu" if cards[0] is None else "cuda", ranks)
    return topology, hardware_in_words(topology, ranks)


def test_two_hosts_of_a_listed_card(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, text = read(monkeypatch, 8, *[H100] * 16)
    assert (topology.world_size, topology.local_world_size, topology.hbm_mem_bw) == (16, 8, 3350e6)
    assert {device.storage.hbm for device in topology.devices} == {H100.memory_bytes}
    assert {device.storage.ddr for device in topology.devices} == {HOST_BYTES // 8}
    links = topology.comms_bandwidths
    assert (topology.hbm_to_ddr_mem_bw, links.intra_host_bw, links.inter_host_bw) == (64e6, 450e6, 50e6)
    assert text == (
        "16 x NVIDIA H100 80GB HBM3 on 2 hosts, read from the driver: 85.0 GB each at 3,350 GB/s, 64 GB/s to 125.0 GB "
        "of host memory, 450 GB/s within a host, 50 GB/s between hosts"
    )


def test_a_card_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, text = read(monkeypatch, 2, ADA, ADA)
    assert topology.devices[1].storage.hbm == ADA.memory_bytes and topology.hbm_mem_bw == 960e6
    assert topology.comms_bandwidths.intra_host_bw == GPUS["l40s"].link_bytes_per_s / 1e3
    assert text.endswith(f"{ADA.name} is not listed, and its links are those of NVIDIA L40S, the closest listed card")
    assert RooflineCost.of_topology(topology).cache_bytes == 40e6
    # Without a memory clock, bandwidth comes from the closest card as well.
    topology, text = read(monkeypatch, 1, L40)
    assert topology.hbm_mem_bw == GPUS["l40s"].memory_bytes_per_s / 1e3
    assert "its bandwidth and links are those of NVIDIA L40S" in text
    assert read(monkeypatch, 1, Card("old", GB, (7, 0)))[0].hbm_mem_bw == GPUS["a100-40"].memory_bytes_per_s / 1e3


def test_cpu_ranks_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, text = read(monkeypatch, 2, None, None)
    assert {device.storage.ddr for device in topology.devices} == {HOST_BYTES // 2} and card_of(topology) is None
    assert text == "2 x CPU rank, read from the system: 500.0 GB of host memory each"
    assert cores_of(topology) is None


@pytest.mark.parametrize(("limit", "cores"), [("50000 100000", 0.5), ("max 100000", os.cpu_count())])
def test_ranks_count_the_cores_and_memory_that_their_container_may_use(monkeypatch, tmp_path, limit, cores) -> None:
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    assert (hardware.usable_cores(), hardware.total_bytes() > 1 << 29) == (os.cpu_count(), True)
    (tmp_path / "cpu.max").write_text(limit + "\n")
    (tmp_path / "memory.max").write_text("536870912\n")
    found = RankHardware.here("cpu")
    assert (found.cores * torch.get_num_threads(), found.host_memory_bytes) == (cores, 1 << 29)


def test_cpu_ranks_share_cores(tmp_path) -> None:
    """The work of all ranks counts if they share cores, in the report and in the file of the plan."""
    ranks = [RankHardware(None, HOST_BYTES, cores=2.0)] * 4
    topology = read_topology("cpu", ranks, on_host=4)
    assert hardware_in_words(topology, ranks).endswith("; the ranks of a host share cores for 2 of them")
    many = {f"t{index}": ParameterConstraints(pooling_factors=[200.0]) for index in range(8)}
    planner = DreamShardPlanner(topology=topology, stats=[], effort="quick", cost_source="roofline", constraints=many)
    planner.plan(collection(*[table(name, 400_000, 256) for name in many]), list(SHARDERS))
    report = planner.report()
    assert report.verdict.startswith("Bottleneck: cores that ranks share")
    assert "2 of 4 ranks can compute at once, since they share cores" in str(report)
    slow_first = sorted(report.chosen.rank_ms, reverse=True)
    together_ms = slow_first[0] + sum(slow_first[2:]) / 2
    assert report.chosen.total_ms == pytest.approx(together_ms + report.chosen.collectives_ms)
    planner.save_plan(tmp_path / "plan.json")
    saved = SavedPlan.load(tmp_path / "plan.json")
    assert cores_of(job_of(saved).machine.topology()) == 2.0


@pytest.mark.usefixtures("group")
def test_the_default_planner_reads_the_driver_and_a_given_topology_is_kept(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(devices, "read_card", lambda: A100)
    monkeypatch.setattr(devices, "device_of_ranks", lambda: "cuda")
    given = DreamShardPlanner(topology=Topology(world_size=1, compute_device="cuda"), stats=[], effort="quick")
    given.collective_plan(TABLES)
    assert given._ranks.topology.devices[0].storage.hbm == 32 * 1024**3
    text = str(given.report())
    assert "Planned for" not in text and "34.4 GB of memory (hbm_cap)" in text
    assert text.count(f"the driver names {A100.name} with 42.4 GB at 1,555 GB/s: leave topology out") == 1
    planner = DreamShardPlanner(stats=[], effort="quick")
    planner.plan(TABLES, list(SHARDERS))
    described = f"Planned for 1 x {A100.name}, read from the driver of this rank: 42.4 GB each at 1,555 GB/s"
    assert str(planner.report()).splitlines()[2].startswith(described)
    planner.collective_plan(TABLES)
    second = str(planner.report()).splitlines()[2]
    assert second.startswith(f"Planned for 1 x {A100.name}, read from the driver: 42.4")
    assert "TorchRec's defaults" not in str(planner.report())
    # The file of the plan keeps the card's name, so that its costs stay the same without that card.
    planner.save_plan(tmp_path / "plan.json")
    saved = SavedPlan.load(tmp_path / "plan.json")
    monkeypatch.setattr(devices, "read_card", lambda: None)
    again = job_of(saved).machine.topology()
    assert saved.inputs.topology.cards == (A100.name,) and card_of(again) == A100.name
    assert RooflineCost.of_topology(again) == RooflineCost.of_topology(planner._ranks.topology)


def _rank(rank: int, port: int, function: Callable[[dist.ProcessGroup], None]) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    function(dist.group.WORLD)
    dist.destroy_process_group()


def _together(pg: dist.ProcessGroup) -> None:
    def fail_later() -> None:
        if pg.rank():
            raise ValueError("wrong")

    first = pg.rank() == 0
    assert (from_first(pg, os.getpid) == os.getpid()) == first
    wrong = (DreamShardError, "rank 1 failed: ValueError: wrong") if first else (ValueError, "^wrong")
    with pytest.raises(wrong[0], match=wrong[1]):
        from_all(pg, fail_later)
    assert from_all(pg, pg.rank) == [0, 1]


def _until_one_dies(pg: dist.ProcessGroup) -> None:
    if pg.rank():
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DreamShardError, match="another rank has ended"):
        from_all(pg, lambda: None)


@pytest.mark.parametrize(("function", "statuses"), [(_together, [0, 0]), (_until_one_dies, [0, -signal.SIGKILL])])
def test_ranks_agree_or_say_why_not(function: Callable[[dist.ProcessGroup], None], statuses: list[int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ended(*[start(_rank, rank, store.port, function) for rank in range(2)]) == statuses
