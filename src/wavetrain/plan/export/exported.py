"""`Exported`: a plan in another program's words, and what that program has no words for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SCHEMA = "wavetrain.export/1"


@dataclass(frozen=True)
class Exported:
    """Text for a target. `not_expressed` is also inside the text, where the format has comments."""

    target: str
    text: str
    file: str  # what such a file is usually called
    not_expressed: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "file": self.file,
            "text": self.text,
            "not_expressed": list(self.not_expressed),
        }


def comments(title: str, notes: Iterable[str]) -> str:
    """A title and what is not expressed, as lines that a shell, YAML, TOML and Python skip."""
    lines = (title, *(f"not expressed: {note}" for note in notes))
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)  # a name with a line break must not leave it
