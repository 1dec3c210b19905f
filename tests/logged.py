# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Records of the package's loggers, also in ranks, where pytest does not listen."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged(module: str) -> Iterator[list[logging.LogRecord]]:
    """Records of a module of the package, even after a benchmark of the same process has switched logging off."""
    logger, kept, disabled = logging.getLogger(f"dreamshard_planner.{module}"), _Kept(), logging.root.manager.disable
    logger.addHandler(kept)
    logging.disable(logging.NOTSET)
    try:
        yield kept.records
    finally:
        logging.disable(disabled)
        logger.removeHandler(kept)


@contextmanager
def warned(module: str) -> Iterator[list[str]]:
    """Messages of its warnings; told when it is left."""
    messages: list[str] = []
    with logged(module) as records:
        yield messages
    messages += [record.getMessage() for record in records if record.levelno >= logging.WARNING]
