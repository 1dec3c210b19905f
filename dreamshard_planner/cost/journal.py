# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a running collection has measured so far, on disk before the next set is measured."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from dreamshard_planner.cost.dataset import (
    FIELD_TYPES,
    SCHEMA,
    WORKLOAD_FIELDS,
    CostDataset,
    Hardware,
    parse_header,
    require_same_hardware,
)
from dreamshard_planner.errors import DatasetError, FileError
from dreamshard_planner.support.files import brief, check_readable, open_locked, parse_json
from dreamshard_planner.workload.tables import Workload

KIND = "dreamshard cost journal"


class Journal:
    """Append-only record of a running collection: one checksummed line a set.

    A process that dies while writing loses at most the set it was writing; whatever else is damaged is refused.
    The file is locked while open. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, path: Path, file: BinaryIO, header: dict, sets: list[list[Workload]], times: list[list]) -> None:
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
        try:
            file = open_locked(path)
        except FileError as error:
            raise DatasetError(str(error)) from error
        try:
            check_readable(path, DatasetError)
            content = file.read()
            if not content:  # new, or its first process died before it wrote anything
                header = {"kind": KIND, "schema": SCHEMA, "hardware": dict(hardware), "seed": seed}
                header["created"] = datetime.now(UTC).isoformat(timespec="seconds")
                _append(path, file, content := _frame(header))
            header, records, end = _read_journal(path, content)
            require_same_hardware(path, header["hardware"], hardware)
            if header["seed"] != seed:
                raise DatasetError(f"{path}: collected with seed {header['seed']}, asked for {seed}; use another file")
            sets, times = _decode(path, records)
            file.truncate(end)
            file.seek(end)
        except BaseException:
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
        unknown = (workload for workload in dict.fromkeys(workloads) if workload not in self._known)
        new = {workload: len(self._known) + i for i, workload in enumerate(unknown)}
        record = {
            "new": [[getattr(workload, name) for name in WORKLOAD_FIELDS] for workload in new],
            "set": [new[workload] if workload in new else self._known[workload] for workload in workloads],
            "ms": times,
        }
        _append(self.path, self._file, _frame(record))
        self._known |= new
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
        return replace(dataset, created=self.created)

    def close(self) -> None:
        """Flush to the disk and release the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _append(path: Path, file: BinaryIO, line: bytes) -> None:
    """Write a whole line at the end, or leave the file as it was."""
    end, reason = file.tell(), "is the disk full?"
    try:
        written = file.write(line)
    except OSError as error:
        written, reason = None, error.strerror
    if written != len(line):
        file.truncate(end)
        file.seek(end)
        raise DatasetError(f"{path}: could not write a whole record ({reason}); those before it are kept")


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
        raise DatasetError(f"{path}: not a {KIND}")
    header = parse_header(path, bodies[0].decode(errors="replace"), KIND)
    torn = len(bodies) > 1 and bodies[-1] is None and not tail
    bodies = bodies[1:-1] if torn else bodies[1:]
    if None in bodies:
        raise DatasetError(f"{path}: line {bodies.index(None) + 2} is damaged; restore the file or start another")
    end = len(content) - len(tail) - (len(lines[-1]) + 1 if torn else 0)
    records = []
    for number, body in enumerate(bodies, start=2):
        try:
            records.append(parse_json(body))
        except ValueError as error:
            raise DatasetError(f"{path}: line {number} is not a record of a set: {brief(error)}") from error
    return header, records, end


def _decode(path: Path, records: list[dict]) -> tuple[list[list[Workload]], list[list]]:
    """Sets and times of journal records; a workload is spelled out in the first record that holds it."""
    known: list[Workload] = []
    sets, times = [], []
    for number, record in enumerate(records, start=2):
        try:
            known += [_workload(values) for values in record["new"]]
            sets.append([known[i] for i in record["set"]])
            times.append(_samples(record["ms"]))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise DatasetError(
                f"{path}: line {number} is not a record of a set: {type(error).__name__}: {brief(error)}"
            ) from error
    return sets, times


def _workload(values: list) -> Workload:
    """Raises ValueError or TypeError where values are not of the types of a workload's fields."""
    named = dict(zip(WORKLOAD_FIELDS, values, strict=True))
    for name, value in named.items():
        expected = FIELD_TYPES[name]
        if expected == "tuple[float, ...]":
            named[name] = tuple(float(share) for share in value)
        elif type(value).__name__ != expected and (expected, type(value)) != ("float", int):
            raise TypeError(f"{name} is {brief(value)}, not {expected}")
    return Workload(**named)


def _samples(times: list) -> list:
    """Samples and reference [R, 2] of one set, as they are; raises ValueError where they are of another form."""
    samples, reference = times
    for part in (samples,) if reference is None else (samples, reference):
        if np.asarray(part, dtype=np.float64).shape != (len(samples), 2):
            raise ValueError(f"times must be [repeats, 2], got {brief(part)}")
    return times
