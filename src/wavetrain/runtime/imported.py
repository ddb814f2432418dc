"""A model's values from a directory as transformers writes it: safetensors under the model's own names.

The directory may be a stranger's. Nothing of it is executed, no file outside it is opened, and all that does not fit
the model is told at once, before a rank starts. Each rank then reads the bytes of its own pieces, whatever the layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from wavetrain.base.errors import InputError, Problem, RunError, one_line
from wavetrain.base.units import MIB, printable
from wavetrain.runtime.checkpoint import published
from wavetrain.runtime.composed import Leaf
from wavetrain.runtime.exported import INDEX, SINGLE
from wavetrain.runtime.job import Job
from wavetrain.runtime.manifest import (
    FILE,
    MOST_BYTES,
    VALUE,
    Piece,
    Stored,
    checked_place,
    extents,
    header_length,
    refuse,
    strict_json,
    tensors_of,
)
from wavetrain.runtime.parts import Parts
from wavetrain.runtime.places import Place
from wavetrain.runtime.tensorfile import BITS, DTYPES, common, copy_common, open_file, open_folder, read_bytes

OPTION = "--load"
FORMATS = ("F64", "F32", "BF16", "F16")  # numbers that a parameter may be made of
PREFIXES = ("transformer.", "model.", "bert.")  # a model with its head has them, the same model without does not
MOST_FILES = 10_000
FIRST = 12  # problems of a sort that are told before those of another
BLOCK = 4 * MIB  # what is read at once, so that little is held beside a rank's own values

# What files have beside parameters: masks and angles that older versions stored, and heads of another purpose.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".position_ids", ".token_type_ids")
OTHER_HEADS = ("pooler.", "cls.seq_relationship.")


@dataclass(frozen=True)
class Held:
    """A tensor and the file that has it."""

    file: Path
    size: int  # of the file
    tensor: Stored


@dataclass(frozen=True)
class Imported:
    """The tensors of a directory, by their names there."""

    directory: Path
    tensors: Mapping[str, Held]

    def read(self, name: str, place: Place) -> Tensor:
        """What is at a place of a tensor; only that is read."""
        held = self.tensors[name]
        dtype, shape, at = held.tensor
        place = checked_place(place, shape)
        result = torch.empty(extents(place), dtype=DTYPES[dtype], device="cpu")
        if result.numel():
            piece = Piece(name=name, kind=VALUE, shape=shape, dtype=dtype, place=tuple(((0, n),) for n in shape))
            bits = result.view(BITS[result.element_size()]).numpy()
            with open_folder(self.directory) as folder, open_file(folder, held.file, size=held.size) as stream:
                copy_common(stream, piece, common(piece.place, place), bits, at=at, where=str(held.file))
        return result


def is_loaded(job: Job) -> bool:
    """Whether a run begins with the values of a directory; where it has a checkpoint it goes on from there."""
    return job.load is not None and not (job.checkpoints is not None and published(job.checkpoints))


def check_load(job: Job, parts: Parts) -> list[str]:
    """What a user is to know of the values that a run begins with; InputError with all that is wrong with them."""
    if job.load is None:
        return []
    if not is_loaded(job):
        return [f"{printable(job.checkpoints, most=400)} has a checkpoint: the run goes on from it, not from {OPTION}"]
    imported = open_model(job.load)
    shapes = {name: tuple(parameter.shape) for name, parameter in parts.references()}
    _, ignored = matched(imported, shapes, parts.ties)
    if not ignored:
        return []
    shown = ", ".join(printable(name) for name in ignored[:5]) + (", ..." if len(ignored) > 5 else "")
    return [f"{printable(job.load, most=400)}: {len(ignored)} tensors that are no parameters are not loaded: {shown}"]


def load_values(directory: Path, leaves: Iterable[Leaf], parts: Parts) -> None:
    """Give a rank its pieces of a directory's values, cast to its own format. Every rank does this for itself."""
    try:
        imported = open_model(directory)
        shapes = {name: tuple(parameter.shape) for name, parameter in parts.references()}
        names, _ = matched(imported, shapes, parts.ties)
        with torch.no_grad():
            for leaf in leaves:
                _fill(leaf, partial(imported.read, names[leaf.name]))
    except InputError as error:  # it was good when the run began; a report tells one line of a rank's error
        raise RunError(one_line(error)) from None


