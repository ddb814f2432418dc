"""`Progress`: where a search stands, told to whoever watches it; by default to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Where a search stands."""

    deciding: str  # what is being decided
    done: int
    total: int  # as far as is known: it grows with what is found, and shrinks with better plans; 0: not known yet
    evaluated: int  # plans that were simulated
    step_s: float | None = None  # of the best so far

    def __str__(self) -> str:
        count = f" {self.done:,} of {self.total:,}" if self.total else ""
        best = f", best step {self.step_s:.4g} s" if self.step_s is not None else ""
        return f"{self.deciding}{count}, {self.evaluated:,} simulated{best}"


Watch = Callable[[Progress], None]


def to_log(progress: Progress) -> None:
    """Searches run inside many things; the log hears of all of them without being handed down."""
    LOG.debug("%s", progress)
