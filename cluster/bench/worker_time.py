"""Which share of their time a server's workers waited for its driver, where the server says so.

Of servers without our metric there is nothing to say. Knows one metric; knows nothing of load or display.
"""

import httpx
from prometheus_client.parser import text_string_to_metric_families

_METRIC = "shardserve_worker_seconds_total"
_TIMEOUT_S = 5.0

PartSeconds = dict[str, float]  # since the server started, by part of a step; `wait` is for the driver


async def worker_seconds(client: httpx.AsyncClient) -> PartSeconds | None:
    """None when the server does not tell."""
    try:
        response = await client.get("/metrics", timeout=_TIMEOUT_S)
        response.raise_for_status()
    except httpx.HTTPError:
        return None
    if _METRIC not in response.text:
        return None
    return {
        sample.labels["part"]: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == _METRIC
    }


def wait_share(before: PartSeconds | None, after: PartSeconds | None) -> float | None:
    """Between two readings. None without both, and when no step followed another at once."""
    if before is None or after is None:
        return None
    spent = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
    total = sum(spent.values())
    return spent.get("wait", 0.0) / total if total > 0 else None
