"""`Progress`: what a rank is doing now. The executor writes it, its heartbeat reads it; so does a hang report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

NOTHING = ""


class Phase(StrEnum):
    """What a rank's time goes to at a moment."""

    STARTING = "starting"
    COMPUTING = "computing"
    WAITING = "waiting"  # for a message
    COLLECTIVE = "collective"  # something all ranks of a group take part in
    DONE = "done"
    FAILED = "failed"


@dataclass
class Progress:
    """Mutable on purpose: written before and after each action, without locks, by one thread only.

    `since_s` is this host's monotonic clock. `count` grows with every change, so that a reader elsewhere sees life
    without comparing clocks.
    """

    rank: int
    phase: Phase = Phase.STARTING
    step: int = 0
    position: int = -1  # in the rank's row of actions
    action: str = NOTHING  # "2F0"
    message: str = NOTHING  # what is waited for: the receive, "2RECV_F0"
    source: int = -1  # the rank it comes from
    error: str = NOTHING
    count: int = 0
    since_s: float = 0.0

    def computing(self, position: int, action: str) -> None:
        self.position, self.action, self.message, self.source = position, action, NOTHING, -1
        self.enter(Phase.COMPUTING)

    def waiting(self, message: str, source: int, *, position: int | None = None, action: str | None = None) -> None:
        """For a message that an action needs, the one already stated unless another is."""
        if position is not None and action is not None:
            self.position, self.action = position, action
        self.message, self.source = message, source
        self.enter(Phase.WAITING)

    def together(self) -> None:
        """With others: no single rank is waited for."""
        self.message, self.source = NOTHING, -1
        self.enter(Phase.COLLECTIVE)

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.count += 1
        self.since_s = time.monotonic()

    def failed(self, error: str) -> None:
        self.error = error
        self.enter(Phase.FAILED)
