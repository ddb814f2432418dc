"""What a run did, beside what was predicted for it, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from wavetrain.base.units import format_bytes, format_count, format_seconds
from wavetrain.show.tables import facts


def card(document: dict[str, Any]) -> RenderableType:
    """A run in about ten lines."""
    if document.get("already_done"):
        return Text(f"nothing left to do: {document['steps']} steps are done; --steps says how many there shall be")
    predicted, replayed, losses = document["predicted"], document["replayed"], document["losses"]
    rows = [
        ("step", f"{format_seconds(document['step_s'])}   predicted {format_seconds(predicted['step_s'])}"),
        (
            "pipeline",
            f"{format_seconds(document['timeline_s'])}   ideal with the measured times of its actions "
            f"{format_seconds(replayed['step_s'])}",
        ),
        (
            "bubble",
            f"{document['bubble_fraction']:.1%}   ideal {replayed['bubble_fraction']:.1%}"
            f"   predicted {predicted['bubble_fraction']:.1%}",
        ),
        ("tokens/s", format_count(document["tokens_per_s"])),
    ]
    if losses:
        rows.append(("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
    if not document["emulated"]:
        rows.append(("memory", "  ".join(map(format_bytes, document["peak_bytes"]))))
    slow = document["stragglers"]
    found = [f"rank {one['rank']}, {one['slower_than_median']:.2f} times the median" for one in slow["ranks"]]
    found += [f"link {one['from']} -> {one['to']}, {one['ratio']:.1f} times the median" for one in slow["links"]]
    if found:
        rows.append(("slow", "; ".join(found)))
    done = "emulated" if document["emulated"] else "trained"
    title = f"{done} {document['steps']} steps on {document['ranks']} ranks"
    files = [Text(f"wrote {file}") for file in document["files"]]
    return Group(facts(title, rows), *files)
