# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Named GPUs, machines made of them as TorchRec topologies, and the cards and default figures of any topology.

Figures are the vendor's, in decimal units (1 GB is 10^9 bytes; what driver and context take is about the difference to
binary ones). Links count one direction, half of what is advertised for both together: an all-to-all sends as much as
it receives, at the same time.

Tests replace ``read_card`` and ``device_of_ranks`` to pretend other hardware: other modules call them on this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from dreamshard_planner.errors import TaskError
from dreamshard_planner.support.formatting import checked, gb_per_s, nearest

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

GB, MB = 10**9, 10**6
MAX_RANKS = 2**15
"""Most ranks of a plan; twice as many take minutes."""
MAX_RANKS_OF_A_HOST = 16
"""Most ranks on one host; more look like a forgotten ``local_world_size``."""


@dataclass(frozen=True)
class Card:
    """One GPU in the words of its driver."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]  # compute capability, major and minor
    memory_bytes_per_s: float | None = None  # clock times bus width; None if the driver hides either


def read_card() -> Card | None:
    """Return the GPU that this process uses, or None without one."""
    import torch  # late: commands read this module for --help

    if not torch.cuda.device_count():
        return None
    told = torch.cuda.get_device_properties(torch.cuda.current_device())
    kilohertz, bits = (getattr(told, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    bytes_per_s = 2 * kilohertz * 1e3 * bits / 8  # memory transfers twice in a clock
    return Card(told.name, told.total_memory, (told.major, told.minor), bytes_per_s or None)


def device_of_ranks() -> str:
    """Return the kind of device that ranks of the default process group compute on: CPUs if its backend is gloo, which
    also runs on hosts that have GPUs, else the kind that TorchRec takes."""
    import torch.distributed as dist
    from torchrec.distributed.utils import get_device_type

    return "cpu" if dist.get_backend() == "gloo" else get_device_type()


class Gpu(NamedTuple):
    """One model of GPU, and the network of the vendor's own machine with eight of them."""

    title: str
    cards: tuple[str, ...]  # names by its driver
    source: str
    capability: tuple[int, int]  # compute capability, major and minor
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int
    multiprocessor_hz: float  # multiprocessors times boost clock
    link_bytes_per_s: float  # to all GPUs of the host together
    host_bytes_per_s: float  # to the host's memory
    network_bytes_per_s: float | None  # to other hosts; None if the vendor sells no such machine


_DGX_A100 = "NVIDIA A100 data sheet; DGX A100: one 200 Gb/s adapter per GPU"
# fmt: off
GPUS = {
    "a100-40": Gpu("NVIDIA A100 40GB SXM", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), _DGX_A100,
                   (8, 0), 40 * GB, 1555 * GB, 40 * MB, 108 * 1.41e9, 300 * GB, 32 * GB, 25 * GB),
    "a100-80": Gpu("NVIDIA A100 80GB SXM", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), _DGX_A100,
                   (8, 0), 80 * GB, 2039 * GB, 40 * MB, 108 * 1.41e9, 300 * GB, 32 * GB, 25 * GB),
    "h100": Gpu("NVIDIA H100 SXM", ("NVIDIA H100 80GB HBM3",),
                "NVIDIA H100 data sheet; DGX H100: one 400 Gb/s adapter per GPU",
                (9, 0), 80 * GB, 3350 * GB, 50 * MB, 132 * 1.98e9, 450 * GB, 64 * GB, 50 * GB),
    "h200": Gpu("NVIDIA H200 SXM", ("NVIDIA H200",),
                "NVIDIA H200 data sheet; DGX H200: one 400 Gb/s adapter per GPU",
                (9, 0), 141 * GB, 4800 * GB, 50 * MB, 132 * 1.98e9, 450 * GB, 64 * GB, 50 * GB),
    "b200": Gpu("NVIDIA B200 SXM", ("NVIDIA B200",),
                "NVIDIA DGX B200 data sheet: 1,440 GB, 64 TB/s and 14.4 TB/s over 8 GPUs, one 400 Gb/s adapter per GPU",
                (10, 0), 180 * GB, 8000 * GB, 126 * MB, 148 * 1.965e9, 900 * GB, 64 * GB, 50 * GB),
    "l4": Gpu("NVIDIA L4", ("NVIDIA L4",), "NVIDIA L4 data sheet",
              (8, 9), 24 * GB, 300 * GB, 48 * MB, 58 * 2.04e9, 32 * GB, 32 * GB, None),
    "l40s": Gpu("NVIDIA L40S", ("NVIDIA L40S",), "NVIDIA L40S data sheet; NVIDIA Ada GPU architecture (AD102)",
                (8, 9), 48 * GB, 864 * GB, 96 * MB, 142 * 2.52e9, 32 * GB, 32 * GB, None),
    "a10": Gpu("NVIDIA A10", ("NVIDIA A10", "NVIDIA A10G"),
               "NVIDIA A10 data sheet; NVIDIA Ampere GA102 GPU architecture",
               (8, 6), 24 * GB, 600 * GB, 6 * MB, 72 * 1.695e9, 32 * GB, 32 * GB, None),
}
"""GPUs by name."""
# fmt: on
UNKNOWN_CARD = "a GPU without a name"
"""Name for GPUs that a user describes by bandwidth alone."""
_NAMES = "dreamshard_cards"
"""Attribute of a topology that holds the names of its cards; copies of the topology keep it."""
_CORES = "dreamshard_cores"
"""Attribute of a topology that holds what :func:`cores_of` returns."""


