"""Drivers that Ray has no place for, which Serve waits for without a word: demand against what each node offers.

Knows placement groups and time; knows nothing of what a driver does.
"""

import time
from collections.abc import Callable

_PATIENCE_S = 2.0  # Ray places what it can within milliseconds

Bundles = list[dict[str, float]]


class UnplacedDrivers:
    """Of one application. `demand` says what is wanted and what there is; None while all have their places."""

    def __init__(self, application: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._application = application
        self._clock = clock
        self._since: float | None = None
        self.demand: str | None = None

    def look(self) -> bool:
        """Whether there is something new to say. Needs a connection to Ray."""
        from ray.util.placement_group import placement_group_table

        from cluster.driver.placement import describe_demand, node_offers

        bundles = waiting_bundles(placement_group_table(), self._application)
        if bundles is None:
            self._since = self.demand = None
            return False
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since < _PATIENCE_S:
            return False
        said, self.demand = self.demand, describe_demand(bundles, node_offers())
        return self.demand != said


def waiting_bundles(groups: dict[str, dict[str, object]], application: str) -> Bundles | None:
    """Those of a placement group of the application that is not placed yet. Serve names it after the replica."""
    for group in groups.values():
        bundles = group["bundles"]
        if group["state"] == "PENDING" and f"::{application}#" in str(group["name"]) and isinstance(bundles, dict):
            return list(bundles.values())
    return None
