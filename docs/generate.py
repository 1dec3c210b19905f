# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Write what the pages say of the code: python docs/generate.py

The command line's reference (cli.md), the sharding types and those never proposed (sharding_types.md), how optimizer
states are carried (running_jobs.md), and the report in get_started.md.
Blocks are found by ``<!-- generated: NAME -->`` and ``<!-- end -->``; the tests fail where a page differs.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SHARED_BY = 3
"""Commands that have an option alike, from which it is listed once."""
REPORT = "dreamshard plan --tables mlperf_dlrm_dcnv2 --ranks 2 --device cpu --memory 128GB --batch-size 512"


def command_line() -> str:
    """Return the reference of all commands: options that several share once, the others with their command."""
    from dreamshard_planner.cli import app

    command = typer.main.get_command(app)
    records = {name: _options(one, name, command) for name, one in _leaves(command)}
    alike = Counter(chain(*records.values()))
    shared = sorted(record for record, count in alike.items() if count >= SHARED_BY)
    lines = ["# Command line", "", "`dreamshard COMMAND --help` shows the same with the options that matter first.", ""]
    lines += ["## Options that commands share", "", *map(_line, shared), ""]
    for name, one in _leaves(command):
        text, *example = re.split(r"^Example: ", one.help or "", flags=re.MULTILINE)
        lines += [f"## dreamshard {name}", "", " ".join(text.split()), ""]
        own = [record for record in records[name] if record not in shared]
        others = [f"`{record[0].split()[0].rstrip(',')}`" for record in records[name] if record in shared]
        lines += [*map(_line, own), *([f"* Shared: {', '.join(others)}."] if others else []), ""]
        lines += [part for each in example for part in ("```bash", each.strip(), "```", "")]
    return "\n".join(lines).rstrip() + "\n"


def _leaves(command: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and command of all that take no further command, in the order of the help."""
    for name in command.list_commands(typer.Context(command)):
        one = command.commands[name]
        if hasattr(one, "commands"):
            yield from _leaves(one, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", one


def _options(one: Any, name: str, parent: Any) -> list[tuple[str, str]]:
    """Return what the help says of each argument and option, without --help."""
    context = typer.Context(one, info_name=name, parent=typer.Context(parent, info_name="dreamshard"))
    found = [parameter.get_help_record(context) for parameter in one.get_params(context)]
    return [(title, " ".join(text.split())) for title, text in filter(None, found) if title != "--help"]


def _line(record: tuple[str, str]) -> str:
    return f"* `{record[0]}`: {record[1]}"


MOVED = {
    ("world", "all_to_all"): "all-to-all, the owner sends (W − 1)·B·d·4",
    ("world", "reduce_scatter"): "reduce-scatter of W·B·d·4",
    ("world", "all_gather"): "all-gather of B·d·4",
    ("world", "all_reduce"): "all-reduce of a gradient as large as the table",
    ("host", "reduce_scatter"): "reduce-scatter in the host, W·B·d·4",
    ("host", "all_gather"): "all-gather in the host, N·B·d·4",
    ("across", "all_to_all"): "all-to-all between hosts, N·B·d·4",
}
"""Bytes of each operation, by the ranks that exchange."""


def sharding_types() -> str:
    """The table of all sharding types."""
    from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, THROUGH_HOSTS, ShardingTypeSpec

    def moved(spec: ShardingTypeSpec) -> str:
        forward = ", then ".join(MOVED[each.over, each.forward] for each in spec.exchanges if each.forward)
        backward = ", then ".join(MOVED[each.over, each.backward] for each in reversed(spec.exchanges))
        mirrored = "the other way round" if spec.exchanges == THROUGH_HOSTS else backward
        return "; ".join(filter(None, (forward, "" if forward == backward else f"backward {mirrored}")))

    def offered(devices: Sequence[str]) -> str:
        return ", ".join({"cpu": "CPU", "cuda": "GPU"}[device] for device in devices) or "no"

    def row(kind: str, spec: ShardingTypeSpec) -> str:
        same = "[not always](#types-that-train-the-same)" if spec.inexact else "yes"
        cells = (f"`{kind}`", spec.in_words, moved(spec), offered(spec.pooled_on), offered(spec.sequence_on), same)
        return f"| {' | '.join(cells)} |"

    return "\n".join(
        [
            "| type | who computes what, in the forward pass | bytes that pooled outputs move, per rank | pooled on "
            "| sequences on | trains the same |",
            "|---|---|---|---|---|---|",
            *(row(kind, spec) for kind, spec in SHARDING_TYPES.items()),
        ]
    )


def never_proposed() -> str:
    """Reasons of the sharding types' table."""
    from dreamshard_planner.search_space.sharding_types import MIXED_MEAN, SHARDING_TYPES, Reason

    def rows(reasons: Mapping[str, Sequence[Reason[Any]]]) -> Iterator[str]:
        for reason in dict.fromkeys(chain(*reasons.values())):
            named = ", ".join(f"`{kind}`" for kind, its in reasons.items() if reason in its)
            yield f"| {named} | {reason.where} | {reason.text} |"

    where = "beside a mean-pooled table in blocks of rows, in one module"
    mixed = Reason(where, lambda situation: True, MIXED_MEAN)
    beside = {kind: () if spec.divides_means_late else (mixed,) for kind, spec in SHARDING_TYPES.items()}
    broken = {kind: (*spec.broken, *spec.broken_cuts) for kind, spec in SHARDING_TYPES.items()}
    return "\n".join(["| type | tables | reason |", "|---|---|---|", *rows(broken), *rows(beside)])


def states() -> str:
    """The table of rules in across_plans/reading.py."""
    from dreamshard_planner.across_plans.reading import RULES

    rows = (
        f"| `{rule.name}` | {', '.join(map('`{}`'.format, rule.aliases)) or '-'} | {rule.join.value} | {rule.why} |"
        for rule in RULES
    )
    return "\n".join(["| fused state | in dense optimizers | carried | since |", "|---|---|---|---|", *rows])


def report() -> str:
    """Return the printed report of :data:`REPORT`, as on the CPU of the shipped costs, without the list of tables."""
    from dreamshard_planner.checkpoints.checkpoint import Checkpoint
    from dreamshard_planner.checkpoints.choice import SHIPPED
    from dreamshard_planner.cli import app
    from dreamshard_planner.measure.hardware import CPU_NAME_VARIABLE

    there = {CPU_NAME_VARIABLE: Checkpoint.load(SHIPPED / "cpu.safetensors").metadata["hardware"]["name"]}
    result = CliRunner().invoke(app, shlex.split(REPORT)[1:], env=there, catch_exceptions=False)
    text = result.stdout.split("\n\n")[0].rstrip()
    return f"```bash\n{REPORT}\n```\n\n```\n{text}\n```"


BLOCKS: dict[str, tuple[Path, Callable[[], str]]] = {
    "sharding types": (DOCS / "sharding_types.md", sharding_types),
    "never proposed": (DOCS / "sharding_types.md", never_proposed),
    "states": (DOCS / "running_jobs.md", states),
    "report": (DOCS / "get_started.md", report),
}


def block(name: str) -> str:
    """Return the present text of a block."""
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
