"""What a driver says while it starts, and why it does not, carried to its launcher through Ray's key-value store.

A replica's log files may be on another machine, and its few lines about starting are what a person at the launcher
waits for. Serve tells why a replica failed only while its controller lives, which Ray may end for want of memory.
Knows log records and keys; knows nothing of what the lines say.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

_KEY = b"shardserve/start-log"
_NAMESPACE = b"shardserve"
_LOGGER = "cluster.driver"
_MOST_LINES = 100


@dataclass(frozen=True, slots=True)
class StartLog:
    """Of the latest start so far."""

    lines: list[str]
    failure: str | None = None  # why it has failed


class _Recorder(logging.Handler):
    """Keeps the lines of one start and publishes all of them with every new one."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines = [*self._lines, record.getMessage()][-_MOST_LINES:]
        _put(StartLog(self._lines))

    def note_failure(self, error: Exception) -> None:
        _put(StartLog(self._lines, str(error) or type(error).__name__))


@contextmanager
def recording() -> Iterator[None]:
    """In the driver: publish what `cluster.driver` logs within this block, and what the block raises. Needs a
    connection to Ray.
    """
    logger = logging.getLogger(_LOGGER)
    recorder, level = _Recorder(), logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.INFO)
    try:
        yield
    except Exception as error:
        recorder.note_failure(error)
        raise
    finally:
        logger.setLevel(level)
        logger.removeHandler(recorder)


def read() -> StartLog:
    """In the launcher."""
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(_KEY, namespace=_NAMESPACE)
    return StartLog(**json.loads(value)) if value else StartLog([])


def forget() -> None:
    """In the launcher, before it starts anything: what an earlier start has said is no news."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_KEY, namespace=_NAMESPACE)


def _put(log: StartLog) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_KEY, json.dumps(asdict(log)).encode(), overwrite=True, namespace=_NAMESPACE)
