"""Figures of a study made of bars: where a step goes, what memory holds, what keeps it below its peak, what helps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wavetrain.base.units import GIB, format_seconds
from wavetrain.show.page import clean, label
from wavetrain.show.study_groups import Group, chosen, finite, percent, said, sized
from wavetrain.show.study_lines import COLOURS, FAINT, NEUTRAL, Figure, Json, devices_axis, key_entry, level, value_axis
from wavetrain.study.scaling.record import Record

TERM_COLOURS = {
    "compute": "#0072B2",
    "recompute": "#56B4E9",
    "tensor": "#E69F00",
    "context": "#F0E442",
    "sharding": "#D55E00",
    "transfer": "#CC79A7",
    "bubble": "#A9AFB6",
    "reduction": "#009E73",
    "gather": "#7FD1B9",
    "optimizer": "#882255",
    "host": "#8C6D46",
    "stragglers": "#6B727A",
}
WAITING = {"bubble": "/", "stragglers": "x"}  # hatched: nothing is done
KIND_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#009E73",
    "optimizer": "#882255",
    "gathered": "#56B4E9",
    "activations": "#E69F00",
    "working": "#F0E442",
    "buffers": "#8C6D46",
    "reserve": "#A9AFB6",
}
PARAMETERS = {
    "peak": ("arithmetic peak", "#0072B2"),
    "memory_rate": ("memory rate", "#56B4E9"),
    "link_bandwidth": ("link bandwidth", "#E69F00"),
    "link_latency": ("link latency", "#F0E442"),
    "network_bandwidth": ("network bandwidth", "#D55E00"),
    "network_latency": ("network latency", "#CC79A7"),
}
BELOW_PEAK = "kernels below peak"
GREYS = ("#C6CBD1", "#8F979F")
WIDE = {"width": 0.88, "offset": -0.44}  # of a band, in scales
LEAST_SHARE = 0.002  # of a step: what is smaller shares one bar
OTHERS = "others"


def bar(name: str, colour: str, **more: Any) -> Json:
    return {
        "type": "bar",
        "name": label(name),
        "meta": clean(name, 60),
        "marker": {"color": colour, "line": {"width": 0.5, "color": FAINT}},
        **more,
    }


def scales(records: Iterable[Record]) -> list[str]:
    return [f"{record.devices:,}" for record in records]


def scale_axis(names: Sequence[str]) -> Json:
    """Scales one beside the other, however far apart."""
    marks = {"tickvals": list(names), "ticktext": list(names)}
    return {"type": "category", "title": {"text": "devices"}, "showgrid": False, **marks}


def names_in(maps: Iterable[Mapping[str, float]], known: Iterable[str]) -> tuple[str, ...]:
    """Names that occur, the known ones first."""
    found = dict.fromkeys(name for each in maps for name in each)
    return tuple(dict.fromkeys((*(name for name in known if name in found), *found)))


def bands(group: Group) -> Figure | None:
    """Shares of a step by term at every scale, of the best strategy there; which that is and what binds it above."""
    records = [record for record in group.best if record.terms]
    if not records:
        return None
    terms = names_in((record.terms for record in records), TERM_COLOURS)
    x = scales(records)
    shares = {name: [_share(record, name) for record in records] for name in terms}
    data = [_band(name, x, shares[name]) for name in terms]
    best = [record.strategy for record in records]
    data += [
        _strip("best strategy", x, best, _turns(best), 1),
        _strip("bound by", x, [r.bound_by for r in records], [_term(r.bound_by) for r in records], 0),
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.12,
        "xaxis": scale_axis(x),
        "yaxis": {"title": {"text": "share of a step, %"}, "range": [0, 100], "domain": [0, 0.84]},
        "yaxis2": {
            "domain": [0.87, 1],
            "range": [0, 2],
            "tickvals": [0.5, 1.5],
            "ticktext": ["bound by", "best"],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
        "uniformtext": {"mode": "hide", "minsize": 8},
        "height": 460,
    }
    rows = tuple(
        (
            f"{r.devices:,}",
            clean(r.strategy),
            clean(r.bound_by),
            *(percent((shares[name][i] or 0) / 100) for name in terms),
        )
        for i, r in enumerate(records)
    )
    return Figure(
        name="bottlenecks",
        section="bottlenecks",
        title="Where a step goes",
        note="The best strategy at every scale. Communication counts where nothing is computed beside it; "
        "hatched is waiting. The line on top says what costs most beside computing.",
        data=data,
        layout=layout,
        columns=("devices", "best strategy", "bound by", *(clean(name) for name in terms)),
        rows=rows,
        group=group.number,
    )


def _share(record: Record, name: str) -> float | None:
    total = sum(record.terms.values())
    return finite(100 * record.terms.get(name, 0.0) / total) if total > 0 else None


def _term(name: str) -> str:
    return TERM_COLOURS.get(name, NEUTRAL)


def _band(name: str, x: list[str], y: list[float | None]) -> Json:
    hover = "%{fullData.name}: %{y:.1f} %<br>%{x} devices<extra></extra>"
    trace = bar(name, _term(name), x=x, y=y, hovertemplate=hover, **WIDE)
    if name in WAITING:
        lines = {"fgcolor": "#2B3036", "fgopacity": 0.7, "size": 7, "solidity": 0.2}
        trace["marker"]["pattern"] = {"shape": WAITING[name], "bgcolor": _term(name), **lines}
    return trace


def _strip(what: str, x: list[str], words: list[str], colours: list[str], row: int) -> Json:
    """A row of cells above the bands."""
    return {
        "type": "bar",
        "name": what,
        "x": x,
        "y": [0.84] * len(x),
        "base": row + 0.08,
        "yaxis": "y2",
        **WIDE,
        "marker": {"color": colours},
        "text": [label(word, 24) for word in words],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": [ink_on(colour) for colour in colours], "size": 11},
        "hovertemplate": f"{what}: %{{text}}<br>%{{x}} devices<extra></extra>",
        "showlegend": False,
    }


def _turns(names: Sequence[str]) -> list[str]:
    """Two greys that take turns where a name changes; the colours of terms mean terms here."""
    shade, found = 0, []
    for i, name in enumerate(names):
        shade ^= i > 0 and name != names[i - 1]
        found.append(GREYS[shade])
    return found


def ink_on(colour: str) -> str:
    """Black or white, whichever is read more easily on a colour (WCAG 2 relative luminance)."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return "#111418" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#FFFFFF"


