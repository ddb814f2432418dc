"""A comparison as one HTML file: it holds all it needs, runs nothing and asks no one for anything.

Names come from files that strangers wrote. Only the template writes them, and it escapes; here are none but numbers.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import format_bytes, format_seconds, printable
from wavetrain.show.compare import memory_cells, rows, term_cells
from wavetrain.sim.breakdown import TERMS
from wavetrain.study.compare import LONGER, SHORTER, Comparison, Pair
from wavetrain.study.refit import Refit
from wavetrain.timeline.timeline import Event, Timeline

LEFT, WIDTH, RIGHT = 124.0, 790.0, 86.0  # of a picture: labels, bars, numbers
ROW, GAP = 18, 8
LETTER = 6.6  # wide, about
MOST_EVENTS = 3600  # of both timelines; what is more is not drawn, so that the file stays small
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "RECOMPUTE": "recomputation"}
_ACTION = re.compile(r"(\d+)(RECOMPUTE|[FBIW])(\d+)")


@dataclass(frozen=True)
class Bar:
    """A piece of a row, with what it says inside and when pointed at."""

    x: float
    width: float
    style: str  # a class of the style sheet
    label: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a picture."""

    y: float
    name: str
    side: str  # predicted or measured
    bars: tuple[Bar, ...]
    number: str = ""  # behind its last bar
    end: float = 0.0  # where that is


@dataclass(frozen=True)
class Picture:
    """Rows on one scale."""

    rows: tuple[Row, ...]
    height: float
    legend: tuple[tuple[str, str], ...] = ()  # class and words
    ticks: tuple[tuple[float, str], ...] = ()  # place and words
    note: str = ""


def page(found: Comparison, refitted: Refit | None = None) -> str:
    """The page. Needs jinja2, which the extra `report` installs."""
    try:
        from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - optional, and slow to import
        from markupsafe import Markup  # noqa: PLC0415
    except ImportError as error:
        rule = f"an HTML page needs {error.name or 'jinja2'}, which is not installed"
        raise InputError(Problem(where="--html", rule=rule, remedy="pip install 'wavetrain[report]'")) from None

    folder = resources.files("wavetrain.show")
    style = folder.joinpath("compare.css").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = _short
    template = environment.from_string(folder.joinpath("compare.html").read_text(encoding="utf-8"))
    memory = [pair for pair in found.memory if pair.predicted or pair.measured]
    text: str = template.render(
        policy=_policy(style),
        style=Markup(style),  # noqa: S704 - ours, no word from a file
        title=f"{printable(found.model)} on {printable(found.cluster, most=120)}",
        facts=list(rows(found)),
        sentences=found.sentences,
        step=step_picture(found),
        terms=pairs_picture(found.terms, format_seconds, style="t-{}"),
        memory=pairs_picture([pair for pair in memory if pair.measured], format_bytes, style="memory"),
        timelines=timelines_picture(found),
        kinds=KINDS,
        term_rows=[(*term_cells(found, pair), TERMS[pair.name]) for pair in found.terms],
        memory_rows=[memory_cells(pair) for pair in memory],
        changes=[(c.name, f"{c.old:.4g}", f"{c.new:.4g}") for c in (refitted.changes if refitted else ())],
        left=refitted.left if refitted else (),
        environment=[(printable(key), printable(value, most=300)) for key, value in found.environment.items()],
        size={"left": LEFT, "width": WIDTH, "right": RIGHT, "row": ROW},
    )
    return text


def _policy(style: str) -> str:
    """A content security policy: this style sheet and nothing else, no request whatever."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _short(value: float) -> str:
    """A length in as few characters as say it."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _fits(label: str, width: float) -> str:
    return label if width >= LETTER * len(label) + 6 else ""


# --- bars ---


def step_picture(found: Comparison) -> Picture:
    """Both steps as one bar each, from their terms."""
    longest = max(found.step.predicted or 0.0, found.step.measured or 0.0) or 1.0
    made = []
    for at, side in enumerate(("predicted", "measured")):
        values = [_of(pair, side) for pair in found.terms]
        starts = list(accumulate(values, initial=0.0))
        bars = tuple(
            _term_bar(pair.name, start / longest, value / longest, f"{pair.name}, {side}: {format_seconds(value)}")
            for pair, start, value in zip(found.terms, starts, values, strict=False)
            if value
        )
        end = LEFT + starts[-1] / longest * WIDTH
        made.append(Row(at * 34, side, side, bars, format_seconds(_of(found.step, side)), end))
    legend = tuple((f"t-{pair.name}", pair.name) for pair in found.terms)
    return Picture(tuple(made), 68, legend)


