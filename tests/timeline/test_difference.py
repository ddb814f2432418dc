from wavetrain.timeline import Event, Shift, Timeline, difference


def event(start: float, end: float, name: str, rank: int = 0) -> Event:
    return Event(start, end, rank, "compute", name)


FIRST = Timeline((event(0, 1, "0F0"), event(1, 2, "0F1"), event(2, 4, "0B0")))


def test_a_timeline_does_not_differ_from_itself():
    same = difference(FIRST, FIRST)
    assert same.longer_s == 0
    assert same.only_first == same.only_second == same.reordered == ()
    assert all(shift.later_s == shift.longer_s == 0 for shift in same.shifts)


def test_a_shift_of_all_is_no_difference():
    later = Timeline(tuple(event(e.start_s + 8, e.end_s + 8, e.name) for e in FIRST.events))
    assert difference(FIRST, later).shifts == difference(FIRST, FIRST).shifts


def test_what_moved_grew_and_is_missing():
    second = Timeline((event(0, 1.5, "0F0"), event(1.5, 2.5, "0F1"), event(3, 4, "0W0")))
    found = difference(FIRST, second)
    assert found.shifts == (
        Shift(0, "compute", "0F0", (0, 0), (1, 1.5)),
        Shift(0, "compute", "0F1", (1, 1.5), (1, 1.0)),
    )
    assert found.only_first == (event(2, 4, "0B0"),)
    assert found.only_second == (event(3, 4, "0W0"),)
    assert found.worst(1)[0].name == "0F0"


def test_another_order_is_noticed():
    second = Timeline((event(0, 1, "0F1"), event(1, 2, "0F0"), event(2, 4, "0B0"), event(0, 1, "1F0", rank=1)))
    found = difference(FIRST, second)
    assert found.reordered == ((0, "compute"),)
    assert found.only_second == (event(0, 1, "1F0", rank=1),)


def test_repeated_names_are_matched_by_occurrence():
    twice = Timeline((event(0, 1, "0F0"), event(1, 3, "0F0")))
    assert [shift.duration_s for shift in difference(twice, twice).shifts] == [(1, 1), (2, 2)]
