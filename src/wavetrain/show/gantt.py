"""Timelines and bars as pictures inside a page: rows on one scale, drawn by `gantt.html`, coloured by `gantt.css`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from wavetrain.base.units import format_seconds
from wavetrain.timeline.timeline import Event, Timeline

LEFT, WIDTH, RIGHT = 124.0, 790.0, 86.0  # of a picture: labels, bars, numbers
ROW, GAP = 18, 8
SIZE = {"left": LEFT, "width": WIDTH, "right": RIGHT, "row": ROW}  # as the template reads them
LETTER = 6.6  # wide, about
MOST_EVENTS = 3600  # of one picture; what is more is not drawn, so that the file stays small
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
    side: str  # predicted or measured, where a picture has both
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


def fitting(text: str, width: float) -> str:
    """The text if a bar has room for it."""
    return text if width >= LETTER * len(text) + 6 else ""


def action_bar(event: Event, start_s: float, longest: float, *, mark: str = "", hint: str = "") -> Bar | None:
    """A compute action, with its microbatch inside; None of anything else."""
    match = _ACTION.fullmatch(event.name)
    if match is None:
        return None
    width = event.duration_s / longest * WIDTH
    words = f"{event.name} {format_seconds(event.duration_s)}{hint}"
    x = LEFT + (event.start_s - start_s) / longest * WIDTH
    return Bar(x, width, f"k-{match[2]}{mark}", fitting(match[3], width), words)


def kinds_legend(rows: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """The kinds of actions that rows have."""
    used = {bar.style.partition(" ")[0] for row in rows for bar in row.bars}
    return tuple((f"k-{kind}", name) for kind, name in KINDS.items() if f"k-{kind}" in used)


def drawn_ranks(
    timelines: Sequence[Timeline], *, most_events: int, most_ranks: int | None = None
) -> tuple[tuple[int, ...], str]:
    """As many ranks as keep the file small, and a note where that is not all."""
    ranks, left, kept = sorted({rank for timeline in timelines for rank in timeline.ranks}), most_events, list[int]()
    for rank in ranks[:most_ranks]:
        left -= sum(event.rank == rank for timeline in timelines for event in timeline.events)
        if left < 0 and kept:
            break
        kept.append(rank)
    note = f"{len(kept)} of {len(ranks)} ranks are drawn." if len(kept) < len(ranks) else ""
    return tuple(kept), note


def ticks(longest: float) -> tuple[tuple[float, str], ...]:
    """About eight round moments."""
    rough = longest / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(unit for unit in (1, 2, 5, 10) if unit * power >= rough)
    count = int(longest / step + 1e-9)
    return tuple((LEFT + i * step / longest * WIDTH, format_seconds(i * step) if i else "0") for i in range(count + 1))


def gantt(timeline: Timeline, *, most_ranks: int = 16, most_events: int = 1200) -> Picture:
    """Compute actions of one timeline, a row per rank; what is not drawn is said."""
    longest = timeline.duration_s or 1.0
    compute = Timeline(tuple(event for event in timeline.events if event.lane == "compute"))
    ranks, note = drawn_ranks([compute], most_events=most_events, most_ranks=most_ranks)
    rows = []
    for number, rank in enumerate(ranks):
        own = (action_bar(event, timeline.start_s, longest) for event in compute.events if event.rank == rank)
        rows.append(Row(number * (ROW + 3), f"rank {rank}", "", tuple(bar for bar in own if bar is not None)))
    return Picture(tuple(rows), len(rows) * (ROW + 3), kinds_legend(rows), ticks(longest), note)
