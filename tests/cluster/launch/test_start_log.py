"""What a driver says while it starts reaches its launcher, and why it failed, whether or not Serve tells."""

import logging

import pytest
from ray.experimental import internal_kv

from cluster.errors import StartupFailed
from cluster.launch import start_log
from cluster.launch.serving import wait_running
from cluster.launch.start_log import StartLog

logger = logging.getLogger("cluster.driver.something")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's key-value store without Ray."""
    kept: dict[tuple[bytes, bytes], bytes] = {}

    def put(key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        assert overwrite
        kept[namespace, key] = value

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: kept.get((namespace, key)))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda key, namespace: kept.pop((namespace, key), None))


def test_lines_are_there_as_they_are_said_and_can_be_forgotten() -> None:
    assert start_log.read() == StartLog([])
    with start_log.recording():
        logger.info("placed")
        assert start_log.read() == StartLog(["placed"])
        logger.info("loaded")
    logger.info("serving")
    assert start_log.read() == StartLog(["placed", "loaded"])
    start_log.forget()
    assert start_log.read() == StartLog([])


def _fail() -> None:
    logger.info("placed")
    raise StartupFailed("rank 1 was ended by Ray")


def test_the_launcher_ends_with_the_failure_that_the_driver_has_noted() -> None:
    """Serve is not asked: its controller may be gone."""
    with pytest.raises(StartupFailed), start_log.recording():
        _fail()
    said: list[str] = []
    with pytest.raises(StartupFailed, match=r"^rank 1 was ended by Ray$"):
        wait_running("shardserve", deadline_s=60, on_line=said.append)
    assert said == ["placed"]


def test_an_error_without_words_is_named() -> None:
    with pytest.raises(KeyError), start_log.recording():
        raise KeyError
    assert start_log.read() == StartLog([], "KeyError")
