"""What a driver tells about itself: the model it serves, where it is and how it is. Plain data that crosses
processes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Fixed once the ranks have loaded. `max_model_len` is what the KV pool really holds."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LifelineAddress:
    """Where a driver listens for ingresses, and the secret that it expects of them."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class DriverCard:
    """One driver as its ingresses know it. `address` is the id of its replica."""

    address: str
    model: ServedModel
    lifeline: LifelineAddress


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """How a driver is now. `lease` is False when it does not know the ingress that asks.

    `unavailable_because` says why no token can be made at the moment: requests wait until the ranks are back.
    """

    lease: bool
    running: int
    waiting: int
    unavailable_because: str | None = None
