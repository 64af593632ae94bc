"""What a driver says while it starts, carried to whoever launched it through Ray's key-value store.

A replica's log files may be on another machine, and its few lines about starting are what a person at the launcher
waits for. Knows log records and keys; knows nothing of what the lines say.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

_KEY = b"shardserve/start-log"
_NAMESPACE = b"shardserve"
_LOGGER = "cluster.driver"
_MOST_LINES = 100


class _Recorder(logging.Handler):
    """Keeps the lines of one start and publishes all of them with every new one."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines = [*self._lines, record.getMessage()][-_MOST_LINES:]
        _put(json.dumps(self._lines).encode())


@contextmanager
def recording() -> Iterator[None]:
    """In the driver: publish what `cluster.driver` logs within this block. Needs a connection to Ray."""
    logger = logging.getLogger(_LOGGER)
    recorder, level = _Recorder(), logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(recorder)


def read() -> list[str]:
    """In the launcher: the lines of the latest start so far."""
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(_KEY, namespace=_NAMESPACE)
    lines: list[str] = json.loads(value) if value else []
    return lines


def forget() -> None:
    """In the launcher, before it starts anything: what an earlier start has said is no news."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_KEY, namespace=_NAMESPACE)


def _put(value: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_KEY, value, overwrite=True, namespace=_NAMESPACE)
