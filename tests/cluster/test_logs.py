"""What a launcher's own process shows of other libraries' logging."""

import logging
from collections.abc import Iterator

import pytest

from cluster.logs import OUR_LOGGERS, configure_logging

RAYS = "ray._private.worker"
CONFIGURED = (*OUR_LOGGERS, "ray", "ray.serve", RAYS, "httpx", "httpcore", "huggingface_hub", "urllib3")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in CONFIGURED]
    before = [(each, each.handlers, list(each.filters), each.level, each.propagate) for each in loggers]
    yield
    for logger, handlers, filters, level, propagate in before:
        logger.handlers, logger.filters = handlers, filters
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.mark.parametrize(
    ("level", "message", "passes"),
    [
        (logging.INFO, "Started a local Ray instance.", False),
        (logging.WARNING, "SIGTERM handler is not set because current thread is not the main thread.", False),
        (logging.WARNING, "The object store is full.", True),
        (logging.ERROR, "A node died.", True),
    ],
)
def test_only_trouble_of_ray_is_shown(level: int, message: str, passes: bool) -> None:
    configure_logging()
    logger = logging.getLogger(RAYS)
    record = logger.makeRecord(RAYS, level, __file__, 1, message, (), None)
    assert bool(logger.filter(record)) == passes


def test_configuring_twice_filters_once() -> None:
    configure_logging()
    filters = list(logging.getLogger(RAYS).filters)
    configure_logging()
    assert logging.getLogger(RAYS).filters == filters