def gpu_of(card: str | None) -> str | None:
    """Return the name in :data:`GPUS` of a card by its driver's name, or None if it is not listed."""
    return next((name for name, gpu in GPUS.items() if card in gpu.cards), None)


def cards_of(topology: Topology) -> tuple[str, ...]:
    """Return the driver's names of a topology's different cards, slowest first; none on CPUs.

    A topology of the user's own carries no names: its card is the one that this process sees.
    """
    if topology.compute_device != "cuda":
        return ()
    if named := getattr(topology, _NAMES, ()):
        return tuple(named)
    card = read_card()
    return () if card is None else (card.name,)


def card_of(topology: Topology) -> str | None:
    """Return the driver's name of a topology's slowest card, or None if no card is known."""
    return next(iter(cards_of(topology)), None)


def cores_of(topology: Topology) -> float | None:
    """Return how many CPU ranks of a host can compute at once, if it is known that not all can."""
    return getattr(topology, _CORES, None)


def listed_like(card: Card) -> Gpu:
    """Return the listed GPU for a card: by its name, else the closest in compute capability, then in memory."""
    if name := gpu_of(card.name):
        return GPUS[name]

    def distance(gpu: Gpu) -> tuple[int, int]:
        (major, minor), (own_major, own_minor) = gpu.capability, card.capability
        return abs(10 * (major - own_major) + minor - own_minor), abs(gpu.memory_bytes - card.memory_bytes)

    return min(GPUS.values(), key=distance)


def speed_of(card: Card) -> float:
    """Return bytes per second of a card's memory: listed, else told by its driver, else of the closest listed card."""
    if gpu_of(card.name) is None and card.memory_bytes_per_s is not None:
        return card.memory_bytes_per_s
    return listed_like(card).memory_bytes_per_s


