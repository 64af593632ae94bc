"""The variants of a family's test module, each written and judged once."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.fakes.checkpoints import write_tiny_model
from tests.model_shards.families.logits import Judged


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Judged]:
    """One of the module's `VARIANTS`, by name."""

    @cache
    def judge(name: str) -> Judged:
        family, overrides = request.module.VARIANTS[name]
        return Judged.of(write_tiny_model(tmp_path_factory.mktemp("model"), family, **overrides))

    return judge
