"""A Ray for one script: the one this process is connected to, or a private one that ends with the scope.

Knows Ray's life in a process; knows nothing of models or Serve.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.launch import ray_auth, ray_node
from cluster.launch.run_folder import RunFolder, reclaim_abandoned

_GRACE_S = 5.0  # for Ray's daemons to end by themselves


@contextmanager
def ensure_ray(ranks: int, gpus: int = 0) -> Iterator[None]:
    """A connection to Ray with room for `ranks`; one started here has `gpus`. Raises `StartupFailed`."""
    if _is_connected():
        yield
        return
    reclaim_abandoned()
    folder = RunFolder.take()
    try:
        settings = ray_node.ray_environment(folder.path, "serve", os.environ, stats_port=0, metrics_port=0)
        with _environment(settings):
            try:
                ray_node.start_ray(folder.path, ranks=ranks)
                ray_node.check_gpus(gpus)
                yield
            finally:
                ray_node.stop_ray()
    finally:
        folder.close(grace_s=_GRACE_S)


def _is_connected() -> bool:
    """Without importing Ray: its log filter follows the environment of that moment, which is to be ours."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """`settings` within the block; afterwards what a later Ray of this script finds is as it was."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        ray_auth.follow_environment()
