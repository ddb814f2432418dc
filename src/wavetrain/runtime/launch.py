"""Starts ranks and ends them: `run_local` forks them here and watches them; `run_rank` is one of torchrun's or Slurm's.

Forked ranks need no second import of torch (64 ranks start in seconds). Each is in a process group of its own and dies
with its parent, whatever ends that. When one fails or hangs, the report names the culprit and all are ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from wavetrain.base.codec import dumps
from wavetrain.base.errors import RunError, WavetrainError
from wavetrain.runtime.board import CHECK_S, PAGE_BYTES, Board, Heart, SharedProgress
from wavetrain.runtime.fork import fork
from wavetrain.runtime.progress import Phase, Progress
from wavetrain.runtime.report import Limits, Report, diagnose, trouble
from wavetrain.runtime.world import Place, World, connect, join, serve
from wavetrain.schedule.action import Actions

Work = Callable[[World], int | None]
Prepare = Callable[[int], None]
LOG = logging.getLogger(__name__)
INTERRUPTED = 130
ABORT = "abort"  # the store's key under which the report of a failed run is
MOST_WATCHERS = 8  # ranks that read all others; each rank looks for the report only
HASTE_S = 0.3  # the grace where a launcher has asked this rank to end
VERDICT_S = 4.0  # for a report to come, beyond the grace
_STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: 0 or what its ranks returned, 4 with a report, 130 if interrupted."""

    exit_code: int
    report: Report | None = None
    results: tuple[bytes, ...]  # by rank, what it gave with `World.give`
    exits: tuple[int, ...]  # by rank; -9: killed by signal 9
    ended_s: float = 0.0  # from the detection of trouble until every process was gone

    def check(self) -> Outcome:
        """Itself; RunError where the run failed."""
        if self.exit_code:
            raise RunError(self.report.text if self.report else f"run ended with exit code {self.exit_code}")
        return self


def run_local(  # noqa: PLR0913 -- all but two by name
    work: Work,
    ranks: int,
    *,
    limits: Limits | None = None,
    actions: Actions | None = None,
    report_dir: Path | None = None,
    host: str = "127.0.0.1",
    prepare: Prepare | None = None,
    attempt: int = 0,
) -> Outcome:
    """Run `work` on each of `ranks` forked processes until all are done, one fails, or they hang.

    `host` is an address of this machine that all ranks reach, and the only one the store listens on. `prepare(rank)`
    runs first in each process, before it is connected (to enter a network namespace, say); `attempt` counts restarts of
    a run, each of which has a store of its own. Call this before the
    process has threads that matter to the ranks: they are not forked.
    """
    limits = limits or Limits()
    with socket.create_server((host, 0), backlog=4096) as listener, contextlib.closing(_Children()) as children:
        port = listener.getsockname()[1]
        first = Place(rank=0, size=ranks, local_rank=0, host=host, port=port, attempt=attempt)
        first = replace(first, local_size=ranks, cores=frozenset(os.sched_getaffinity(0)))
        places = [replace(first, rank=rank, local_rank=rank) for rank in range(ranks)]
        try:
            for place in places:
                children.fork(place, work, prepare, listener)
            board = Board(serve(places[0], listener), ranks, pages=children.pages)
            found = _watch(children, board, limits, actions)
            if found.report is not None:
                announce(found.report, report_dir)
            children.end(limits.end_s)
        except KeyboardInterrupt:
            children.end(limits.end_s)
            return Outcome(exit_code=INTERRUPTED, results=children.results(), exits=children.exit_codes())
        return _outcome(children, found)


@dataclass(frozen=True)
class _Found:
    """What watching came to; no report where every rank has ended by itself, its work done."""

    report: Report | None
    detected_s: float  # on the monotonic clock


