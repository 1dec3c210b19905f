# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Milliseconds of the collectives around the embedding kernels, from the bytes that each rank moves.

Latency plus bytes over bandwidth (the alpha-beta model), of the slowest rank and of what all ranks share: measured
between real ranks where a checkpoint has that, else with the bandwidths of TorchRec's ``Topology``.

Between GPUs, collectives reach a share of a given bandwidth, which ``benchmarks/collectives_prior.py`` fits to times of
NCCL that others published. In an all-to-all between hosts each rank has its own part of the network, as NVIDIA's
nccl-tests say (issue 130). Reduce-scatters, all-gathers and all-reduces send each byte to another host once or twice,
whatever the number of ranks there, over the network of all of a host's ranks at once. CPU ranks have the rates of gloo
between ranks of one host, which the processor limits, not the link.

Shapes: D devices, C collectives; leading dimensions are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Annotated, ClassVar

import torch
from scipy.optimize import nnls
from torch import Tensor
from torchrec.distributed.planner.types import Topology

from dreamshard_planner.support.documents import STRICT, Several, one_of
from dreamshard_planner.support.formatting import checked

LATENCY_MS = 0.02
"""Start-up of one collective: the order of a small NCCL all-to-all within a node."""
MAX_BYTES_PER_MS = 1e15
"""Bandwidth that limits nothing, in a fit; finite, for JSON."""
OPERATIONS = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
"""Measured collectives of outputs and gradients."""
REVISION = 3
"""Revision of the measured payloads: figures of others do not compare."""
LOOKUPS = ("lookups", "bucketing")
"""The exchange of lookups, and the sorting of row-wise lookups into blocks before it."""
SORTED_BAG = 0.2
"""Time to sort a bag in a block, over that of an id. TorchRec's processor time on a Xeon, 1 to 48 features, 1 to 100
lookups, 2 and 4 blocks: 1.5 ns, and 8.2 to 9.6 ns."""
CPU_BAG_BYTES = 8.0
"""Bytes that a bag counts for beside its length if CPUs exchange lookups, for ordering lengths and offsets with the
ids. Best fit on a Xeon, ``benchmarks/results/collectives.md``."""
LOOKUP_EXCHANGES = 3
"""One after the other: how many they are, lengths and ids. Weights are one more."""


