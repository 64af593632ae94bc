"""The generator against numpy's implementation of the same function, and against uniformity."""

import numpy as np
import pytest

from workers.sampling.randomness import philox4x64, uniform


@pytest.mark.parametrize("key", [(0, 0), (1, 2), (2**64 - 1, 2**64 - 1), (0x0123456789ABCDEF, 0xFEDCBA9876543210)])
@pytest.mark.parametrize("counter", [(1, 0, 0, 0), (2**64 - 1, 7, 2**63, 5)])
def test_equals_numpys_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    # numpy steps its counter before it makes a block.
    before = (sum(word << (64 * place) for place, word in enumerate(counter)) - 1) % 2**256
    generator = np.random.Philox(counter=before, key=key[0] | key[1] << 64)
    assert philox4x64(counter, key) == tuple(int(word) for word in generator.random_raw(4))


def test_known_answer_of_the_authors() -> None:
    # The zero vector of philox4x64-10 in the authors' own set of known answers.
    assert philox4x64((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )


def test_each_part_of_the_key_matters() -> None:
    numbers = {uniform(*key) for key in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0), (2**64 - 1, 0, 0))}
    assert len(numbers) == 5
    assert uniform(1, 0, 0) == uniform(1, 0, 0)


@pytest.mark.parametrize("varied", [0, 1, 2])
def test_numbers_are_uniform_along_each_part(varied: int) -> None:
    keys = [tuple(place if part == varied else 3 for part in range(3)) for place in range(20_000)]
    numbers = np.array([uniform(*key) for key in keys])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    expected = len(numbers) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110  # chi-square, 63 degrees of freedom, p < 0.0003
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
