"""The inner problem of the planner: one option per operator, the least time under a limit of memory.

All numbers are integers: times in picoseconds, memory in bytes, shares in parts per million. A time of the whole
step is in picoseconds times a million, so that shares stay integers. Units run forward in their order, then
backward in the opposite one; a unit with a count stands for that many equal ones in a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

MILLION = 1_000_000

# The option chosen for each operator, or for a bundle j the one number -1 - j: no option has a negative index.
Picks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to keep an operator (or, as a bundle, a whole unit): what it takes and what it holds."""

    label: str = ""
    fixed: int = 0  # time per step that always shows
    forward: int = 0  # communication beside its unit's forward, per microbatch
    backward: int = 0  # the same beside its unit's backward
    hides: int = 0  # compute it adds to its unit's backward, per microbatch; its own time is part of `fixed`
    reduction: int = 0  # communication once per step, beside the whole backward
    held: int = 0  # bytes all through the step
    saved: int = 0  # bytes from the unit's forward to its backward
    left: int = 0  # bytes from the unit's backward to the end of the step
    beside: int = 0  # bytes while its unit runs, added up over the unit's operators
    own: int = 0  # bytes while its operator runs: the largest of the unit's operators counts


AMOUNTS = tuple(name for name in Option.__dataclass_fields__ if name != "label")
amounts_of = attrgetter(*AMOUNTS)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Operators that are computed together; communication hides behind the compute of its unit."""

    forward: int = 0
    backward: int = 0
    operators: tuple[tuple[Option, ...], ...] = ()
    bundles: tuple[Option, ...] = ()  # each taken instead of options for all the operators
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be chosen, in forward order, and the limit of memory."""

    units: tuple[Unit, ...]
    limit: int
    microbatches: int = 1
    forward_share: int = 0  # of hidden communication this share shows all the same
    backward_share: int = 0
    reduction_share: int = 0
    fixed: int = 0

    def __post_init__(self) -> None:
        shares = (self.forward_share, self.backward_share, self.reduction_share)
        if not all(0 <= share <= MILLION for share in shares):
            raise ValueError(f"a share is 0 to {MILLION} parts per million, not {shares}")
        if self.microbatches < 0 or self.limit < 0:
            raise ValueError("microbatches and the limit are not negative")
        for unit in self.units:
            _check(unit)


def _check(unit: Unit) -> None:
    if unit.count < 1 or unit.forward < 0 or unit.backward < 0:
        raise ValueError("a unit occurs at least once, and its compute is not negative")
    if not all(unit.operators):
        raise ValueError("every operator needs an option")
    for options in (*unit.operators, unit.bundles):
        if any(min(amounts_of(option)) < 0 for option in options):
            raise ValueError("no amount of an option is negative")


@dataclass(frozen=True)
class Run:
    """Equal choices for neighbouring copies of one unit."""

    count: int
    picks: Picks


Selection = tuple[tuple[Run, ...], ...]  # for every unit its runs, in forward order


class Load(NamedTuple):
    """All that a choice for one copy of a unit adds to the step."""

    time: int  # with the communication of the unit that shows, times a million
    reduction: int
    hides: int
    held: int
    saved: int
    left: int
    running: int  # bytes while the unit runs


def bundle(index: int) -> Picks:
    """The picks that name a bundle."""
    return (-1 - index,)


def has_combinations(unit: Unit) -> bool:
    """Whether options are chosen one by one at all: a unit of nothing but bundles has no operators to choose for."""
    return bool(unit.operators) or not unit.bundles


def options_of(unit: Unit, picks: Picks) -> tuple[Option, ...]:
    """The options that picks name; an IndexError where they name none."""
    if len(picks) == 1 and picks[0] < 0:
        return (unit.bundles[-1 - picks[0]],)
    if len(picks) != len(unit.operators) or not has_combinations(unit) or min(picks, default=0) < 0:
        raise IndexError("one option for every operator")
    return tuple(options[pick] for options, pick in zip(unit.operators, picks, strict=True))


def exposed(communication: int, compute: int, share: int) -> int:
    """Of communication beside compute, what shows: what is longer in full, of the shorter a share; times a million."""
    return max(exposures(communication, compute, share))


def exposures(communication: int, compute: int, share: int) -> tuple[int, int]:
    """What shows of communication that is shorter than the compute beside it, and of longer one."""
    return share * communication, MILLION * communication - (MILLION - share) * compute


