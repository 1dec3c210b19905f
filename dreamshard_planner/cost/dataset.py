# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measured costs on disk: a journal while collecting, a columnar ``.npz`` when done.

Both keep what was asked (workloads, not features, so that features may change later) and every sample.
Nothing is ever unpickled, and a file that is not whole is refused by name.

Shape letters: N sets, R repeats, 2 (forward, backward), S shards of all sets, 17 reuse bins.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.errors import DatasetError, TaskError
from dreamshard_planner.workload.tables import Workload

SCHEMA = 1
"""Version of the ``.npz`` and journal layouts; files of a newer one are refused."""

REFERENCE_STRENGTH = 0.5
"""How far a slow reference run excuses a slow sample: 0 not at all, 1 in full. The reference is noisy itself: on
200 sets measured three times over on two shared cores (5 repeats), two passes differed by 4.1 and 7.1 % (forward,
backward) at 0, by 3.4 and 4.6 % at 0.5, and by 6.6 and 5.8 % at 1."""

_MEASURED = tuple(entry for entry in fields(Workload) if entry.metadata.get("measured", True))
WORKLOAD_FIELDS = tuple(entry.name for entry in _MEASURED)
"""The per-shard columns, in order."""

_KIND, _JOURNAL_KIND = "dreamshard cost dataset", "dreamshard cost journal"
_KEY_FIELDS = ("device", "name", "threads", "fbgemm")
_DTYPES = {"str": np.str_, "int": np.int64, "float": np.float64, "bool": np.bool_, "tuple[float, ...]": np.float64}

# What numpy raises on files that are no archive, cut short, or hold pickled objects.
_UNREADABLE = (OSError, ValueError, EOFError, AttributeError, NotImplementedError, zipfile.BadZipFile, zlib.error)

Hardware = Mapping[str, str | int]