def _fill(leaf: Leaf, read: Callable[[Place], Tensor]) -> None:
    """Read a leaf some rows at a time."""
    values = leaf.values
    if not values.dim():
        values.copy_(read(leaf.place))
        return
    rows = max(1, BLOCK * len(values) // max(1, values.nbytes))
    for start in range(0, len(values), rows):
        part = values[start : start + rows]
        part.copy_(read((_some(leaf.place[0], start, start + len(part)), *leaf.place[1:])))


def _some(ranges: Sequence[tuple[int, int]], first: int, last: int) -> tuple[tuple[int, int], ...]:
    """The ranges of a dimension's local indices from first to last."""
    found, at = [], 0
    for start, stop in ranges:
        begin, end = max(first, at), min(last, at + stop - start)
        if begin < end:
            found.append((start + begin - at, start + end - at))
        at += stop - start
    return tuple(found)


# --- the directory ---


def open_model(path: Path) -> Imported:
    """The tensors of a directory, every header checked; no value is read."""
    directory = path.resolve()  # the user's own path may be a link; what is inside may not
    with open_folder(directory) as folder:
        names = set(os.listdir(folder))  # noqa: PTH208 -- of what is open, wherever its name leads by now
        if SINGLE not in names and INDEX not in names:
            _refuse_absent(path, names)
        found = _tensors_in(folder, directory / SINGLE) if SINGLE in names else _indexed(folder, directory)
    return Imported(directory, found)


def _refuse_absent(path: Path, names: set[str]) -> NoReturn:
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")))
    if pickles:
        rule = f"has {printable(pickles[0])} but no {SINGLE}: only safetensors are read, since a pickle can run code"
        remedy = "save_pretrained with safe_serialization=True, on a machine where the pickle is trusted"
    elif any(name.startswith("step-") for name in names) or "manifest.json" in names:
        rule, remedy = "has checkpoints of a run, not a model", "--checkpoints, or wavetrain export first"
    else:
        rule, remedy = f"has neither {SINGLE} nor {INDEX}", "a directory that save_pretrained has written"
    raise InputError(Problem(where=str(path), rule=rule, remedy=remedy))


def _tensors_in(folder: int, path: Path) -> dict[str, Held]:
    where = str(path)
    with _opened(folder, path) as (stream, size):
        length = header_length(read_bytes(stream, 0, min(8, size), where), size, where=where)
        found = tensors_of(read_bytes(stream, 8, length, where), size, where=where)
    return {name: Held(path, size, tensor) for name, tensor in found.items()}


def _indexed(folder: int, directory: Path) -> dict[str, Held]:
    """The tensors of all files that an index names."""
    where = directory / INDEX
    with _opened(folder, where) as (stream, size):
        if size > MOST_BYTES:
            refuse(str(where), f"must be at most {MOST_BYTES // MIB} MiB")
        files = _files(strict_json(read_bytes(stream, 0, size, str(where)), where=str(where)), str(where))
    found: dict[str, Held] = {}
    problems = []
    for file, listed in sorted(files.items()):
        tensors = _tensors_in(folder, directory / file)
        for name in sorted(listed - tensors.keys())[:5]:
            rule = f"is not in {file}, where the index has it"
            problems.append(Problem(where=str(where), key=name, rule=rule))
        for name in sorted(tensors.keys() & found.keys())[:5]:
            rule = f"is in {found[name].file.name} and in {file}"
            problems.append(Problem(where=str(directory), key=name, rule=rule))
        found |= tensors
    if problems:
        raise InputError(problems)
    return found


def _files(index: Mapping[str, object], where: str) -> dict[str, set[str]]:
    """The files that an index names, each with the tensors it is to have."""
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        refuse(where, "must be a mapping of tensors to files", key="weight_map")
    files: dict[str, set[str]] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or not FILE.fullmatch(file):
            refuse(where, "must be the name of a .safetensors file in the same directory", key=name, value=file)
        files.setdefault(file, set()).add(name)
    if len(files) > MOST_FILES:
        refuse(where, f"names more than {MOST_FILES:,} files", key="weight_map")
    return files


@contextmanager
def _opened(folder: int, path: Path) -> Iterator[tuple[int, int]]:
    """A file of the directory, open, and its size."""
    if path.is_symlink():
        rule = "is a symbolic link: only files in the directory itself are read"
        remedy = "cp -rL to a directory of its own, or hf download --local-dir"
        raise InputError(Problem(where=str(path), rule=rule, remedy=remedy))
    with open_file(folder, path) as stream:
        yield stream, os.fstat(stream).st_size


# --- its tensors and the model's ---


def matched(
    imported: Imported, shapes: Mapping[str, tuple[int, ...]], ties: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The directory's name of each parameter, and what it has that is none; InputError with all that does not fit."""
    theirs, where = imported.tensors, str(imported.directory)
    rename = max(_renamings(), key=lambda rename: sum(rename(name) in theirs for name in shapes))
    groups: dict[str, list[str]] = {}
    for name in sorted(shapes, key=lambda name: name in ties):
        groups.setdefault(ties.get(name, name), []).append(name)
    names: dict[str, str] = {}
    missing, wrong = [], []
    for same in groups.values():
        found = next((rename(name) for name in same if rename(name) in theirs), None)
        if found is None:
            missing.append(Problem(where=where, key=same[0], rule="is missing: the model has such a parameter"))
            continue
        names |= dict.fromkeys(same, found)
        if fault := _fault(theirs[found].tensor, shapes[same[0]]):
            wrong.append(Problem(where=str(theirs[found].file), key=found, rule=fault))
    others = sorted(theirs.keys() - {rename(name) for name in shapes})
    ignored = [name for name in others if _is_no_parameter(name)]
    rule = "is no parameter of the model"
    extra = [Problem(where=str(theirs[n].file), key=n, rule=rule) for n in others if not _is_no_parameter(n)]
    if missing or wrong or extra:
        raise InputError([*wrong[:FIRST], *missing[:FIRST], *extra[:FIRST], *_after(wrong, missing, extra)])
    return names, ignored


def _after(*sorts: list[Problem]) -> list[Problem]:
    """What comes after the first of each sort: a message shows some of all, not many of one."""
    return [problem for sort in sorts for problem in sort[FIRST:]]


def _renamings() -> list[Callable[[str], str]]:
    """How names may differ as a whole, the same name first."""
    without = [lambda name, prefix=prefix: name.removeprefix(prefix) for prefix in PREFIXES]
    more = [lambda name, prefix=prefix: prefix + name for prefix in PREFIXES]
    return [str, *without, *more]


def _fault(tensor: Stored, shape: tuple[int, ...]) -> str:
    if tensor.shape != shape:
        return f"has the shape {list(tensor.shape)}, the model's parameter {list(shape)}"
    if tensor.dtype not in FORMATS:
        return f"has the format {tensor.dtype}; a parameter may have {', '.join(FORMATS)}"
    return ""


def _is_no_parameter(name: str) -> bool:
    return f".{name}".endswith(BUFFERS) or any(f".{head}" in f".{name}" for head in OTHER_HEADS)
