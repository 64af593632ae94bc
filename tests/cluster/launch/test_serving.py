"""Causes in Serve's messages: what a person has to read is one line."""

import pytest

from cluster.launch.serving import cause_of

_RETRY = """The deployment failed to start 1 times in a row. This may be due to a problem with its constructor.
ray::ServeReplica:shardserve:Driver.initialize_and_get_metadata() (pid=1, ip=192.0.2.2)
  File "cluster/driver/ray_executor.py", line 147, in start_ray_group
    raise StartupFailed(str(error)) from error
model_shards.errors.PartitionError: 9 heads cannot be split over 12 ranks

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "cluster/driver/driver.py", line 60, in start
cluster.errors.StartupFailed: 9 heads cannot be split over 12 ranks: set --tp lower

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
RuntimeError: Traceback (most recent call last):
"""


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (_RETRY, "9 heads cannot be split over 12 ranks: set --tp lower"),
        ("RuntimeError: only a wrapper", "only a wrapper"),
        ("cluster.errors.Unavailable: the group is gone", "the group is gone"),
        ("ValueError: a: b: c", "a: b: c"),
        ("no error\nat all", "at all"),
        ("", ""),
    ],
)
def test_the_cause_is_one_line(message: str, cause: str) -> None:
    assert cause_of(message) == cause
