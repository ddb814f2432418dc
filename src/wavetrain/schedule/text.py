"""Schedules as text: one line per rank, actions separated by commas, in PyTorch's grammar; both ways without loss.

PyTorch's own CSV files are of this form. An empty cell there is a slot in which a rank idles; two actions it runs at
once, `(0F4;7B1)OVERLAP_F_B`, are read one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from wavetrain.base.errors import InputError, Problem
from wavetrain.schedule.action import Action, Actions

MOST_PROBLEMS = 100
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def write_text(actions: Actions) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in actions.ranks)


def parse_text(text: str, *, file: str) -> Actions:
    """The schedule that a text states; all that is wrong with it, at once, otherwise."""
    problems: list[Problem] = []
    lines = text.rstrip().splitlines()
    rows = [tuple(_row(line, f"{file}:{number}", problems)) for number, line in enumerate(lines, 1)]
    if not any(rows) and not problems:
        problems.append(Problem(where=file, rule="has no actions; one line per rank, like 0F0,0F1,0B0,0B1"))
    if problems:
        raise InputError(problems)
    return Actions(tuple(rows))


def _row(line: str, where: str, problems: list[Problem]) -> Iterator[Action]:
    for number, cell in enumerate(line.split(","), 1):
        overlap = _OVERLAP.fullmatch(cell.strip())
        for word in overlap[1].split(";") if overlap else (cell,):
            text = word.strip().strip('"')
            if not text:
                continue
            try:
                yield Action.parse(text)
            except ValueError as error:
                if len(problems) < MOST_PROBLEMS:
                    problems.append(Problem(where=where, key=f"action {number}", value=text, rule=str(error)))
