"""Why a plan is as it is, shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from wavetrain.base.units import format_bytes, format_seconds
from wavetrain.plan.words import sentence
from wavetrain.planner.explain import Compared, Explanation, Flip
from wavetrain.show.plan import compared_data, lost_words
from wavetrain.show.tables import facts, grid

Json = dict[str, Any]
SCHEMA = "wavetrain.explanation/1"
WHAT = {
    "network": ("network {0:.3g} x faster", "network {0:.3g} x slower"),
    "links": ("links {0:.3g} x faster", "links {0:.3g} x slower"),
    "memory": ("{0:.3g} x the memory", "1/{0:.3g} of the memory"),
    "batch": ("{0:.3g} x the batch", "1/{0:.3g} of the batch"),
    "seq_len": ("sequences {0:.3g} x as long", "sequences 1/{0:.3g} as long"),
}


def explanation_document(found: Explanation) -> Json:
    """An explanation for machines."""
    low, high = found.prediction.error_band
    return {
        "schema": SCHEMA,
        "words": sentence(found.plan),
        "step_s": found.prediction.step_s,
        "why": [
            {
                "decision": step.words,
                "step_s": step.step_s,
                "needed_bytes": round(step.needed_bytes),
                "fits": step.needed_bytes <= found.question.capacity_bytes,
                "terms": step.terms,
            }
            for step in found.steps
        ],
        "why_not": [
            compared_data(item) | {"within_error": bool(item.plan) and not found.tells_apart(item)}
            for item in found.others
        ],
        "what_would_change_it": [
            {
                "what": flip.what,
                "factor": flip.factor,
                "tried": flip.tried,
                "known": flip.is_known,
                "then": flip.words or None,
            }
            for flip in found.flips
        ],
        "how_sure": {
            "gap": found.gap,
            "better": compared_data(found.better) if found.better else None,
            "error_share": found.prediction.error_share,
            "step_s_low": low,
            "step_s_high": high,
        },
    }


def explanation_card(found: Explanation) -> RenderableType:
    """The same for people."""
    title = f"{found.plan.model.name} on {found.plan.cluster.name}"
    parts: list[RenderableType] = [
        facts(title, [("plan", sentence(found.plan)), ("step", format_seconds(found.prediction.step_s))]),
        "",
        _steps(found),
        "",
        facts("why not another", ((item.name, _other(found, item)) for item in found.others)),
    ]
    if found.flips:
        title = "what would change the best plan" if found.better else "what would change it"
        parts += ["", facts(title, map(_flip, found.flips))]
    return Group(*parts, "", facts("how sure", _sure(found)))


def _steps(found: Explanation) -> Table:
    table = grid("why this plan, decision by decision", ">step", ">memory", "what changed most")
    for step in found.steps:
        full = step.needed_bytes > found.question.capacity_bytes
        memory = format_bytes(step.needed_bytes) + (", does not fit" if full else "")
        changed = ", ".join(f"{name} {_signed(value)}" for name, value in list(step.terms.items())[:2])
        table.add_row(step.words, format_seconds(step.step_s), memory, changed)
    return table


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"


def _other(found: Explanation, item: Compared) -> str:
    words = lost_words(found.question, item)
    if item.plan is None or item.too_much_bytes or found.tells_apart(item):
        return words
    return f"{words} (nearer than predictions can tell)"


def _flip(flip: Flip) -> tuple[str, str]:
    factor = flip.factor or flip.tried
    more, less = WHAT[flip.what]
    label = more.format(factor) if factor > 1 else less.format(1 / factor)
    if flip.factor is None:
        return label, "the same layout" if flip.is_known else "there was no time to look (--timeout)"
    return label, flip.words + ("" if flip.is_known else "; perhaps sooner: there was no time to look (--timeout)")


def _sure(found: Explanation) -> Iterator[tuple[str, str]]:
    if found.better is not None:
        yield "search", f"a better plan was found: {lost_words(found.question, found.better)}"
    elif found.gap is not None:
        none = "no plan of the space is better"
        yield "search", f"{none}: gap 0" if found.gap == 0 else f"{none} by more than {found.gap:.1%}"
    share, (low, high) = found.prediction.error_share, found.prediction.error_band
    band = f"{format_seconds(low)} to {format_seconds(high)}"
    yield "prediction", f"four of five published runs lie within {share:.1%}: {band} (docs/accuracy.md)"
    close = [item for item in found.others if item.plan and not item.too_much_bytes and not found.tells_apart(item)]
    if close:
        nearest = min(close, key=lambda item: abs(item.slower))
        yield "nearest", f"{nearest.name}, {abs(nearest.slower):.1%} apart: within what predictions can tell"
