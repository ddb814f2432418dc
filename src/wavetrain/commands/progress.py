"""Progress of searches on stderr, from the second second on: redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from wavetrain.planner.progress import LOG

FIRST_S = 1.0  # what takes less says nothing
PLAIN_EVERY_S = 2.0
DRAWN_EVERY_S = 0.25


class Heard(logging.Handler):
    """What a command is doing, and the last that a search inside it has told."""

    def __init__(self, doing: str) -> None:
        super().__init__(logging.DEBUG)
        self.doing, self.latest, self.started = doing, "", time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.latest = f": {record.getMessage()}"

    def now(self, doing: str) -> None:
        """The next thing is being done."""
        self.doing, self.latest = doing, ""

    def __str__(self) -> str:
        return f"{self.doing}{self.latest}; {time.perf_counter() - self.started:.0f} s"


@contextmanager
def progress(doing: str) -> Iterator[Heard]:
    """Say on stderr where the searches inside stand; silent again before anything is printed after it."""
    heard, done, level = Heard(doing), Event(), LOG.level
    speaker = Thread(target=_speak, args=(heard, done), daemon=True)
    LOG.addHandler(heard)
    LOG.setLevel(logging.DEBUG)
    speaker.start()
    try:
        yield heard
    finally:
        done.set()
        speaker.join()
        LOG.setLevel(level)
        LOG.removeHandler(heard)


def _speak(heard: Heard, done: Event) -> None:
    """In a thread of its own: one inner problem may take seconds without a word."""
    if done.wait(FIRST_S):
        return
    with suppress(OSError, ValueError):  # nobody listens on stderr any more
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False)
        if not console.is_terminal or console.is_dumb_terminal:
            while True:
                print(f"progress: {heard}", file=sys.stderr, flush=True)
                if done.wait(PLAIN_EVERY_S):
                    return
        with console.status(str(heard)) as drawn:
            while not done.wait(DRAWN_EVERY_S):
                drawn.update(str(heard))
