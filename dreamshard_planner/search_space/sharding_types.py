# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The tables of compute kernels and of sharding types, which all code that depends on either reads.

Options of other kernels are priced by their estimates. A new type is one more row, and its measured collectives. The
rows follow TorchRec 1.6.1 to 1.9.2, and tests compare them with its sharders and its training. Imported before torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Literal, TypeVar


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
CPU_OPTIMIZERS = ("exact_sgd", "exact_adagrad", "exact_rowwise_adagrad", "emainplace_rowwise_adagrad")
"""In-backward optimizers of FBGEMM's CPU kernels, seen by running all of FBGEMM 1.8; others fail in an assertion."""
CPU_WEIGHTS = ("float32", "float16")
"""Weight types that FBGEMM trains on CPUs; others fail in the first step."""
CPU_OUTPUTS = ("float32", "float16")
"""Output types of FBGEMM's fused kernels on CPUs; others fail in the first step."""
SERVING_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.serves)


def is_known(name: str) -> bool:
    """Return whether the planner has costs of a kernel."""
    return name in KERNELS


def kernel_of(name: str) -> Kernel:
    """Return the row of a kernel. An unknown kernel counts as one in device memory."""
    return KERNELS.get(name, Kernel("device"))


def in_host_memory(name: str) -> bool:
    """Return whether a GPU reads the weights over its link to the host, cached or not."""
    return kernel_of(name).memory in ("uvm", "uvm_caching")


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
    return sharding_type if kernel in KERNELS and kernel_of(kernel).memory == "device" else f"{sharding_type} {kernel}"


Case = TypeVar("Case")
Ranks = Literal["rank", "host", "world"]
"""One rank, the ranks of one host, or all ranks."""


@dataclass(frozen=True)
class Exchange:
    """A collective that carries a table's output forward and its gradient backward."""

    over: Literal["world", "host", "across"]
    """Ranks that exchange, see :class:`~dreamshard_planner.cost.collectives.Collective`."""
    forward: str | None
    """Operation of the forward pass: ``all_to_all``, ``reduce_scatter`` or None."""
    backward: str
    """Operation of the backward pass; an ``all_reduce`` is of the whole table's gradient."""

    @property
    def operation(self) -> str:
        """Operation that names the exchange."""
        return self.forward or self.backward


@dataclass(frozen=True)
class Quantized:
    """Storage of a quantized table."""

    shards_apart: bool
    """True if its shards keep scales and biases apart from weights, as sharder or module ask."""
    columns_are_dims: bool
    """True if a column of its tensor is an embedding dimension, not a byte of scales or wider weights."""


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """Facts that decide whether a table may be sharded by some type."""

    compute_device: str
    optimizer: str
    """FBGEMM's name of the in-backward optimizer, in lower case."""
    weight_bytes: int
    is_mean: bool
    is_weighted: bool
    """True if the module asks for weights of lookups, or batches are known to have them."""
    is_sequence: bool
    bag_mode: str | None
    """Mode of an ``nn.EmbeddingBag``; None for other modules."""
    attached: bool
    """True if in-backward optimizers are attached to the replicas of data-parallel tables."""
    replicas_follow: bool
    """True if attached optimizers equal the table's own, see ``replica_rules.py``."""
    quantized: Quantized | None
    varied_batches: bool
    """True if batch sizes of its module are known to vary by feature."""
    grid_takes_varied_batches: bool
    """True if the installed TorchRec runs grid_shard on such batches."""
    in_groups: bool
    """True for several sharding groups (2D parallelism)."""


@dataclass(frozen=True)
class CutFacts:
    """Facts that decide whether a table may be cut as one option does."""

    kernel: str
    compute_device: str
    is_bag: bool
    """True for an ``nn.EmbeddingBag``."""
    has_slices: bool
    """True if no shard has all columns."""
    lacks_rows: bool
    """True if some shard has no rows."""
    is_too_wide: bool
    """True if a GPU would train more columns at once than FBGEMM's kernels can."""
    misses_rows: bool
    """True if some block starts or ends elsewhere than TorchRec's lookup assumes."""


@dataclass(frozen=True)
class Reason(Generic[Case]):
    """A reason not to propose a type for some tables, or some options of it."""

    where: str
    """Tables or options that it holds for, for the documentation."""
    holds: Callable[[Case], bool]
    """Returns whether it holds for a table or an option."""
    text: str


ALL_TO_ALL = (Exchange("world", "all_to_all", "all_to_all"),)
THROUGH_HOSTS = (Exchange("host", "reduce_scatter", "all_gather"), Exchange("across", "all_to_all", "all_to_all"))
"""Outputs are summed in the host that computes them, then sent to the ranks of the same place on every host."""


