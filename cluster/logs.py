"""Logging of a launcher's own process: ours readable on stderr, Ray's and HTTP's only when something is wrong.

Knows logger names and one format. The processes of a cluster log through Ray into the session's folder instead.
"""

import logging

OUR_LOGGERS = ("cluster", "workers", "model_shards")
# Ray sets the levels of its loggers itself when it is imported, so these are filtered and not set.
_QUIET_LOGGERS = ("ray", "ray.serve", "ray._private.worker", "httpx", "httpcore", "huggingface_hub", "urllib3")
_FORMAT = "%(levelname)s %(name)s: %(message)s"


# `ray.init` warns of it in any thread but the first. Signals are ours: `cluster.launch.signals`.
_NO_TROUBLE = "SIGTERM handler is not set"


class _OnlyTrouble(logging.Filter):
    """Lets warnings and worse pass. Equal to any other of its kind, so that adding it twice adds it once."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING and not record.getMessage().startswith(_NO_TROUBLE)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnlyTrouble)

    def __hash__(self) -> int:
        return hash(_OnlyTrouble)


def configure_logging(level: int = logging.WARNING) -> None:
    """Show our loggers from `level` on, on stderr, and of the noisy libraries only warnings. Idempotent."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).addFilter(_OnlyTrouble())
