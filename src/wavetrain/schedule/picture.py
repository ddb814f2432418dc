"""Pictures of schedules: a grid for the terminal, a Gantt chart as SVG; and the few cells around a culprit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from wavetrain.schedule.action import COMPUTE, Action, Actions, Kind
from wavetrain.schedule.evaluate import Costs, Evaluation

AROUND = 3  # actions shown on each side of a culprit
MOST_BARS = 20_000  # of a chart; more can be neither seen nor opened

# Okabe and Ito's colours, which stay apart for colour-blind eyes; kinds also differ by their letter.
COLOURS = {Kind.F: "#56B4E9", Kind.B: "#E69F00", Kind.I: "#F0E442", Kind.W: "#009E73"}


def around(actions: Actions, places: Sequence[tuple[int, int]]) -> list[str]:
    """The rows around culprits, each marked with > <."""
    marked: dict[int, set[int]] = {}
    for rank, at in places:
        marked.setdefault(rank, set()).add(at)
    lines = []
    for rank in sorted(marked):
        row, spots = actions.ranks[rank], sorted(marked[rank])[:4]
        shown = sorted({i for at in spots for i in range(max(0, at - AROUND), min(len(row), at + AROUND + 1))})
        cells, last = [], -1
        for i in shown:
            if i != last + 1:
                cells.append("...")
            cells.append(f">{row[i]}<" if i in marked[rank] else str(row[i]))
            last = i
        if shown and shown[-1] < len(row) - 1:
            cells.append("...")
        lines.append(f"  rank {rank}: {' '.join(cells)}")
    return lines


def grid(actions: Actions, evaluation: Evaluation, costs: Costs, *, width: int) -> list[str]:
    """One line per rank, time to the right, a column per shortest duration; what does not fit is cut and counted.

    A cell shows the kind and the microbatch where an action starts, - where it goes on, dots where the rank idles.
    """
    cell = max(2, len(str(max(actions.num_microbatches - 1, 0))) + 1)
    unit = min((time for row in (costs.f, costs.i, costs.w) for time in row if time), default=1)
    total = math.ceil(evaluation.makespan / unit)
    columns = max(1, min(total, width // cell))
    lines = []
    for rank, (row, starts) in enumerate(zip(_compute(actions), evaluation.starts, strict=True)):
        cells = ["." * cell] * columns
        for (stage, kind, m), start in zip(row, starts, strict=True):
            first, end = round(start / unit), round((start + costs.by_kind[kind][stage]) / unit)
            for column in range(first, min(max(end, first + 1), columns)):
                label = f"{kind.value[0]}{m}" if column == first else "-"
                cells[column] = label[:cell].ljust(cell, "-" if column > first else " ")
        lines.append(f"rank {rank:<3d} {''.join(cells)}")
    if total > columns:
        lines.append(f"... the first {columns} of {total} columns; --svg draws all")
    return lines


def _compute(actions: Actions) -> list[list[Action]]:
    return [[a for a in row if a.kind in COMPUTE or a.kind is Kind.RECOMPUTE] for row in actions.ranks]


def svg(actions: Actions, evaluation: Evaluation, costs: Costs, *, title: str) -> str:
    """A Gantt chart: ranks downwards, time to the right, microbatch numbers in the bars, idle time hatched."""
    left, row_height, gap, top, width = 60, 26, 6, 58, 1100
    makespan = float(evaluation.makespan) or 1.0
    scale = width / makespan
    rows = _compute(actions)
    height = top + len(rows) * (row_height + gap) + 24
    bubble = float(evaluation.bubble_fraction)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#ffffff"/><rect width="2" height="6" fill="#d0d0d0"/></pattern></defs>',
        f'<rect width="{left + width + 20}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="20" font-size="15" fill="#000">{escape(title)}</text>',
        f'<text x="{left}" y="38" fill="#333">makespan {makespan:g}, idle {bubble:.2%}</text>',
        *_legend(rows, left + width - 400),
    ]
    for rank, (row, starts) in enumerate(zip(rows, evaluation.starts, strict=True)):
        y = top + rank * (row_height + gap)
        parts.append(f'<text x="8" y="{y + 17}" fill="#000">rank {rank}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{row_height}" fill="url(#idle)"/>')
        for action, start in zip(row, starts, strict=True):
            parts.append(_bar(action, float(start) * scale + left, y, row_height, scale, costs))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _bar(action: Action, x: float, y: int, height: int, scale: float, costs: Costs) -> str:
    width = float(costs.by_kind[action.kind][action.stage]) * scale
    colour = COLOURS.get(action.kind, "#CC79A7")
    bar = (
        f'<g><title>{action}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{colour}" '
        f'stroke="#333" stroke-width="0.5"/>'
    )
    label = str(action.microbatch)
    if width >= 7 * len(label) + 2:
        bar += f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle" fill="#000">{label}</text>'
    return bar + "</g>"


def _legend(rows: list[list[Action]], x: int) -> list[str]:
    names = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
    used = {action.kind for row in rows for action in row}
    parts = []
    for kind, name in names.items():
        if kind in used:
            parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{COLOURS[kind]}" stroke="#333"/>')
            parts.append(f'<text x="{x + 17}" y="38" fill="#333">{name}</text>')
            x += 28 + 7 * len(name)
    parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="url(#idle)" stroke="#333"/>')
    parts.append(f'<text x="{x + 17}" y="38" fill="#333">idle</text>')
    return parts
