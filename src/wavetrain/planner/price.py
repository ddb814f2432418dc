"""The cheapest choices for one unit when every amount has a price, in integers and without listing all of them.

A choice costs the sum of its load times the weights. For a fixed mix the sum is separable over operators but for
three terms: the communication that shows beside forward and beside backward (a maximum of two sums), and the largest
operator's own bytes. `max(0, y) >= share * y` for a share of 0 to 1 makes a separable bound of the first two, and the
third is never less than what has been chosen so far; a depth-first search prunes with both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from math import prod
from operator import le
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wavetrain.planner.combine import (
    Board,
    Floats,
    Found,
    Grid,
    best_shares,
    board_of,
    bound_of,
    combinations,
    grid_of,
    improved,
    joined,
    load_of_each,
    loads_at,
)
from wavetrain.planner.problem import (
    MILLION,
    Load,
    Option,
    Picks,
    Problem,
    Unit,
    amounts_of,
    bundle,
    has_combinations,
    load_of,
)

GRID = 256  # shares of the bound are multiples of 1 / GRID: any are valid, finer ones prune little more
HANDFUL = 12  # points that are compared faster one by one
FEW = 200  # combinations that are listed at once rather than searched
SOME = 2_000  # that are listed for many units at once
MOST = 100_000  # that are listed at all; one after the other they need no room
AT_ONCE = 500_000  # combinations that there is room for

Loads = dict[Picks, Load]


class Weights(NamedTuple):
    """The price of every amount of a load; `hides` may be negative, all others are not."""

    time: int = 0
    reduction: int = 0
    hides: int = 0
    held: int = 0
    saved: int = 0
    left: int = 0
    running: int = 0


class Priced(NamedTuple):
    """One option: its separable cost, what it adds to the two differences, its own bytes, its index."""

    cost: int
    forward: int
    backward: int
    own: int
    which: int


@dataclass(frozen=True)
class Kind:
    """A unit made ready: choices worth listing are listed, dominated options of the rest are gone."""

    problem: Problem
    unit: Unit
    listed: Loads
    operators: tuple[tuple[tuple[int, Option], ...], ...]  # with their index; empty where all is listed
    twins: tuple[int, ...]  # for each operator the first one with the same options
    own: int  # the least that the largest operator's own can be
    grid: Grid | None  # the same operators as numbers
    views: dict[Weights, View] = field(default_factory=dict, compare=False)  # what was worked out at some prices
    leasts: dict[Weights, tuple[int, Picks]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class View:
    """The options of a kind at some prices: the shares of a good bound, the bound, and a likely combination."""

    grid: Grid
    board: Board
    shares: Floats
    bound: float
    margin: float
    likely: tuple[int, Picks]


@dataclass(frozen=True)
class Table:
    """The options of a unit, priced. What shows is `max(0, sum - slack)` for forward and backward alike."""

    operators: tuple[tuple[Priced, ...], ...]
    forward_slack: int
    backward_slack: int
    own: int  # price of a byte of the largest operator's own
    least_own: int
    twins: tuple[int, ...]


def kinds_of(problem: Problem) -> list[Kind]:
    """Every unit of the problem, made ready to be priced."""
    return [_kind(problem, unit) for unit in problem.units]


def _kind(problem: Problem, unit: Unit) -> Kind:
    loads = {bundle(index): load_of(problem, unit, bundle(index)) for index in range(len(unit.bundles))}
    operators = tuple(_worthwhile(options) for options in unit.operators)
    if has_combinations(unit) and prod(map(len, operators)) <= FEW:
        for picks in product(*([index for index, _ in options] for options in operators)):
            loads[picks] = load_of(problem, unit, picks)
        operators = ()
    own = max((min(option.own for _, option in options) for options in operators), default=0)
    firsts: dict[tuple[Option, ...], int] = {}
    twins = tuple(firsts.setdefault(options, index) for index, options in enumerate(unit.operators))
    return Kind(problem, unit, undominated(loads), operators, twins, own, grid_of(operators, twins))


def _worthwhile(options: tuple[Option, ...]) -> tuple[tuple[int, Option], ...]:
    points: dict[Picks, tuple[int, ...]] = {(index,): _merits(option) for index, option in enumerate(options)}
    return tuple((index, options[index]) for index in sorted(picks[0] for picks in _first(points)))


def _merits(option: Option) -> tuple[int, ...]:
    fixed, forward, backward, hides, *rest = amounts_of(option)
    return (fixed, forward, backward, -hides, *rest)


def undominated(loads: Loads) -> Loads:
    """The choices that no other equals or betters in everything: in a selection the other can take its place."""
    points = {picks: (t, r, -h, held, s, e, u) for picks, (t, r, h, held, s, e, u) in loads.items()}
    return {picks: loads[picks] for picks in _first(points)}


def _first(points: Mapping[Picks, tuple[int, ...]]) -> list[Picks]:
    ordered = sorted(points.items(), key=lambda item: (item[1], item[0]))
    if len(ordered) <= HANDFUL:
        kept: list[tuple[Picks, tuple[int, ...]]] = []
        for picks, point in ordered:
            if not any(all(map(le, other, point)) for _, other in kept):
                kept.append((picks, point))
        return [picks for picks, _ in kept]
    small = max(max(map(abs, point)) for _, point in ordered) < 2**63
    table = np.array([point for _, point in ordered], dtype=np.int64 if small else object)
    left = np.ones(len(ordered), dtype=np.bool_)
    for index in range(len(ordered) - 1):  # in this order none is bettered by a later one
        if left[index]:
            left[index + 1 :] &= ~(table[index] <= table[index + 1 :]).all(axis=1)
    return [picks for (picks, _), keep in zip(ordered, left.tolist(), strict=True) if keep]


def cost_of(load: Load, weights: Weights) -> int:
    """The load at these prices."""
    t, r, h, d, s, e, u = load
    a, b, c, f, g, i, j = weights
    return t * a + r * b + h * c + d * f + s * g + e * i + u * j


Wanted = Sequence[tuple[Kind, Weights]]


def cheapest(wanted: Wanted) -> list[tuple[int, Picks]]:
    """For each kind at its prices the least cost of the unit's choices, and the first choice found that has it."""
    missing = [(kind, weights) for kind, weights in wanted if weights not in kind.leasts]
    _prepare(missing)
    waiting = []
    for kind, weights in missing:
        view = kind.views.get(weights)
        kind.leasts[weights] = _cheapest_exactly(kind, weights) if view is None else _likely(kind, view, weights)
        if view is not None and view.bound - view.margin <= kind.leasts[weights][0] - 1:
            waiting.append((kind, weights, view))
    # Half of the way first: far fewer combinations are within it, and mostly the best one. Many of them one by one.
    for share, most in ((0.5, SOME), (1.0, SOME), (0.5, MOST), (1.0, MOST)):
        waiting = _cheaper(waiting, share, most)
    for kind, weights, _ in waiting:
        best = kind.leasts[weights]
        kind.leasts[weights] = min([best, *_search_all(kind, weights, best[0] - 1)])
    return [kind.leasts[weights] for kind, weights in wanted]


