# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""FBGEMM's kernels by TorchRec's names, one row each; options of other kernels are priced by their estimates.

This module imports nothing, since it is read before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One compute kernel."""

    memory: str
    """Memory of the weights, one of :data:`~dreamshard_planner.workload.tables.MEMORIES`."""
    dense: bool = False
    """True if table-sized gradients leave the kernel for an optimizer outside."""
    store: bool = False
    """True for a key-value store, which TorchRec uses only if a constraint names it; its cache hits are not counted."""
    virtual: bool = False
    """True if the table grows with its ids, for which its config must ask."""
    serves: bool = False
    """True for quantized tables, which are never trained."""


FUSED, CACHING, DENSE, KEY_VALUE, QUANT = "fused", "fused_uvm_caching", "dense", "key_value", "quant"

KERNELS = {
    FUSED: Kernel("device"),
    CACHING: Kernel("uvm_caching"),
    "fused_uvm": Kernel("uvm"),
    KEY_VALUE: Kernel("ssd", store=True),
    DENSE: Kernel("device", dense=True),
    "ssd_virtual_table": Kernel("ssd", store=True, virtual=True),
    "dram_virtual_table": Kernel("uvm", store=True, virtual=True),
    "dram_ssd_virtual_table": Kernel("ssd", store=True, virtual=True),
    QUANT: Kernel("device", serves=True),
    "quant_uvm_caching": Kernel("uvm_caching", serves=True),
    "quant_uvm": Kernel("uvm", serves=True),
}
FUSED_KERNELS = tuple(name for name, kernel in KERNELS.items() if not kernel.dense and not kernel.serves)
SERVING_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.serves)


def is_known(name: str) -> bool:
    """Return whether the planner has costs of a kernel."""
    return name in KERNELS


def kernel_of(name: str) -> Kernel:
    """Return the row of a kernel. An unknown kernel counts as one in device memory."""
    return KERNELS.get(name, Kernel("device"))


def memory_of(name: str) -> str:
    """Return the memory of a kernel's weights; the device's for an unknown kernel."""
    return kernel_of(name).memory


def in_host_memory(name: str) -> bool:
    """Return whether a GPU reads the weights over its link to the host, cached or not."""
    return memory_of(name) in ("uvm", "uvm_caching")


def fuses_as(name: str) -> str:
    """Return the kernel that TorchRec groups tables by: one for fused kernels of any memory, one for serving ones."""
    kernel = kernel_of(name)
    apart = kernel.dense or kernel.store or not is_known(name)
    return name if apart else QUANT if kernel.serves else FUSED


def serves(name: str) -> bool:
    """Return whether a kernel serves quantized tables."""
    return kernel_of(name).serves


def sharding_in_words(sharding_type: str, kernel: str) -> str:
    """Return ``row_wise``, or ``row_wise fused_uvm`` for weights outside the device's own memory."""
    return sharding_type if kernel in KERNELS and memory_of(kernel) == "device" else f"{sharding_type} {kernel}"
