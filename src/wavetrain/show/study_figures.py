"""All figures of a study: what devices do, what a further one gives, what binds, what it costs, what would help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from wavetrain.show.page import clean, label
from wavetrain.show.study_bars import bands, elasticities, memory_figures, waterfalls, what_if
from wavetrain.show.study_groups import Group, counted, finite, groups_of, money, percent, spaced
from wavetrain.show.study_lines import (
    COLOURS,
    DAY_S,
    NEUTRAL,
    QUANTITIES,
    SYMBOLS,
    THROUGHPUT,
    Figure,
    Json,
    Look,
    all_devices,
    devices_axis,
    kept,
    key_entry,
    level,
    lines,
    lines_table,
    log_axis,
    published_lines,
    strategy_lines,
    value_axis,
)
from wavetrain.show.study_maps import map_figure, maps
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.returns import Return, Series, knee, marginal
from wavetrain.study.scaling.spec import Published, Study

__all__ = ["Figure", "figures", "group_figures", "overview"]

RETURNS = (
    ("share", "marginal", "What a further device gives", "device"),
    ("joule_share", "marginal-watt", "What a further watt gives", "watt"),
    ("usd_share", "marginal-dollar", "What a further dollar gives", "dollar"),
)


def figures(study: Study, records: Sequence[Record]) -> tuple[Figure, ...]:
    """Every figure of every group, then one that compares the groups, if there are several."""
    groups = groups_of(study, records)
    look = look_of(groups)
    over = overview(groups)
    made = []
    for group in groups:
        own = [*group_figures(study, group, look), *map(map_figure, maps(study, group))]
        made += [replace(figure, of=group.words) for figure in own] if over else own
    return tuple(([over] if over else []) + made)


def look_of(groups: Iterable[Group]) -> Look:
    names = dict.fromkeys(name for group in groups for name in group.strategies)
    return Look({name: number for number, name in enumerate(names)})


def group_figures(study: Study, group: Group, look: Look) -> list[Figure]:
    """Figures of one group, but for its maps."""
    theirs = study.published
    found: list[Figure | None] = [throughput(study, group, look, theirs)]
    found.append(returned(study, group, look, *RETURNS[0]))
    found += [kept(group, quantity, look, theirs) for quantity in (THROUGHPUT, *QUANTITIES)]
    found += [lines(group, quantity, look, theirs) for quantity in QUANTITIES if _is_worth(group, quantity.name)]
    found += [returned(study, group, look, *each) for each in RETURNS[1:]]
    found += [frontier(group, look), bands(group), *memory_figures(group), *waterfalls(group)]
    found += [elasticities(group), what_if(group)]
    return [figure for figure in found if figure is not None]


def _is_worth(group: Group, quantity: str) -> bool:
    """Whether there is anything to see: not of a bubble where no plan has a pipeline."""
    return any(getattr(record, quantity) for record in group.records)


def throughput(study: Study, group: Group, look: Look, published: Sequence[Published]) -> Figure | None:
    """Tokens per second against devices, with the line of perfect scaling and a ring where devices cease to pay."""
    ours = strategy_lines(group, THROUGHPUT, look)
    if not ours or not group.best:
        return None
    theirs = published_lines(published, THROUGHPUT)
    scales = all_devices(group, theirs)
    first = group.best[0]
    per_device = (first.tokens_per_s or 0.0) / first.devices
    ideal = key_entry("ideal", {"color": NEUTRAL, "width": 1.6, "dash": "dot"})
    ends = [first.devices, group.devices[-1]]
    ideal |= {"x": ends, "y": [finite(per_device * devices) for devices in ends]}
    columns, rows = lines_table(group, THROUGHPUT, published)
    least = study.stop_below
    note = (
        "Dotted: every device gives what the first ones do. "
        f"Rings: the last scale up to which a further device gives {percent(least, 0)} of that."
    )
    return Figure(
        name="throughput",
        section="throughput",
        title="Throughput against devices",
        note=note,
        data=[ideal, *ours, *theirs, *_rings(group, look, least)],
        layout={
            "xaxis": devices_axis(scales),
            "yaxis": log_axis("tokens/s", [y for trace in (ideal, *ours, *theirs) for y in trace["y"]]),
            "hovermode": "x unified",
            "height": 520,
        },
        columns=columns,
        rows=rows,
        group=group.number,
    )


def _rings(group: Group, look: Look, least: float) -> list[Json]:
    """A ring around the last point of each strategy that pays."""
    traces = []
    for line in group.series:
        found = knee(line, least)
        at = group.at(line.strategy, found.before) if found is not None else None
        if at is None or at.tokens_per_s is None:
            continue
        ring = {"color": look.colour(line.strategy), "symbol": "circle-open", "size": 17, "line": {"width": 2.5}}
        traces.append(
            look.line(line.strategy, x=[at.devices], y=[finite(at.tokens_per_s)], marker=ring, mode="markers")
            | {"showlegend": False, "hoverinfo": "skip"}
        )
    return traces


def returned(study: Study, group: Group, look: Look, share: str, name: str, title: str, unit: str) -> Figure | None:
    """What a further device (watt, dollar) gives as a share of what each of the first ones does."""
    is_main = unit == "device"
    data, columns = [], dict[str, dict[tuple[int, int], float]]()
    for line in group.series:
        steps = [step for step in marginal(line) if getattr(step, share) is not None]
        if not steps:
            continue
        data.append(_return_line(look, line.strategy, steps, share))
        if is_main:
            data += _with_failures(look, line)
            data += _knee_mark(look, line, study.stop_below)
        columns[line.strategy] = {(step.before, step.after): getattr(step, share) for step in steps}
    if not data:
        return None
    if any(trace.get("mode") == "lines" for trace in data):
        data.append(key_entry("with failures", {"color": NEUTRAL, "width": 2, "dash": "dash"}))
    note = (
        f"Between two scales, further tokens/s over further {unit}s, "
        f"as percent of what each {unit} gives at the smallest scale that fits."
    )
    if is_main:
        note += f" The line is {percent(study.stop_below, 0)}; crosses: where a strategy falls below it."
    return Figure(
        name=name,
        section="throughput" if is_main else "cost" if unit == "dollar" else "energy",
        title=title,
        note=note,
        data=data,
        layout=_return_layout(group, study.stop_below, unit, height=380 if is_main else 330),
        columns=("devices", *(clean(name, 60) for name in columns)),
        rows=tuple(
            (f"{before:,} to {after:,}", *(percent(column.get((before, after))) for column in columns.values()))
            for before, after in sorted({step for column in columns.values() for step in column})
        ),
        group=group.number,
        is_small=not is_main,
    )


def _return_layout(group: Group, least: float, unit: str, *, height: int) -> Json:
    return {
        "xaxis": devices_axis(group.devices),
        "yaxis": value_axis(f"% of a first {unit}", zeroline=True),
        "hovermode": "closest",
        **level(100 * least, f"stop below {percent(least, 0)}"),
        "height": height,
    }


def _middle(step: Return) -> float:
    return float(f"{math.sqrt(step.before * step.after):.6g}")


def _return_line(look: Look, strategy: str, steps: Sequence[Return], share: str) -> Json:
    return look.line(
        strategy,
        x=[_middle(step) for step in steps],
        y=[finite(100 * getattr(step, share)) for step in steps],
        customdata=[f"{step.before:,} to {step.after:,}" for step in steps],
        hovertemplate="%{fullData.name}, %{customdata} devices: %{y:.1f} %<extra></extra>",
    )


def _with_failures(look: Look, line: Series) -> list[Json]:
    steps = marginal(line, failures=True)
    if not steps:
        return []
    trace = _return_line(look, line.strategy, steps, "share")
    thin = trace["line"] | {"dash": "dash", "width": 1.4}
    del trace["customdata"], trace["hovertemplate"]
    return [trace | {"mode": "lines", "line": thin, "showlegend": False, "hoverinfo": "skip"}]


def _knee_mark(look: Look, line: Series, least: float) -> list[Json]:
    found = knee(line, least)
    if found is None:
        return []
    mark = {"color": look.colour(line.strategy), "symbol": "x-thin-open", "size": 13, "line": {"width": 3}}
    words = f"about {found.devices:,.0f} devices, between {found.before:,} and {found.after:,}"
    trace = look.line(line.strategy, x=[finite(found.devices)], y=[100 * least], mode="markers", marker=mark)
    hover = f"%{{fullData.name}} falls below {percent(least, 0)} at {words}<extra></extra>"
    return [trace | {"showlegend": False, "hovertemplate": hover}]


def frontier(group: Group, look: Look) -> Figure | None:
    """Time against money for the target: every point is a number of devices."""
    data, rows = [], []
    for strategy in group.strategies:
        own = [record for record in group.line(strategy) if record.train_s and record.train_usd]
        if not own:
            continue
        text = [f"{record.devices:,}" for record in own]
        data.append(
            look.line(
                strategy,
                x=[finite((record.train_s or 0.0) / DAY_S) for record in own],
                y=[finite(record.train_usd) for record in own],
                customdata=text,
                hovertemplate="%{fullData.name}, %{customdata} devices: %{x:.3~g} days, $%{y:,.4~s}<extra></extra>",
            )
        )
        rows += [(clean(strategy, 60), f"{r.devices:,}", spaced(r.train_s), money(r.train_usd)) for r in own]
    if not data:
        return None
    return Figure(
        name="time-and-cost",
        section="cost",
        title="Time against cost",
        note="Every point is a number of devices; left is sooner, low is cheaper.",
        data=data,
        layout={
            "xaxis": log_axis("days", [x for trace in data for x in trace["x"]]),
            "yaxis": value_axis("$"),
            "hovermode": "closest",
            "height": 330,
        },
        columns=("strategy", "devices", "time", "cost"),
        rows=tuple(rows),
        group=group.number,
        is_small=True,
    )


def overview(groups: Sequence[Group]) -> Figure | None:
    """What is left of a device's throughput as devices are added: the best strategy of every group."""
    data, rows = [], []
    for group in groups:
        if not group.best:
            continue
        values = [record.tokens_per_s_per_device or 0.0 for record in group.best]
        first = values[0] or math.inf
        colour = COLOURS[group.number % len(COLOURS)]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label(group.words),
            "meta": group.words,
            "x": [record.devices for record in group.best],
            "y": [finite(100 * value / first) for value in values],
            "line": {"color": colour, "width": 2.2},
            "marker": {"color": colour, "symbol": SYMBOLS[group.number % len(SYMBOLS)], "size": 7},
            "customdata": [label(record.strategy) for record in group.best],
            "hovertemplate": "%{fullData.name}: %{y:.1f} % (%{customdata})<extra></extra>",
        }
        data.append(trace)
        rows += [
            (group.words, f"{r.devices:,}", clean(r.strategy, 60), counted(value), percent(value / first))
            for r, value in zip(group.best, values, strict=True)
        ]
    if len(data) < 2:
        return None
    scales = sorted({record.devices for group in groups for record in group.best})
    return Figure(
        name="overview",
        section="overview",
        title="Throughput per device, relative to the smallest scale",
        note="The best strategy of each at every scale; each is 100 % at the smallest scale at which it fits.",
        data=data,
        layout={
            "xaxis": devices_axis(scales),
            "yaxis": value_axis("% of the smallest scale"),
            "hovermode": "x unified",
            "height": 440,
        },
        columns=("which", "devices", "best strategy", "tokens/s per device", "of the smallest scale"),
        rows=tuple(rows),
    )