def _cheaper(waiting: list[tuple[Kind, Weights, View]], share: float, most: int) -> list[tuple[Kind, Weights, View]]:
    """Look for cheaper combinations up to this share of the way from the bound; who is left has to look further."""
    items: list[tuple[View, float]] = []
    for kind, weights, view in waiting:
        least = kind.leasts[weights][0] - 1
        items.append((view, least if share == 1 else view.bound + share * (least - view.bound)))
    left = []
    for item, (_, budget), found in zip(waiting, items, _combinations(items, most), strict=True):
        kind, weights, view = item
        least_cost = math.inf
        if found is not None and len(found[0]):
            costs, places = found
            least_cost = float(costs.min())
            near = places[costs <= least_cost + 2 * view.margin]
            kind.leasts[weights] = min([kind.leasts[weights], *_priced_at(kind, view.grid, weights, near)])
        # At the very edge of a budget, within the margin, one may be listed and a cheaper one not.
        if found is None or (share < 1 and least_cost > budget):
            left.append(item)
    return left


def _combinations(items: Sequence[tuple[View, float]], most: int) -> Iterator[Found]:
    """The combinations of every view within its budget: of neighbours of one shape at once, unless they are many."""
    size = AT_ONCE // most or 1
    for _, alike in groupby(items, key=lambda item: item[0].grid.index.shape):
        rest = list(alike)
        for first in range(0, len(rest), size):
            views, budgets = zip(*rest[first : first + size], strict=True)
            board, shares = joined([view.board for view in views]), np.stack([view.shares for view in views])
            yield from combinations([view.grid for view in views], board, shares, np.array(budgets, float), most)


