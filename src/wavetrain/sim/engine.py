"""The discrete-event simulation of one pipeline: who computes, sends, gathers and waits when, and what it holds.

A rank computes in the order of its list. A message leaves when its send is reached and its link is free, and delays
only what uses it; or, if blocking, occupies both ends. Gathers and reductions run beside compute, one at a time per
rank. `compile` puts all this into one order in which each waits for at most two before it; a run is then a single pass,
`end = max(two earlier ends) + duration`, and the rest is arithmetic on arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from wavetrain.schedule.action import Actions
from wavetrain.schedule.table import Ints, uncollected
from wavetrain.sim.entries import (
    KINDS,
    LAUNCHING,
    RECOMPUTE,
    REDUCE,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    F,
    I,
    Messages,
    W,
)
from wavetrain.sim.program import DEFAULT, FORWARD, HELD, HOLDINGS, JOIN, LINK, SHARD, Graph, Items, Program, Rules
from wavetrain.sim.program import compile as compile  # noqa: A004, PLC0414 - part of the interface
from wavetrain.timeline.timeline import Counter, Event, Timeline

__all__ = ["Costs", "Messages", "Program", "Result", "Rules", "StageBytes", "StageTimes", "compile", "run"]

Floats: TypeAlias = NDArray[np.float64]
Tail: TypeAlias = tuple[tuple[str, float], ...]  # name, seconds


@dataclass(frozen=True)
class StageTimes:
    """What one stage's actions take, seconds. A full backward takes i + w."""

    f: float
    i: float
    w: float
    recompute: float = 0.0
    send_f: float = 0.0  # its output to the next stage, if that is on another rank
    send_b: float = 0.0  # its input gradient to the stage before
    unshard: float = 0.0
    reduce: float = 0.0
    message_s: float = 0.0  # launching one send or one receive, on the compute lane


@dataclass(frozen=True)
class StageBytes:
    """What one stage's actions hold, bytes."""

    saved: float = 0.0  # per microbatch, from the start of F to the end of B, or of W where split
    saved_for_w: float = 0.0  # the part of `saved` that stays after I
    recomputed: float = 0.0  # from the start of RECOMPUTE to the end of B, or of W where split
    transient_f: float = 0.0  # while F runs
    transient_b: float = 0.0  # while B, I or W runs
    gathered: float = 0.0  # from the start of UNSHARD to RESHARD
    message: float = 0.0  # from the start of a transfer to this stage until what uses it starts


@dataclass(frozen=True)
class Costs:
    """Times and bytes of every stage; of every rank, what it always holds and what it does last (optimizer, ...)."""

    times: tuple[StageTimes, ...]
    sizes: tuple[StageBytes, ...]
    static_bytes: tuple[float, ...]
    tail: tuple[Tail, ...]

    def __post_init__(self) -> None:
        if len(self.times) != len(self.sizes) or len(self.static_bytes) != len(self.tail):
            raise ValueError("times and sizes are per stage, static_bytes and tail per rank: their lengths must agree")
        last = [seconds for tail in self.tail for _, seconds in tail]
        for values in (self.seconds, self.holdings, np.array([*self.static_bytes, *last])):
            if not np.isfinite(values).all() or (values < 0).any():
                raise ValueError("times and bytes must be finite and not negative, saved_for_w at most saved")

    @cached_property
    def seconds(self) -> Floats:
        """By kind (launches last), then stage."""
        table = np.zeros((len(KINDS) + 1, len(self.times)))
        for stage, t in enumerate(self.times):
            table[[F, B, I, W, RECOMPUTE], stage] = t.f, t.i + t.w, t.i, t.w, t.recompute
            table[[SEND_F, SEND_B, LAUNCHING], stage] = t.send_f, t.send_b, t.message_s
            table[[UNSHARD, REDUCE], stage] = t.unshard, t.reduce
        return table

    @cached_property
    def holdings(self) -> Floats:
        """By what is held, then stage."""
        table = np.zeros((HOLDINGS, len(self.sizes)))
        for stage, s in enumerate(self.sizes):
            table[:FORWARD, stage] = s.saved, s.saved - s.saved_for_w, s.saved_for_w, s.recomputed
            table[FORWARD:, stage] = s.transient_f, s.transient_b, s.gathered, s.message
        return table


