"""Silence and our own stalls, by a clock set by hand."""

from cluster.driver.silence import Silence


class Listener:
    def __init__(self) -> None:
        self.now = 100.0
        self.silence = Silence(lambda: self.now, limit_s=3.0, look_s=0.25)

    def too_long_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.silence.too_long()


def test_a_silence_is_too_long_after_the_limit() -> None:
    listener = Listener()
    assert not any(listener.too_long_after(0.25) for _ in range(12))
    assert listener.too_long_after(0.25)


def test_a_word_ends_a_silence() -> None:
    listener = Listener()
    for _ in range(5):
        assert not any(listener.too_long_after(0.25) for _ in range(12))
        listener.silence.end()


def test_our_own_stall_counts_as_a_single_look() -> None:
    listener = Listener()
    assert not listener.too_long_after(3600.0)
    assert not any(listener.too_long_after(0.25) for _ in range(11))
    assert listener.too_long_after(0.25)


def test_a_process_that_stalls_at_every_look_still_finds_the_other_gone() -> None:
    listener = Listener()
    assert not any(listener.too_long_after(5.0) for _ in range(12))
    assert listener.too_long_after(5.0)
