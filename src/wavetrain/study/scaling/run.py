"""All points of a study, over the cores of this machine; what is known already is not computed again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.study.scaling.points import Point, key_of, points
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.solve import Solved, solve
from wavetrain.study.scaling.spec import Study
from wavetrain.study.scaling.store import Store, opened

ALIVE_EVERY_S = 1.0


@dataclass(frozen=True)
class Done:
    """A study that was carried out."""

    records: tuple[Record, ...]  # in the order of its points
    computed: int
    reused: int
    seconds: float


@dataclass(frozen=True)
class Status:
    """Where a study stands."""

    done: int
    total: int
    left_s: float | None  # None before the first point
    last: str = ""

    def __str__(self) -> str:
        left = "" if self.left_s is None else f", about {_duration(self.left_s)} left"
        return f"{self.done:,} of {self.total:,} points{left}" + (f"; last {self.last}" if self.last else "")


def run_study(study: Study, folder: Path, *, jobs: int = 1, told: Callable[[Status], None] = lambda _: None) -> Done:
    """Carry a study out in a folder, which keeps its answers."""
    started = time.perf_counter()
    asked = [(point, key_of(point)) for point in points(study)]
    with opened(folder) as store:
        missing = {key: point for point, key in asked if key not in store.known}
        reused = len({key for _, key in asked}) - len(missing)
        told(Status(reused, reused + len(missing), None))
        with closing(_solved(list(missing.values()), jobs)) as answers:  # whatever happens, no process is left
            for count, solved in enumerate(answers, start=1):
                _check_key(solved, missing)
                store.keep(solved)
                left_s = (time.perf_counter() - started) / count * (len(missing) - count)
                told(Status(reused + count, reused + len(missing), left_s, solved.record.where))
        records = tuple(_as_asked(store, point, key) for point, key in asked)
    return Done(records, len(missing), reused, time.perf_counter() - started)


def _check_key(solved: Solved, missing: Mapping[str, Point]) -> None:
    """Processes read files of their own: a change since the points were listed makes another question of one."""
    if solved.key not in missing:
        where = f"{solved.record.model}, {solved.record.node}"
        remedy = "run it again, with the files as they are now"
        raise InputError(Problem(where=where, rule="changed while the study ran", remedy=remedy))


def _as_asked(store: Store, point: Point, key: str) -> Record:
    """A record under the strategy's name of this study: the same question may have had another."""
    return replace(store.known[key], strategy=point.strategy.name)


def _solved(missing: Sequence[Point], jobs: int) -> Generator[Solved, None, None]:
    """Answers as they come; the longest searches, of most devices, begin first."""
    ordered = sorted(missing, key=lambda point: -point.devices)
    if jobs == 1 or len(ordered) < 2:
        yield from map(solve, ordered)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(),))
    try:
        for future in as_completed([pool.submit(solve, point) for point in ordered]):
            yield future.result()
    except BaseException as error:
        for process in list(pool._processes.values()):  # noqa: SLF001 - a search in them may take a minute more
            process.kill()
        if isinstance(error, BrokenProcessPool):
            words = "a process of the study was killed, as happens where memory runs out"
            raise RunError(f"{words}; run again to continue, with fewer --jobs") from None
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent: int) -> None:
    """A worker leaves Ctrl-C to its parent, and ends when that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ALIVE_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