@dataclass(frozen=True)
class Result:
    """What came out; tuples are per rank. A compute lane's busy and two waiting times add up to the makespan."""

    makespan_s: float
    busy_s: tuple[Mapping[str, float], ...]  # by kind of action and name of tail
    waiting_transfer_s: tuple[float, ...]  # while the message it waits for is in flight
    waiting_s: tuple[float, ...]  # otherwise, with start-up and the end
    waiting_unshard_s: tuple[float, ...]  # part of waiting_s: only gathered parameters are still missing
    waiting_reduce_s: tuple[float, ...]  # part of waiting_s: all is computed, gradients are being reduced
    peak_bytes: tuple[float, ...]
    peak_at_s: tuple[float, ...]  # when it is first reached
    _history: _History = field(repr=False, compare=False)

    @property
    def starts_s(self) -> tuple[tuple[float, ...], ...]:
        """When each compute action and recomputation starts, in its rank's order."""
        items = self._history.items
        starts = self._history.start[items.compute].tolist()
        cuts = np.searchsorted(items.compute, items.bounds).tolist()
        return tuple(tuple(starts[start:stop]) for start, stop in pairwise(cuts))

    @cached_property
    def timeline(self) -> Timeline:
        """Everything that happened, and the counter `memory_bytes`; made when first asked for."""
        with uncollected():
            return Timeline(tuple(self._history.events()), tuple(self._history.counters()))


def run(
    actions: Actions | Program,
    times: Sequence[StageTimes],
    sizes: Sequence[StageBytes] | None = None,
    *,
    static_bytes: Sequence[float] | None = None,
    tail: Sequence[Tail] | None = None,
    rules: Rules = DEFAULT,
) -> Result:
    """Run a schedule. Where it has no communication, it is implied: sent when made, received when used.

    Raises `Stuck` where ranks wait for each other, ScheduleError where an action is missing or out of place.
    """
    program = Program(actions) if isinstance(actions, Actions) else actions
    num_ranks, num_stages = program.actions.num_ranks, program.actions.placement.num_stages
    costs = Costs(
        tuple(times),
        (StageBytes(),) * len(times) if sizes is None else tuple(sizes),
        (0.0,) * num_ranks if static_bytes is None else tuple(static_bytes),
        ((),) * num_ranks if tail is None else tuple(map(tuple, tail)),
    )
    if len(costs.times) != num_stages or len(costs.tail) != num_ranks:
        raise ValueError(f"costs must be for {num_stages} stages and {num_ranks} ranks")
    graph = program.graph(rules, launches=bool(costs.seconds[LAUNCHING].any()))
    duration = costs.seconds.ravel()[graph.cost]
    end = np.array(_ends(graph, duration.tolist()))[graph.place]
    return _result(_History(graph, costs, np.append(0.0, duration)[graph.place], end))


def _ends(graph: Graph, durations: list[float]) -> list[float]:
    """The hot loop: when each item ends, in the order of the graph."""
    ends = [0.0]
    append = ends.append
    with uncollected():
        for first, second, duration in zip(graph.first, graph.second, durations, strict=True):
            one, other = ends[first], ends[second]
            append((one if one > other else other) + duration)
    return ends


