"""What the demo found: predicted beside measured in a few lines, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from wavetrain.base.units import format_bytes, format_seconds
from wavetrain.show.tables import grid
from wavetrain.study.compare import Comparison, Pair
from wavetrain.timeline.picture import svg

Json = dict[str, Any]


def document(found: Comparison, paths: Mapping[str, Path], *, seconds: float) -> Json:
    """Of seconds, bytes and shares; `paths` are what was written."""
    both = [pair for pair in found.memory if pair.measured is not None]  # no run knows what comes and goes in an action
    memory = Pair("memory", sum(pair.predicted or 0.0 for pair in both), sum(pair.measured or 0.0 for pair in both))
    return {
        "schema": "wavetrain.demo/1",
        "step_s": _pair(found.step),
        "terms": {pair.name: _pair(pair) for pair in found.terms},
        "memory_bytes": _pair(memory),
        "bubble_fraction": _pair(found.bubble),
        "same_order": found.is_same_order,
        "sentences": list(found.sentences),
        "files": {name: str(path) for name, path in paths.items()},
        "seconds": round(seconds, 1),
    }


def _pair(pair: Pair) -> Json:
    return {"predicted": pair.predicted, "measured": pair.measured}


def picture(found: Comparison) -> str:
    """Both timelines of the pipeline, on one scale."""
    title = f"{found.model}: one step of a pipeline"
    return svg(found.predicted_timeline, found.measured_timeline, names=("predicted", "measured"), title=title)


def card(shown: Json) -> RenderableType:
    table = grid("", ">predicted", ">measured")
    seconds = {"step": shown["step_s"]} | {f"  {name}": pair for name, pair in shown["terms"].items()}
    for name, pair in seconds.items():
        table.add_row(name, *(format_seconds(pair[side] or 0.0) for side in ("predicted", "measured")))
    memory, bubble = shown["memory_bytes"], shown["bubble_fraction"]
    table.add_row("memory", *(format_bytes(memory[side]) for side in ("predicted", "measured")))
    table.add_row("idle", *(f"{bubble[side]:.1%}" for side in ("predicted", "measured")))
    order = "the same" if shown["same_order"] else "another"
    files = [Text(f"{name}: {path}") for name, path in shown["files"].items()]
    ended = Text(f"Every rank ran its actions in {order} order. {shown['seconds']:.0f} s in all.")
    return Group(table, "", *(Text(s) for s in shown["sentences"]), ended, "", *files)
