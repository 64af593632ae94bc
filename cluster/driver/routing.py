"""Which replica of the drivers a call through a Serve handle goes to: the one it names, or any.

An ingress holds a lease with each driver and must reach that very one; Serve by itself chooses. Knows replicas and
how a call names one; knows nothing of leases or requests.
"""

from typing import Any

from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class DriverGone(RayServeException):
    """No replica of that id runs: it has ended, or it is being drained."""


class ByAddress(RequestRouter):
    """A call with a `session_id` goes to the replica of that id and fails when it is gone; others go to any."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        address = "" if pending_request is None else address_in(pending_request.metadata)
        if pending_request is None or not address:
            return [candidate_replicas]
        addressed = [replica for replica in candidate_replicas if replica.replica_id.unique_id == address]
        if not addressed and not pending_request.future.done():
            # Serve would search until one came. It looks at the future once it has candidates, and then ends.
            pending_request.future.set_exception(DriverGone(f"driver {address} is gone or going"))
        return [addressed or candidate_replicas]


def address_in(metadata: Any) -> str:
    """The id of the replica that a call is meant for; empty when any will do."""
    return str(metadata.session_id or "")
