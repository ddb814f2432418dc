import math

import pytest

from wavetrain.timeline import Counter, Event, Timeline

EVENTS = (
    Event(1.0, 2.0, 0, "compute", "0F1"),
    Event(0.0, 1.0, 0, "compute", "0F0"),
    Event(0.5, 1.5, 1, "compute", "1F0"),
    Event(1.2, 1.8, 1, "compute", "1F1"),
)
TIMELINE = Timeline(EVENTS, (Counter(0.0, 0, "memory_bytes", 5.0), Counter(1.0, 0, "memory_bytes", 9.0)))


def test_order_of_construction_does_not_matter():
    assert Timeline(EVENTS[::-1]) == Timeline(EVENTS)
    assert hash(Timeline(EVENTS[::-1])) == hash(Timeline(EVENTS))


def test_what_it_says():
    assert TIMELINE.ranks == (0, 1)
    assert TIMELINE.duration_s == 2.0
    assert TIMELINE.order(0, "compute") == ("0F0", "0F1")
    assert TIMELINE.busy_s(0, "compute") == 2.0
    assert TIMELINE.busy_s(1, "compute") == pytest.approx(1.3)  # 0.5 to 1.8, the overlap once
    assert TIMELINE.busy_s(1, "network") == 0.0
    assert TIMELINE.peak(0, "memory_bytes") == 9.0


def test_an_empty_timeline_lasts_no_time():
    assert Timeline().duration_s == 0.0
    assert Timeline().ranks == ()


@pytest.mark.parametrize(("start", "end"), [(2.0, 1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_impossible_times_are_refused(start, end):
    with pytest.raises(ValueError, match="0F0"):
        Event(start, end, 0, "compute", "0F0")
    with pytest.raises(ValueError, match="finite"):
        Counter(math.nan, 0, "m", 1.0)
