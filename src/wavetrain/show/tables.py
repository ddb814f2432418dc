"""The two shapes everything is shown in: a list of facts and a plain grid."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A heading, and under it a label and a text per line."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def grid(*columns: str) -> Table:
    """A table; a column whose name starts with > is aligned to the right."""
    table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        table.add_column(Text(name.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    return table
