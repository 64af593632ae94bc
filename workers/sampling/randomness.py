"""Uniform numbers as a pure function of (seed, choice, position): no generator state to lose, copy or advance.

A request therefore draws the same numbers in any batch, after a preemption and after a crash. The function is
Philox4x64-10, a counter-based generator: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
2, 3" (SC 2011). The key is (seed, choice), the counter is the position.

Knows integers; knows nothing of tokens or distributions.
"""

_WORD = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_UNIT = 2.0**-53


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 64-bit words for a 256-bit counter and a 128-bit key, both as 64-bit words, lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 64) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 64) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position` of a sequence; 53 random bits."""
    return (philox4x64((position, 0, 0, 0), (seed, choice))[0] >> 11) * _UNIT