@dataclass(frozen=True)
class CollectiveFit:
    """Latency and bandwidths fitted to the measured times of one collective."""

    __pydantic_config__: ClassVar = STRICT
    latency_ms: float
    bytes_per_ms: float
    shared_bytes_per_ms: float
    relative_error: float
    """Median relative error of the fit."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1e-300 if name.endswith("bytes_per_ms") else 0
            checked(name, value, least, 1e300, Real)

    @classmethod
    def to_samples(cls, slowest_P: Tensor, total_P: Tensor, time_ms_P: Tensor) -> CollectiveFit:
        """Non-negative relative least squares over payloads: bytes of the slowest rank, of all ranks together, and
        milliseconds, float64 [P]."""
        design = torch.stack([torch.ones_like(time_ms_P), slowest_P, total_P], dim=-1)
        (latency, slope, shared), error = _explained(design, time_ms_P)
        return cls(latency, _rate(slope), _rate(shared), error)

    @classmethod
    def of_sorting(cls, sorted_bytes_P: Tensor, time_ms_P: Tensor) -> CollectiveFit:
        """Fit the time of sorting so many bytes of ids. Payloads of 0 bytes time the exchange alone."""
        ones = torch.ones_like(time_ms_P)
        design = torch.stack([ones, (sorted_bytes_P > 0).to(ones), sorted_bytes_P], dim=-1)
        (_, latency, slope), error = _explained(design, time_ms_P)
        return cls(latency, MAX_BYTES_PER_MS, _rate(slope), error)

    def model(self, world_size: int, source: str) -> CollectiveModel:
        """Return the model of an all-to-all between that many ranks."""
        return CollectiveModel(
            world_size, self.bytes_per_ms, self.latency_ms, source, self.shared_bytes_per_ms, is_measured=True
        )


def _explained(design_PN: Tensor, time_ms_P: Tensor) -> tuple[list[float], float]:
    """Milliseconds of each column, and the median relative error."""
    relative_PN = design_PN / time_ms_P[:, None]
    scale_N = relative_PN.norm(dim=0).clamp_min(1e-30)
    found, _ = nnls((relative_PN / scale_N).numpy(), torch.ones(len(relative_PN), dtype=torch.float64).numpy())
    found_N = torch.from_numpy(found) / scale_N
    return found_N.tolist(), float((relative_PN @ found_N - 1).abs().median())


def _rate(slope: float) -> float:
    return 1 / slope if slope else MAX_BYTES_PER_MS


@dataclass(frozen=True)
class MeasuredOn:
    """Hardware of a measurement, as far as planning reads it; files of earlier releases tell less."""

    device: str = ""
    name: str = ""
    threads: Several = 1
    cores: Several | None = None
    torch: str = ""
    fbgemm: str = ""
    instruction_set: str = ""


@dataclass(frozen=True)
class MeasuredCollectives:
    """Collectives between ranks, as a file or a checkpoint has them.

    Raises:
        ValueError: the payloads were others, or hardware or fits are missing.
    """

    backend: str
    world_size: Several
    hardware: MeasuredOn
    fits: dict[Annotated[str, one_of((*OPERATIONS, *LOOKUPS))], CollectiveFit | None]
    """Fits of all :data:`OPERATIONS`, and of :data:`LOOKUPS` if these were measured; None if training steps did not
    tell."""
    revision: int = 1
    hosts: Several = 1
    assumed: tuple[str, ...] = ()
    """Operations that were not observed, and are taken to be as much slower as others."""

    def __post_init__(self) -> None:
        if self.revision != REVISION:
            raise ValueError(f"revision must be {REVISION}, got {self.revision}: measure the collectives again")
        if not (self.hardware.device and self.hardware.name):
            raise ValueError("hardware must have a device and a name")
        needed = (*OPERATIONS, *LOOKUPS) if self.fits.keys() & set(LOOKUPS) else OPERATIONS
        if missing := [name for name in needed if name not in self.fits]:
            raise ValueError(f"fits lack {', '.join(missing)}")

    @property
    def known(self) -> dict[str, CollectiveFit]:
        """The fits that there are."""
        return {name: fit for name, fit in self.fits.items() if fit is not None}


def bag_bytes(device: str) -> float:
    """Bytes that a bag counts for where ranks exchange lookups, beside those of its length."""
    return CPU_BAG_BYTES if device == "cpu" else 0.0


@dataclass(frozen=True)
class CollectiveModel:
    """Alpha-beta model of one process group."""

    world_size: int
    bytes_per_ms: float
    latency_ms: float = LATENCY_MS
    source: str = "bandwidth given, nothing measured"
    """Origin of the figures."""
    shared_bytes_per_ms: float = math.inf
    """Bandwidth that all ranks share, e.g. the memory of a host whose ranks exchange over gloo; infinite where each
    link carries its own bytes whatever the others do."""
    is_measured: bool = False
    """True if fitted to times of benchmarks or training steps."""

    def __post_init__(self) -> None:
        for bandwidth in (self.bytes_per_ms, self.shared_bytes_per_ms):
            if not bandwidth > 0:
                raise ValueError(f"collective bandwidth must be positive, got {bandwidth} bytes/ms")

    def ms_per_byte(self, senders: int = 1) -> float:
        """Return the milliseconds that one byte to each peer costs a rank, latency left out, if so many ranks send."""
        return (self.world_size - 1) * (1 / self.bytes_per_ms + senders / self.shared_bytes_per_ms)

    def slowed(self, times: Sequence[float], relative_error: float) -> CollectiveFit:
        """Return a fit of so many times the latency, and so many times lower bandwidths."""
        (latency_times, bytes_times), limits = times, (self.bytes_per_ms, self.shared_bytes_per_ms)
        slowest, shared = (rate / bytes_times if rate < MAX_BYTES_PER_MS else MAX_BYTES_PER_MS for rate in limits)
        return CollectiveFit(latency_times * self.latency_ms, slowest, shared, relative_error)

    def all_to_all_ms(self, output_bytes_XD: Tensor) -> Tensor:
        """Milliseconds [...] of the output all-to-all of table-wise shards; that of their gradients moves the same
        bytes the other way, and costs the same.

        ``output_bytes_XD`` [..., D] is what each rank sends to each single peer.
        """
        exchange = Exchanges([Collective("", "world", self, None)], [0])
        return exchange.ms(output_bytes_XD[..., None, :], output_bytes_XD.shape[-1])


@dataclass(frozen=True)
class Collective:
    """One collective of a training step: which ranks exchange, how fast, and in which passes.

    All are rated from the bytes that each rank sends to each *peer*. A reduce-scatter and the all-gather of its
    backward move the same as an all-to-all of the same bytes to each peer; of an all-reduce, an n-th of the tensor
    counts as those bytes.
    """

    name: str
    """Module, sharding type and kind; for reports."""
    over: str
    """``world``: all ranks; ``host``: the ranks of each host among themselves; ``across``: the ranks of the same place
    on every host."""
    forward: CollectiveModel | None
    """Model of the forward's exchange; ``world_size`` counts the ranks that exchange. None if there is none."""
    backward: CollectiveModel | None
    """Model of the backward's exchange: a reduce-scatter's is an all-gather. None if there is none: lookups only go
    forward."""
    of_lookups: bool = False
    """True for lookups, False for outputs or gradients."""

    @property
    def passes(self) -> tuple[CollectiveModel, ...]:
        """Models of the passes in which it runs."""
        return tuple(model for model in (self.forward, self.backward) if model is not None)


