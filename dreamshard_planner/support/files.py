# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Files: written whole or not at all, locked, and read in bounded memory whatever is in them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dreamshard_planner.errors import DreamShardError, FileError
from dreamshard_planner.support.formatting import brief

MAX_READ_BYTES = 2 << 30
"""Longest file that is read; statistics of a hundred million lookups take a thousandth of it."""
MAX_NESTING = 24  # levels of JSON; this package's files have six
MIN_FREE_BYTES = 1 << 20  # for a result: more than a checkpoint takes


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise FileError, with file and reason, if :func:`write_whole` could not write there now."""
    with _new_beside(path) as (file, _):
        os.posix_fallocate(file.fileno(), 0, MIN_FREE_BYTES)


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace or make a file atomically: readers, other writers and a crash see the old content or the new.

    Args:
        path: a symbolic link is followed, and stays.
        content: text becomes UTF-8.

    Raises:
        FileError: names the file and the reason; an existing file is as it was.
    """
    with _new_beside(path) as (file, target):
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, target)


@contextmanager
def _new_beside(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file beside ``path``, removed at the end unless renamed, and the path without links."""
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {target.parent}")
        part = target.with_name(f".{target.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}.part")
        file = open(part, "xb")  # noqa: SIM115 (closed below, where the removal is)
        try:
            with file:
                yield file, target
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
    except (OSError, ValueError) as error:  # a name with a null character, or text that is no Unicode
        raise FileError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def open_locked(path: Path, wait: bool = False) -> BinaryIO:
    """Open or make a file and its folder, and lock it for this process until it is closed.

    Raises:
        FileError: another process has it, unless that is to ``wait`` for; or it cannot be opened. Names the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 (held by the caller)
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError as error:
        raise FileError(f"{path}: another process is writing to it") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be opened for writing: {error.strerror or error}") from error


def check_readable(path: str | os.PathLike[str], error: type[DreamShardError], what: str = "file") -> None:
    """Raise ``error`` unless there is a regular file of at most :data:`MAX_READ_BYTES` bytes."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as reason:
        known = reason if isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError) else None
        raise error(f"{path}: {f'cannot be read: {known.strerror}' if known else f'no such {what}'}") from reason
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path}: cannot be read: {'Is a directory' if stat.S_ISDIR(found.st_mode) else 'no regular file'}")
    if found.st_size > MAX_READ_BYTES:
        raise error(f"{path}: its {found.st_size:,} bytes are more than the {MAX_READ_BYTES:,} that are read")


def read_json(path: str | os.PathLike[str], error: type[DreamShardError]) -> Any:
    """Return the document in a JSON file; raises ``error``, which names the file."""
    check_readable(path, error)
    try:
        return parse_json(Path(path).read_bytes())
    except OSError as reason:
        raise error(f"{path}: cannot be read: {reason.strerror}") from reason
    except ValueError as reason:
        raise error(f"{path}: not a JSON file, or a truncated one ({brief(reason)})") from reason


def parse_json(text: str | bytes) -> Any:
    """Return a JSON document of at most :data:`MAX_NESTING` levels; raises ValueError for any mistake."""
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(f"nests deeper than {MAX_NESTING} levels") from error
    containers: list[Any] = [[document]]
    for _ in range(MAX_NESTING + 1):
        parts = (c.values() if isinstance(c, dict) else c for c in containers)
        containers = [part for values in parts for part in values if isinstance(part, (dict, list))]
        if not containers:
            return document
    raise ValueError(f"nests deeper than {MAX_NESTING} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raises ValueError for a repeated key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {brief(twice)} twice")
    return found
