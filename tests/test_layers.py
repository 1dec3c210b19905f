# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Imports run one way: no package imports one above it, no modules import each other in a circle."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import dreamshard_planner

ROOT = Path(dreamshard_planner.__file__).parent
LAYERS = re.search(r"## Layers.*?```text\n(.*?)```", (ROOT.parent / "docs/contributing.md").read_text(), re.DOTALL)[1]
RANK = {name: -line for line, names in enumerate(LAYERS.splitlines()) for name in names.split(", ")}
"""Height of every package; greater ones lie above."""


def modules() -> dict[str, Path]:
    """All modules of the package, by name."""
    paths = {path: path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py")}
    return {".".join(parts.parts).removesuffix(".__init__"): path for path, parts in paths.items()}


def imported(path: Path) -> Iterator[str]:
    """Names that a module imports: where it is loaded, in its functions, and for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Modules of the package that each module imports; not those of the API's names, which are imported when asked
    for."""
    known = modules()
    del known[ROOT.name]
    found = {
        module: {name for name in imported(path) if name.startswith(f"{ROOT.name}.")} for module, path in known.items()
    }
    return {
        module: {name if name in known else name.rpartition(".")[0] for name in names} - {module, ROOT.name}
        for module, names in found.items()
    }


def layer(module: str) -> str:
    """A module's package, or its own name where the list has it apart."""
    name = module.removeprefix(f"{ROOT.name}.")
    return name if name in RANK else name.partition(".")[0]


def test_every_package_has_its_layer() -> None:
    assert {layer(module) for module in modules()} == RANK.keys()


def test_no_import_runs_up() -> None:
    up = [(m, to) for m, targets in graph().items() for to in targets if RANK[layer(to)] > RANK[layer(m)]]
    assert not up


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not where only a function or a type checker imports."""
    TopologicalSorter(graph()).prepare()
