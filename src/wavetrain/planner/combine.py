"""Combinations of a unit's options, many at once: in floating point, with a margin that no rounding exceeds.

What shows of communication is `max(0, y)` of a sum `y`, and `max(0, y) >= share * y` for a share of 0 to 1: with any
two shares, one for forward and one for backward, the cost has a bound that is a sum over operators. Nothing is left
out that belongs to an answer; what does not belong to it is for the caller to drop, in integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wavetrain.planner.problem import MILLION, Load, Option, Picks, Problem, Unit, amounts_of, load_from

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

MARGIN = 2.0**-44  # of the sum of all magnitudes; a sum of a few dozen products is off by less than 2**-47 of it
FINER = 8  # grids of shares, each twice as fine as the one before, to find where the bound is highest


@dataclass(frozen=True)
class Grid:
    """The options of a unit as numbers, operator by option by amount."""

    exact: npt.NDArray[np.int64]
    amounts: Floats
    missing: npt.NDArray[np.bool_]  # where an operator has fewer options than others
    index: Ints  # operator by option: which one it is
    twins: tuple[int, ...]  # for each operator the first one with the same options
    least_own: float


@dataclass(frozen=True)
class Board:
    """The options of a unit at some prices, operator by option, or of several units at once, one axis before."""

    terms: Floats  # cost, forward, backward; the first axis
    own: Floats  # its price is part of it
    slacks: Floats  # forward, backward; the last axis
    least_own: Floats
    margin: Floats

    def of(self, unit: int) -> Board:
        """The board of one unit out of several."""
        one = slice(unit, unit + 1)
        return Board(self.terms[:, one], self.own[one], self.slacks[one], self.least_own[one], self.margin[one])


def joined(boards: Sequence[Board]) -> Board:
    """One board of all units of several, if of one shape."""
    terms = np.concatenate([board.terms for board in boards], axis=1)
    own, slacks, least_own, margin = (
        np.concatenate([getattr(board, name) for board in boards]) for name in ("own", "slacks", "least_own", "margin")
    )
    return Board(terms, own, slacks, least_own, margin)


def grid_of(operators: tuple[tuple[tuple[int, Option], ...], ...], twins: tuple[int, ...]) -> Grid | None:
    """The options that are worth a choice, with their index; None where there are none, or too large numbers."""
    if not operators:
        return None
    width = max(map(len, operators))
    rows = [[amounts_of(each) for _, each in options] for options in operators]
    if max(max(amounts) for options in rows for amounts in options) * len(rows) >= 2**62:
        return None
    exact = np.array([options + [(0,) * 10] * (width - len(options)) for options in rows], dtype=np.int64)
    index = [[which for which, _ in options] + [0] * (width - len(options)) for options in operators]
    missing = np.arange(width) >= np.array([len(options) for options in operators])[:, None]
    own = max(min(option.own for _, option in options) for options in operators)
    return Grid(exact, exact.astype(np.float64), missing, np.array(index), twins, float(own))


def board_of(problem: Problem, units: list[Unit], grids: list[Grid], weights: list[tuple[int, ...]]) -> Board:
    """The options of units of one shape, each at its own prices of a load."""
    time, reduction, hides, held, saved, left, running = np.array(weights, dtype=np.float64).T
    each = time * problem.microbatches
    shown, shown_back = each * problem.forward_share, each * problem.backward_share
    hidden, hidden_back = each * (MILLION - problem.forward_share), each * (MILLION - problem.backward_share)
    prices = np.stack([time * MILLION, shown, shown_back, hides, reduction, held, saved, left, running], axis=1)
    amounts = np.stack([grid.amounts for grid in grids])
    missing = np.stack([grid.missing for grid in grids])
    flat = amounts[..., :9].reshape(len(grids), -1, 9)
    shape = missing.shape
    cost = np.where(missing, np.inf, (flat @ prices[:, :, None]).reshape(shape))
    forward = amounts[..., 1] * hidden[:, None, None]
    backward = (amounts[..., 2] - amounts[..., 3]) * hidden_back[:, None, None]
    own = amounts[..., 9] * running[:, None, None]
    compute = np.array([(unit.forward, unit.backward) for unit in units], dtype=np.float64)
    slacks = compute * np.stack([hidden, hidden_back], axis=1)
    size = (flat @ np.abs(prices)[:, :, None]).reshape(shape) + forward + np.abs(backward) + own
    scale = size.max(axis=2).sum(axis=1) + slacks.sum(axis=1)
    least_own = np.array([grid.least_own for grid in grids]) * running
    return Board(np.stack([cost, forward, backward]), own, slacks, least_own, MARGIN * scale)


def best_shares(board: Board) -> Floats:
    """Shares with a high bound, forward and backward for each unit: of a grid the best, and of finer ones around it."""
    best, step = np.full(board.slacks.shape, 0.5), 0.5
    for _ in range(FINER):
        points = np.clip(best[:, :, None] + step * np.arange(-1, 2), 0.0, 1.0)
        first, second = points[:, 0, :, None], points[:, 1, None, :]
        cost, forward, backward = board.terms[:, :, None, None]
        values = cost + first[..., None, None] * forward + second[..., None, None] * backward
        bounds = values.min(axis=-1).sum(axis=-1)
        bounds -= first * board.slacks[:, 0, None, None] + second * board.slacks[:, 1, None, None]
        which = bounds.reshape(len(best), 9).argmax(axis=1)
        rows = np.arange(len(best))
        best = np.stack([points[rows, 0, which // 3], points[rows, 1, which % 3]], axis=1)
        step /= 2
    return best


def bound_of(board: Board, shares: Floats) -> tuple[Floats, Ints]:
    """A cost that no combination is below, margin aside, and the options that it is made of, for each unit."""
    cost, forward, backward = board.terms
    values = cost + shares[:, 0, None, None] * forward + shares[:, 1, None, None] * backward
    bound = values.min(axis=2).sum(axis=1) - (shares * board.slacks).sum(axis=1) + board.least_own
    return bound, values.argmin(axis=2)


def improved(board: Board, places: Ints) -> Ints:
    """Change the option of one operator of each unit for the better as long as one is, rounding aside."""
    units, operators = np.arange(len(places)), np.arange(places.shape[1])
    best = np.full(len(places), np.inf)
    places = places.copy()
    while True:
        at = (units[:, None], operators, places)
        chosen = board.terms[:, *at]
        sums = board.terms - chosen[..., None] + chosen.sum(axis=2)[:, :, None, None]
        own = board.own[at]
        others = np.repeat(own.max(axis=1)[:, None], len(operators), axis=1)
        largest = own.argmax(axis=1)
        own[units, largest] = 0.0
        others[units, largest] = own.max(axis=1)
        total = sums[0] + np.maximum(board.own, others[..., None])
        total += np.maximum(sums[1:] - board.slacks.T[:, :, None, None], 0.0).sum(axis=0)
        total = total.reshape(len(places), -1)
        which = total.argmin(axis=1)
        least = total[units, which]
        better = np.flatnonzero(least < best - board.margin)
        if not len(better):
            return places
        best[better] = least[better]
        operator, place = np.divmod(which[better], board.own.shape[2])
        places[better, operator] = place


@dataclass(frozen=True)
class _Ranked:
    """Operators of every unit in the order they are gone through, options by their part of the bound."""

    order: Ints  # unit by depth: the operator
    places: Ints  # unit by depth by rank: the option
    values: Floats  # what the option adds to the bound
    terms: Floats
    own: Floats
    follows: npt.NDArray[np.bool_]  # unit by depth: whether it is a twin of the one before
    rests: Floats  # the least that what follows adds to each of the terms


def _ranked(grids: Sequence[Grid], board: Board, shares: Floats) -> _Ranked:
    terms = board.terms
    values = terms[0] + shares[:, 0, None, None] * terms[1] + shares[:, 1, None, None] * terms[2]
    spread = np.where(np.isfinite(values), values, -np.inf).max(axis=2) - values.min(axis=2)
    twins = np.array([grid.twins for grid in grids])
    # Operators with much to choose between first: a wrong turn is then seen early. Twins stay together.
    order = np.lexsort((twins, -spread), axis=1)
    units = np.arange(len(grids))[:, None]
    twins = twins[units, order]
    follows = np.zeros(order.shape, dtype=np.bool_)
    follows[:, 1:] = twins[:, 1:] == twins[:, :-1]
    places = values.argsort(axis=2, kind="stable")[units, order]
    at = (units[:, :, None], order[:, :, None], places)
    chosen = terms[:, *at]
    rests = np.zeros((3, len(grids), order.shape[1] + 1))
    rests[:, :, :-1] = np.cumsum(chosen.min(axis=3)[:, :, ::-1], axis=2)[:, :, ::-1]
    return _Ranked(order, places, values[at], chosen, board.own[at], follows, rests)


@dataclass(frozen=True)
class _Partial:
    """Combinations of the first operators: unit, bound without own bytes, the three sums, own bytes, last rank."""

    unit: Ints
    bound: Floats
    sums: Floats  # cost, forward, backward
    own: Floats
    rank: Ints


Found = tuple[Floats, Ints] | None  # cost and options of combinations; None where they are too many


def combinations(grids: Sequence[Grid], board: Board, shares: Floats, budgets: Floats, most: int) -> list[Found]:
    """Every combination within the budget of its unit, of twins in one order; for units of one shape all at once."""
    ranked, size = _ranked(grids, board, shares), len(grids)
    start = ranked.values[:, :, 0].sum(axis=1) - (shares * board.slacks).sum(axis=1)
    units = np.arange(size)
    partial = _Partial(units, start, np.zeros((3, size)), board.least_own, np.zeros_like(units))
    trail = []
    num = np.ones(size, dtype=np.intp)
    for depth in range(ranked.order.shape[1]):
        partial, parents = _grown(ranked, board, partial, depth, budgets + board.margin)
        num = np.where(num > most, num, np.bincount(partial.unit, minlength=size))
        kept = np.flatnonzero(num[partial.unit] <= most)
        partial = _Partial(partial.unit[kept], partial.bound[kept], partial.sums[:, kept], partial.own[kept],
                           partial.rank[kept])  # fmt: skip
        trail.append((parents[kept], ranked.places[partial.unit, depth, partial.rank]))
    slacks = board.slacks[partial.unit].T
    costs = partial.sums[0] + np.maximum(partial.sums[1:] - slacks, 0).sum(axis=0) + partial.own
    options = _options(trail, partial.unit, ranked.order)
    ends = np.searchsorted(partial.unit, np.arange(size + 1))
    return [
        None if many > most else (costs[first:end], options[first:end])
        for many, (first, end) in zip(num.tolist(), pairwise(ends.tolist()), strict=True)
    ]


def _grown(ranked: _Ranked, board: Board, partial: _Partial, depth: int, tops: Floats) -> tuple[_Partial, Ints]:
    """Every partial combination with every option of one more operator, as far as the budget goes; and its parent."""
    unit = partial.unit
    steps = ranked.values[:, depth] - ranked.values[:, depth, :1]
    bound = partial.bound[:, None] + steps[unit]
    own = np.maximum(partial.own[:, None], ranked.own[unit, depth])
    kept = bound + own <= tops[unit, None]
    kept &= ~ranked.follows[unit, depth, None] | (np.arange(kept.shape[1]) >= partial.rank[:, None])
    parents, rank = np.nonzero(kept)
    unit = unit[parents]
    sums = partial.sums[:, parents] + ranked.terms[:, unit, depth, rank]
    own = own[parents, rank]
    ahead = sums + ranked.rests[:, unit, depth + 1]
    true = ahead[0] + np.maximum(ahead[1:] - board.slacks[unit].T, 0).sum(axis=0) + own
    left = np.flatnonzero(true <= tops[unit])
    parents, rank = parents[left], rank[left]
    return _Partial(unit[left], bound[parents, rank], sums[:, left], own[left], rank), parents


def _options(trail: list[tuple[Ints, Ints]], unit: Ints, order: Ints) -> Ints:
    """Which options led to each combination, in the order of the operators."""
    found = np.zeros((len(unit), order.shape[1]), dtype=np.intp)
    rows = at = np.arange(len(unit))
    for depth, (parents, places) in reversed(list(enumerate(trail))):
        found[rows, order[unit, depth]] = places[at]
        at = parents[at]
    return found


def loads_at(problem: Problem, unit: Unit, grid: Grid, places: Ints) -> list[tuple[Picks, Load]]:
    """The combinations at these places, each with its load: exact, whatever the size of the times."""
    rows = np.arange(places.shape[1])
    sums = _sums(grid.exact[rows, places])
    picks = grid.index[rows, places].tolist()
    return [(tuple(each), load_from(problem, unit, row)) for each, row in zip(picks, sums, strict=True)]


def load_of_each(problem: Problem, units: list[Unit], grids: list[Grid], places: Ints) -> list[tuple[Picks, Load]]:
    """The same for one combination of each of several units of one shape."""
    rows = np.arange(places.shape[1])
    sums = _sums(np.stack([grid.exact[rows, each] for grid, each in zip(grids, places, strict=True)]))
    picks = [grid.index[rows, each].tolist() for grid, each in zip(grids, places, strict=True)]
    return [(tuple(p), load_from(problem, u, row)) for p, u, row in zip(picks, units, sums, strict=True)]


def _sums(amounts: npt.NDArray[np.int64]) -> list[list[int]]:
    own = amounts[:, :, 9].max(axis=1, keepdims=True)
    found: list[list[int]] = np.concatenate([amounts[:, :, :9].sum(axis=1), own], axis=1).tolist()
    return found
