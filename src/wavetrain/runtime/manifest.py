"""What a checkpoint says of itself: its manifest, the headers of its shards, and the rules both must keep.

Everything here may come from a stranger. Sizes, counts and depth are bounded before anything is built from them, every
number is checked before it is used, and a manifest ends with the SHA-256 of all the bytes before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import MIB, printable
from wavetrain.runtime.places import Place

SCHEMA = "wavetrain.checkpoint/1"
MANIFEST = "manifest.json"
MOST_BYTES = 64 * MIB  # of a manifest, and of a shard's header
MOST_VALUES = 4_000_000  # of either; a value takes Python some 100 bytes
MOST_SHARDS = 1 << 16
MOST_DIMS = 16
MOST_ELEMENTS = 1 << 50  # of a tensor: a number of bytes stays below 2**63
MOST_NAME = 1024
MOST_FACT = 1 << 128  # a seed or a counter has at most so many bits
MOST_CELLS = 1 << 22  # of the grid that all cuts of a tensor make together

# safetensors' names of number formats, and bytes per element
VALUE = "value"  # the kind of what a model is; an optimizer's moments have others
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.safetensors")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,15}):([1-9][0-9]{0,15})")
_END = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n}\n')
_END_BYTES = len(',\n"sha256": ""\n}\n') + 64

Json: TypeAlias = dict[str, Any]
Facts: TypeAlias = Mapping[str, int | float | str | bool]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a shard has of one tensor: the whole's name, kind, shape and format, and where in it this is."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    place: Place
    number: int = 0  # among the pieces of the same tensor in the same shard

    @property
    def key(self) -> str:
        """Its name in the shard; a kind has no dot, so no two are alike."""
        return f"{self.kind}{f'.{self.number}' if self.number else ''}/{self.name}"

    @property
    def extents(self) -> tuple[int, ...]:
        return extents(self.place)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.extents) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of a checkpoint and what it holds."""

    file: str
    size: int  # bytes
    sha256: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is of, and its shards. `position` (in the data) and the like are flat: a word, a value."""

    run: str
    step: int
    plan_hash: str
    position: Facts = field(default_factory=dict)
    counters: Facts = field(default_factory=dict)
    versions: Facts = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()

    @cached_property
    def pieces(self) -> dict[str, dict[str, list[tuple[Shard, Piece]]]]:
        """All pieces by kind and name."""
        found: dict[str, dict[str, list[tuple[Shard, Piece]]]] = {}
        for shard in self.shards:
            for piece in shard.pieces:
                found.setdefault(piece.kind, {}).setdefault(piece.name, []).append((shard, piece))
        return found


# --- places ---


def extents(place: Place) -> tuple[int, ...]:
    """The shape of what is at a place."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in place)


def checked_place(place: Place, shape: tuple[int, ...]) -> Place:
    """The place without its empty ranges; ValueError if it is none of a tensor of this shape."""
    found = tuple(tuple((start, stop) for start, stop in ranges if start != stop) for ranges in place)
    if len(found) != len(shape):
        raise ValueError(f"a place of {len(found)} dimensions in a tensor of {len(shape)}")
    for dim, (ranges, size) in enumerate(zip(found, shape, strict=True)):
        if any(not 0 <= start < stop <= size for start, stop in ranges):
            raise ValueError(f"a range of dimension {dim} is not inside 0:{size}")
        if any(before[1] > after[0] for before, after in pairwise(sorted(ranges))):
            raise ValueError(f"ranges of dimension {dim} overlap")
    return found


def place_text(place: Place) -> str:
    """`0:4 8:12, 0:16`: ranges by a space, dimensions by a comma."""
    return ", ".join(" ".join(f"{start}:{stop}" for start, stop in ranges) for ranges in place)


def _place_of(text: str, shape: tuple[int, ...]) -> Place:
    dims = text.split(", ") if shape or text else []
    matches = [[_RANGE.fullmatch(word) for word in dim.split(" ") if dim] for dim in dims]
    if not all(all(dim) for dim in matches):
        raise ValueError("a place is written like 0:4 8:12, 0:16")
    place = tuple(tuple((int(match[1]), int(match[2])) for match in dim if match) for dim in matches)
    if checked_place(place, shape) != place:
        raise ValueError("has an empty range")
    return place


