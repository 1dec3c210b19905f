# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Docstrings and headings say who does what: none starts with a word that hides it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
HIDING = re.compile(r"(What|Of|Whether|Where|How|Those|Such|The same|One that)\b")
FOLDERS = ("dreamshard_planner", "benchmarks", "examples", "docs", "tests")


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of all strings that stand alone: docstrings, and those below attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value.strip()


def _headings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of headings outside of code."""
    code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code ^= line.startswith("```")
        if line.startswith("#") and not code:
            yield number, line.lstrip("# ").strip()


def test_docstrings_and_headings_start_with_a_verb_or_a_noun() -> None:
    sources = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    pages = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")})
    assert len(sources) > 100 and len(pages) > 20
    found = [(path, line, text) for path in sources for line, text in _docstrings(path)]
    found += [(path, line, text) for path in pages for line, text in _headings(path) if not text.endswith("?")]
    hiding = [f"{path.relative_to(ROOT)}:{line}: {text[:60]}" for path, line, text in found if HIDING.match(text)]
    assert not hiding, "\n".join(["start with a verb or a noun:", *hiding])
