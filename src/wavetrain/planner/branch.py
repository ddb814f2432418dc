"""Cases split until each is closed: the search behind `choose`, and the tree that proves it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from wavetrain.planner.leaves import Case, Choices, Multipliers, Row, allowed, parts_of, segments, sift, struck, weigh
from wavetrain.planner.master import ROUGH, Answer, Columns, Copy, Floats, Frame, exact_prices, solve, solve_whole
from wavetrain.planner.price import Kind, Loads, Weights, cost_of
from wavetrain.planner.problem import Load, Picks, Problem, Selection, arranged, load_of, rank_of, rises, time_of

MOST_ROUNDS = 60  # programs for one case, each with one more copy looked at


@dataclass
class Search:
    """What is known so far: the best selection that fits, and the copies whose memory has mattered."""

    problem: Problem
    kinds: list[Kind]
    deadline: float = math.inf
    best: Selection | None = None
    best_time: int | None = None
    memory: list[Copy] = field(default_factory=list)
    known: dict[tuple[int, Picks], Load] = field(default_factory=dict)

    def offer(self, selection: Selection) -> bool:
        """Keep the selection if it fits and is better; a copy that does not fit is looked at from now on."""
        loads = self._loads(selection)
        most, copy = worst_copy(selection, loads)
        if most > self.problem.limit:
            self.look_at([copy])
            return False
        taken = time_of(self.problem, loads)
        if self.best_time is None or taken < self.best_time:
            self.best, self.best_time = selection, taken
        return True

    def _loads(self, selection: Selection) -> list[tuple[int, Load]]:
        for index, runs in enumerate(selection):
            for run in runs:
                if (index, run.picks) not in self.known:
                    self.known[index, run.picks] = load_of(self.problem, self.problem.units[index], run.picks)
        return [(run.count, self.known[index, run.picks]) for index, runs in enumerate(selection) for run in runs]

    def look_at(self, copies: Iterable[Copy]) -> bool:
        """Whether any of the copies is new."""
        new = [copy for copy in dict.fromkeys(copies) if copy not in self.memory]
        self.memory = sorted([*self.memory, *new])
        return bool(new)

    @property
    def late(self) -> bool:
        return monotonic() > self.deadline


def worst_copy(selection: Selection, loads: list[tuple[int, Load]]) -> tuple[int, Copy]:
    """The peak of a selection with these loads, and the copy at which it is."""
    spans, level = [], sum(count * (load.held + load.left) for count, load in loads)
    for index, runs in enumerate(selection):
        first = 0
        for run in runs:
            spans.append((index, first, first + run.count - 1))
            first += run.count
    above, at_end, which = max(((above, at_end, index) for index, at_end, above in rises(loads)), default=(0, True, 0))
    if not spans:
        return level, (0, 0)
    unit, first, last = spans[which]
    return level + above, (unit, last if at_end else first)


def rounded(problem: Problem, columns: Columns, amounts: Floats) -> Selection:
    """Whole copies near the amounts: every choice rounded down, the rest to those that lost most."""
    totals: list[dict[Picks, float]] = [{} for _ in problem.units]
    for owner, picks, amount in zip(columns.owner.tolist(), columns.picks, amounts.tolist(), strict=True):
        if amount > ROUGH:
            unit = totals[columns.segments[owner].unit]
            unit[picks] = unit.get(picks, 0.0) + amount
    selection = []
    for unit, total in zip(problem.units, totals, strict=True):
        whole = {picks: int(amount + 1e-6) for picks, amount in total.items()}
        missing = unit.count - sum(whole.values())
        for picks in sorted(total, key=lambda each: whole[each] - total[each])[: max(0, missing)]:
            whole[picks] += 1
        selection.append(arranged(problem, unit, whole.items()))
    return tuple(selection)


def crowded(problem: Problem, answer: Answer) -> list[Copy]:
    """Copies above the limit in a mix of choices, the worst of all and the worst near it left out."""
    columns, amounts = answer.columns, answer.amounts
    size = len(columns.segments)
    loads = np.array(columns.loads, dtype=np.float64)
    held, saved, left, running = (
        np.bincount(columns.owner, weights=amounts * loads[:, index], minlength=size) for index in (3, 4, 5, 6)
    )
    counts = np.array([part.count for part in columns.segments], dtype=np.float64)
    step = saved - left
    before = held.sum() + left.sum() + np.concatenate([[0.0], np.cumsum(step)[:-1]])
    ends = before + step + running / counts
    starts = before + step / counts + running / counts
    over = np.maximum(ends, starts) - problem.limit * (1 + ROUGH) - 1e-6
    found = []
    for index in np.argsort(-over, kind="stable")[:2].tolist():
        if over[index] > 0:
            part = columns.segments[index]
            found.append((part.unit, part.last if ends[index] >= starts[index] else part.first))
    return found


def polish(search: Search, choices: Choices, rows: tuple[Row, ...] = ()) -> None:
    """Look for a better selection among the choices with HiGHS's own branch and bound."""
    for _ in range(8):
        frame = Frame(search.problem, choices, rows, tuple(search.memory))
        answer = solve_whole(frame, time_limit_s=search.deadline - monotonic())
        if answer is None or search.offer(rounded(search.problem, *answer)):
            return


