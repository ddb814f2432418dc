"""Reading a mapping key by key: every problem is collected, none is repaired, unknown keys are never ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

from wavetrain.base.document import Node
from wavetrain.base.errors import MOST_SHOWN, InputError, Problem, nearest

T = TypeVar("T")
D = TypeVar("D")

REQUIRED = object()
MOST_TEXT = 200


class Fields:
    """The keys of one mapping.

    A getter returns the value, or its default where the key is absent. Where the value is wrong or a required key is
    missing it notes a problem and returns a harmless placeholder, so that reading goes on and the file's problems come
    out together: `good(...)` says whether keys may be used in a further rule, `finish()` raises.
    A number may be written plainly or with its origin: `{value: 80, source: a100-datasheet}`.
    """

    def __init__(
        self,
        node: Node,
        *,
        parent: Fields | None = None,
        key: str = "",
        strict: bool = True,
        nullable: frozenset[str] | None = None,
    ) -> None:
        self.node = node
        self.key = key
        self.strict = strict  # a file of ours: unknown keys are errors, a number may carry its source
        self.nullable = nullable  # keys whose null means absent; None: all
        self.problems: list[Problem] = parent.problems if parent else []
        self.sources: dict[str, str] = parent.sources if parent else {}
        self.asked: dict[str, None] = {}
        self.bad: set[str] = set()
        if isinstance(node.value, dict):
            self.items = node.value
        else:
            self.items = {}
            rule = f"must be a mapping of keys to values, not {node.what}"
            self.problems.append(Problem(where=node.where, key=key, value=_shown(node), rule=rule))

    # --- complaints ---

    def complain(
        self,
        key: str,
        rule: str,
        *,
        legal: Sequence[object] = (),
        near: Sequence[object] = (),
        remedy: str = "",
    ) -> None:  # as many as a problem has parts
        """Note that the value of `key` (or its absence) breaks `rule`."""
        self.bad.add(key)
        node = self.items.get(key)
        problem = Problem(
            where=(node or self.node).where,
            key=self.full(key),
            value=_shown(node) if node else None,
            rule=rule,
            legal=tuple(map(str, legal)),
            nearest=tuple(map(str, near)),
            remedy=remedy,
        )
        self.problems.append(problem)

    def good(self, *keys: str) -> bool:
        """Whether none of these keys has a problem so far."""
        return not self.bad.intersection(keys)

    def full(self, key: str) -> str:
        return f"{self.key}.{key}" if self.key else key

    def has(self, key: str) -> bool:
        """Whether the key is given with a value (an explicit null counts as absent)."""
        self.asked[key] = None
        return key in self.items and self.items[key].value is not None

    def finish(self) -> None:
        """Raise everything that was found; unknown keys count where the mapping is ours."""
        self.check_unknown()
        if self.problems:
            raise InputError(self.problems)

    def check_unknown(self) -> None:
        if not self.strict:
            return
        legal = sorted(self.asked)
        for key in self.items:
            if key not in self.asked:
                near = nearest(key, legal) if len(self.problems) < MOST_SHOWN else ()
                self.complain(key, "unknown key", legal=legal if not near else (), near=near)

    # --- values ---

    @overload
    def whole(self, key: str, *, least: int = ..., most: int = ...) -> int: ...
    @overload
    def whole(self, key: str, *, least: int = ..., most: int = ..., default: D) -> int | D: ...
    def whole(self, key: str, *, least: int = 1, most: int = 2**31, default: object = REQUIRED) -> object:
        """A whole number in least..most. `true` is not 1, and 4096.0 is written 4096."""

        def convert(node: Node) -> int:
            if isinstance(node.value, bool) or not isinstance(node.value, int):
                whole = isinstance(node.value, float) and node.value.is_integer()
                written = f"; write {node.value:.0f}" if whole else f", not {node.what}"
                raise ValueError(f"must be a whole number{written}")
            if not least <= node.value <= most:
                raise ValueError(f"must be a whole number from {least:,} to {most:,}")
            return node.value

        return self._get(key, convert, default, least)

    @overload
    def number(self, key: str, *, least: float = ..., most: float = ...) -> float: ...
    @overload
    def number(self, key: str, *, least: float = ..., most: float = ..., default: D) -> float | D: ...
    def number(self, key: str, *, least: float = 0.0, most: float = 1e30, default: object = REQUIRED) -> object:
        """A finite number in least..most."""

        def convert(node: Node) -> float:
            if isinstance(node.value, bool) or not isinstance(node.value, int | float):
                raise ValueError(f"must be a number, not {node.what}")
            if not least <= node.value <= most:
                raise ValueError(f"must be a number from {least:g} to {most:g}")
            return float(node.value)

        return self._get(key, convert, default, max(least, 1.0))

    @overload
    def flag(self, key: str) -> bool: ...
    @overload
    def flag(self, key: str, *, default: D) -> bool | D: ...
    def flag(self, key: str, *, default: object = REQUIRED) -> object:
        """true or false, nothing else."""

        def convert(node: Node) -> bool:
            if not isinstance(node.value, bool):
                raise ValueError("must be true or false")
            return node.value

        return self._get(key, convert, default, False)

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, *, default: D) -> str | D: ...
    def text(self, key: str, *, default: object = REQUIRED) -> object:
        """Printable text of bounded length."""

        def convert(node: Node) -> str:
            if not isinstance(node.value, str):
                raise ValueError(f"must be text, not {node.what}")
            if not node.value.isprintable() or not 0 < len(node.value) <= MOST_TEXT:
                raise ValueError(f"must be 1 to {MOST_TEXT} printable characters, without control characters")
            return node.value

        return self._get(key, convert, default, "?")

    @overload
    def choice(self, key: str, legal: Sequence[str]) -> str: ...
    @overload
    def choice(self, key: str, legal: Sequence[str], *, default: D) -> str | D: ...
    def choice(self, key: str, legal: Sequence[str], *, default: object = REQUIRED) -> object:
        """One of the legal words."""
        value = self.text(key, default=default)
        if isinstance(value, str) and value not in legal and key in self.items and self.good(key):
            self.complain(key, "must be one of the possible values", legal=legal, near=nearest(value, legal))
            return legal[0]
        return value if self.good(key) else legal[0]

    def section(self, key: str) -> Fields:
        """The mapping under `key`, reporting into the same list of problems."""
        self.has(key)
        node = self.items.get(key)
        if node is None:
            self.complain(key, "missing")
            node = Node({}, self.node.file, self.node.line)
        return Fields(node, parent=self, key=self.full(key), strict=self.strict)

    def list_of(self, key: str, *, most: int, default: object = REQUIRED) -> tuple[Node, ...]:
        """The items of a list of 1..most entries, or () where it is absent and has a default."""

        def convert(node: Node) -> tuple[Node, ...]:
            if not isinstance(node.value, tuple):
                raise ValueError(f"must be a list, not {node.what}")
            if not 1 <= len(node.value) <= most:
                raise ValueError(f"must be a list of 1 to {most:,} items")
            return node.value

        none: tuple[Node, ...] = ()
        value = self._get(key, convert, default, none)
        return value if isinstance(value, tuple) else none

    def item(self, key: str, position: int, node: Node) -> Fields:
        """Fields of one item of a list."""
        return Fields(node, parent=self, key=f"{self.full(key)}[{position}]", strict=self.strict)

    def _get(self, key: str, convert: Callable[[Node], T], default: object, placeholder: T) -> object:
        if not self.has(key):
            null_is_absent = key not in self.items or self.nullable is None or key in self.nullable
            if default is not REQUIRED and null_is_absent:
                return default
            given = self.items.get(key)
            others = [name for name in self.items if name not in self.asked]
            rule = "missing" if given is None else "must have a value"
            close = nearest(key, others)
            remedy = f"rename {close[0]} to {key}" if close else ""
            self.complain(key, rule, remedy=remedy)
            return placeholder
        try:
            return convert(self._unwrapped(key, self.items[key]))
        except ValueError as error:
            self.complain(key, str(error))
            return placeholder

    def _unwrapped(self, key: str, node: Node) -> Node:
        """Take a value out of `{value: 80, source: ..., note: ...}` and remember the source."""
        if not isinstance(node.value, dict) or not self.strict:
            return node
        if "value" not in node.value or set(node.value) - {"value", "source", "note"}:
            raise ValueError("must be a single value, or {value: ..., source: ..., note: ...}")
        source = node.value.get("source")
        if source is not None:
            if not isinstance(source.value, str) or not source.value.isprintable():
                raise ValueError("source must be printable text")
            self.sources[self.full(key)] = source.value
        return node.value["value"]


def _shown(node: Node) -> object:
    """A value as an error shows it: containers only by their kind, a number without its source."""
    if isinstance(node.value, dict) and "value" in node.value:
        return _shown(node.value["value"])
    return node.value if not isinstance(node.value, dict | tuple) else f"({node.what})"
