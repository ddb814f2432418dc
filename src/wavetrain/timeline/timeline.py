"""`Timeline`: what the simulator predicts and the runtime measures, in one type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, order=True)
class Event:
    """Something that took time on one lane (compute, a link) of one rank. Times in seconds."""

    start_s: float
    end_s: float
    rank: int
    lane: str
    name: str  # the action in its text form, "2F0"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s) and self.start_s <= self.end_s):
            raise ValueError(f"event {self.name} must end at or after its start, both finite")

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, order=True)
class Counter:
    """The value of a quantity (memory_bytes, power_w) of one rank from a moment on."""

    time_s: float
    rank: int
    name: str
    value: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_s) and math.isfinite(self.value)):
            raise ValueError(f"counter {self.name} must be finite")


@dataclass(frozen=True)
class Timeline:
    """Events and counters, kept in order of time so that equal histories are equal values."""

    events: tuple[Event, ...] = ()
    counters: tuple[Counter, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(sorted(self.events)))
        object.__setattr__(self, "counters", tuple(sorted(self.counters)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({event.rank for event in self.events} | {counter.rank for counter in self.counters}))

    @cached_property
    def start_s(self) -> float:
        return min((event.start_s for event in self.events), default=0.0)

    @cached_property
    def end_s(self) -> float:
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def order(self, rank: int, lane: str) -> tuple[str, ...]:
        """The names of what one lane did, in order."""
        return tuple(event.name for event in self.events if event.rank == rank and event.lane == lane)

    def busy_s(self, rank: int, lane: str) -> float:
        """Time during which the lane had at least one event running."""
        busy, reached = 0.0, -math.inf
        for event in self.events:
            if event.rank == rank and event.lane == lane:
                busy += max(0.0, event.end_s - max(event.start_s, reached))
                reached = max(reached, event.end_s)
        return busy

    def peak(self, rank: int, name: str) -> float:
        """The highest value a counter reached."""
        return max((c.value for c in self.counters if c.rank == rank and c.name == name), default=0.0)
