"""A Ray for one script: the one this process is connected to, or a private one that ends with the scope.

Knows Ray's life in a process; knows nothing of models or Serve.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.launch import ray_node
from cluster.launch.run_folder import RunFolder, reclaim_abandoned

_GRACE_S = 5.0  # for Ray's daemons to end by themselves


@contextmanager
def ensure_ray(ranks: int) -> Iterator[None]:
    """A connection to Ray with room for `ranks`. Raises `StartupFailed`."""
    reclaim_abandoned()
    folder = RunFolder.take()
    try:
        # Read when Ray is imported: an import before this one leaves Ray's own defaults in force.
        os.environ.update(ray_node.ray_environment(folder.path, "serve", os.environ, stats_port=0, metrics_port=0))
        import ray

        if ray.is_initialized():
            yield
            return
        ray_node.start_ray(folder.path, ranks=ranks)
        try:
            yield
        finally:
            ray_node.stop_ray()
    finally:
        folder.close(grace_s=_GRACE_S)
