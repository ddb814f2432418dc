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
STEPS = 8  # of a share, to find where the bound is highest; then again as many around the best, and again
MOST = 100_000  # combinations to go on with at a time


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
    """The options at some prices, operator by option."""

    cost: Floats
    forward: Floats
    backward: Floats
    own: Floats  # its price is part of it
    forward_slack: float
    backward_slack: float
    least_own: float
    margin: float


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


def board_of(problem: Problem, unit: Unit, grid: Grid, weights: tuple[int, ...]) -> Board:
    """The options of the unit at these prices of a load."""
    time, reduction, hides, held, saved, left, running = map(float, weights)
    each = time * problem.microbatches
    shown, shown_back = each * problem.forward_share, each * problem.backward_share
    hidden, hidden_back = each * (MILLION - problem.forward_share), each * (MILLION - problem.backward_share)
    prices = np.array([time * MILLION, shown, shown_back, hides, reduction, held, saved, left, running])
    cost = np.where(grid.missing, np.inf, grid.amounts[:, :, :9] @ prices)
    forward = grid.amounts[:, :, 1] * hidden
    backward = (grid.amounts[:, :, 2] - grid.amounts[:, :, 3]) * hidden_back
    own = grid.amounts[:, :, 9] * running
    slacks = unit.forward * hidden, unit.backward * hidden_back
    size = grid.amounts[:, :, :9] @ np.abs(prices) + forward + np.abs(backward) + own
    scale = float(size.max(axis=1).sum()) + sum(slacks)
    return Board(cost, forward, backward, own, *slacks, grid.least_own * running, MARGIN * scale)


def best_shares(board: Board) -> tuple[float, float]:
    """Shares with a high bound: the best of a grid over both, and of a finer one around it."""
    low, step = np.zeros(2), np.array([1.0, 1.0]) / STEPS
    if not board.forward.any():
        step[0] = 0.0
    if not board.backward.any():
        step[1] = 0.0
    for _ in range(3):
        first, second = (_points(low[axis], step[axis]) for axis in (0, 1))
        values = board.cost + first[:, None, None, None] * board.forward + second[:, None, None] * board.backward
        bounds = values.min(axis=3).sum(axis=2) - first[:, None] * board.forward_slack - second * board.backward_slack
        one, two = np.unravel_index(int(bounds.argmax()), bounds.shape)
        best = np.array([first[one], second[two]])
        low, step = np.maximum(best - step, 0.0), 2 * step / STEPS
    return float(best[0]), float(best[1])


def _points(low: float, step: float) -> Floats:
    return np.minimum(low + step * np.arange(STEPS + 1), 1.0) if step else np.zeros(1)


def bound_of(board: Board, shares: tuple[float, float]) -> tuple[float, Ints]:
    """A cost that no combination is below, margin aside, and the options that it is made of."""
    values = board.cost + shares[0] * board.forward + shares[1] * board.backward
    slack = shares[0] * board.forward_slack + shares[1] * board.backward_slack
    return float(values.min(axis=1).sum()) - slack + board.least_own, values.argmin(axis=1)


def improved(board: Board, places: Ints) -> Ints:
    """Change the option of one operator for the better as long as one is, rounding aside."""
    rows = np.arange(len(places))
    best = np.inf
    while True:
        cost, forward, backward = (
            each - each[rows, places][:, None] + each[rows, places].sum()
            for each in (board.cost, board.forward, board.backward)
        )
        own = board.own[rows, places]
        largest = int(own.argmax())
        others = np.full(len(own), own[largest])
        others[largest] = np.delete(own, largest).max(initial=0.0)
        total = cost + np.maximum(forward - board.forward_slack, 0) + np.maximum(backward - board.backward_slack, 0)
        total += np.maximum(board.own, others[:, None])
        row, place = np.unravel_index(int(total.argmin()), total.shape)
        if not total[row, place] < best - board.margin:
            return places
        best = total[row, place]
        places = places.copy()
        places[row] = place


@dataclass(frozen=True)
class _Partial:
    """Combinations of the first operators: bound without own bytes, the three sums, own bytes, last place."""

    bound: Floats
    sums: Floats  # cost, forward, backward
    own: Floats
    place: Ints


def combinations(grid: Grid, board: Board, shares: tuple[float, float], budget: float) -> tuple[Floats, Ints] | None:
    """Cost and options of every combination within the budget, of twins in one order; None where they are too many."""
    values = board.cost + shares[0] * board.forward + shares[1] * board.backward
    places = values.argsort(axis=1, kind="stable")
    values = np.take_along_axis(values, places, axis=1)
    spread = np.where(np.isfinite(values), values, -np.inf).max(axis=1) - values[:, 0]
    # Operators with much to choose between first: a wrong turn is then seen early. Twins stay together.
    order = sorted(range(len(values)), key=lambda row: (-spread[row], grid.twins[row], row))
    follows = [False, *(grid.twins[a] == grid.twins[b] for a, b in pairwise(order))]
    terms = np.stack([board.cost, board.forward, board.backward])
    rests = np.cumsum(terms.min(axis=2)[:, order[::-1]], axis=1)[:, ::-1]
    rests = np.concatenate([rests, np.zeros((3, 1))], axis=1)
    slacks = np.array([[0.0], [board.forward_slack], [board.backward_slack]])
    start = float(values[:, 0].sum()) - shares[0] * board.forward_slack - shares[1] * board.backward_slack
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
        if len(parents) > MOST:
            return None
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
    amounts = grid.exact[rows, places]
    sums = np.concatenate([amounts[:, :, :9].sum(axis=1), amounts[:, :, 9].max(axis=1, keepdims=True)], axis=1)
    picks = grid.index[rows, places].tolist()
    return [(tuple(each), load_from(problem, unit, row)) for each, row in zip(picks, sums.tolist(), strict=True)]
