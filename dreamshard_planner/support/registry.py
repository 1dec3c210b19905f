# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables of what can be added from outside."""

from __future__ import annotations

import pkgutil
from collections import UserDict
from typing import TypeVar, cast

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """Things by name; one given as ``"package.module:attribute"`` is imported where it is first asked for."""

    def __init__(self, **things: T | str) -> None:
        super().__init__(cast("dict[str, T]", things))

    def __getitem__(self, name: str) -> T:
        thing = self.data[name]
        return pkgutil.resolve_name(thing) if isinstance(thing, str) else thing
