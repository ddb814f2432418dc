"""One HTML file of predictions against measurements: it holds all it needs and asks no one for anything.

Names come from tables that strangers wrote. Three readers see them, and each has its own escape: HTML (the template
escapes), a script element (`_script_json` escapes), and plotly, which reads tags in its labels (`_label` escapes).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import GIB, printable
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
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - optional, and slow to import
        from markupsafe import Markup  # noqa: PLC0415
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        rule = f"an HTML report needs {error.name or 'plotly and jinja2'}, which is not installed"
        raise InputError(Problem(where="--html", rule=rule, remedy="pip install 'wavetrain[report]'")) from None

    scripts = (get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n"), DRAW)  # as a browser reads them, for the hash
    pictures = [picture for picture in (_times(validation), _distribution(validation), _memory(validation)) if picture]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    reasons = unexpressed(validation.outcomes)
    template = environment.from_string(PAGE)
    page: str = template.render(
        policy=_policy(scripts),
        scripts=[Markup(script) for script in scripts],  # noqa: S704 - ours and plotly's, no word from a table
        figures=Markup(_script_json([picture.figure for picture in pictures])),  # noqa: S704 - escaped there
        pictures=pictures,
        headline=_headline(validation),
        caveat=CAVEAT,
        titles=TITLES,
        sets=[_cells(item) for item in validation.sets[:MOST_LISTED]],
        hidden_sets=max(0, len(validation.sets) - MOST_LISTED),
        reasons=[(item.rows, _clean(item.reason, 300), _clean(item.examples[0])) for item in reasons[:MOST_LISTED]],
        hidden_reasons=max(0, len(reasons) - MOST_LISTED),
    )
    return page


def _policy(scripts: Iterable[str]) -> str:
    """A content security policy: these scripts, styles inside the page (plotly sets them), no request whatever."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rules = ("default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data: blob:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def _script_json(value: object) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or a line."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _label(text: str, most: int = 60) -> str:
    """Text for a label of plotly, which would take tags and entities for markup."""
    return html.escape(_clean(text, most), quote=False)


def _clean(text: str, most: int = 120) -> str:
    return printable(text, most=most)


# --- the tables ---


def _cells(item: SetSummary) -> Json:
    """A line of the table of sets, in the order of `TITLES`."""
    judged = (
        f"{item.true_fits} rightly and {item.false_fits} wrongly said to fit, "
        f"{item.true_oom} rightly and {item.false_oom} wrongly said not to"
    )
    return {
        "name": _clean(item.name if item.is_file else item.name.removeprefix(f"{item.file}: "), 160),
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
        "name": _label(name, 44) if number < MOST_COLOURED else "all other sets",
        "x": [_short(point.measured) for point in points],
        "y": [_short(point.predicted) for point in points],
        "customdata": [[_label(point.row.row_id), f"{point.error:+.1f} %"] for point in points],
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


# --- the page ---

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Predictions against measurements</title>
<style>
:root { --paper: #ffffff; --ink: #1f2328; --faint: #57606a; --line: #d8dee4; --stripe: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0f1419; --ink: #e6edf3; --faint: #9aa6b2; --line: #2c343d; --stripe: #171d24; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem; }
p { color: var(--faint); margin: .2rem 0 .8rem; max-width: 60rem; }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 0; }
dl div { display: flex; flex-direction: column-reverse; }
dt { color: var(--faint); }
dd { margin: 0; font-size: 1.5rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
.text { text-align: left; font-weight: 400; overflow-wrap: anywhere; min-width: 12rem; }
thead .text { font-weight: 600; }
tr.file { background: var(--stripe); }
tr.file .text { font-weight: 600; }
tr:not(.file) .inner { padding-left: 1.3rem; }
</style>
</head>
<body>
<h1>Predictions against measurements</h1>
<dl>
{% for number, what in headline %}
<div><dt>{{ what }}</dt><dd>{{ number }}</dd></div>
{% endfor %}
</dl>
{% for picture in pictures %}
<h2>{{ picture.title }}</h2>
<p>{{ picture.note }}</p>
<div id="{{ picture.figure.id }}" role="img" aria-label="{{ picture.title }}"></div>
{% endfor %}
<noscript><p>The pictures need JavaScript; the tables do not.</p></noscript>
<h2>Sets</h2>
<p>Errors are predicted / measured - 1 in percent, over the rows that count; a set marked * has none of those, and its
errors are over all its rows. OOM: runs rightly predicted to fit or to run out of memory. Spearman: rank correlation of
the layouts of a workload. Regret: time lost by running the layout predicted fastest. Mind that {{ caveat }}.</p>
<div class="wide"><table>
<thead><tr><th scope="col" class="text">set</th>
{% for title in titles %}
<th scope="col">{{ title }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for item in sets %}
<tr{% if item.is_file %} class="file"{% endif %} title="{{ item.hint }}">
<th scope="row" class="text inner">{{ item.name }}{% if not item.counts %} *{% endif %}</th>
{% for number in item.numbers %}
<td>{{ number }}</td>
{% endfor %}
</tr>
{% else %}
<tr><td class="text">no rows</td></tr>
{% endfor %}
</tbody></table></div>
{% if hidden_sets %}
<p>{{ hidden_sets }} more sets are not listed.</p>
{% endif %}
{% if reasons %}
<h2>Rows that can't be expressed</h2>
<div class="wide"><table>
<thead><tr><th scope="col">rows</th><th scope="col" class="text">because</th>
<th scope="col" class="text">for example</th></tr></thead>
<tbody>
{% for rows, reason, example in reasons %}
<tr><td>{{ rows }}</td><td class="text">{{ reason }}</td><td class="text">{{ example }}</td></tr>
{% endfor %}
</tbody></table></div>
{% if hidden_reasons %}
<p>{{ hidden_reasons }} more reasons are not listed.</p>
{% endif %}
{% endif %}
<script type="application/json" id="figures">{{ figures }}</script>
{% for script in scripts %}
<script>{{ script }}</script>
{% endfor %}
</body>
</html>
"""

DRAW = """\
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  // a list of buttons, because plotly adds one by itself that sends the chart to its makers
  var buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
  var config = { displaylogo: false, responsive: true, plotlyServerURL: "", modeBarButtons: [buttons] };
  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }
  function axis(given) {
    var line = colour("--line");
    return Object.assign({ gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true }, given);
  }
  function dressed(layout) {
    var narrow = window.innerWidth < 760;
    return Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), size: 12 },
      legend: { font: { size: 10 }, traceorder: "normal" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--faint"), activecolor: colour("--ink") },
      margin: { l: 60, r: 10, t: 34, b: 50 },
      showlegend: layout.showlegend && !narrow,
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis)
    });
  }
  function draw() {
    figures.forEach(function (figure) {
      Plotly.react(figure.id, figure.data, dressed(figure.layout), config);
    });
  }
  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
"""