def make_topology(
    world_size: int,
    compute_device: str,
    local_world_size: int,
    *,
    cards: Iterable[str] = (),
    rank_memory_bytes: Mapping[str, Sequence[int]] | None = None,
    cores: float | None = None,
    **arguments: Any,
) -> Topology:
    """Make a topology, without the warning that TorchRec has about those that its own factory did not make.

    Args:
        world_size: ranks of all hosts.
        compute_device: ``cuda``, ``cpu`` or ``mtia``.
        local_world_size: ranks of a host.
        cards: driver's names of the different cards, slowest first.
        rank_memory_bytes: memory of each rank by ``HBM``, ``DDR`` or ``SSD``, where ranks differ.
        cores: CPU ranks of a host that can compute at once, if not all can.
        arguments: others of TorchRec's ``Topology``; TorchRec's defaults for None and for those left out.
    """
    from torchrec.distributed.planner.types import Topology

    given = {name: value for name, value in arguments.items() if value is not None}
    if "created_by_factory" in inspect.signature(Topology).parameters:  # from TorchRec 1.7 on
        given["created_by_factory"] = True
    topology = Topology(world_size, compute_device, local_world_size=local_world_size, **given)
    for kind, sizes in (rank_memory_bytes or {}).items():
        for device, size in zip(topology.devices, sizes, strict=True):
            setattr(device.storage, kind.lower(), size)
    setattr(topology, _NAMES, tuple(cards))
    setattr(topology, _CORES, cores)
    return topology


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Ranks, their memory and their links; None for TorchRec's default."""

    ranks_per_host: int
    hosts: int = 1
    device: str = "cuda"
    """``cuda`` or ``cpu``."""
    gpu: str | None = None
    """Name in :data:`GPUS`, for figures that are not given below."""
    memory_bytes: int | None = None
    """Device memory of a rank; on CPUs the rank's part of the host's."""
    memory_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None
    """The rank's part of the host's memory, on GPUs: for unified memory."""
    host_bytes_per_s: float | None = None
    """Bandwidth to the host's memory, on GPUs."""
    intra_bytes_per_s: float | None = None
    """Bandwidth between ranks of one host."""
    inter_bytes_per_s: float | None = None
    """Bandwidth between hosts."""
    ssd_bytes: int | None = None
    """The rank's part of the host's SSDs."""
    rank_memory_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Memory of each rank by ``HBM``, ``DDR`` or ``SSD``, if there are as many ranks and neither ``memory_bytes`` nor
    ``gpu`` is given."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More arguments of :func:`make_topology`, such as ``pod_size``; the fields above take precedence."""

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in GPUS:
            alike = " or ".join(repr(name) for name in GPUS if name.startswith(self.gpu))
            hint = f" (did you mean {alike}?)" if alike else nearest(self.gpu, GPUS)
            raise TaskError(f"unknown GPU {self.gpu!r}{hint}: known are {', '.join(GPUS)}")
        if self.device not in ("cuda", "cpu", "mtia"):
            raise TaskError(f"device must be 'cuda' or 'cpu', got {self.device!r}")
        if self.gpu is not None and self.device != "cuda":
            raise TaskError(f"a machine of {self.gpu} GPUs has device 'cuda', not {self.device!r}")
        for name in ("ranks_per_host", "hosts"):
            checked(name, getattr(self, name), error=TaskError)
        if self.ranks > MAX_RANKS:
            raise TaskError(f"plans are made for up to {MAX_RANKS:,} ranks, not for {self.ranks:,}")
        rates = ("memory_bytes_per_s", "host_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s")
        for name in ("memory_bytes", "host_memory_bytes", *rates):
            if (given := getattr(self, name)) is not None:
                checked(name, given, kind=Real, error=TaskError)
        if self.gpu is not None and self.hosts > 1 and self.inter_bytes_per_s is None:
            if GPUS[self.gpu].network_bytes_per_s is None:
                raise TaskError(f"no network is published for {self.gpu}: give the bandwidth between hosts")

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.ranks_per_host * self.hosts

    @property
    def title(self) -> str:
        """Title for people."""
        gpu = self.gpu or gpu_of(next(iter(self.more.get("cards", ())), None))
        what = "CPU ranks" if self.device == "cpu" else GPUS[gpu].title if gpu else "GPUs"
        return f"{self.ranks_per_host} {what}" + (f" on each of {self.hosts} hosts" if self.hosts > 1 else "")

    def topology(self) -> Topology:
        """Return TorchRec's topology, with its defaults for unknown figures."""
        own, gpu = "ddr" if self.device == "cpu" else "hbm", GPUS.get(self.gpu or "")
        memory = self.memory_bytes or (gpu and gpu.memory_bytes)
        bytes_per_s = {
            f"{own}_mem_bw": self.memory_bytes_per_s or (gpu and gpu.memory_bytes_per_s),
            "hbm_to_ddr_mem_bw": self.host_bytes_per_s or (gpu and gpu.host_bytes_per_s),
            "intra_host_bw": self.intra_bytes_per_s or (gpu and gpu.link_bytes_per_s),
            "inter_host_bw": self.inter_bytes_per_s or (gpu and gpu.network_bytes_per_s),
        }
        given = {
            "cards": gpu.cards[:1] if gpu else (UNKNOWN_CARD,) if self.memory_bytes_per_s else None,
            "ddr_cap": self.host_memory_bytes,
            "ssd_cap": self.ssd_bytes,
            f"{own}_cap": memory,
            **{name: rate and rate / 1e3 for name, rate in bytes_per_s.items()},
        }
        arguments = {**self.more, **{name: value for name, value in given.items() if value is not None}}
        if arguments.get("pod_size"):
            arguments["pod_size"] = min(arguments["pod_size"], self.ranks)  # there may be fewer now
        if self.intra_bytes_per_s or self.inter_bytes_per_s:
            arguments.pop("generalized_comms_bandwidths", None)  # which would take precedence over them
        if memory is None and {*map(len, self.rank_memory_bytes.values())} == {self.ranks}:
            arguments["rank_memory_bytes"] = self.rank_memory_bytes
        return make_topology(self.ranks, self.device, self.ranks_per_host, **arguments)


