# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The topology of ranks as their drivers tell it: the default of a planner without ``topology``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchrec.distributed.comm import get_local_size, get_topology_domain_multiple
from torchrec.distributed.planner.types import Topology

from dreamshard_planner import driver
from dreamshard_planner.devices import GB, gpu_of, listed_like, make_topology, speed_of
from dreamshard_planner.driver import Card
from dreamshard_planner.measure.hardware import total_bytes
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.support.formatting import gb_per_s
from dreamshard_planner.support.torch_state import neutral


@dataclass(frozen=True)
class RankHardware:
    """One rank's GPU, and the memory of its host."""

    card: Card | None
    """None on CPUs."""
    host_memory_bytes: int
    """Memory of the whole host, as far as the rank's cgroup may have it."""

    @classmethod
    def here(cls, compute_device: str) -> RankHardware:
        """Read this process's hardware."""
        return cls(driver.read_card() if compute_device == "cuda" else None, total_bytes())


def gathered(pg: dist.ProcessGroup, compute_device: Callable[[], str | None]) -> tuple[str, list[RankHardware]] | None:
    """Read the hardware of all ranks of a group, each its own; all ranks call this.

    Args:
        pg: the group.
        compute_device: called on rank 0 alone. Returns ``cuda``, ``cpu`` or ``mtia``, or None to read nothing.

    Returns:
        The kind of device, and the hardware of each rank; None if nothing was read.
    """
    ranks = Ranks(pg.rank(), pg.size(), group=pg)
    with neutral():
        device = ranks.from_first(compute_device)
        return None if device is None else (device, ranks.gather(lambda: RankHardware.here(device)))


def read_topology(compute_device: str, ranks: Sequence[RankHardware], on_host: int | None = None) -> Topology:
    """Make the topology of ranks: the bandwidths of the slowest card, and the memory of each rank's own.

    Args:
        compute_device: ``cuda``, ``cpu`` or ``mtia``.
        ranks: hardware of each rank.
        on_host: ranks of a host, or None to take those that TorchRec finds.
    """
    on_host = on_host or get_local_size(len(ranks))
    cards = {rank.card for rank in ranks if rank.card is not None}
    by_speed = sorted(cards, key=lambda card: (speed_of(card), card.name))
    bytes_per_ms: dict[str, Any] = {}
    if by_speed:
        like = [listed_like(card) for card in by_speed]
        networks = [gpu.network_bytes_per_s for gpu in like if gpu.network_bytes_per_s is not None]
        bytes_per_ms = {
            "hbm_mem_bw": speed_of(by_speed[0]) / 1e3,
            "hbm_to_ddr_mem_bw": min(gpu.host_bytes_per_s for gpu in like) / 1e3,
            "intra_host_bw": min(gpu.link_bytes_per_s for gpu in like) / 1e3,
            # A card without a published network has TorchRec's default.
            "inter_host_bw": min(networks) / 1e3 if len(networks) == len(like) else None,
        }
    return make_topology(
        len(ranks),
        compute_device,
        on_host,
        cards=dict.fromkeys(card.name for card in by_speed),
        pod_size=get_topology_domain_multiple(),
        rank_memory_bytes={
            "DDR": [rank.host_memory_bytes // on_host for rank in ranks],
            **({"HBM": [(rank.card or by_speed[0]).memory_bytes for rank in ranks]} if by_speed else {}),
        },
        **bytes_per_ms,
    )


def told(topology: Topology, ranks: Sequence[RankHardware], whose: str = "the driver") -> str:
    """Describe a topology that :func:`read_topology` made, in a sentence without its full stop.

    Args:
        topology: of all ranks.
        ranks: hardware of each rank.
        whose: driver that told it.
    """
    on_host = topology.local_world_size
    hosts = f" on {topology.world_size // on_host} hosts" if topology.world_size > on_host else ""
    host_memory = _sizes([device.storage.ddr for device in topology.devices])
    cards = [rank.card for rank in ranks if rank.card is not None]
    if not cards:
        kind = "CPU" if topology.compute_device == "cpu" else topology.compute_device
        return f"{topology.world_size} x {kind} rank{hosts}, read from the system: {host_memory} of host memory each"
    counts = Counter(card.name for card in cards)
    named = " and ".join(f"{count} x {name}" for name, count in counts.items())
    slowest = " (the slowest card's)" if len(counts) > 1 else ""
    bandwidths = topology.comms_bandwidths
    links = [f"{gb_per_s(bandwidths.intra_host_bw)} within a host"] * (min(on_host, topology.world_size) > 1)
    links += [f"{gb_per_s(bandwidths.inter_host_bw)} between hosts"] * bool(hosts)
    text = (
        f"{named}{hosts}, read from {whose}: {_sizes([card.memory_bytes for card in cards])} each at "
        f"{gb_per_s(topology.hbm_mem_bw)}{slowest}, {gb_per_s(topology.hbm_to_ddr_mem_bw)} to {host_memory} of host "
        f"memory{''.join(f', {link}' for link in links)}"
    )
    for card in {card.name: card for card in cards if gpu_of(card.name) is None}.values():
        like, own = listed_like(card).title, card.memory_bytes_per_s is not None
        taken = "links are" if own else "bandwidth and links are"
        text += f"; {card.name} is not listed, and its {taken} those of {like}, the closest listed card"
    return text


def _sizes(sizes_bytes: Sequence[int]) -> str:
    least, most = min(sizes_bytes) / GB, max(sizes_bytes) / GB
    return f"{most:,.1f} GB" if f"{least:,.1f}" == f"{most:,.1f}" else f"{least:,.1f} to {most:,.1f} GB"
