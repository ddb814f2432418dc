"""What an order costs: every action starts when its rank is free and what it needs has arrived.

Times may be integers, fractions or floats; with exact numbers every result is exact. A transfer delays the receiver, it
does not occupy the sender.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

from wavetrain.schedule.action import COMPUTE, Action, Actions, Kind
from wavetrain.schedule.placement import Placement

Time: TypeAlias = int | Fraction | float


@dataclass(frozen=True)
class Costs:
    """How long a forward, an input gradient and a weight gradient take on each stage, and a transfer on each link.

    A full backward takes the sum of its two parts; recomputation takes a forward.
    """

    f: tuple[Time, ...]
    i: tuple[Time, ...]
    w: tuple[Time, ...]
    transfer: Time = 0
    links: tuple[tuple[int, int, Time], ...] = ()  # (from rank, to rank, time) that differ from `transfer`

    @staticmethod
    def uniform(num_stages: int, *, f: Time = 1, i: Time = 1, w: Time = 1, transfer: Time = 0) -> Costs:
        return Costs((f,) * num_stages, (i,) * num_stages, (w,) * num_stages, transfer)

    @cached_property
    def by_kind(self) -> Mapping[Kind, tuple[Time, ...]]:
        both = tuple(a + b for a, b in zip(self.i, self.w, strict=True))
        return {Kind.F: self.f, Kind.I: self.i, Kind.W: self.w, Kind.B: both, Kind.RECOMPUTE: self.f}

    @cached_property
    def _links(self) -> dict[tuple[int, int], Time]:
        return {(a, b): time for a, b, time in self.links}

    def link(self, sender: int, receiver: int) -> Time:
        if sender == receiver:
            return 0
        return self._links.get((sender, receiver), self.transfer)


@dataclass(frozen=True)
class Evaluation:
    """What came out, per rank where it differs by rank."""

    makespan: Time
    busy: tuple[Time, ...]
    first_start: tuple[Time, ...]
    last_end: tuple[Time, ...]
    peak_in_flight: tuple[Fraction, ...]  # microbatches of activations
    messages: Mapping[tuple[int, int], int]
    starts: tuple[tuple[Time, ...], ...]  # of every compute action, in its rank's order

    @property
    def bubble_fraction(self) -> Time:
        """Idle time over all time; a fraction where the times are exact."""
        total = self.makespan * len(self.busy)
        idle = total - sum(self.busy)
        if not total:
            return 0
        return idle / total if isinstance(total, float) else Fraction(idle) / Fraction(total)

    @property
    def bubble_by_rank(self) -> tuple[Time, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def inner_idle(self) -> tuple[Time, ...]:
        """Idle time between a rank's first and last action."""
        spans = zip(self.first_start, self.last_end, self.busy, strict=True)
        return tuple(end - start - busy for start, end, busy in spans)

    @property
    def peak_in_flight_max(self) -> Fraction:
        return max(self.peak_in_flight, default=Fraction(0))


class Stuck(Exception):  # noqa: N818 - a state, which the verifier turns into an error with the cycle
    """No rank can go on: for each waiting rank, its position and the action it needs first."""

    def __init__(self, waiting: dict[int, tuple[int, Action]]) -> None:
        self.waiting = waiting
        super().__init__("no rank can go on")


def needed(placement: Placement, action: Action) -> tuple[Action, ...]:
    """The actions whose results an action uses; I stands for either form of the backward ahead."""
    stage, kind, m = action
    if kind is Kind.F:
        return () if placement.is_first(stage) else (Action(stage - 1, Kind.F, m),)
    if kind is Kind.W:
        return (Action(stage, Kind.I, m),)
    own = Action(stage, Kind.F, m)
    return (own,) if placement.is_last(stage) else (own, Action(stage + 1, Kind.I, m))