def _term_bar(name: str, start: float, share: float, hint: str) -> Bar:
    width = share * WIDTH
    return Bar(LEFT + start * WIDTH, width, f"t-{name}", _fits(name, width), hint)


def _of(pair: Pair, side: str) -> float:
    return (pair.predicted if side == "predicted" else pair.measured) or 0.0


def pairs_picture(pairs: Sequence[Pair], shown: Callable[[float], str], *, style: str) -> Picture:
    """Two bars of every pair, one above the other."""
    longest = max((max(_of(pair, "predicted"), _of(pair, "measured")) for pair in pairs), default=0.0) or 1.0
    made = []
    for at, pair in enumerate(pairs):
        for half, side in enumerate(("predicted", "measured")):
            value = _of(pair, side)
            width, number = value / longest * WIDTH, shown(value)
            bar = Bar(LEFT, width, style.format(pair.name), hint=f"{pair.name}, {side}: {number}")
            y = at * (2 * 13 + GAP) + half * 13
            made.append(Row(y, pair.name if not half else "", side, (bar,), number, LEFT + width))
    return Picture(tuple(made), len(pairs) * (2 * 13 + GAP))


# --- timelines ---


def timelines_picture(found: Comparison) -> Picture:
    """Every rank as predicted and below as measured, on one scale; events that took longer or shorter are marked."""
    first, second = found.predicted_timeline, found.measured_timeline
    longest = max(first.duration_s, second.duration_s) or 1.0
    marks = {(shift.rank, shift.name): shift.duration_s for shift in found.moved.shifts}
    ranks, note = _drawn(first, second)
    made, y = [], 0
    for rank in ranks:
        for side, timeline in (("predicted", first), ("measured", second)):
            own = (event for event in timeline.events if event.rank == rank)
            compared = marks if side == "measured" else {}
            bars = tuple(
                _event_bar(event, timeline.start_s, longest, compared.get((rank, event.name))) for event in own
            )
            made.append(Row(y, f"rank {rank}" if side == "predicted" else "", side, bars))
            y += ROW
        y += GAP
    used = {bar.style.partition(" ")[0] for row in made for bar in row.bars}
    legend = tuple((f"k-{kind}", name) for kind, name in KINDS.items() if f"k-{kind}" in used)
    return Picture(tuple(made), y, legend, _ticks(longest), note)


def _drawn(first: Timeline, second: Timeline) -> tuple[tuple[int, ...], str]:
    """As many ranks as keep the file small."""
    ranks, left, kept = sorted({*first.ranks, *second.ranks}), MOST_EVENTS, list[int]()
    for rank in ranks:
        left -= sum(event.rank == rank for timeline in (first, second) for event in timeline.events)
        if left < 0 and kept:
            break
        kept.append(rank)
    note = f"{len(kept)} of {len(ranks)} ranks are drawn." if len(kept) < len(ranks) else ""
    return tuple(kept), note


def _event_bar(event: Event, start_s: float, longest: float, lasted: tuple[float, float] | None) -> Bar:
    match = _ACTION.fullmatch(event.name)
    assert match is not None, "only actions are compared"
    width = event.duration_s / longest * WIDTH
    style, hint = f"k-{match[2]}", f"{event.name} {format_seconds(event.duration_s)}"
    if lasted is not None:
        before, now = lasted
        style += " longer" if now > LONGER * before else " shorter" if now < SHORTER * before else ""
        hint += f", predicted {format_seconds(before)}"
    x = LEFT + (event.start_s - start_s) / longest * WIDTH
    return Bar(x, width, style, _fits(match[3], width), hint)


def _ticks(longest: float) -> tuple[tuple[float, str], ...]:
    """About eight round moments."""
    rough = longest / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(unit for unit in (1, 2, 5, 10) if unit * power >= rough)
    count = int(longest / step + 1e-9)
    return tuple((LEFT + i * step / longest * WIDTH, format_seconds(i * step) if i else "0") for i in range(count + 1))
