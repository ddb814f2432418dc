"""Figures of a study that run over the number of devices: a line per strategy, published series beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wavetrain.show.page import clean, label
from wavetrain.show.study_groups import Group, counted, finite, money, percent, said, spaced
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.spec import Published

Json = dict[str, Any]
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8A7A00",
)  # Okabe and Ito; the last darker
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon", "star")
NEUTRAL = "#858C94"  # seen on light and dark paper
FAINT = "rgba(133,140,148,0.45)"
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure as plotly reads it, and the same as a table."""

    name: str  # of a file
    section: str
    title: str
    data: Sequence[Json]
    layout: Json
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    group: int | None = None
    of: str = ""  # the words of its group, where there are several
    is_small: bool = False  # stands beside others

    @property
    def id(self) -> str:
        return self.name if self.group is None else f"{self.name}-{self.group + 1}"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number of a record, and how it is drawn."""

    name: str
    section: str
    title: str
    axis: str
    words: Callable[[float | None], str]
    scale: float = 1.0
    is_log: bool = False
    is_zoomed: bool = False  # differs by little: an axis from zero would hide it
    failing: Callable[[float, float], float] | None = None  # from the value and the share of time that is of use
    note: str = ""
    hover: str = ".4~g"


def _times(value: float, share: float) -> float:
    return value * share


def _over(value: float, share: float) -> float:
    return value / share if share > 0 else math.inf


PER_DEVICE = Quantity(
    name="tokens_per_s_per_device",
    section="throughput",
    title="Throughput per device",
    axis="tokens/s per device",
    words=counted,
    failing=_times,
    hover=",.4~s",
    note="Flat is perfect scaling.",
)
THROUGHPUT = Quantity(
    name="tokens_per_s",
    section="throughput",
    title="Throughput",
    axis="tokens/s",
    words=counted,
    is_log=True,
    failing=_times,
    hover=",.4~s",
)
QUANTITIES = (
    PER_DEVICE,
    Quantity(
        name="mfu",
        section="throughput",
        title="Model FLOPs utilization",
        axis="MFU, %",
        words=percent,
        scale=100,
        hover=".1f",
        note="Of the peak of all devices, what the model's own arithmetic uses.",
    ),
    Quantity(
        name="exposed_share",
        section="throughput",
        title="Exposed communication",
        axis="share of a step, %",
        words=percent,
        scale=100,
        hover=".1f",
        note="Communication beside which nothing is computed.",
    ),
    Quantity(
        name="usd_per_million_tokens",
        section="cost",
        title="Cost of a million tokens",
        axis="$ per million tokens",
        words=money,
        failing=_over,
    ),
    Quantity(
        name="train_s",
        section="cost",
        title="Time for the target",
        axis="days",
        words=spaced,
        scale=1 / DAY_S,
        is_log=True,
        failing=_over,
    ),
    Quantity(
        name="train_usd",
        section="cost",
        title="Cost of the target",
        axis="$",
        words=money,
        failing=_over,
        hover=",.4~s",
    ),
    Quantity(
        name="train_mwh",
        section="energy",
        title="Energy for the target",
        axis="MWh",
        words=lambda value: said(value, " MWh", spec=",.4g"),
        failing=_over,
    ),
    Quantity(
        name="tokens_per_joule",
        section="energy",
        title="Tokens per joule",
        axis="tokens/J",
        words=lambda value: said(value, spec=".4g"),
        failing=_times,
    ),
    Quantity(
        name="power_w_per_device",
        section="energy",
        title="Power per device",
        axis="W per device",
        words=lambda value: said(value, " W", spec=".4g"),
        note="Devices that wait draw less, but not nothing. Mind that the axis does not begin at zero.",
        is_zoomed=True,
    ),
    Quantity(
        name="bubble_share",
        section="throughput",
        title="Pipeline bubble",
        axis="share of a step, %",
        words=percent,
        scale=100,
        hover=".1f",
        note="Waiting for other stages.",
    ),
)


@dataclass(frozen=True)
class Look:
    """Colours and marks by strategy, the same in every figure and group."""

    numbers: Mapping[str, int] = field(default_factory=dict)

    def colour(self, strategy: str) -> str:
        return COLOURS[self.numbers[strategy] % len(COLOURS)]

    def symbol(self, strategy: str) -> str:
        return SYMBOLS[self.numbers[strategy] % len(SYMBOLS)]

    def line(self, strategy: str, **more: Any) -> Json:
        """What all lines of a strategy share."""
        colour = self.colour(strategy)
        return {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label(strategy),
            "meta": clean(strategy, 60),
            "legendgroup": f"s{self.numbers[strategy]}",
            "line": {"color": colour, "width": 2.2},
            "marker": {"color": colour, "symbol": self.symbol(strategy), "size": 7},
            **more,
        }


def devices_axis(devices: Sequence[int]) -> Json:
    """Devices on a scale of logarithms, with a mark at every number that was computed."""
    if not devices:
        return {"type": "log", "title": {"text": "devices"}}
    low, high = math.log10(max(min(devices), 1)), math.log10(max(*devices, 1, 2))
    room = max(0.04 * (high - low), 0.05)
    return {
        "type": "log",
        "title": {"text": "devices"},
        "range": [low - room, high + room],
        "tickvals": list(devices),
        "ticktext": [f"{number:,}" for number in devices],
    }


def value_axis(words: str, **more: Any) -> Json:
    return {"title": {"text": words}, "exponentformat": "B", "rangemode": "tozero", **more}


def level(value: float, words: str) -> Json:
    """A line across a figure at a value, with words on it: parts of a layout."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    text = {"xref": "paper", "x": 1, "xanchor": "right", "y": value, "yanchor": "bottom", "showarrow": False}
    return {
        "shapes": [line | {"line": {"color": NEUTRAL, "width": 1.5, "dash": "dashdot"}, "layer": "below"}],
        "annotations": [text | {"text": words, "font": {"size": 11, "color": NEUTRAL}}],
    }


