"""Faults on purpose: what happens to a run when a rank dies, stops, raises or is cut off, at a chosen action."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from wavetrain.schedule.action import Action, Kind


class Kinds(StrEnum):
    """What is done to the rank."""

    KILL = "kill"
    STOP = "stop"
    EXCEPTION = "exception"
    DROP = "drop"  # its network link goes down; in a network namespace of its own, as root


class When(StrEnum):
    """During which sort of action."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"


DURING = {
    When.FORWARD: (Kind.F,),
    When.BACKWARD: (Kind.B, Kind.I, Kind.W),
    When.COMMUNICATION: (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, at the first such action of a rank's step."""

    kind: Kinds
    rank: int
    step: int
    when: When


class InjectedError(Exception):
    """Raised on purpose."""


def injector(fault: Fault, rank: int) -> Callable[[int, Action], None] | None:
    """What to call before each action of a rank; None where nothing is to happen to it."""
    if fault.rank != rank:
        return None
    kinds = DURING[fault.when]
    left = [fault]

    def before(step: int, action: Action) -> None:
        if left and step == fault.step and action.kind in kinds:
            left.pop()
            DEEDS[fault.kind](f"{fault.kind} of rank {rank} at {action} of step {step}, as asked")

    return before


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
