"""Lossless JSON for frozen dataclasses, driven by their type annotations.

`decode(type(x), parse_json(dumps(encode(x))))` equals `x`. A union of dataclasses is told apart by the class
attribute `kind`, which is written beside the fields. NaN and infinities are refused in both directions.
"""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from wavetrain.base.document import Node
from wavetrain.base.errors import MOST_SHOWN, InputError, Problem, nearest

T = TypeVar("T")
Json = dict[str, Any]


def dumps(document: object) -> str:
    """JSON text, readable and the same for equal values."""
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def encode(value: object, *, schema: str = "") -> Json:
    """A frozen dataclass as JSON-ready data, with the schema id first where one is given."""
    data = cast(Json, _encode(value))
    return {"schema": schema, **data} if schema else data


def _encode(value: object) -> object:
    if is_dataclass(value):
        kind = getattr(value, "kind", None)
        data = {"kind": kind} if isinstance(kind, str) else {}
        return data | {item.name: _encode(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} has no place in a JSON file")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not a frozen value")


def decode(cls: type[T], node: Node, *, schema: str = "") -> T:
    """The value that `encode` wrote; all that is wrong with the document, at once, otherwise."""
    problems: list[Problem] = []
    if schema:
        node = _without_schema(node, schema, problems)
    value = _decode(cls, node, cls.__name__.lower(), problems)
    if problems:
        raise InputError(problems)
    return cast(T, value)


def _without_schema(node: Node, schema: str, problems: list[Problem]) -> Node:
    if not isinstance(node.value, dict):
        return node
    found = node.value.get("schema")
    if found is None or found.value != schema:
        where = (found or node).where
        shown = found.value if found and not isinstance(found.value, dict | tuple) else None
        problems.append(Problem(where=where, key="schema", value=shown, rule="unknown schema", legal=(schema,)))
    return Node({key: item for key, item in node.value.items() if key != "schema"}, node.file, node.line)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, node: Node, key: str, problems: list[Problem]) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, node, key, problems)
    if origin is tuple:
        return _decode_tuple(arguments, node, key, problems)
    if is_dataclass(hint):
        return _decode_fields(cast(type, hint), node, key, problems)
    if origin is typing.Literal or issubclass(hint, Enum):
        return _decode_word(hint, node, key, problems)
    return _decode_scalar(hint, node, key, problems)


def _decode_scalar(hint: Any, node: Node, key: str, problems: list[Problem]) -> object:
    value: object = float(node.value) if hint is float and type(node.value) is int else node.value
    if type(value) is not hint:
        _complain(node, key, f"must be {hint.__name__}, not {node.what}", problems)
    elif isinstance(value, str) and not value.isprintable():
        _complain(node, key, "must be printable text, without control characters", problems)
    return value


def _decode_word(hint: Any, node: Node, key: str, problems: list[Problem]) -> object:
    words = {str(word): word for word in typing.get_args(hint) or [member.value for member in hint]}
    if isinstance(node.value, str) and node.value in words:
        return words[node.value] if typing.get_origin(hint) is typing.Literal else hint(words[node.value])
    near = nearest(node.value, words) if isinstance(node.value, str) else ()
    _complain(node, key, "must be one of the possible values", problems, legal=tuple(words), near=near)
    return None


def _decode_union(arguments: tuple[Any, ...], node: Node, key: str, problems: list[Problem]) -> object:
    if node.value is None and type(None) in arguments:
        return None
    choices = [choice for choice in arguments if choice is not type(None)]
    if len(choices) == 1:
        return _decode(choices[0], node, key, problems)
    by_kind = {choice.kind: choice for choice in choices}
    kind = node.value.get("kind") if isinstance(node.value, dict) else None
    chosen = by_kind.get(kind.value) if kind and isinstance(kind.value, str) else None
    if chosen is None:
        _complain(kind or node, f"{key}.kind", "must name a known kind", problems, legal=tuple(by_kind))
        return None
    return _decode_fields(chosen, node, key, problems)


def _decode_tuple(arguments: tuple[Any, ...], node: Node, key: str, problems: list[Problem]) -> object:
    if not isinstance(node.value, tuple):
        _complain(node, key, f"must be a list, not {node.what}", problems)
        return None
    hints = (arguments[0],) * len(node.value) if arguments[1:] == (Ellipsis,) else arguments
    if len(hints) != len(node.value):
        _complain(node, key, f"must be a list of {len(hints)} items, not {len(node.value)}", problems)
        return None
    pairs = enumerate(zip(hints, node.value, strict=True))
    return tuple(_decode(hint, item, f"{key}[{position}]", problems) for position, (hint, item) in pairs)


def _decode_fields(cls: type, node: Node, key: str, problems: list[Problem]) -> object:
    if not isinstance(node.value, dict):
        _complain(node, key, f"must be a mapping, not {node.what}", problems)
        return None
    hints = _hints(cls)
    known = {item.name: item for item in fields(cls)}
    before = len(problems)
    if hasattr(cls, "kind") and "kind" in node.value and node.value["kind"].value != cls.kind:
        _complain(node.value["kind"], f"{key}.kind", f"must be {cls.kind}", problems)
    for name, item in node.value.items():
        if name not in known and not (name == "kind" and hasattr(cls, "kind")):
            near = nearest(name, known) if len(problems) < MOST_SHOWN else ()
            _complain(item, f"{key}.{name}", "unknown key", problems, legal=tuple(known), near=near)
    values = {}
    for name, field in known.items():
        if name in node.value:
            values[name] = _decode(hints[name], node.value[name], f"{key}.{name}", problems)
        elif field.default is MISSING and field.default_factory is MISSING:
            _complain(node, f"{key}.{name}", "missing", problems)
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # the value's own rules, checked where it is made
        _complain(node, key, str(error), problems)
        return None


def _complain(
    node: Node,
    key: str,
    rule: str,
    problems: list[Problem],
    *,
    legal: tuple[str, ...] = (),
    near: tuple[str, ...] = (),
) -> None:
    value = None if isinstance(node.value, dict | tuple) else node.value
    problems.append(Problem(where=node.where, key=key, value=value, rule=rule, legal=legal, nearest=near))