# --- memory ---


def memory_figures(group: Group) -> list[Figure]:
    """What the fullest rank holds: of the best strategy at every scale, and of every strategy at the largest."""
    across = [record for record in group.best if record.memory]
    largest = [record for name in group.strategies if (record := group.at(name, group.devices[-1])) and record.memory]
    made = []
    if across:
        note = "The fullest rank under the best strategy; the line is what a device has."
        x = scales(across)
        made.append(
            _memory(
                group,
                "memory",
                f"Memory by scale: {_whose(across)}",
                note,
                across,
                (x, scale_axis(x)),
            )
        )
    if len(largest) > 1:
        note = "The fullest rank of every strategy that fits."
        places = list(range(len(largest)))  # long names may begin alike
        names = [label(record.strategy, 28) for record in largest]
        marks = {"tickvals": places, "ticktext": names, "tickmode": "array"}
        axis = {"title": {"text": ""}, "showgrid": False, "zeroline": False, **marks}
        title = f"Memory by strategy at {group.devices[-1]:,} devices"
        made.append(_memory(group, "memory-strategies", title, note, largest, (places, axis)))
    return made


def _whose(records: Sequence[Record]) -> str:
    names = {record.strategy for record in records}
    return clean(names.pop(), 40) if len(names) == 1 else "best strategies"


def held(record: Record) -> dict[str, float]:
    """Bytes by kind with what must stay free beside them."""
    rest = (record.needed_bytes or 0.0) - sum(record.memory.values())
    return dict(record.memory) | ({"reserve": rest} if rest > 0 else {})


