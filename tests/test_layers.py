# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Imports run one way: no package imports one above it, no modules import each other in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import dreamshard_planner

ROOT = Path(dreamshard_planner.__file__).parent
LAYERS = re.search(r"## Layers.*?```text\n(.*?)```", (ROOT.parent / "docs/contributing.md").read_text(), re.DOTALL)[1]
RANK = {name: -line for line, names in enumerate(LAYERS.splitlines()) for name in names.split(", ")}
"""Of every package: those with a greater one lie above it."""


def modules() -> dict[str, Path]:
    """All modules of the package, by name."""
    paths = {path: path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py")}
    return {".".join(parts.parts).removesuffix(".__init__"): path for path, parts in paths.items()}


def imported(tree: ast.AST, late: bool) -> Iterator[str]:
    """What a module imports where it is loaded, and ``late``, in its functions; not what only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef) and not late:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node, late)


def graph(late: bool = True) -> dict[str, set[str]]:
    """Modules of the package that each module imports."""
    known = modules()
    names = {module: imported(ast.parse(path.read_text()), late) for module, path in known.items()}
    return {
        module: {name if name in known else name.rpartition(".")[0] for name in of if name.startswith(ROOT.name)}
        for module, of in names.items()
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
    TopologicalSorter({m: targets - {m, ROOT.name} for m, targets in graph(late=False).items()}).prepare()
