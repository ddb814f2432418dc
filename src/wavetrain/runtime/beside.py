"""Work beside the main thread of a rank, which shows meanwhile that it lives: slow disks are no hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from wavetrain.runtime.progress import Progress

T = TypeVar("T")
PATIENCE_S = 3600.0  # for what all ranks write or read
ALIVE_S = 0.5  # between signs of life


class Beside:
    """One piece of work at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def start(self, name: str, work: Callable[[], object]) -> None:
        """Begin a piece; the one before must be finished."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._guarded, args=(work,), name=name)
        self._thread.start()

    def finish(self) -> None:
        """Wait for what was begun; an error of it is raised here."""
        if self._thread is not None:
            until = time.monotonic() + PATIENCE_S
            while self._thread.is_alive():
                self._thread.join(ALIVE_S)
                if time.monotonic() < until:
                    self._progress.enter(self._progress.phase)
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._failed = error


def alive(progress: Progress, work: Callable[[], T]) -> T:
    """What work comes to that may take long, as it reads or writes files."""
    found: list[T] = []
    beside = Beside(progress)
    beside.start("files", lambda: found.append(work()))
    beside.finish()
    return found[0]
