"""An exact check that no selection is better: multipliers, and a tree of cases that leave none out.

Multipliers turn "takes less than the bound, fits, obeys the rows of this case" into one inequality: the time that is
allowed, the limits and the rows on the one side; on the other a sum of one term per copy of a unit, each at least the
least of its choices. Where even the leasts exceed what is allowed, the case holds no better selection; a choice that
exceeds it with the least of all others can be struck out. All in integers: the multiplier of time is the common
denominator of the rest, and zero where the memory alone excludes a case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from wavetrain.planner.price import Kind, Loads, Weights, cheapest, cost_of, kinds_of, undominated, within
from wavetrain.planner.problem import (
    MILLION,
    Load,
    Picks,
    Problem,
    Run,
    Selection,
    digest,
    options_of,
    peak,
    rank_of,
    time,
)
from wavetrain.planner.sums import any_within


@dataclass(frozen=True)
class Row:
    """How many of the copies first..last of a unit make one of these choices: at most, or at least, `bound`."""

    unit: int
    first: int
    last: int
    choices: tuple[Picks, ...]
    bound: int
    at_least: bool = False


@dataclass(frozen=True)
class Multipliers:
    """One inequality out of many: what each counts. None is negative."""

    time: int
    # Of `time`, how much counts the reduction as longer than the backward; the rest counts it as hidden.
    longer: int = 0
    memory: tuple[tuple[int, int, int], ...] = ()  # unit, copy, multiplier of the memory while that copy runs
    rows: tuple[int, ...] = ()  # for each row of the case


@dataclass(frozen=True)
class Case:
    """A part of all selections: choices are struck out by multipliers, the rest is closed by them or split in two."""

    sieves: tuple[Multipliers, ...]
    split: Row | None = None  # at most `bound` in the first part, more in the second
    core: bool = False  # what is left is gone through in full, at the prices of the last multipliers


@dataclass(frozen=True)
class Certificate:
    """A selection, and that none takes less than `lower`; without a `lower`, that none fits at all."""

    problem: str  # digest of its numbers
    selection: Selection | None
    time: int | None
    peak: int | None
    lower: int | None
    cases: tuple[Case, ...]  # a tree: every case before its two parts, the first part with all of its own first


@dataclass(frozen=True)
class Segment:
    """Neighbouring copies of a unit for which every choice has the same price."""

    unit: int
    first: int
    last: int
    weights: Weights
    extra: tuple[tuple[Picks, int], ...] = ()  # from rows that count a choice

    @property
    def count(self) -> int:
        return self.last - self.first + 1


FORMAT = "wavetrain-choice-1"
Json = dict[str, Any]
Choices = list[Loads]  # for every unit the choices not struck out; at first all of them, unlisted


def constant(problem: Problem, by: Multipliers, rows: tuple[Row, ...]) -> int:
    """The part of the inequality that no choice changes."""
    compute = sum(unit.count * unit.backward for unit in problem.units)
    total = by.time * MILLION * problem.fixed - by.longer * (MILLION - problem.reduction_share) * compute
    total -= problem.limit * sum(amount for *_, amount in by.memory)
    for row, amount in zip(rows, by.rows, strict=True):
        total += amount * (row.bound if row.at_least else -row.bound)
    return total


def segments(problem: Problem, by: Multipliers, rows: tuple[Row, ...]) -> list[Segment]:
    """The copies of all units, cut where a price changes."""
    share = problem.reduction_share
    reduction = (by.time - by.longer) * share + by.longer * MILLION
    hides = -by.longer * (MILLION - share)
    total = sum(amount for *_, amount in by.memory)
    memory: dict[int, dict[int, int]] = {}
    for owner, copy, amount in by.memory:
        at = memory.setdefault(owner, {})
        at[copy] = at.get(copy, 0) + amount
    counted: dict[int, list[tuple[Row, int]]] = {}
    for row, amount in zip(rows, by.rows, strict=True):
        if amount:
            counted.setdefault(row.unit, []).append((row, amount if not row.at_least else -amount))
    found, passed = [], 0
    for index, unit in enumerate(problem.units):
        at, here = memory.get(index, {}), counted.get(index, [])
        cuts = {0, unit.count} | {cut for copy in at for cut in (copy, copy + 1)}
        cuts |= {cut for row, _ in here for cut in (row.first, row.last + 1)}
        ordered = sorted(cuts)
        for first, end in pairwise(ordered):
            running = at.get(first, 0)
            weights = Weights(by.time, reduction, hides, total, total - passed, passed, running)
            found.append(Segment(index, first, end - 1, weights, _extra(here, first)))
            passed += running
    return found


def _extra(counted: list[tuple[Row, int]], copy: int) -> tuple[tuple[Picks, int], ...]:
    extra: dict[Picks, int] = {}
    for row, amount in counted:
        if row.first <= copy <= row.last:
            for picks in row.choices:
                extra[picks] = extra.get(picks, 0) + amount
    return tuple(extra.items())


def costs(segment: Segment, loads: Loads) -> dict[Picks, int]:
    """The price of every choice that is left for a copy of the segment."""
    priced = {picks: cost_of(load, segment.weights) for picks, load in loads.items()}
    for picks, amount in segment.extra:
        if picks in priced:
            priced[picks] += amount
    return priced


def list_choices(kinds: list[Kind], problem: Problem, by: Multipliers, lower: int | None) -> Choices | None:
    """The choices that a selection below `lower` may make; None where there is no such selection."""
    parts = segments(problem, by, ())
    leasts = leasts_of(kinds, parts)
    slack = allowed(by, lower) - constant(problem, by, ())
    slack -= sum(part.count * leasts[part.unit, part.weights] for part in parts)
    if slack < 0:
        return None
    choices: Choices = [{} for _ in problem.units]
    near = within([(kinds[index], weights, least + slack) for (index, weights), least in leasts.items()])
    for (index, _), loads in zip(leasts, near, strict=True):
        choices[index] |= loads
    return [undominated(loads) for loads in choices]


def leasts_of(kinds: list[Kind], parts: list[Segment]) -> dict[tuple[int, Weights], int]:
    """The least price of a copy, for every unit and set of prices it has."""
    keys = list(dict.fromkeys((part.unit, part.weights) for part in parts))
    found = cheapest([(kinds[unit], weights) for unit, weights in keys])
    return {key: least for key, (least, _) in zip(keys, found, strict=True)}


def allowed(by: Multipliers, lower: int | None) -> int:
    """The most that the sum can be for a selection below `lower`, or for one that fits."""
    return 0 if lower is None else by.time * (lower - 1)


@dataclass(frozen=True)
class Weighed:
    """The choices of a case at the prices of multipliers, and the least that all of them add up to."""

    parts: list[Segment]
    prices: list[dict[Picks, int]]
    leasts: list[int]
    total: int


def weigh(problem: Problem, choices: Choices, rows: tuple[Row, ...], by: Multipliers) -> Weighed:
    """The inequality of the multipliers over what is left of a case."""
    parts = segments(problem, by, rows)
    prices = [costs(part, choices[part.unit]) for part in parts]
    leasts = [min(each.values()) for each in prices]
    least = sum(part.count * least for part, least in zip(parts, leasts, strict=True))
    return Weighed(parts, prices, leasts, constant(problem, by, rows) + least)


def struck(choices: Choices, weighed: Weighed, most: int) -> Choices | None:
    """The choices with which the sum can be at most so much; None where there is no way."""
    slack = most - weighed.total
    if slack < 0:
        return None
    kept: list[set[Picks]] = [set() for _ in choices]
    for part, prices, least in zip(weighed.parts, weighed.prices, weighed.leasts, strict=True):
        kept[part.unit].update(picks for picks, price in prices.items() if price - least <= slack)
    return [
        loads if len(loads) == len(left) else {picks: load for picks, load in loads.items() if picks in left}
        for loads, left in zip(choices, kept, strict=True)
    ]


def sift(
    problem: Problem, choices: Choices, rows: tuple[Row, ...], by: Multipliers, lower: int | None
) -> Choices | None:
    """The choices not struck out by the multipliers; None where they close the case."""
    return struck(choices, weigh(problem, choices, rows, by), allowed(by, lower))


def limits_of_core(problem: Problem, by: Multipliers, lower: int) -> list[int]:
    """The most that each number of a core may be, in the order of `amounts_of_core`, without what no choice changes."""
    compute = sum(unit.count * unit.backward for unit in problem.units)
    most = lower - 1 - MILLION * problem.fixed
    times = [most] * (by.longer < by.time) + [most + (MILLION - problem.reduction_share) * compute] * (by.longer > 0)
    return times + [problem.limit for _ in by.memory]


def amounts_of_core(problem: Problem, by: Multipliers, part: Segment, load: Load) -> tuple[int, ...]:
    """What a copy of the segment adds to each number of a core: the times and the memories that the multipliers count.

    The time is the larger of two sums, with the reduction as hidden and as longer; one that is not counted is left out.
    """
    share = problem.reduction_share
    times = []
    if by.longer < by.time:
        times.append(load.time + share * load.reduction)
    if by.longer > 0:
        times.append(load.time + MILLION * load.reduction - (MILLION - share) * load.hides)
    at, base = (part.unit, part.first), load.held
    memory = (
        base + (load.saved if at <= (unit, copy) else load.left) + (load.running if at == (unit, copy) else 0)
        for unit, copy, _ in by.memory
    )
    return (*times, *memory)


def holds_better(problem: Problem, choices: Choices, by: Multipliers, lower: int) -> bool:
    """Whether the choices make a selection below `lower`, as far as the multipliers count time and memory."""
    weighed = weigh(problem, choices, (), by)
    slack = allowed(by, lower) - weighed.total
    menus = [
        sorted(
            (price - least, amounts_of_core(problem, by, part, choices[part.unit][picks]))
            for picks, price in prices.items()
            if price - least <= slack
        )
        for part, prices, least in zip(weighed.parts, weighed.prices, weighed.leasts, strict=True)
    ]
    counts = [part.count for part in weighed.parts]
    return any_within(list(zip(counts, menus, strict=True)), limits_of_core(problem, by, lower), slack)


def verify(problem: Problem, certificate: Certificate) -> list[str]:
    """Why the certificate proves nothing about the problem; empty where it proves what it says."""
    if certificate.problem != digest(problem):
        return ["it was made for another problem"]
    try:
        reasons = _selection_reasons(problem, certificate)
    except (IndexError, ValueError) as error:
        return [f"its selection is none of the problem: {error}"]
    return reasons or _tree_reasons(problem, certificate)


def _selection_reasons(problem: Problem, certificate: Certificate) -> list[str]:
    selection, lower = certificate.selection, certificate.lower
    if selection is None:
        stated = certificate.time is not None or certificate.peak is not None
        return ["it states time or peak of no selection"] if stated else []
    reasons = []
    if certificate.time != time(problem, selection):
        reasons.append("the selection takes another time than stated")
    if certificate.peak != peak(problem, selection):
        reasons.append("the selection has another peak than stated")
    if peak(problem, selection) > problem.limit:
        reasons.append("the selection does not fit")
    if lower is None or lower > time(problem, selection):
        reasons.append("the bound is above the selection's time")
    return reasons


def _tree_reasons(problem: Problem, certificate: Certificate) -> list[str]:
    cases, lower = certificate.cases, certificate.lower
    if lower is not None and lower <= MILLION * problem.fixed:
        return []  # no time is below what is fixed
    if not cases or not cases[0].sieves:
        return ["the first case has no multipliers"]
    waiting: list[tuple[Choices | None, tuple[Row, ...]]] = [(None, ())]
    for case in cases:
        if not waiting:
            return ["there are more cases than parts"]
        choices, rows = waiting.pop()
        reasons, left = _case_reasons(problem, case, choices, rows, lower)
        if reasons:
            return reasons
        if left is not None and case.split is not None:
            fewer, more = parts_of(problem, left, case.split)
            waiting += [(left, (*rows, more)), (left, (*rows, fewer))]
    return ["a part of a case is missing"] if waiting else []


def _case_reasons(
    problem: Problem, case: Case, choices: Choices | None, rows: tuple[Row, ...], lower: int | None
) -> tuple[list[str], Choices | None]:
    reasons = _shape_reasons(problem, case, rows, lower)
    if reasons:
        return reasons, None
    left = sifted(problem, case.sieves, choices, rows, lower)
    if left is None and case.split:
        return ["a closed case is split"], None
    if left is not None and case.core:
        assert lower is not None
        better = holds_better(problem, left, case.sieves[-1], lower)
        return ["a core holds a better selection"] if better else [], None
    if left is not None and case.split is None:
        return ["a case is neither closed nor split"], None
    return [], left


def parts_of(problem: Problem, choices: Choices, split: Row) -> tuple[Row, Row]:
    """The rows of a split's two parts: at most so many copies make these choices, or more.

    Only selections with the copies of a unit in their best order need be looked at. Where the choices are those that
    come first in it, their number tells which copies make them: that is the stronger row.
    """
    unit, loads = problem.units[split.unit], choices[split.unit]
    more = replace(split, bound=split.bound + 1, at_least=True)
    listed = set(split.choices) & set(loads)
    ranked = sorted(loads, key=lambda picks: rank_of(picks, loads[picks]))
    if (split.first, split.last) != (0, unit.count - 1) or listed != set(ranked[: len(listed)]):
        return split, more
    return replace(split, first=split.bound, bound=0), replace(more, last=split.bound)


def sifted(
    problem: Problem,
    sieves: tuple[Multipliers, ...],
    choices: Choices | None,
    rows: tuple[Row, ...],
    lower: int | None,
) -> Choices | None:
    """The choices left by all sieves, one after the other; None where the case is closed."""
    for by in sieves:
        choices = (
            list_choices(kinds_of(problem), problem, by, lower)
            if choices is None
            else sift(problem, choices, rows, by, lower)
        )
        if choices is None:
            return None
    return choices


def _is_row(problem: Problem, row: Row) -> bool:
    inside = 0 <= row.unit < len(problem.units) and 0 <= row.first <= row.last < problem.units[row.unit].count
    if not inside or not 0 <= row.bound <= row.last - row.first or len(set(row.choices)) != len(row.choices):
        return False
    try:
        return all(options_of(problem.units[row.unit], picks) is not None for picks in row.choices)
    except IndexError:
        return False


def _shape_reasons(problem: Problem, case: Case, rows: tuple[Row, ...], lower: int | None) -> list[str]:
    if case.split and (case.split.at_least or not _is_row(problem, case.split)):
        return ["a case is split by no row of the problem"]
    if case.core and (case.split or rows or lower is None or not case.sieves or not case.sieves[-1].time):
        return ["a core has no parts, no rows, and multipliers of time"]
    reasons = (_multiplier_reasons(problem, by, rows, lower) for by in case.sieves)
    return next((each for each in reasons if each), [])


def _multiplier_reasons(problem: Problem, by: Multipliers, rows: tuple[Row, ...], lower: int | None) -> list[str]:
    if len(by.rows) != len(rows):
        return ["multipliers are for other rows than those of the case"]
    if min(by.time, by.longer, *by.rows, *(amount for *_, amount in by.memory)) < 0 or by.longer > by.time:
        return ["a multiplier is out of its range"]
    if lower is None and by.time:
        return ["time is counted where no selection is said to fit"]
    for unit, copy, _ in by.memory:
        if not (0 <= unit < len(problem.units) and 0 <= copy < problem.units[unit].count):
            return ["a multiplier is for no copy of a unit"]
    return []


def gap_of(certificate: Certificate) -> Fraction | None:
    """How far the selection may be from the best, as a share of its time; None where there is no selection."""
    if certificate.time is None or certificate.lower is None:
        return None
    return Fraction(certificate.time - certificate.lower, max(1, certificate.time))


def to_json(certificate: Certificate) -> Json:
    """Nothing but dicts, lists, strings and integers."""
    selection = certificate.selection
    return {
        "format": FORMAT,
        "problem": certificate.problem,
        "selection": selection and [[[run.count, list(run.picks)] for run in runs] for runs in selection],
        "time": certificate.time,
        "peak": certificate.peak,
        "lower": certificate.lower,
        "cases": [_case_to_json(case) for case in certificate.cases],
    }


def _case_to_json(case: Case) -> Json:
    sieves = [
        {"time": by.time, "longer": by.longer, "memory": [list(each) for each in by.memory], "rows": list(by.rows)}
        for by in case.sieves
    ]
    split = case.split
    if split is None:
        return {"sieves": sieves, "core": True} if case.core else {"sieves": sieves}
    copies = [split.unit, split.first, split.last]
    return {
        "sieves": sieves,
        "split": {"copies": copies, "choices": [list(picks) for picks in split.choices], "at_most": split.bound},
    }


def from_json(data: Json) -> Certificate:
    """What `to_json` wrote; a ValueError where it is anything else."""
    if data.get("format") != FORMAT:
        raise ValueError(f"not a certificate of the format {FORMAT}")
    try:
        runs = data["selection"]
        selection = None if runs is None else tuple(tuple(Run(n, tuple(picks)) for n, picks in unit) for unit in runs)
        cases = tuple(_case_from_json(case) for case in data["cases"])
        return Certificate(data["problem"], selection, data["time"], data["peak"], data["lower"], cases)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a certificate: {error!r}") from error


def _case_from_json(data: Json) -> Case:
    sieves = tuple(
        Multipliers(by["time"], by["longer"], tuple((u, c, a) for u, c, a in by["memory"]), tuple(by["rows"]))
        for by in data["sieves"]
    )
    if "split" not in data:
        return Case(sieves, core=bool(data.get("core", False)))
    unit, first, last = data["split"]["copies"]
    choices = tuple(tuple(picks) for picks in data["split"]["choices"])
    return Case(sieves, Row(unit, first, last, choices, data["split"]["at_most"]))
