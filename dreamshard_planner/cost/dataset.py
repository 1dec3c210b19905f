# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measured costs on disk, as ``.npz``; and as tensors, which networks are fitted to and judged by.

A file keeps workloads, not features, so that features may change later, and every sample.
Nothing is ever unpickled, and a file that is not whole is refused by name.

Shapes: N sets, R repeats, 2 (forward, backward), S shards of all sets. Of tensors: X sets, F features, H channels.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
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
from dreamshard_planner.workload.tables import Workload, feature_matrix

KIND = "dreamshard cost dataset"
NPZ_SCHEMA = 2
"""Version of the layout; files of others are refused."""

REFERENCE_STRENGTH = 0.5
"""Share of a slow reference run that excuses a slow sample, from 0 to 1. The reference is noisy itself: on
200 sets measured three times over on two shared cores (5 repeats), two passes differed by 4.1 and 7.1 % (forward,
backward) at 0, by 3.4 and 4.6 % at 0.5, and by 6.6 and 5.8 % at 1."""

_DTYPES = {"str": np.str_, "int": np.int64, "float": np.float64, "bool": np.bool_, "tuple[float, ...]": np.float64}
_COLUMNS = {
    entry.name: np.int64 if entry.name == "weight_bytes" else _DTYPES[str(entry.type)]
    for entry in fields(Workload)
    if entry.metadata.get("measured", True)
}
"""Types of the per-shard columns, in order. Weights of what is measured, and so trained, have whole bytes."""
_AS_MEASURED: dict[str, Any] = {entry.name: entry.default for entry in fields(Workload) if entry.name not in _COLUMNS}
_STORED_ONCE = ("name", "rows", "pooling_factor", "distinct_rows", "num_features", "histogram_index", "dim")
"""Columns of which a file has each combination once; the others are, as a rule, the same all over a set."""
_KEY_FIELDS = ("device", "name", "threads", "fbgemm")

Hardware = Mapping[str, str | int]


def other_hardware(ours: Hardware, theirs: Hardware) -> str:
    """Name two descriptions if they are of machines whose times differ; return an empty text if they are not."""
    names = (*_KEY_FIELDS, *({"instruction_set"} & ours.keys() & theirs.keys()))  # older files lack the last
    first, second = ({name: of.get(name, "unknown") for name in names} for of in (ours, theirs))
    return "" if first == second else f"{first}, not on {second}"


def as_measured(workload: Workload) -> Workload:
    """Return the workload as datasets have it: fields that no measurement has at their defaults."""
    return replace(workload, **_AS_MEASURED)


