"""Starts ranks and ends them: `run_local` forks them here and watches them, `run_rank` is one rank of torchrun's or Slurm's.

Forked ranks need no second import of torch (64 ranks start in seconds). Each is in a process group of its own and dies
with its parent, whatever ends that. When one fails or hangs, the report names the culprit and all are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import logging
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from wavetrain.base.codec import dumps
from wavetrain.base.errors import RunError, WavetrainError
from wavetrain.runtime.board import CHECK_S, PAGE_BYTES, Board, Heart, SharedProgress
from wavetrain.runtime.progress import Progress
from wavetrain.runtime.report import Limits, Report, Status, diagnose, trouble
from wavetrain.runtime.world import Place, World, attempt_store, connect, join
from wavetrain.schedule.action import Actions

Work = Callable[[World], int | None]
LOG = logging.getLogger(__name__)
INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_STACK_SIGNAL = signal.SIGUSR1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: 0 or what its ranks returned, 4 with a report, 130 if interrupted."""

    exit_code: int
    report: Report | None
    results: tuple[bytes, ...]  # by rank, what it gave with `World.give`
    exits: tuple[int, ...]  # by rank; -9: killed by signal 9
    ended_s: float = 0.0  # from the detection of trouble until every process was gone

    def check(self) -> Outcome:
        """Itself; RunError where the run failed."""
        if self.exit_code:
            raise RunError(self.report.text if self.report else f"run ended with exit code {self.exit_code}")
        return self


def run_local(
    work: Work,
    ranks: int,
    *,
    limits: Limits | None = None,
    actions: Actions | None = None,
    report_dir: Path | None = None,
    host: str = "127.0.0.1",
    prepare: Callable[[int], None] | None = None,
) -> Outcome:
    """Run `work` on each of `ranks` forked processes until all are done, one fails, or they hang.

    `host` is an address of this machine that all ranks reach, and the only one the store listens on. `prepare(rank)`
    runs first in each process, before it is connected (to enter a network namespace, say). Call this before the
    process has threads that matter to the ranks: they are not forked.
    """
    limits = limits or Limits()
    with socket.create_server((host, 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        places = [Place(rank=r, size=ranks, local_rank=r, host=host, port=port) for r in range(ranks)]
        children = _Children()
        try:
            for place in places:
                children.fork(place, work, prepare, listener)
            store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
            board = Board(attempt_store(store, 0), ranks, pages=children.pages)
            report = _watch(children, board, limits, actions)
            return _outcome(children, report, limits, report_dir)
        except KeyboardInterrupt:
            children.end(limits.end_s)
            return Outcome(
                exit_code=INTERRUPTED, report=None, results=children.results(), exits=children.exit_codes(ranks)
            )
        finally:
            children.end(limits.end_s)
            children.close()


def _watch(children: _Children, board: Board, limits: Limits, actions: Actions | None) -> Report | None:
    """The report of what went wrong; None when every rank has ended by itself, its work done."""
    while True:
        children.wait(CHECK_S)
        statuses = board.read(exits=children.exits, pids=children.pids)
        if trouble(statuses, limits):
            break
        if len(children.exits) == board.size:
            return None
    until = time.monotonic() + limits.grace_s
    while (left := until - time.monotonic()) > 0 and len(children.exits) < board.size:
        children.wait(left)
    report = diagnose(board.read(exits=children.exits, pids=children.pids), limits, actions)
    return children.with_stack(report)


def _outcome(children: _Children, report: Report | None, limits: Limits, report_dir: Path | None) -> Outcome:
    begun_s = time.monotonic()
    if report is not None:
        announce(report, report_dir)
    children.end(limits.end_s)
    exits = children.exit_codes(len(children.pids))
    code = max(exits, default=0) if report is None else RunError.exit_code
    ended_s = limits.grace_s + time.monotonic() - begun_s if report else 0.0
    return Outcome(exit_code=code, report=report, results=children.results(), exits=exits, ended_s=ended_s)


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

    def fork(self, place: Place, work: Work, prepare: Callable[[int], None] | None, listener: socket.socket) -> None:
        self._given[place.rank] = os.memfd_create(f"result-{place.rank}")
        self._stacks[place.rank] = os.memfd_create(f"stack-{place.rank}")
        page = self.pages[place.rank] = mmap.mmap(-1, PAGE_BYTES)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread; those of BLAS are idle and not used by the ranks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _become_rank(parent, self._stacks[place.rank])
            listener.close()
            if prepare is not None:
                prepare(place.rank)
            _run_forked(work, place, SharedProgress(rank=place.rank, page=page), self._given[place.rank])
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
        self._wait_all(patience_s)
        for rank in self.pids.keys() - self.exits.keys():
            _kill(self.pids[rank], signal.SIGKILL)
        self._wait_all(10.0)

    def _wait_all(self, seconds: float) -> None:
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

    def exit_codes(self, ranks: int) -> tuple[int, ...]:
        return tuple(self.exits.get(rank, -signal.SIGKILL) for rank in range(ranks))

    def close(self) -> None:
        for number in (*self._given.values(), *self._stacks.values(), *self._ranks):
            os.close(number)
        for page in self.pages.values():
            page.close()
        self._given, self._stacks, self._ranks, self.pages = {}, {}, {}, {}


def _become_rank(parent: int, stack: int) -> None:
    """What a forked process is before it does anything: its parent's dependant, the leader of its own group."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before this was asked for
        os._exit(1)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(_STACK_SIGNAL, file=stack, all_threads=False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    torch.set_num_threads(1)


def _run_forked(work: Work, place: Place, progress: Progress, given: int) -> NoReturn:
    code = RunError.exit_code
    try:
        if place.host.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        world = join(place, progress=progress, given=given)
        heart = Heart(world.progress, connect(place))
        heart.start()
        code = _run(work, world, heart)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


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
