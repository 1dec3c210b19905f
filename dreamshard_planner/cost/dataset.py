# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measured costs on disk: columnar, ``.npz``; and as tensors, which networks are fitted to and judged by.

A file keeps workloads, not features, so that features may change later, and every sample.
Nothing is ever unpickled, and a file that is not whole is refused by name.

Shape letters: N sets, R repeats, 2 (forward, backward), S shards of all sets, 17 reuse bins.
Of tensors: X sets, F features, H channels.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import DatasetError
from dreamshard_planner.support.documents import check_version
from dreamshard_planner.support.files import MAX_READ_BYTES, check_readable, parse_json, write_whole
from dreamshard_planner.support.formatting import brief
from dreamshard_planner.workload.features import feature_matrix, features_of
from dreamshard_planner.workload.reuse import NUM_REUSE_BINS
from dreamshard_planner.workload.tables import MEMORIES, OPTIMIZERS, Workload

NPZ_SCHEMA = 2
"""Version of the layout; files of others are refused."""

REFERENCE_STRENGTH = 0.5
"""Share of a slow reference run that excuses a slow sample, from 0 to 1. The reference is noisy itself: on
200 sets measured three times over on two shared cores (5 repeats), two passes differed by 4.1 and 7.1 % (forward,
backward) at 0, by 3.4 and 4.6 % at 0.5, and by 6.6 and 5.8 % at 1."""

_MEASURED = tuple(entry for entry in fields(Workload) if entry.metadata.get("measured", True))
WORKLOAD_FIELDS = tuple(entry.name for entry in _MEASURED)
"""The per-shard columns, in order."""
FIELD_TYPES = {entry.name: str(entry.type) for entry in _MEASURED} | {"weight_bytes": "int"}
"""As written in :class:`Workload`, but for weights: what is measured is trained, in whole bytes."""

_AS_MEASURED: dict[str, Any] = {entry.name: entry.default for entry in fields(Workload) if entry not in _MEASURED}

KIND = "dreamshard cost dataset"
_STORED_ONCE = ("name", "rows", "pooling_factor", "distinct_rows", "num_features", "histogram_index", "dim")
"""Columns of which a file has each combination once; the others are, as a rule, the same all over a set."""
_LZMA_BYTES = 1 << 16
"""Least size of arrays that LZMA compresses: by a third more than deflate, but it takes 10 ms to start."""
_KEY_FIELDS = ("device", "name", "threads", "fbgemm")
_DTYPES = {"str": np.str_, "int": np.int64, "float": np.float64, "bool": np.bool_, "tuple[float, ...]": np.float64}

_AT_LEAST_ONE = ("rows", "dim", "batch_size", "num_features", "weight_bytes")
_ONE_OF = {"optimizer": OPTIMIZERS, "memory": MEMORIES}

Hardware = Mapping[str, str | int]


def hardware_key(hardware: Hardware) -> dict[str, str | int]:
    """The part of a hardware description that must agree inside one file."""
    told = {name: hardware[name] for name in ("instruction_set",) if name in hardware}  # older files lack it
    return {name: hardware.get(name, "unknown") for name in _KEY_FIELDS} | told


def same_hardware(ours: Hardware, theirs: Hardware) -> bool:
    """Compare two descriptions by the fields of :func:`hardware_key` that both have."""
    first, second = hardware_key(ours), hardware_key(theirs)
    return all(first[name] == second[name] for name in first.keys() & second.keys())


