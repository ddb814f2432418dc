"""What all commands share: printing a document or a card, writing files, refusing options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavetrain.base.errors import InputError, Problem, nearest

if TYPE_CHECKING:
    from rich.console import RenderableType

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]

INFEASIBLE = 3
CHECK_FAILED = 5
MOST_DEGREE = 10_000_000


def options_given(values: Mapping[str, Any], *, without: Sequence[str] = ()) -> dict[str, Any]:
    """A command's arguments that were stated, under the names that users type."""
    stated = {name: value for name, value in values.items() if value is not None and name not in without}
    return {f"--{name.replace('_', '-')}": value for name, value in stated.items()}


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """Options that say nothing beside another are not ignored."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError([Problem(where=name, rule=f"means nothing beside {option}") for name in given])


def refuse_without(option: str, others: Mapping[str, object]) -> None:
    """Options that say nothing without another are not ignored."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError([Problem(where=name, rule=f"means nothing without {option}") for name in given])


def one_of(option: str, value: str, legal: Sequence[str]) -> str:
    if value not in legal:
        rule = f"unknown value {value}"
        raise InputError(Problem(where=option, rule=rule, legal=tuple(legal), nearest=nearest(value, legal)))
    return value


def write(path: Path, content: str) -> None:
    with writing(path):
        path.write_text(content, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A file that can't be written is the user's to know, in one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Problem(where=str(path), rule=f"can't be written: {reason}")) from None


def show(document: dict[str, Any], card: RenderableType, as_json: bool) -> None:
    """One of the two on stdout."""
    if as_json:
        from wavetrain.base.codec import dumps

        print(dumps(document), end="")
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        console.print(card)
    for line in captured.get().splitlines():
        print(line.rstrip())  # a table pads its last column
