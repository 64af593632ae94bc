"""The errors a user or an operator can meet. Knows causes; `cluster.ingress.openai` maps them to HTTP.

    ShardserveError
     |- InvalidRequest      the user's mistake: names the field and the numbers             (400)
     |   `- ContextOverflow     prompt and output do not fit into the context               (400)
     |- ModelNotFound       no such model here                                              (404)
     |- Overloaded          more waiting than the limit; try again after some seconds       (429)
     |- Unavailable         no token can be made now: starting, recovering or draining      (503)
     |- GenerationFailed    our fault, after the request was accepted                       (500)
     |- DeadlineExceeded    a Python client's own deadline passed; its request was ended
     |- InvalidConfig       a setting that cannot be, found before anything starts
     `- StartupFailed       the cluster could not start; the message has the cause

All of them cross process borders, so each can be rebuilt from its `args`.
"""


class ShardserveError(Exception):
    """Base of everything raised on purpose by `cluster`."""


class InvalidRequest(ShardserveError):
    """A request that can never be served. `field` is the name in the request, None when it has none."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class ContextOverflow(InvalidRequest):
    """Prompt and output together are longer than the context. Clients tell it apart to shorten and try again."""


class ModelNotFound(ShardserveError):
    """The request names a model that is not served here."""


class Overloaded(ShardserveError):
    """The waiting queue is full."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class Unavailable(ShardserveError):
    """No token can be made at the moment."""

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class GenerationFailed(ShardserveError):
    """An accepted request could not be finished."""


class DeadlineExceeded(ShardserveError):
    """No answer within the time that the caller gave."""


class InvalidConfig(ShardserveError):
    """A setting, or a combination of settings, that cannot be."""


class StartupFailed(ShardserveError):
    """The worker group or the model could not be brought up."""
