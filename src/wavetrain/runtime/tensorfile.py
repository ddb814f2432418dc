"""A shard: tensors of one rank in a safetensors file, written to the disk and read from it piece by piece.

The safetensors package maps a file by its name; here a file is opened once, without following links, checked, and read
by its open number, and its digest is taken while it is written. The format is the package's.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.base.units import MIB
from wavetrain.runtime.cuts import Range
from wavetrain.runtime.manifest import (
    ITEM_BYTES,
    Piece,
    Shard,
    checked_place,
    header_bytes,
    header_length,
    offsets_of,
    pack,
    refuse,
    unpack,
)
from wavetrain.runtime.places import Place

CHUNK = 4 * MIB  # what is hashed or read at once
PAGE = 4096  # a disk gives no less

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bf16
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # says nothing about the file

Buffer: TypeAlias = bytes | memoryview


@dataclass(frozen=True, eq=False)
class Entry:
    """A rank's tensor: what whole it belongs to, and where in it."""

    name: str
    kind: str  # "value", "exp_avg", ...
    shape: tuple[int, ...]  # the whole's
    place: Place
    tensor: Tensor


class Segment(NamedTuple):
    """Indices of one dimension that follow each other both in a shard and in what is read."""

    source: int
    target: int
    length: int


# --- writing ---


def write_shard(folder: Path, rank: int, entries: Iterable[Entry]) -> Shard:
    """Write a rank's tensors to a file, one at a time, and wait until the disk has it.

    The digest is of what was meant to be written, so a disk that stored something else is found out.
    """
    tensors = _pieces_of(entries)
    file = f"rank-{rank:05d}.safetensors"
    unpack(pack(Shard(file=file, size=0, sha256="0" * 64, pieces=tuple(tensors))))  # refuses what could not be read
    digest, size = hashlib.sha256(), 0
    with new_file(folder / file) as stream:
        for data in _contents(tensors):
            for done in written(stream, data):
                digest.update(done)
                size += len(done)
    return Shard(file=file, size=size, sha256=digest.hexdigest(), pieces=tuple(tensors))


def _pieces_of(entries: Iterable[Entry]) -> dict[Piece, Tensor]:
    """Entries by what the manifest will say of them, in its order."""
    found: dict[Piece, Tensor] = {}
    for entry in sorted(entries, key=lambda entry: (entry.kind, entry.name)):
        last = next(reversed(found), None)
        same = last is not None and (last.kind, last.name) == (entry.kind, entry.name)
        if entry.tensor.dtype not in NAMES:
            raise ValueError(f"{entry.kind} of {entry.name}: {entry.tensor.dtype} has no place in a checkpoint")
        piece = Piece(
            name=entry.name,
            kind=entry.kind,
            shape=tuple(entry.shape),
            dtype=NAMES[entry.tensor.dtype],
            place=checked_place(entry.place, entry.shape),
            number=last.number + 1 if last and same else 0,
        )
        if piece.extents != tuple(entry.tensor.shape):
            given = f"a tensor of {tuple(entry.tensor.shape)} for a place of {piece.extents}"
            raise ValueError(f"{entry.kind} of {entry.name}: {given}")
        found[piece] = entry.tensor
    return found


def _contents(tensors: Mapping[Piece, Tensor]) -> Iterator[Buffer]:
    """The bytes of a shard's file, a tensor at a time."""
    in_file = sorted(tensors, key=lambda piece: -ITEM_BYTES[piece.dtype])  # keeps every tensor aligned
    yield header_bytes((piece.key, piece.dtype, piece.extents) for piece in in_file)
    for piece in in_file:
        yield tensors[piece].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def written(stream: int, data: Buffer) -> Iterator[memoryview]:
    """Write all of it, handing back what is written on the way."""
    rest = memoryview(data)
    while rest:
        done = os.write(stream, rest[:CHUNK])
        yield rest[:done]
        rest = rest[done:]


def put(path: Path, data: Buffer) -> None:
    """A file that was not there, of these bytes."""
    with new_file(path) as stream:
        write(stream, data)