def hardware_key(hardware: Hardware) -> dict[str, str | int]:
    """The part of a hardware description that must agree inside one file."""
    return {name: hardware.get(name, "unknown") for name in _KEY_FIELDS}


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
    """From ``measure.describe_hardware``."""

    reference_ms: np.ndarray | None = None
    """[N, R, 2] float64: the fixed reference set, timed right beside each sample."""

    seed: int = 0
    """What the indices were drawn from."""

    created: str = ""
    """UTC date and time, ISO 8601."""

    def __post_init__(self) -> None:
        for field_name, problem in self._problems():
            raise DatasetError(f"cost dataset: {field_name} {problem}")

    def _problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong with the arrays, (field, problem), the first thing first."""
        if set(self.columns) != set(WORKLOAD_FIELDS):
            yield "columns", f"are {sorted(self.columns)}, expected {sorted(WORKLOAD_FIELDS)}"
            return
        offsets, shards = self.set_offsets, len(self.columns["name"])
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != shards:
            yield "set_offsets", f"must run from 0 to the {shards} shards"
        elif np.any(np.diff(offsets) < 1):
            yield "set_offsets", "must grow: a set holds at least one shard"
        for name, column in self.columns.items():
            if column.shape[:1] != (shards,) or column.ndim != (2 if name == "reuse_histogram" else 1):
                yield name, f"has shape {column.shape}, expected one entry per shard ({shards})"
            elif column.dtype.kind == "f" and not np.all(np.isfinite(column) & (column >= 0)):
                yield name, "holds NaN, infinite or negative values"
        for name in ("samples_ms", "reference_ms"):
            times = getattr(self, name)
            if times is None:
                continue
            if times.ndim != 3 or times.shape[0] != len(offsets) - 1 or times.shape[1] < 1 or times.shape[2] != 2:
                yield name, f"has shape {times.shape}, expected [{len(offsets) - 1} sets, repeats, 2]"
            elif times.dtype.kind != "f" or not np.all(np.isfinite(times) & (times > 0)):
                yield name, "holds times that are NaN, infinite, zero or negative"
        if self.reference_ms is not None and self.reference_ms.shape != self.samples_ms.shape:
            yield "reference_ms", f"has shape {self.reference_ms.shape}, samples_ms {self.samples_ms.shape}"

    @classmethod
    def from_sets(
        cls,
        sets: Sequence[Sequence[Workload]],
        samples_ms: np.ndarray | Tensor | Sequence,
        hardware: Hardware,
        reference_ms: np.ndarray | Tensor | Sequence | None = None,
        seed: int = 0,
    ) -> CostDataset:
        """From ``sets`` and their times [N, R, 2] in milliseconds."""
        flat = [workload for group in sets for workload in group]
        columns = {
            entry.name: np.array([getattr(workload, entry.name) for workload in flat], dtype=_DTYPES[entry.type])
            for entry in _MEASURED
        }
        columns["reuse_histogram"] = columns["reuse_histogram"].reshape(len(flat), -1)
        offsets = np.concatenate([[0], np.cumsum([len(group) for group in sets], dtype=np.int64)]).astype(np.int64)
        return cls(
            columns,
            offsets,
            _times(samples_ms),
            dict(hardware),
            None if reference_ms is None else _times(reference_ms),
            seed,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def __len__(self) -> int:
        return len(self.set_offsets) - 1

    @property
    def repeats(self) -> int:
        """R, the same for all sets."""
        return self.samples_ms.shape[1]

    def workloads(self, i: int) -> list[Workload]:
        """The shards of set ``i``."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"set {i} of a dataset of {len(self)}")
        i %= len(self)
        return self._all[self.set_offsets[i] : self.set_offsets[i + 1]]

    def all_workloads(self) -> list[Workload]:
        """The shards of all sets, set 0 first: [S], split by ``set_offsets``."""
        return list(self._all)

    @cached_property
    def _all(self) -> list[Workload]:
        lists = {name: column.tolist() for name, column in self.columns.items()}
        lists["reuse_histogram"] = [tuple(bins) for bins in lists["reuse_histogram"]]
        ordered = (lists[name] for name in WORKLOAD_FIELDS)
        return [Workload(*values) for values in zip(*ordered, strict=True)]

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
        return CostDataset(
            {name: column[shards_S] for name, column in self.columns.items()},
            np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int64),
            self.samples_ms[sets],
            self.hardware,
            None if self.reference_ms is None else self.reference_ms[sets],
            self.seed,
            self.created,
        )

    @staticmethod
    def concatenate(datasets: Sequence[CostDataset]) -> CostDataset:
        """One dataset of several from the same hardware with equally many repeats; date and seed of the first."""
        if not datasets:
            raise TaskError("no datasets to concatenate")
        first = datasets[0]
        for other in datasets[1:]:
            _require_same_hardware("concatenate", first.hardware, other.hardware)
            if other.repeats != first.repeats or (other.reference_ms is None) != (first.reference_ms is None):
                raise DatasetError(
                    f"concatenate: {first.repeats} and {other.repeats} repeats, or only one has reference times"
                )
        starts = np.cumsum([0] + [len(d.columns["name"]) for d in datasets])
        references = [d.reference_ms for d in datasets if d.reference_ms is not None]
        return CostDataset(
            {name: np.concatenate([d.columns[name] for d in datasets]) for name in WORKLOAD_FIELDS},
            np.concatenate([[0]] + [d.set_offsets[1:] + start for d, start in zip(datasets, starts, strict=False)]),
            np.concatenate([d.samples_ms for d in datasets]),
            first.hardware,
            np.concatenate(references) if references else None,
            first.seed,
            first.created,
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write ``path`` (``.npz``) whole or not at all."""
        path = Path(path)
        header = {
            "kind": _KIND,
            "schema": SCHEMA,
            "hardware": dict(self.hardware),
            "seed": self.seed,
            "created": self.created,
            "digest": self.digest,
        }
        arrays = self._arrays()
        # A table comes in many sets with one histogram: store each histogram once.
        bins, index_S = np.unique(arrays.pop("reuse_histogram"), axis=0, return_inverse=True)
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as file:
            np.savez_compressed(
                file,
                header=np.array(json.dumps(header)),
                histograms=bins,
                histogram_index=index_S.reshape(-1),
                **arrays,
            )
            os.fsync(file.fileno())
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostDataset:
        """Read a file that :meth:`save` wrote; DatasetError names the file and what is wrong with it."""
        if not Path(path).is_file():
            raise DatasetError(f"{path}: no such file")
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except _UNREADABLE as error:
            raise DatasetError(f"{path}: not a readable .npz file, or truncated: {error}") from error
        header = _parse_header(path, str(arrays.pop("header", "")), _KIND)
        names = {"histograms", "histogram_index", "set_offsets", "samples_ms", *WORKLOAD_FIELDS} - {"reuse_histogram"}
        if missing := sorted(names - set(arrays)):
            raise DatasetError(f"{path}: lacks {', '.join(missing)}")
        bins, index_S = arrays["histograms"], arrays["histogram_index"]
        if np.any(index_S < 0) or np.any(index_S >= max(1, len(bins))):
            raise DatasetError(f"{path}: histogram_index points outside the histograms")
        columns = {name: arrays[name] for name in WORKLOAD_FIELDS if name in arrays}
        columns["reuse_histogram"] = bins[index_S]
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


class Journal:
    """Append-only record of a running collection: one checksummed line a set.

    A process that dies while writing loses at most the set it was writing; whatever else is damaged is refused.
    The file is locked while open. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, path: Path, file: Any, header: dict, sets: list[list[Workload]], times: list[list]) -> None:
        self.path, self._file = path, file
        self.hardware: Hardware = header["hardware"]
        self.seed: int = header["seed"]
        self.created: str = header["created"]
        self.sets, self._times = sets, times
        self._known = {workload: i for i, workload in enumerate(dict.fromkeys(w for group in sets for w in group))}

    @classmethod
    def open(cls, path: str | os.PathLike, hardware: Hardware, seed: int = 0) -> Journal:
        """Open a journal to append to, or start it.

        Raises:
            DatasetError: damaged before its last line, made on other hardware or with another seed, written by a
                newer version, not a journal, or in use by another process.
        """
        path = Path(path)
        if not path.exists():
            header = {"kind": _JOURNAL_KIND, "schema": SCHEMA, "hardware": dict(hardware), "seed": seed}
            header["created"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            part.write_bytes(_frame(header))
            os.replace(part, path)
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 (kept open for the journal's life)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DatasetError(f"{path}: another process is writing to it") from error
            header, records, end = _read_journal(path, file.read())
            _require_same_hardware(path, header["hardware"], hardware)
            if header["seed"] != seed:
                raise DatasetError(f"{path}: collected with seed {header['seed']}, asked for {seed}; use another file")
            file.truncate(end)
            file.seek(end)
            sets, times = _decode(path, records)
        except DatasetError:
            file.close()
            raise
        return cls(path, file, header, sets, times)

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def repeats(self) -> int:
        """Repeats of the first set, 0 while there is none."""
        return len(self._times[0][0]) if self._times else 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def append(self, workloads: Sequence[Workload], samples_ms: Tensor, reference_ms: Tensor | None = None) -> None:
        """Add one set with its times [R, 2]; on disk, as far as the process is concerned, on return."""
        times = [samples_ms.tolist(), None if reference_ms is None else reference_ms.tolist()]
        new = [workload for workload in dict.fromkeys(workloads) if workload not in self._known]
        for workload in new:
            self._known[workload] = len(self._known)
        record = {
            "new": [[getattr(workload, name) for name in WORKLOAD_FIELDS] for workload in new],
            "set": [self._known[workload] for workload in workloads],
            "ms": times,
        }
        line = _frame(record)
        if self._file.write(line) != len(line):
            raise DatasetError(f"{self.path}: could not write a whole record; is the disk full?")
        self.sets.append(list(workloads))
        self._times.append(times)

    def to_dataset(self) -> CostDataset:
        """Everything recorded so far. DatasetError if sets differ in repeats, or if nothing was recorded."""
        if not self.sets:
            raise DatasetError(f"{self.path}: nothing was measured yet")
        samples, references = zip(*self._times, strict=True)
        kinds = {(len(s), r is None) for s, r in self._times}
        if len(kinds) > 1:
            raise DatasetError(f"{self.path}: sets differ in their number of repeats, or only some have a reference")
        has_reference = references[0] is not None
        dataset = CostDataset.from_sets(
            self.sets, samples, self.hardware, references if has_reference else None, self.seed
        )
        object.__setattr__(dataset, "created", self.created)
        return dataset

    def close(self) -> None:
        """Flush to the disk and release the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _times(times_ms: np.ndarray | Tensor | Sequence) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(times_ms, dtype=np.float64))


def _require_same_hardware(where: object, ours: Hardware, theirs: Hardware) -> None:
    if hardware_key(ours) != hardware_key(theirs):
        raise DatasetError(
            f"{where}: measured on {hardware_key(ours)}, asked to add {hardware_key(theirs)}; "
            "one file holds one kind of hardware, use another file"
        )


def _parse_header(path: object, text: str, kind: str) -> dict:
    """The JSON header of a file, after checking kind, schema and what must be in it."""
    try:
        header = json.loads(text)
    except json.JSONDecodeError:
        header = None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise DatasetError(f"{path}: not a {kind}")
    schema = header.get("schema")
    if schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        hint = "written by a newer version, upgrade dreamshard_planner" if newer else "not readable by this version"
        raise DatasetError(f"{path}: schema {schema}, this version reads {SCHEMA}: {hint}")
    required = {"hardware", "seed", "created"} | ({"digest"} if kind == _KIND else set())
    if missing := sorted(required - set(header)):
        raise DatasetError(f"{path}: header lacks {', '.join(missing)}")
    return header


def _frame(record: dict) -> bytes:
    """One line: checksum, space, JSON."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _unframe(line: bytes) -> bytes | None:
    """The JSON of a line without its newline, or None where the checksum does not hold."""
    checksum, _, body = line.partition(b" ")
    return body if checksum == b"%08x" % zlib.crc32(body) else None


def _read_journal(path: Path, content: bytes) -> tuple[dict, list[dict], int]:
    """Header, records and the byte where they end; a torn last line is left out."""
    *lines, tail = content.split(b"\n")
    bodies = [_unframe(line) for line in lines]
    if not bodies or bodies[0] is None:
        raise DatasetError(f"{path}: not a {_JOURNAL_KIND}")
    header = _parse_header(path, bodies[0].decode(errors="replace"), _JOURNAL_KIND)
    torn = len(bodies) > 1 and bodies[-1] is None and not tail
    bodies = bodies[1:-1] if torn else bodies[1:]
    if None in bodies:
        raise DatasetError(f"{path}: line {bodies.index(None) + 2} is damaged; restore the file or start another")
    end = len(content) - len(tail) - (len(lines[-1]) + 1 if torn else 0)
    return header, [json.loads(body) for body in bodies], end


def _decode(path: Path, records: list[dict]) -> tuple[list[list[Workload]], list[list]]:
    """Sets and times of journal records; a workload is spelled out in the first record that holds it."""
    known: list[Workload] = []
    sets, times = [], []
    for number, record in enumerate(records, start=2):
        try:
            for values in record["new"]:
                values = dict(zip(WORKLOAD_FIELDS, values, strict=True))
                known.append(Workload(**(values | {"reuse_histogram": tuple(values["reuse_histogram"])})))
            sets.append([known[i] for i in record["set"]])
            times.append(record["ms"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DatasetError(f"{path}: line {number} is not a record of a set: {error!r}") from error
    return sets, times