@dataclass(frozen=True)
class ShardingTypeSpec:
    """TorchRec's treatment of a table of one sharding type."""

    in_words: str
    """Ranks and their work in the forward pass, for the documentation."""
    _: KW_ONLY
    span: Ranks = "rank"
    """Ranks of one unit of its shards: consecutive ranks with one shard each, for ``host`` those of one host."""
    batch: Ranks = "world"
    """Ranks whose samples each kernel sees. ``rank``: every shard is the whole table, for its own rank's samples."""
    splits_rows: bool = False
    splits_columns: bool = False
    exchanges: tuple[Exchange, ...] = ALL_TO_ALL
    """Exchanges of pooled outputs, in the order of the forward pass."""
    sequence_exchanges: tuple[Exchange, ...] | None = None
    """Exchanges of sequence tables; None: as pooled ones."""
    kernels: tuple[str, ...] = FUSED_KERNELS
    """Compute kernels that TorchRec may give it."""
    broken: tuple[Reason[TableFacts], ...] = ()
    """Tables for which TorchRec computes wrongly or crashes: never proposed."""
    broken_cuts: tuple[Reason[CutFacts], ...] = ()
    """Options for which TorchRec computes wrongly or crashes."""
    inexact: tuple[Reason[TableFacts], ...] = ()
    """Tables that train differently than whole ones: proposed if a constraint names the type, or with
    ``exact_training=False``."""
    pooled_on: tuple[str, ...] = ("cuda",)
    """Devices for which TorchRec's sharders offer it for an ``EmbeddingBagCollection``."""
    sequence_on: tuple[str, ...] = ()
    """Devices for which TorchRec's sharders offer it for an ``EmbeddingCollection``."""
    only_named: bool = False
    """True if TorchRec offers it only to tables whose constraint names it."""
    runs_as: str | None = None
    """Type that is equal at run time and gives a plan more freedom."""
    divides_means_late: bool = False
    """True if TorchRec pools mean tables as sums, and divides the module's whole output afterwards."""

    @property
    def is_whole(self) -> bool:
        """True if one rank holds and computes the whole table."""
        return self.span == "rank" and not (self.splits_rows or self.splits_columns)

    @property
    def splits_unasked(self) -> bool:
        """True if it splits tables without being named, in a way that no other type does."""
        return (self.splits_rows or self.splits_columns) and not (self.runs_as or self.only_named)

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the whole table."""
        return self.batch == "rank"

    def exchanges_of(self, pooled: bool) -> tuple[Exchange, ...]:
        """Return the exchanges of pooled or of sequence tables."""
        return self.exchanges if pooled or self.sequence_exchanges is None else self.sequence_exchanges


ELEMENTWISE_OPTIMIZERS = frozenset({"sgd", "exact_sgd", "exact_adagrad", "adam"})
"""FBGEMM's in-backward optimizers whose state has the shape of the weights, so that column slices train exactly. Others
keep a state or a norm per row, of which every slice has its own."""

STATE_PER_SLICE: Reason[TableFacts] = Reason(
    "optimizers that are not element-wise (row-wise Adagrad, LAMB, ...)",
    lambda s: s.optimizer not in ELEMENTWISE_OPTIMIZERS,
    "every column slice keeps a row-wise optimizer state of its own",
)
MOST_CUDA_COLUMNS = 1024
"""Most columns of a shard: FBGEMM's optimizers refuse more, and its pooled forward has returned zeros for more."""