class Exchanges:
    """Collectives of one :attr:`Collective.over`, rated side by side: K rows, N exchanges of each.

    A collective has one row if forward and backward are alike, else one for each pass in which it runs.
    """

    def __init__(self, collectives: Sequence[Collective], chosen: Iterable[int]) -> None:
        rows = [
            (column, model, collectives[column].passes.count(model))
            for column in chosen
            for model in dict.fromkeys(collectives[column].passes)
        ]
        self.column_K = torch.tensor([column for column, *_ in rows], dtype=torch.int64)
        self._over = collectives[rows[0][0]].over if rows else "world"
        rates = [
            (model.world_size - 1, model.latency_ms, model.bytes_per_ms, model.shared_bytes_per_ms)
            for _, model, _ in rows
        ]
        self._rates_4K = torch.tensor(rates, dtype=torch.float64).view(-1, 4).T
        """Peers of a rank, milliseconds of latency, and both bandwidths."""
        self._runs_K = torch.tensor([runs for *_, runs in rows], dtype=torch.float64)
        each_ms = [model.ms_per_byte() * runs for _, model, runs in rows]
        self.sent_ms_per_byte_K = torch.tensor(each_ms, dtype=torch.float64)
        """Milliseconds that one byte to each peer takes a rank, in all passes of a row."""

    def bounded_ms(self, largest_KX: Tensor, smallest_KX: Tensor, total_KX: Tensor) -> Tensor:
        """Return the milliseconds [X] of all of them, if each has one exchange, from the largest and smallest bytes
        that a rank sends to each peer and their sum over ranks."""
        return torch.tensordot(self._runs_K, self._each_ms(largest_KX, smallest_KX, total_KX), 1)

    def ms(self, bytes_XCD: Tensor, ranks_per_host: int) -> Tensor:
        """Return the milliseconds [X] of all of them, each by its slowest exchange."""
        together = bytes_XCD.shape[-1] if self._over == "world" else ranks_per_host
        bytes_KXND = bytes_XCD.index_select(-2, self.column_K).movedim(-2, 0).unflatten(-1, (-1, together))
        if self._over == "across":
            bytes_KXND = bytes_KXND.transpose(-1, -2)
        smallest_KXN, largest_KXN = bytes_KXND.aminmax(dim=-1)
        each_KX = self._each_ms(largest_KXN, smallest_KXN, bytes_KXND.sum(-1)).amax(-1)
        return torch.tensordot(self._runs_K, each_KX, 1)

    def _each_ms(self, largest_KX: Tensor, smallest_KX: Tensor, total_KX: Tensor) -> Tensor:
        """The alpha-beta model: milliseconds of each exchange, nothing if nothing is sent.

        An exchange lasts as long as its slowest rank, which sends to, and receives from, every other rank, and longer
        the more all ranks move."""
        peers, latency_ms, bytes_per_ms, shared_bytes_per_ms = (
            rate_K.view(-1, *[1] * (largest_KX.dim() - 1)) for rate_K in self._rates_4K
        )
        slowest_KX = torch.maximum(largest_KX * peers, total_KX - smallest_KX)
        time_KX = latency_ms + slowest_KX / bytes_per_ms + total_KX * peers / shared_bytes_per_ms
        return time_KX.masked_fill_((slowest_KX <= 0) | (peers <= 0), 0.0)