def load_of(problem: Problem, unit: Unit, picks: Picks) -> Load:
    """What one copy of the unit adds under these picks."""
    chosen = list(map(amounts_of, options_of(unit, picks)))
    if len(chosen) == 1:
        return load_from(problem, unit, chosen[0])
    columns = list(zip(*chosen, strict=True)) or [()] * len(AMOUNTS)
    return load_from(problem, unit, (*map(sum, columns[:-1]), max(columns[-1], default=0)))


def load_from(problem: Problem, unit: Unit, sums: Sequence[int]) -> Load:
    """The load of options with these amounts together: of all a sum, but the largest of their own bytes."""
    fixed, forward, backward, hides, reduction, held, saved, left, beside, own = sums
    shown = exposed(forward, unit.forward, problem.forward_share)
    shown += exposed(backward, unit.backward + hides, problem.backward_share)
    return Load(MILLION * fixed + problem.microbatches * shown, reduction, hides, held, saved, left, beside + own)


def loads_of(problem: Problem, selection: Selection) -> Iterator[tuple[int, Load]]:
    """Every run of the selection, in forward order; a ValueError where it is none of the problem."""
    if len(selection) != len(problem.units):
        raise ValueError("a selection has runs for every unit")
    for unit, runs in zip(problem.units, selection, strict=True):
        if sum(run.count for run in runs) != unit.count or any(run.count < 1 for run in runs):
            raise ValueError("the runs of a unit add up to its count")
        for run in runs:
            yield run.count, load_of(problem, unit, run.picks)


def time(problem: Problem, selection: Selection) -> int:
    """Time of the step, in picoseconds times a million."""
    return time_of(problem, list(loads_of(problem, selection)))


def time_of(problem: Problem, loads: list[tuple[int, Load]]) -> int:
    """The time of runs with these loads."""
    return max(both_times(problem, loads))


def both_times(problem: Problem, loads: list[tuple[int, Load]]) -> tuple[int, int]:
    """The time with the reduction hidden behind the backward, and with the one that is longer; the larger is true."""
    reduction = sum(count * load.reduction for count, load in loads)
    compute = sum(unit.count * unit.backward for unit in problem.units)
    compute += sum(count * load.hides for count, load in loads)
    rest = MILLION * problem.fixed + sum(count * load.time for count, load in loads)
    hidden, longer = exposures(reduction, compute, problem.reduction_share)
    return rest + hidden, rest + longer


def is_hidden(problem: Problem, selection: Selection) -> bool:
    """Whether the reduction takes no longer than the backward that it is beside."""
    hidden, longer = both_times(problem, list(loads_of(problem, selection)))
    return hidden >= longer


def peak(problem: Problem, selection: Selection) -> int:
    """The most bytes at any time of the step."""
    loads = list(loads_of(problem, selection))
    level = sum(count * (load.held + load.left) for count, load in loads)
    return level + max((at for *_, at in rises(loads)), default=0)


def rises(loads: Iterable[tuple[int, Load]]) -> Iterator[tuple[int, bool, int]]:
    """For every run: its index, whether its last copy (or else its first) needs most, and how far that is above the
    level with nothing saved. Inside a run the level moves one way, so that one of its ends is the highest.
    """
    level = 0
    for index, (count, load) in enumerate(loads):
        step = load.saved - load.left
        at_end = step >= 0
        yield index, at_end, level + (count * step if at_end else step) + load.running
        level += count * step


def rank_of(picks: Picks, load: Load) -> tuple[int, int, Picks]:
    """Where a choice stands among the copies of its unit, so that the peak is lowest.

    Copies that leave more than they saved come first, the lowest need first; then those that save more, the one that
    needs most while it runs first. Exchanging two neighbours that break this order never raises the higher of their
    two peaks, and leaves all else as it is.
    """
    step = load.saved - load.left
    return (0, step + load.running, picks) if step < 0 else (1, -load.running, picks)


def arranged(problem: Problem, unit: Unit, counts: Iterable[tuple[Picks, int]]) -> tuple[Run, ...]:
    """The order of a unit's copies with the lowest peak."""
    runs = [Run(count, picks) for picks, count in counts if count]
    if len(runs) > 1:
        runs.sort(key=lambda run: rank_of(run.picks, load_of(problem, unit, run.picks)))
    return tuple(runs)


def digest(problem: Problem) -> str:
    """A hash of every number of the problem; labels are not part of it."""
    units = [
        [unit.forward, unit.backward, unit.count, [[amounts_of(option) for option in options] for options in all_of]]
        for unit in problem.units
        for all_of in [(*unit.operators, unit.bundles)]
    ]
    shares = [problem.forward_share, problem.backward_share, problem.reduction_share]
    text = json.dumps([units, problem.microbatches, shares, problem.limit, problem.fixed])
    return hashlib.sha256(text.encode()).hexdigest()
