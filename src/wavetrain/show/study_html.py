"""The page of a study: one HTML file with its findings, figures, maps and all its points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wavetrain.base.units import format_count
from wavetrain.show.gantt import SIZE, gantt
from wavetrain.show.page import clean, part, plotly_script, render
from wavetrain.show.study_figures import Figure, group_figures, look_of, overview
from wavetrain.show.study_groups import Group, counted, groups_of, money, percent, said, sized, spaced
from wavetrain.show.study_maps import Map, maps
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.spec import Study
from wavetrain.timeline.timeline import Timeline

MOST_POINTS = 400  # of all groups: more would make the file too large; what is beyond is not drawn
MOST_TIMELINES = 3
LEAST_GAP = 0.0005
FIRST_FINDINGS = 8  # the others are behind a press
COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda r: counted(r.tokens_per_s),
    "per device": lambda r: counted(r.tokens_per_s_per_device),
    "MFU": lambda r: percent(r.mfu),
    "exposed": lambda r: percent(r.exposed_share),
    "bubble": lambda r: percent(r.bubble_share),
    "memory": lambda r: sized(r.needed_bytes),
    "W/device": lambda r: said(r.power_w_per_device, spec=".0f"),
    "kW": lambda r: said(None if r.power_w is None else r.power_w / 1e3, spec=",.4g"),
    "tokens/J": lambda r: said(r.tokens_per_joule, spec=".3g"),
    "$/M tokens": lambda r: money(r.usd_per_million_tokens),
    "goodput": lambda r: percent(r.goodput_share),
    "time": lambda r: spaced(r.train_s),
    "cost": lambda r: money(r.train_usd),
    "MWh": lambda r: said(r.train_mwh, spec=",.4g"),
    "bound by": lambda r: clean(r.bound_by),
    "gap": lambda r: percent(r.gap),
}


@dataclass(frozen=True)
class Part:
    """A section of a group."""

    id: str
    short: str  # in the list of sections
    title: str
    lead: str = ""
    is_shared: bool = False  # one legend for all its figures
    is_in_threes: bool = False
    figures: tuple[Figure, ...] = ()
    maps: tuple[dict[str, Any], ...] = ()


PARTS = (
    Part("throughput", "Throughput", "Throughput, and what a further device gives", is_shared=True),
    Part("bottlenecks", "Bottlenecks", "What binds at each scale"),
    Part("strategies", "Strategies", "Which strategy at which scale"),
    Part("cost", "Cost", "Cost and time", is_shared=True),
    Part("energy", "Energy", "Energy", is_shared=True),
    Part("memory", "Memory", "Memory"),
    Part(
        "waterfall",
        "Losses",
        "From the peak to what is achieved",
        "The best strategy at the smallest, a middle and the largest scale: what keeps the arithmetic below its peak.",
    ),
    Part("what-if", "What if", "What would help"),
)


def study_page(
    study: Study,
    records: Sequence[Record],
    *,
    findings: Sequence[str] = (),
    timelines: Mapping[str, Timeline] | None = None,
) -> str:
    """The page. Needs plotly and jinja2, which the extra `report` installs."""
    groups = groups_of(study, records)
    shown = drawn(groups)
    points = [record for group in groups for record in group.records]
    look = look_of(shown)
    columns = known_columns(points)
    pages = [_group(study, group, group_figures(study, group, look), columns) for group in shown]
    over = overview(groups)
    figures = [figure for page in pages for each in page["parts"] for figure in each.figures]
    used = {each.id for page in pages for each in page["parts"]}
    given = list((timelines or {}).items())
    return render(
        "study.html",
        styles=("page.css", "gantt.css", "study.css"),
        scripts=(plotly_script(), part("draw.js"), part("study.js")),
        data=[_plotted(figure) for figure in ([over] if over else []) + figures],
        title=clean(study.title or study.name, 200),
        facts=_facts(study, points),
        findings=[clean(sentence, 600) for sentence in findings[:FIRST_FINDINGS]],
        more_findings=[clean(sentence, 600) for sentence in findings[FIRST_FINDINGS:]],
        overview=over,
        groups=pages,
        parts=[each for each in PARTS if each.id in used] + [Part("records", "All points", "")],
        columns=columns,
        timelines=[(clean(name), gantt(timeline)) for name, timeline in given[:MOST_TIMELINES]],
        more_timelines=max(0, len(given) - MOST_TIMELINES),
        left_out=len(points) - sum(len(group.records) for group in shown),
        published=[{"name": clean(each.name), "source": clean(each.source, 300)} for each in study.published],
        sureness=sureness(points),
        size=SIZE,
    )


def drawn(groups: Sequence[Group]) -> tuple[Group, ...]:
    """As many groups as keep the file small; of the first at least as many strategies."""
    kept, left = list[Group](), MOST_POINTS
    for group in groups:
        if len(group.records) > left and kept:
            break
        most = max(1, left // len(group.devices))
        names = group.strategies[:most]
        own = tuple(record for record in group.records if record.strategy in names)
        kept.append(replace(group, strategies=names, records=own))
        left -= len(own)
    return tuple(kept)


def known_columns(records: Sequence[Record]) -> tuple[str, ...]:
    """Columns of the table of all points in which any point has something."""
    fitting = [record for record in records if record.fits]
    return tuple(name for name, words in COLUMNS.items() if any(words(record) not in ("", "-") for record in fitting))


def _plotted(figure: Figure) -> dict[str, Any]:
    return {
        "id": figure.id,
        "group": figure.group,
        "small": figure.is_small,
        "data": list(figure.data),
        "layout": figure.layout,
    }


def _group(study: Study, group: Group, figures: Sequence[Figure], columns: Sequence[str]) -> dict[str, Any]:
    """What the template needs of a group."""
    ordered = sorted(group.records, key=lambda record: (record.devices, group.strategies.index(record.strategy)))
    rows = {record.where: f"point-{group.number + 1}-{at}" for at, record in enumerate(ordered)}
    shown = [_map(each, rows) for each in maps(study, group)]
    parts = []
    for each in PARTS:
        own = tuple(figure for figure in figures if figure.section == each.id)
        here = tuple(shown) if each.id == "strategies" else ()
        if own or here:
            in_threes = sum(figure.is_small for figure in own) % 3 == 0
            parts.append(replace(each, is_in_threes=in_threes, figures=own, maps=here))
    return {
        "words": group.words,
        "number": group.number + 1,
        "parts": parts,
        "rows": [_row(record, columns) | {"id": rows[record.where]} for record in ordered],
    }


def _map(shown: Map, rows: Mapping[str, str]) -> dict[str, Any]:
    """A map, whose cells know the line of the table of all points that says more."""
    cells = [
        {"name": name, "cells": [(cell, rows[cell.record.where] if cell.record else "") for cell in row]}
        for name, row in zip(shown.row_names, shown.cells, strict=True)
    ]
    return {
        "id": shown.id,
        "title": shown.title,
        "note": shown.note,
        "corner": shown.corner,
        "column_names": shown.column_names,
        "rows": cells,
    }


def _row(record: Record, columns: Sequence[str]) -> dict[str, Any]:
    return {
        "devices": f"{record.devices:,}",
        "strategy": clean(record.strategy, 60),
        "fits": record.fits,
        "cells": [COLUMNS[name](record) for name in columns] if record.fits else [],
        "plan": clean(record.plan, 400) if record.fits else f"{_unfit(record)}{clean(record.why, 400)}",
    }


def _unfit(record: Record) -> str:
    return "" if record.ran_out else "does not fit: "


def _facts(study: Study, records: Sequence[Record]) -> list[tuple[str, str]]:
    """What was studied."""
    fitting = sum(record.fits for record in records)
    scales = sorted({record.devices for record in records})
    found = [
        ("models", _listed(record.model for record in records)),
        ("tokens per sequence", _listed(f"{record.seq_len:,}" for record in records)),
        ("nodes", _listed(record.node for record in records)),
        ("devices", f"{scales[0]:,} to {scales[-1]:,}" if scales else "-"),
        ("sequences per step", _listed(record.batch for record in records)),
        ("points", f"{len(records):,}, of which {fitting:,} fit"),
    ]
    if study.tokens:
        found.append(("target", f"{format_count(study.tokens)} tokens"))
    if study.failures is not None:
        found.append(("failures", f"one per {study.failures.device_hours:,.0f} device-hours"))
    return found


def _listed(names: Any, most: int = 6) -> str:
    found = [clean(name, 60) for name in dict.fromkeys(names)]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more or "-"


def sureness(records: Sequence[Record]) -> str:
    """How far to trust the numbers, as the records have it."""
    errors = [r.error_share for r in records if r.error_share is not None and math.isfinite(r.error_share)]
    gaps = [r.gap for r in records if r.gap is not None and math.isfinite(r.gap)]
    told = ["All numbers are predictions."]
    if errors:
        told.append(
            f"Of predictions of published runs, four of five are within {percent(max(errors), 0)} of the measurement."
        )
    if gaps:
        least = f"no plan of its strategy is better by more than {percent(max(gaps))}"
        told.append(
            f"Of every plan it is proven that {least if max(gaps) >= LEAST_GAP else 'none of its strategy is better'}."
        )
    return " ".join(told)
