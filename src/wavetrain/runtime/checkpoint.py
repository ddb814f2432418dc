"""Checkpoints as files: shards of tensors by parameter name, and a manifest that knows every byte of them.

    folder = begin(root, step=10)                     one rank
    shard = write_shard(folder, rank, entries)        every rank
    publish(folder, manifest)                         one rank: all of it is there, or nothing
    found = newest(root, run=run)                     verified; a bad one is set aside, the one before it is used
    found.read(name, "value", place)                  any place of a whole, from whichever shards have it

Nothing here knows of training or of other ranks. The format's page is docs/checkpoint.md.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.base.errors import InputError, Problem, RunError, nearest, one_line
from wavetrain.base.units import MIB
from wavetrain.runtime.manifest import (
    MANIFEST,
    MOST_BYTES,
    Manifest,
    Piece,
    Shard,
    checked_place,
    extents,
    faults_of_cover,
    manifest_bytes,
    read_manifest,
    refuse,
)
from wavetrain.runtime.places import Place
from wavetrain.runtime.tensorfile import (
    BITS,
    DTYPES,
    Segment,
    common,
    copy_common,
    digest_of,
    open_file,
    open_folder,
    put,
    read_bytes,
    read_offsets,
    unreadable,
    writing,
)

LOG = logging.getLogger(__name__)
WRITING = ".writing-"  # begins the name of what is no checkpoint yet, or no more
BAD = "bad-"
REMEDY = "move them elsewhere to start over"
THREADS_FROM = 64 * MIB
_STEP = re.compile(r"step-([0-9]{8,16})")

Report: TypeAlias = Callable[[Path, list[str]], None]


# --- writing ---


def step_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def begin(root: Path, *, step: int) -> Path:
    """A new folder for the shards of a step, which is no checkpoint before `publish`."""
    folder = root / f"{WRITING}{step:08d}-{secrets.token_hex(4)}"
    with writing(folder):
        folder.mkdir(parents=True)
    return folder


def publish(folder: Path, manifest: Manifest) -> Path:
    """Make a checkpoint of a folder of shards, in one rename: a kill at any moment leaves all of it or nothing."""
    target = folder.parent / step_name(manifest.step)
    data = manifest_bytes(manifest)
    _refuse_unfinished(folder, manifest, data)
    put(folder / MANIFEST, data)
    with writing(target):
        sync(folder)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "there is one already")
        folder.rename(target)
        sync(folder.parent)
    return target


def discard(folder: Path) -> None:
    """Remove a folder that was not published."""
    if not folder.name.startswith(WRITING):
        raise ValueError(f"{folder} is none that was being written")
    with writing(folder):
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder)


def clean(root: Path) -> list[Path]:
    """Remove what killed runs left half written. Nobody may be writing to this root."""
    found = sorted(root.glob(f"{WRITING}*"))
    for folder in found:
        LOG.warning("%s: removed, a checkpoint that was never finished", folder)
        discard(folder)
    return found


def _refuse_unfinished(folder: Path, manifest: Manifest, data: bytes) -> None:
    """What is published must be readable and complete, so a fault of ours shows now and not after a crash."""
    faults = faults_of_cover(manifest)
    if not faults and read_manifest(data, where=str(folder / MANIFEST)) != manifest:
        faults = ["the manifest reads back as another"]
    with writing(folder):
        sizes = {item.name: item.lstat().st_size for item in folder.iterdir()}
    for shard in manifest.shards:
        if (size := sizes.pop(shard.file, None)) != shard.size:
            faults.append(f"{shard.file}: has {'no' if size is None else f'{size:,}'} bytes, not {shard.size:,}")
    faults += [f"{name}: is no shard of the manifest" for name in sizes]
    if faults:
        raise RunError(f"{folder}: not published: {'; '.join(faults[:5])}")


def sync(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# --- finding ---


def published(root: Path) -> list[Path]:
    """The checkpoints of a root by their names, newest first; none is looked into."""
    found = [(int(match[1]), name) for name in _names(root) if (match := _STEP.fullmatch(name))]
    return [root / name for _, name in sorted(found, reverse=True)]


def newest(root: Path, *, run: str | None = None, on_bad: Report | None = None) -> Checkpoint | None:
    """The newest good checkpoint, every byte of it verified; None only where there never was one.

    A bad one is renamed, never deleted, and reported: in the log, and to `on_bad` with its new path and the findings.
    A good one of another run, or bad ones only, are an InputError: starting over is for the user to decide.
    """
    bad: list[str] = []
    for path in published(root):
        manifest, problems = _inspect(path)
        if manifest and run is not None and manifest.run != run:
            rule = f"is of another run than {run}"
            stranger = Problem(where=str(path / MANIFEST), key="run", value=manifest.run, rule=rule)
            if not problems:
                raise InputError(stranger)
            problems.append(stranger)
        if manifest and not problems:
            return Checkpoint(path, manifest)
        _set_aside(path, problems, on_bad)
        bad.append(path.name)  # also where it can't be renamed
    if aside := [name for name in _names(root) if name.startswith(BAD)] or bad:
        rule = f"has no good checkpoint, only bad ones: {', '.join(sorted(aside)[:5])}"
        raise InputError(Problem(where=str(root), rule=rule, remedy=REMEDY))
    return None


def glance(root: Path, *, run: str, tolerant: bool = False) -> None:
    """Refuse early what `newest` would refuse after it has read every byte; only manifests are looked at.

    For a parent, before its ranks start: nothing is renamed, and what may still be good is left to `newest`. Where a
    run may have other copies (`tolerant`), bad ones are too.
    """
    problems: list[Problem] = []
    for path in published(root):
        try:
            found = opened(path)
        except InputError as error:
            problems += () if tolerant else error.problems
            continue
        if found.run == run:
            return
        stranger = Problem(where=str(path / MANIFEST), key="run", value=found.run, rule=f"is of another run than {run}")
        problems.append(stranger)
    if problems:
        raise InputError([Problem(where=str(root), rule="has no checkpoint of this run", remedy=REMEDY), *problems])


def opened(path: Path) -> Checkpoint:
    """A checkpoint whose manifest is good; of a shard, size and header are checked when it is first used.

    For the ranks beside the one that called `newest`: a file's digest needs all of it, and one reading is enough.
    """
    with open_folder(path) as folder:
        return Checkpoint(path, _manifest_in(folder, path))


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, a line per file; nothing if every byte is as it was written."""
    return list(map(one_line, _inspect(path)[1]))


