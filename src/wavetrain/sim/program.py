"""Schedules made ready to be simulated: everything that takes or marks time, and the two that each waits for.

Within one schedule the order on every lane (compute, link, sharding) is fixed, so who waits for whom does not depend on
how long anything takes and is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from wavetrain.schedule.action import Actions
from wavetrain.schedule.evaluate import Stuck, needed
from wavetrain.schedule.table import Ints, uncollected
from wavetrain.sim.entries import (
    LAUNCHING,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    Bools,
    Entries,
    F,
    I,
    Messages,
    W,
    complete,
    of_same_stage,
    undone,
)

Points: TypeAlias = list[list[tuple[int, int, int]]]  # of each rank: an item, the item it waits for, that one's rank
Segments: TypeAlias = list[tuple[int, int]]  # items from, up to

# What an item is. LAUNCH starts a message; LINK is one in flight beside compute; MEET is one that occupies both compute
# lanes, HELD its other end. JOIN and FREE take no time: a gather and a message are both there; a stage is freed.
COMPUTE, LAUNCH, MEET, HELD, LINK, SHARD, JOIN, FREE = range(8)
# What is held: rows of a table of bytes. EARLY and LATE are what I and W free.
HOLDINGS = 8
SAVED, EARLY, LATE, RECOMPUTED, FORWARD, BACKWARD, GATHERED, MESSAGE = range(HOLDINGS)


@dataclass(frozen=True)
class Rules:
    """How a runtime carries actions out. A gather may begin `prefetch` compute actions ahead of its place."""

    messages: Messages = Messages.OVERLAPPED
    prefetch: int = 1

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ValueError("prefetch must not be negative")


DEFAULT = Rules()


class Program:
    """Actions made ready to be run with many costs."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self._entries: dict[Messages, Entries] = {}
        self._graphs: dict[tuple[Rules, bool], Graph] = {}

    def graph(self, rules: Rules, *, launches: bool) -> Graph:
        """Who waits for whom under these rules, and with or without time for launches; worked out once."""
        key = (rules, launches)
        if key not in self._graphs:
            with uncollected():
                if rules.messages not in self._entries:
                    self._entries[rules.messages] = complete(self.actions, rules.messages)
                self._graphs[key] = _graph(self._entries[rules.messages], rules, launches=launches)
        return self._graphs[key]


def compile(actions: Actions, rules: Rules = DEFAULT) -> Program:  # noqa: A001 - the usual word
    """Make actions ready to run. Raises `Stuck` where ranks wait for each other, ScheduleError where one is wrong."""
    program = Program(actions)
    program.graph(rules, launches=False)
    return program


# --- items, and what each waits for ---


@dataclass(frozen=True)
class Items:
    """What takes or marks time, rank after rank. -1 stands for nothing, which has ended at 0."""

    entries: Entries
    role: Ints
    entry: Ints
    at: Ints  # the item of each entry, -1 if it has none
    gate: Ints  # of each entry, the gather (an entry) that it is the first to use

    @cached_property
    def rank(self) -> Ints:
        return self.entries.table.rank[self.entry]

    @cached_property
    def kind(self) -> Ints:
        return self.entries.table.kind[self.entry]

    @cached_property
    def stage(self) -> Ints:
        return self.entries.table.stage[self.entry]

    @cached_property
    def bounds(self) -> Ints:
        """Where each rank's items begin, and where the last one's end."""
        return np.searchsorted(self.rank, np.arange(self.entries.actions.num_ranks + 1))

    @cached_property
    def compute(self) -> Ints:
        return np.flatnonzero(self.role == COMPUTE)

    @cached_property
    def lane(self) -> Ints:
        """What is on a compute lane."""
        return np.flatnonzero(self.role <= HELD)

    @cached_property
    def lane_before(self) -> Ints:
        """The item before each on its rank's compute lane."""
        return self.before(self.role <= HELD)

    @cached_property
    def user(self) -> Ints:
        """What uses each message, and `carrier` what carries it."""
        return self.at[self.entries.user]

    @cached_property
    def carrier(self) -> Ints:
        return self.at[self.entries.send]

    @cached_property
    def holder(self) -> Ints:
        """The other end of each blocking message."""
        return self.at[self.entries.receive]

    @cached_property
    def changes(self) -> Changes:
        """When which rank holds more or less."""
        return _changes(self)

    def before(self, chosen: Bools) -> Ints:
        """The last chosen item before each on its rank."""
        last = np.maximum.accumulate(np.where(chosen, np.arange(len(chosen)), -1))
        before = np.concatenate([[-1], last[:-1]])[: len(chosen)]
        return np.where(before < self.bounds[self.rank], -1, before)


