"""`Action`: one thing a rank does, in PyTorch's own text form (`2F0`, `3SEND_F1`, `1UNSHARD`); `Actions`: all ranks'.

A schedule is data. Generators emit compute actions only; passes add communication and sharding; the verifier proves the
whole; the simulator and the runtime read the same value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from wavetrain.schedule.placement import Placement


class Kind(StrEnum):
    """What an action does. The values are PyTorch's, except RECOMPUTE, which it has no word for."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # input gradient only  # noqa: E741 - the grammar's own letter
    W = "W"  # weight gradient only
    RECOMPUTE = "RECOMPUTE"  # forward again, just before the backward
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"


COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
SENDS = frozenset((Kind.SEND_F, Kind.SEND_B))
RECEIVES = frozenset((Kind.RECV_F, Kind.RECV_B))
WITHOUT_MICROBATCH = frozenset((Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD))

_TEXT = re.compile(r"(\d{1,9})(F|B|I|W|RECOMPUTE|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)(\d{0,9})")


class Action(NamedTuple):
    """One action of one rank."""

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that `str` wrote; ValueError says what is wrong with other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError("is no action; actions read like 2F0, 3SEND_F1 or 1UNSHARD")
        kind = Kind(match[2])
        if (kind in WITHOUT_MICROBATCH) != (match[3] == ""):
            needs = "takes no microbatch" if kind in WITHOUT_MICROBATCH else "needs a microbatch"
            raise ValueError(f"{kind.value} {needs}")
        return Action(int(match[1]), kind, int(match[3]) if match[3] else None)


@dataclass(frozen=True)
class Actions:
    """For every rank, what it does in order."""

    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        """How many actions there are."""
        return sum(map(len, self.ranks))

    def compute(self) -> Iterator[tuple[int, Action]]:
        """Every compute action with its rank."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind in COMPUTE:
                    yield rank, action

    @cached_property
    def microbatches(self) -> dict[int, frozenset[int]]:
        """The microbatches that each stage runs forward."""
        found: dict[int, set[int]] = {}
        for _, action in self.compute():
            if action.kind is Kind.F and action.microbatch is not None:
                found.setdefault(action.stage, set()).add(action.microbatch)
        return {stage: frozenset(numbers) for stage, numbers in sorted(found.items())}

    @cached_property
    def num_microbatches(self) -> int:
        return len(frozenset().union(*self.microbatches.values()))

    @cached_property
    def placement(self) -> Placement:
        """Where each stage is computed, as far as the actions show it (the verifier says when they contradict).

        If the first half of the stages has no microbatch in common with the second, they are two copies of the model.
        """
        ranks: dict[int, int] = {}
        for rank, action in self.compute():
            ranks.setdefault(action.stage, rank)
        num_stages = max(ranks, default=-1) + 1
        half = num_stages // 2
        halves: tuple[set[int], set[int]] = (set(), set())
        for stage, numbers in self.microbatches.items():
            halves[stage >= half].update(numbers)
        apart = num_stages % 2 == 0 and half >= 2 and all(halves) and not halves[0] & halves[1]
        return Placement(tuple(ranks.get(stage, -1) for stage in range(num_stages)), chains=2 if apart else 1)

    @property
    def is_split(self) -> bool:
        return any(action.kind is Kind.I for _, action in self.compute())

    @property
    def has_communication(self) -> bool:
        return any(action.kind in SENDS or action.kind in RECEIVES for row in self.ranks for action in row)