def _watch(children: _Children, board: Board, limits: Limits, actions: Actions | None) -> _Found:
    while True:
        children.wait(CHECK_S)
        wrong = trouble(board.read(exits=children.exits, pids=children.pids), limits)
        detected_s = time.monotonic()
        if wrong:
            children.wait_all(limits.grace_s)  # for the other ranks' last words
            statuses = board.read(exits=children.exits, pids=children.pids)
            if trouble(statuses, limits):
                return _Found(children.with_stack(diagnose(statuses, limits, actions)), detected_s)
        elif len(children.exits) == board.size:
            return _Found(None, detected_s)


def _outcome(children: _Children, found: _Found) -> Outcome:
    exits, results = children.exit_codes(), children.results()
    if found.report is None:
        return Outcome(exit_code=max(exits), results=results, exits=exits)
    ended_s = time.monotonic() - found.detected_s
    return Outcome(exit_code=RunError.exit_code, report=found.report, results=results, exits=exits, ended_s=ended_s)


def announce(report: Report, report_dir: Path | None) -> None:
    """The report on stderr (by the log) and, where a directory is given, in its `report.json`."""
    LOG.error("%s", report.text)
    if report_dir is not None:
        try:
            report_dir.mkdir(parents=True, exist_ok=True)
            (report_dir / "report.json").write_text(dumps(report.document()))
        except OSError as error:
            LOG.error("no report.json: %s", error)


