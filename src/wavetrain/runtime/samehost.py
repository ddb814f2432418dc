"""Messages between ranks of one host through shared memory: no helper threads, one copy out of each end's memory.

Each rank has a box in memory for every rank that sends to it, cut into slots, and one pipe on which it is told what has
come. A sender copies a tensor into a free slot and writes a line of 32 bytes to the receiver's pipe; the receiver, when
it next looks, copies the tensor out and frees the slot. Where no slot is free the tensor waits with its sender, who
tries again whenever it is here; so a send never waits. Names in the file system are gone as soon as both ends are open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wavetrain.base.errors import RunError
from wavetrain.runtime.transport import CARRIED, Message
from wavetrain.runtime.world import Store

MOST_SLOTS, MOST_BOX_BYTES = 16, 64 * 2**20
LINE = struct.Struct("<iiiiiiq")  # sender, kind, stage, microbatch, tensor, slot, bytes; whole below a pipe's 4 KiB
HEADER = 64  # bytes of a box before its slots
RETRY_S = 0.001  # between looks for a free slot while a tensor waits for one
LOOK = 2048 * LINE.size  # bytes of a pipe read at once
WATCH_S = 2000e-6  # before and after a message is expected
WATCH_ALONE_S = 0.1  # the same where every rank has a core
_NOTHING = torch.zeros(8, requires_grad=True)


@dataclass(frozen=True)
class Box:
    """Memory that one rank writes and another reads."""

    memory: mmap.mmap
    taken: memoryview  # one whole number: how many messages have been taken out
    address: int  # of the first slot
    slot_bytes: int
    num_slots: int

    @staticmethod
    def open(path: Path, *, slot_bytes: int, num_slots: int) -> Box:
        size = HEADER + slot_bytes * num_slots
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # memory that is not there is found now, not by a signal when it is used
            memory = mmap.mmap(file, size)
        except OSError as error:
            rule = f"no room for {size:,} bytes of messages in {path.parent.parent}: {error.strerror}"
            raise RunError(f"{rule}; --transport gloo needs none") from None
        finally:
            os.close(file)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ctypes.memset(address, 0, size)  # both ends touch every page now, not when the first message is waited for
        return Box(memory, memoryview(memory)[:8].cast("q"), address + HEADER, slot_bytes, num_slots)

    def put(self, slot: int, tensor: Tensor) -> None:
        assert tensor.nbytes <= self.slot_bytes, "boxes are opened for the largest message"
        ctypes.memmove(self.address + slot * self.slot_bytes, tensor.data_ptr(), tensor.nbytes)

    def get(self, slot: int, tensor: Tensor) -> None:
        ctypes.memmove(tensor.data_ptr(), self.address + slot * self.slot_bytes, tensor.nbytes)


class SameHost:
    """Through the boxes and pipes that `open_same_host` has opened."""

    def __init__(
        self, rank: int, inbox: dict[int, Box], outbox: dict[int, Box], pipes: dict[int, int], *, crowded: bool
    ) -> None:
        self._rank, self._inbox, self._outbox, self._pipes = rank, inbox, outbox, pipes
        self._sent = dict.fromkeys(outbox, 0)
        self._watch_s = WATCH_S if crowded else WATCH_ALONE_S
        self._waiting: dict[int, deque[tuple[Message, Tensor]]] = {to: deque() for to in outbox}
        self._waited_s: dict[Message, float] = {}  # in the step before
        self._posted: dict[Message, Tensor] = {}
        self._early: dict[Message, deque[bytes]] = {}  # come before they were posted
        self._arrived: dict[Message, deque[Tensor]] = {}

    def post(self, message: Message, source: int, buffer: Tensor) -> None:  # noqa: ARG002
        early = self._early.get(message)
        if early:
            data = early.popleft()
            assert len(data) == buffer.nbytes, f"{message} has another size than its buffer"
            ctypes.memmove(buffer.data_ptr(), data, buffer.nbytes)
            self._arrived.setdefault(message, deque()).append(buffer)
        else:
            self._posted[message] = buffer

    def wait(self, message: Message) -> Tensor:
        self._flush()
        self._look(0.0)
        if not self._arrived.get(message):
            begun = time.monotonic()
            self._await(message, begun)
            self._waited_s[message] = time.monotonic() - begun
        return self._arrived[message].popleft()

    def _await(self, message: Message, begun: float) -> None:
        """Steps are alike: sleep until shortly before the message came the last time, then watch for it.

        A sleeper is woken late, and finds its core cold; one that watched all the time would take the core from others,
        so that is done only where every rank has a core. Who has waited for long rehearses what comes next.
        """
        expected = begun + self._waited_s.get(message, 0.0)
        rehearsal_s = expected - WATCH_S
        rehearsed = begun > rehearsal_s  # what has just been run needs none
        while not self._arrived.get(message):
            held, now = self._flush(), time.monotonic()
            if now < expected - self._watch_s:
                self._look(min(expected - self._watch_s - now, RETRY_S if held else 1.0))
            elif now < expected + self._watch_s:
                self._look(0.0)
                if not rehearsed and now > rehearsal_s:
                    rehearse()
                    rehearsed = True
                os.sched_yield()
            else:
                self._look(RETRY_S if held else None)

    def send(self, message: Message, target: int, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        if self._waiting[target]:
            self._flush()
        if self._waiting[target] or not self._put(message, target, tensor):
            self._waiting[target].append((message, tensor))

    def finish(self) -> None:
        while self._flush():
            self._look(RETRY_S)

    def _put(self, message: Message, target: int, tensor: Tensor) -> bool:
        box, number = self._outbox[target], self._sent[target]
        if number - box.taken[0] >= box.num_slots:
            return False
        slot, num_bytes = number % box.num_slots, tensor.nbytes
        box.put(slot, tensor)
        kind, stage, microbatch, index = message
        line = LINE.pack(self._rank, CARRIED.index(kind), stage, microbatch, index, slot, num_bytes)
        os.write(self._pipes[target], line)
        self._sent[target] = number + 1
        return True

    def _flush(self) -> bool:
        """Put what waits into slots that have become free; whether something still waits."""
        for target, backlog in self._waiting.items():
            while backlog and self._put(backlog[0][0], target, backlog[0][1]):
                backlog.popleft()
        return any(self._waiting.values())

    def _look(self, timeout_s: float | None) -> None:
        """Take in what has come; wait for something for so long, or for as long as it takes."""
        pipe = self._pipes[self._rank]
        if timeout_s != 0.0 and not select.select([pipe], [], [], timeout_s)[0]:
            return
        try:
            lines = os.read(pipe, LOOK)
        except BlockingIOError:  # nothing there
            return
        for sender, kind, stage, microbatch, index, slot, num_bytes in LINE.iter_unpack(lines):
            message, box = Message(CARRIED[kind], stage, microbatch, index), self._inbox[sender]
            buffer = self._posted.pop(message, None)
            if buffer is None:
                data = ctypes.string_at(box.address + slot * box.slot_bytes, num_bytes)
                self._early.setdefault(message, deque()).append(data)
            else:
                assert num_bytes == buffer.nbytes, f"{message} has another size than its buffer"
                box.get(slot, buffer)
                self._arrived.setdefault(message, deque()).append(buffer)
            box.taken[0] += 1


def rehearse() -> None:
    """A forward and a backward of nothing: a core that has slept runs the first ones ten times as slow."""
    with torch.enable_grad():
        torch.autograd.backward((_NOTHING * _NOTHING,), (_NOTHING.detach(),))
    _NOTHING.grad = None


def open_same_host(
    rank: int, size: int, store: Store, links: Iterable[tuple[int, int]], *, most_bytes: int, crowded: bool
) -> SameHost:
    """Open the boxes of all directed links for messages of at most so many bytes; all ranks call this together.

    `crowded`: ranks of this host, those of other pipelines included, wait for one another's cores.
    """
    links = sorted(set(links))
    num_slots = max(2, min(MOST_SLOTS, MOST_BOX_BYTES // most_bytes))
    slot_bytes = -(-most_bytes // HEADER) * HEADER
    if rank == 0:
        store.set("same-host", tempfile.mkdtemp(prefix="wavetrain-", dir=_memory_folder()))
    folder = Path(store.get("same-host").decode())
    os.mkfifo(folder / f"pipe-{rank}", 0o600)
    _meet(store, size, "same-host-pipes")
    inbox: dict[int, Box] = {}
    outbox: dict[int, Box] = {}
    for sender, receiver in links:
        if rank in (sender, receiver):
            box = Box.open(folder / f"box-{sender}-{receiver}", slot_bytes=slot_bytes, num_slots=num_slots)
            (outbox if rank == sender else inbox)[receiver if rank == sender else sender] = box
    pipes = {peer: os.open(folder / f"pipe-{peer}", os.O_RDWR) for peer in outbox}
    pipes[rank] = os.open(folder / f"pipe-{rank}", os.O_RDWR | os.O_NONBLOCK)
    _meet(store, size, "same-host-open")
    if rank == 0:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return SameHost(rank, inbox, outbox, pipes, crowded=crowded)


def _memory_folder() -> str | None:
    """Where files are memory; else the usual place for temporary ones."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a folder of our own is made in it


def _meet(store: Store, size: int, key: str) -> None:
    """Wait until all ranks are here."""
    if store.add(key, 1) == size:
        store.set(f"{key}-all", "")
    store.wait([f"{key}-all"])
