"""Two timelines of the same plan, one above the other on one scale: usually predicted above measured."""

from __future__ import annotations

import re
from html import escape

from wavetrain.timeline.timeline import Event, Timeline

COLOURS = {"F": "#56B4E9", "B": "#E69F00", "I": "#F0E442", "W": "#009E73", "RECOMPUTE": "#CC79A7"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "RECOMPUTE": "recomputation"}
OTHER = "#999999"
LEFT, WIDTH, ROW, GAP, TOP = 110, 1050, 18, 10, 62
_ACTION = re.compile(r"(\d+)(RECOMPUTE|[FBIW])(\d+)")


def svg(first: Timeline, second: Timeline, *, names: tuple[str, str], title: str) -> str:
    """Compute lanes of both, rank by rank; numbers are microbatches, a line marks the end of each timeline."""
    longest = max(first.duration_s, second.duration_s) or 1.0
    ranks = sorted({*first.ranks, *second.ranks})
    height = TOP + len(ranks) * (2 * ROW + GAP) + 26
    ends = f"{names[0]} {first.duration_s * 1e3:.1f} ms, {names[1]} {second.duration_s * 1e3:.1f} ms"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{LEFT + WIDTH + 20}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="38" fill="#333">{escape(ends)}</text>',
        *_legend(first, second),
    ]
    for at, rank in enumerate(ranks):
        for half, (timeline, name) in enumerate(zip((first, second), names, strict=True)):
            y = TOP + at * (2 * ROW + GAP) + half * ROW
            parts.append(f'<text x="6" y="{y + 13}">{f"rank {rank} " if half == 0 else ""}</text>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end" fill="#555">{escape(name)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 2}" fill="#f3f3f3"/>')
            parts += (_bar(event, timeline, y, longest) for event in timeline.events if _is_on(event, rank))
    for timeline, dash in ((first, "5 3"), (second, "")):
        x = LEFT + timeline.duration_s / longest * WIDTH
        style = f'stroke="#000" stroke-dasharray="{dash}"' if dash else 'stroke="#000"'
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 22}" {style}/>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def _is_on(event: Event, rank: int) -> bool:
    return event.rank == rank and event.lane == "compute"


def _bar(event: Event, timeline: Timeline, y: int, longest: float) -> str:
    x = LEFT + (event.start_s - timeline.start_s) / longest * WIDTH
    width = event.duration_s / longest * WIDTH
    match = _ACTION.fullmatch(event.name)
    colour, label = (COLOURS[match[2]], match[3]) if match else (OTHER, "")
    bar = (
        f'<g><title>{escape(event.name)} {event.duration_s * 1e3:.2f} ms</title><rect x="{x:.2f}" y="{y}" '
        f'width="{width:.2f}" height="{ROW - 2}" fill="{colour}" stroke="#333" stroke-width="0.4"/>'
    )
    if width >= 7 * len(label) + 2:
        bar += f'<text x="{x + width / 2:.2f}" y="{y + 12}" text-anchor="middle">{label}</text>'
    return bar + "</g>"


def _legend(first: Timeline, second: Timeline) -> list[str]:
    matches = (_ACTION.fullmatch(event.name) for event in (*first.events, *second.events))
    used = {match[2] for match in matches if match}
    parts, x = [], LEFT + 560
    for kind, name in NAMES.items():
        if kind in used:
            parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{COLOURS[kind]}" stroke="#333"/>')
            parts.append(f'<text x="{x + 17}" y="38" fill="#333">{name}</text>')
            x += 30 + 7 * len(name)
    return parts
