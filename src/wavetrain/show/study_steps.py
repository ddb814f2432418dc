"""Steps of a study as figures: what `gantt` draws inside the page, for files beside it."""

from __future__ import annotations

from collections.abc import Mapping

from wavetrain.show.gantt import LEFT, WIDTH, gantt
from wavetrain.show.page import clean
from wavetrain.show.study_groups import finite
from wavetrain.show.study_lines import Figure, Json
from wavetrain.timeline.timeline import Timeline

# as gantt.css has them
COLOURS = {"k-F": "#6fc0ee", "k-B": "#eeb04b", "k-I": "#f0e168", "k-W": "#4fbf9a", "k-RECOMPUTE": "#dba0c2"}


def step_figures(timelines: Mapping[str, Timeline]) -> tuple[Figure, ...]:
    """A figure per step: compute actions by rank."""
    return tuple(_step(number, *named) for number, named in enumerate(timelines.items(), start=1))


def _step(number: int, name: str, timeline: Timeline) -> Figure:
    picture = gantt(timeline)
    layout = {
        "barmode": "overlay",
        "bargap": 0.12,
        "xaxis": {
            "tickvals": [finite(place - LEFT) for place, _ in picture.ticks],
            "ticktext": [words for _, words in picture.ticks],
            "range": [0, WIDTH],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "height": 130 + 24 * len(picture.rows),
    }
    bars = [(row.name, bar) for row in picture.rows for bar in row.bars]
    data: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "meta": words,
            "x": [finite(bar.width) for _, bar in bars if bar.style == style],
            "y": [rank for rank, bar in bars if bar.style == style],
            "base": [finite(bar.x - LEFT) for _, bar in bars if bar.style == style],
            "marker": {"color": COLOURS[style], "line": {"width": 0.5, "color": "#FFFFFF"}},
            "text": [bar.label for _, bar in bars if bar.style == style],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "hoverinfo": "skip",
        }
        for style, words in picture.legend
    ]
    return Figure(
        name=f"step-{number}",
        section="timelines",
        title=clean(f"One step: {name}", 150),
        note=picture.note,
        data=data,
        layout=layout,
        columns=("rank", "action"),
        rows=tuple((rank, clean(bar.hint)) for rank, bar in bars),
    )
