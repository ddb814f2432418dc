"""A selection without a proof: two ways to run blocks, so many of each as fit. For when time is up."""

from __future__ import annotations

from itertools import permutations

from wavetrain.planner.problem import Problem, Run, Selection, bundle, peak, time


def best_pair(problem: Problem) -> Selection | None:
    """The fastest selection of one or two bundles that fits: some blocks the one way, all behind them the other."""
    kinds = min((len(unit.bundles) for unit in problem.units if unit.bundles), default=0)
    total = sum(unit.count for unit in problem.units if unit.bundles)
    found: list[tuple[int, Selection]] = []
    for ahead, behind in [*permutations(range(kinds), 2), *((kind, kind) for kind in range(kinds))]:
        low, high = 0, total  # most of the blocks behind that still fit
        if peak(problem, _paired(problem, ahead, behind, total)) > problem.limit:
            continue
        while low < high:  # more of the first kind always fit: the last of the second kind are sought
            middle = (low + high) // 2
            fits = peak(problem, _paired(problem, ahead, behind, middle)) <= problem.limit
            low, high = (low, middle) if fits else (middle + 1, high)
        made = _paired(problem, ahead, behind, low)
        found.append((time(problem, made), made))
    return min(found, key=lambda item: item[0], default=(0, None))[1]


def _paired(problem: Problem, ahead: int, behind: int, number: int) -> Selection:
    """So many blocks run the first way, all behind them the second."""
    made: list[tuple[Run, ...]] = []
    for unit in problem.units:
        if not unit.bundles:
            made.append((Run(unit.count, (0,) * len(unit.operators)),))
            continue
        first = min(number, unit.count)
        number -= first
        runs = (Run(first, bundle(ahead)), Run(unit.count - first, bundle(behind)))
        made.append(tuple(run for run in runs if run.count))
    return tuple(made)
