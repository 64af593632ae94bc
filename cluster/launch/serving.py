"""Our application on Ray Serve: deployed, watched until it runs, and taken away with its streams drained.

Knows Serve's states and the causes hidden in its messages; knows nothing of how Ray was started.
"""

import re
import time
from collections.abc import Callable
from typing import Any

from cluster.errors import StartupFailed
from cluster.launch import start_log
from cluster.launch.unplaced import UnplacedDrivers

_POLL_S = 0.2
_ANSWER_S = 5.0  # for a replica to answer at all
_FAILED = ("UNHEALTHY", "DEPLOY_FAILED")  # of applications and of deployments
# `module.Error: message`, the last line of a traceback inside a status message of Serve.
_CAUSE = re.compile(r"(?:(?:\w+\.)+(?P<kind>[A-Z]\w*)|(?P<bare>[A-Z]\w*(?:Error|Exception))): (?P<text>.+)")
# Wrappers that say where something failed, not why.
_WRAPPERS = frozenset({"RayTaskError", "RuntimeError", "ActorDiedError"})


def is_serve_running() -> bool:
    """Whether the Ray cluster that this process is connected to has Serve already."""
    from ray import serve

    return bool(serve.status().proxies)


def check_joinable(name: str, port: int) -> None:
    """Raises `StartupFailed` unless an application called `name` can join the Serve that runs, at this port.

    Host and port belong to Serve as a whole: one that runs keeps its own.
    """
    from ray import serve
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    http = None if client is None else client.http_config
    if http is not None and http.port != port:
        raise StartupFailed(
            f"Serve runs on that cluster already, with HTTP at port {http.port}: use --port {http.port}, "
            f"or stop it first (`serve shutdown`)"
        )
    applications = serve.status().applications
    if name in applications:
        raise StartupFailed(
            f"an application called {name!r} runs on that cluster already: `serve delete {name}` ends it"
        )
    if applications:
        raise StartupFailed(
            f"Serve on that cluster runs {', '.join(sorted(applications))} already, and our routes start at /: "
            f"deploy with a Serve config file that gives each a route_prefix"
        )


def start_serve(host: str, port: int) -> None:
    """Start Serve's controller and one HTTP proxy on this node. Raises `StartupFailed`."""
    from ray import serve

    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
    except (RuntimeError, OSError, TimeoutError) as error:
        raise StartupFailed(f"Serve does not start: {cause_of(str(error))}") from error


def deploy(application: Any, name: str) -> None:
    """Hand the application to Serve without waiting for it to run."""
    from ray import serve
    from ray.serve.schema import LoggingConfig

    start_log.forget()
    target = serve.RunTarget(
        target=application,
        name=name,
        route_prefix="/",
        logging_config=LoggingConfig(enable_access_log=False),
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def wait_running(name: str, *, deadline_s: float, on_line: Callable[[str], None]) -> None:
    """Wait until every replica of the application runs. Raises `StartupFailed` with the cause of a first failure.

    Serve would try a failing constructor again and again; what fails once here (a model that does not fit, a rank
    that dies while loading) fails again, so the first cause is the answer. `on_line` gets what the driver says.
    """
    from ray import serve

    deadline = time.monotonic() + deadline_s
    application = None
    shown = 0
    unplaced = UnplacedDrivers(name)
    while time.monotonic() < deadline:
        log = start_log.read()
        for line in log.lines[shown:]:
            on_line(line)
        shown = len(log.lines)
        if log.failure is not None:
            raise StartupFailed(log.failure)
        if unplaced.look():
            on_line(f"still waiting for a place: {unplaced.demand}")
        application = serve.status().applications.get(name)
        if application is not None:
            failure = _failure_of(application)
            if failure is not None:
                raise StartupFailed(failure)
            if application.status == "RUNNING":
                return
        time.sleep(_POLL_S)
    state = unplaced.demand or (_state_of(application) if application is not None else "not deployed yet")
    raise StartupFailed(f"the application does not run after {deadline_s:g} s: {state}")


def _failure_of(application: Any) -> str | None:
    for name, deployment in application.deployments.items():
        failed = deployment.status in _FAILED or deployment.status_trigger == "REPLICA_STARTUP_FAILED"
        if failed or "Traceback" in deployment.message:
            return cause_of(deployment.message) or f"{name} does not start"
    if application.status in _FAILED:
        return cause_of(application.message) or "the application does not start"
    return None


def _state_of(application: Any) -> str:
    parts = []
    for name, deployment in application.deployments.items():
        states = ", ".join(f"{count} {state.lower()}" for state, count in deployment.replica_states.items())
        parts.append(f"{name}: {states or 'waiting'}")
    return "; ".join(parts)


def cause_of(message: str) -> str:
    """The line in a message of Serve that says why: the last error that is no wrapper, else the last line."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    causes = [match for line in lines if (match := _CAUSE.match(line))]
    for match in reversed(causes):
        if (match["kind"] or match["bare"]) not in _WRAPPERS:
            return match["text"]
    if causes:
        return causes[-1]["text"]
    return lines[-1] if lines else ""


def drain(name: str, *, deadline_s: float) -> bool:
    """Let what runs finish and nothing new begin. False when the deadline passed, or an ingress did not answer."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from cluster.driver.handle import app_handle

    try:
        answers = app_handle(name).broadcast("drain", deadline_s)
        return all(answers.results(timeout_s=deadline_s + _ANSWER_S))
    except (RayError, RayServeException, TimeoutError):
        return False


def delete(name: str, *, deadline_s: float) -> bool:
    """Take the application away. False when it was still there at the deadline."""
    from ray import serve

    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + deadline_s
    while name in serve.status().applications:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def stop_serve() -> None:
    """End Serve's controller and proxies on the cluster this process is connected to."""
    from ray import serve

    serve.shutdown()
