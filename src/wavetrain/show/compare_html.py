"""A comparison as one HTML file: it holds all it needs, runs nothing and asks no one for anything.

Names come from files that strangers wrote. Only the template writes them, and it escapes; here are none but numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from wavetrain.base.units import format_bytes, format_seconds
from wavetrain.show.compare import memory_cells, rows, term_cells
from wavetrain.show.gantt import (
    GAP,
    KINDS,
    LEFT,
    MOST_EVENTS,
    ROW,
    SIZE,
    WIDTH,
    Bar,
    Picture,
    Row,
    action_bar,
    drawn_ranks,
    fitting,
    kinds_legend,
    ticks,
)
from wavetrain.show.page import clean, render
from wavetrain.sim.breakdown import TERMS
from wavetrain.study.compare import LONGER, SHORTER, Comparison, Pair
from wavetrain.study.refit import Refit
from wavetrain.timeline.timeline import Event


def page(found: Comparison, refitted: Refit | None = None) -> str:
    """The page. Needs jinja2, which the extra `report` installs."""
    memory = [pair for pair in found.memory if pair.predicted or pair.measured]
    return render(
        "compare.html",
        styles=("page.css", "gantt.css", "compare.css"),
        title=f"{clean(found.model, 80)} on {clean(found.cluster)}",
        facts=list(rows(found)),
        sentences=found.sentences,
        step=step_picture(found),
        terms=pairs_picture(found.terms, format_seconds, style="t-{}"),
        memory=pairs_picture([pair for pair in memory if pair.measured is not None], format_bytes, style="memory"),
        timelines=timelines_picture(found),
        kinds=KINDS,
        term_rows=[(*term_cells(found, pair), TERMS[pair.name]) for pair in found.terms],
        memory_rows=[memory_cells(pair) for pair in memory],
        changes=[(c.name, f"{c.old:.4g}", f"{c.new:.4g}") for c in (refitted.changes if refitted else ())],
        left=refitted.left if refitted else (),
        environment=[(clean(key, 80), clean(value, 300)) for key, value in found.environment.items()],
        size=SIZE,
    )


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
    return Bar(LEFT + start * WIDTH, width, f"t-{name}", fitting(name, width), hint)


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
    ranks, note = drawn_ranks((first, second), most_events=MOST_EVENTS)
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
    return Picture(tuple(made), y, kinds_legend(made), ticks(longest), note)


def _event_bar(event: Event, start_s: float, longest: float, lasted: tuple[float, float] | None) -> Bar:
    mark = hint = ""
    if lasted is not None:
        before, now = lasted
        mark = " longer" if now > LONGER * before else " shorter" if now < SHORTER * before else ""
        hint = f", predicted {format_seconds(before)}"
    bar = action_bar(event, start_s, longest, mark=mark, hint=hint)
    assert bar is not None, "only actions are compared"
    return bar
