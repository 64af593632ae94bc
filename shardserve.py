"""The public face: `from shardserve import AsyncClient, Client, LLM, SamplingParams, build`.

Each name is loaded when first used (PEP 562), so that importing the client loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.application import build
    from cluster.client import AsyncClient, Client
    from cluster.generation import RequestOptions, SamplingParams
    from cluster.llm import LLM

__all__ = ["LLM", "AsyncClient", "Client", "RequestOptions", "SamplingParams", "build"]

_HOMES = {
    "AsyncClient": "cluster.client",
    "Client": "cluster.client",
    "LLM": "cluster.llm",
    "RequestOptions": "cluster.generation",
    "SamplingParams": "cluster.generation",
    "build": "cluster.application",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