def keep_last(root: Path, k: int, *, known: Collection[Path] = (), on_bad: Report | None = None) -> list[Path]:
    """Remove the good checkpoints older than the newest `k`, once one of those is found good. The removed ones.

    A bad one on the way is set aside, not removed, and does not count. Of those `known` to be good, which this process
    has published or verified, only manifest, sizes and headers are looked at again; of others every byte.
    """
    if k < 1:
        raise ValueError("at least one checkpoint must be kept")
    if len(published(root)) <= k:
        return []
    first = sorted(published(root)[:k], key=lambda path: path not in known)
    if not any(_good(path, known, on_bad) for path in first):
        LOG.warning("%s: nothing removed: none of the newest %d checkpoints is good", root, k)
        return []
    removed = [path for path in published(root)[k:] if _good(path, known, on_bad)]
    for path in removed:
        half_gone = root / f"{WRITING}{path.name}-removed-{secrets.token_hex(4)}"  # if killed now, `clean` ends it
        with writing(path):
            path.rename(half_gone)
        discard(half_gone)
    return removed


def _good(path: Path, known: Collection[Path], on_bad: Report | None) -> bool:
    problems = _inspect(path, digests=path not in known)[1]
    if problems:
        _set_aside(path, problems, on_bad)
    return not problems


def _names(root: Path) -> list[str]:
    try:
        return [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(root, error) from None


def _set_aside(path: Path, problems: Sequence[Problem], on_bad: Report | None) -> None:
    lines = list(map(one_line, problems))
    taken = _names(path.parent)
    number = next(n for n in range(1, len(taken) + 2) if f"{BAD}{path.name}-{n}" not in taken)
    target = path.with_name(f"{BAD}{path.name}-{number}")
    try:
        path.rename(target)
        sync(path.parent)
    except OSError as error:  # a read-only disk, or another rank was first: it is not used either way
        LOG.warning("%s: can't be renamed: %s", path, error.strerror)
        target = path
    LOG.warning("bad checkpoint, now %s: %s", target, "; ".join(lines))
    if on_bad:
        on_bad(target, lines)


def _inspect(path: Path, *, digests: bool = True) -> tuple[Manifest | None, list[Problem]]:
    """A checkpoint's manifest, if it can be read, and all that is wrong; without digests, as far as sizes show it."""
    try:
        with open_folder(path) as folder:
            manifest = _manifest_in(folder, path)
            problems = _strangers(folder, path, manifest)
            for found in _each(lambda shard: _faults(folder, path, shard, digests), manifest.shards):
                problems += found
            return manifest, problems
    except InputError as error:
        return None, list(error.problems)


def _each(look: Callable[[Shard], list[Problem]], shards: Sequence[Shard]) -> list[list[Problem]]:
    """Hashing takes a core as long as the disk, so large checkpoints are looked at by several."""
    if sum(shard.size for shard in shards) < THREADS_FROM:
        return list(map(look, shards))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(look, shards))


