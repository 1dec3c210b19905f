# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a running collection has measured so far, on disk before the next set is measured."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, get_type_hints

from pydantic import Field
from torch import Tensor

from dreamshard_planner.cost.dataset import (
    SCHEMA,
    WORKLOAD_FIELDS,
    CostDataset,
    Hardware,
    parse_header,
    require_same_hardware,
)
from dreamshard_planner.errors import DatasetError, FileError
from dreamshard_planner.support.documents import STRICT, parsed
from dreamshard_planner.support.files import brief, check_readable, open_locked, parse_json
from dreamshard_planner.workload.tables import Workload

KIND = "dreamshard cost journal"


_Runs = list[tuple[float, float]]
_Times = tuple[_Runs, _Runs | None]
if TYPE_CHECKING:
    _Fields = tuple[Any, ...]
else:  # each is checked as its own type
    _Fields = tuple[tuple(get_type_hints(Workload)[name] for name in WORKLOAD_FIELDS)]


class Journal:
    """Append-only record of a running collection: one checksummed line a set.

    A process that dies while writing loses at most the set it was writing; whatever else is damaged is refused.
    The file is locked while open. Use as a context manager, or call :meth:`close`.
    """

    def __init__(
        self, path: Path, file: BinaryIO, header: dict[str, Any], sets: list[list[Workload]], times: list[_Times]
    ) -> None:
        self.path, self._file = path, file
        self.hardware: Hardware = header["hardware"]
        self.seed: int = header["seed"]
        self.created: str = header["created"]
        self.sets, self._times = sets, times
        self._known = {workload: i for i, workload in enumerate(dict.fromkeys(w for group in sets for w in group))}

    @classmethod
    def open(cls, path: str | os.PathLike[str], hardware: Hardware, seed: int = 0) -> Journal:
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
                header: dict[str, Any] = {"kind": KIND, "schema": SCHEMA, "hardware": dict(hardware), "seed": seed}
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
        times = samples_ms.tolist(), None if reference_ms is None else reference_ms.tolist()
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
    end, written, reason = file.tell(), 0, "is the disk full?"
    try:
        written = file.write(line)
    except OSError as error:
        reason = str(error.strerror)
    if written != len(line):
        file.truncate(end)
        file.seek(end)
        raise DatasetError(f"{path}: could not write a whole record ({reason}); those before it are kept")


def _frame(record: dict[str, Any]) -> bytes:
    """One line: checksum, space, JSON."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _unframe(line: bytes) -> bytes | None:
    """The JSON of a line without its newline, or None where the checksum does not hold."""
    checksum, _, body = line.partition(b" ")
    return body if checksum == b"%08x" % zlib.crc32(body) else None


def _read_journal(path: Path, content: bytes) -> tuple[dict[str, Any], list[Any], int]:
    """Header, records and the byte where they end; a torn last line is left out."""
    *lines, tail = content.split(b"\n")
    bodies = [_unframe(line) for line in lines]
    if not bodies or bodies[0] is None:
        raise DatasetError(f"{path}: not a {KIND}")
    header = parse_header(path, bodies[0].decode(errors="replace"), KIND)
    torn = len(bodies) > 1 and bodies[-1] is None and not tail
    bodies = bodies[1:-1] if torn else bodies[1:]
    end = len(content) - len(tail) - (len(lines[-1]) + 1 if torn else 0)
    records = []
    for number, body in enumerate(bodies, start=2):
        if body is None:
            raise DatasetError(f"{path}: line {number} is damaged; restore the file or start another")
        try:
            records.append(parse_json(body))
        except ValueError as error:
            raise DatasetError(f"{path}: line {number} is not a record of a set: {brief(error)}") from error
    return header, records, end


@dataclass(frozen=True)
class _Record:
    """A set with its samples and those of the reference, and the workloads that no record before it has."""

    __pydantic_config__: ClassVar = STRICT
    new: list[_Fields]
    set: list[Annotated[int, Field(ge=0)]]
    ms: _Times

    def __post_init__(self) -> None:
        samples, reference = self.ms
        if reference is not None and len(reference) != len(samples):
            raise ValueError(f"holds {len(samples)} samples, and {len(reference)} of the reference")


def _decode(path: Path, documents: list[Any]) -> tuple[list[list[Workload]], list[_Times]]:
    """Sets and times of journal records; a workload is spelled out in the first record that holds it."""
    known: list[Workload] = []
    sets, times = [], []
    for number, document in enumerate(documents, start=2):
        where = f"{path}: line {number} is not a record of a set"
        record = parsed(_Record, document, where, DatasetError)
        known += [Workload(*values) for values in record.new]
        if max(record.set, default=0) >= len(known):
            raise DatasetError(f"{where}: of its workloads {record.set}, {len(known)} are known")
        sets.append([known[i] for i in record.set])
        times.append(record.ms)
    return sets, times
