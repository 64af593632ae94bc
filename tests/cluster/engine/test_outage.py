"""Where the time of an outage went: the parts add up, whatever happened in it."""

import pytest

from cluster.engine.outage import Outage


def test_the_parts_add_up_to_the_whole() -> None:
    outage = Outage("rank 1 died", last_step_at=100.0, noticed_at=100.25, num_tokens=7, num_steps=3)
    outage.has_stepped = True
    outage.lose_again("rank 1 died again", num_steps=4)
    assert not outage.has_stepped
    outage.restarted(105.0, {"stop": 0.5, "load": 2.0})

    report = outage.report(106.5)

    assert report.parts == (
        ("notice", 0.25),
        ("earlier tries", 2.25),
        ("stop", 0.5),
        ("load", 2.0),
        ("replay", 1.5),
    )
    assert report.seconds == 6.5 == pytest.approx(sum(seconds for _, seconds in report.parts))
    assert report.cause == "rank 1 died again"
    assert str(report) == (
        "6500 ms without a token: notice 250, earlier tries 2250, stop 500, load 2000, replay 1500"
    )
