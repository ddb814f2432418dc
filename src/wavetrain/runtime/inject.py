"""Faults on purpose: what happens to a run when a rank dies, stops, raises, is cut off or slow, at a chosen action."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.schedule.action import Action, Kind

if TYPE_CHECKING:
    from torch import Tensor

    from wavetrain.runtime.chunk import Batch, Chunk
    from wavetrain.runtime.progress import Progress

T = TypeVar("T")


class Kinds(StrEnum):
    """What is done to the rank."""

    KILL = "kill"
    STOP = "stop"
    EXCEPTION = "exception"
    DROP = "drop"  # its network link goes down; in a network namespace of its own, as root
    SLOW = "slow"  # from that step on each such action takes twice as long


class When(StrEnum):
    """During which sort of action, or in which phase of a run."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    SAVE = "save"  # a checkpoint's file is being written
    PUBLISH = "publish"  # it is complete, but nobody would find it yet
    START = "start"  # before its process group is made
    LOAD = "load"  # a checkpoint is being read


DURING = {
    When.FORWARD: (Kind.F,),
    When.BACKWARD: (Kind.B, Kind.I, Kind.W),
    When.COMMUNICATION: (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B),
}
STEPLESS = (When.START, When.LOAD)
SLOWED = (When.FORWARD, When.BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, at the first such moment of a rank's step; or from that step on, if it is slow."""

    kind: Kinds
    rank: int
    step: int
    when: When
    attempt: int = 0  # of a run that is restarted


class InjectedError(Exception):
    """Raised on purpose."""


def parse_fault(text: str, *, where: str) -> Fault:
    """KIND:RANK:STEP:WHEN, and :ATTEMPT for one after so many restarts."""
    parts = text.split(":")
    rule = "must be KIND:RANK:STEP:WHEN or KIND:RANK:STEP:WHEN:ATTEMPT"
    if len(parts) not in (4, 5):
        raise InputError(Problem(where=where, value=text, rule=rule, remedy="kill:1:3:backward"))
    kind, rank, step, when, *attempt = parts
    problems = [
        Problem(where=where, value=given, rule="unknown value", legal=legal, nearest=nearest(given, legal))
        for given, legal in ((kind, tuple(map(str, Kinds))), (when, tuple(map(str, When))))
        if given not in legal
    ]
    if kind == Kinds.SLOW and when in tuple(map(str, When)) and when not in SLOWED:
        problems.append(
            Problem(where=where, value=text, rule="only computing can be slow", legal=tuple(map(str, SLOWED)))
        )
    numbers = [rank, step, *attempt]
    problems += [
        Problem(where=where, value=number, rule="must be a whole number, 0 or more")
        for number in numbers
        if not (number.isascii() and number.isdigit() and len(number) < 10)
    ]
    if problems:
        raise InputError(problems)
    rank_, step_, attempt_ = (*map(int, numbers), 0)[:3]
    return Fault(kind=Kinds(kind), rank=rank_, step=step_, when=When(when), attempt=attempt_)


def injector(faults: Iterable[Fault], *, rank: int, attempt: int = 0) -> Callable[[int, Action], None] | None:
    """What to call before each action of a rank; None where nothing is to happen to it in its actions."""
    mine = (f for f in faults if (f.rank, f.attempt) == (rank, attempt) and f.kind is not Kinds.SLOW)
    left = [f for f in mine if f.when in DURING]
    if not left:
        return None

    def before(step: int, action: Action) -> None:
        for fault in list(left):
            if step == fault.step and action.kind in DURING[fault.when]:
                left.remove(fault)
                DEEDS[fault.kind](f"{fault.kind} of rank {rank} at {action} of step {step}, as asked")

    return before


def strike(faults: Iterable[Fault], when: When, *, rank: int, attempt: int = 0, step: int = 0) -> None:
    """The same in another phase of a run: called where it is at its most vulnerable."""
    for fault in faults:
        now = fault.step == step or when in STEPLESS
        if now and (fault.rank, fault.attempt, fault.when) == (rank, attempt, when):
            DEEDS[fault.kind](f"{fault.kind} of rank {rank} at {when} of step {step}, as asked")


def slowed(
    chunks: Mapping[int, Chunk], faults: Iterable[Fault], progress: Progress, *, attempt: int = 0
) -> Mapping[int, Chunk]:
    """The stages of a rank, slow where that is asked for; otherwise as they are."""
    wanted = [f for f in faults if (f.kind, f.rank, f.attempt) == (Kinds.SLOW, progress.rank, attempt)]
    if not wanted:
        return chunks
    since = {when: min((f.step for f in wanted if f.when is when), default=None) for when in SLOWED}
    return {stage: Slowed(chunk, since, progress) for stage, chunk in chunks.items()}


class Slowed:
    """A stage that, when it has computed, sleeps as long as that took."""

    def __init__(self, chunk: Chunk, since: Mapping[When, int | None], progress: Progress) -> None:
        self._chunk, self._since, self._progress = chunk, since, progress

    @property
    def live(self) -> int:
        return self._chunk.live

    @property
    def held_bytes(self) -> int:
        return self._chunk.held_bytes

    def begin(self, batch: Batch) -> None:
        self._chunk.begin(batch)

    def recompute(self, microbatch: int) -> None:
        self._chunk.recompute(microbatch)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        return self._twice(When.FORWARD, lambda: self._chunk.forward(microbatch, x))

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        return self._twice(When.BACKWARD, lambda: self._chunk.backward(microbatch, gradient))

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        return self._twice(When.BACKWARD, lambda: self._chunk.backward_input(microbatch, gradient))

    def backward_weight(self, microbatch: int) -> None:
        self._twice(When.BACKWARD, lambda: self._chunk.backward_weight(microbatch))

    def _twice(self, when: When, act: Callable[[], T]) -> T:
        since, begun = self._since[when], time.monotonic()
        result = act()
        if since is not None and self._progress.step >= since:
            time.sleep(time.monotonic() - begun)
        return result


def _raise(text: str) -> None:
    raise InjectedError(text)


def _drop(text: str) -> None:  # noqa: ARG001
    subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)  # noqa: S607


DEEDS: dict[Kinds, Callable[[str], None]] = {
    Kinds.KILL: lambda _: os.kill(os.getpid(), signal.SIGKILL),
    Kinds.STOP: lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    Kinds.EXCEPTION: _raise,
    Kinds.DROP: _drop,
}
