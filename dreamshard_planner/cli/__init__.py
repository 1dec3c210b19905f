# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ``dreamshard`` command. Data goes to stdout, progress and errors to stderr.

Commands import what they work with when they run: ``--help``, ``--version`` and completion load no torch.
"""

from dreamshard_planner.cli import costs, plan, understand
from dreamshard_planner.cli.app import app, keep_stdout_for_data, written
from dreamshard_planner.environment import load_libc10_first

__all__ = ["app", "costs", "main", "plan", "understand"]


def main() -> None:
    """Entry point."""
    load_libc10_first()
    keep_stdout_for_data()
    try:
        app()
    finally:
        with written():  # help and the like
            pass