def _strangers(folder: int, path: Path, manifest: Manifest) -> list[Problem]:
    """Names that do not belong; hidden files are the system's own and harm nobody."""
    known = {MANIFEST, *(shard.file for shard in manifest.shards)}
    try:
        extra = {name for name in os.listdir(folder) if not name.startswith(".")} - known
    except OSError as error:
        raise unreadable(path, error) from None
    problems = [Problem(where=str(path / name), rule="is not in the manifest") for name in sorted(extra)]
    if _STEP.fullmatch(path.name) and path.name != step_name(manifest.step):
        problems.append(Problem(where=str(path / MANIFEST), rule=f"is of step {manifest.step}, not of this folder's"))
    return problems


def _faults(folder: int, path: Path, shard: Shard, digests: bool) -> list[Problem]:
    where = str(path / shard.file)
    try:
        with open_file(folder, path / shard.file, size=shard.size) as stream:
            if digests and digest_of(stream, shard.size, where) != shard.sha256:
                refuse(where, "is not the file that was written: its SHA-256 is not the manifest's")
            read_offsets(stream, shard, where)
    except InputError as error:
        return list(error.problems)
    return []


# --- reading ---


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint that was found good. May be read by several threads."""

    path: Path
    manifest: Manifest
    _known: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)  # where tensors begin, by file

    @property
    def run(self) -> str:
        return self.manifest.run

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def kinds(self) -> list[str]:
        return sorted(self.manifest.pieces)

    def names(self, kind: str = "value") -> list[str]:
        """The tensors of a kind."""
        return sorted(self.manifest.pieces.get(kind, ()))

    def shape(self, name: str, kind: str = "value") -> tuple[int, ...]:
        """A whole tensor's."""
        return self._held(name, kind)[0][1].shape

    def dtype(self, name: str, kind: str = "value") -> torch.dtype:
        return DTYPES[self._held(name, kind)[0][1].dtype]

    def read(self, name: str, kind: str, place: Place, *, dtype: torch.dtype | None = None) -> Tensor:
        """What is at a place of a whole tensor. Only that is read, and little is held beside the result."""
        result = torch.empty(extents(self._checked(name, kind, place)), dtype=self.dtype(name, kind), device="cpu")
        self._fill(result, name, kind, place)
        return result if dtype is None else result.to(dtype)

    def read_into(self, target: Tensor, name: str, kind: str, place: Place) -> None:
        """The same, where it is to be; nothing is held beside it where it is of the type that was saved."""
        is_alike = target.dtype == self.dtype(name, kind) and tuple(target.shape) == extents(place)
        if is_alike and target.is_contiguous() and target.device.type == "cpu":
            self._fill(target.detach(), name, kind, place)
        else:
            target.copy_(self.read(name, kind, place))

    def _fill(self, result: Tensor, name: str, kind: str, place: Place) -> None:
        place = self._checked(name, kind, place)
        bits = result.view(BITS[result.element_size()]).numpy()
        for shard, piece in self._held(name, kind):
            shared = common(piece.place, place)
            if all(shared):
                self._copy(shard, piece, shared, bits)

    def _checked(self, name: str, kind: str, place: Place) -> Place:
        try:
            return checked_place(place, self._held(name, kind)[0][1].shape)
        except ValueError as error:
            refuse(str(self.path), str(error), key=f"{kind} of {name}")

    def _held(self, name: str, kind: str) -> list[tuple[Shard, Piece]]:
        if kind not in self.manifest.pieces:
            rule = f"has no kind {kind}"
            raise InputError(Problem(where=str(self.path), rule=rule, legal=tuple(self.kinds)))
        if name not in self.manifest.pieces[kind]:
            rule, near = f"has no {kind} of that name", nearest(name, self.names(kind))
            raise InputError(Problem(where=str(self.path), key=name, rule=rule, nearest=near))
        return self.manifest.pieces[kind][name]

    def _copy(self, shard: Shard, piece: Piece, shared: list[list[Segment]], bits: NDArray[Any]) -> None:
        path = self.path / shard.file
        with open_folder(self.path) as folder, open_file(folder, path, size=shard.size) as stream:
            if shard.file not in self._known:
                self._known[shard.file] = read_offsets(stream, shard, str(path))
            copy_common(stream, piece, shared, bits, at=self._known[shard.file][piece.key], where=str(path))


def _manifest_in(folder: int, path: Path) -> Manifest:
    where = str(path / MANIFEST)
    with open_file(folder, path / MANIFEST) as stream:
        size = os.fstat(stream).st_size
        if size > MOST_BYTES:
            refuse(where, f"must be at most {MOST_BYTES // MIB} MiB")
        return read_manifest(read_bytes(stream, 0, size, where), where=where)
