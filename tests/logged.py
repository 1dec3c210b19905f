# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Records of the package's loggers, also in ranks, where pytest does not listen."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(module: str) -> Iterator[list[logging.LogRecord]]:
    """Records of a module of the package, even after a benchmark of the same process has switched logging off."""
    logger, handler = logging.getLogger(f"dreamshard_planner.{module}"), logging.Handler()
    records, disabled = [], logging.root.manager.disable
    handler.emit = records.append
    logger.addHandler(handler)
    logging.disable(logging.NOTSET)
    try:
        yield records
    finally:
        logging.disable(disabled)
        logger.removeHandler(handler)


@contextmanager
def warned(module: str) -> Iterator[list[str]]:
    """Messages of its warnings; told when it is left."""
    messages: list[str] = []
    with logged(module) as records:
        yield messages
    messages += [record.getMessage() for record in records if record.levelno >= logging.WARNING]