@dataclass(frozen=True, eq=False)
class CostDataset:
    """Sets of workloads, each one fused group, with the times of every repeat."""

    columns: dict[str, np.ndarray]
    """One array [S] per measured field of ``Workload`` (``reuse_histogram``: [S, 17]), shards of set 0 first."""

    set_offsets: np.ndarray
    """[N + 1] int64: set i holds shards ``set_offsets[i]`` to ``set_offsets[i + 1]``."""

    samples_ms: np.ndarray
    """[N, R, 2] float64: forward and backward milliseconds of each round."""

    hardware: Hardware
    """Description from ``measure.describe_hardware``."""

    reference_ms: np.ndarray | None = None
    """[N, R, 2] float64: the fixed reference set, timed right beside each sample."""

    seed: int = 0
    """Seed of the indices."""

    created: str = ""
    """UTC date and time, ISO 8601."""

    def __post_init__(self) -> None:
        for field_name, problem in self._problems():
            raise DatasetError(f"cost dataset: {field_name} {problem}")

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of the arrays, as field and problem, the first one first."""
        if set(self.columns) != set(WORKLOAD_FIELDS):
            yield "columns", f"are {sorted(self.columns)}, expected {sorted(WORKLOAD_FIELDS)}"
            return
        for name, column in self._arrays().items():
            expected = _DTYPES.get(FIELD_TYPES.get(name, ""), np.int64 if name == "set_offsets" else np.float64)
            if column.dtype != expected and not (column.dtype.kind == "U" and expected is np.str_):
                yield name, f"holds {column.dtype}, not {np.dtype(expected)}"
        offsets, shards = self.set_offsets, self.columns["name"].size
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != shards:
            yield "set_offsets", f"must run from 0 to the {shards} shards"
        elif np.any(np.diff(offsets) < 1):
            yield "set_offsets", "must grow: a set holds at least one shard"
        for name, column in self.columns.items():
            if column.shape != ((shards, NUM_REUSE_BINS) if name == "reuse_histogram" else (shards,)):
                yield name, f"has shape {column.shape}, expected one entry per shard ({shards})"
            elif name in _AT_LEAST_ONE and np.any(column < 1):
                yield name, "holds values below 1"
            elif name in _ONE_OF and (unknown := sorted(set(column.tolist()) - set(_ONE_OF[name]))):
                yield name, f"must be one of {', '.join(_ONE_OF[name])}, got {brief(unknown)}"
            elif column.dtype.kind == "f" and not np.all(np.isfinite(column) & (column >= 0)):
                yield name, "holds NaN, infinite or negative values"
        for name in ("samples_ms", "reference_ms"):
            times = getattr(self, name)
            if times is None:
                continue
            if times.ndim != 3 or times.shape[0] != len(offsets) - 1 or times.shape[1] < 1 or times.shape[2] != 2:
                yield name, f"has shape {times.shape}, expected [{len(offsets) - 1} sets, repeats, 2]"
            elif not np.all(np.isfinite(times) & (times > 0)):
                yield name, "holds times that are NaN, infinite, zero or negative"
        if self.reference_ms is not None and self.reference_ms.shape != self.samples_ms.shape:
            yield "reference_ms", f"has shape {self.reference_ms.shape}, samples_ms {self.samples_ms.shape}"

    @classmethod
    def from_sets(
        cls,
        sets: Sequence[Sequence[Workload]],
        samples_ms: ArrayLike | Tensor,
        hardware: Hardware,
        reference_ms: ArrayLike | Tensor | None = None,
        seed: int = 0,
    ) -> CostDataset:
        """Make a dataset of ``sets`` and their times [N, R, 2] in milliseconds."""
        flat = [workload for group in sets for workload in group]
        columns: dict[str, np.ndarray] = {
            name: np.array([getattr(workload, name) for workload in flat], dtype=_DTYPES[FIELD_TYPES[name]])
            for name in WORKLOAD_FIELDS
        }
        columns["reuse_histogram"] = columns["reuse_histogram"].reshape(len(flat), -1)
        return cls(
            columns,
            np.cumsum([0, *map(len, sets)], dtype=np.int64),
            _times(samples_ms),
            dict(hardware),
            None if reference_ms is None else _times(reference_ms),
            seed,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __len__(self) -> int:
        return len(self.set_offsets) - 1

    @property
    def repeats(self) -> int:
        """R, the same for all sets."""
        return self.samples_ms.shape[1]

    @cached_property
    def sets(self) -> list[list[Workload]]:
        """The shards of each set."""
        lists = {name: column.tolist() for name, column in self.columns.items()}
        lists["reuse_histogram"] = [tuple(bins) for bins in lists["reuse_histogram"]]
        ordered = (lists[name] for name in WORKLOAD_FIELDS)
        shards = [Workload(**dict(zip(WORKLOAD_FIELDS, values, strict=True))) for values in zip(*ordered, strict=True)]
        return [shards[start:end] for start, end in pairwise(self.set_offsets.tolist())]

    @cached_property
    def corrected_ms(self) -> np.ndarray:
        """[N, R, 2] samples with slow spells of the machine damped.

        Each sample is scaled by (median(reference) / reference of its own round) to the power of
        ``REFERENCE_STRENGTH``, where the reference is the whole step (forward + backward) of the fixed set and its
        median runs over the file. Without a reference: as timed.
        """
        if self.reference_ms is None:
            return self.samples_ms
        step_NR1 = self.reference_ms.sum(axis=2, keepdims=True)
        return self.samples_ms * (self.usual_ms / step_NR1) ** REFERENCE_STRENGTH

    @cached_property
    def usual_ms(self) -> float | None:
        """Median step of the reference set: how fast the machine was. None where no reference was timed."""
        return None if self.reference_ms is None else float(np.median(self.reference_ms.sum(axis=2)))

    @property
    def forward_backward_ms(self) -> Tensor:
        """[N, 2] float64: median over the repeats of the corrected samples."""
        return torch.from_numpy(np.median(self.corrected_ms, axis=1))

    def at_speed_ms(self, usual_ms: float | None) -> Tensor:
        """:attr:`forward_backward_ms` as at times when the reference set usually takes ``usual_ms``, so that files
        of slow and of fast hours of one machine compare. As they are where either reference is missing."""
        if usual_ms is None or self.usual_ms is None:
            return self.forward_backward_ms
        return self.forward_backward_ms * (usual_ms / self.usual_ms) ** REFERENCE_STRENGTH

    @property
    def spread(self) -> Tensor:
        """[N, 2] float64: mean absolute deviation of the corrected samples from their median, as a share of it."""
        median_N12 = np.median(self.corrected_ms, axis=1, keepdims=True)
        return torch.from_numpy((np.abs(self.corrected_ms - median_N12) / median_N12).mean(axis=1))

    @cached_property
    def digest(self) -> str:
        """sha256 of everything but the date: equal for equal data, whatever file holds it."""
        sha = hashlib.sha256()
        for name, array in sorted(self._arrays().items()):
            # Text is hashed as text: the width of numpy's string types depends on the longest name.
            is_text = array.dtype.kind == "U"
            content = "\0".join(array.tolist()).encode() if is_text else np.ascontiguousarray(array).tobytes()
            sha.update(f"{name}{array.shape}".encode() + content)
        sha.update(json.dumps([dict(self.hardware), self.seed], sort_keys=True).encode())
        return sha.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = self.columns | {"set_offsets": self.set_offsets, "samples_ms": self.samples_ms}
        return arrays if self.reference_ms is None else arrays | {"reference_ms": self.reference_ms}

    def select(self, sets: Sequence[int] | np.ndarray) -> CostDataset:
        """The given sets, in the given order."""
        sets = np.asarray(sets, dtype=np.int64)
        spans = [np.arange(self.set_offsets[i], self.set_offsets[i + 1]) for i in sets]
        shards_S = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        return replace(
            self,
            columns={name: column[shards_S] for name, column in self.columns.items()},
            set_offsets=np.cumsum([0, *map(len, spans)], dtype=np.int64),
            samples_ms=self.samples_ms[sets],
            reference_ms=None if self.reference_ms is None else self.reference_ms[sets],
        )

    @staticmethod
    def concatenate(datasets: Sequence[CostDataset]) -> CostDataset:
        """One dataset of several from the same hardware with equally many repeats; date and seed of the first."""
        first = datasets[0]
        for other in datasets[1:]:
            require_same_hardware("concatenate", first.hardware, other.hardware)
            if other.repeats != first.repeats:
                raise DatasetError(f"{other.repeats} timed runs of each set, and {first.repeats} in the first")
            if (other.reference_ms is None) != (first.reference_ms is None):
                raise DatasetError("only one of the two has reference times")
        starts = np.cumsum([0] + [len(d.columns["name"]) for d in datasets])
        ends = [d.set_offsets[1:] + start for d, start in zip(datasets, starts, strict=False)]
        references = [d.reference_ms for d in datasets if d.reference_ms is not None]
        return replace(
            first,
            columns={name: np.concatenate([d.columns[name] for d in datasets]) for name in WORKLOAD_FIELDS},
            set_offsets=np.concatenate([[0], *ends]),
            samples_ms=np.concatenate([d.samples_ms for d in datasets]),
            reference_ms=np.concatenate(references) if references else None,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``path`` (``.npz``) whole or not at all; FileError says why not."""
        header = {
            "kind": KIND,
            "schema": NPZ_SCHEMA,
            "hardware": dict(self.hardware),
            "seed": self.seed,
            "created": self.created,
            "digest": self.digest,
        }
        arrays = self._arrays()
        # A table comes in many sets, in many shards with one histogram: store each shard and each histogram once.
        bins, index_S = np.unique(arrays.pop("reuse_histogram"), axis=0, return_inverse=True)
        arrays |= {"header": np.array(json.dumps(header)), "histograms": bins, "histogram_index": index_S.reshape(-1)}
        ranks = [np.unique(arrays[name], return_inverse=True)[1].reshape(-1) for name in _STORED_ONCE]
        _, first_U, index_S = np.unique(np.stack(ranks, axis=1), axis=0, return_index=True, return_inverse=True)
        arrays |= {name: arrays[name][first_U] for name in _STORED_ONCE} | {"shard_index": index_S.reshape(-1)}
        content = io.BytesIO()
        # As numpy's own, which reads it, but for the compression.
        with zipfile.ZipFile(content, "w") as archive:
            for name, array in arrays.items():
                member = zipfile.ZipInfo(f"{name}.npy")
                member.compress_type = zipfile.ZIP_DEFLATED if array.nbytes < _LZMA_BYTES else zipfile.ZIP_LZMA
                with archive.open(member, "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostDataset:
        """Read a file that :meth:`save` wrote; DatasetError names the file and what is wrong with it."""
        arrays = _read_arrays(path)
        header = _header(path, str(arrays.pop("header", "")))
        indices = {"histograms", "histogram_index", "shard_index"}
        names = {*indices, "set_offsets", "samples_ms", *WORKLOAD_FIELDS} - {"reuse_histogram"}
        if missing := sorted(names - set(arrays)):
            raise DatasetError(f"{path}: lacks {', '.join(missing)}")
        arrays |= {name: _taken(path, arrays, name, "shard_index") for name in _STORED_ONCE}
        columns = {name: arrays[name] for name in WORKLOAD_FIELDS if name in arrays}
        columns["reuse_histogram"] = _taken(path, arrays, "histograms", "histogram_index")
        try:
            dataset = cls(
                columns,
                arrays["set_offsets"],
                arrays["samples_ms"],
                header["hardware"],
                arrays.get("reference_ms"),
                header["seed"],
                header["created"],
            )
        except DatasetError as error:
            raise DatasetError(f"{path}: {error}") from error
        if dataset.digest != header["digest"]:
            raise DatasetError(f"{path}: content does not match its own digest; the file was altered")
        return dataset


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file, which may hold anything."""
    check_readable(path, DatasetError)
    try:
        with zipfile.ZipFile(path) as archive:
            size_bytes = sum(entry.file_size for entry in archive.infolist())
        if size_bytes > MAX_READ_BYTES:
            raise ValueError(f"unpacks to {size_bytes:,} bytes, more than the {MAX_READ_BYTES:,} that are read")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy and zipfile raise a dozen types on what is damaged or foreign
        raise DatasetError(f"{path}: not a readable .npz file, or truncated: {brief(error)}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DatasetError(f"{path}: {brief(name)} is no array")
    return arrays


def _taken(path: object, arrays: Mapping[str, np.ndarray], name: str, by: str) -> np.ndarray:
    """The entries of one array that another, which may hold anything, points at."""
    array, index_S = arrays[name], arrays[by]
    if index_S.ndim != 1 or index_S.dtype.kind != "i" or array.ndim < 1:
        raise DatasetError(f"{path}: {by} is {index_S.dtype} {index_S.shape}, {name} {array.dtype} {array.shape}")
    if index_S.size * array[:1].nbytes > MAX_READ_BYTES:
        raise DatasetError(f"{path}: {index_S.size:,} shards are more than are read")
    if np.any(index_S < 0) or np.any(index_S >= len(array)):
        raise DatasetError(f"{path}: {by} points outside {name}")
    return array[index_S]


def _times(times_ms: ArrayLike | Tensor) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(times_ms, dtype=np.float64))


def require_same_hardware(where: object, ours: Hardware, theirs: Hardware) -> None:
    """Raise DatasetError where two descriptions are of machines whose times differ."""
    if not same_hardware(ours, theirs):
        raise DatasetError(
            f"{where}: measured on {hardware_key(ours)}, asked to add {hardware_key(theirs)}; "
            "one file holds one kind of hardware, use another file"
        )


def _header(path: object, text: str) -> dict[str, Any]:
    """Parse the JSON header of a file; check its kind, schema and fields."""
    try:
        header = parse_json(text)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise DatasetError(f"{path}: not a {KIND}")
    check_version(path, header.get("schema"), NPZ_SCHEMA, "collect the sets again", DatasetError)
    required = {"hardware": dict, "seed": int, "created": str, "digest": str}
    if missing := sorted(name for name, of in required.items() if not isinstance(header.get(name), of)):
        raise DatasetError(f"{path}: header lacks {', '.join(missing)}, or has another type there")
    return header


def as_measured(workload: Workload) -> Workload:
    """The workload with what kernels are never measured with at its default: as datasets have it."""
    return replace(workload, **_AS_MEASURED)


@dataclass(frozen=True)
class LabelledSets:
    """Measured fused groups as flat tensors."""

    features_SF: Tensor
    offsets_X1: Tensor
    """First shard of each set, and the end: int64 [X + 1]."""
    labels_ms_X2: Tensor
    prior: RooflineCost | None = None
    """Roofline of the measuring GPU, which knows more than the sets show; None on CPUs."""

    @classmethod
    def of(cls, sets: Sequence[Sequence[Workload]], labels_ms_X2: Tensor) -> LabelledSets:
        """Make labelled sets of workloads and their forward and backward milliseconds [X, 2]."""
        offsets = torch.tensor([0, *accumulate(map(len, sets))])
        features_SF = feature_matrix([workload for workloads in sets for workload in workloads])
        return cls(features_SF, offsets, labels_ms_X2.float())

    @classmethod
    def of_dataset(cls, data: CostDataset, usual_ms: float | None = None) -> LabelledSets:
        """Label measured sets, scaled to the speed of ``usual_ms``, see :meth:`CostDataset.at_speed_ms`; default:
        the file's own."""
        offsets = torch.from_numpy(data.set_offsets)
        on_gpu = data.hardware["device"] == "cuda"
        prior = RooflineCost.of_card(str(data.hardware["name"])) if on_gpu else None
        return cls(features_of(data.columns), offsets, data.at_speed_ms(usual_ms).float(), prior)

    def __len__(self) -> int:
        return len(self.labels_ms_X2)

    @property
    def set_S(self) -> Tensor:
        """Set of each shard."""
        return torch.repeat_interleave(torch.arange(len(self)), self.offsets_X1.diff())

    def select(self, index_X: Tensor) -> LabelledSets:
        """The sets at ``index_X``, in that order."""
        lengths = self.offsets_X1.diff()[index_X]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        start_S = torch.repeat_interleave(self.offsets_X1[:-1][index_X] - offsets[:-1], lengths)
        shard_S = start_S + torch.arange(int(offsets[-1]))
        return LabelledSets(self.features_SF[shard_S], offsets, self.labels_ms_X2[index_X], self.prior)

    def sum(self, values_SH: Tensor) -> Tensor:
        """Sum of per-shard values over each set, [X, H]."""
        sums_XH = values_SH.new_zeros(len(self), values_SH.shape[1])
        return sums_XH.index_add_(0, self.set_S, values_SH)
