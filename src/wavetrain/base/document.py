"""YAML and JSON text as a tree of nodes that know their file and line.

Both formats become the same `Node`s, so every later complaint can say where. What the formats allow and we do not
(aliases, tags, duplicate keys, NaN, endless size or depth) is refused here, all at once.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import TypeAlias

import yaml

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import MIB, printable

Scalar: TypeAlias = str | int | float | bool | None
Plain: TypeAlias = "Scalar | list[Plain] | dict[str, Plain]"

MOST_BYTES = 4 * MIB
MOST_DEPTH = 40
MOST_DIGITS = 100
MOST_VALUES = 200_000


@dataclass(frozen=True)
class Node:
    """A value and where it was written; the items of a list or mapping are nodes again."""

    value: Scalar | tuple[Node, ...] | dict[str, Node]
    file: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    def plain(self) -> Plain:
        """The value alone, as `json.loads` would give it."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        return self.value

    @property
    def what(self) -> str:
        """What kind of value this is, in a user's words."""
        names = {dict: "a mapping", tuple: "a list", bool: "true or false", type(None): "nothing", str: "text"}
        return names.get(type(self.value), "a number")


def merge(base: Node, over: Node) -> Node:
    """`base` with everything that `over` states put in its place; mappings merge key by key."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    if "value" in base.value or "value" in over.value:  # a number with its source is replaced as a whole
        return over
    items = dict(base.value)
    for key, item in over.value.items():
        items[key] = merge(items[key], item) if key in items else item
    return replace(over, value=items)


def read_document(path: Path) -> Node:
    """Read a `.json` or YAML file."""
    text = read_text(path)
    parse = parse_json if path.suffix.lower() == ".json" else parse_yaml
    return parse(text, file=str(path))


def exists(path: Path) -> bool:
    """Whether there is such a file or directory; a name no file can have is not there."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """The text of a file of bounded size, or an InputError that says why not."""
    name = str(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
            raise InputError(Problem(where=name, rule="must be a regular file"))
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Problem(where=name, rule=f"can't be read: {reason}")) from None
    if len(data) > MOST_BYTES:
        raise InputError(Problem(where=name, rule=f"must be at most {MOST_BYTES // MIB} MiB"))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(Problem(where=f"{name}:{line}", rule="must be UTF-8 text")) from None


@dataclass
class _Builder:
    """Assembles nodes and collects what is wrong with the text on the way."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    num_values: int = 0
    path: list[str] = field(default_factory=list)  # the keys down to the value being read

    def complain(self, line: int, rule: str, *, key: str = "", value: object = None) -> None:
        full = ".".join([*self.path, key] if key else self.path)
        self.problems.append(Problem(where=f"{self.file}:{line}", key=full, value=value, rule=rule))

    def stop(self, line: int, rule: str) -> InputError:
        """The text can't be read further: everything found so far, and this."""
        self.complain(line, rule)
        return InputError(self.problems)

    def enter(self, line: int, depth: int) -> None:
        self.num_values += 1
        if depth > MOST_DEPTH:
            raise self.stop(line, f"nested deeper than {MOST_DEPTH} levels")
        if self.num_values > MOST_VALUES:
            raise self.stop(line, f"has more than {MOST_VALUES:,} values")

    def scalar(self, value: Scalar, line: int) -> Node:
        if isinstance(value, float) and not math.isfinite(value):
            self.complain(line, "must be a finite number", value=value)
            value = None
        return Node(value, self.file, line)

    def add(self, items: dict[str, Node], key: str, item: Node, line: int) -> None:
        if not key.isprintable():
            self.complain(line, "a key must have no control characters", key=printable(key))
        elif key in items:
            first = items[key].line
            self.complain(line, f"given twice (first on line {first}); a key may appear only once", key=key)
        items[key] = replace(item, line=line)

    def done(self, root: Node) -> Node:
        if self.problems:
            raise InputError(self.problems)
        return root


