# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Named GPUs, machines made of them as TorchRec topologies, and the cards and default figures of any topology.

Figures are the vendor's, in decimal units (1 GB is 10^9 bytes; what driver and context take is about the difference to
binary ones). Links count one direction, half of what is advertised for both together: an all-to-all sends as much as
it receives, at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from dreamshard_planner import driver
from dreamshard_planner.driver import Card
from dreamshard_planner.errors import TaskError
from dreamshard_planner.support.formatting import gb_per_s, nearest
from dreamshard_planner.support.numbers import checked

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

GB = 10**9
MAX_RANKS = 2**15
"""Most ranks of a plan; twice as many take minutes."""
MAX_RANKS_OF_A_HOST = 16
"""Most ranks on one host; more look like a forgotten ``local_world_size``."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU, and the network of the vendor's own machine with eight of them."""

    title: str
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int
    """Bytes of the L2 cache."""
    multiprocessor_hz: float
    """Multiprocessors times boost clock."""
    link_bytes_per_s: float
    """Bandwidth to all GPUs of the host together, one direction."""
    host_bytes_per_s: float
    """Bandwidth to the host's memory, one direction."""
    network_bytes_per_s: float | None
    """Bandwidth to other hosts per GPU, one direction; None if the vendor sells no such machine."""
    source: str


_A100 = Gpu(
    title="NVIDIA A100 40GB SXM",
    capability=(8, 0),
    memory_bytes=40 * GB,
    memory_bytes_per_s=1555 * GB,
    l2_bytes=40 * 10**6,
    multiprocessor_hz=108 * 1.41e9,
    link_bytes_per_s=300 * GB,
    host_bytes_per_s=32 * GB,
    network_bytes_per_s=25 * GB,
    source="NVIDIA A100 data sheet; DGX A100: one 200 Gb/s adapter per GPU",
)
_H100 = Gpu(
    title="NVIDIA H100 SXM",
    capability=(9, 0),
    memory_bytes=80 * GB,
    memory_bytes_per_s=3350 * GB,
    l2_bytes=50 * 10**6,
    multiprocessor_hz=132 * 1.98e9,
    link_bytes_per_s=450 * GB,
    host_bytes_per_s=64 * GB,
    network_bytes_per_s=50 * GB,
    source="NVIDIA H100 data sheet; DGX H100: one 400 Gb/s adapter per GPU",
)
_L4 = Gpu(
    title="NVIDIA L4",
    capability=(8, 9),
    memory_bytes=24 * GB,
    memory_bytes_per_s=300 * GB,
    l2_bytes=48 * 10**6,
    multiprocessor_hz=58 * 2.04e9,
    link_bytes_per_s=32 * GB,
    host_bytes_per_s=32 * GB,
    network_bytes_per_s=None,
    source="NVIDIA L4 data sheet",
)
GPUS = {
    "a100-40": _A100,
    "a100-80": replace(_A100, title="NVIDIA A100 80GB SXM", memory_bytes=80 * GB, memory_bytes_per_s=2039 * GB),
    "h100": _H100,
    "h200": replace(
        _H100,
        title="NVIDIA H200 SXM",
        memory_bytes=141 * GB,
        memory_bytes_per_s=4800 * GB,
        source="NVIDIA H200 data sheet; DGX H200: one 400 Gb/s adapter per GPU",
    ),
    "b200": replace(
        _H100,
        title="NVIDIA B200 SXM",
        capability=(10, 0),
        memory_bytes=180 * GB,
        memory_bytes_per_s=8000 * GB,
        l2_bytes=126 * 10**6,
        multiprocessor_hz=148 * 1.965e9,
        link_bytes_per_s=900 * GB,
        source="NVIDIA DGX B200 data sheet: 1,440 GB, 64 TB/s and 14.4 TB/s over 8 GPUs, one 400 Gb/s adapter per GPU",
    ),
    "l4": _L4,
    "l40s": replace(
        _L4,
        title="NVIDIA L40S",
        memory_bytes=48 * GB,
        memory_bytes_per_s=864 * GB,
        l2_bytes=96 * 10**6,
        multiprocessor_hz=142 * 2.52e9,
        source="NVIDIA L40S data sheet; NVIDIA Ada GPU architecture (AD102)",
    ),
    "a10": replace(
        _L4,
        title="NVIDIA A10",
        capability=(8, 6),
        memory_bytes_per_s=600 * GB,
        l2_bytes=6 * 10**6,
        multiprocessor_hz=72 * 1.695e9,
        source="NVIDIA A10 data sheet; NVIDIA Ampere GA102 GPU architecture",
    ),
}
"""GPUs by name."""
_CARDS = {
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10",
}
"""Driver's name of a card, and its name in :data:`GPUS`."""
UNKNOWN_CARD = "a GPU without a name"
"""Name for GPUs that a user describes by bandwidth alone."""
_NAMES = "dreamshard_cards"
"""Attribute of a topology that holds the names of its cards; copies of the topology keep it."""
_CORES = "dreamshard_cores"
"""Attribute of a topology that holds what :func:`cores_of` returns."""


def gpu_of(card: str | None) -> str | None:
    """Return the name in :data:`GPUS` of a card by its driver's name, or None if it is not listed."""
    return _CARDS.get(card or "")


def cards_of(topology: Topology) -> tuple[str, ...]:
    """Return the driver's names of a topology's different cards, slowest first; none on CPUs.

    A topology of the user's own carries no names: its card is the one that this process sees.
    """
    if topology.compute_device != "cuda":
        return ()
    if named := getattr(topology, _NAMES, ()):
        return tuple(named)
    card = driver.read_card()
    return () if card is None else (card.name,)