class _Children:
    """The forked ranks: their processes, how they ended, what they gave back."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}  # by rank
        self.exits: dict[int, int] = {}  # by rank
        self.pages: dict[int, mmap.mmap] = {}  # by rank: what it is doing, shared
        self._given: dict[int, int] = {}  # by rank: a file in memory with its results
        self._stacks: dict[int, int] = {}  # by rank: a file in memory with its stack, if asked for
        self._ranks: dict[int, int] = {}  # by process file number
        self._poll = select.poll()

    def fork(self, place: Place, work: Work, prepare: Prepare | None, listener: socket.socket) -> None:
        self._given[place.rank] = os.memfd_create(f"result-{place.rank}")
        self._stacks[place.rank] = os.memfd_create(f"stack-{place.rank}")
        page = self.pages[place.rank] = mmap.mmap(-1, PAGE_BYTES)
        pid = fork()
        if pid == 0:
            _become_rank(self._stacks[place.rank])
            listener.close()
            progress = SharedProgress(rank=place.rank, page=page)
            _run_forked(work, place, prepare, progress, self._given[place.rank])
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does the same; whoever comes first
        self.pids[place.rank] = pid
        process = os.pidfd_open(pid)
        self._ranks[process] = place.rank
        self._poll.register(process, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Until a rank ends, at most so long; note how it ended."""
        for process, _ in self._poll.poll(max(0.0, seconds) * 1000):
            rank = self._ranks.pop(process)
            self._poll.unregister(process)
            os.close(process)
            pid = self.pids[rank]
            _kill(pid, signal.SIGKILL)  # what it may have started; its number is its own until it is waited for
            self.exits[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def end(self, patience_s: float) -> None:
        """End all that live: asked first, also if stopped; killed when they take longer."""
        alive = self.pids.keys() - self.exits.keys()
        for number in (signal.SIGTERM, signal.SIGCONT):
            for rank in alive:
                _kill(self.pids[rank], number)
        self.wait_all(patience_s)
        for rank in self.pids.keys() - self.exits.keys():
            _kill(self.pids[rank], signal.SIGKILL)
        self.wait_all(10.0)

    def wait_all(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._ranks and time.monotonic() < until:
            self.wait(until - time.monotonic())

    def with_stack(self, report: Report) -> Report:
        """The report with the culprit's Python stack, where it lives and raised nothing."""
        culprit = report.statuses[report.culprit]
        if culprit.is_over or culprit.trace or culprit.state.upper() == "T" or culprit.rank in self.exits:
            return report
        os.kill(self.pids[culprit.rank], _STACK_SIGNAL)
        time.sleep(0.1)
        statuses = list(report.statuses)
        lines = _content(self._stacks[culprit.rank]).decode(errors="replace").splitlines()
        frames = itertools.takewhile(lambda line: f'"{__file__}"' not in line, lines)
        statuses[culprit.rank] = replace(culprit, trace="\n".join(frames))
        return replace(report, statuses=tuple(statuses))

    def results(self) -> tuple[bytes, ...]:
        return tuple(_content(self._given[rank]) for rank in sorted(self._given))

    def exit_codes(self) -> tuple[int, ...]:
        return tuple(self.exits.get(rank, -signal.SIGKILL) for rank in sorted(self.pids))

    def close(self) -> None:
        self.end(0.0)
        for number in (*self._given.values(), *self._stacks.values(), *self._ranks):
            os.close(number)
        for page in self.pages.values():
            page.close()
        self._given, self._stacks, self._ranks, self.pages = {}, {}, {}, {}


def _become_rank(stack: int) -> None:
    """What a forked process is before it does anything: the leader of its own group."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    faulthandler.register(_STACK_SIGNAL, file=stack, all_threads=False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    torch.set_num_threads(1)
    # torch asks what the store's address is called, for its log only; where nobody answers, once and for a second
    os.environ.setdefault("RES_OPTIONS", "attempts:1 timeout:1")


def _run_forked(work: Work, place: Place, prepare: Prepare | None, progress: Progress, given: int) -> NoReturn:
    code = RunError.exit_code
    try:
        if prepare is not None:
            prepare(place.rank)
        if place.host.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        world = join(place, progress=progress, given=given)
        heart = Heart(world.progress, connect(place))
        heart.start()
        code = _run(work, world, heart)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _run(work: Work, world: World, heart: Heart) -> int:
    """The exit code of a rank's work; what it raises is published, not printed: only the culprit's is of interest."""
    try:
        code = work(world) or 0
    except WavetrainError as error:
        heart.failed(error)
        return error.exit_code
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # this function's own is of no use
        heart.failed(error, "".join(traceback.format_exception(type(error), error, frames)))
        return RunError.exit_code
    heart.done()
    return code


def run_rank(
    work: Work,
    world: World,
    *,
    limits: Limits | None = None,
    actions: Actions | None = None,
    report_dir: Path | None = None,
) -> int:
    """Be one rank that torchrun or Slurm has started and that met the others: its exit code, when all are done.

    There is no parent of ours, so ranks watch one another. Where something is wrong, one of them says what, and all end
    at once with exit code 4, without returning from here.
    """
    place = world.place
    guard = _Guard(place, limits or Limits(), actions, report_dir)
    heart = Heart(world.progress, connect(place), also=guard.check_reach)
    with guard.hearing_signals():
        heart.start()
        guard.start()
        code = _run(work, world, heart)
        if world.progress.phase is Phase.FAILED:
            guard.await_verdict()
            LOG.error("rank %d failed: %s", place.rank, world.progress.error)
        else:
            guard.is_done = True
            _await_all(world)
        guard.stop()
        heart.stop()
    return code


def _await_all(world: World) -> None:
    """Leave together: the store, and those that watch, are needed until the last rank is done."""
    with contextlib.suppress(RuntimeError):  # the rank that runs the store saw all done and left
        done = world.store.add("done", 1)
        while done < world.size:
            time.sleep(CHECK_S / 5)
            done = world.store.add("done", 0)


class _Guard:
    """A thread that looks for trouble among all ranks and ends this one when there is."""

    def __init__(self, place: Place, limits: Limits, actions: Actions | None, report_dir: Path | None) -> None:
        self._place, self._limits, self._actions, self._report_dir = place, limits, actions, report_dir
        self._store = connect(place)
        self._board = Board(self._store, place.size)
        self._watches = place.rank % -(-place.size // MOST_WATCHERS) == 0
        self._stop = self._asked = False
        self._seen_s = 0.0  # since when a rank is gone that was asked to end
        self._reached_s = time.monotonic()
        self._misses = 0
        self.is_done = False  # this rank is: a store that is gone then has seen all ranks done
        self._ear, self._voice = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        os.write(self._voice, b"\0")
        self._thread.join(timeout=2.0)

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """The thread hears SIGTERM even while the main one is inside gloo: torchrun sends it as soon as a rank dies."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        voice = signal.set_wakeup_fd(self._voice, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(voice)
            signal.signal(signal.SIGTERM, before)

    def await_verdict(self) -> None:
        """Stay while the others find out who is to blame; the thread ends this process then."""
        self._thread.join(timeout=self._limits.grace_s + VERDICT_S)

    def check_reach(self) -> None:
        """End a rank that can't reach the store (called by the heartbeat, as reading may block for ever)."""
        age_s = time.monotonic() - self._reached_s
        self._misses = self._misses + 1 if age_s > self._limits.wait_s + VERDICT_S else 0
        if self._misses > 4:  # not after a mere pause of this process
            LOG.error("rank %d has not reached the store for %.1f s: its network is cut", self._place.rank, age_s)
            _leave(RunError.exit_code)

    def _run(self) -> None:
        try:
            while not self._stop:
                self._look(asked_to_end=self._heard_sigterm(2 * CHECK_S))
        except RuntimeError as error:  # torch's DistError is one
            if self._asked:  # the rank that runs the store was asked as well
                _leave(128 + signal.SIGTERM)
            if not (self._stop or self.is_done):
                whose = "" if self._place.serves else f" at {self._place.host}:{self._place.port}"
                LOG.error("rank %d lost the store%s: %s", self._place.rank, whose, str(error).partition("\n")[0])
                _leave(RunError.exit_code)

    def _heard_sigterm(self, seconds: float) -> bool:
        if not select.select([self._ear], [], [], seconds)[0]:
            return False
        return signal.SIGTERM in os.read(self._ear, 64)

    def _look(self, *, asked_to_end: bool) -> None:
        if asked_to_end:
            self._asked = True
            self._store.set(f"asked/{self._place.rank}", "")
        if self._store.check([ABORT]):
            self._end()
        wrong = (self._watches or asked_to_end) and trouble(self._board.read(), self._limits)
        self._reached_s = time.monotonic()
        if wrong or asked_to_end:  # perhaps because a rank died that has not been seen yet
            time.sleep(min(self._limits.grace_s, HASTE_S) if asked_to_end else self._limits.grace_s)
            statuses = self._board.read()
            if trouble(statuses, self._limits):
                report = diagnose(statuses, self._limits, self._actions)
                if not self._was_asked(report.culprit):
                    self._abort(report)
                elif self._spared_s > VERDICT_S:  # it alone: this rank would wait for it for ever
                    self._abort(replace(report, why=f"rank {report.culprit} was asked to end (SIGTERM)"))
        if asked_to_end:
            _leave(128 + signal.SIGTERM)

    def _was_asked(self, rank: int) -> bool:
        """Whether a rank did not end by itself; then its launcher will ask the others as well."""
        if not self._store.check([f"asked/{rank}"]):
            return False
        self._seen_s = self._seen_s or time.monotonic()
        return True

    @property
    def _spared_s(self) -> float:
        return time.monotonic() - self._seen_s

    def _abort(self, report: Report) -> None:
        """The first to find out speaks for all."""
        mine = json.dumps({"by": self._place.rank, **report.document()})
        if self._store.compare_set(ABORT, "", mine) == mine.encode():
            announce(report, self._report_dir)
        self._end()

    def _end(self) -> NoReturn:
        """Leave, and let no stopped rank of this machine stay: launchers ask it to end and wait half a minute."""
        for status in self._board.read():
            if status.state.upper() == "T":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(status.pid, signal.SIGKILL)
        if self._place.serves:
            time.sleep(4 * CHECK_S)  # until the others have read the report
        _leave(RunError.exit_code)


def _leave(code: int) -> NoReturn:
    """End this process now, whatever its main thread is in."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _content(file: int) -> bytes:
    size = os.fstat(file).st_size
    parts, at = [], 0
    while at < size:
        parts.append(os.pread(file, size - at, at))
        at += len(parts[-1])
    return b"".join(parts)