def log_axis(words: str, values: Iterable[float | None]) -> Json:
    """An axis of logarithms with marks at 1, 2 and 5, at powers of ten only where there are many."""
    there = [value for value in values if value is not None and value > 0]
    axis: Json = {"type": "log", "title": {"text": words}}
    if not there:
        return axis
    low, high = math.log10(min(there)), math.log10(max(there))
    room = max(0.05 * (high - low), 0.04)
    low, high = low - room, high + room
    units = (1, 2, 5) if high - low <= 3.5 else (1,)
    powers = range(math.floor(low), min(math.ceil(high), 307) + 1)
    kept = [mark for power in powers for unit in units if low <= math.log10(mark := unit * 10.0**power) <= high]
    if not 2 <= len(kept) <= 20:
        return axis | {"range": [low, high], "exponentformat": "power"}
    return axis | {"range": [low, high], "tickvals": kept, "ticktext": [in_short(mark) for mark in kept]}


def in_short(value: float) -> str:
    """200000 -> 200k."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def drawn(quantity: Quantity, value: float | None) -> float | None:
    """A value as it stands on the axis; an axis of logarithms has no zero."""
    found = finite(None if value is None else value * quantity.scale)
    return None if found is not None and quantity.is_log and found <= 0 else found


def failing(quantity: Quantity, record: Record) -> float | None:
    """The quantity when failures are counted."""
    value = getattr(record, quantity.name)
    if quantity.failing is None or value is None or record.goodput_share is None:
        return None
    return quantity.failing(value, record.goodput_share)


def strategy_lines(group: Group, quantity: Quantity, look: Look) -> list[Json]:
    """A line per strategy, and a dashed one with failures."""
    traces = []
    hover = f"%{{fullData.name}}: %{{y:{quantity.hover}}}<extra></extra>"
    for strategy in group.strategies:
        own = group.line(strategy)
        values = [drawn(quantity, getattr(record, quantity.name)) for record in own]
        if not any(value is not None for value in values):
            continue
        scales = [record.devices for record in own]
        traces.append(look.line(strategy, x=scales, y=values, hovertemplate=hover))
        less = [drawn(quantity, failing(quantity, record)) for record in own]
        if any(value is not None for value in less):
            traces.append(_dashed(look.line(strategy, x=scales, y=less)))
    if any(trace.get("mode") == "lines" for trace in traces):
        traces.append(key_entry("with failures", {"color": NEUTRAL, "width": 2, "dash": "dash"}))
    return traces


def _dashed(trace: Json) -> Json:
    line = trace["line"] | {"dash": "dash", "width": 1.4}
    return trace | {"mode": "lines", "line": line, "showlegend": False, "hoverinfo": "skip"}


def key_entry(words: str, line: Json) -> Json:
    """A line that stands in the legend only."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [None],
        "y": [None],
        "name": words,
        "meta": words,
        "line": line,
        "hoverinfo": "skip",
    }


def published_lines(published: Iterable[Published], quantity: Quantity) -> list[Json]:
    """Series of others in this quantity, in grey, open marks."""
    traces = []
    for number, series in enumerate(published):
        points = published_points(series, quantity)
        if points:
            traces.append(
                published_line(number, series, [(n, drawn(quantity, value)) for n, value in points], quantity)
            )
    return traces


def published_line(
    number: int, series: Published, points: Sequence[tuple[int, float | None]], quantity: Quantity
) -> Json:
    """A series of others; `points` as they stand on the axis."""
    name = f"{series.name} (published)"
    symbol = f"{SYMBOLS[(number + 2) % len(SYMBOLS)]}-open"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(name, 90),
        "meta": clean(name, 90),
        "legendgroup": f"p{number}",
        "x": [devices for devices, _ in points],
        "y": [value for _, value in points],
        "line": {"color": NEUTRAL, "width": 1.4, "dash": "dot"},
        "marker": {"color": NEUTRAL, "symbol": symbol, "size": 9, "line": {"width": 2}},
        "hovertemplate": f"%{{fullData.name}}: %{{y:{quantity.hover}}}<extra></extra>",
    }


