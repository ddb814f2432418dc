"""Combinations of a unit's options, many at once: in floating point, with a margin that no rounding exceeds.

What shows of communication is `max(0, y)` of a sum `y`, and `max(0, y) >= share * y` for a share of 0 to 1: with any
two shares, one for forward and one for backward, the cost has a bound that is a sum over operators. Nothing is left
out that belongs to an answer; what does not belong to it is for the caller to drop, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wavetrain.planner.problem import MILLION, Load, Option, Picks, Problem, Unit, amounts_of, load_from

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

MARGIN = 2.0**-44  # of the sum of all magnitudes; a sum of a few dozen products is off by less than 2**-47 of it
FINER = 4  # grids of shares, each twice as fine as the one before, to find where the bound is highest


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
        rest = (self.own[unit], self.slacks[unit], self.least_own[unit], self.margin[unit])
        return Board(self.terms[:, unit], *rest)


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
    best, step = np.full(board.slacks.shape, 0.5), 0.25
    for _ in range(FINER):
        points = np.clip(best[:, :, None] + step * np.arange(-2, 3), 0.0, 1.0)
        first, second = points[:, 0, :, None], points[:, 1, None, :]
        cost, forward, backward = board.terms[:, :, None, None]
        values = cost + first[..., None, None] * forward + second[..., None, None] * backward
        bounds = values.min(axis=-1).sum(axis=-1)
        bounds -= first * board.slacks[:, 0, None, None] + second * board.slacks[:, 1, None, None]
        which = bounds.reshape(len(best), 25).argmax(axis=1)
        rows = np.arange(len(best))
        best = np.stack([points[rows, 0, which // 5], points[rows, 1, which % 5]], axis=1)
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
class _Partial:
    """Combinations of the first operators: bound without own bytes, the three sums, own bytes, last place."""

    bound: Floats
    sums: Floats  # cost, forward, backward
    own: Floats
    place: Ints


def combinations(grid: Grid, board: Board, shares: Floats, budget: float, most: int) -> tuple[Floats, Ints] | None:
    """Cost and options of every combination within the budget, of twins in one order; None where they are too many."""
    terms = board.terms
    values = terms[0] + shares[0] * terms[1] + shares[1] * terms[2]
    places = values.argsort(axis=1, kind="stable")
    values = np.take_along_axis(values, places, axis=1)
    spread = np.where(np.isfinite(values), values, -np.inf).max(axis=1) - values[:, 0]
    # Operators with much to choose between first: a wrong turn is then seen early. Twins stay together.
    order = sorted(range(len(values)), key=lambda row: (-spread[row], grid.twins[row], row))
    follows = [False, *(grid.twins[a] == grid.twins[b] for a, b in pairwise(order))]
    rests = np.cumsum(terms.min(axis=2)[:, order[::-1]], axis=1)[:, ::-1]
    rests = np.concatenate([rests, np.zeros((3, 1))], axis=1)
    slacks = np.array([[0.0], *board.slacks[:, None]])
    start = float(values[:, 0].sum() - shares @ board.slacks)
    partial = _Partial(np.array([start]), np.zeros((3, 1)), np.full(1, board.least_own), np.zeros(1, np.intp))
    trail = []
    top = budget + board.margin
    for depth, row in enumerate(order):
        here = places[row]
        bound = partial.bound[:, None] + (values[row] - values[row, 0])
        own = np.maximum(partial.own[:, None], board.own[row, here])
        kept = bound + own <= top
        if follows[depth]:
            kept &= np.arange(len(here)) >= partial.place[:, None]
        parents, place = np.nonzero(kept)
        sums = partial.sums[:, parents] + terms[:, row, here[place]]
        largest = own[parents, place]
        ahead = sums + rests[:, depth + 1, None] - slacks
        true = ahead[0] + np.maximum(ahead[1], 0) + np.maximum(ahead[2], 0) + largest
        kept = true <= top
        parents, place = parents[kept], place[kept]
        if len(parents) > most:
            return None
        if not len(parents):
            return np.zeros(0), np.zeros((0, len(order)), dtype=np.intp)
        partial = _Partial(bound[parents, place], sums[:, kept], largest[kept], place)
        trail.append((row, parents, here[place]))
    return true[kept], _options(trail, len(parents), len(order))


def _options(trail: list[tuple[int, Ints, Ints]], count: int, operators: int) -> Ints:
    found = np.zeros((count, operators), dtype=np.intp)
    at = np.arange(count)
    for row, parents, places in reversed(trail):
        found[:, row] = places[at]
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
