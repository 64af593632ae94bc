"""The Ray clusters that launches of this user have started on this machine, and joining one from another process.

Knows which launches live, their addresses and their tokens; knows nothing of what is served there.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import StartupFailed, Unavailable
from cluster.launch import ray_auth, ray_node
from cluster.launch.preflight import running_ray
from cluster.launch.run_folder import live_folders

_ADDRESS_FILE = "ray_address"


@dataclass(frozen=True, slots=True)
class RunningRay:
    """The Ray of a launch that lives."""

    address: str
    folder: Path


def note_address(folder: Path, address: str) -> None:
    """Let other processes of this user find the Ray that was started in `folder`."""
    (folder / _ADDRESS_FILE).write_text(address, encoding="ascii")


def running_here(parent: Path | None = None) -> list[RunningRay]:
    """Every Ray that has been noted by a launch of this user that lives."""
    found = []
    for folder in live_folders(parent):
        try:
            found.append(RunningRay((folder / _ADDRESS_FILE).read_text(encoding="ascii"), folder))
        except OSError:
            continue  # it has not come so far, serves nothing, or has just ended
    return found


def choose(ours: Sequence[RunningRay], known_to_ray: str | None, environment: Mapping[str, str]) -> str:
    """The address to join when the caller gave none. Raises `Unavailable` when there is more than one."""
    if environment.get("RAY_ADDRESS"):
        return environment["RAY_ADDRESS"]
    candidates = [f"{one.address} ({one.folder})" for one in ours]
    if known_to_ray is not None:
        candidates.append(known_to_ray)
    if len(candidates) > 1:
        raise Unavailable(f"several Ray clusters run here: {', '.join(candidates)}; choose one with address=")
    return ours[0].address if ours else "auto"


def join_ray(address: str | None) -> None:
    """Connect this process to the Ray at `address`, or to the one that runs here. Raises `Unavailable`."""
    ours = running_here()
    chosen = address or choose(ours, running_ray(os.environ), os.environ)
    for one in ours:
        if one.address == chosen:
            ray_auth.show_token(ray_node.token_file(one.folder))
    try:
        ray_node.join(chosen)
    except StartupFailed as error:
        raise Unavailable(str(error)) from error