def default_notes(topology: Topology, links_measured: bool = False) -> tuple[str, ...]:
    """Name the figures of a topology that are TorchRec's defaults, and the card here if its driver tells others.

    Args:
        topology: before any reservation.
        links_measured: whether collectives were measured, so that no bandwidth between ranks is read.
    """
    from torchrec.distributed.planner import constants

    defaults = []
    ranks, per_host = topology.world_size, topology.local_world_size
    if topology.compute_device == "cuda":
        if all(device.storage.hbm == constants.HBM_CAP for device in topology.devices):
            defaults.append(f"{constants.HBM_CAP / GB:.1f} GB of memory (hbm_cap)")
        if topology.hbm_mem_bw == constants.HBM_MEM_BW:
            defaults.append(f"{gb_per_s(topology.hbm_mem_bw)} to it (hbm_mem_bw)")
    if not links_measured:
        inside, between = topology.comms_bandwidths.intra_host_bw, topology.comms_bandwidths.inter_host_bw
        if min(ranks, per_host) > 1 and inside == constants.INTRA_NODE_BANDWIDTH:
            defaults.append(f"{gb_per_s(inside)} between ranks of a host (intra_host_bw)")
        if topology.compute_device == "cpu" and ranks > 1 and topology.ddr_mem_bw == constants.DDR_MEM_BW:
            defaults.append(f"{gb_per_s(topology.ddr_mem_bw)} to memory, which ranks of a host share (ddr_mem_bw)")
        if ranks > per_host and between == constants.CROSS_NODE_BANDWIDTH:
            defaults.append(f"{gb_per_s(between)} between hosts (inter_host_bw)")
    notes = []
    if defaults:
        card = read_card() if topology.compute_device == "cuda" and "hbm_" in defaults[0] else None
        if card is None or hasattr(topology, _NAMES):
            notes.append(f"the topology has TorchRec's defaults, perhaps not this hardware's: {', '.join(defaults)}")
        else:
            told = f"{card.name} with {card.memory_bytes / GB:.1f} GB at {gb_per_s(speed_of(card) / 1e3)}"
            notes.append(
                f"the topology has TorchRec's defaults: {', '.join(defaults)}; the driver names {told}: leave topology "
                "out to plan for that"
            )
    if per_host >= ranks > MAX_RANKS_OF_A_HOST:
        notes.append(
            f"all {ranks} ranks are taken to be on one host, as TorchRec does where local_world_size is not given"
        )
    return tuple(notes)
