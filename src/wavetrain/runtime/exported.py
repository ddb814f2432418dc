"""A checkpoint's values as transformers reads them, without a run and without holding much of them at a time.

The optimizer's moments stay behind. All is written beside the wanted directory and gets its name in one rename, so what
is there is complete or not there.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import MIB
from wavetrain.runtime.checkpoint import Checkpoint, opened, published, sync, verify
from wavetrain.runtime.manifest import ITEM_BYTES, MANIFEST, VALUE, header_bytes, refuse
from wavetrain.runtime.places import Place
from wavetrain.runtime.tensorfile import NAMES, new_file, open_file, open_folder, put, read_bytes, write, writing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MOST_FILE = 5_000_000_000  # bytes, as transformers has it
MOST_CONFIG = 4 * MIB
BLOCK = 32 * MIB  # what is held at once


@dataclass(frozen=True)
class Exported:
    """What was written, and of what."""

    checkpoint: Checkpoint
    directory: Path
    files: tuple[str, ...]
    num_bytes: int
    passed_over: tuple[str, ...] = ()  # newer checkpoints that are bad, and why


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def export_checkpoint(
    source: Path, directory: Path, *, config: Path | None = None, most_file: int = MOST_FILE
) -> Exported:
    """Write the model of a checkpoint, or of the newest good one of a root, to a directory that is new or empty."""
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        rule = "is not empty" if directory.is_dir() and not directory.is_symlink() else "is no directory"
        raise InputError(Problem(where=str(directory), rule=rule, remedy="a directory that is not there yet"))
    described = None if config is None else _described(config)
    found, passed_over = _found(source)
    tensors = [_tensor(found, name) for name in found.names(VALUE)]
    files = _dealt(tensors, most_file)
    folder = directory.absolute().parent / f".{directory.name}.writing-{secrets.token_hex(4)}"
    with writing(folder):
        folder.mkdir(parents=True)
    try:
        for file, own in files.items():
            _write(folder / file, found, own)
        if len(files) > 1:
            put(folder / INDEX, _index(files))
        if described is not None:
            put(folder / CONFIG, described)
        with writing(directory):
            sync(folder)
            folder.rename(directory)
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    total = sum(tensor.num_bytes for tensor in tensors)
    return Exported(found, directory, tuple(files), total, tuple(passed_over))


def _found(source: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint, every byte of it verified; a root is left as it is, bad ones in it too: a run may be writing."""
    if os.path.lexists(source / MANIFEST):
        if faults := verify(source):
            raise InputError(Problem(where=str(source), rule=fault) for fault in faults)
        return opened(source), []
    bad: list[str] = []
    for path in published(source):
        faults = verify(path)
        if not faults:
            return opened(path), bad
        bad += faults
    rule = "has no good checkpoint" if bad else "has no checkpoint"
    problems = [Problem(where=str(source), rule=fault) for fault in bad]
    raise InputError([Problem(where=str(source), rule=rule), *problems])


def _tensor(found: Checkpoint, name: str) -> _Tensor:
    if name == "__metadata__":  # a word of the format: no tensor can have that name
        refuse(str(found.path), "can't be a tensor's name", key=name)
    return _Tensor(name, NAMES[found.dtype(name)], found.shape(name))


def _dealt(tensors: Sequence[_Tensor], most: int) -> dict[str, list[_Tensor]]:
    """Tensors by the file that they go to, in order; one that is larger than a file may be is in one of its own."""
    groups: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": own for n, own in enumerate(groups, start=1)}


def _index(files: dict[str, list[_Tensor]]) -> bytes:
    weights = {tensor.name: file for file, own in files.items() for tensor in own}
    total = sum(tensor.num_bytes for own in files.values() for tensor in own)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _described(config: Path) -> bytes:
    """transformers' description of the model, as it is."""
    where = str(config)
    with open_folder(config.absolute().parent.resolve()) as folder, open_file(folder, config) as stream:
        size = os.fstat(stream).st_size
        if size > MOST_CONFIG:
            refuse(where, f"must be at most {MOST_CONFIG // MIB} MiB")
        data = bytes(read_bytes(stream, 0, size, where))
    try:
        stated = json.loads(data)
    except (ValueError, RecursionError) as error:
        refuse(where, f"not valid JSON: {error}")
    if not isinstance(stated, dict) or "model_type" not in stated:
        refuse(where, "must be a mapping with a model_type, as transformers writes it")
    return data


def _write(path: Path, found: Checkpoint, tensors: Sequence[_Tensor]) -> None:
    """A file of whole tensors, some rows at a time."""
    with new_file(path) as stream:
        named = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
        write(stream, header_bytes(named, metadata={"format": "pt"}))
        for tensor in tensors:
            for place in _blocks(tensor.shape, BLOCK // ITEM_BYTES[tensor.dtype]):
                block = found.read(tensor.name, VALUE, place)
                write(stream, block.reshape(-1).view(torch.uint8).numpy().data)


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[Place]:
    """Places of at most so many elements that make up a tensor, one after the other as they lie in a file."""
    whole = tuple(((0, size),) for size in shape)
    if math.prod(shape) <= most:
        yield whole
        return
    rows = most // math.prod(shape[1:])
    for start in range(0, shape[0], max(1, rows)):
        ranges = ((start, min(start + max(1, rows), shape[0])),)
        for inner in [whole[1:]] if rows else _blocks(shape[1:], most):
            yield (ranges, *inner)