@dataclass
class Tree:
    """Cases in the order of a certificate, and the bound of those that were left open."""

    cases: list[Case] = field(default_factory=list)
    open_bounds: list[int | None] = field(default_factory=list)


def grow(search: Search, choices: Choices) -> Tree:
    """Split and close cases until none is open, or it is late, or one fits where none was known."""
    tree = Tree()
    waiting: list[tuple[Choices, tuple[Row, ...], int | None]] = [(choices, (), None)]
    to_fit = search.best is None
    while waiting and not (to_fit and search.best is not None):
        current, rows, above = waiting.pop()
        # When it is late, what the case above has proven is all that is known.
        case, left = (Case(()), current) if search.late else _close(search, current, rows)
        tree.cases.append(case)
        if left is None:
            continue
        bound = above
        if case.sieves and (case.split is None or math.isfinite(search.deadline)):
            bound = _open_bound(search.problem, left, rows, case.sieves) or above
        if case.split is None:
            tree.open_bounds.append(bound)
        else:
            fewer, more = parts_of(search.problem, left, case.split)
            waiting += [(left, (*rows, more), bound), (left, (*rows, fewer), bound)]
    return tree


def _open_bound(
    problem: Problem, choices: Choices, rows: tuple[Row, ...], sieves: tuple[Multipliers, ...]
) -> int | None:
    """The least time that the multipliers leave possible in a case that is not closed."""
    return max((-(-weigh(problem, choices, rows, by).total // by.time) for by in sieves if by.time), default=None)


def _close(search: Search, choices: Choices, rows: tuple[Row, ...]) -> tuple[Case, Choices | None]:
    """The case with multipliers that close it, or strike out what they can, and how to split the rest."""
    sieves: list[Multipliers] = []
    for _ in range(MOST_ROUNDS):
        frame, answer = _solved(Frame(search.problem, choices, rows, tuple(search.memory), fit=search.best is None))
        search.offer(rounded(search.problem, answer.columns, answer.amounts))
        left, near = _use(search, choices, rows, answer.prices, sieves)
        if left is None or search.late:
            return Case(tuple(sieves)), left
        choices = left
        search.look_at(crowded(search.problem, answer))
        if frame.memory == tuple(search.memory):
            break
    exact = exact_prices(frame, answer) if near or frame.fit else None
    if exact is not None:
        left, _ = _use(search, choices, rows, exact, sieves)
        if left is None:
            return Case(tuple(sieves)), None
        choices = left
    return Case(tuple(sieves), _split(search.problem, choices, rows, answer)), choices


def _solved(frame: Frame) -> tuple[Frame, Answer]:
    """The frame's program, or where nothing fits the one of how much is missing."""
    answer = solve(frame)
    if answer is None:
        frame = replace(frame, fit=True)
        answer = solve(frame)
    assert answer is not None, "what is missing has a least"
    return frame, answer


def _use(
    search: Search, choices: Choices, rows: tuple[Row, ...], by: Multipliers, sieves: list[Multipliers]
) -> tuple[Choices | None, bool]:
    """What the multipliers leave of the case, and whether rounding alone may keep them from closing it."""
    weighed = weigh(search.problem, choices, rows, by)
    most = allowed(by, search.best_time)
    left = struck(choices, weighed, most)
    if left is None or sum(map(len, left)) < sum(map(len, choices)) or (by.time and not sieves):
        sieves.append(by)
    return left, (most - weighed.total) * 10**7 < most


Amounts = dict[tuple[int, int, int], dict[Picks, float]]  # by unit, first and last copy


def _split(problem: Problem, choices: Choices, rows: tuple[Row, ...], answer: Answer) -> Row | None:
    """The count nearest to a half, else one that puts the copies in order, else any row that still splits.

    Counted are the choices with at most so much memory, at the prices of the program: to forbid one choice alone
    would leave its neighbours to do the same.
    """
    columns = answer.columns
    whole: Amounts = {}
    parts: Amounts = {}
    for owner, picks, amount in zip(columns.owner.tolist(), columns.picks, answer.amounts.tolist(), strict=True):
        part = columns.segments[owner]
        total = whole.setdefault((part.unit, 0, problem.units[part.unit].count - 1), {})
        total[picks] = total.get(picks, 0.0) + amount
        parts.setdefault((part.unit, part.first, part.last), {})[picks] = amount
    weights = {part.unit: part.weights for part in segments(problem, answer.prices, rows)}
    best, found = 1e-6, None
    for (unit, first, last), counts in whole.items():
        for some, value in _cumulated(counts, choices[unit], weights[unit]):
            if min(value % 1, 1 - value % 1) > best:
                best = min(value % 1, 1 - value % 1)
                found = Row(unit, first, last, some, math.floor(value))
    torn = {key[0] for key, counts in parts.items() if any(1e-6 < value % 1 < 1 - 1e-6 for value in counts.values())}
    return found or _order_split(choices, rows, whole, torn) or _any_split(problem, choices, rows, whole)


def _order_split(choices: Choices, rows: tuple[Row, ...], amounts: Amounts, torn: set[int]) -> Row | None:
    """A row that tells which copies make the choices that come first; of units with a torn copy before others."""
    for unit, first, last in sorted(amounts, key=lambda key: (key[0] not in torn, key)):
        loads = choices[unit]
        ranked = sorted(loads, key=lambda picks: rank_of(picks, loads[picks]))
        for size in range(1, len(ranked)):
            some = tuple(ranked[:size])
            number = round(sum(amounts[unit, first, last].get(picks, 0.0) for picks in some))
            told = {
                (row.first, row.last, row.at_least)
                for row in rows
                if row.unit == unit and set(row.choices) & set(loads) == set(some)
            }
            if number > 0 and (0, number - 1, True) not in told:
                return Row(unit, first, last, some, number - 1)
            if number <= last and (number, last, False) not in told:
                return Row(unit, first, last, some, number)
    return None


def _cumulated(counts: dict[Picks, float], loads: Loads, weights: Weights) -> Iterable[tuple[tuple[Picks, ...], float]]:
    """Growing sets of choices, those that hold least first, and how often they are chosen together."""
    if all(abs(value - round(value)) < 1e-6 for value in counts.values()):
        return
    memory = weights._replace(time=0, reduction=0, hides=0)
    held = {picks: cost_of(load, memory) for picks, load in loads.items()}
    order = sorted(held, key=lambda picks: (held[picks], picks))
    total = 0.0
    for size, picks in enumerate(order, 1):
        total += counts.get(picks, 0.0)
        if counts.get(picks, 0.0) > 1e-6:
            yield tuple(order[:size]), total


def _any_split(problem: Problem, choices: Choices, rows: tuple[Row, ...], amounts: Amounts) -> Row | None:
    """Where floats see no difference any more: a choice whose count the rows leave open, else a single copy's."""
    for (unit, first, last), counts in amounts.items():
        for picks, amount in counts.items() if len(choices[unit]) > 1 else ():
            same = [row for row in rows if replace(row, bound=0, at_least=False) == Row(unit, first, last, (picks,), 0)]
            low = max((row.bound for row in same if row.at_least), default=0)
            high = min((row.bound for row in same if not row.at_least), default=last - first + 1)
            if low < high:
                return Row(unit, first, last, (picks,), min(max(round(amount) - 1, low), high - 1))
    for unit, loads in enumerate(choices):
        for copy in range(problem.units[unit].count if len(loads) > 1 else 0):
            for picks in list(loads)[:-1]:
                row = Row(unit, copy, copy, (picks,), 0)
                if row not in rows and replace(row, bound=1, at_least=True) not in rows:
                    return row
    return None


def trimmed(problem: Problem, cases: Iterable[Case], start: Choices, lower: int | None) -> tuple[Case, ...]:
    """The same tree for a bound reached later: cases that now close early lose their parts."""
    kept: list[Case] = []
    waiting: list[tuple[Choices, tuple[Row, ...]] | None] = [(start, ())]
    for case in cases:
        state = waiting.pop()
        if state is None:  # a part of a case that is closed by now
            waiting += [None, None] if case.split else []
            continue
        choices, rows = state
        count, left = _first_closing(problem, case, choices, rows, lower)
        if left is None:
            kept.append(Case(case.sieves[:count]))
            waiting += [None, None] if case.split else []
            continue
        kept.append(case)
        if case.split is not None:
            fewer, more = parts_of(problem, left, case.split)
            waiting += [(left, (*rows, more)), (left, (*rows, fewer))]
    return tuple(kept)


def _first_closing(
    problem: Problem, case: Case, choices: Choices, rows: tuple[Row, ...], lower: int | None
) -> tuple[int, Choices | None]:
    for count, by in enumerate(case.sieves, 1):
        left = sift(problem, choices, rows, by, lower)
        if left is None:
            return count, None
        choices = left
    return len(case.sieves), choices