def faults_of_cover(manifest: Manifest) -> list[str]:
    """What of which tensor is in no shard or in several, or is not the same tensor everywhere."""
    known: dict[tuple[tuple[int, ...], tuple[Place, ...]], str] = {}  # a layer's cut is the next one's
    faults = []
    for names in manifest.pieces.values():
        for held in names.values():
            first = held[0][1]
            where = f"{first.kind} of {printable(first.name)}"
            if any((piece.shape, piece.dtype) != (first.shape, first.dtype) for _, piece in held):
                faults.append(f"{where}: has not the same shape and format in all shards")
                continue
            pattern = (first.shape, tuple(piece.place for _, piece in held))
            if pattern not in known:
                known[pattern] = _fault_of_cover(*pattern)
            if known[pattern]:
                faults.append(f"{where}: {known[pattern]}")
    return faults


def _fault_of_cover(shape: tuple[int, ...], places: tuple[Place, ...]) -> str:
    """Count on the grid of all cuts how often each cell is there."""
    edges = [
        sorted({0, size}.union(*(bounds for place in places for bounds in place[dim])))
        for dim, size in enumerate(shape)
    ]
    cells = tuple(len(line) - 1 for line in edges)
    if math.prod(cells) > MOST_CELLS:
        return f"is cut into more than {MOST_CELLS:,} cells"
    counts, marked = np.zeros(cells, dtype=np.int32), 0
    at = [{edge: number for number, edge in enumerate(line)} for line in edges]
    for place in places:
        inside = [
            [cell for start, stop in ranges for cell in range(at[dim][start], at[dim][stop])]
            for dim, ranges in enumerate(place)
        ]
        counts[np.ix_(*(np.array(line, dtype=np.intp) for line in inside))] += 1
        marked += math.prod(map(len, inside))
        if marked > counts.size:  # one is twice already; a stranger's list may go on for long
            break
    wrong = np.argwhere(counts > 1) if marked > counts.size else np.argwhere(counts != 1)
    if not len(wrong):
        return ""
    cell = ", ".join(f"{edges[dim][number]}:{edges[dim][number + 1]}" for dim, number in enumerate(wrong[0].tolist()))
    return f"[{cell}] is in {'more than one piece' if counts[tuple(wrong[0])] else 'no shard'}"


# --- JSON that may be a stranger's ---