class Collectives:
    """All collectives of a training step, one after the other.

    Args:
        collectives: in the order of the columns of their bytes.
        ranks_per_host: of the topology.
        world: model of an all-to-all between all ranks, which carries the outputs of whole tables and column slices.
    """

    def __init__(self, collectives: Sequence[Collective], ranks_per_host: int, world: CollectiveModel) -> None:
        self.collectives = tuple(collectives)
        self.world = world
        self._ranks_per_host = ranks_per_host
        self._exchanges = [
            Exchanges(self.collectives, [n for n, one in enumerate(self.collectives) if one.over == over])
            for over in dict.fromkeys(collective.over for collective in self.collectives)
        ]

    def level_ms_per_byte(self, num_ranks: int) -> Tensor:
        """Milliseconds, summed over all ranks and both passes, that one byte to each peer costs where all ranks send
        alike, [C]. Latencies are left out."""
        hosts = num_ranks // self._ranks_per_host
        together = {"world": num_ranks, "host": self._ranks_per_host, "across": hosts}
        each = [sum(model.ms_per_byte(together[one.over]) for model in one.passes) for one in self.collectives]
        return torch.tensor(each, dtype=torch.float64)

    def alone_ms_per_byte(self) -> Tensor:
        """Return :meth:`CollectiveModel.ms_per_byte` of a rank that sends alone, forward and backward, [2, C]."""
        each = [
            [0.0 if model is None else model.ms_per_byte() for model in (one.forward, one.backward)]
            for one in self.collectives
        ]
        return torch.tensor(each, dtype=torch.float64).view(-1, 2).T

    def ms(self, bytes_XCD: Tensor) -> Tensor:
        """Return the milliseconds [X] of all of them, forward and backward together, from the bytes that each rank
        sends to each peer. Collectives that move nothing take nothing."""
        return torch.stack([some.ms(bytes_XCD, self._ranks_per_host) for some in self._exchanges]).sum(0)

    def each_ms(self, bytes_CD: Tensor) -> list[float]:
        """Return the milliseconds of each collective, forward and backward together."""
        each = (Exchanges(self.collectives, [column]) for column in range(len(bytes_CD)))
        return [float(one.ms(bytes_CD, self._ranks_per_host)) for one in each]


@dataclass(frozen=True)
class Reached:
    """Shares of a bandwidth, what a collective takes however little it moves, and the most that software moves."""

    inside: float
    """Share of a rank's link to the others of its host."""
    all_to_all: float
    """Share of a rank's network, in an all-to-all."""
    rings: float
    """Share of a whole host's network in rings and trees."""
    inside_ms: float
    between_ms: float
    copied_bytes_per_ms: float = math.inf
    """Most bytes of an all-to-all, of all ranks of a host together."""
    ringed_bytes_per_ms: float = math.inf
    """Most bytes to all peers that a rank sends in reductions and all-gathers."""


NCCL = Reached(inside=0.8, all_to_all=0.78, rings=0.72, inside_ms=0.02, between_ms=0.14)
"""Fitted by ``benchmarks/collectives_prior.py``."""
GLOO = Reached(1.0, 1.0, 1.0, inside_ms=2.0, between_ms=2.0, copied_bytes_per_ms=5.2e6, ringed_bytes_per_ms=0.75e6)
"""Between measurements of two and of four ranks on two cores (``benchmarks/results/collectives.md``): the processor
copies what gloo sends, however fast memory is."""


