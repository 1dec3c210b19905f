# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""FBGEMM's kernels by TorchRec's names, one row each. Estimates of the options price other kernels, such as
``customized_kernel``. Read everywhere, also before torch is imported: this module imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One compute kernel."""

    memory: str
    """Where the weights live, one of :data:`~dreamshard_planner.workload.tables.MEMORIES`."""
    dense: bool = False
    """Whether gradients leave the kernel, as large as the table, for an optimizer of the script's own."""
    store: bool = False
    """Whether rows lie in a key-value store; hits of the caches before it are not counted on. TorchRec takes such a
    kernel only where a constraint names it."""
    virtual: bool = False
    """Whether the table's config must ask for a table that grows with its ids, so that a list of tables cannot."""
    serves: bool = False
    """Whether it serves quantized tables: they are read, and never trained."""

    @property
    def on_device(self) -> bool:
        """Whether the weights live in the device's own memory."""
        return self.memory == "device"


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
CPU_OPTIMIZERS = ("exact_sgd", "exact_adagrad", "exact_rowwise_adagrad", "emainplace_rowwise_adagrad")
"""In-backward optimizers of FBGEMM's fused kernels on CPUs; others end in an AssertionError when the model is sharded.
Seen by running every optimizer of FBGEMM 1.8."""
CPU_WEIGHTS = ("float32", "float16")
"""Types of weights that FBGEMM's fused and dense kernels train on CPUs; others fail in the first step."""
CPU_OUTPUTS = ("float32", "float16")
"""Types of pooled or gathered outputs that FBGEMM's fused kernels have on CPUs; others fail in the first step."""
SERVING_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.serves)


def is_known(name: str) -> bool:
    """Whether the planner has costs of a kernel; else the estimates of its options are its price."""
    return name in KERNELS


def kernel_of(name: str) -> Kernel:
    """Return the row of a kernel. An unknown kernel counts as one in device memory."""
    return KERNELS.get(name, Kernel("device"))


def memory_of(name: str) -> str:
    """Where a kernel's weights live; the device for an unknown kernel."""
    return kernel_of(name).memory


def in_host_memory(name: str) -> bool:
    """Whether a GPU reads a kernel's weights over its link to the host, cached or not."""
    return memory_of(name) in ("uvm", "uvm_caching")


def fuses_as(name: str) -> str:
    """What TorchRec groups tables by: wherever their weights live, fused kernels are one, and those that serve. An
    unknown kernel is apart from all others."""
    kernel = kernel_of(name)
    apart = kernel.dense or kernel.store or not is_known(name)
    return name if apart else QUANT if kernel.serves else FUSED


def serves(name: str) -> bool:
    """Whether a kernel serves quantized tables."""
    return kernel_of(name).serves


def sharding_in_words(sharding_type: str, kernel: str) -> str:
    """``row_wise``, or ``row_wise fused_uvm`` where the weights don't live in the device's own memory."""
    return sharding_type if kernel in KERNELS and KERNELS[kernel].on_device else f"{sharding_type} {kernel}"
