# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Parse JSON documents into dataclasses, or refuse them with the place of the mistake."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.files import read_json
from dreamshard_planner.support.formatting import brief, nearest

T = TypeVar("T")
adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)

STRICT = {"extra": "forbid"}
"""Settings for ``__pydantic_config__`` of a dataclass: unknown keys are errors."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Unbounded = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value), Field(ge=0)]
"""A number, or null for infinity, which JSON lacks: an unlimited rate, the cost of no plan."""
Count = Annotated[int, Field(ge=0)]
Several = Annotated[int, Field(ge=1)]

UNKNOWN = "unexpected_keyword_argument"
"""Pydantic's type of error for an unknown key."""


def one_of(choices: Collection[str]) -> AfterValidator:
    """Return a validator that allows only these names."""

    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {brief(value)}")
        return value

    return AfterValidator(check)


document_of: Callable[[Any], Any] = partial(to_jsonable_python, inf_nan_mode="null")
"""Returns dataclasses as a JSON document; infinite fields become None, as :data:`Unbounded` reads them."""


def entries_of(path: str | Path, form: str, known: int, remedy: str, error: type[DreamShardError]) -> dict[str, Any]:
    """Return the entries of one of this package's JSON files, without format and version.

    Args:
        path: the file.
        form: its format.
        known: readable version.
        remedy: advice for older files.
        error: raised for any other file; names it.
    """
    document = read_json(path, error)
    if not isinstance(document, dict) or document.pop("format", None) != form:
        raise error(f"{path}: no {form}: its 'format' is not {form!r} (dreamshard info tells more)")
    check_version(path, document.pop("version", None), known, remedy, error)
    return document


def check_version(where: object, version: Any, known: int, remedy: str, error: type[DreamShardError]) -> None:
    """Raise ``error``, which names ``where``, unless the version is the known one."""
    if type(version) is not int or version < 1:
        raise error(f"{where}: unreadable version {brief(version)}")
    if version != known:
        age, hint = ("older", remedy) if version < known else ("newer", "upgrade the package")
        raise error(f"{where}: version {brief(version)} is {age} than this package reads ({known}): {hint}")


def parsed(kind: type[T], document: Any, where: object, error: type[DreamShardError]) -> T:
    """Return a document as a dataclass; texts are never taken for numbers.

    Args:
        kind: a dataclass, or any type that pydantic knows.
        document: as ``json.loads`` returns it.
        where: file, and entry in it, for messages.
        error: raised for a mistake; names ``where``, key, problem and value.
    """
    try:
        return adapter(kind).validate_json(json.dumps(document), strict=True)
    except ValidationError as reason:
        # Unknown keys first: a missing one may be misspelt.
        mistake, *others = sorted(reason.errors(include_url=False), key=lambda found: found["type"] != UNKNOWN)
        more = f" (and {len(others)} more)" if others else ""
        raise error(f"{where}: {_in_words(kind, document, mistake)}{more}") from reason


def _in_words(kind: type, document: Any, mistake: Mapping[str, Any]) -> str:
    """Return one of pydantic's mistakes as a sentence with place, problem and value."""
    place, key = "", str(mistake["loc"][-1]) if mistake["loc"] else ""
    for part in mistake["loc"]:
        try:
            document = document[part]
        except (LookupError, TypeError):
            continue  # a key that is missing, or the name of an alternative
        named = str(part) or '""'  # the path of a model's root
        place += f".{named}" if place else named
    if mistake["type"] == UNKNOWN:
        known = [entry.name for entry in fields(kind)] if is_dataclass(kind) else []
        return f"unknown key {brief(place)}{nearest(key, known)}"
    prefix = f"{place}: " if place else ""
    if mistake["type"] == "missing":
        return f"{prefix}lacks {key!r}"
    if mistake["type"] == "too_short":
        return f"{prefix}must have at least {mistake['ctx']['min_length']} entry, got {brief(mistake['input'])}"
    if mistake["type"] == "value_error":
        return prefix + brief(mistake["ctx"]["error"])
    return f"{prefix}{mistake['msg'].replace('Input should', 'must')}, got {brief(mistake['input'])}"
