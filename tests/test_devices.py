# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Named GPUs as topologies, and what reports say of figures that nobody gave and of costs from elsewhere."""

import copy
from dataclasses import replace

import pytest
from torchrec.distributed.planner.types import Topology

from dreamshard_planner import Checkpoint, TaskError, devices
from dreamshard_planner.checkpoints.choice import SHIPPED, checkpoint_notes, confidence
from dreamshard_planner.cost.roofline import L2_BYTES, RooflineCost
from dreamshard_planner.devices import GB, GPUS, UNKNOWN_CARD, Machine, card_of, default_notes, gpu_of
from dreamshard_planner.measure.hardware import describe_hardware
from tests.pretended import A100, H100


def test_a_named_gpu_gives_memory_and_bandwidths() -> None:
    topology = Machine(ranks_per_host=8, hosts=2, gpu="h100").topology()
    assert (topology.world_size, topology.local_world_size, topology.compute_device) == (16, 8, "cuda")
    assert topology.devices[0].storage.hbm == 80 * GB and topology.hbm_mem_bw == 3350e6
    bandwidths = topology.comms_bandwidths
    assert (bandwidths.intra_host_bw, bandwidths.inter_host_bw) == (450e6, 50e6)  # bytes per millisecond
    assert default_notes(topology) == ()
    other = replace(Machine(ranks_per_host=8, gpu="h100"), memory_bytes=GB, intra_bytes_per_s=1e9).topology()
    assert other.devices[3].storage.hbm == GB and other.comms_bandwidths.intra_host_bw == 1e6


def test_every_gpu_has_figures_of_its_own_and_a_source() -> None:
    assert set(GPUS) == {"a100-40", "a100-80", "h100", "h200", "b200", "l4", "l40s", "a10"}
    for name, gpu in GPUS.items():
        assert "NVIDIA" in gpu.source and gpu.memory_bytes_per_s > gpu.link_bytes_per_s > 0
        assert default_notes(Machine(ranks_per_host=2, gpu=name).topology()) == ()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"gpu": "A100"}, "unknown GPU 'A100'"),
        ({"gpu": "a100"}, "did you mean 'a100-40' or 'a100-80'"),
        ({"gpu": "l4", "hosts": 2}, "no network is published for l4"),
        ({"gpu": "l4", "device": "cpu"}, "has device 'cuda'"),
        ({"device": "gpu"}, "device must be 'cuda' or 'cpu', got 'gpu'"),
        ({"hosts": 0}, "hosts must be a whole number from 1"),
        ({"memory_bytes": -1}, "memory_bytes must be a number from 1"),
    ],
)
def test_machines_that_cannot_be_are_refused(arguments: dict, reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        Machine(ranks_per_host=2, **arguments)


def test_gpus_are_known_by_the_name_that_the_driver_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GPUS:
        card = card_of(Machine(ranks_per_host=2, gpu=name).topology())
        assert card is not None and gpu_of(card) == name
        roofline = RooflineCost.of_card(card)
        assert roofline.memory_bytes_per_ms == GPUS[name].memory_bytes_per_s / 1e3
        assert roofline.cache_bytes == GPUS[name].l2_bytes
    told = Machine(ranks_per_host=2, memory_bytes_per_s=2000 * GB).topology()
    untold, cpu = Machine(ranks_per_host=2).topology(), Machine(ranks_per_host=2, device="cpu").topology()
    assert card_of(told) == UNKNOWN_CARD and card_of(untold) is None and card_of(cpu) is None
    assert gpu_of("NVIDIA H100 80GB HBM3") == "h100" and gpu_of("abacus") is None
    # An equal bandwidth names no card, and another bandwidth takes no name away.
    alike = Topology(world_size=2, compute_device="cuda", hbm_mem_bw=3350e6)
    assert card_of(alike) is None and RooflineCost.of_topology(alike).cache_bytes == L2_BYTES
    slow = copy.deepcopy(Machine(ranks_per_host=2, gpu="h100", memory_bytes_per_s=2000 * GB).topology())
    assert card_of(slow) == H100.name and RooflineCost.of_topology(slow).cache_bytes == GPUS["h100"].l2_bytes
    monkeypatch.setattr(devices, "read_card", lambda: A100)
    assert card_of(alike) == A100.name and card_of(slow) == H100.name and card_of(told) == UNKNOWN_CARD
    assert RooflineCost.of_topology(alike).cache_bytes == GPUS["a100-40"].l2_bytes


def test_figures_that_nobody_gave_are_pointed_out() -> None:
    defaults, one_host = default_notes(Topology(world_size=64, compute_device="cuda"))
    for what in ("hbm_cap", "hbm_mem_bw", "644 GB/s between ranks of a host (intra_host_bw)"):
        assert what in defaults
    assert "all 64 ranks are taken to be on one host" in one_host
    (hosts,) = default_notes(Topology(world_size=64, compute_device="cuda", local_world_size=8))
    assert "13 GB/s between hosts" in hosts
    # Where ranks were measured, or there is one, no bandwidth between them is read.
    assert default_notes(Topology(world_size=2, compute_device="cpu"), links_measured=True) == ()
    assert default_notes(Topology(world_size=1, compute_device="cpu")) == ()


def test_confidence_names_hardware_and_held_out_error_and_notes_tell_checks() -> None:
    measured = Checkpoint.load(SHIPPED / "cpu.safetensors")
    cuda, cpu = (Machine(ranks_per_host=2, device=device).topology() for device in ("cuda", "cpu"))

    def on(name: str, **metadata: object) -> Checkpoint:
        hardware = {"hardware": {"device": "cpu", "name": name}}
        return replace(measured, metadata={**measured.metadata, **hardware, **metadata})

    here = describe_hardware("cpu", 1)["name"]
    assert confidence(measured, cuda).startswith("measured on cpu (")
    assert "nothing was measured on such a device" in confidence(measured, cuda, uses_network=False)
    forward, backward = measured.metadata["validation"]["network_mape"]
    assert confidence(on(here), cpu) == f"measured on this hardware, {50 * (forward + backward):.0f} % off"
    elsewhere = "measured on another CPU, abacus: absolute times may be several times off; observe and learn"
    assert confidence(on("abacus"), cpu) == elsewhere
    checks = {"checks": [{"after": 0.02}, {"after": 0.04}]}
    assert confidence(on(here, calibration=checks), cpu) == "measured on this hardware, 3 % off"
    learned = {"runs": 2, "checks": [{"after": 0.02, "sets": 1}, {"after": 0.06, "sets": 3}]}
    assert confidence(on(here, learned=learned), cpu) == "costs learned from 2 runs on this hardware, 5 % off"
    assert checkpoint_notes(on(here), cpu) == ()
    (checked,) = checkpoint_notes(on(here, calibration={"checked": "SGD (7 and 8 % off); dims 4 to 64"}), cpu)
    assert "checked with SGD (7 and 8 % off); dims 4 to 64" in checked
    h100 = Checkpoint.load(SHIPPED / "nvidia-h100-80gb-hbm3.safetensors")
    assert confidence(h100, Machine(ranks_per_host=2, gpu="h100").topology()).startswith("measured on this hardware, ")
    assert "measured on another card, NVIDIA H100" in confidence(h100, Machine(ranks_per_host=2, gpu="h200").topology())