def write(stream: int, data: Buffer) -> None:
    """All of it."""
    for _ in written(stream, data):
        pass


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A file that was not there, open for writing; on the disk when this ends."""
    with writing(path):
        stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            yield stream
            os.fsync(stream)
        finally:
            os.close(stream)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk or a folder without rights is the user's to know."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror or error}") from None


# --- reading ---


def common(held: Place, wanted: Place) -> list[list[Segment]]:
    """What two places of a tensor share, by dimension; nothing if one of the dimensions has none."""
    return [_common(*both) for both in zip(held, wanted, strict=True)]


def copy_common(
    stream: int, piece: Piece, shared: list[list[Segment]], target: NDArray[Any], *, at: int, where: str
) -> None:
    """Read what is shared with a piece, which begins at a byte of its file, into the array of the wanted place."""
    sizes = piece.extents
    strides = tuple(target.itemsize * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    source = _Source(stream, where, strides)
    for box in product(*shared):
        start = sum(part.source * stride for part, stride in zip(box, strides, strict=True))
        inside: tuple[Any, ...] = tuple(slice(part.target, part.target + part.length) for part in box)
        source.fill(target[(*inside, ...)], at + start)


@dataclass(frozen=True)
class _Source:
    """A tensor in a file, by the bytes from one index of a dimension to the next."""

    stream: int
    where: str
    strides: tuple[int, ...]

    def fill(self, target: NDArray[Any], at: int) -> None:
        """Read a box of the tensor that begins at a byte: in one go where little between its rows is in the way."""
        sizes = zip(target.shape, self.strides, strict=True)
        span = target.itemsize + sum((size - 1) * stride for size, stride in sizes)
        if span <= PAGE or (span <= CHUNK and span - target.nbytes <= target.nbytes // 4):
            data = read_bytes(self.stream, at, span, self.where)
            target[...] = np.ndarray(target.shape, target.dtype, data, strides=self.strides)
            return
        dim = next(dim for dim, size in enumerate(target.shape) if size > 1)
        half = target.shape[dim] // 2
        before = (slice(None),) * dim
        self.fill(target[(*before, slice(half))], at)
        self.fill(target[(*before, slice(half, None))], at + half * self.strides[dim])


def _common(held: tuple[Range, ...], wanted: tuple[Range, ...]) -> list[Segment]:
    """What of one dimension a shard has and is wanted."""
    found = []
    sources = _numbered(held)
    ends = [stop for _, stop, _ in sources]
    for start, stop, target in _numbered(wanted):
        for first, last, source in sources[bisect_right(ends, start) :]:
            if first >= stop:
                break
            begin, end = max(first, start), min(last, stop)
            found.append(Segment(source + begin - first, target + begin - start, end - begin))
    return found


def _numbered(ranges: tuple[Range, ...]) -> list[tuple[int, int, int]]:
    """Ranges in the order of the whole, each with where it begins in the local tensor."""
    begins = accumulate((stop - start for start, stop in ranges), initial=0)
    return sorted((start, stop, begin) for (start, stop), begin in zip(ranges, begins, strict=False))


def digest_of(stream: int, size: int, where: str) -> str:
    """The SHA-256 of a file of this size."""
    digest = hashlib.sha256()
    for at in range(0, size, CHUNK):
        digest.update(read_bytes(stream, at, min(CHUNK, size - at), where))
    return digest.hexdigest()


def read_offsets(stream: int, shard: Shard, where: str) -> dict[str, int]:
    """Where in its file each tensor of a shard begins, by key."""
    length = header_length(read_bytes(stream, 0, min(8, shard.size), where), shard.size, where=where)
    return offsets_of(read_bytes(stream, 8, length, where), shard, where=where)


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A folder, open, that is no link to elsewhere."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def open_file(folder: int, path: Path, *, size: int | None = None) -> Iterator[int]:
    """A regular file of an open folder: no link, and nothing is waited for."""
    try:
        number = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        facts = os.fstat(number)
        if not stat.S_ISREG(facts.st_mode):
            refuse(str(path), "must be a regular file")
        if size is not None and facts.st_size != size:
            refuse(str(path), f"has {facts.st_size:,} bytes, the manifest says {size:,}")
        yield number
    finally:
        os.close(number)


def read_bytes(stream: int, at: int, count: int, where: str) -> bytearray:
    """Exactly so many bytes."""
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        try:
            done = os.preadv(stream, [rest], at + count - len(rest))
        except OSError as error:
            raise unreadable(Path(where), error) from None
        if not done:
            refuse(where, "ends too early")
        rest = rest[done:]
    return data


def unreadable(path: Path, error: OSError) -> InputError | RunError:
    """Why a file can't be read; what this process ran out of is no fault of the file."""
    if error.errno in _OURS:
        return RunError(f"{path}: can't be read: {error.strerror}")
    reason = "is a symbolic link" if path.is_symlink() else f"can't be read: {error.strerror or error}"
    return InputError(Problem(where=str(path), rule=reason))