# --- YAML: PyYAML's events, our own meaning (1.2 core schema; its own resolver reads `on` as true, 1e3 as text) ---

_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def parse_yaml(text: str, *, file: str) -> Node:
    """One YAML document, without aliases, tags and duplicate keys; numbers and words as YAML 1.2 has them."""
    build = _Builder(file)
    line = 1
    try:
        events = iter(yaml.parse(text, Loader=_YAML_LOADER))
        root = Node(None, file, 1)
        documents = 0
        for event in events:
            line = _line(event)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise build.stop(line, "must hold one YAML document, not several")
            elif isinstance(event, yaml.NodeEvent):
                root = _yaml_node(event, events, build, depth=0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        rule = f"not valid YAML: {error.problem or error.context}"
        raise build.stop(mark.line + 1 if mark else line, rule) from None
    except yaml.reader.ReaderError as error:
        bad = text.count("\n", 0, error.position) + 1
        raise build.stop(bad, f"has a character YAML does not allow: #x{ord(str(error.character)[:1]):04x}") from None
    except yaml.YAMLError as error:
        raise build.stop(line, f"not valid YAML: {error}") from None
    return build.done(root)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _yaml_node(event: yaml.Event, events: Iterator[yaml.Event], build: _Builder, depth: int) -> Node:
    line = _line(event)
    build.enter(line, depth)
    if isinstance(event, yaml.AliasEvent):
        build.complain(line, "aliases (*name) are not allowed; write the value out")
        return Node(None, build.file, line)
    _refuse_marks(event, build, line)
    if isinstance(event, yaml.ScalarEvent):
        value = _yaml_scalar(event.value, build, line) if event.implicit[0] else event.value
        return build.scalar(value, line)
    if isinstance(event, yaml.SequenceStartEvent):
        return Node(tuple(_yaml_items(events, build, depth)), build.file, line)
    items: dict[str, Node] = {}
    while not isinstance(key_event := next(events), yaml.MappingEndEvent):
        key_line = _line(key_event)
        if isinstance(key_event, yaml.ScalarEvent):
            key = key_event.value
            _refuse_marks(key_event, build, key_line)
        else:
            build.complain(key_line, "a key must be a word")
            _yaml_node(key_event, events, build, depth + 1)
            key = "?"
        build.path.append(key)
        item = _yaml_node(next(events), events, build, depth + 1)
        build.path.pop()
        build.add(items, key, item, key_line)
    return Node(items, build.file, line)


def _refuse_marks(event: yaml.Event, build: _Builder, line: int) -> None:
    if getattr(event, "anchor", None):
        build.complain(line, "anchors (&name) are not allowed; write the value out where it is needed")
    if tag := getattr(event, "tag", None):
        build.complain(line, f"tags ({tag}) are not allowed")


def reads_as_text(text: str) -> bool:
    """Whether plain YAML text means the text itself, not a number or a word with a meaning."""
    return isinstance(_yaml_scalar(text, _Builder(""), 1), str)


def _yaml_items(events: Iterator[yaml.Event], build: _Builder, depth: int) -> Iterator[Node]:
    position = 0
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        build.path.append(str(position))
        yield _yaml_node(event, events, build, depth + 1)
        build.path.pop()
        position += 1


def _yaml_scalar(text: str, build: _Builder, line: int) -> Scalar:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return _whole(text, build, line)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _NOT_FINITE.fullmatch(text):
        return float(match[1] + match[2])
    return text


def _whole(text: str, build: _Builder, line: int) -> int | None:
    if len(text) > MOST_DIGITS:
        build.complain(line, f"has more than {MOST_DIGITS} digits", value=text)
        return None
    base = 8 if "0o" in text else 16 if "0x" in text else 10
    return int(text, base)


# --- JSON: the standard library's strings and numbers, our own walk, which keeps the lines -------------------------

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CONSTANT = re.compile(r"null|true|false|NaN|-?Infinity")
_CONSTANTS: dict[str, Scalar] = {
    "null": None,
    "true": True,
    "false": False,
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}


def parse_json(text: str, *, file: str) -> Node:
    """One JSON document, with duplicate keys, NaN and infinities refused."""
    reader = _JsonReader(text, _Builder(file))
    root, end = reader.value(reader.skip(0), depth=0)
    end = reader.skip(end)
    if end != len(text):
        raise reader.build.stop(reader.line(end), "not valid JSON: text after the end of the document")
    return reader.build.done(root)


class _JsonReader:
    def __init__(self, text: str, build: _Builder) -> None:
        self.text = text
        self.build = build
        self.newlines = [match.start() for match in re.finditer("\n", text)]

    def line(self, position: int) -> int:
        return bisect.bisect_left(self.newlines, position) + 1

    def skip(self, position: int) -> int:
        match = _SPACE.match(self.text, position)
        return match.end() if match else position

    def fail(self, position: int, rule: str) -> InputError:
        return self.build.stop(self.line(position), f"not valid JSON: {rule}")

    def value(self, at: int, depth: int) -> tuple[Node, int]:
        line = self.line(at)
        self.build.enter(line, depth)
        start = self.text[at : at + 1]
        if start == "{":
            items, end = self.members(at, depth)
            return Node(items, self.build.file, line), end
        if start == "[":
            values, end = self.elements(at, depth)
            return Node(values, self.build.file, line), end
        if start == '"':
            word, end = self.string(at)
            return Node(word, self.build.file, line), end
        if match := _CONSTANT.match(self.text, at):
            return self.build.scalar(_CONSTANTS[match.group()], line), match.end()
        if match := _NUMBER.match(self.text, at):
            whole = match.group(2) is None and match.group(3) is None
            number = _whole(match.group(), self.build, line) if whole else float(match.group())
            return self.build.scalar(number, line), match.end()
        raise self.fail(at, "expected a value" if start else "the text ends too early")

    def string(self, at: int) -> tuple[str, int]:
        try:
            word, end = scanstring(self.text, at + 1, True)
        except json.JSONDecodeError as error:
            raise self.fail(error.pos, error.msg) from None
        return str(word), int(end)

    def members(self, at: int, depth: int) -> tuple[dict[str, Node], int]:
        items: dict[str, Node] = {}
        at = self.skip(at + 1)
        if self.text[at : at + 1] == "}":
            return items, at + 1
        while True:
            if self.text[at : at + 1] != '"':
                raise self.fail(at, "expected a key in double quotes")
            line = self.line(at)
            key, at = self.string(at)
            at = self.skip(at)
            if self.text[at : at + 1] != ":":
                raise self.fail(at, f"expected ':' after the key {printable(key)}")
            self.build.path.append(key)
            item, at = self.value(self.skip(at + 1), depth + 1)
            self.build.path.pop()
            self.build.add(items, key, item, line)
            at = self.skip(at)
            if self.text[at : at + 1] == "}":
                return items, at + 1
            if self.text[at : at + 1] != ",":
                raise self.fail(at, f"expected ',' or '}}' after the value of {printable(key)}")
            at = self.skip(at + 1)

    def elements(self, at: int, depth: int) -> tuple[tuple[Node, ...], int]:
        values: list[Node] = []
        at = self.skip(at + 1)
        if self.text[at : at + 1] == "]":
            return (), at + 1
        while True:
            self.build.path.append(str(len(values)))
            item, at = self.value(at, depth + 1)
            self.build.path.pop()
            values.append(item)
            at = self.skip(at)
            if self.text[at : at + 1] == "]":
                return tuple(values), at + 1
            if self.text[at : at + 1] != ",":
                raise self.fail(at, "expected ',' or ']' in a list")
            at = self.skip(at + 1)
