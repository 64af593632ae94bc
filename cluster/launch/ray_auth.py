"""Ray's token authentication as seen by this process: which token it shows, whenever Ray was imported.

Knows Ray's environment variables and the caches behind them; knows nothing of folders or of starting Ray.
"""

import os
from pathlib import Path
from typing import Any

_MODE = "RAY_AUTH_MODE"
_PATH = "RAY_AUTH_TOKEN_PATH"


def token_settings(token_file: Path) -> dict[str, str]:
    """The environment of every process of a Ray whose token is in `token_file`."""
    return {_MODE: "token", _PATH: str(token_file)}


def show_token(token_file: Path) -> None:
    """Show the token of `token_file` to the Ray that this process connects to next."""
    os.environ.update(token_settings(token_file))
    follow_environment()


def what_is_shown() -> str:
    """In words: which token the environment of this process makes Ray show, and how to show another."""
    mode = os.environ.get(_MODE)
    if mode == "token":
        return f"with {_MODE}=token the one in the file {_PATH}={os.environ.get(_PATH, '')} is shown"
    return f"{_MODE} is {mode or 'not set'} here; with {_MODE}=token the one in the file {_PATH} is shown"


def follow_environment() -> None:
    """Make Ray see the mode and the token that the environment names now. Only while Ray is not connected.

    Ray caches both when it is first imported, which may have been before our settings: without this the daemons
    that it starts would demand a token (they read the environment) that this process does not send.
    """
    from ray import _raylet

    raylet: Any = _raylet  # neither name is in its stubs
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