def _memory(
    group: Group, name: str, title: str, note: str, records: Sequence[Record], along: tuple[Sequence[str | int], Json]
) -> Figure:
    x, axis = along
    parts = [held(record) for record in records]
    kinds = names_in(parts, KIND_COLOURS)
    hover = "%{fullData.name}: %{y:.3~g} GiB<extra></extra>"
    data = [
        bar(
            kind,
            KIND_COLOURS.get(kind, NEUTRAL),
            x=list(x),
            y=[finite(p.get(kind, 0.0) / GIB) for p in parts],
            hovertemplate=hover,
        )
        for kind in kinds
    ]
    capacity = max((r.capacity_bytes or 0.0) / GIB for r in records)  # one node, one capacity
    most = max(capacity, *(sum(part.values()) / GIB for part in parts))
    layout = {
        "barmode": "stack",
        "bargap": 0.2,
        "xaxis": axis,
        "yaxis": value_axis("GiB on the fullest rank", range=[0, 1.12 * most]),
        **(level(capacity, f"a device has {capacity:.4g} GiB") if capacity else {}),
        "hovermode": "x unified",
        "height": 360,
    }
    rows = tuple(
        (
            where,
            *(sized(p[kind]) if kind in p else "-" for kind in kinds),
            sized(sum(p.values())),
            sized(r.capacity_bytes),
        )
        for where, p, r in zip(
            (clean(r.strategy) if name != "memory" else f"{r.devices:,}" for r in records), parts, records, strict=True
        )
    )
    return Figure(
        name=name,
        section="memory",
        title=title,
        note=note,
        data=data,
        layout=layout,
        columns=("devices" if name == "memory" else "strategy", *(clean(kind) for kind in kinds), "in all", "capacity"),
        rows=rows,
        group=group.number,
        is_small=True,
    )


# --- from the peak to what is achieved ---


def losses(record: Record) -> tuple[tuple[str, float], ...]:
    """Shares of a step that keep it from the peak, by name; with the MFU they sum to 1."""
    total = sum(record.terms.values())
    if not total or record.mfu is None:
        return ()
    parts = {BELOW_PEAK: record.terms.get("compute", 0.0) / total - record.mfu}
    parts |= {name: record.terms[name] / total for name in names_in([record.terms], TERM_COLOURS) if name != "compute"}
    large = {name: share for name, share in parts.items() if abs(share) >= LEAST_SHARE}
    rest = sum(share for name, share in parts.items() if name not in large)
    return tuple(large.items()) + (((OTHERS, rest),) if rest else ())


def waterfalls(group: Group) -> list[Figure]:
    """From the peak of all devices to what is achieved, at the smallest, a middle and the largest scale."""
    return [_waterfall(group, record) for record in chosen([r for r in group.best if losses(r)])]


def _waterfall(group: Group, record: Record) -> Figure:
    parts = losses(record)
    names = ["peak", *(name for name, _ in parts), "achieved"]
    ends, left = [100.0], 100.0
    for _, share in parts:
        left -= 100 * share
        ends.append(left)
    sizes = [100.0, *(100 * share for _, share in parts), 100 * (record.mfu or 0.0)]
    base = [0.0, *ends[1:], 0.0]
    colours = [NEUTRAL, *(_term("compute" if name == BELOW_PEAK else name) for name, _ in parts), "#009E73"]
    written = [
        "100 %",
        *(f"-{100 * share:.1f}" if share >= 0 else f"+{-100 * share:.1f}" for _, share in parts),
        percent(record.mfu),
    ]
    y = [label(name, 24) for name in names]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": y,
        "x": [finite(size) for size in sizes],
        "base": [finite(start) for start in base],
        "marker": {
            "color": colours,
            "pattern": {
                "shape": ["", *("/" if name == BELOW_PEAK else WAITING.get(name, "") for name, _ in parts), ""],
                "bgcolor": colours,
                "fgcolor": ["#FFFFFF"] * len(names),
                "fgopacity": 0.8,
                "size": 7,
                "solidity": 0.25,
            },
        },
        "text": written,
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "showlegend": False,
    }
    layout = {
        "xaxis": {
            "title": {"text": "share of the peak, %"},
            "range": [0, 118],
            "tickvals": [0, 50, 100],
            "ticktext": ["0", "50", "100"],
        },
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "bargap": 0.25,
        "height": 110 + 27 * len(names),
        "showlegend": False,
    }
    return Figure(
        name=f"waterfall-{record.devices}",
        section="waterfall",
        title=f"From peak to achieved: {record.devices:,} devices, {clean(record.strategy, 40)}",
        data=[trace],
        layout=layout,
        columns=("what", "share of the peak", "time of a step"),
        rows=(
            ("peak", "100.0 %", ""),
            *((clean(name), percent(-share), format_seconds(share * (record.step_s or 0.0))) for name, share in parts),
            ("achieved (MFU)", percent(record.mfu), format_seconds((record.mfu or 0.0) * (record.step_s or 0.0))),
        ),
        group=group.number,
        is_small=True,
    )


