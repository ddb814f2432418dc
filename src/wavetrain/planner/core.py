"""The best selection among few choices: all that are near enough to the bound, gone through copy by copy.

At the prices of a bound every choice has an excess over the cheapest of its unit, and the excesses of a selection add
up to no more than its time is above the bound. So only sums within that slack are followed, and of those only the
ones that nothing else equals or betters in time and memory: a multiple-choice knapsack of two or three numbers.
All in 64-bit integers where they are large enough, else not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wavetrain.planner.branch import Search, worst_copy
from wavetrain.planner.leaves import (
    Choices,
    Multipliers,
    Segment,
    Weighed,
    allowed,
    amounts_of_core,
    limits_of_core,
    weigh,
)
from wavetrain.planner.problem import Picks, Problem, Selection, arranged, both_times, loads_of

Longs = npt.NDArray[np.int64]

LARGEST = 2**61
MOST = 50_000  # labels at a time; with more of them cases are faster
FIRST = 16  # choices beside the cheapest ones that are gone through first; each time twice the slack more
FINE = 2**60  # the slack in steps of the excess: rounded down, so that none is cut off
NEAR = 6  # neighbours in order of memory that are compared where there are more than two numbers


@dataclass(frozen=True)
class Group:
    """Copies of a unit with the same prices: per choice its excess and what it adds, above the first choice's."""

    unit: int
    count: int
    picks: tuple[Picks, ...]
    excess: Longs
    values: Longs  # number by choice; of the first choice zero


@dataclass(frozen=True)
class Core:
    """All that is left to decide: groups with more than one choice, what is settled, and how much may be added."""

    groups: tuple[Group, ...]
    settled: tuple[tuple[int, Picks, int], ...]  # unit, picks, count
    slack: int  # in grains
    limits: Longs  # by number
    num_times: int  # of the numbers the first ones; the larger of them counts


