"""The command line sets up this process's logging; each test gives it back as it was."""

import logging
from collections.abc import Iterator

import pytest

from cluster.logs import OUR_LOGGERS


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in OUR_LOGGERS]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)
        logger.propagate = propagate