@dataclass(frozen=True, eq=False)
class _History:
    """When every item starts and ends. The last value of each array is nothing's, so that -1 finds it."""

    graph: Graph
    costs: Costs
    duration: Floats
    end: Floats

    @property
    def items(self) -> Items:
        return self.graph.items

    @cached_property
    def start(self) -> Floats:
        first, second = self.graph.waits
        start = np.append(np.maximum(self.end[first], self.end[second]), 0.0)
        held = self.items.role == HELD
        if held.any():
            start[self.items.holder] = start[self.items.carrier]
        return start

    @cached_property
    def lane_seconds(self) -> Floats:
        """How long each item occupies a compute lane."""
        seconds = np.where(self.items.role <= HELD, self.duration[:-1], 0.0)
        held = self.items.role == HELD
        if held.any():
            seconds[self.items.holder] = self.duration[self.items.carrier]
        return seconds

    def last(self, chosen: Ints) -> Floats:
        """When each rank's last chosen item ends; they end in order."""
        index = np.searchsorted(chosen, self.items.bounds)
        return self.end[np.where(index[1:] > index[:-1], np.append(chosen, -1)[index[1:] - 1], -1)]

    @cached_property
    def computed(self) -> Floats:
        return self.last(self.items.lane)

    @cached_property
    def tail_start(self) -> Floats:
        """The tail needs reduced gradients."""
        return np.maximum(self.computed, self.last(np.flatnonzero(self.items.role == SHARD)))

    @cached_property
    def tail_events(self) -> list[Event]:
        events = []
        for rank, tail in enumerate(self.costs.tail):
            end = float(self.tail_start[rank])
            for name, seconds in tail:
                start, end = end, end + seconds
                events.append(Event(start, end, rank, "compute", name))
        return events

    def memory(self) -> Iterator[tuple[Floats, Floats]]:
        """Of each rank, the moments at which what it holds changes, and the bytes from then on."""
        costs, changes = self.costs, self.items.changes
        delta = np.concatenate([costs.holdings.ravel(), -costs.holdings.ravel()])[changes.amount]
        moment = np.concatenate([self.start, self.end])[changes.moment]
        for (start, stop), static in zip(pairwise(changes.bounds.tolist()), costs.static_bytes, strict=True):
            used = np.flatnonzero(delta[start:stop]) + start
            order = used[np.argsort(moment[used], kind="stable")]
            moments, values = moment[order], np.cumsum(delta[order]) + static
            final = np.append(moments[1:] != moments[:-1], True)[: len(moments)]
            yield moments[final], values[final]

    def events(self) -> Iterator[Event]:
        items, entries = self.items, self.items.entries
        receiver = dict(zip(items.carrier.tolist(), items.rank[items.user].tolist(), strict=True))
        columns = (items.role, items.rank, items.entry, self.start, self.end)
        for item, (role, rank, entry, start, end) in enumerate(zip(*(c.tolist() for c in columns), strict=False)):
            if role < JOIN:
                lane = f"send to {receiver[item]}" if role == LINK else "shard" if role == SHARD else "compute"
                yield Event(start, end, rank, lane, str(entries.action(entry)))
        yield from self.tail_events

    def counters(self) -> Iterator[Counter]:
        for rank, (moments, values) in enumerate(self.memory()):
            if not len(moments) or moments[0] > 0:
                yield Counter(0.0, rank, "memory_bytes", float(self.costs.static_bytes[rank]))
            for moment, value in zip(moments.tolist(), values.tolist(), strict=True):
                yield Counter(moment, rank, "memory_bytes", value)


def _result(history: _History) -> Result:
    costs, items = history.costs, history.items
    num_ranks = len(costs.tail)
    by_kind = _per(items.rank * len(KINDS) + items.kind, history.lane_seconds, num_ranks * len(KINDS))
    busy = []
    for row, tail in zip(by_kind.reshape(num_ranks, -1).tolist(), costs.tail, strict=True):
        mine = {kind.value: seconds for kind, seconds in zip(KINDS, row, strict=True) if seconds}
        for name, seconds in tail:
            mine[name] = mine.get(name, 0.0) + seconds
        busy.append(mine)
    makespan = max([float(history.end.max()), *(event.end_s for event in history.tail_events)])
    transfer, unshard = _waiting(history)
    waiting = [makespan - sum(mine.values()) - moving for mine, moving in zip(busy, transfer.tolist(), strict=True)]
    peaks = [_peak(static, *curve) for static, curve in zip(costs.static_bytes, history.memory(), strict=True)]
    return Result(
        makespan_s=makespan,
        busy_s=tuple(busy),
        waiting_transfer_s=tuple(transfer.tolist()),
        waiting_s=tuple(max(0.0, seconds) for seconds in waiting),
        waiting_unshard_s=tuple(unshard.tolist()),
        waiting_reduce_s=tuple((history.tail_start - history.computed).tolist()),
        peak_bytes=tuple(value for value, _ in peaks),
        peak_at_s=tuple(moment for _, moment in peaks),
        _history=history,
    )


def _per(group: Ints, values: Floats, number: int) -> Floats:
    return np.bincount(group, weights=values, minlength=number).astype(np.float64, copy=False)


def _waiting(history: _History) -> tuple[Floats, Floats]:
    """Idle time of each rank while a message it waits for is in flight, and while only a gather is missing."""
    items, start, end = history.items, history.start, history.end
    user, carrier, num_ranks = items.user, items.carrier, len(history.costs.tail)
    arrival = np.zeros(len(start))
    if not (items.role == HELD).any():
        arrival[user] = end[carrier]
    free = end[items.lane_before]
    moving = np.minimum(start[user], arrival[user]) - np.maximum(free[user], start[carrier])
    gated = items.at[items.gate >= 0]
    missing = start[gated] - np.maximum(free[gated], arrival[gated])
    return (
        _per(items.rank[user], np.maximum(moving, 0.0), num_ranks),
        _per(items.rank[gated], missing, num_ranks),
    )


def _peak(static: float, moments: Floats, values: Floats) -> tuple[float, float]:
    """The most that is held, and since when."""
    if not len(values) or values.max() <= static:
        return float(static), 0.0
    at = int(values.argmax())
    return float(values[at]), float(moments[at])