@dataclass(frozen=True)
class Graph:
    """Items in an order in which each comes after the two it waits for. Places count from 1; 0 is nothing."""

    items: Items
    waits: tuple[Ints, Ints]  # of each item, the two items
    place: Ints  # of each item, its place in the order; the last is nothing's
    first: list[int]  # in that order, the places of the two
    second: list[int]
    cost: Ints  # in that order, where the duration stands in a table of seconds


def _graph(entries: Entries, rules: Rules, *, launches: bool) -> Graph:
    items = _items(entries, rules, launches=launches)
    blocking = rules.messages is Messages.BLOCKING
    waits = _waits(items, rules)
    order = _in_order(items, _meetings(items)) if blocking else _in_order(items, _arrivals(items))
    place = np.zeros(len(order) + 1, dtype=np.int64)
    place[order] = np.arange(1, len(order) + 1)
    first, second = (place[wait[order]].tolist() for wait in waits)
    row = np.where(items.role == LAUNCH, LAUNCHING, np.where(items.role == JOIN, RESHARD, items.kind))
    cost = (row * entries.actions.placement.num_stages + items.stage)[order]
    return Graph(items, waits, place, first, second, cost)


def _items(entries: Entries, rules: Rules, *, launches: bool) -> Items:
    """Up to two items of each entry: what it is, and a launch or join just before."""
    blocking = rules.messages is Messages.BLOCKING
    roles = np.full((len(entries.cell), 2), -1, dtype=np.int64)
    send, receive = entries.of(SEND_F, SEND_B), entries.of(RECV_F, RECV_B)
    gate = _gates(entries)
    roles[:, 1][entries.of(F, B, I, W, RECOMPUTE)] = COMPUTE
    roles[:, 1][send] = MEET if blocking else LINK
    roles[:, 1][receive] = HELD if blocking else -1
    roles[:, 1][entries.of(UNSHARD, REDUCE)] = SHARD
    roles[:, 1][entries.of(RESHARD)] = FREE
    roles[:, 0][send | receive] = LAUNCH if launches else -1
    roles[:, 0][gate >= 0] = JOIN
    flat = roles.ravel()
    kept = np.flatnonzero(flat >= 0)
    at = np.full(len(roles), -1, dtype=np.int64)
    main = kept % 2 == 1
    at[kept[main] // 2] = np.flatnonzero(main)
    return Items(entries, flat[kept], kept // 2, at, gate)


def _gates(entries: Entries) -> Ints:
    """Of each entry, the gather that it is the first to use."""
    gate = np.full(len(entries.cell), -1, dtype=np.int64)
    gathers = np.flatnonzero(entries.of(UNSHARD))
    uses = np.flatnonzero(entries.of(F, B, I, W, RECOMPUTE))
    first = of_same_stage(entries, uses, gathers, after=True)
    gate[first[first >= 0]] = gathers[first >= 0]  # of several gathers the last
    return gate


def _waits(items: Items, rules: Rules) -> tuple[Ints, Ints]:
    """The two that each item waits for; a third comes as a join."""
    entries, at, role = items.entries, items.at, items.role
    first = np.where(role == SHARD, items.before(role == SHARD), items.lane_before)
    second = np.full(len(role), -1, dtype=np.int64)
    if rules.messages is Messages.BLOCKING:
        second[items.carrier] = items.lane_before[items.holder]
        first[items.holder] = items.carrier
    else:
        second[items.user] = items.carrier
        second[items.carrier] = _link_before(items)
    gated = np.flatnonzero(items.gate >= 0)
    join = at[gated] - 1
    first[join], second[join] = at[items.gate[gated]], second[at[gated]]
    second[at[gated]] = join
    gathers = np.flatnonzero(entries.of(UNSHARD))
    second[at[gathers]] = _ahead(items, at[gathers], rules.prefetch)
    reductions = np.flatnonzero(entries.of(REDUCE))
    backward = of_same_stage(entries, np.flatnonzero(entries.of(B, I, W)), reductions, after=False)
    second[at[reductions]] = np.where(backward < 0, -1, at[backward])
    free, gather = undone(entries)
    second[at[free]] = at[gather]
    return first, second


def _link_before(items: Items) -> Ints:
    """The message before each on its link: messages leave in the order of their sends."""
    link = items.rank[items.carrier] * items.entries.actions.num_ranks + items.rank[items.user]
    order = np.lexsort((items.carrier, link))
    before = np.full(len(order), -1, dtype=np.int64)
    same = link[order[1:]] == link[order[:-1]]
    before[order[1:][same]] = items.carrier[order[:-1][same]]
    return before


def _ahead(items: Items, gathers: Ints, prefetch: int) -> Ints:
    """The compute action that must have ended before each gather: all before it but the last `prefetch`."""
    index = np.searchsorted(items.compute, gathers) - 1 - prefetch
    item = np.where(index >= 0, np.append(items.compute, -1)[np.maximum(index, -1)], -1)
    return np.where(item < items.bounds[items.rank[gathers]], -1, item)


# --- one order for all ---


def _points(items: Items, item: Ints, other: Ints) -> Points:
    """Of each rank, in order, where it depends on another rank, on what item, and which rank has that."""
    order = np.argsort(item)
    rows = list(zip(item[order].tolist(), other[order].tolist(), items.rank[other[order]].tolist(), strict=True))
    cuts = np.searchsorted(item[order], items.bounds).tolist()
    return [rows[start:stop] for start, stop in pairwise(cuts)]


def _arrivals(items: Items) -> Segments:
    """Let each rank go on until a message it uses has not been sent yet."""
    gated = items.gate[items.entries.user] >= 0
    points = _points(items, items.user - gated, items.carrier)
    bounds = items.bounds.tolist()
    reached, at = bounds[:-1], [0] * len(points)
    waiting: list[list[tuple[int, int]]] = [[] for _ in points]  # by rank: the item that is waited for, who waits
    segments: Segments = []
    todo = list(range(len(points)))
    while todo:
        rank = todo.pop()
        row, stop = points[rank], bounds[rank + 1]
        for number in range(at[rank], len(row)):
            item, other, peer = row[number]
            if reached[peer] <= other:
                waiting[peer].append((other, rank))
                stop, at[rank] = item, number
                break
        segments.append((reached[rank], stop))
        reached[rank] = stop
        todo += [who for other, who in waiting[rank] if other < stop]
        waiting[rank] = [(other, who) for other, who in waiting[rank] if other >= stop]
    return segments


def _meetings(items: Items) -> Segments:
    """Let each rank go on until the other end of a message is not there yet."""
    carrier, holder = items.carrier, items.holder
    points = _points(items, np.concatenate([carrier, holder]), np.concatenate([holder, carrier]))
    bounds, sends = items.bounds.tolist(), set(carrier.tolist())
    reached, at = bounds[:-1], [0] * len(points)
    segments: Segments = []
    todo = list(range(len(points)))
    while todo:
        rank = todo.pop()
        while at[rank] < len(points[rank]):
            item, other, peer = points[rank][at[rank]]
            segments.append((reached[rank], item))
            reached[rank] = item
            if reached[peer] != other:
                break
            ends = [(item, item + 1), (other, other + 1)]
            segments += ends if item in sends else reversed(ends)
            for who, end in ((rank, item), (peer, other)):
                reached[who] = end + 1
                at[who] += 1
            todo.append(peer)
        else:
            segments.append((reached[rank], bounds[rank + 1]))
            reached[rank] = bounds[rank + 1]
    return segments


def _in_order(items: Items, segments: Segments) -> Ints:
    """The items of all segments; `Stuck` if some are in none."""
    starts, stops = np.array(segments, dtype=np.int64).reshape(-1, 2).T
    lengths = stops - starts
    total = int(lengths.sum())
    if total < len(items.role):
        raise _stuck(items, zip(starts.tolist(), stops.tolist(), strict=True))
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(total)


def _stuck(items: Items, segments: Iterable[tuple[int, int]]) -> Stuck:
    """For each rank that can't go on, its position and what it needs."""
    entries, placement = items.entries, items.entries.actions.placement
    done = np.zeros(len(items.role) + 1, dtype=np.bool_)
    for start, stop in segments:
        done[start:stop] = True
    ends = np.stack([entries.send, entries.receive])
    other = dict(zip(ends.ravel().tolist(), ends[::-1].ravel().tolist(), strict=True))
    waiting = {}
    for rank, (start, stop) in enumerate(pairwise(items.bounds.tolist())):
        if done[start:stop].all():
            continue
        entry = int(items.entry[start + int(np.argmin(done[start:stop]))])
        action = entries.action(entry)
        need = entries.action(other[entry]) if entry in other else needed(placement, action)[-1]
        waiting[rank] = (int(entries.table.position[entry]), need)
    return Stuck(waiting)


# --- what is held ---


@dataclass(frozen=True)
class Changes:
    """When a rank holds more or less of something, rank after rank."""

    moment: Ints  # where the time stands: all starts of items, then all ends
    amount: Ints  # where the bytes stand: a table of what is held by stage, then its negative
    bounds: Ints  # where each rank's begin, and where the last one's end


def _changes(items: Items) -> Changes:
    size, num_stages = len(items.role) + 1, items.entries.actions.placement.num_stages
    ranks, moments, amounts = [], [], []
    for owner, item, at_end, row, less in _parts(items):
        ranks.append(items.rank[owner])
        moments.append(item + size * at_end)
        amounts.append((row + HOLDINGS * less) * num_stages + items.stage[owner])
    rank = np.concatenate(ranks)
    order = np.argsort(rank.astype(np.min_scalar_type(len(items.bounds))), kind="stable")  # small numbers sort faster
    bounds = np.searchsorted(rank[order], np.arange(len(items.bounds)))
    return Changes(np.concatenate(moments)[order], np.concatenate(amounts)[order], bounds)


def _parts(items: Items) -> Iterator[tuple[Ints, Ints, bool, int, bool]]:
    """Whose rank, at which items, whether at their end, holds what, and whether less of it."""
    entries, at = items.entries, items.at
    found, cell = entries.found, entries.cell
    forward, full, first, second, again = (np.flatnonzero(entries.of(kind)) for kind in (F, B, I, W, RECOMPUTE))
    kept = at[forward[found[I][cell[forward]] >= 0]]
    yield kept, kept, False, SAVED, False
    for chosen, row in ((full, SAVED), (first, EARLY), (second, LATE)):
        yield at[chosen], at[chosen], True, row, True
    for chosen, row in ((forward, FORWARD), (full, BACKWARD), (first, BACKWARD), (second, BACKWARD)):
        yield at[chosen], at[chosen], False, row, False
        yield at[chosen], at[chosen], True, row, True
    last = np.where(found[W][cell[again]] >= 0, found[W][cell[again]], found[I][cell[again]])
    yield at[again], at[again], False, RECOMPUTED, False
    yield at[last], at[last], True, RECOMPUTED, True
    yield items.user, items.carrier, False, MESSAGE, False
    yield items.user, items.user, False, MESSAGE, True
    gathers, frees = np.flatnonzero(entries.of(UNSHARD)), np.flatnonzero(entries.of(RESHARD))
    change = of_same_stage(entries, np.flatnonzero(entries.of(UNSHARD, RESHARD)), gathers, after=False)
    new = at[gathers[(change < 0) | (entries.table.kind[change] == RESHARD)]]
    yield new, new, False, GATHERED, False
    yield at[frees], at[frees], True, GATHERED, True
