"""Errors a user can act on. The tree:

    WavetrainError           everything we raise on purpose
      InputError    exit 2   one or more Problems: what, where, rule, legal values, nearest
      RunError      exit 4   a run failed: what the culprit was

Each class knows the exit code it ends the command line with.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from wavetrain.base.units import printable

MOST_SHOWN = 40  # problems printed of one file; the rest are counted
MOST_LEGAL = 12  # legal values printed of one problem


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with an input: where it is, the rule it breaks, and what would be right."""

    where: str  # "model.yaml:4", or an option such as "--seq-len"
    key: str = ""  # "network.nics", empty where no key is to blame
    value: object = None  # what was found, shown beside the key
    rule: str
    legal: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        head = printable(self.where, most=2000)
        if self.key:
            shown = "" if self.value is None else f": {printable(self.value)}"
            head += f"  {printable(self.key)}{shown}"
        lines = [head, f"    {printable(self.rule, most=400)}"]
        if self.legal:
            more = ", ..." if len(self.legal) > MOST_LEGAL else ""
            lines.append("    possible: " + ", ".join(map(printable, self.legal[:MOST_LEGAL])) + more)
        if self.nearest:
            lines.append("    nearest: " + " or ".join(map(printable, self.nearest)))
        if self.remedy:
            lines.append(f"    try: {printable(self.remedy, most=400)}")
        return "\n".join(lines)


class WavetrainError(Exception):
    """Everything Wavetrain raises on purpose."""

    exit_code = 1


class InputError(WavetrainError):
    """The input can't be honoured; all that is wrong with it, at once."""

    exit_code = 2

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        shown = [str(p) for p in self.problems[:MOST_SHOWN]]
        hidden = len(self.problems) - len(shown)
        if hidden:
            shown.append(f"and {hidden} more")
        return "\n".join(shown)


class RunError(WavetrainError):
    """A run failed; the text names the rank or link to blame."""

    exit_code = 4


def one_line(said: object) -> str:
    """What is told on several lines, on one."""
    return ": ".join(line.strip() for line in str(said).splitlines())


def nearest(word: str, legal: Iterable[str], *, most: int = 3) -> tuple[str, ...]:
    """The legal words a person may have meant by `word`, best first."""
    folded, by_folded = word[:100].lower(), {name.lower(): name for name in legal}
    close = difflib.get_close_matches(folded, list(by_folded), n=most, cutoff=0.6)
    begun = [name for name in by_folded if len(folded) > 1 and name.startswith(folded)]
    return tuple(by_folded[name] for name in dict.fromkeys(begun + close))[:most]


def unknown_name(name: str, what: str, legal: Iterable[str]) -> Problem:
    """A name that is neither known nor a file."""
    if "/" in name or name.lower().endswith((".json", ".yaml", ".yml")):
        return Problem(where=name, rule="no such file")
    rule = f"no {what} of that name, and no such file"
    return Problem(where=name, rule=rule, nearest=nearest(name.partition(":")[0], legal))
