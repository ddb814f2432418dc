"""A host's memory of a run: shards as files in a tmpfs, which outlive the ranks that wrote them.

    SHELF/                                of one run and one user
      step-00000012-4-1f3a9c02/           a copy of the state after 12 steps, in 4 shards, of the start 1f3a9c02
        rank-00001.safetensors            a shard
        rank-00001.json                   its facts, and their own SHA-256; written last
      .writing-step-00000014-4-1f3a9c02/  one that is not known to be complete on all hosts

Files count one by one: a shard is there if its facts are and it has their SHA-256. So a copy that was being written
when its run was killed may be used too, if nothing is missing. Nothing here knows of other hosts.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wavetrain.base.errors import InputError, RunError, one_line
from wavetrain.runtime.checkpoint import WRITING
from wavetrain.runtime.manifest import MOST_BYTES, Shard, pack, refuse, unpack
from wavetrain.runtime.tensorfile import digest_of, open_file, open_folder, put, read_bytes, writing

LOG = logging.getLogger(__name__)
FACTS = ".json"
PATIENCE_S = 5.0  # for the ranks of a start before this one to be gone
RETRY_S = 0.1
_NAME = re.compile(r"(\.writing-)?step-([0-9]{8,16})-([0-9]{1,5})-([0-9a-f]{8})")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, order=True)
class Copy:
    """A copy of a run's state. Names of different starts differ, so their files never mix."""

    step: int
    shards: int
    start: str

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}-{self.shards}-{self.start}"


def copy_of(name: str) -> Copy | None:
    """What copy a folder is of."""
    match = _NAME.fullmatch(name)
    return Copy(int(match[2]), int(match[3]), match[4]) if match else None


def copy_named(name: str) -> Copy:
    """The same of a name that must be one."""
    found = copy_of(name)
    if found is None:
        raise RunError(f"{name}: no name of a copy in memory")
    return found


@dataclass(frozen=True)
class Shelf:
    """The folder of a run in a host's memory, open."""

    path: Path
    stream: int

    @property
    def host(self) -> str:
        """Ranks that name the same one share this memory, and lose it together."""
        facts = os.fstat(self.stream)
        return f"{_BOOT.read_text().strip()} {facts.st_dev} {facts.st_ino}"

    def lock(self) -> None:
        """Refuse a folder that another run is using; the kernel lets go of it when this process ends."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    remedy = "another --memory-dir, or end that run"
                    raise RunError(f"{self.path}: is used by a run that goes on; try {remedy}") from None
            time.sleep(RETRY_S)

    def copies(self) -> list[Copy]:
        """All that there is something of."""
        return sorted({copy for path in self.path.iterdir() if (copy := copy_of(path.name))})

    def complete(self) -> list[Copy]:
        """Those that were whole on all hosts once."""
        return [copy for copy in self.copies() if (self.path / copy.name).exists()]

    def folder(self, copy: Copy) -> Path:
        whole = self.path / copy.name
        return whole if whole.exists() else self.path / f"{WRITING}{copy.name}"

    def files(self, copy: Copy) -> list[str]:
        """The shards of a copy that have facts."""
        return sorted(f"{path.stem}.safetensors" for path in self.folder(copy).glob(f"*{FACTS}"))

    # --- writing ---

    def begin(self, copy: Copy) -> Path:
        folder = self.folder(copy)
        with writing(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def room(self, copy: Copy, shard: Shard) -> Tensor:
        """A shard's file, to be filled; memory that is not there is found out now."""
        path = self.begin(copy) / shard.file
        self._forget(path)
        with writing(path):
            stream = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(stream, 0, shard.size)
            finally:
                os.close(stream)
        return torch.from_file(str(path), shared=True, size=shard.size, dtype=torch.uint8)

    def contents(self, copy: Copy, shard: Shard) -> Tensor:
        """A shard's bytes, without reading them."""
        return torch.from_file(str(self.folder(copy) / shard.file), size=shard.size, dtype=torch.uint8)

    def record(self, copy: Copy, shard: Shard) -> None:
        """From now on the shard is there."""
        put((self.folder(copy) / shard.file).with_suffix(FACTS), _sealed(pack(shard).encode()))

    def publish(self, copy: Copy) -> None:
        """A copy is whole on all hosts: what was before it may go. Ranks may be writing the next one already."""
        whole = self.path / copy.name
        with writing(whole):
            if not whole.exists():
                self.folder(copy).rename(whole)
        for other in self.copies():
            if other.start != copy.start or other.step < copy.step:
                self.remove(other)

    def keep_only(self, copy: Copy) -> None:
        """Remove all but one, which is good; nobody may be writing."""
        for other in self.copies():
            if other != copy:
                self.remove(other)

    def remove(self, copy: Copy) -> None:
        folder = self.folder(copy)
        with writing(folder):
            if folder.exists():
                shutil.rmtree(folder)

    def close(self, *, remove: bool) -> None:
        """The run has ended; well, if nothing is to be left."""
        if remove:
            with writing(self.path):
                shutil.rmtree(self.path)
        os.close(self.stream)

    def _forget(self, path: Path) -> None:
        with writing(path):
            path.with_suffix(FACTS).unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    # --- finding ---

    def verified(self, copy: Copy, file: str) -> Shard | None:
        """A shard every byte of which is as it was written; a bad one is told and removed."""
        path = self.folder(copy) / file
        try:
            with open_folder(path.parent) as folder:
                shard = _facts(folder, path.with_suffix(FACTS))
                if shard.file != file:
                    refuse(str(path), f"its facts are of {shard.file}")
                with open_file(folder, path, size=shard.size) as stream:
                    if digest_of(stream, shard.size, str(path)) != shard.sha256:
                        refuse(str(path), "is not the file that was written: its SHA-256 is another")
                    return shard
        except InputError as error:
            LOG.warning("not used: %s", one_line(error))
            self._forget(path)
            return None


def _sealed(text: bytes) -> bytes:
    return text + f"\n{hashlib.sha256(text).hexdigest()}\n".encode()


def _facts(folder: int, path: Path) -> Shard:
    with open_file(folder, path) as stream:
        size = os.fstat(stream).st_size
        if size > MOST_BYTES:
            refuse(str(path), "is too large")
        data = bytes(read_bytes(stream, 0, size, str(path)))
    text = data[: -len(_sealed(b""))]
    if data != _sealed(text):
        refuse(str(path), "is cut or changed: it must end with its own SHA-256")
    return unpack(text.decode())


def open_shelf(path: Path) -> Shelf:
    """Make or find the folder of a run. In a place where everybody may write, it must be this user's alone."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    try:
        stream = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a symbolic link" if path.is_symlink() else f"can't be read: {error.strerror}"
        raise RunError(f"{path}: {reason}; copies in memory need a folder of their own") from None
    facts = os.fstat(stream)
    if facts.st_uid != os.geteuid():
        fault = f"belongs to another user ({facts.st_uid})"
    elif stat.S_IMODE(facts.st_mode) & 0o077:
        fault = f"is open to others (mode {stat.S_IMODE(facts.st_mode):o})"
    else:
        return Shelf(path, stream)
    os.close(stream)
    raise RunError(f"{path}: {fault}; remove it, or try another --memory-dir")
