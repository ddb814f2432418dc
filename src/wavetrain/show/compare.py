"""A prediction beside a measurement, shown: step, terms, memory, then which laws are off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wavetrain.base.units import format_bytes, format_seconds
from wavetrain.show.tables import facts, grid
from wavetrain.study.compare import Comparison, Pair
from wavetrain.study.refit import Refit

Json = dict[str, Any]
SCHEMA = "wavetrain.comparison/1"
ROUNDING = 1e-6  # of a step: the rest of a sum of floats, not time


def document(found: Comparison, refitted: Refit | None = None) -> Json:
    """The same for machines: seconds, bytes, shares of one."""
    data: Json = {
        "schema": SCHEMA,
        "model": found.model,
        "cluster": found.cluster,
        "steps": found.steps,
        "step_s": _pair(found.step),
        "terms": {pair.name: _pair(pair) for pair in found.terms},
        "terms_rank": found.rank,
        "memory": {pair.name: _pair(pair) for pair in found.memory},
        "bubble_fraction": _pair(found.bubble),
        "same_order": found.is_same_order,
        "sentences": list(found.sentences),
    }
    if refitted is not None:
        data["refit"] = {
            "step_s": refitted.prediction.step_s,
            "changes": [{"name": c.name, "old": c.old, "new": c.new} for c in refitted.changes],
            "left": list(refitted.left),
        }
    return data


def _pair(pair: Pair) -> Json:
    return {"predicted": pair.predicted, "measured": pair.measured, "difference": pair.difference}


def card(found: Comparison, refitted: Refit | None = None) -> RenderableType:
    """A comparison for people, eighty characters wide."""
    title = f"{found.model} on {found.cluster}"
    parts: list[RenderableType] = [facts(title, rows(found)), "", _terms(found), "", _memory(found), ""]
    parts += [Text(sentence) for sentence in found.sentences]
    if refitted is not None:
        parts += ["", *_refit(refitted)]
    return Group(*parts)


def rows(found: Comparison) -> Iterator[tuple[str, str]]:
    """The numbers that people ask for first."""
    yield "run", f"{found.steps} steps, of which the median"
    yield "step", words(found.step, format_seconds)
    yield "bubble", words(found.bubble, lambda share: f"{share:.1%}", relative=False)
    yield "order", order(found)


def words(pair: Pair, shown: Callable[[float], str], *, relative: bool = True) -> str:
    assert pair.predicted is not None
    assert pair.measured is not None
    said = f"predicted {shown(pair.predicted)}, measured {shown(pair.measured)}"
    return f"{said}, {pair.measured / pair.predicted - 1:+z.1%}" if relative and pair.predicted else said


def order(found: Comparison) -> str:
    """Whether ranks did what was predicted in the order that was."""
    if found.is_same_order:
        return "every rank computed its actions in the predicted order"
    moved = found.moved
    said = [f"rank {rank} computed in another order" for rank, _ in moved.reordered]
    said += [f"{len(moved.only_first)} actions were not run"] if moved.only_first else []
    said += [f"{len(moved.only_second)} actions were not predicted"] if moved.only_second else []
    return "; ".join(said)


def _terms(found: Comparison) -> Table:
    table = grid(f"terms of rank {found.rank}", ">predicted", ">measured", ">difference", ">of the step")
    for pair in found.terms:
        table.add_row(*term_cells(found, pair))
    return table


def term_cells(found: Comparison, pair: Pair) -> tuple[str, str, str, str, str]:
    off, step_s = pair.difference or 0.0, found.step.measured or 1.0
    off = off if abs(off) > ROUNDING * step_s else 0.0
    signed = ("+" if off > 0 else "") + format_seconds(off)
    return (
        pair.name,
        format_seconds(pair.predicted or 0.0),
        format_seconds(pair.measured or 0.0),
        signed,
        f"{off / step_s:+z.1%}",
    )


def _memory(found: Comparison) -> Table:
    table = grid("memory of the fullest rank", ">predicted", ">measured", ">difference")
    for pair in found.memory:
        if pair.predicted or pair.measured:
            table.add_row(*memory_cells(pair))
    return table


def memory_cells(pair: Pair) -> tuple[str, str, str, str]:
    """What comes and goes inside an action is predicted, but no run knows it."""
    if pair.measured is None:
        return pair.name, format_bytes(pair.predicted or 0.0), "not measured", ""
    off = f"{pair.ratio - 1:+z.1%}" if pair.ratio is not None else ""
    return pair.name, format_bytes(pair.predicted or 0.0), format_bytes(pair.measured), off


def _refit(refitted: Refit) -> Iterator[RenderableType]:
    table = grid("refitted", ">old", ">new")
    for change in refitted.changes:
        table.add_row(change.name, f"{change.old:.4g}", f"{change.new:.4g}")
    yield table
    for line in refitted.left:
        yield Text(f"not refitted: {line}")
    yield Text(f"With these the step is predicted to take {format_seconds(refitted.prediction.step_s)}.")