def strict_json(data: bytes | bytearray, *, where: str) -> Json:
    """One JSON mapping. It may be much larger than a document by hand, so lines are not kept."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:  # counts some that are in texts; never too few
        refuse(where, f"has more than {MOST_VALUES:,} values")
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_mapping, parse_constant=_constant)
    except UnicodeDecodeError:
        refuse(where, "must be UTF-8 text")
    except RecursionError:
        refuse(where, "is nested too deeply")
    except ValueError as error:
        refuse(where, f"not valid JSON: {error}")
    if not isinstance(found, dict):
        refuse(where, "must be a mapping")
    return found


def _mapping(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{printable(twice)} is given twice; a key may appear only once")
    return found


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def refuse(where: str, rule: str, *, key: str = "", value: object = None) -> NoReturn:
    """Refuse a file."""
    raise InputError(Problem(where=where, key=key, value=value, rule=rule))


def _whole(value: object, *, least: int = 0, most: int = MOST_ELEMENTS) -> int:
    if type(value) is not int or not least <= value <= most:  # True is an int to Python
        raise ValueError(f"must be a whole number from {least} to {most:,}")
    return value


def _text(value: object, pattern: re.Pattern[str] | None = None, *, most: int = MOST_NAME) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise ValueError(f"must be printable text of 1 to {most:,} characters")
    if pattern and not pattern.fullmatch(value):
        raise ValueError(f"must be like {pattern.pattern}")
    return value


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_DIMS:
        raise ValueError(f"must be a list of at most {MOST_DIMS} sizes")
    shape = tuple(_whole(size) for size in value)
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"has more than {MOST_ELEMENTS:,} elements")
    return shape


def _dtype(value: object) -> str:
    if not isinstance(value, str) or value not in ITEM_BYTES:
        raise ValueError(f"unknown number format; known are {', '.join(ITEM_BYTES)}")
    return value


def _fields(value: object, names: Iterable[str]) -> list[Any]:
    """The values of a mapping that has these keys and no others."""
    names = tuple(names)
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"must be a mapping with exactly the keys {', '.join(names)}")
    return [value[name] for name in names]


def _items(value: object) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping")
    return value.items()


def _facts(value: object) -> Json:
    for name, item in _items(value):
        _text(name)
        if isinstance(item, str):
            _text(item)
        elif not isinstance(item, int | float) or not -MOST_FACT < item < MOST_FACT:
            raise ValueError(f"{printable(name)}: must be a finite number, text, true or false")
    return dict(_items(value))


# --- the manifest's file ---

_HEAD = ("schema", "run", "step", "plan_hash", "position", "counters", "versions")
_BODY = ("tensors", "shards")


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file of a manifest: one key a line, and at its end the digest of all before."""
    values = {"schema": SCHEMA, **{name: getattr(manifest, name) for name in _HEAD[1:]}, **_body(manifest.shards)}
    lines = [f'"{name}": {json.dumps(value, allow_nan=False)}' for name, value in values.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(data: bytes | bytearray, *, where: str) -> Manifest:
    """The manifest that was written; InputError if a bit of it is another, or if it breaks a rule."""
    end = _END.fullmatch(data[-_END_BYTES:])
    if end is None:
        refuse(where, "is cut or changed: it must end with its own SHA-256")
    if hashlib.sha256(data[:-_END_BYTES]).hexdigest().encode() != end[1]:
        refuse(where, "is changed: its SHA-256 is not the one at its end")
    document = strict_json(data, where=where)
    key = "schema"
    try:
        *head, tensors, shards, _ = _fields(document, (*_HEAD, *_BODY, "sha256"))
        if head[0] != SCHEMA:
            raise ValueError(f"unknown schema; known is {SCHEMA}")
        rules: tuple[Callable[[object], Any], ...] = (_run, _whole, _text, _facts, _facts, _facts)
        values = {}
        for key, rule, value in zip(_HEAD[1:], rules, head[1:], strict=True):
            values[key] = rule(value)
        key = "shards"
        found = Manifest(**values, shards=_shards(tensors, shards))
    except ValueError as error:
        refuse(where, str(error), key=key)
    if faults := faults_of_cover(found):
        refuse(where, "; ".join(faults[:3]))
    return found


def pack(shard: Shard) -> str:
    """A shard's facts as text, for the rank that writes the manifest."""
    return json.dumps(_body([shard]))


def unpack(text: str) -> Shard:
    """The shard that `pack` was given."""
    where = "a shard's facts"
    try:
        (shard,) = _shards(*_fields(strict_json(text.encode(), where=where), _BODY))
    except ValueError as error:
        refuse(where, str(error))
    return shard


def _run(value: object) -> str:
    return _text(value, _RUN)


def _body(shards: Iterable[Shard]) -> Json:
    """Shapes and formats once per tensor, places once per piece."""
    tensors: dict[str, Json] = {}
    listed = []
    for shard in shards:
        places: dict[str, dict[str, list[str]]] = {}
        for piece in shard.pieces:
            tensors.setdefault(piece.kind, {})[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape)}
            places.setdefault(piece.kind, {}).setdefault(piece.name, []).append(place_text(piece.place))
        listed.append({"file": shard.file, "size": shard.size, "sha256": shard.sha256, "places": places})
    return {"tensors": tensors, "shards": listed}


def _shards(tensors: object, shards: object) -> tuple[Shard, ...]:
    wholes = {
        (_text(kind, _KIND), _text(name)): _dtype_and_shape(*_fields(facts, ("dtype", "shape")))
        for kind, names in _items(tensors)
        for name, facts in _items(names)
    }
    if not isinstance(shards, list) or len(shards) > MOST_SHARDS:
        raise ValueError(f"must be a list of at most {MOST_SHARDS:,} shards")
    known = _Known(wholes, cache(_place_of))
    found = tuple(_shard(*_fields(item, ("file", "size", "sha256", "places")), known=known) for item in shards)
    if len({shard.file for shard in found}) != len(found):
        raise ValueError("has a file twice")
    held = {(piece.kind, piece.name) for shard in found for piece in shard.pieces}
    for kind, name in wholes:
        if (kind, name) not in held:
            raise ValueError(f"{kind} of {printable(name)} is in no shard")
    return found


