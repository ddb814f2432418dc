"""Megatron-LM's command line as typed values; every bad one at once, and what is not looked at by name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.plan.flags.words import CHOICES, NO_BEARING, NUMBERS, READ, SWITCHES, TEXTS, UNPRICED, WHOLES

OPTION = "--megatron"
MOST = 10**9
MAY_BE_0 = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "num-experts")
_NUMBER = re.compile(r"\d{1,12}(\.\d{0,12})?(e-?\d{1,2})?|\.\d{1,12}")
_ARRAY = re.compile(r"\w+=\(")  # what a Bash array of flags begins with


@dataclass
class Flags:
    """Values by flag, without its dashes."""

    values: dict[str, int | float | str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def on(self, *names: str) -> bool:
        return any(name in self.switches for name in names)

    def has(self, *names: str) -> bool:
        return any(name in self.values for name in names)

    def whole(self, name: str, default: int = 1) -> int:
        value = self.values.get(name, default)
        assert isinstance(value, int)
        return value

    def number(self, name: str, default: float) -> float:
        return float(self.values.get(name, default))

    def word(self, name: str, default: str = "") -> str:
        return str(self.values.get(name, default))

    def complain(self, name: str, rule: str, *, legal: tuple[str, ...] = (), near: tuple[str, ...] = ()) -> None:
        value = self.values.get(name)
        problem = Problem(where=OPTION, key=f"--{name}", value=value, rule=rule, legal=legal, nearest=near)
        self.problems.append(problem)

    def missing(self, name: str, rule: str) -> None:
        """A flag that must be given; one that nobody knows may have been meant for it."""
        near = nearest(name, self.unknown, most=1)
        remedy = f"rename --{near[0]} to --{name}" if near else ""
        self.problems.append(Problem(where=OPTION, key=f"--{name}", rule=f"missing: {rule}", remedy=remedy))

    def finish(self) -> None:
        if self.problems:
            raise InputError(self.problems)


def read_flags(text: str) -> Flags:
    """The flags that a text holds: bare, in a Bash array, or behind the script they are given to."""
    flags = Flags()
    for name, values in _items(_tokens(text), flags):
        if name in READ:
            _read(name, values, flags)
        elif name in UNPRICED:
            flags.ignored.append(f"--{name}: known to Megatron-LM, but not priced here")
        elif name not in NO_BEARING:
            flags.unknown.append(name)
            near = nearest(name, READ, most=1)
            meant = f"; nearest is --{near[0]}" if near else ""
            flags.ignored.append(f"--{name}: not a flag of Megatron-LM that is known here{meant}")
    return flags


def _tokens(text: str) -> list[str]:
    try:
        tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(Problem(where=OPTION, rule=f"can't be read as a shell would: {error}")) from None
    begins = [at for at, token in enumerate(tokens) if token.endswith(".py") or _ARRAY.fullmatch(token)]
    tokens = tokens[begins[0] + 1 :] if begins else tokens  # what stands before is the shell's or the launcher's
    return tokens[:-1] if tokens[-1:] == [")"] else tokens


def _items(tokens: list[str], flags: Flags) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words up to the next one."""
    starts = [position for position, token in enumerate(tokens) if token.startswith("--")]
    if not starts:
        raise InputError(Problem(where=OPTION, rule="has no flags, like --num-layers 32"))
    if starts[0]:
        rule = f"must begin with a flag, like --num-layers, not {tokens[0]}"
        flags.problems.append(Problem(where=OPTION, rule=rule))
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        name, given, value = tokens[start].removeprefix("--").partition("=")
        yield name, [value, *tokens[start + 1 : end]] if given else tokens[start + 1 : end]


def _read(name: str, values: list[str], flags: Flags) -> None:
    """Like argparse, a flag that is given again replaces what it was."""
    problem = _wrong(name, values)
    if problem:
        flags.problems.append(problem)
    elif name in SWITCHES:
        flags.switches.add(name)
    elif name in WHOLES:
        flags.values[name] = int(values[0])
    else:
        flags.values[name] = float(values[0]) if name in NUMBERS else values[0]


def _wrong(name: str, values: list[str]) -> Problem | None:
    rule, legal = "", CHOICES.get(name, ())
    value = " ".join(values)
    if name in SWITCHES:
        rule = "takes no value" if values else ""
    elif len(values) != 1:
        rule = "takes one value"
    elif name in WHOLES:
        least = 0 if name in MAY_BE_0 else 1
        good = value.isascii() and value.isdigit() and len(value) <= 10 and least <= int(value) <= MOST
        rule = "" if good else f"must be a whole number from {least} to {MOST:,}"
    elif name in NUMBERS:
        rule = "" if _NUMBER.fullmatch(value) else "must be a number"
    elif name not in TEXTS and value not in legal:
        rule = "unknown value"
    if not rule:
        return None
    near = nearest(value, legal) if legal else ()
    return Problem(where=OPTION, key=f"--{name}", value=value or None, rule=rule, legal=legal, nearest=near)
