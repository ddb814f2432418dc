"""Two timelines of the same plan, compared event by event: what moved, grew, is missing or was reordered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from wavetrain.timeline.timeline import Event, Timeline


@dataclass(frozen=True)
class Shift:
    """One event as it stands in both timelines; times from each timeline's own start."""

    rank: int
    lane: str
    name: str
    start_s: tuple[float, float]
    duration_s: tuple[float, float]

    @property
    def later_s(self) -> float:
        return self.start_s[1] - self.start_s[0]

    @property
    def longer_s(self) -> float:
        return self.duration_s[1] - self.duration_s[0]


@dataclass(frozen=True)
class Difference:
    """What differs between a first timeline (usually predicted) and a second (usually measured)."""

    duration_s: tuple[float, float]
    shifts: tuple[Shift, ...]  # events present in both, in the first one's order
    only_first: tuple[Event, ...]
    only_second: tuple[Event, ...]
    reordered: tuple[tuple[int, str], ...]  # (rank, lane) whose common events come in another order

    @property
    def longer_s(self) -> float:
        return self.duration_s[1] - self.duration_s[0]

    def worst(self, count: int) -> tuple[Shift, ...]:
        """The events whose durations differ most."""
        return tuple(sorted(self.shifts, key=lambda shift: -abs(shift.longer_s))[:count])


_Key = tuple[int, str, str, int]  # rank, lane, name, how many of that name came before


def difference(first: Timeline, second: Timeline) -> Difference:
    """Match events by rank, lane, name and occurrence, and report what differs."""
    left, right = dict(_keyed(first)), dict(_keyed(second))
    shifts = tuple(_shift(key, left[key], right[key], first, second) for key in left if key in right)
    lanes = sorted({(event.rank, event.lane) for event in first.events})
    return Difference(
        duration_s=(first.duration_s, second.duration_s),
        shifts=shifts,
        only_first=tuple(event for key, event in left.items() if key not in right),
        only_second=tuple(event for key, event in right.items() if key not in left),
        reordered=tuple(lane for lane in lanes if _common(left, right, lane) != _common(right, left, lane)),
    )


def _keyed(timeline: Timeline) -> Iterator[tuple[_Key, Event]]:
    seen: dict[tuple[int, str, str], int] = defaultdict(int)
    for event in timeline.events:
        label = (event.rank, event.lane, event.name)
        yield (*label, seen[label]), event
        seen[label] += 1


def _common(events: dict[_Key, Event], others: dict[_Key, Event], lane: tuple[int, str]) -> list[_Key]:
    return [key for key in events if key[:2] == lane and key in others]


def _shift(key: _Key, left: Event, right: Event, first: Timeline, second: Timeline) -> Shift:
    starts = (left.start_s - first.start_s, right.start_s - second.start_s)
    return Shift(*key[:3], start_s=starts, duration_s=(left.duration_s, right.duration_s))
