# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Check a lock as far as that goes without installing it: every file exists, and what packages ask for is in the lock.

    python -m pip install --dry-run --ignore-installed --no-deps --report report.json -r requirements/cuda.txt
    python requirements/check.py report.json

The lock is installed with --no-deps, so pip itself never looks. A difference may be meant, such as torchrec's wish for
fbgemm-gpu on a machine without GPUs: all are printed, and the exit status is 1 if there are any.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def differences(report: dict) -> Iterator[str]:
    """What the packages of a pip report ask for and do not find among themselves."""
    entries = report["install"]
    versions = {canonicalize_name(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in entries}
    needs = [
        (canonicalize_name(entry["metadata"]["name"]), Requirement(text))
        for entry in entries
        for text in entry["metadata"].get("requires_dist", [])
    ]
    extras: dict[str, set[str]] = {name: {""} for name in versions}

    def holds(name: str, need: Requirement) -> bool:
        return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras[name])

    for _ in range(len(entries)):  # extras may ask for extras
        for name, need in needs:
            if holds(name, need):
                extras.get(canonicalize_name(need.name), set()).update(need.extras)
    for name, need in needs:
        if not holds(name, need):
            continue
        found = versions.get(canonicalize_name(need.name))
        if found is None:
            yield f"{name} asks for {need}, which is missing"
        elif not need.specifier.contains(found, prereleases=True):
            yield f"{name} asks for {need}, the lock has {found}"


def main(path: str) -> int:
    """The command; returns the exit status."""
    report = json.loads(Path(path).read_text())
    found = list(differences(report))
    print(f"{len(report['install'])} packages, each with a file for this machine; {len(found)} difference(s)")
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