def cores_of(topology: Topology) -> float | None:
    """Return how many CPU ranks of a host can compute at once, if it is known that not all can."""
    return getattr(topology, _CORES, None)


def card_of(topology: Topology) -> str | None:
    """Return the driver's name of a topology's slowest card, or None if no card is known."""
    return next(iter(cards_of(topology)), None)


def driver_name(gpu: str) -> str:
    """Return the first driver's name of a GPU of :data:`GPUS`."""
    return next(card for card, name in _CARDS.items() if name == gpu)


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
    """Make a topology by TorchRec's ``TopologyFactory``; TorchRec warns about those that are constructed directly.

    Args:
        world_size: ranks of all hosts.
        compute_device: ``cuda``, ``cpu`` or ``mtia``.
        local_world_size: ranks of a host.
        cards: driver's names of the different cards, slowest first.
        rank_memory_bytes: memory of each rank by ``HBM``, ``DDR`` or ``SSD``, where ranks differ.
        cores: CPU ranks of a host that can compute at once, if not all can.
        arguments: fields of TorchRec's ``TrainerConfig``, ``HardwareConfig`` and ``KernelConfig``; TorchRec's defaults
            for None and for those left out.
    """
    from torchrec.distributed.planner.types import HardwareConfig, KernelConfig, TopologyFactory, TrainerConfig

    given = {name: value for name, value in arguments.items() if value is not None}

    def taken(config: type) -> dict[str, Any]:
        """Arguments that a config has; the first config that has one takes it."""
        return {name: given.pop(name) for name in [*given] if name in config.__dataclass_fields__}  # type: ignore[attr-defined]

    hardware = HardwareConfig(**taken(HardwareConfig))
    trainer = TrainerConfig(world_size=world_size, local_world_size=local_world_size, **taken(TrainerConfig))
    kernel = KernelConfig(compute_device=compute_device, use_hardware_based_bandwidth=True, **taken(KernelConfig))
    if given:
        raise TypeError(f"TorchRec's topology has no {', '.join(given)}")
    topology = TopologyFactory.create_topology(trainer, hardware, kernel)
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
    """Memory of each rank by ``HBM``, ``DDR`` or ``SSD``. It holds for this number of ranks and while ``memory_bytes``
    is the least of them."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More arguments of TorchRec's ``Topology``, such as ``pod_size``; the fields above take precedence."""
    cards: tuple[str, ...] = ()
    """Driver's names of the cards, slowest first, if they are known better than by ``gpu``."""

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in GPUS:
            alike = " or ".join(repr(name) for name in GPUS if name.startswith(self.gpu))
            hint = f" (did you mean {alike}?)" if alike else nearest(self.gpu, GPUS)
            raise TaskError(f"unknown GPU {self.gpu!r}{hint}: known are {', '.join(GPUS)}")
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
        what = "CPU ranks" if self.device == "cpu" else GPUS[self.gpu].title if self.gpu else "GPUs"
        return f"{self.ranks_per_host} {what}" + (f" on each of {self.hosts} hosts" if self.hosts > 1 else "")

    def topology(self) -> Topology:
        """Return TorchRec's topology, with its defaults for unknown figures."""
        gpu = GPUS[self.gpu] if self.gpu else None
        memory = self.memory_bytes or (gpu.memory_bytes if gpu else None)
        speed = _per_ms(self.memory_bytes_per_s or (gpu.memory_bytes_per_s if gpu else None))
        on_cpu = self.device == "cpu"
        given = {
            "hbm_cap_bytes": None if on_cpu else memory,
            "ddr_cap_bytes": memory if on_cpu else self.host_memory_bytes,
            "ssd_cap_bytes": self.ssd_bytes,
            "ddr_mem_bw" if on_cpu else "hbm_mem_bw": speed,
            "hbm_to_ddr_mem_bw": _per_ms(self.host_bytes_per_s or (gpu.host_bytes_per_s if gpu else None)),
            "intra_host_bw": _per_ms(self.intra_bytes_per_s or (gpu.link_bytes_per_s if gpu else None)),
            "inter_host_bw": _per_ms(self.inter_bytes_per_s or (gpu.network_bytes_per_s if gpu else None)),
        }
        arguments = {**self.more, **{name: value for name, value in given.items() if value is not None}}
        if "pod_size" in arguments:
            arguments["pod_size"] = min(arguments["pod_size"], self.ranks)  # there may be fewer now
        if self.intra_bytes_per_s or self.inter_bytes_per_s:
            arguments.pop("generalized_comms_bandwidths", None)  # which would take precedence over them
        sizes = self.rank_memory_bytes
        own = sizes.get("DDR" if on_cpu else "HBM")
        fits = {*map(len, sizes.values())} == {self.ranks} and (own is None or min(own) == memory)
        return make_topology(
            self.ranks,
            self.device,
            self.ranks_per_host,
            cards=self._names(),
            rank_memory_bytes=sizes if fits else {},
            **arguments,
        )

    def _names(self) -> tuple[str, ...]:
        if self.cards or self.device == "cpu":
            return self.cards
        if self.gpu is not None:
            return (driver_name(self.gpu),)
        return () if self.memory_bytes_per_s is None else (UNKNOWN_CARD,)


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
        card = driver.read_card() if topology.compute_device == "cuda" and "hbm_" in defaults[0] else None
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


def _per_ms(bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else bytes_per_s / 1e3
