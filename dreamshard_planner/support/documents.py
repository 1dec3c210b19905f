# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""JSON documents as instances of dataclasses, or refused with the place of the mistake."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.files import brief, read_json
from dreamshard_planner.support.formatting import nearest

T = TypeVar("T")
adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)

STRICT = {"extra": "forbid"}
"""Pydantic's settings, as ``__pydantic_config__`` of a dataclass: nothing unknown."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Unbounded = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value), Field(ge=0)]
"""Infinite, which JSON has no number for, where it is null: a rate that nothing limits, the cost of no plan."""
Count = Annotated[int, Field(ge=0)]
Several = Annotated[int, Field(ge=1)]

UNKNOWN = "unexpected_keyword_argument"
"""What pydantic calls a key that a dataclass lacks."""


def one_of(choices: Collection[str]) -> AfterValidator:
    """Those names and no others."""

    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {brief(value)}")
        return value

    return AfterValidator(check)


PLAIN = {bool, int, float, str, type(None)}
"""Types of values that JSON has, and that nothing changes in place."""
_names: Callable[[type], tuple[str, ...]] = cache(lambda kind: tuple(entry.name for entry in fields(kind)))


def document_of(value: Any) -> Any:
    """What ``dataclasses.asdict`` makes of dataclasses, lists, tuples, dicts and plain values, in a fraction of its
    time: it asks of every number what it is. Infinity becomes None, as :data:`Unbounded` reads it, of a dataclass's
    own entries alone."""
    kind = type(value)
    if kind in PLAIN:
        return None if value == math.inf else value
    if kind is dict:
        return {name: part if type(part) in PLAIN else document_of(part) for name, part in value.items()}
    if kind in (list, tuple):
        return kind(value if PLAIN.issuperset(map(type, value)) else map(document_of, value))
    if is_dataclass(kind):
        return {name: document_of(getattr(value, name)) for name in _names(kind)}
    return deepcopy(value)


def entries_of(path: str | Path, form: str, known: range, remedy: str, error: type[DreamShardError]) -> dict[str, Any]:
    """The entries of a JSON file of our own, without its format and version.

    Args:
        path: the file.
        form: its format.
        known: versions that this package reads.
        remedy: what to do about a file of an earlier one.
        error: raised where it is another file; names it.
    """
    document = read_json(path, error)
    if not isinstance(document, dict) or document.pop("format", None) != form:
        raise error(f"{path}: no {form}: its 'format' is not {form!r} (dreamshard info tells more)")
    check_version(path, document.pop("version", None), known, remedy, error)
    return document


def check_version(where: object, version: Any, known: range, remedy: str, error: type[DreamShardError]) -> None:
    """Raise ``error``, which names ``where``, unless the version is among the known ones."""
    if type(version) is not int or version < 1:
        raise error(f"{where}: unreadable version {brief(version)}")
    if version not in known:
        age, hint = ("older", remedy) if version < known.start else ("newer", "upgrade the package")
        raise error(f"{where}: version {brief(version)} is {age} than this package reads ({known.stop - 1}): {hint}")


def parsed(kind: type[T], document: Any, where: object, error: type[DreamShardError]) -> T:
    """What a document holds, with no text taken for a number.

    Args:
        kind: a dataclass, or any type that pydantic knows.
        document: as ``json.loads`` has it.
        where: file, and entry in it, for messages.
        error: raised where the document is none; names ``where``, the key, what is wrong with it, and what is there.
    """
    try:
        return adapter(kind).validate_json(json.dumps(document), strict=True)
    except ValidationError as reason:
        # A name that nothing has first: what is missing may be meant by it.
        mistake, *others = sorted(reason.errors(include_url=False), key=lambda found: found["type"] != UNKNOWN)
        more = f" (and {len(others)} more)" if others else ""
        raise error(f"{where}: {_in_words(kind, document, mistake)}{more}") from reason


def _in_words(kind: type, document: Any, mistake: Mapping[str, Any]) -> str:
    """One of pydantic's mistakes: its place, what it is, and what is there."""
    place, key = "", str(mistake["loc"][-1]) if mistake["loc"] else ""
    for part in mistake["loc"]:
        try:
            document = document[part]
        except (LookupError, TypeError):
            continue  # a key that is missing, or the name of an alternative
        place += f".{part}" if place else str(part)
    if mistake["type"] == UNKNOWN:
        known = [entry.name for entry in fields(kind)] if is_dataclass(kind) else []
        return f"unknown key {brief(place)}{nearest(key, known)}"
    prefix = f"{place}: " if place else ""
    if mistake["type"] == "missing":
        return f"{prefix}lacks {key!r}"
    if mistake["type"] == "value_error":
        return prefix + brief(mistake["ctx"]["error"])
    return f"{prefix}{mistake['msg'].replace('Input should', 'must')}, got {brief(mistake['input'])}"
