# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``python -m dreamshard_planner``: the ``dreamshard`` command, as torchrun starts it."""

from dreamshard_planner.cli import main

if __name__ == "__main__":
    main()