def published_points(series: Published, quantity: Quantity) -> tuple[tuple[int, float], ...]:
    """Points in a quantity; of tokens per second, per device and in all are one the other."""
    known = (PER_DEVICE.name, THROUGHPUT.name)
    if series.relative_to is not None:
        return ()
    if series.quantity == quantity.name:
        return series.points
    if series.quantity in known and quantity.name in known:
        to_all = quantity.name == THROUGHPUT.name
        return tuple((devices, value * devices if to_all else value / devices) for devices, value in series.points)
    return ()


def all_devices(group: Group, traces: Iterable[Json]) -> tuple[int, ...]:
    """Scales that the axis must show."""
    theirs = {devices for trace in traces for devices in trace["x"] if isinstance(devices, int)}
    return tuple(sorted({*group.devices, *theirs}))


def lines(group: Group, quantity: Quantity, look: Look, published: Sequence[Published]) -> Figure | None:
    """A quantity against devices."""
    ours = strategy_lines(group, quantity, look)
    if not ours:
        return None
    theirs = published_lines(published, quantity)
    columns, rows = lines_table(group, quantity, published)
    layout = {
        "xaxis": devices_axis(all_devices(group, theirs)),
        "yaxis": _axis(quantity, [y for trace in (*ours, *theirs) for y in trace["y"]]),
        "hovermode": "x unified",
        "height": 330,
    }
    return Figure(
        name=quantity.name.replace("_", "-"),
        section=quantity.section,
        title=quantity.title,
        note=quantity.note,
        data=[*ours, *theirs],
        layout=layout,
        columns=columns,
        rows=rows,
        group=group.number,
        is_small=True,
    )


def kept(group: Group, quantity: Quantity, look: Look, published: Sequence[Published]) -> Figure | None:
    """A quantity as a share of its value at one scale, where others have published theirs so."""
    theirs = [(number, each) for number, each in enumerate(published) if is_share_of(each, quantity)]
    bases = [each.relative_to for _, each in theirs if each.relative_to in group.devices]
    if not bases:
        return None
    base = max(dict.fromkeys(bases), key=bases.count)
    assert base is not None
    shown = replace(quantity, scale=100, words=percent, hover=".1f")
    ours = {name: shares(group.line(name), quantity, base) for name in group.strategies}
    data = [
        look.line(
            name,
            x=list(points),
            y=[finite(100 * share) for share in points.values()],
            hovertemplate=f"%{{fullData.name}}: %{{y:{shown.hover}}} %<extra></extra>",
        )
        for name, points in ours.items()
        if points
    ]
    data += [published_line(i, each, [(n, drawn(shown, v)) for n, v in each.points], shown) for i, each in theirs]
    columns = {**ours, **{f"{each.name} (published)": dict(each.points) for _, each in theirs}}
    scales = sorted({*group.devices, *(devices for _, each in theirs for devices, _ in each.points)})
    return Figure(
        name=f"kept-{quantity.name.replace('_', '-')}",
        section=quantity.section,
        title=f"{quantity.title}, beside what others measured",
        note=f"Ours as percent of {base:,} devices; each published series as percent of the scale its source names.",
        data=data,
        layout={
            "xaxis": devices_axis(scales),
            "yaxis": value_axis(f"% of {base:,} devices"),
            "hovermode": "x unified",
            "height": 440,
        },
        columns=("devices", *(clean(name, 90) for name in columns)),
        rows=tuple((f"{n:,}", *(percent(column.get(n)) for column in columns.values())) for n in scales),
        group=group.number,
    )


def is_share_of(series: Published, quantity: Quantity) -> bool:
    return series.relative_to is not None and series.quantity == quantity.name


def shares(records: Sequence[Record], quantity: Quantity, base: int) -> dict[int, float]:
    """What is left of a quantity at every scale; nothing where a strategy does not fit at the base."""
    values = {record.devices: getattr(record, quantity.name) for record in records}
    first = values.get(base)
    if not first:
        return {}
    return {devices: value / first for devices, value in values.items() if value is not None}


def _axis(quantity: Quantity, values: Iterable[float | None]) -> Json:
    if quantity.is_log:
        return log_axis(quantity.axis, values)
    return value_axis(quantity.axis) | ({"rangemode": "normal"} if quantity.is_zoomed else {})


def lines_table(
    group: Group, quantity: Quantity, published: Sequence[Published]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The numbers of a figure of lines: a row per scale, a column per strategy and published series."""
    theirs = [(series.name, dict(points)) for series in published if (points := published_points(series, quantity))]
    names = (*(clean(name, 60) for name in group.strategies), *(clean(f"{name} (published)", 60) for name, _ in theirs))
    rows = []
    for devices in sorted({*group.devices, *(number for _, points in theirs for number in points)}):
        ours = (_cell(group.at(name, devices), quantity) for name in group.strategies)
        measured = (quantity.words(points.get(devices)) for _, points in theirs)
        rows.append((f"{devices:,}", *ours, *measured))
    return ("devices", *names), tuple(rows)


def _cell(record: Record | None, quantity: Quantity) -> str:
    if record is None:
        return ""
    if not record.fits:
        return "does not fit"
    value, less = getattr(record, quantity.name), failing(quantity, record)
    return quantity.words(value) + (f" ({quantity.words(less)} with failures)" if less is not None else "")
