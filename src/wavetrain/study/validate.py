"""How far predictions are from measurements: one summary per table, and one per source and device family in it.

An error is predicted / measured - 1, in percent. A number is None where there is nothing to measure it on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from wavetrain.study.outcome import Outcome

LEAST_GROUP = 4  # runs of one workload; an order of fewer says little
LEAST_LAYOUTS = 3  # different predictions among them; equal ones are repeats of one layout, with nothing to rank
CAVEAT = (
    "constants of the cost model are fitted to published step times (validation/fit.py): "
    "on rows that took part, an error is that of a fit, not of a forecast"
)
MOST_EXAMPLES = 3  # rows named beside a reason

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Unexpressed:
    """A reason why rows can't be expressed, how many it holds for, and the first of them."""

    reason: str
    rows: int
    examples: tuple[str, ...]  # "megatron.csv:12 megatron:0003"


@dataclass(frozen=True, kw_only=True)
class SetSummary:
    """A set of rows in numbers; errors, accuracy and regret in percent.

    Step-time errors and rankings are over the rows that are scored; in a set without any (`counts` is False) over all.
    """

    name: str
    file: str
    source: str  # empty for a whole file
    family: str  # of devices, empty for a whole file
    rows: int
    expressible: int
    scored: int  # rows that count
    counts: bool  # whether the set has a row that counts
    timed: int  # rows the step-time errors are over
    unpriced: int  # measured and expressible rows without a finite prediction, which no error can include
    mape: float | None
    median_ape: float | None
    p90_ape: float | None  # 90th percentile, linear between the two nearest rows
    bias: float | None  # signed mean: above 0 is predicted too slow
    memory_rows: int
    memory_mape: float | None
    oom_accuracy: float | None  # None where no row ran out of memory
    true_fits: int  # predicted to fit, and ran
    false_fits: int  # predicted to fit, and ran out of memory
    true_oom: int
    false_oom: int  # predicted to run out of memory, and ran
    groups: int  # workloads with enough layouts to rank
    spearman: float | None  # mean over the groups, as is the regret
    regret: float | None  # time lost by running the layout predicted fastest instead of the fastest
    worst_regret: float | None
    unexpressed: tuple[Unexpressed, ...]

    @property
    def is_file(self) -> bool:
        return self.name == self.file


@dataclass(frozen=True, kw_only=True)
class Validation:
    """All rows, and the sets they fall into: a file, then its sets, then the next file."""

    sets: tuple[SetSummary, ...]
    outcomes: tuple[Outcome, ...]


def summarize(outcomes: Iterable[Outcome]) -> Validation:
    """The numbers of each file and of each source and device family in it, in order of appearance."""
    rows = tuple(outcomes)
    sets: list[SetSummary] = []
    for file, in_file in grouped(rows, lambda row: row.file).items():
        sets.append(_summary(file, in_file, source="", family=""))
        for (source, family), members in grouped(in_file, lambda row: (row.source, device_family(row))).items():
            sets.append(_summary(set_name(members[0]), members, source=source, family=family))
    return Validation(sets=tuple(sets), outcomes=rows)