# --- what would help ---


def elasticities(group: Group) -> Figure | None:
    """What a step's speed follows: percent of throughput for a percent of better hardware, at every scale."""
    records = [record for record in group.best if record.elasticity]
    if not records:
        return None
    names = names_in((record.elasticity for record in records), PARAMETERS)
    gains = {name: [finite(_gain(name, record)) for record in records] for name in names}
    hover = "%{fullData.name}: %{y:.2f} %<extra></extra>"
    x = scales(records)
    data = [
        bar(*PARAMETERS.get(name, (name.replace("_", " "), NEUTRAL)), x=x, y=gains[name], hovertemplate=hover)
        for name in names
    ]
    layout = {
        "barmode": "relative",
        "bargap": 0.2,
        "xaxis": scale_axis(x),
        "yaxis": {"title": {"text": "% more throughput"}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "height": 360,
    }
    shown = [clean(PARAMETERS.get(name, (name.replace("_", " "), ""))[0]) for name in names]
    rows = tuple(
        (f"{r.devices:,}", clean(r.strategy), *(said(gains[name][i], " %", spec=".2f") for name in names))
        for i, r in enumerate(records)
    )
    return Figure(
        name="elasticity",
        section="what-if",
        title="For 1 % better hardware",
        note="The best plan at every scale, kept as it is, with one parameter 1 % better (a latency: 1 % less).",
        data=data,
        layout=layout,
        columns=("devices", "strategy", *shown),
        rows=rows,
        group=group.number,
        is_small=True,
    )


def _gain(name: str, record: Record) -> float | None:
    """Of a latency less is better."""
    value = record.elasticity.get(name)
    return None if value is None else -value if "latency" in name else value


def what_if(group: Group) -> Figure | None:
    """What other hardware would give, planned again for it."""
    records = [record for record in group.best if record.what_if]
    if not records:
        return None
    names = names_in((record.what_if for record in records), ())
    hover = "%{fullData.name}: %{y:+.1f} %<extra></extra>"
    data = []
    for i, name in enumerate(names):
        gains = [finite(100 * (r.what_if[name] - 1)) if name in r.what_if else None for r in records]
        colour = COLOURS[i % len(COLOURS)]
        line = key_entry(label(name.replace("_", " ")), {"color": colour, "width": 2.2})
        x = [r.devices for r in records]
        mark = {"marker": {"color": colour, "size": 7}, "mode": "lines+markers", "hoverinfo": "all"}
        data.append(
            line | mark | {"meta": clean(name.replace("_", " "), 60), "x": x, "y": gains, "hovertemplate": hover}
        )
    layout = {
        "xaxis": devices_axis([r.devices for r in records]),
        "yaxis": {"title": {"text": "% more throughput"}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "height": 360,
    }
    rows = tuple(
        (f"{r.devices:,}", clean(r.strategy), *(_times(r.what_if.get(name)) for name in names)) for r in records
    )
    return Figure(
        name="what-if",
        section="what-if",
        title="On other hardware",
        note="The best strategy at every scale, planned again. Of prices: tokens per dollar.",
        data=data,
        layout=layout,
        columns=("devices", "strategy", *(clean(name.replace("_", " ")) for name in names)),
        rows=rows,
        group=group.number,
        is_small=True,
    )


def _times(value: float | None) -> str:
    return said(value, " x", spec=".3f")