class _Known(NamedTuple):
    """What places are read by; a layer's are the next one's."""

    wholes: Mapping[tuple[str, str], tuple[str, tuple[int, ...]]]
    place_of: Callable[[str, tuple[int, ...]], Place]


def _dtype_and_shape(dtype: object, shape: object) -> tuple[str, tuple[int, ...]]:
    return _dtype(dtype), _shape(shape)


def _shard(file: object, size: object, sha256: object, places: object, *, known: _Known) -> Shard:
    file = _text(file, FILE)
    try:
        pieces = [
            piece
            for kind, names in _items(places)
            for name, texts in _items(names)
            for piece in _pieces(kind, name, texts, known)
        ]
        return Shard(file=file, size=_whole(size), sha256=_text(sha256, _DIGEST), pieces=tuple(pieces))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _pieces(kind: str, name: str, texts: object, known: _Known) -> Iterable[Piece]:
    if (kind, name) not in known.wholes:
        raise ValueError(f"{printable(kind)} of {printable(name)} is not under tensors")
    dtype, shape = known.wholes[kind, name]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{kind} of {printable(name)}: must be a list of places")
    for number, text in enumerate(texts):
        try:
            place = known.place_of(text, shape)
        except ValueError as error:
            raise ValueError(f"{kind} of {printable(name)}: {error}") from None
        yield Piece(name=name, kind=kind, shape=shape, dtype=dtype, place=place, number=number)


# --- a shard's header: https://github.com/huggingface/safetensors#format ---


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, metadata: Json | None = None) -> bytes:
    """What a file begins with, of keys, number formats and shapes; tensors follow in this order, without a hole."""
    header: Json = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for key, dtype, shape in tensors:
        offsets = [at, at + math.prod(shape) * ITEM_BYTES[dtype]]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return struct.pack("<Q", len(text)) + text


def header_length(first: bytes | bytearray, size: int, *, where: str) -> int:
    """How long a header is, by the first 8 bytes of a file of this size."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, MOST_BYTES):
        refuse(where, f"is no safetensors file: a header of {length:,} bytes in a file of {size:,}")
    return length


class Stored(NamedTuple):
    """A tensor of a safetensors file: its format and shape, and the byte it begins at."""

    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def tensors_of(header: bytes | bytearray, size: int, *, where: str) -> dict[str, Stored]:
    """What a file of this size has, by key; InputError unless its tensors fill it to the last byte, each its own."""
    found = strict_json(header, where=where)
    found.pop("__metadata__", None)
    start, tensors = 8 + len(header), {}
    for key, facts in found.items():
        try:
            tensors[key] = _stored(facts, start, size)
        except ValueError as error:
            refuse(where, str(error), key=key)
    at = start
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].at, item[1].num_bytes)):
        if tensor.at != at:
            told = f"begins at {tensor.at - start:,}, the tensor before it ends at {at - start:,}: overlap or hole"
            refuse(where, told, key=key)
        at += tensor.num_bytes
    if at != size:
        refuse(where, f"its tensors end at {at:,}, the file at {size:,}")
    return tensors


def offsets_of(header: bytes | bytearray, shard: Shard, *, where: str) -> dict[str, int]:
    """Where in the file each of a shard's tensors begins; InputError if the header is not what the shard says."""
    found = tensors_of(header, shard.size, where=where)
    pieces = {piece.key: piece for piece in shard.pieces}
    for key in found.keys() ^ pieces.keys():
        refuse(where, f"is in the {'file' if key in found else 'manifest'} only", key=key)
    for key, piece in pieces.items():
        dtype, shape, _ = found[key]
        if (dtype, shape) != (piece.dtype, piece.extents):
            rule = f"is {dtype} {list(shape)}, the manifest says {piece.dtype} {list(piece.extents)}"
            refuse(where, rule, key=key)
    return {key: tensor.at for key, tensor in found.items()}


def _stored(facts: object, start: int, size: int) -> Stored:
    dtype, shape, offsets = _fields(facts, ("dtype", "shape", "data_offsets"))
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("data_offsets must be two numbers")
    begin, end = (_whole(offset, most=size - start) for offset in offsets)
    tensor = Stored(_dtype(dtype), _shape(shape), start + begin)
    if end - begin != tensor.num_bytes:
        raise ValueError(f"has {end - begin:,} bytes, its shape takes {tensor.num_bytes:,}")
    return tensor
