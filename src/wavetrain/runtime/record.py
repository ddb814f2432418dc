"""What ranks recorded, as one `Timeline`: the type and the names that the simulator's prediction has."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from wavetrain.runtime.executor import Moment
from wavetrain.timeline.timeline import Counter, Event, Timeline

ROUND_TRIPS = 8


def timeline_of(moments: Mapping[int, Sequence[Moment]], *, static_bytes: Mapping[int, int] | None = None) -> Timeline:
    """The events of all ranks from the first one's start, and what each rank held."""
    begun = min((moment.start_s for row in moments.values() for moment in row), default=0.0)
    events = [
        Event(moment.start_s - begun, moment.end_s - begun, rank, moment.lane, moment.name)
        for rank, row in moments.items()
        for moment in row
    ]
    return Timeline(tuple(events), tuple(_counters(moments, begun, static_bytes or {})))


def _counters(moments: Mapping[int, Sequence[Moment]], begun: float, static: Mapping[int, int]) -> Iterator[Counter]:
    for rank, row in moments.items():
        base = static.get(rank, 0)
        yield Counter(0.0, rank, "memory_bytes", float(base))
        for moment in row:
            if moment.lane == "compute":
                yield Counter(moment.end_s - begun, rank, "memory_bytes", float(base + moment.held_bytes))
                yield Counter(moment.end_s - begun, rank, "activations", float(moment.live))


def write_moments(moments: Sequence[Moment], *, ahead_s: float = 0.0) -> str:
    """A rank's moments as text, on rank 0's clock, of which its own is so much ahead."""
    return json.dumps([m._replace(start_s=m.start_s - ahead_s, end_s=m.end_s - ahead_s) for m in moments])


def read_moments(text: str) -> list[Moment]:
    return [Moment(*row) for row in json.loads(text)]


def clock_ahead_s(rank: int, size: int) -> float:
    """How much this rank's clock is ahead of rank 0's: half of the shortest round trip is as near as one can know.

    All ranks call this together. On one host it is next to nothing.
    """
    if rank == 0:
        for other in range(1, size):
            for _ in range(ROUND_TRIPS):
                dist.recv(_moment(), other)
                dist.send(_moment(), other)
        return 0.0
    best_s, ahead = float("inf"), 0.0
    for _ in range(ROUND_TRIPS):
        sent, answer = _moment(), _moment()
        dist.send(sent, 0)
        dist.recv(answer, 0)
        now = time.monotonic()
        if now - sent.item() < best_s:
            best_s = now - sent.item()
            ahead = (now + sent.item()) / 2 - answer.item()
    return ahead


def _moment() -> torch.Tensor:
    return torch.tensor([time.monotonic()], dtype=torch.float64)
