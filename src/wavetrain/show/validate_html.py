"""The page of `validate`: predictions against measurements, by set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from wavetrain.base.units import GIB
from wavetrain.show.page import clean, label, part, plotly_script, render
from wavetrain.study.outcome import Outcome
from wavetrain.study.validate import (
    CAVEAT,
    SetSummary,
    Validation,
    counted,
    device_family,
    grouped,
    memory_error,
    set_name,
    step_error,
    unexpressed,
)

Json = dict[str, Any]
BAND = 0.10
EDGES = tuple(range(-50, 51, 5))  # of the error distribution, percent; what lies outside has a bar at either end
MOST_POINTS = 4000  # of one picture; more are thinned evenly, which keeps the file small and quick
MOST_COLOURED = 40  # sets with a colour of their own
MOST_LISTED = 200  # sets, and reasons, in a table
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#3aa6a0", "#d4a514", "#e377c2", "#7f8fa6")
SYMBOLS = ("circle", "diamond", "square", "triangle-up")
TITLES = ("rows", "can't express", "mean %", "median %", "p90 %", "bias %", "memory %", "OOM %", "Spearman", "regret %")


def report_page(validation: Validation) -> str:
    """The page. Needs plotly and jinja2, which the extra `report` installs."""
    pictures = [picture for picture in (_times(validation), _distribution(validation), _memory(validation)) if picture]
    reasons = unexpressed(validation.outcomes)
    return render(
        "validate.html",
        styles=("page.css", "validate.css"),
        scripts=(plotly_script(), part("draw.js"), part("validate.js")),
        data=[picture.figure for picture in pictures],
        pictures=pictures,
        headline=_headline(validation),
        caveat=CAVEAT,
        titles=TITLES,
        sets=[_cells(item) for item in validation.sets[:MOST_LISTED]],
        hidden_sets=max(0, len(validation.sets) - MOST_LISTED),
        reasons=[(item.rows, clean(item.reason, 300), clean(item.examples[0])) for item in reasons[:MOST_LISTED]],
        hidden_reasons=max(0, len(reasons) - MOST_LISTED),
    )


# --- the tables ---


def _cells(item: SetSummary) -> Json:
    """A line of the table of sets, in the order of `TITLES`."""
    judged = (
        f"{item.true_fits} rightly and {item.false_fits} wrongly said to fit, "
        f"{item.true_oom} rightly and {item.false_oom} wrongly said not to"
    )
    return {
        "name": clean(item.name if item.is_file else item.name.removeprefix(f"{item.file}: "), 160),
        "is_file": item.is_file,
        "counts": item.counts,
        "hint": f"{item.timed} timed rows, {item.groups} workloads ranked; {judged}",
        "numbers": [
            str(item.rows),
            str(item.rows - item.expressible),
            *(_number(value) for value in (item.mape, item.median_ape, item.p90_ape)),
            _number(item.bias, "+z.1f"),
            _number(item.memory_mape),
            _number(item.oom_accuracy),
            _number(item.spearman, "z.2f"),
            _number(item.regret),
        ],
    }


def _number(value: float | None, spec: str = ".1f") -> str:
    return "-" if value is None else f"{value:{spec}}"


def _headline(validation: Validation) -> list[tuple[str, str]]:
    rows = validation.outcomes
    errors = _counted_errors(validation)
    within = sum(abs(error) <= 100 * BAND for error in errors)
    share = f"{within / len(errors):.0%}" if errors else "-"
    return [
        (f"{len(rows):,}", "rows"),
        (f"{sum(row.expressible for row in rows):,}", "expressed"),
        (f"{len(errors):,}", "timed rows that count"),
        (share, f"of them within {BAND:.0%}"),
    ]


def _counted_errors(validation: Validation) -> list[float]:
    by_file = grouped(validation.outcomes, lambda row: row.file)
    errors = (step_error(row) for rows in by_file.values() for row in counted(rows))
    return [error for error in errors if error is not None]


# --- the pictures ---


@dataclass(frozen=True)
class _Picture:
    title: str
    note: str
    figure: Json  # id, data and layout, as plotly reads them


@dataclass(frozen=True)
class _Point:
    row: Outcome
    measured: float
    predicted: float
    error: float


def _times(validation: Validation) -> _Picture | None:
    points = _points(validation, step_error, lambda row: (row.measured_step_s, row.predicted_step_s), 1.0)
    return _scatter("Step time", "s", points, _set_numbers(validation))


def _memory(validation: Validation) -> _Picture | None:
    points = _points(validation, memory_error, lambda row: (row.measured_peak_bytes, row.predicted_peak_bytes), GIB)
    return _scatter("Peak memory", "GiB", points, _set_numbers(validation))


def _set_numbers(validation: Validation) -> dict[str, int]:
    return {item.name: i for i, item in enumerate(item for item in validation.sets if not item.is_file)}


def _points(
    validation: Validation,
    error: Callable[[Outcome], float | None],
    values: Callable[[Outcome], tuple[float | None, float | None]],
    unit: float,
) -> list[_Point]:
    found = []
    for row in validation.outcomes:
        difference, (measured, predicted) = error(row), values(row)
        if difference is not None and measured and predicted and predicted > 0:  # an axis of logarithms has no zero
            found.append(_Point(row, measured / unit, predicted / unit, difference))
    return found


def _scatter(name: str, unit: str, points: Sequence[_Point], numbers: dict[str, int]) -> _Picture | None:
    """Points by set; a set has the same colour and mark, by its number, in every picture."""
    if not points:
        return None
    ordered = sorted(points, key=lambda point: numbers[set_name(point.row)])  # so that each set is thinned alike
    drawn = ordered[:: -(-len(points) // MOST_POINTS)]
    ends = [value for point in drawn for value in (point.measured, point.predicted)]
    low, high = max(min(ends) / 1.4, 1e-300), min(max(ends) * 1.4, 1e300)
    by_set: dict[int, list[_Point]] = {}
    for point in drawn:
        by_set.setdefault(min(numbers[set_name(point.row)], MOST_COLOURED), []).append(point)
    traces = [_trace(number, by_set[number], unit) for number in sorted(by_set)]
    note = f"Each point is a row; inside the band the error is below {BAND:.0%}. Open marks are rows that do not count."
    if len(drawn) < len(points):
        note += f" {len(drawn):,} of {len(points):,} rows are drawn."
    reach = [math.log10(low), math.log10(high)]
    axes = {
        f"{axis}axis": {"type": "log", "title": {"text": f"{what}, {unit}"}, "autorange": False, "range": reach}
        for axis, what in (("x", "measured"), ("y", "predicted"))
    }
    layout = {**axes, "hovermode": "closest", "height": 620, "showlegend": True}
    figure = {"id": name.split()[1], "data": [*_band(low, high), *traces], "layout": layout}
    return _Picture(f"{name}, predicted against measured", note, figure)


def _band(low: float, high: float) -> list[Json]:
    """Lines of 10 % too fast and too slow with the area between them filled, and the line of no error."""
    base = {"type": "scatter", "mode": "lines", "x": [low, high], "hoverinfo": "skip", "showlegend": False}
    edge = {"width": 0, "color": "rgba(127,127,127,0.5)"}
    lower, upper = [low * (1 - BAND), high * (1 - BAND)], [low * (1 + BAND), high * (1 + BAND)]
    return [
        {**base, "y": lower, "line": edge},
        {**base, "y": upper, "line": edge, "fill": "tonexty", "fillcolor": "rgba(127,127,127,0.22)"},
        {**base, "y": [low, high], "line": {"width": 1, "color": "rgba(127,127,127,0.8)", "dash": "dot"}},
    ]


def _trace(number: int, points: Sequence[_Point], unit: str) -> Json:
    row = points[0].row
    name = " ".join(filter(None, (row.file.removesuffix(".csv"), device_family(row)))) + f": {row.source}"
    symbol = SYMBOLS[number // len(COLOURS) % len(SYMBOLS)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(name, 44) if number < MOST_COLOURED else "all other sets",
        "x": [_short(point.measured) for point in points],
        "y": [_short(point.predicted) for point in points],
        "customdata": [[label(point.row.row_id), f"{point.error:+.1f} %"] for point in points],
        "hovertemplate": f"%{{customdata[0]}}<br>measured %{{x:.4g}} {unit}<br>predicted %{{y:.4g}} {unit}"
        "<br>error %{customdata[1]}<br>%{fullData.name}<extra></extra>",
        "marker": {
            "color": COLOURS[number % len(COLOURS)],
            "symbol": [symbol if point.row.scored else f"{symbol}-open" for point in points],
            "size": 7,
            "opacity": 0.8,
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _signed(value: int) -> str:
    return f"{value:+d}" if value else "0"


def _distribution(validation: Validation) -> _Picture | None:
    errors = _counted_errors(validation)
    if not errors:
        return None
    inner = list(pairwise(EDGES))
    labels = [
        f"below {EDGES[0]}",
        *(f"{_signed(low)} to {_signed(high)}" for low, high in inner),
        f"above {EDGES[-1]:+d}",
    ]
    counts = [0] * len(labels)
    for error in errors:
        counts[sum(error >= edge for edge in EDGES)] += 1
    inside = [low >= -100 * BAND and high <= 100 * BAND for low, high in inner]
    bars = {
        "type": "bar",
        "x": labels,
        "y": counts,
        "marker": {"color": [COLOURS[0] if near else COLOURS[-1] for near in (False, *inside, False)]},
        "hovertemplate": "error %{x} %<br>%{y} rows<extra></extra>",
    }
    axes = {
        "xaxis": {"type": "category", "title": {"text": "error, %"}, "showgrid": False},
        "yaxis": {"title": {"text": "rows"}},
    }
    layout = {**axes, "height": 340, "bargap": 0.08, "showlegend": False}
    note = f"Rows that count, by signed error of the step time: left is predicted too fast. Within {BAND:.0%} in blue."
    return _Picture("Errors of the step time", note, {"id": "distribution", "data": [bars], "layout": layout})