def _cheapest_exactly(kind: Kind, weights: Weights) -> tuple[int, Picks]:
    best = _cheapest_listed(kind, weights)
    found = _search_all(kind, weights, best[0] - 1 if best else None) if kind.operators else []
    return min([*found, best] if best else found)


def _prepare(wanted: Wanted) -> None:
    """Work out what kinds are at these prices, those of one shape at once: far faster than one by one."""
    shapes: dict[tuple[int, ...], list[tuple[Kind, Grid, Weights]]] = {}
    for kind, weights in wanted:
        if kind.grid is not None and weights not in kind.views:
            shapes.setdefault(kind.grid.index.shape, []).append((kind, kind.grid, weights))
    for items in shapes.values():
        kinds, grids, weights_of = (list(column) for column in zip(*items, strict=True))
        units, problem = [kind.unit for kind in kinds], kinds[0].problem
        board = board_of(problem, units, grids, weights_of)
        shares = best_shares(board)
        bounds, places = bound_of(board, shares)
        found = load_of_each(problem, units, grids, improved(board, places))
        margins = board.margin.tolist()
        for index, (kind, grid, weights) in enumerate(items):
            picks, load = found[index]
            likely = cost_of(load, weights), picks
            kind.views[weights] = View(
                grid, board.of(index), shares[index], float(bounds[index]), margins[index], likely
            )


def _cheapest_listed(kind: Kind, weights: Weights) -> tuple[int, Picks] | None:
    return min(((cost_of(load, weights), picks) for picks, load in kind.listed.items()), default=None)


def _likely(kind: Kind, view: View, weights: Weights) -> tuple[int, Picks]:
    best = _cheapest_listed(kind, weights)
    return min(best, view.likely) if best else view.likely


def _priced_at(kind: Kind, grid: Grid, weights: Weights, places: npt.NDArray[np.intp]) -> list[tuple[int, Picks]]:
    return [(cost_of(load, weights), picks) for picks, load in loads_at(kind.problem, kind.unit, grid, places)]


def _search_all(kind: Kind, weights: Weights, budget: int | None) -> list[tuple[int, Picks]]:
    """Ever better combinations, the last one the best, if any is within the budget."""
    table = _table(kind, weights)
    shares, _, picks = _best_shares(table)
    found = [(cost_of(load_of(kind.problem, kind.unit, picks), weights), picks)]
    budget = found[0][0] if budget is None else min(budget, found[0][0])
    return found + _search(table, shares, budget, narrowing=True)


def roughly_cheapest(wanted: Wanted) -> list[tuple[int, Picks]]:
    """Choices that are likely cheap, without a search, and costs that no choice is below."""
    _prepare(wanted)
    found = []
    for kind, weights in wanted:
        view = kind.views.get(weights)
        cost, picks = cheapest([(kind, weights)])[0] if view is None else _likely(kind, view, weights)
        found.append((cost if view is None else min(cost, math.floor(view.bound - view.margin)), picks))
    return found