def evaluate(actions: Actions, costs: Costs) -> Evaluation:
    """Run the compute actions of every rank in their order. Raises `Stuck` where they wait for each other."""
    placement = actions.placement
    rows = [[a for a in row if a.kind in COMPUTE or a.kind is Kind.RECOMPUTE] for row in actions.ranks]
    starts, ends = _run(placement, rows, costs)
    busy = [sum(costs.by_kind[kind][stage] for stage, kind, _ in row) for row in rows]
    return Evaluation(
        makespan=max((end for end in ends), default=0),
        busy=tuple(busy),
        first_start=tuple(row[0] if row else 0 for row in starts),
        last_end=tuple(ends),
        peak_in_flight=peak_in_flight(actions),
        messages=messages(actions),
        starts=tuple(map(tuple, starts)),
    )


def _run(  # noqa: PLR0915 - the hot loop, in one piece for its speed
    placement: Placement, rows: list[list[Action]], costs: Costs
) -> tuple[list[list[Time]], list[Time]]:
    """Start times of every action and the end of every rank."""
    done: dict[tuple[bool, int, int | None], Time] = {}  # (is forward, stage, microbatch) -> when its result is there
    by_kind, ranks, depth = costs.by_kind, placement.ranks, placement.depth
    clock: list[Time] = [0] * len(rows)
    position = [0] * len(rows)
    starts: list[list[Time]] = [[] for _ in rows]
    waiting: dict[tuple[bool, int, int | None], int] = {}  # what a blocked rank needs -> the rank
    todo = list(range(len(rows)))
    while todo:
        rank = todo.pop()
        row, now, at = rows[rank], clock[rank], position[rank]
        while at < len(row):
            stage, kind, m = row[at]
            start = now
            if kind is Kind.F:
                source = stage - 1 if stage % depth else -1
                key = (True, source, m)
            elif kind is Kind.W or kind is Kind.RECOMPUTE:
                source = -1
                key = (False, -1, m)
            else:
                source = stage + 1 if (stage + 1) % depth else -1
                key = (False, source, m)
            if source >= 0:
                ready = done.get(key)
                if ready is None:
                    waiting[key] = rank
                    break
                arrival = ready + costs.link(ranks[source], rank) if ranks[source] != rank else ready
                start = max(now, arrival)
            now = start + by_kind[kind][stage]
            starts[rank].append(start)
            at += 1
            if kind is not Kind.W and kind is not Kind.RECOMPUTE:
                made = (kind is Kind.F, stage, m)
                done[made] = now
                blocked = waiting.pop(made, None)
                if blocked is not None:
                    todo.append(blocked)
        clock[rank], position[rank] = now, at
    stuck = {r: position[r] for r, row in enumerate(rows) if position[r] < len(row)}
    if stuck:
        raise Stuck({rank: (at, _missing(placement, rows[rank][at], done)) for rank, at in stuck.items()})
    return starts, clock


def _missing(placement: Placement, action: Action, done: dict[tuple[bool, int, int | None], Time]) -> Action:
    for need in needed(placement, action):
        if (need.kind is Kind.F, need.stage, need.microbatch) not in done:
            return need
    return action


def peak_in_flight(actions: Actions) -> tuple[Fraction, ...]:
    """The most activations each rank holds at once, in microbatches: kept from F until B, or W if split."""
    placement = actions.placement
    kept = any(action.kind is not Kind.F for _, action in actions.compute())
    peaks = []
    for rank, row in enumerate(actions.ranks):
        live = most = 0
        for _, kind, _ in row:
            if kind is Kind.F:
                live += 1
                most = max(most, live)
            elif kind is Kind.B or kind is Kind.W:
                live -= 1
        chunks = placement.chunks(rank) if rank < placement.num_ranks else 1
        peaks.append(Fraction(most if kept else 0, chunks))
    return tuple(peaks)


def messages(actions: Actions) -> dict[tuple[int, int], int]:
    """Transfers per directed link: one per microbatch, direction and pair of neighbouring stages on unlike ranks."""
    placement = actions.placement
    counts: dict[tuple[int, int], int] = {}
    for rank, (stage, kind, _) in actions.compute():
        ahead = kind is Kind.F
        if kind is Kind.W or (placement.is_last(stage) if ahead else placement.is_first(stage)):
            continue
        peer = placement.ranks[stage + 1 if ahead else stage - 1]
        if peer != rank:
            counts[rank, peer] = counts.get((rank, peer), 0) + 1
    return dict(sorted(counts.items()))