OPTIMIZER_OUTSIDE: Reason[TableFacts] = Reason(
    "unless optimizers are attached to the replicas",
    lambda s: not s.attached,
    "it takes the in-backward optimizer away, unless this package's DistributedModelParallel or "
    "attach_optimizers(model) gives it back (planned with optimizers_attached=True)",
)
REPLICAS_OF_GROUPS: Reason[TableFacts] = Reason(
    "several sharding groups (2D parallelism)",
    lambda s: s.in_groups,
    "its replicas step by the gradient of all groups, and other tables by that of their group, to be averaged",
)
HALF_REPLICAS: Reason[TableFacts] = Reason(
    "attached optimizers of half-precision weights",
    lambda s: s.attached and s.weight_bytes < 4,
    "each replica's gradient is rounded to the type of the weights before ranks average it, and one below 3e-8 is zero "
    "in float16; fused kernels sum in float32, and on GPUs round weights at random by default",
)
REPLICAS_DIFFER: Reason[TableFacts] = Reason(
    "attached optimizers, and any but SGD, Adagrad and row-wise Adagrad without weight decay",
    lambda s: s.attached and not s.replicas_follow,
    "no optimizer of its replicas does what the table's own does in the backward",
)
SUMS_FOR_MEANS: Reason[TableFacts] = Reason(
    "mean pooling", lambda s: s.is_mean, "TorchRec returns sums where mean pooling is asked for"
)
WEIGHTED_MEANS: Reason[TableFacts] = Reason(
    "mean pooling of weighted lookups (by their module, or by is_weighted of a constraint or statistics)",
    lambda s: s.is_mean and s.is_weighted,
    "TorchRec divides weighted means by the sum of the weights in row blocks, but by the number of lookups in whole "
    "tables",
)
MEANS_ADDED_UP: Reason[TableFacts] = Reason(
    "mean pooling of quantized tables",
    lambda s: s.quantized is not None and s.is_mean,
    "TorchRec adds up the means of a quantized table's blocks",
)
SCALES_IN_ROWS: Reason[TableFacts] = Reason(
    "quantized tables whose scales lie in their rows",
    lambda s: s.quantized is not None and not s.quantized.shards_apart,
    "TorchRec splits quantized tables only if scales lie apart from weights, as the sharder's fused_params must say "
    "(use DEFAULT_SHARDERS of torchrec.inference.modules)",
)
SCALES_IN_COLUMNS: Reason[TableFacts] = Reason(
    "quantized tables that do not keep scales apart",
    lambda s: s.quantized is not None and not s.quantized.columns_are_dims,
    "its columns are bytes, among them scales, and TorchRec would cut through them (quantize it after "
    "torchrec.quant's quant_prep_enable_quant_state_dict_split_scale_bias_for_types)",
)
QUANTIZED_SEQUENCES: Reason[TableFacts] = Reason(
    "quantized EmbeddingCollection on CPUs",
    lambda s: s.quantized is not None and s.compute_device == "cpu" and s.is_sequence,
    "TorchRec has no such sharding of quantized sequences on CPUs",
)
DENSE_SEQUENCES: Reason[TableFacts] = Reason(
    "EmbeddingCollection on CPUs",
    lambda s: s.compute_device == "cpu" and s.is_sequence,
    "TorchRec's dense kernel for CPU cannot do without pooling, and crashes",
)
VARIED_GRIDS: Reason[TableFacts] = Reason(
    "batches whose size varies by feature, before TorchRec 1.9",
    lambda s: s.varied_batches and not s.grid_takes_varied_batches,
    "grid_shard of this TorchRec crashes on batches whose size varies by feature (TorchRec 1.9 takes them)",
)
VARIED_BATCHES: Reason[TableFacts] = Reason(
    "batches whose size varies by feature, where batch_sizes of a constraint or statistics say so",
    lambda s: s.varied_batches,
    "TorchRec's replicas take no batches whose size varies by feature",
)
WHOLE_BAGS: Reason[TableFacts] = Reason(
    "nn.EmbeddingBag", lambda s: s.bag_mode is not None, "TorchRec's ShardedEmbeddingBag refuses it"
)
BAGS_OF_MEANS: Reason[TableFacts] = Reason(
    "nn.EmbeddingBag of another mode than sum",
    lambda s: s.bag_mode not in (None, "sum"),
    "TorchRec's ShardedEmbeddingBag knows sums alone (leave EmbeddingBagSharder out of the sharders)",
)
SLICES_OF_BAGS: Reason[CutFacts] = Reason(
    "several slices of an nn.EmbeddingBag",
    lambda cut: cut.is_bag and cut.has_slices,
    "TorchRec's ShardedEmbeddingBag sends lookups to one alone, and fails (raise min_partition to the table's dim)",
)
SLICES_OF_A_STORE: Reason[CutFacts] = Reason(
    "several slices by compute kernel `key_value`",
    lambda cut: cut.kernel == KEY_VALUE and cut.has_slices,
    "TorchRec wants each slice on a rank of its own, which the planner cannot promise (raise min_partition to the "
    "table's dim)",
)
BLOCKS_WITHOUT_ROWS: Reason[CutFacts] = Reason(
    "too few rows for all ranks, on CPUs",
    lambda cut: cut.compute_device == "cpu" and cut.lacks_rows,
    "some rank would have no rows of it, and FBGEMM's CPU kernels crash on that",
)
TOO_WIDE: Reason[CutFacts] = Reason(
    f"shards of more than {MOST_CUDA_COLUMNS:,} columns, on GPUs",
    lambda cut: cut.is_too_wide,
    f"FBGEMM's CUDA kernels train {MOST_CUDA_COLUMNS:,} columns at most (allow column_wise with a min_partition of at "
    "most that; for a row-wise optimizer, name column_wise in the table's constraint or set exact_training=False)",
)
MISSED_ROWS: Reason[CutFacts] = Reason(
    "blocks of rows that are not equal",
    lambda cut: cut.misses_rows,
    "TorchRec looks rows up in equal blocks, and would read and train other rows",
)

TW, CW, TWCW, RW, TWRW = "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise"
GRID, DP = "grid_shard", "data_parallel"
ANYWHERE = ("cpu", "cuda")