def within(wanted: Sequence[tuple[Kind, Weights, int]]) -> list[Loads]:
    """For each kind at its prices every choice that costs no more than its budget, of those that are worth it."""
    _prepare([(kind, weights) for kind, weights, _ in wanted])
    seen = [(kind.views[weights], budget) for kind, weights, budget in wanted if weights in kind.views]
    combined = _combinations(seen, MOST)
    found = []
    for kind, weights, budget in wanted:
        loads = {picks: load for picks, load in kind.listed.items() if cost_of(load, weights) <= budget}
        view = kind.views.get(weights)
        listed = None if view is None else next(combined)
        if view is not None and listed is not None:
            each = loads_at(kind.problem, kind.unit, view.grid, listed[1])
            loads |= {picks: load for picks, load in each if cost_of(load, weights) <= budget}
        elif kind.operators:
            table = _table(kind, weights)
            every = [picks for _, picks in _search(table, _best_shares(table)[0], budget, narrowing=False)]
            loads |= {picks: load_of(kind.problem, kind.unit, picks) for picks in every}
        found.append(loads)
    return found


def _table(kind: Kind, weights: Weights) -> Table:
    problem, unit = kind.problem, kind.unit
    per_microbatch = weights.time * problem.microbatches
    shown, hidden = per_microbatch * problem.forward_share, per_microbatch * (MILLION - problem.forward_share)
    shown_back = per_microbatch * problem.backward_share
    hidden_back = per_microbatch * (MILLION - problem.backward_share)
    fixed = weights.time * MILLION
    _, reduction, hides, held, saved, left, running = weights

    def priced(option: Option, index: int) -> Priced:
        cost = option.fixed * fixed + option.forward * shown + option.backward * shown_back
        cost += option.reduction * reduction + option.hides * hides + option.held * held + option.saved * saved
        cost += option.left * left + option.beside * running
        return Priced(cost, option.forward * hidden, (option.backward - option.hides) * hidden_back, option.own, index)

    operators = tuple(tuple(priced(option, index) for index, option in options) for options in kind.operators)
    return Table(operators, unit.forward * hidden, unit.backward * hidden_back, running, kind.own, kind.twins)


Shares = tuple[int, int]


def _bound(table: Table, shares: Shares) -> tuple[int, list[Priced]]:
    """GRID times a lower bound of the cost of every combination, and the options that attain it."""
    forward, backward = shares
    total = -forward * table.forward_slack - backward * table.backward_slack
    chosen = []
    for options in table.operators:
        values = [GRID * cost + forward * ahead + backward * behind for cost, ahead, behind, _, _ in options]
        least = min(values)
        total += least
        chosen.append(options[values.index(least)])
    return total + GRID * table.own * table.least_own, chosen


def _best_shares(table: Table) -> tuple[Shares, int, Picks]:
    """Shares with a high bound: first the one is moved to where the bound is highest, then the other, twice around."""
    shares, (bound, chosen) = (0, 0), _bound(table, (0, 0))
    for axis in (0, 1, 0, 1):
        if _settled(table, shares, chosen):
            break
        shares, bound, chosen = _climbed(table, shares, axis)
    return shares, bound, tuple(option.which for option in chosen)


def _climbed(table: Table, shares: Shares, axis: int) -> tuple[Shares, int, list[Priced]]:
    """The best of one share with the other as it is: the bound is concave, its tangents meet above the highest."""

    def at(share: int) -> tuple[int, int, Shares, list[Priced]]:
        moved = (share, shares[1]) if axis == 0 else (shares[0], share)
        value, chosen = _bound(table, moved)
        return value, _slope(table, chosen, axis), moved, chosen

    low, high, left, right = 0, GRID, at(0), at(GRID)
    while left[1] > 0 > right[1] and high - low > 1:
        meet = low + (right[0] - left[0] + (low - high) * right[1]) // (left[1] - right[1])
        middle = min(max(meet, low + 1), high - 1)
        found = at(middle)
        if found[1] > 0:
            low, left = middle, found
        else:
            high, right = middle, found
    value, _, moved, chosen = max(left, right, key=lambda each: each[0])
    return moved, value, chosen


