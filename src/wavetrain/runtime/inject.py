"""Faults on purpose: what happens to a run when a rank dies, stops, raises or is cut off, at a chosen action."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.schedule.action import Action, Kind


class Kinds(StrEnum):
    """What is done to the rank."""

    KILL = "kill"
    STOP = "stop"
    EXCEPTION = "exception"
    DROP = "drop"  # its network link goes down; in a network namespace of its own, as root


class When(StrEnum):
    """During which sort of action, or in which phase of a run."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    SAVE = "save"  # a checkpoint's file is being written
    PUBLISH = "publish"  # it is complete, but nobody would find it yet
    START = "start"  # before ranks meet
    LOAD = "load"  # a checkpoint is being read


DURING = {
    When.FORWARD: (Kind.F,),
    When.BACKWARD: (Kind.B, Kind.I, Kind.W),
    When.COMMUNICATION: (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B),
}
STEPLESS = (When.START, When.LOAD)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, at the first such moment of a rank's step."""

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
    left = [f for f in faults if (f.rank, f.attempt) == (rank, attempt) and f.when in DURING]
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
