"""The linear program of a case: how many copies make each choice, fractions allowed, and the prices that come of it.

Solved in floating point by HiGHS and trusted for nothing: its prices become integers, with which every bound is
worked out anew and exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import highspy
import numpy as np
import numpy.typing as npt

from wavetrain.planner.leaves import Choices, Multipliers, Row, Segment, segments
from wavetrain.planner.problem import MILLION, Load, Picks, Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Copy = tuple[int, int]  # unit, copy

BITS = 44  # of a price that are kept
BASIC = highspy.HighsBasisStatus.kBasic
ROUGH = 1e-9  # below this a float of the program says nothing


@dataclass(frozen=True)
class Frame:
    """What a program is about: the choices of a case, its rows, the copies whose memory is looked at."""

    problem: Problem
    choices: Choices
    rows: tuple[Row, ...]
    memory: tuple[Copy, ...]
    fit: bool = False  # not the least time, but the least that limit and rows are missed by


@dataclass(frozen=True)
class Columns:
    """One column per segment and choice, against the first choice of the unit: only differences meet floats."""

    segments: list[Segment]
    picks: list[Picks]
    loads: list[Load]
    owner: npt.NDArray[np.intp]  # segment of each column
    relative: Floats  # column by field of the load
    references: list[Load]  # of each segment


@dataclass(frozen=True)
class Answer:
    """A solved program: how often each column is taken, and the prices."""

    columns: Columns
    amounts: Floats
    prices: Multipliers
    basic: tuple[int, ...]  # columns of the basis
    tight: tuple[int, ...]  # rows that carry a price: reduction (two), memory, counts, in this order
    free: frozenset[int]  # segments whose own price is that of the reference
    memory_scale: float


def columns_of(frame: Frame) -> Columns:
    """The columns of a frame, segment by segment."""
    marks = Multipliers(0, 0, tuple((*copy, 1) for copy in frame.memory), (1,) * len(frame.rows))
    parts = segments(frame.problem, marks, frame.rows)
    picks: list[Picks] = []
    loads: list[Load] = []
    owner: list[int] = []
    relative: list[list[int]] = []
    references = []
    blocks: dict[int, list[list[int]]] = {}
    for index, part in enumerate(parts):
        choices = frame.choices[part.unit]
        reference = next(iter(choices.values()))
        references.append(reference)
        if part.unit not in blocks:
            pairs = [zip(load, reference, strict=True) for load in choices.values()]
            blocks[part.unit] = [[a - b for a, b in pair] for pair in pairs]
        relative += blocks[part.unit]
        picks += choices
        loads += choices.values()
        owner += [index] * len(choices)
    return Columns(parts, picks, loads, np.array(owner), np.array(relative, dtype=np.float64), references)


@dataclass(frozen=True)
class _Matrix:
    """Coupling rows over the columns, as floats near one, with the scales that were taken out."""

    rows: Floats
    lower: Floats
    upper: Floats
    costs: Floats
    time_scale: float
    memory_scale: float
    with_reduction: bool


def _memory_rows(frame: Frame, columns: Columns) -> tuple[Floats, list[int]]:
    """Bytes of each column in each row, and what is left of the limit after the references."""
    starts = [(part.unit, part.first) for part in columns.segments]
    rows, rest = [], []
    field = columns.relative
    for copy in frame.memory:
        earlier = np.array([start <= copy for start in starts])
        here = np.array([start == copy for start in starts])
        owner = columns.owner
        row = field[:, 3] + np.where(earlier[owner], field[:, 4], field[:, 5]) + np.where(here[owner], field[:, 6], 0)
        used = sum(
            part.count * memory_of(load, start, copy)
            for part, start, load in zip(columns.segments, starts, columns.references, strict=True)
        )
        rows.append(row)
        rest.append(frame.problem.limit - used)
    return np.array(rows).reshape(len(rows), len(columns.picks)), rest


def memory_of(load: Load, at: Copy, copy: Copy) -> int:
    """Bytes that the copies starting at `at` add to the memory while `copy` runs."""
    kept = load.saved if at <= copy else load.left
    return load.held + kept + (load.running if at == copy else 0)


def _counts(frame: Frame, columns: Columns) -> Floats:
    rows = np.zeros((len(frame.rows), len(columns.picks)))
    for index, row in enumerate(frame.rows):
        wanted = set(row.choices)
        for column, (owner, picks) in enumerate(zip(columns.owner, columns.picks, strict=True)):
            part = columns.segments[owner]
            inside = part.unit == row.unit and row.first <= part.first <= row.last
            rows[index, column] = inside and picks in wanted
    return rows


def _matrix(frame: Frame, columns: Columns) -> _Matrix:
    problem, field = frame.problem, columns.relative
    memory, rest = _memory_rows(frame, columns)
    counts = np.array([part.count for part in columns.segments], dtype=np.float64)
    with_reduction = not frame.fit and any(load.reduction for load in columns.loads)
    time_scale = float(np.abs(field[:, 0] * counts[columns.owner]).max(initial=0)) or 1.0
    memory_scale = float(np.abs(memory).max(initial=0)) or 1.0
    rows, lower, upper = [], [], []
    if with_reduction:
        share = problem.reduction_share
        total = sum(p.count * load.reduction for p, load in zip(columns.segments, columns.references, strict=True))
        compute = sum(unit.count * unit.backward for unit in problem.units)
        compute += sum(p.count * load.hides for p, load in zip(columns.segments, columns.references, strict=True))
        hidden = share * field[:, 1]
        longer = MILLION * field[:, 1] - (MILLION - share) * field[:, 2]
        rows += [-hidden / time_scale, -longer / time_scale]
        # The larger of both references is taken out of the variable.
        first, second = share * total, MILLION * total - (MILLION - share) * compute
        lower += [(first - max(first, second)) / time_scale, (second - max(first, second)) / time_scale]
        upper += [math.inf, math.inf]
    rows += list(memory / memory_scale)
    lower += [-math.inf] * len(memory)
    upper += [each / memory_scale for each in rest]
    rows += list(_counts(frame, columns))
    lower += [row.bound if row.at_least else -math.inf for row in frame.rows]
    upper += [math.inf if row.at_least else row.bound for row in frame.rows]
    costs = np.zeros(len(field)) if frame.fit else field[:, 0] / time_scale
    shape = (len(rows), len(field))
    return _Matrix(
        np.array(rows).reshape(shape),
        np.array(lower),
        np.array(upper),
        costs,
        time_scale,
        memory_scale,
        with_reduction,
    )


def _model(frame: Frame, columns: Columns, matrix: _Matrix) -> highspy.HighsLp:
    size, parts, coupling = len(columns.picks), len(columns.segments), len(matrix.rows)
    extra = 1 if matrix.with_reduction or frame.fit else 0
    across = np.zeros((coupling, 1))
    if matrix.with_reduction:
        across[:2] = 1.0
    elif frame.fit:
        across[:, 0] = [-1.0] * len(frame.memory) + [1.0 if row.at_least else -1.0 for row in frame.rows]
    full = np.hstack([matrix.rows, across]) if extra else matrix.rows
    entry = np.abs(full) > 1e-14
    where = np.nonzero(entry)
    counts = np.array([part.count for part in columns.segments], dtype=np.float64)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = size + extra, parts + coupling
    model.col_cost_ = np.concatenate([matrix.costs, np.ones(extra)])
    model.col_lower_ = np.concatenate([np.zeros(size), np.full(extra, -math.inf if matrix.with_reduction else 0.0)])
    # No bound from above beside the rows: a basis then has one column of every segment, as exact prices need it.
    model.col_upper_ = np.full(size + extra, math.inf)
    model.row_lower_ = np.concatenate([counts, matrix.lower])
    model.row_upper_ = np.concatenate([counts, matrix.upper])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    sizes = np.concatenate([np.bincount(columns.owner, minlength=parts), entry.sum(axis=1)])
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    model.a_matrix_.index_ = np.concatenate([np.arange(size), where[1]]).astype(np.int32)
    model.a_matrix_.value_ = np.concatenate([np.ones(size), full[where]])
    return model


def _solver() -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", 0),
        ("primal_feasibility_tolerance", 1e-10),
        ("dual_feasibility_tolerance", 1e-10),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 0.0),
        ("mip_feasibility_tolerance", 1e-9),
        ("mip_max_nodes", 30),
    ):
        solver.setOptionValue(name, value)
    return solver


def solve(frame: Frame) -> Answer | None:
    """The program of the frame with its prices; None where no mix of choices fits."""
    columns = columns_of(frame)
    matrix = _matrix(frame, columns)
    solver = _solver()
    solver.setOptionValue("presolve", "off")
    solver.passModel(_model(frame, columns, matrix))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution, basis = solver.getSolution(), solver.getBasis()
    size, parts = len(columns.picks), len(columns.segments)
    values = np.array(solution.col_value)
    duals = np.array(solution.row_dual)[parts:]
    # Each look at a list of the solver copies all of it.
    column_status, row_status = basis.col_status, basis.row_status
    basic = tuple(index for index, status in enumerate(column_status[:size]) if status == BASIC)
    tight = tuple(index for index, status in enumerate(row_status[parts:]) if status != BASIC)
    free = frozenset(index for index, status in enumerate(row_status[:parts]) if status == BASIC)
    return Answer(columns, values[:size], _prices(frame, matrix, duals), basic, tight, free, matrix.memory_scale)


def solve_whole(frame: Frame, *, time_limit_s: float = math.inf) -> tuple[Columns, Floats] | None:
    """The program with whole copies only: a selection to begin with, good but not proven."""
    columns = columns_of(frame)
    model = _model(frame, columns, _matrix(frame, columns))
    size = len(columns.picks)
    kinds = [highspy.HighsVarType.kInteger] * size
    model.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (model.num_col_ - size)
    solver = _solver()
    solver.setOptionValue("time_limit", max(0.0, time_limit_s))
    solver.passModel(model)
    solver.run()
    values = np.array(solver.getSolution().col_value)
    if len(values) < size or solver.getInfo().primal_solution_status != 2:
        return None
    return columns, np.round(values[:size])


def _prices(frame: Frame, matrix: _Matrix, duals: Floats) -> Multipliers:
    """Duals as integers over a common denominator, which is the multiplier of time."""
    start = 2 if matrix.with_reduction else 0
    per_byte = 1.0 if frame.fit else matrix.time_scale / matrix.memory_scale
    shift = max(BITS, BITS - math.floor(math.log2(per_byte)))
    unit = Fraction(2**shift)
    byte_price = unit * Fraction(per_byte)
    count_price = byte_price * Fraction(matrix.memory_scale)
    middle = start + len(frame.memory)
    memory = [max(0, round(byte_price * Fraction(-dual))) for dual in duals[start:middle].tolist()]
    counts = [
        max(0, round(count_price * Fraction(dual if row.at_least else -dual)))
        for dual, row in zip(duals[middle:].tolist(), frame.rows, strict=True)
    ]
    time = 0 if frame.fit else 2**shift
    longer = min(time, max(0, round(time * duals[1]))) if matrix.with_reduction else 0
    priced = tuple((*copy, amount) for copy, amount in zip(frame.memory, memory, strict=True) if amount)
    return Multipliers(time, longer, priced, tuple(counts))


def exact_prices(frame: Frame, answer: Answer) -> Multipliers | None:
    """The prices of the answer's basis without rounding: all its columns of a segment cost exactly the same.

    Only so does a case close whose least time is the selection's own. None where the basis has no such prices.
    """
    columns, tight = answer.columns, answer.tight
    has_reduction = not frame.fit and any(load.reduction for load in columns.loads)
    counts = _counts(frame, columns).astype(int)
    signs = np.array([-1 if row.at_least else 1 for row in frame.rows], dtype=int)
    firsts: dict[int, list[int]] = {}
    for owner in answer.free:
        firsts[owner] = [*_coefficients(frame, columns, owner, columns.references[owner]), *[0] * len(signs)]
    system: list[list[Fraction]] = []
    for column in answer.basic:
        owner = int(columns.owner[column])
        values = [*_coefficients(frame, columns, owner, columns.loads[column]), *(signs * counts[:, column]).tolist()]
        first = firsts.setdefault(owner, values)
        if first is not values:
            differences = [a - b for a, b in zip(values, first, strict=True)]
            start = 1 if has_reduction else 3  # the first number is the time, the next two are of the reduction
            rows = [differences[start + row] for row in tight]
            system.append([Fraction(value) for value in (*rows, 0 if frame.fit else -differences[0])])
    if has_reduction:
        system.append([Fraction(int(row < 2)) for row in tight] + [Fraction(1)])
    elif frame.fit:
        scale = Fraction(answer.memory_scale)
        system.append([scale if row < len(frame.memory) else Fraction(1) for row in tight] + [Fraction(1)])
    found = _solved(system, len(tight))
    if found is None:
        return None
    found = [max(value, Fraction(0)) for value in found]  # a basis is optimal up to the solver's tolerance only
    common = math.lcm(*(value.denominator for value in found)) if found else 1
    amounts = [0] * (2 * has_reduction + len(frame.memory) + len(frame.rows))
    for row, value in zip(tight, found, strict=True):
        amounts[row] = int(value * common)
    start = 2 if has_reduction else 0
    middle = start + len(frame.memory)
    memory = tuple((*copy, amount) for copy, amount in zip(frame.memory, amounts[start:middle], strict=True) if amount)
    longer = amounts[1] if has_reduction else 0
    return Multipliers(0 if frame.fit else common, longer, memory, tuple(amounts[middle:]))


def _coefficients(frame: Frame, columns: Columns, owner: int, load: Load) -> list[int]:
    """Time, reduction if hidden, reduction if longer, and the bytes at every copy looked at, of one copy."""
    share, part = frame.problem.reduction_share, columns.segments[owner]
    longer = MILLION * load.reduction - (MILLION - share) * load.hides
    memory = [memory_of(load, (part.unit, part.first), copy) for copy in frame.memory]
    return [load.time, share * load.reduction, longer, *memory]


def _solved(system: list[list[Fraction]], unknowns: int) -> list[Fraction] | None:
    """The one solution of a square system of equations, by elimination."""
    if len(system) != unknowns:
        return None
    for step in range(unknowns):
        pivot = next((row for row in range(step, unknowns) if system[row][step]), None)
        if pivot is None:
            return None
        system[step], system[pivot] = system[pivot], system[step]
        head = system[step] = [value / system[step][step] for value in system[step]]
        for row in range(unknowns):
            if row != step and system[row][step]:
                factor = system[row][step]
                system[row] = [a - factor * b for a, b in zip(system[row], head, strict=True)]
    return [row[-1] for row in system]