@dataclass(frozen=True)
class Pool:
    """The choices within the slack of the best selection so far, made ready to go through some of them."""

    groups: tuple[Group, ...]
    settled: tuple[tuple[int, Picks, int], ...]
    lower: int  # the time that the limits are for
    total: int  # the bound at these prices
    grain: int
    limits: list[int]  # not divided by the scales yet
    scales: list[int]
    num_times: int

    def near(self, lower: int, reach: int) -> Core:
        """What no more than `reach` above the bound is made of, for a time below `lower`."""
        top = reach // self.grain
        times = [limit - (self.lower - lower) for limit in self.limits[: self.num_times]]
        limits = [*times, *self.limits[self.num_times :]]
        groups, settled = [], list(self.settled)
        for group in self.groups:
            size = int(np.searchsorted(group.excess, top, side="right"))
            if size == 1:
                settled.append((group.unit, group.picks[0], group.count))
            else:
                picks, excess, values = group.picks[:size], group.excess[:size], group.values[:, :size]
                groups.append(Group(group.unit, group.count, picks, excess, values))
        tops = [max(-LARGEST, min(LARGEST, each // scale)) for each, scale in zip(limits, self.scales, strict=True)]
        return Core(tuple(groups), tuple(settled), top, np.array(tops), self.num_times)

    def first_reach(self) -> int:
        """How far above the bound a handful of choices is."""
        excess = np.sort(np.concatenate([[0], *(group.excess[1:] for group in self.groups)]))
        return int(excess[min(FIRST, len(excess) - 1)] + 1) * self.grain


@dataclass(frozen=True)
class _Step:
    """How labels came out of those before: a number of copies of one choice of a group added to each."""

    group: int
    choice: Longs
    copies: Longs
    parents: Longs


@dataclass(frozen=True)
class _Labels:
    excess: Longs
    values: Longs  # number by label
    used: Longs  # copies of the current group that are not of its first choice


def pool_of(problem: Problem, choices: Choices, by: Multipliers, lower: int) -> Pool | None:
    """The choices that a selection below `lower` may make; None where the numbers are too large for 64 bits."""
    weighed = weigh(problem, choices, (), by)
    slack = allowed(by, lower) - weighed.total
    raw = [_raw_group(problem, weighed, index, choices, slack, by) for index in range(len(weighed.parts))]
    limits = limits_of_core(problem, by, lower)
    for part, (*_, values) in zip(weighed.parts, raw, strict=True):
        limits = [limit - part.count * value for limit, value in zip(limits, values[0], strict=True)]
    relative = [[[a - b for a, b in zip(row, values[0], strict=True)] for row in values] for _, _, values in raw]
    num_times = len(limits) - len(by.memory)
    scales = _scales(relative, limits, num_times)
    if any(_reach(weighed.parts, relative, index) >= LARGEST * scale for index, scale in enumerate(scales)):
        return None
    grain = max(1, slack // FINE)
    groups, settled = [], []
    for part, (picks, excess, _), rows in zip(weighed.parts, raw, relative, strict=True):
        if len(picks) == 1:
            settled.append((part.unit, picks[0], part.count))
            continue
        table = np.array([[value // scale for value, scale in zip(row, scales, strict=True)] for row in rows]).T
        groups.append(Group(part.unit, part.count, picks, np.array([each // grain for each in excess]), table))
    # Many copies first: what they add is often the same in several memories. Then those with little to choose between.
    groups.sort(key=lambda group: (group.count == 1, -int(group.excess[1]), group.unit))
    return Pool(tuple(groups), tuple(settled), lower, weighed.total, grain, limits, scales, num_times)


def _scales(relative: list[list[list[int]]], limits: list[int], num_times: int) -> list[int]:
    """What every number can be divided by; both times and the distance of their limits by the same."""
    scales = [math.gcd(*(row[index] for rows in relative for row in rows)) for index in range(len(limits))]
    common = math.gcd(*scales[:num_times], *(limit - limits[0] for limit in limits[:num_times]))
    return [max(1, scale) for scale in (*[common] * num_times, *scales[num_times:])]


def _reach(parts: list[Segment], relative: list[list[list[int]]], index: int) -> int:
    return sum(part.count * max(abs(row[index]) for row in rows) for part, rows in zip(parts, relative, strict=True))


def _raw_group(
    problem: Problem, weighed: Weighed, index: int, choices: Choices, slack: int, by: Multipliers
) -> tuple[tuple[Picks, ...], list[int], list[tuple[int, ...]]]:
    part, least = weighed.parts[index], weighed.leasts[index]
    kept = sorted((price - least, picks) for picks, price in weighed.prices[index].items() if price - least <= slack)
    loads = choices[part.unit]
    values = [amounts_of_core(problem, by, part, loads[picks]) for _, picks in kept]
    return tuple(picks for _, picks in kept), [excess for excess, _ in kept], values


def best_of(core: Core, most: int) -> tuple[bool, list[tuple[int, Picks, int]] | None]:
    """Whether all was gone through, without more than so many labels at a time, and the best that fits if any does."""
    labels = _Labels(np.zeros(1, np.int64), np.zeros((len(core.limits), 1), np.int64), np.zeros(1, np.int64))
    steps: list[_Step] = []
    rests = _rests(core)
    if (rests[0] > core.limits).any():
        return True, None
    for index in range(len(core.groups)):
        for grown, step in _extended(core, labels, index, rests[index + 1]):
            labels = grown
            steps.append(step)
            if len(labels.excess) > most:
                return False, None
        if not len(labels.excess):
            return True, None
    above = labels.values[: core.num_times] - core.limits[: core.num_times, None]
    return True, _traced(core, steps, int(np.argmin(above.max(axis=0))))


def _rests(core: Core) -> list[Longs]:
    """The least that the groups from each on can add to every number."""
    rests = [np.zeros(len(core.limits), np.int64)]
    for group in reversed(core.groups):
        rests.append(rests[-1] + group.count * group.values.min(axis=1))
    return rests[::-1]


def _extended(core: Core, labels: _Labels, index: int, rest: Longs) -> Iterator[tuple[_Labels, _Step]]:
    group = core.groups[index]
    if group.count == 1:
        yield _one_more(core, labels, index, rest)
        return
    labels = _Labels(labels.excess, labels.values, np.zeros_like(labels.excess))
    for choice in range(len(group.picks) - 1, 0, -1):
        labels, step = _some_more(core, labels, index, choice, rest)
        yield labels, step


def _one_more(core: Core, labels: _Labels, index: int, rest: Longs) -> tuple[_Labels, _Step]:
    group = core.groups[index]
    excess = labels.excess[:, None] + group.excess
    parents, choice = np.nonzero(excess <= core.slack)
    values = labels.values[:, parents] + group.values[:, choice]
    kept = np.flatnonzero((values <= (core.limits - rest)[:, None]).all(axis=0))
    kept = kept[_undominated(values[:, kept])]
    parents, choice = parents[kept], choice[kept]
    found = _Labels(excess[parents, choice], values[:, kept], np.zeros(len(kept), np.int64))
    return found, _Step(index, choice, np.ones(len(kept), np.int64), parents)


def _some_more(core: Core, labels: _Labels, index: int, choice: int, rest: Longs) -> tuple[_Labels, _Step]:
    """Every label with every number of copies of the choice that can still come to something."""
    group = core.groups[index]
    each, added = int(group.excess[choice]), group.values[:, choice]
    least = group.values[:, :choice].min(axis=1)  # of the choices still to come, the first with its zeros among them
    free = group.count - labels.used
    low, high = np.zeros_like(free), free
    if each:
        high = np.minimum(high, (core.slack - labels.excess) // each)
    for number, more in enumerate((added - least).tolist()):
        room = core.limits[number] - rest[number] - labels.values[number] - least[number] * free
        if more > 0:
            high = np.minimum(high, room // more)
        elif more < 0:
            low = np.maximum(low, -(room // -more))
        else:
            high = np.where(room < 0, -1, high)
    sizes = np.maximum(high - low + 1, 0)
    parents = np.repeat(np.arange(len(sizes)), sizes)
    copies = np.arange(len(parents)) - np.repeat(np.cumsum(sizes) - sizes - low, sizes)
    values = labels.values[:, parents] + added[:, None] * copies
    used = labels.used[parents] + copies
    kept = _undominated(values, None if choice == 1 else used)
    parents, copies = parents[kept], copies[kept]
    found = _Labels(labels.excess[parents] + each * copies, values[:, kept], used[kept])
    return found, _Step(index, np.full(len(kept), choice), copies, parents)


def _undominated(values: Longs, used: Longs | None = None) -> npt.NDArray[np.intp]:
    """Labels that no other of as many copies equals or betters; of more than two numbers only some are compared."""
    same = [(values[row] == values[row - 1]).all() for row in range(2, len(values))]
    values = values[[True, True, *(not each for each in same)]] if any(same) else values
    order = np.lexsort(values if used is None else (*values, used))
    ordered = values[:, order]
    keep = np.ones(len(order), dtype=np.bool_)
    if len(values) == 2:
        first = ordered[0]
        if used is not None:  # by the rank among all, so that every number of copies starts anew
            groups = np.concatenate([[0], np.cumsum(np.diff(used[order]) != 0)])
            first = np.unique(first, return_inverse=True)[1] - groups * len(order)
        keep[1:] = first[1:] < np.minimum.accumulate(first)[:-1]
        return order[keep]
    if used is not None:
        ordered = np.vstack([ordered, used[order]])
    for shift in range(1, min(NEAR, len(order) - 1) + 1):
        keep[shift:] &= ~(ordered[:, :-shift] <= ordered[:, shift:]).all(axis=0)
    return order[keep]


def _traced(core: Core, steps: list[_Step], label: int) -> list[tuple[int, Picks, int]]:
    """The choices that led to a label."""
    left = [group.count for group in core.groups]
    found = list(core.settled)
    for step in reversed(steps):
        group, choice, copies = core.groups[step.group], int(step.choice[label]), int(step.copies[label])
        if choice and copies:
            found.append((group.unit, group.picks[choice], copies))
            left[step.group] -= copies
        label = int(step.parents[label])
    firsts = [(group.unit, group.picks[0], count) for group, count in zip(core.groups, left, strict=True) if count]
    return found + firsts


def selection_of(problem: Problem, found: list[tuple[int, Picks, int]]) -> Selection:
    """The copies of every unit in their best order."""
    counts: list[dict[Picks, int]] = [{} for _ in problem.units]
    for unit, picks, count in found:
        counts[unit][picks] = counts[unit].get(picks, 0) + count
    return tuple(arranged(problem, unit, each.items()) for unit, each in zip(problem.units, counts, strict=True))


def settle(search: Search, by: Multipliers, choices: Choices) -> Multipliers | None:
    """Find the best selection of the choices; the multipliers whose core proves it, None where there is too much.

    First among the selections that are nearest to the bound: where one of them is the best, all others are never
    looked at. Memory of copies that have no price is left out until it matters, and so is the shorter of both times.
    """
    pool, gone_through, reach = None, -1, 0
    while search.best_time is not None and not search.late:
        if pool is None:
            pool = pool_of(search.problem, choices, by, search.best_time)
            if pool is None:
                return None
            reach = max(reach, pool.first_reach())
        slack = allowed(by, search.best_time) - pool.total
        if slack <= gone_through:
            return by
        reach = min(slack, reach)
        done, found = best_of(pool.near(search.best_time, reach), MOST)
        if not done:
            return None
        if found is None or _holds(search, by, found):
            gone_through, reach = reach, 2 * reach + 1
        else:
            fuller = _with_more(search, by, found)
            if fuller is None:
                return None
            by, gone_through, pool = fuller, -1, None
    return None


def _holds(search: Search, by: Multipliers, found: list[tuple[int, Picks, int]]) -> bool:
    """Whether the selection fits and takes no more than its core says; it is offered in any case."""
    selection = selection_of(search.problem, found)
    if not search.offer(selection):
        return False
    hidden, longer = both_times(search.problem, list(loads_of(search.problem, selection)))
    return max(hidden, longer) == max([hidden] * (by.longer < by.time) + [longer] * (by.longer > 0))


def _with_more(search: Search, by: Multipliers, found: list[tuple[int, Picks, int]]) -> Multipliers | None:
    """The multipliers with the time or the memory that was left out and matters, at a price of next to nothing."""
    selection = selection_of(search.problem, found)
    loads = list(loads_of(search.problem, selection))
    most, copy = worst_copy(selection, loads)
    if most <= search.problem.limit:
        return replace(by, longer=1 if by.longer == 0 else by.time - 1) if by.time > 1 else None
    if any((unit, at) == copy for unit, at, _ in by.memory):
        return None
    return replace(by, memory=(*by.memory, (*copy, 0)))
