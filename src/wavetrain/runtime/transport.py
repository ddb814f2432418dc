"""Messages between ranks, by identity: kind, receiving stage, microbatch, tensor.

One small interface: a send never waits; a receive is posted ahead and waited for when it is used. Process groups carry
messages in two ways: `tagged` (gloo: matched by tag, whatever their order) and `ordered` (NCCL: a communicator per
directed link, in the link's order, on which the verifier has proven both ends to agree). `Mailbox` connects threads of
one process, for tests and for looking at a schedule without any process group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from wavetrain.base.errors import RunError
from wavetrain.schedule.action import Actions, Kind
from wavetrain.schedule.evaluate import messages

LARGEST_TAG = 2**31 - 1  # gloo's
# What messages are. Plain words: they are looked up all the time, and looking up an enumeration's member takes longer.
FORWARD, BACKWARD, GRADIENT = CARRIED = tuple(k.value for k in (Kind.RECV_F, Kind.RECV_B, Kind.REDUCE_GRAD))


class Message(NamedTuple):
    """What a message is, wherever it goes: an output or a gradient for a stage, or a gradient that stages share."""

    kind: str  # of CARRIED
    stage: int  # the one that receives it; of a shared gradient the one that made it
    microbatch: int  # of a shared gradient its number
    tensor: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Transport(Protocol):
    """How one rank sends and receives."""

    def post(self, message: Message, source: int, buffer: Tensor) -> None:
        """Let a message arrive in a buffer; before `wait`, the earlier the better."""

    def wait(self, message: Message) -> Tensor:
        """The message, once it is here."""

    def send(self, message: Message, target: int, tensor: Tensor) -> None:
        """Let a tensor leave; it must not change before `finish`."""

    def finish(self) -> None:
        """Wait until everything sent has left."""


Route = Callable[[Message, int, int], tuple[dist.ProcessGroup | None, int]]  # message, sender, receiver -> group, tag


class Grouped:
    """Over process groups; the route says in which group and under which tag a message travels."""

    def __init__(self, rank: int, route: Route, *, ranks: Sequence[int] | None = None) -> None:
        """`ranks` are those of the process group, by their number in the pipeline; the same if not given."""
        self._rank, self._route, self._ranks = rank, route, ranks
        self._expected: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._leaving: list[tuple[dist.Work, Tensor]] = []  # a tensor must live until it has left

    def post(self, message: Message, source: int, buffer: Tensor) -> None:
        group, tag = self._route(message, source, self._rank)
        work = dist.irecv(buffer, self._among_all(source), group=group, tag=tag)
        assert work is not None, "both ranks are in the group"
        self._expected[message] = work, buffer

    def wait(self, message: Message) -> Tensor:
        work, buffer = self._expected.pop(message)
        work.wait()
        return buffer

    def send(self, message: Message, target: int, tensor: Tensor) -> None:
        group, tag = self._route(message, self._rank, target)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._among_all(target), group=group, tag=tag)
        assert work is not None, "both ranks are in the group"
        self._leaving.append((work, tensor))

    def finish(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()

    def _among_all(self, rank: int) -> int:
        return rank if self._ranks is None else self._ranks[rank]


def tagged(num_stages: int, num_microbatches: int, group: dist.ProcessGroup | None = None) -> Route:
    """One group that matches by tag (gloo). Tags are the same in every step: equal ones keep their order."""
    if len(CARRIED) * num_stages * num_microbatches > LARGEST_TAG:
        raise RunError(f"{num_stages} stages x {num_microbatches} microbatches are more messages than gloo has tags")
    base = {kind: number * num_stages * num_microbatches for number, kind in enumerate(CARRIED)}

    def route(message: Message, sender: int, receiver: int) -> tuple[dist.ProcessGroup | None, int]:  # noqa: ARG001
        kind, stage, microbatch, tensor = message
        assert tensor == 0, "one tensor crosses a boundary"
        return group, base[kind] + stage * num_microbatches + microbatch

    return route


def ordered(links: Mapping[tuple[int, int], dist.ProcessGroup]) -> Route:
    """A communicator per directed link (NCCL). Opposing transfers of two ranks never wait for each other."""

    def route(message: Message, sender: int, receiver: int) -> tuple[dist.ProcessGroup | None, int]:  # noqa: ARG001
        return links[sender, receiver], 0

    return route


def open_links(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A communicator for each directed link, made by all ranks in one order: made late, in any order, they hang."""
    return {(a, b): dist.new_group(sorted((a, b))) for a, b in sorted(set(pairs))}


def links_of(actions: Actions) -> tuple[tuple[int, int], ...]:
    """The directed links that a schedule uses."""
    return tuple(messages(actions))


class Post:
    """Where the mailboxes of all ranks of one process meet."""

    def __init__(self) -> None:
        self.arrived: dict[tuple[int, Message], list[Tensor]] = {}
        self.changed = threading.Condition()
        self.closed = False

    def close(self) -> None:
        """Nothing more will come: a rank has failed."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Mailbox:
    """For a rank that is a thread: a message is handed over as it is, without a copy."""

    def __init__(self, rank: int, post: Post) -> None:
        self._rank, self._office = rank, post

    def post(self, message: Message, source: int, buffer: Tensor) -> None:
        pass  # what arrives is the sender's tensor itself

    def wait(self, message: Message) -> Tensor:
        key = (self._rank, message)
        with self._office.changed:
            while not self._office.arrived.get(key):
                if self._office.closed:
                    raise RunError(f"{message} will not come: a peer has failed")
                self._office.changed.wait()
            return self._office.arrived[key].pop(0)

    def send(self, message: Message, target: int, tensor: Tensor) -> None:
        with self._office.changed:
            self._office.arrived.setdefault((target, message), []).append(tensor)
            self._office.changed.notify_all()

    def finish(self) -> None:
        pass
