"""Where a rank's step goes, by the simulator's names: every moment is charged to one term, so terms sum to the step.

One account per process. Collectives inside compute actions are charged apart as they happen; what actions and messages
took is known from their moments afterwards. Recomputation is part of the compute that asks for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from wavetrain.runtime.chunk import Accumulation
from wavetrain.runtime.executor import Moment

SKIPPED = 2  # steps in which memory is found and kernels are chosen
KEPT = 1000  # steps of a long run
CHARGED = ("tensor", "sharding", "reduction", "optimizer")  # beside what is running
RUNNING, WAITING, HOST = "running", "waiting", "host"

P = ParamSpec("P")
R = TypeVar("R")
# Their old names warn where there are new ones. Looked up when called, as FSDP2 does: `meter` stands in for them.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Account:
    """What the time of this process went to since it was last asked."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.running_s = 0.0  # actions and messages, with whatever was charged apart meanwhile
        self._term, self._since = HOST, time.monotonic()

    def switch(self, term: str) -> str:
        """Charge what comes to a term; the one before it."""
        now, before = time.monotonic(), self._term
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._term, self._since = term, now
        return before

    def move(self, since: float, term: str) -> None:
        """Charge what has passed since a moment, in which nothing was switched, to a term instead."""
        self.switch(self._term)
        passed = self._since - since
        self._seconds[self._term] -= passed
        self._seconds[term] = self._seconds.get(term, 0.0) + passed

    def take(self) -> dict[str, float]:
        """Seconds by term; their sum is all the time since the last such call."""
        self.switch(self._term)
        found, self._seconds, self.running_s = self._seconds, {}, 0.0
        return found


ACCOUNT = Account()


@contextmanager
def spending(term: str) -> Iterator[None]:
    """Charge a block to a term."""
    before, start = ACCOUNT.switch(term), time.monotonic()
    try:
        yield
    finally:
        ACCOUNT.switch(before)
        if term == RUNNING:
            ACCOUNT.running_s += time.monotonic() - start


def charged(term: str, function: Callable[P, R]) -> Callable[P, R]:
    """A function whose calls are charged to a term."""

    def called(*given: P.args, **named: P.kwargs) -> R:
        before = ACCOUNT.switch(term)
        try:
            return function(*given, **named)
        finally:
            ACCOUNT.switch(before)

    return called


def charged_change(term: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change between operators (`crossings`) whose two ways, there and back, are charged to a term."""
    assert isinstance(change, partial), "a change is a function and its two ways"
    return partial(change.func, **{name: charged(term, way) for name, way in change.keywords.items()})


# --- FSDP2 ---


class _Allocates:
    """Memory as FSDP2's own collectives take it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with spending("sharding"):
            work: dist.Work | None = getattr(dist, _GATHER)(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _Scatter(_Allocates):
    """A sum over copies of a group comes right after; there is no place but the hook behind it to know its end."""

    ready_s = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.ready_s = time.monotonic()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with spending("sharding"):
            scatter = getattr(dist, _SCATTER)
            work: dist.Work | None = scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self.ready_s = time.monotonic()
        return work

    def added(self, _total: Tensor) -> None:
        ACCOUNT.move(self.ready_s, "reduction")


def charge_sharding(wrapped: FSDPModule, *, has_copies: bool) -> None:
    """Charge a unit's gathers and scatters; `has_copies`: of the group that it is sharded over there are several."""
    scatter = _Scatter()
    wrapped.set_custom_all_gather(_Gather())  # type: ignore[arg-type]  # their base classes have no public name
    wrapped.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    if has_copies:
        wrapped.set_all_reduce_hook(scatter.added)


# --- steps ---


def terms_of(seconds: Mapping[str, float], moments: Sequence[Moment], *, running_s: float) -> dict[str, float]:
    """A step by term: `seconds` as charged, and the moments of what ran, which say what was computing and sending.

    Of `running_s` the collectives inside actions are charged apart. `waiting` is for messages and other ranks,
    bookkeeping between actions included.
    """
    computing = sum(moment.end_s - moment.start_s for moment in moments if moment.lane == "compute")
    sending = sum(moment.end_s - moment.start_s for moment in moments if moment.lane != "compute")
    apart = running_s - seconds.get(RUNNING, 0.0)
    found = dict.fromkeys((*CHARGED, HOST), 0.0) | {name: s for name, s in seconds.items() if name != RUNNING}
    waiting = seconds.get(WAITING, 0.0) + running_s - computing - sending
    return found | {"compute": computing - apart, "sending": sending, WAITING: waiting}


class Spent:
    """One rank's steps by term: the median of each over those after the first."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._first: list[dict[str, float]] = []
        self.waited_s = 0.0  # in the last step
        ACCOUNT.take()

    def after(self, moments: Sequence[Moment]) -> None:
        """At the end of a step, with all that belongs to it; what comes is the next one's."""
        running_s = ACCOUNT.running_s
        terms = terms_of(ACCOUNT.take(), moments, running_s=running_s)
        self.waited_s = terms[WAITING]
        if len(self._first) < SKIPPED:
            self._first.append(terms)
        else:
            self._steps.append(terms)

    @property
    def medians(self) -> dict[str, float]:
        """Seconds by term; of a short run what there is."""
        known = self._steps or self._first[-1:]
        names = dict.fromkeys(name for step in known for name in step)
        return {name: median(step.get(name, 0.0) for step in known) for name in names}


# --- memory ---


class Weighed:
    """Told what a stage is told; remembers the most that was gathered at the end of an action."""

    def __init__(self, inner: Accumulation) -> None:
        self._inner = inner
        self.before_backward, self.after_backward = inner.before_backward, inner.after_backward
        self.resident = inner.resident
        self.gathered_bytes = 0

    def held_bytes(self) -> int:
        held = self._inner.held_bytes()
        self.gathered_bytes = max(self.gathered_bytes, held)
        return held
