# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A ``PlannerProvider`` for the planning API that TorchRec has from release 1.9 on.

The module can be imported beside older releases. Methods import the parts of the API when they are called.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from torchrec.distributed.planner.types import StorageReservation, Topology

from dreamshard_planner.devices import GPUS, Machine, gpu_of
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.search_space.options import refused

GIB = 1024**3
RESERVATION = (
    "storage_reservation_policy",
    "storage_reservation_percentage",
    "dense_tensor_estimate",
    "parameter_multiplier",
)
"""Fields of TorchRec's ``PlannerConfig`` that size the storage reservation."""
HONOURED = {"planner_variant", "debug", "timeout_seconds", *RESERVATION}
"""Fields of TorchRec's ``PlannerConfig`` that a DreamShardPlanner has a use for."""


class DreamShardProvider:
    """TorchRec's ``PlannerProvider`` that plans with DreamShardPlanner, for the GPUs that a SKU names.

    Args:
        arguments: further arguments of :class:`~dreamshard_planner.planner.DreamShardPlanner`, such as ``statistics``.

    Example::

        executor = DefaultPlannerExecutor(DreamShardProvider(statistics=statistics))
        ProductionPlannerOrchestrator(executor, sku="h100").plan(request, PlannerSessionContext(request, {}))
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments

    def build_topology(self, sku: str, request: Any, ctx: Any) -> Topology:
        """Return the topology of the request's ranks on the SKU's GPUs.

        Args:
            sku: a name of :data:`~dreamshard_planner.devices.GPUS` in any case, or the driver's name of such a card;
                any name where the request's ``compute_device`` is ``"cpu"``.
            request: TorchRec's ``ShardingPlanRequest``; its memory sizes beat the data sheet's.
            ctx: TorchRec's ``PlannerSessionContext``, which gets the source of the figures.

        Raises:
            TaskError: the SKU is unknown.
            PlannerError: the ranks do not fill hosts, or the request asks for pods or another device.
        """
        ranks, on_host = request.world_size, request.local_world_size
        if ranks % on_host:
            raise refused(f"world_size {ranks} must be a multiple of local_world_size {on_host}.")
        if request.pod_size not in (None, on_host):
            raise refused(
                f"pod_size {request.pod_size} is not supported: DreamShardProvider knows links within and between "
                f"hosts. Leave pod_size out, or give local_world_size={request.pod_size}."
            )
        device = request.compute_device or "cuda"
        if device not in ("cpu", "cuda"):
            raise refused(f"compute_device must be 'cuda' or 'cpu', got {device!r}.")
        gpu = None if device == "cpu" else gpu_of(sku) or sku.lower().replace("_", "-")
        own_gib, host_gib = (request.ddr_gb, None) if device == "cpu" else (request.hbm_gb, request.ddr_gb)
        machine = Machine(
            ranks_per_host=on_host,
            hosts=ranks // on_host,
            device=device,
            gpu=gpu,
            memory_bytes=None if own_gib is None else int(own_gib * GIB),
            host_memory_bytes=None if host_gib is None else int(host_gib * GIB),
        )
        ctx.hw_source[sku] = "request" if gpu is None else GPUS[gpu].source
        return machine.topology()

    def build_storage_reservation(self, sku: str, request: Any) -> StorageReservation:
        """Return the reservation that TorchRec's own provider makes of the request."""
        from torchrec.distributed.planner.provider import DefaultPlannerProvider

        return DefaultPlannerProvider().build_storage_reservation(sku, request)

    def build_planner(
        self, sku: str, *, topology: Topology, storage_reservation: StorageReservation, ctx: Any
    ) -> DreamShardPlanner:
        """Return the planner of the request.

        Raises:
            PlannerError: the request's ``PlannerConfig`` selects parts of another planner.
        """
        from torchrec.distributed.planner.types import PlannerVariant

        config = ctx.request.planner_config
        unused = {field.name: getattr(config, field.name) for field in fields(config) if _is_unused(field, config)}
        if config.planner_variant not in (PlannerVariant.UNSET, PlannerVariant.OSS):
            unused["planner_variant"] = config.planner_variant.value
        if unused:
            raise refused(
                f"PlannerConfig has {', '.join(f'{name}={value!r}' for name, value in unused.items())}, which "
                "DreamShardPlanner has no use for. Leave these fields out, or plan with TorchRec's "
                "DefaultPlannerProvider."
            )
        return DreamShardPlanner(
            topology=topology,
            batch_size=ctx.request.batch_size,
            storage_reservation=storage_reservation,
            constraints=ctx.request.constraints,
            stats=ctx.stats,
            debug=config.debug,
            timeout_seconds=config.timeout_seconds,
            **self._arguments,
        )


def _is_unused(field: Any, config: Any) -> bool:
    """Return whether a field of a PlannerConfig asks for something that DreamShardPlanner does not do."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return field.name not in HONOURED and getattr(config, field.name) != default