@dataclass(frozen=True, eq=False)
class CostDataset:
    """Sets of workloads, each one fused group, with the times of every repeat."""

    sets: list[list[Workload]]
    """Shards of each set, :func:`as_measured`."""
    samples_ms: np.ndarray
    """[N, R, 2] float64: forward and backward milliseconds of each round."""
    hardware: Hardware
    """Description from ``measure.hardware.describe_hardware``."""
    reference_ms: np.ndarray | None = None
    """[N, R, 2] float64: the fixed reference set, timed right beside each sample."""
    seed: int = 0
    """Seed of the indices."""
    created: str = ""
    """UTC date and time, ISO 8601."""

    def __post_init__(self) -> None:
        expected = (len(self.sets), *self.samples_ms.shape[1:2], 2)
        for name, times in (("samples_ms", self.samples_ms), ("reference_ms", self.reference_ms)):
            if times is not None and (times.shape != expected or not np.all(np.isfinite(times) & (times > 0))):
                raise DatasetError(
                    f"{name} must be finite milliseconds above 0 of [{len(self.sets)} sets, repeats, 2], "
                    f"got {brief(times)}"
                )

    @classmethod
    def from_sets(
        cls,
        sets: Sequence[Sequence[Workload]],
        samples_ms: ArrayLike | Tensor,
        hardware: Hardware,
        reference_ms: ArrayLike | Tensor | None = None,
        seed: int = 0,
    ) -> CostDataset:
        """Make a dataset of ``sets`` and their times [N, R, 2] in milliseconds, measured now."""
        groups = [[as_measured(workload) for workload in group] for group in sets]
        samples, now = np.asarray(samples_ms, np.float64), datetime.now(UTC).isoformat(timespec="seconds")
        reference = None if reference_ms is None else np.asarray(reference_ms, np.float64)
        return cls(groups, samples, dict(hardware), reference, seed, now)

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def shards(self) -> list[Workload]:
        """Shards of all sets."""
        return [shard for group in self.sets for shard in group]

    @property
    def repeats(self) -> int:
        """R, the same for all sets."""
        return self.samples_ms.shape[1]

    @cached_property
    def corrected_ms(self) -> np.ndarray:
        """[N, R, 2] samples with slow spells of the machine damped: each is scaled by (:attr:`usual_ms` / step of the
        reference in its own round) to the power of ``REFERENCE_STRENGTH``. Without a reference: as timed."""
        if self.reference_ms is None:
            return self.samples_ms
        step_NR1 = self.reference_ms.sum(axis=2, keepdims=True)
        return self.samples_ms * (self.usual_ms / step_NR1) ** REFERENCE_STRENGTH

    @cached_property
    def usual_ms(self) -> float | None:
        """Median step of the reference set: the speed of the machine. None if no reference was timed."""
        return None if self.reference_ms is None else float(np.median(self.reference_ms.sum(axis=2)))

    def median_ms(self, usual_ms: float | None = None) -> Tensor:
        """Return medians [N, 2] over the repeats of the corrected samples, float64: as when the reference set usually
        takes ``usual_ms``, so that files of slow and fast hours compare, or as measured if either is missing."""
        speed = 1.0 if usual_ms is None or self.usual_ms is None else usual_ms / self.usual_ms
        return torch.from_numpy(np.median(self.corrected_ms, axis=1) * speed**REFERENCE_STRENGTH)

    @property
    def spread(self) -> Tensor:
        """[N, 2] float64: mean absolute deviation of the corrected samples from their median, as a share of it."""
        median_N12 = np.median(self.corrected_ms, axis=1, keepdims=True)
        return torch.from_numpy((np.abs(self.corrected_ms - median_N12) / median_N12).mean(axis=1))

    @property
    def digest(self) -> str:
        """SHA-256 of everything but the date: equal for equal data, whatever file holds it."""
        return _digest(self._arrays(), self.hardware, self.seed)

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return a column [S] for each measured field (``reuse_histogram``: [S, 17]), ends of sets, and times."""
        shards = self.shards
        arrays: dict[str, np.ndarray] = {
            name: np.array([getattr(shard, name) for shard in shards], dtype=dtype) for name, dtype in _COLUMNS.items()
        }
        arrays["set_offsets"] = np.cumsum([0, *map(len, self.sets)], dtype=np.int64)
        arrays["samples_ms"] = self.samples_ms
        return arrays if self.reference_ms is None else arrays | {"reference_ms": self.reference_ms}

    @staticmethod
    def concatenate(datasets: Sequence[CostDataset]) -> CostDataset:
        """Join datasets of the same hardware with equally many repeats; date and seed are those of the first."""
        first = datasets[0]
        for other in datasets[1:]:
            if differing := other_hardware(other.hardware, first.hardware):
                raise DatasetError(f"measured on {differing}: one file holds one kind of hardware")
            if other.repeats != first.repeats:
                raise DatasetError(f"{other.repeats} timed runs of each set, and {first.repeats} in the first")
            if (other.reference_ms is None) != (first.reference_ms is None):
                raise DatasetError("only one of the two has reference times")
        references = [d.reference_ms for d in datasets if d.reference_ms is not None]
        return replace(
            first,
            sets=[group for d in datasets for group in d.sets],
            samples_ms=np.concatenate([d.samples_ms for d in datasets]),
            reference_ms=np.concatenate(references) if references else None,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``path`` (``.npz``) whole or not at all; FileError says why not."""
        arrays = self._arrays()
        header = {
            "kind": KIND,
            "schema": NPZ_SCHEMA,
            "hardware": dict(self.hardware),
            "seed": self.seed,
            "created": self.created,
            "digest": _digest(arrays, self.hardware, self.seed),
        }
        # A table comes in many sets, in many shards with one histogram: store each shard and each histogram once.
        bins, index_S = np.unique(arrays.pop("reuse_histogram"), axis=0, return_inverse=True)
        arrays |= {"header": np.array(json.dumps(header)), "histograms": bins, "histogram_index": index_S.reshape(-1)}
        ranks = [np.unique(arrays[name], return_inverse=True)[1].reshape(-1) for name in _STORED_ONCE]
        _, first_U, index_S = np.unique(np.stack(ranks, axis=1), axis=0, return_index=True, return_inverse=True)
        arrays |= {name: arrays[name][first_U] for name in _STORED_ONCE} | {"shard_index": index_S.reshape(-1)}
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # none is named allow_pickle
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostDataset:
        """Read a file that :meth:`save` wrote; DatasetError names the file and the problem."""
        arrays = _read_arrays(path)
        header = _header(path, str(arrays.pop("header", "")))
        try:
            shard_index = arrays["shard_index"]
            arrays |= {name: _taken(arrays[name], shard_index) for name in _STORED_ONCE}
            arrays["reuse_histogram"] = _taken(arrays["histograms"], arrays["histogram_index"])
            kept = {name: arrays[name] for name in (*_COLUMNS, "set_offsets", "samples_ms")}
            kept |= {name: arrays[name] for name in ("reference_ms",) if name in arrays}
            is_whole = _digest(kept, header["hardware"], header["seed"]) == header["digest"]
        except (LookupError, ValueError, TypeError) as error:
            raise DatasetError(f"{path}: lacks arrays of a dataset, or has others there: {brief(error)}") from error
        if not is_whole:
            raise DatasetError(f"{path}: content does not match its own digest; the file was altered")
        columns = {name: kept[name].tolist() for name in _COLUMNS}
        columns["reuse_histogram"] = list(map(tuple, columns["reuse_histogram"]))
        shards = [Workload(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        sets = [shards[start:end] for start, end in pairwise(kept["set_offsets"].tolist())]
        told = header["hardware"], kept.get("reference_ms"), header["seed"], header["created"]
        return cls(sets, kept["samples_ms"], *told)


def _digest(arrays: Mapping[str, np.ndarray], hardware: Hardware, seed: int) -> str:
    sha = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        # Text is hashed as text: the width of numpy's string types depends on the longest name.
        is_text = array.dtype.kind == "U"
        content = "\0".join(array.tolist()).encode() if is_text else np.ascontiguousarray(array).tobytes()
        sha.update(f"{name}{array.shape}".encode() + content)
    sha.update(json.dumps([dict(hardware), seed], sort_keys=True).encode())
    return sha.hexdigest()


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays of an ``.npz`` file, which may hold anything."""
    check_readable(path, DatasetError)
    try:
        with zipfile.ZipFile(path) as archive:
            size_bytes = sum(entry.file_size for entry in archive.infolist())
        if size_bytes > MAX_READ_BYTES:
            raise ValueError(f"unpacks to {size_bytes:,} bytes, more than the {MAX_READ_BYTES:,} that are read")
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name]) for name in archive.files}
    except Exception as error:  # numpy and zipfile raise a dozen types on what is damaged or foreign
        raise DatasetError(f"{path}: not a readable .npz file, or truncated: {brief(error)}") from error


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


def _taken(array: np.ndarray, index_S: np.ndarray) -> np.ndarray:
    """Return entries of one array that another, which may hold anything, points at."""
    if index_S.size * array[:1].nbytes > MAX_READ_BYTES:
        raise ValueError(f"{index_S.size:,} shards are more than are read")
    return array[index_S]


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
    def of(
        cls, sets: Sequence[Sequence[Workload]], labels_ms_X2: Tensor, prior: RooflineCost | None = None
    ) -> LabelledSets:
        """Make labelled sets of workloads and their forward and backward milliseconds [X, 2]."""
        offsets = torch.tensor([0, *accumulate(map(len, sets))])
        features_SF = feature_matrix([workload for workloads in sets for workload in workloads])
        return cls(features_SF, offsets, labels_ms_X2.float(), prior)

    @classmethod
    def of_dataset(cls, data: CostDataset, usual_ms: float | None = None) -> LabelledSets:
        """Label measured sets, scaled to the speed of ``usual_ms``, see :meth:`CostDataset.median_ms`; default: the
        file's own."""
        on_gpu = data.hardware["device"] == "cuda"
        prior = RooflineCost.of_card(str(data.hardware["name"])) if on_gpu else None
        return cls.of(data.sets, data.median_ms(usual_ms), prior)

    def __len__(self) -> int:
        return len(self.labels_ms_X2)

    @property
    def set_S(self) -> Tensor:
        """Set of each shard."""
        return torch.repeat_interleave(torch.arange(len(self)), self.offsets_X1.diff())

    def select(self, index_X: Tensor) -> LabelledSets:
        """Return the sets at ``index_X``, in that order."""
        lengths = self.offsets_X1.diff()[index_X]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        start_S = torch.repeat_interleave(self.offsets_X1[:-1][index_X] - offsets[:-1], lengths)
        shard_S = start_S + torch.arange(int(offsets[-1]))
        return LabelledSets(self.features_SF[shard_S], offsets, self.labels_ms_X2[index_X], self.prior)

    def sum(self, values_SH: Tensor) -> Tensor:
        """Return sums of per-shard values over each set, [X, H]."""
        sums_XH = values_SH.new_zeros(len(self), values_SH.shape[1])
        return sums_XH.index_add_(0, self.set_S, values_SH)