def _settled(table: Table, shares: Shares, chosen: list[Priced]) -> bool:
    """Whether the chosen options show that no other shares bound better: the bound is concave in both."""
    slopes = _slope(table, chosen, 0), _slope(table, chosen, 1)
    return all(
        (share == 0 and slope <= 0) or (share == GRID and slope >= 0)
        for share, slope in zip(shares, slopes, strict=True)
    )


def _slope(table: Table, chosen: list[Priced], axis: int) -> int:
    if axis == 0:
        return sum(option.forward for option in chosen) - table.forward_slack
    return sum(option.backward for option in chosen) - table.backward_slack


def _search(table: Table, shares: Shares, budget: int, *, narrowing: bool) -> list[tuple[int, Picks]]:
    """Every combination within the budget, of twins in one order; narrowing, each one found lowers it."""
    forward, backward = shares
    # Operators with much to choose between first: a wrong turn is then seen early. Twins stay together.
    rows = [
        sorted((GRID * o.cost + forward * o.forward + backward * o.backward, o) for o in options)
        for options in table.operators
    ]
    twins = table.twins
    order = sorted(range(len(rows)), key=lambda index: (rows[index][0][0] - rows[index][-1][0], twins[index], index))
    start = -forward * table.forward_slack - backward * table.backward_slack + sum(row[0][0] for row in rows)
    descent = _Descent(table, [rows[index] for index in order], order, budget, narrowing=narrowing)
    descent.descend(0, start, (0, 0, 0, table.least_own), 0)
    return descent.found


class _Descent:
    """The state of one depth-first search: what is left to spend, and what has been found."""

    def __init__(
        self, table: Table, rows: list[list[tuple[int, Priced]]], order: list[int], budget: int, *, narrowing: bool
    ) -> None:
        self.table, self.rows, self.order = table, rows, order
        self.budget, self.narrowing = budget, narrowing
        self.found: list[tuple[int, Picks]] = []
        self.path: list[Priced] = []
        # Of twins the later one chooses no earlier in its row: the same choices the other way round are the same load.
        self.follows = [False, *(table.twins[a] == table.twins[b] for a, b in pairwise(order))]
        # The least that what follows adds to each sum: a bound of the true cost beside the separable one.
        self.least = [(0, 0, 0)]
        for row in reversed(rows):
            options = [option for _, option in row]
            least = (min(o.cost for o in options), min(o.forward for o in options), min(o.backward for o in options))
            cost, ahead, behind = self.least[-1]
            self.least.append((cost + least[0], ahead + least[1], behind + least[2]))
        self.least.reverse()

    def descend(self, depth: int, bound: int, sums: tuple[int, int, int, int], before: int) -> None:
        """`bound` is GRID times the separable bound of all below, without own bytes; `before` what was chosen last."""
        if depth == len(self.rows):
            self._keep(sums)
            return
        cost, ahead, behind, own = sums
        row, price = self.rows[depth], self.table.own
        first = row[0][0]
        for place in range(before if self.follows[depth] else 0, len(row)):
            value, option = row[place]
            below = bound + value - first
            if below + GRID * price * own > GRID * self.budget:
                break
            largest = max(own, option.own)
            if below + GRID * price * largest > GRID * self.budget:
                continue
            after = (cost + option.cost, ahead + option.forward, behind + option.backward, largest)
            if self._true_bound(depth + 1, after) <= self.budget:
                self.path.append(option)
                self.descend(depth + 1, below, after, place)
                self.path.pop()

    def _true_bound(self, depth: int, sums: tuple[int, int, int, int]) -> int:
        cost, ahead, behind, own = sums
        more, further, later = self.least[depth]
        shown = max(0, ahead + further - self.table.forward_slack) + max(0, behind + later - self.table.backward_slack)
        return cost + more + shown + self.table.own * own

    def _keep(self, sums: tuple[int, int, int, int]) -> None:
        cost = self._true_bound(len(self.rows), sums)
        picks = [0] * len(self.order)
        for index, option in zip(self.order, self.path, strict=True):
            picks[index] = option.which
        self.found.append((cost, tuple(picks)))
        if self.narrowing:
            self.budget = cost - 1
