"""The exact choice for every operator: the least time that fits, with a proof that can be checked in integers.

Prices first: columns are generated for the linear program of the whole problem until no choice of any unit is worth
adding. Those prices bound the time of all selections, and strike out every choice that could not be part of a better
one; the few that are left are split into cases until each is closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from time import monotonic

from wavetrain.planner.branch import Search, crowded, grow, polish, rounded, trimmed, worst_copy
from wavetrain.planner.core import settle
from wavetrain.planner.leaves import (
    Case,
    Certificate,
    Choices,
    Multipliers,
    constant,
    gap_of,
    list_choices,
    segments,
    sift,
    weigh,
)
from wavetrain.planner.master import Answer, Frame, solve
from wavetrain.planner.price import Kind, Wanted, Weights, cheapest, cost_of, kinds_of, roughly_cheapest
from wavetrain.planner.problem import (
    MILLION,
    Picks,
    Problem,
    Run,
    Selection,
    digest,
    is_hidden,
    load_of,
    loads_of,
    peak,
    time,
)

LEAN = Weights(held=1, saved=1, left=1, running=1)
FEW = 60  # choices among which cases find a better selection as fast
ENOUGH = 200_000  # the part of the time by which a higher bound is not worth another program
MOST_ROUNDS = 200  # of adding choices; each adds at least one, so that it is never reached in practice


@dataclass(frozen=True)
class Chosen:
    """What was found. Without a selection and without `lower` nothing fits; `tightest` tells by how much."""

    selection: Selection | None
    time: int | None  # picoseconds times a million
    peak: int | None
    lower: int | None  # no selection takes less
    gap: Fraction | None  # of time and lower; 0 where the selection is the best there is
    certificate: Certificate
    tightest: Tightest | None = None  # where nothing fits


@dataclass(frozen=True)
class Tightest:
    """The selection with the least peak, and a bound below which no selection gets."""

    selection: Selection
    peak: int
    lower: int


def choose(problem: Problem, *, time_limit_s: float | None = None) -> Chosen:
    """The selection of least time that fits, proven; what is left of the proof where the time is up."""
    kinds = kinds_of(problem)
    search = Search(problem, kinds, math.inf if time_limit_s is None else monotonic() + time_limit_s)
    frees = _frees(search)
    if frees[-1].is_best:
        return _chosen(search, (Case((frees[-1].prices,)),), frees[-1].bound)
    lean = _uniform(kinds, LEAN, roughly_cheapest)
    search.look_at([worst_copy(lean, list(loads_of(problem, lean)))[1]])
    search.offer(lean)
    if search.best is None:
        proof = _fit(search, _initial(search, (lean, frees[0].selection)))
        if search.best is None:
            return _infeasible(search, proof)
    assert search.best is not None
    choices = _initial(search, (search.best, lean, *(free.selection for free in frees)))
    return _prove(search, _priced(search, choices, fit=False), choices)


@dataclass(frozen=True)
class _Free:
    """What every unit would choose by itself, and the bound that it gives."""

    selection: Selection
    prices: Multipliers
    bound: int
    is_best: bool  # it fits and takes no more than the bound


def _frees(search: Search) -> list[_Free]:
    """Every unit's own best, with the reduction taken as hidden, then as longer where it is; the last one may be the
    best of all. Where they do not fit, only about the best.
    """
    frees: list[_Free] = []
    for longer in (0, 1):
        free = _freely(search, longer, roughly_cheapest)
        as_taken = is_hidden(search.problem, free.selection) != bool(longer)
        if as_taken and search.best_time == time(search.problem, free.selection):  # it fits: is it the best?
            free = _freely(search, longer, cheapest)
        frees.append(free)
        if as_taken or free.is_best:
            break
    return frees


def _freely(search: Search, longer: int, find: Find) -> _Free:
    problem, by = search.problem, Multipliers(1, longer)
    parts = segments(problem, by, ())
    found = find([(search.kinds[part.unit], part.weights) for part in parts])
    bound = constant(problem, by, ()) + sum(part.count * cost for part, (cost, _) in zip(parts, found, strict=True))
    selection = tuple((Run(part.count, picks),) for part, (_, picks) in zip(parts, found, strict=True))
    search.offer(selection)
    return _Free(selection, by, bound, search.best_time == bound)


def least_peak(problem: Problem, *, deadline: float = math.inf) -> Tightest:
    """The selection with the least peak; past the deadline (of the monotonic clock) only the least found."""
    kinds = kinds_of(problem)
    best = _uniform(kinds, LEAN, cheapest)
    while True:
        most, copy = worst_copy(best, list(loads_of(problem, best)))
        if most == 0:
            return Tightest(best, 0, 0)
        search = Search(replace(problem, limit=most - 1), kinds, deadline)
        search.look_at([copy])
        proof = _fit(search, _initial(search, (best,)))
        if search.best is None:
            return Tightest(best, most, most if proof else 0)
        best = search.best


def _fit(search: Search, choices: Choices) -> tuple[Case, ...]:
    """Find a selection that fits, or cases that prove that there is none; neither where it is late."""
    fitted = _priced(search, choices, fit=True)
    if fitted.bound > 0:
        return (Case((fitted.prices,)),)
    if search.best is None:
        polish(search, choices)
    listed = (
        None
        if search.best is not None or search.late
        else list_choices(search.kinds, search.problem, fitted.prices, None)
    )
    if listed is None:
        return ()
    tree = grow(search, listed)
    if tree.open_bounds or search.best is not None:
        return ()
    return (Case((fitted.prices, *tree.cases[0].sieves), tree.cases[0].split), *tree.cases[1:])


Find = Callable[[Wanted], list[tuple[int, Picks]]]


def _uniform(kinds: list[Kind], weights: Weights, find: Find) -> Selection:
    found = find([(kind, weights) for kind in kinds])
    return tuple((Run(kind.unit.count, picks),) for kind, (_, picks) in zip(kinds, found, strict=True))


def _initial(search: Search, selections: tuple[Selection, ...]) -> Choices:
    """The choices to begin with: of the selections, and all that are listed anyway."""
    problem = search.problem
    choices: Choices = []
    for index, (unit, kind) in enumerate(zip(problem.units, search.kinds, strict=True)):
        picks = [run.picks for selection in selections for run in selection[index]]
        choices.append({each: load_of(problem, unit, each) for each in picks} | kind.listed)
    return choices


@dataclass(frozen=True)
class _Priced:
    """The best prices of the whole problem and their bound: of time, or (to fit) of what is above the limit."""

    prices: Multipliers
    bound: int


def _priced(search: Search, choices: Choices, *, fit: bool) -> _Priced:
    """Add choices that pay at the prices of the program until none does."""
    best: _Priced | None = None
    for _ in range(MOST_ROUNDS):
        answer = solve(Frame(search.problem, choices, (), tuple(search.memory), fit))
        assert answer is not None, "the program holds a selection that fits"
        least, lacking = _add_choices(search, choices, answer)
        if not fit and search.best_time is not None:  # the last bit of the bound is not worth its time
            lacking = max(0, lacking - answer.prices.time * search.best_time // ENOUGH)
        bound = -(-least // (answer.prices.time or 1))
        if best is None or bound > best.bound:
            best = _Priced(answer.prices, bound)
        search.offer(rounded(search.problem, answer.columns, answer.amounts))
        done = best.bound > 0 if fit else search.best_time is not None and best.bound >= search.best_time
        if done or search.late or (fit and search.best is not None):
            break
        if not lacking and not search.look_at(crowded(search.problem, answer)):
            break
    assert best is not None
    return best


def _add_choices(search: Search, choices: Choices, answer: Answer) -> tuple[int, int]:
    """A bound of the inequality over all selections, and by how much the choices that were added lower it."""
    problem = search.problem
    total, lacking = constant(problem, answer.prices, ()), 0
    parts = segments(problem, answer.prices, ())
    keys = list(dict.fromkeys((part.unit, part.weights) for part in parts))
    found = dict(zip(keys, cheapest([(search.kinds[unit], weights) for unit, weights in keys]), strict=True))
    for part in parts:
        known, (least, picks) = choices[part.unit], found[part.unit, part.weights]
        total += part.count * least
        if picks not in known:
            load = load_of(problem, problem.units[part.unit], picks)
            before = min(cost_of(each, part.weights) for each in known.values())
            lacking += part.count * max(0, before - cost_of(load, part.weights))
            known[picks] = load
    return total, lacking


def _prove(search: Search, priced: _Priced, columns: Choices) -> Chosen:
    prices = priced.prices
    assert search.best_time is not None
    if priced.bound < search.best_time and not search.late and any(kind.operators for kind in search.kinds):
        known = sift(search.problem, columns, (), prices, search.best_time)
        if known is not None and settle(search, prices, known) is None and _is_worthwhile(search, priced.bound):
            polish(search, columns)
    if priced.bound >= search.best_time:
        return _chosen(search, (Case((prices,)),), search.best_time)
    if search.late:
        return _chosen(search, (Case((prices,)),), priced.bound)
    return _prove_listed(search, prices)


def _is_worthwhile(search: Search, bound: int) -> bool:
    """Whether a better selection to begin with saves more than it costs to look for."""
    few = not any(kind.operators for kind in search.kinds) and sum(len(kind.listed) for kind in search.kinds) <= FEW
    return not few and search.best_time is not None and bound < search.best_time


def _prove_listed(search: Search, prices: Multipliers) -> Chosen:
    """Strike out what the prices exclude, look again for a better selection among the rest, and split it."""
    problem = search.problem
    choices = list_choices(search.kinds, problem, prices, search.best_time)
    assert choices is not None
    assert search.best is not None
    before = search.best_time
    settled = settle(search, prices, choices)
    if settled is not None:
        closed = sift(problem, choices, (), prices, search.best_time) is None
        case = Case((prices,)) if closed else Case(tuple(dict.fromkeys((prices, settled))), core=True)
        return _chosen(search, (case,), time(problem, search.best))
    if sum(map(len, choices)) > FEW:
        polish(search, choices)
    if search.best_time != before:
        choices = sift(problem, choices, (), prices, search.best_time)
        if choices is None:
            return _chosen(search, (Case((prices,)),), time(problem, search.best))
    return _prove_split(search, prices, choices)


def _prove_split(search: Search, prices: Multipliers, choices: Choices) -> Chosen:
    problem, before = search.problem, search.best_time
    tree = grow(search, choices)
    first = -(-weigh(problem, choices, (), prices).total // prices.time)
    bounds = [first if bound is None else max(first, bound) for bound in tree.open_bounds]
    assert search.best_time is not None
    lower = min([search.best_time, *bounds])
    cases = tuple(tree.cases)
    if lower != before:
        start = sift(problem, choices, (), prices, lower)
        if start is None:
            return _chosen(search, (Case((prices,)),), lower)
        cases = trimmed(problem, cases, start, lower)
    return _chosen(search, (Case((prices, *cases[0].sieves), cases[0].split), *cases[1:]), lower)


def _chosen(search: Search, cases: tuple[Case, ...], lower: int) -> Chosen:
    problem, selection = search.problem, search.best
    assert selection is not None
    taken, most = time(problem, selection), peak(problem, selection)
    certificate = Certificate(digest(problem), selection, taken, most, lower, cases)
    return Chosen(selection, taken, most, lower, gap_of(certificate), certificate)


def _infeasible(search: Search, proof: tuple[Case, ...]) -> Chosen:
    lower = None if proof else MILLION * search.problem.fixed
    certificate = Certificate(digest(search.problem), None, None, None, lower, proof)
    tightest = least_peak(search.problem, deadline=search.deadline)
    return Chosen(None, None, None, lower, None, certificate, tightest)
