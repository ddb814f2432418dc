"""Heartbeats: each rank's `Progress`, published through the store by a thread of its own; `Board` reads all ranks'.

Beats go on while the main thread waits in gloo, which releases the interpreter. They use a connection of their own:
the process group's may be held by a wait.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from wavetrain.runtime.progress import Phase, Progress
from wavetrain.runtime.report import Status
from wavetrain.runtime.world import Store

CHECK_S = 0.25  # how often a rank looks whether it has something to say
BEAT_S = 0.5  # how often it says that it lives
PAGE_BYTES = mmap.PAGESIZE  # a rank's shared memory
_NOTHING = "-"
_FIELDS = tuple(item.name for item in fields(Progress))


@dataclass
class SharedProgress(Progress):
    """Progress that also stands in memory shared with the parent, so that a rank's very last action outlives it."""

    page: mmap.mmap | None = None

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        if self.page is not None:
            text = (
                f"{phase}\t{self.step}\t{self.position}\t{self.action}\t{self.message}\t{self.source}\t{self.count}\n"
            )
            words = text.encode()[:PAGE_BYTES]
            self.page[: len(words)] = words

    @staticmethod
    def last(rank: int, page: mmap.mmap) -> Progress | None:
        """What stands in a rank's page, if anything does."""
        line, end, _ = page[:PAGE_BYTES].partition(b"\n")
        words = line.decode(errors="replace").split("\t")
        if not end or len(words) != 7:
            return None
        phase, step, position, action, message, source, count = words
        try:
            numbers = (int(step), int(position), int(source), int(count))
            progress = Progress(rank=rank, phase=Phase(phase), action=action, message=message)
        except ValueError:  # it was killed while it wrote
            return None
        progress.step, progress.position, progress.source, progress.count = numbers
        return progress


class Heart:
    """Publishes one rank's progress until stopped."""

    def __init__(self, progress: Progress, store: Store, *, also: Callable[[], None] | None = None) -> None:
        self.progress = progress
        self._also = also  # done with each beat, in the heartbeat's thread
        self._store = store
        self._beats = 0
        self._published: tuple[int, float] = (-1, 0.0)  # count, when
        self._trace = ""
        self._order = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * CHECK_S)

    def failed(self, error: BaseException, trace: str = "") -> None:
        """Last words, delivered before this returns; the store keeps the order in which ranks failed."""
        self._trace = trace
        with contextlib.suppress(RuntimeError):
            self._order = self._store.add("failures", 1)
        self.progress.failed(" <- ".join(f"{type(e).__name__}: {e}" for e in _with_causes(error)))
        self.publish(surely=True)

    def done(self) -> None:
        self.progress.enter(Phase.DONE)
        self.publish(surely=True)

    def publish(self, *, surely: bool = False) -> None:
        """Say what this rank is doing; `surely` waits until the store has it. A store that is gone hears nothing."""
        with self._lock:
            self._beats += 1
            self._published = (self.progress.count, time.monotonic())
            words = {name: getattr(self.progress, name) for name in _FIELDS} | {
                "beats": self._beats,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "kernel": kernel(),
                "trace": self._trace,
                "order": self._order,
            }
            with contextlib.suppress(RuntimeError):  # torch's DistError is one
                self._store.set(_key(self.progress.rank), json.dumps(words))
                if surely:
                    self._store.check([_key(self.progress.rank)])

    def _run(self) -> None:
        while not self._stop.wait(CHECK_S):
            count, when = self._published
            if count != self.progress.count or time.monotonic() - when > BEAT_S - CHECK_S / 2:
                self.publish()
            if self._also is not None:
                self._also()


@dataclass
class _Seen:
    """What the board remembers of a rank, by the reader's clock."""

    words: bytes
    count: int
    changed_s: float
    beat_s: float
    is_here: bool  # its process can be looked at
    status: Status


class Board:
    """All ranks' last words. `begun_s` is when the reader began: ranks that never spoke are as old as that."""

    def __init__(self, store: Store, size: int, *, pages: Mapping[int, mmap.mmap] | None = None) -> None:
        self.size = size
        self._pages = pages or {}
        self._store = store
        self._begun_s = time.monotonic()
        self._seen: dict[int, _Seen] = {}

    def read(self, *, exits: Mapping[int, int] | None = None, pids: Mapping[int, int] | None = None) -> list[Status]:
        """Every rank's status now; waits for none. `exits` and `pids` are what a parent knows of its children."""
        states = self._states(exits or {}, pids or {})  # before the words: who has ended has said all there is
        known = sorted(self._seen)
        words = dict(zip(known, self._store.multi_get([_key(rank) for rank in known]), strict=True)) if known else {}
        for rank in range(self.size):
            if rank not in words:
                # Compared with what no rank writes, the store answers at once, with that where the key is missing.
                words[rank] = self._store.compare_set(_key(rank), _NOTHING, _NOTHING)
        now = time.monotonic()
        for rank, text in words.items():
            if text != _NOTHING.encode():
                self._note(rank, text, now)
        return [self._status(rank, now, states.get(rank, ""), exits or {}) for rank in range(self.size)]

    def _note(self, rank: int, text: bytes, now: float) -> None:
        seen = self._seen.get(rank)
        if seen is not None and seen.words == text:
            return
        words = json.loads(text)
        progress = Progress(**{name: words[name] for name in _FIELDS} | {"phase": Phase(words["phase"])})
        changed_s = seen.changed_s if seen is not None and seen.count == progress.count else now
        facts = {name: words[name] for name in ("host", "pid", "trace", "order")}
        status = Status(rank=rank, progress=progress, **facts)
        self._seen[rank] = _Seen(text, progress.count, changed_s, now, words["kernel"] == kernel(), status)

    def _states(self, exits: Mapping[int, int], pids: Mapping[int, int]) -> dict[int, str]:
        """Of the processes that live on this machine, as far as they are known."""
        here = {rank: seen.status.pid for rank, seen in self._seen.items() if seen.is_here} | dict(pids)
        return {rank: process_state(pid) for rank, pid in here.items() if rank not in exits}

    def _status(self, rank: int, now: float, state: str, exits: Mapping[int, int]) -> Status:
        seen = self._seen.get(rank)
        code = exits.get(rank)
        if seen is None:
            age_s = now - self._begun_s
            return Status(rank=rank, unchanged_s=age_s, silent_s=age_s, state=state, exit_code=code)
        return replace(
            seen.status,
            progress=self._newest(rank, seen),
            unchanged_s=now - seen.changed_s,
            silent_s=now - seen.beat_s,
            state=state,
            exit_code=code,
        )

    def _newest(self, rank: int, seen: _Seen) -> Progress | None:
        """What a rank of this machine was last at, even if it could not say so any more."""
        page = self._pages.get(rank)
        last = SharedProgress.last(rank, page) if page is not None else None
        return (
            last
            if last is not None and last.count > seen.count and last.phase is not Phase.FAILED
            else seen.status.progress
        )


@cache
def kernel() -> str:
    """Equal where two processes see each other's process numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """R, S, D, T, Z, ... as in /proc; X where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, what caused it, and so on: a lost connection may stand under another name."""
    at: BaseException | None = error
    for _ in range(5):
        if at is None:
            return
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _key(rank: int) -> str:
    return f"progress/{rank}"