def grouped(rows: Iterable[Outcome], key: Callable[[Outcome], Key]) -> dict[Key, list[Outcome]]:
    """Rows by a key, in order of appearance."""
    groups: dict[Key, list[Outcome]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def device_family(row: Outcome) -> str:
    """a100-sxm-80gb -> a100."""
    return row.device.partition("-")[0]


def set_name(row: Outcome) -> str:
    """The name of the set a row belongs to: its file, source and device family."""
    return f"{row.file}: {', '.join(filter(None, (row.source, device_family(row)))) or 'no source'}"


# --- one row ---


def step_error(row: Outcome) -> float | None:
    """Signed error of the step time in percent; None unless the run succeeded, was timed and has a prediction."""
    return _error(row.predicted_step_s, row.measured_step_s) if _is_timed(row) else None


def memory_error(row: Outcome) -> float | None:
    """Signed error of the peak memory in percent; None where there is none to compare."""
    usable = row.expressible and is_ok(row)
    return _error(row.predicted_peak_bytes, row.measured_peak_bytes) if usable else None


def is_ok(row: Outcome) -> bool:
    return row.status.strip().lower() == "ok"


def is_oom(row: Outcome) -> bool:
    return row.status.strip().lower() == "oom"


def _is_timed(row: Outcome) -> bool:
    return row.expressible and is_ok(row) and _is_positive(row.measured_step_s)


def _is_positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _error(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or measured is None or not _is_positive(measured):
        return None
    return finite((predicted / measured - 1) * 100)


def finite(value: float | None) -> float | None:
    """The number, or None where it is none that JSON can hold."""
    return float(value) if value is not None and math.isfinite(value) else None


# --- many rows ---


def counted(rows: Sequence[Outcome]) -> Sequence[Outcome]:
    """The rows that are scored; all where none is."""
    return [row for row in rows if row.scored] or rows


def worst(validation: Validation, *, most: int = 5) -> list[tuple[Outcome, float]]:
    """The rows that count with the largest step-time errors (signed, percent), largest first."""
    rows = [row for members in grouped(validation.outcomes, lambda row: row.file).values() for row in counted(members)]
    errors = [(row, error) for row in rows if (error := step_error(row)) is not None]
    return sorted(errors, key=lambda item: -abs(item[1]))[:most]


def unexpressed(rows: Iterable[Outcome]) -> tuple[Unexpressed, ...]:
    """Why rows can't be expressed, most frequent first."""
    by_reason = grouped((row for row in rows if not row.expressible), lambda row: row.reason)
    found = [
        Unexpressed(reason=reason, rows=len(members), examples=tuple(map(place, members[:MOST_EXAMPLES])))
        for reason, members in by_reason.items()
    ]
    return tuple(sorted(found, key=lambda item: -item.rows))


def place(row: Outcome) -> str:
    """Where a row is: "megatron.csv:12 megatron:0003"."""
    return f"{row.file}:{row.line} {row.row_id}"


def _summary(name: str, rows: Sequence[Outcome], *, source: str, family: str) -> SetSummary:
    errors = _numbers(map(step_error, counted(rows)))
    memory = _numbers(map(memory_error, rows))
    fits = Counter((row.fits, is_ok(row)) for row in rows if _is_judged(row))
    right, judged = fits[True, True] + fits[False, False], fits.total()
    ranking = _ranking(counted(rows))
    return SetSummary(
        name=name,
        file=rows[0].file,
        source=source,
        family=family,
        rows=len(rows),
        expressible=sum(row.expressible for row in rows),
        scored=sum(row.scored for row in rows),
        counts=any(row.scored for row in rows),
        timed=len(errors),
        unpriced=sum(_is_timed(row) and step_error(row) is None for row in rows),
        mape=_mean(np.abs(errors)),
        median_ape=_percentile(np.abs(errors), 50),
        p90_ape=_percentile(np.abs(errors), 90),
        bias=_mean(errors),
        memory_rows=len(memory),
        memory_mape=_mean(np.abs(memory)),
        oom_accuracy=100 * right / judged if judged and any(map(is_oom, rows)) else None,
        true_fits=fits[True, True],
        false_fits=fits[True, False],
        true_oom=fits[False, False],
        false_oom=fits[False, True],
        groups=ranking.groups,
        spearman=ranking.spearman,
        regret=ranking.regret,
        worst_regret=ranking.worst_regret,
        unexpressed=unexpressed(rows),
    )


def _is_judged(row: Outcome) -> bool:
    return row.expressible and row.fits is not None and (is_ok(row) or is_oom(row))


def _numbers(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> float | None:
    with np.errstate(over="ignore"):
        return finite(float(values.mean())) if len(values) else None


def _percentile(values: NDArray[np.float64], percent: float) -> float | None:
    with np.errstate(over="ignore", invalid="ignore"):
        return finite(float(np.percentile(values, percent))) if len(values) else None


# --- rankings ---


@dataclass(frozen=True)
class _Ranking:
    groups: int
    spearman: float | None
    regret: float | None
    worst_regret: float | None


def _ranking(rows: Sequence[Outcome]) -> _Ranking:
    """How well layouts of the same workload are ranked, over the workloads with enough of them.

    Runs of one workload are compared within a source and device only: other software or another machine is no layout.
    """
    timed = [row for row in rows if step_error(row) is not None]
    by_workload = grouped(timed, lambda row: (row.file, row.source, row.device, row.workload))
    correlations: list[float | None] = []
    regrets: list[float | None] = []
    for members in by_workload.values():
        predicted = _numbers(row.predicted_step_s for row in members)
        measured = _numbers(row.measured_step_s for row in members)
        if len(members) < LEAST_GROUP or len(set(predicted)) < LEAST_LAYOUTS or len(set(measured)) < 2:
            continue
        correlations.append(spearman(predicted, measured))
        regrets.append(top_pick_regret(predicted, measured))
    lost = _numbers(regrets)
    worst_regret = float(lost.max()) if len(lost) else None
    return _Ranking(len(correlations), _mean(_numbers(correlations)), _mean(lost), worst_regret)


def average_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[which]
    return ranks


def spearman(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks; None where all values of a side are equal."""
    a, b = average_ranks(predicted), average_ranks(measured)
    a, b = a - a.mean(), b - b.mean()
    spread = math.sqrt(float(a @ a) * float(b @ b))
    return min(1.0, max(-1.0, float(a @ b) / spread)) if spread else None


def top_pick_regret(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float | None:
    """Percent of time lost by running the layout predicted fastest; the slowest of those where several are."""
    picked = float(measured[predicted == predicted.min()].max())
    return finite((picked / float(measured.min()) - 1) * 100)
