"""A launch in the foreground of a terminal: shown while it starts, watched while it serves, ended by Ctrl-C.

Knows signals, progress and a launch; knows nothing of options.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from cluster.config import ClusterConfig
from cluster.errors import Unavailable
from cluster.launch.launcher import Launch, LaunchOptions
from cluster.launch.progress import Progress
from cluster.launch.signals import StopRequested, StopSignals
from cluster.logs import configure_logging

_WATCH_S = 1.0


class Serving:
    """A cluster that makes tokens, until the `launched` block is left."""

    def __init__(self, launch: Launch, progress: Progress, stop: StopSignals) -> None:
        self.url = launch.options.url
        self.model = launch.config.model_name
        self.logs = launch.logs
        self.ray_address = launch.ray_address
        self.progress = progress
        self._launch = launch
        self._stop = stop

    def stop_requested(self) -> bool:
        return self._stop.wait(0)

    def wait_for_stop(self) -> None:
        """Until Ctrl-C or SIGTERM. Raises `Unavailable` when the cluster cannot serve any longer."""
        while not self._stop.wait(_WATCH_S):
            failure = self._launch.failure()
            if failure is not None:
                raise Unavailable(failure)


@contextmanager
def launched(config: ClusterConfig, options: LaunchOptions, console: Console) -> Iterator[Serving]:
    """Start, yield when a token can be made, and end everything on the way out, whatever happens."""
    configure_logging()
    progress = Progress(console)
    launch = Launch(config, options, progress)
    with StopSignals(launch.end_hard) as stop:
        try:
            launch.start(after_ray=stop.install)
            stop.quiet()
            yield Serving(launch, progress, stop)
        except StopRequested:
            console.print("interrupted")
            raise
        finally:
            stop.quiet()
            if launch.has_begun:
                with progress.part("ended"):
                    launch.stop()