@dataclass(frozen=True)
class Interconnect:
    """Hosts of alike ranks, of which the last may have fewer.

    All its models take the bytes that each rank sends to each peer, see
    :class:`~dreamshard_planner.cost.collectives.Collective`.
    """

    ranks: int
    ranks_per_host: int
    inside_bytes_per_ms: float
    """Bandwidth of a rank's link to all peers of its host together, one direction."""
    between_bytes_per_ms: float
    """Bandwidth of a rank's part of the network."""
    reached: Reached = NCCL
    memory_bytes_per_ms: float = math.inf
    """Bandwidth of a host's memory, which all copies between its ranks pass; infinite if each has a link past it."""

    @classmethod
    def of(cls, topology: Topology) -> Interconnect:
        """Read a topology's bandwidths."""
        per_host = min(topology.intra_group_size, topology.world_size)
        bandwidths, has_links = topology.comms_bandwidths, topology.compute_device != "cpu"
        return cls(
            topology.world_size,
            per_host,
            bandwidths.intra_host_bw,
            bandwidths.inter_host_bw,
            NCCL if has_links else GLOO,
            math.inf if has_links else topology.ddr_mem_bw,
        )

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    def all_to_all(self) -> CollectiveModel:
        """Return the model between all ranks, limited by the slower of a rank's traffic inside and between hosts."""
        peers, inside = max(1, self.ranks - 1), max(1, self.ranks_per_host - 1)
        others = (self.hosts - 1) * self.ranks_per_host  # of a rank of the last host
        model = self._world(self._inside * peers / inside, self._all_to_all * peers / max(1, others))
        return replace(model, shared_bytes_per_ms=self.hosts * self._copied)

    def lookups(self) -> CollectiveModel:
        """One all-to-all after the other; GPUs are taken to sort ids in no time."""
        model = self.all_to_all()
        return replace(model, latency_ms=LOOKUP_EXCHANGES * model.latency_ms)

    def reduce_scatter(self) -> CollectiveModel:
        """Return the model between all ranks; an all-gather takes as long."""
        return self._rings(1, 1)

    def all_reduce(self) -> CollectiveModel:
        """Return the model between all ranks; an n-th of the tensor counts as the bytes to each peer. A tree sends
        the tensor to each other host once and back, a ring to each other rank."""
        once = (1 - 1 / self.ranks) / max(0.5, 1 - 1 / self.hosts)
        return self._rings(1 / 2, once / 2)

    def host_reduce_scatter(self) -> CollectiveModel:
        """Return the model between the ranks of one host; an all-gather takes as long."""
        return self._model(self.ranks_per_host, min(self._inside, self.reached.ringed_bytes_per_ms), between=False)

    def across(self) -> CollectiveModel:
        """Return the all-to-all between the ranks of the same place on every host."""
        # As many go on side by side as a host has ranks.
        return self._model(self.hosts, self._all_to_all, True, self.hosts * self._copied / self.ranks_per_host)

    def all_to_one(self) -> CollectiveModel:
        """Return the model from all ranks to one, over its host's link and then the network. All ranks count as
        sending alike, itself included."""
        if self.ranks == 1:
            return self._model(1, self.inside_bytes_per_ms, between=False)
        inside = (self.ranks_per_host - 1) / self.inside_bytes_per_ms
        links = inside + (self.ranks - self.ranks_per_host) / self.between_bytes_per_ms
        ms_per_byte = (links + (self.ranks - 1) / self.memory_bytes_per_ms) / self.ranks
        # Of two ends, so that nothing counts but the bytes of all ranks together.
        model = self._model(2, MAX_BYTES_PER_MS, self.ranks_per_host == 1, 1 / ms_per_byte)
        return replace(model, latency_ms=LATENCY_MS)

    @property
    def _inside(self) -> float:
        return self.inside_bytes_per_ms * self.reached.inside

    @property
    def _all_to_all(self) -> float:
        return self.between_bytes_per_ms * self.reached.all_to_all

    @property
    def _copied(self) -> float:
        return min(self.memory_bytes_per_ms, self.reached.copied_bytes_per_ms)

    def _rings(self, inside: float, between: float) -> CollectiveModel:
        """Return the model of rings that reach such shares of a rank's link and of its host's network."""
        network = self.ranks_per_host * self.between_bytes_per_ms * self.reached.rings
        rates = self._inside * inside, network * between
        return self._world(*(min(rate, self.reached.ringed_bytes_per_ms) for rate in rates))

    def _world(self, inside: float, between: float) -> CollectiveModel:
        """Return a model between all ranks, at the speed of the slowest link."""
        if self.hosts == 1:
            return self._model(self.ranks, inside, between=False)
        return self._model(self.ranks, between if self.ranks_per_host == 1 else min(inside, between), between=True)

    def _model(
        self, ranks: int, bytes_per_ms: float, between: bool, shared_bytes_per_ms: float = math.inf
    ) -> CollectiveModel:
        given = self.between_bytes_per_ms if between else min(self.inside_bytes_per_ms, self.memory_bytes_per_ms)
        latency_ms = self.reached.between_ms if between else self.reached.inside_ms
        prior = "prior from published times of NCCL, " if self.reached is NCCL else "prior from gloo elsewhere, "
        source = f"{prior}topology's {given * 1e3 / 1e9:.0f} GB/s, nothing measured"
        return CollectiveModel(ranks, bytes_per_ms, latency_ms, source, shared_bytes_per_ms)