SHARDING_TYPES = {
    TW: ShardingTypeSpec(
        "the owner: the whole table, for the samples of all ranks",
        kernels=(*FUSED_KERNELS, *SERVING_KERNELS),
        broken=(WHOLE_BAGS,),
        broken_cuts=(TOO_WIDE,),
        sequence_on=ANYWHERE,
        pooled_on=ANYWHERE,
    ),
    CW: ShardingTypeSpec(
        "each owner its columns, for all samples; **every lookup is done once per slice**",
        splits_columns=True,
        kernels=(*FUSED_KERNELS, *SERVING_KERNELS),
        broken=(BAGS_OF_MEANS, SCALES_IN_ROWS, SCALES_IN_COLUMNS, QUANTIZED_SEQUENCES),
        broken_cuts=(SLICES_OF_BAGS, SLICES_OF_A_STORE, TOO_WIDE),
        inexact=(STATE_PER_SLICE,),
        sequence_on=ANYWHERE,
        pooled_on=ANYWHERE,
    ),
    TWCW: ShardingTypeSpec(
        "as `column_wise`",
        splits_columns=True,
        broken=(BAGS_OF_MEANS,),
        broken_cuts=(SLICES_OF_BAGS, SLICES_OF_A_STORE, TOO_WIDE),
        inexact=(STATE_PER_SLICE,),
        pooled_on=ANYWHERE,
        runs_as=CW,
    ),
    RW: ShardingTypeSpec(
        "every rank its block of rows: all samples, but only the lookups that fall into it",
        span="world",
        splits_rows=True,
        exchanges=(Exchange("world", "reduce_scatter", "all_gather"),),
        sequence_exchanges=ALL_TO_ALL,
        kernels=(*FUSED_KERNELS, *SERVING_KERNELS),
        broken=(BAGS_OF_MEANS, WEIGHTED_MEANS, MEANS_ADDED_UP, SCALES_IN_ROWS),
        broken_cuts=(BLOCKS_WITHOUT_ROWS, MISSED_ROWS, TOO_WIDE),
        sequence_on=ANYWHERE,
        divides_means_late=True,
    ),
    TWRW: ShardingTypeSpec(
        "the ranks of one host, a block of rows each",
        span="host",
        splits_rows=True,
        exchanges=THROUGH_HOSTS,
        broken=(BAGS_OF_MEANS, WEIGHTED_MEANS),
        broken_cuts=(BLOCKS_WITHOUT_ROWS, MISSED_ROWS, TOO_WIDE),
        divides_means_late=True,
    ),
    GRID: ShardingTypeSpec(
        "column slices, each cut into blocks of rows over the ranks of one host",
        span="host",
        splits_rows=True,
        splits_columns=True,
        exchanges=THROUGH_HOSTS,
        broken=(BAGS_OF_MEANS, SUMS_FOR_MEANS, VARIED_GRIDS),
        broken_cuts=(SLICES_OF_BAGS, SLICES_OF_A_STORE, BLOCKS_WITHOUT_ROWS, MISSED_ROWS, TOO_WIDE),
        inexact=(STATE_PER_SLICE,),
        only_named=True,
    ),
    DP: ShardingTypeSpec(
        "every rank the whole table, for its own samples",
        span="world",
        batch="rank",
        exchanges=(Exchange("world", None, "all_reduce"),),
        kernels=(DENSE,),
        broken=(BAGS_OF_MEANS, DENSE_SEQUENCES, VARIED_BATCHES),
        broken_cuts=(TOO_WIDE,),
        inexact=(OPTIMIZER_OUTSIDE, HALF_REPLICAS, REPLICAS_DIFFER, REPLICAS_OF_GROUPS),
        sequence_on=ANYWHERE,
        pooled_on=ANYWHERE,
    ),
}
"""All sharding types, by TorchRec's names."""
LATE_MEANS = frozenset(kind for kind, spec in SHARDING_TYPES.items() if spec.divides_means_late)
"""Types that a mean-pooled table may have only if all tables of its module have one of them."""
MIXED_MEAN = (
    "if a mean-pooled table is row_wise or table_row_wise, TorchRec also divides the outputs of the module's tables of "
    "other types"
)
"""Defect of a module's tables together."""


def broken(sharding_type: str, facts: TableFacts) -> str | None:
    """Return why the type is never proposed for such a table, or None."""
    return first_reason(SHARDING_TYPES[sharding_type].broken, facts)


def inexact(sharding_type: str, facts: TableFacts) -> str | None:
    """Return the change in training by the type, or None if the table trains as a whole one."""
    return first_reason(SHARDING_TYPES[sharding_type].inexact, facts)


def first_reason(reasons: tuple[Reason[Case], ...], case: Case) -> str | None:
    """Return the text of the first reason that holds, or None."""
    return next((reason.text for reason in reasons if reason.holds(case)), None)
