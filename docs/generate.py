# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Write what the pages say of the code: python docs/generate.py

The command line's reference (cli.md), the sharding types that are never proposed (sharding_types.md), and the README's
report, which a plan makes. Blocks are found by ``<!-- generated: NAME -->`` and ``<!-- end -->``; the tests fail where
a page is not what this writes.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import typer
from typer.cli import get_docs_for_click
from typer.testing import CliRunner

DOCS = Path(__file__).parent
ROOT = DOCS.parent
REPORT = "dreamshard plan --tables mlperf_dlrm_dcnv2 --ranks 2 --device cpu --memory 128GB --batch-size 512"


def command_line() -> str:
    """Reference of all commands, examples as code."""
    from dreamshard_planner.cli import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="dreamshard", title="Command line")
    text = re.sub(r"^Example: (.*)$", r"**Example**:\n\n```bash\n\1\n```", text, flags=re.MULTILINE)
    return text.rstrip() + "\n"


def never_proposed() -> str:
    """A table of legal.py."""
    from dreamshard_planner.search_space.sharding_types import BROKEN, INEXACT, MIXED_MEAN, ROW_BLOCKS, SHARDING_TYPES

    def row(types: frozenset[str], where: str, reason: str, proposed: str) -> str:
        named = ", ".join(f"`{kind}`" for kind in SHARDING_TYPES if kind in types)
        return f"| {named} | {where} | {reason} | {proposed} |"

    others = frozenset(SHARDING_TYPES) - ROW_BLOCKS
    never, consent = "never", "where the table's constraint names it, or with `exact_training=False`"
    return "\n".join(
        [
            "| type | where | why not | proposed |",
            "|---|---|---|---|",
            *(row(c.sharding_types, c.where, c.reason, never) for c in BROKEN),
            row(others, "beside a mean-pooled table in blocks of rows, in one module", MIXED_MEAN, never),
            *(row(c.sharding_types, c.where, c.reason, consent) for c in INEXACT),
        ]
    )


def report() -> str:
    """What the README's command prints, without its list of tables, where the costs that ship were measured."""
    from dreamshard_planner.checkpoints.checkpoint import SHIPPED, Checkpoint
    from dreamshard_planner.cli import app
    from dreamshard_planner.measure.hardware import CPU_NAME_VARIABLE

    there = {CPU_NAME_VARIABLE: Checkpoint.load(SHIPPED / "cpu.safetensors").metadata["hardware"]["name"]}
    result = CliRunner().invoke(app, shlex.split(REPORT)[1:], env=there, catch_exceptions=False)
    text = result.stdout.split("\n\n")[0].rstrip()
    return f"```bash\n{REPORT}\n```\n\n```\n{text}\n```"


BLOCKS: dict[str, tuple[Path, Callable[[], str]]] = {
    "never proposed": (DOCS / "sharding_types.md", never_proposed),
    "report": (ROOT / "README.md", report),
}


def block(name: str) -> str:
    """What a page has now."""
    return _pattern(name).search(BLOCKS[name][0].read_text())[2].strip()


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- generated: {name} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    (DOCS / "cli.md").write_text(command_line())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DREAMSHARD_HOME"] = folder  # the report is of what ships
        for name, (page, make) in BLOCKS.items():
            body = f"\n{make()}\n\n"
            page.write_text(_pattern(name).sub(lambda found, body=body: found[1] + body + found[3], page.read_text()))


if __name__ == "__main__":
    sys.exit(main())
