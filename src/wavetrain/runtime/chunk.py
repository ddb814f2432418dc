"""What one stage does for a microbatch: forward, backward, its two parts, recomputation. Computed, or only waited for.

The scaling rule, whatever the number and sizes of microbatches: a step's loss is the mean over all its target tokens,
so a microbatch adds the sum over its own, divided by the number of all.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from wavetrain.runtime.backward import Deferred, backward_input
from wavetrain.runtime.stages import Stage

SPIN_S = 100e-6  # the end of a wait is spun: a sleep ends late by up to this much
_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>


@dataclass(frozen=True)
class Batch:
    """The microbatches of one step, by number; tokens for the first stage, targets for the last (-100: no target)."""

    tokens: Mapping[int, Tensor] = field(default_factory=dict)
    targets: Mapping[int, Tensor] = field(default_factory=dict)
    num_targets: int = 0  # in the whole step, over all replicas


class Chunk(Protocol):
    """One stage on this rank. An end of the pipeline gets None for what has no neighbour to come from."""

    def begin(self, batch: Batch) -> None: ...

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor: ...

    def recompute(self, microbatch: int) -> None: ...

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None: ...

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None: ...

    def backward_weight(self, microbatch: int) -> None: ...

    @property
    def live(self) -> int:
        """Microbatches whose activations it holds."""

    @property
    def held_bytes(self) -> int:
        """What they take."""


@dataclass
class Saved:
    """What a microbatch leaves between its actions: where its graph begins and ends, and what its weights wait for."""

    source: Tensor | None  # the input, or the embedding's output where a split backward begins
    entered: GradientEdge | None = None  # the embedding's own output, cut off from `source`
    output: GradientEdge | None = None  # None until it is computed with a graph
    deferred: Deferred | None = None
    num_bytes: int = 0


class Accumulation(Protocol):
    """How gradients that several ranks make become one sum; told when a stage's backwards begin and end."""

    def before_backward(self, *, is_last: bool) -> None:
        """The next backward gives a microbatch's gradients; those of the last one may be added over ranks at once."""

    def after_backward(self, *, is_last: bool, is_split: bool) -> None:
        """A backward is over, its weights' part included; with a split one nothing was added over ranks so far."""

    def held_bytes(self) -> int:
        """Parameters that are gathered at this moment."""

    def resident(self) -> Iterable[Tensor]:
        """Tensors that are parameters, gathered or not, and hence no activations."""


class Computed:
    """A stage that computes."""

    def __init__(
        self,
        stage: Stage,
        *,
        split: bool = False,
        recomputed: bool = False,
        training: bool = True,
        accumulation: Accumulation | None = None,
        num_microbatches: int | None = None,
    ) -> None:
        """`num_microbatches` is how many the stage runs, where that is not the whole batch."""
        self.stage = stage
        self._split, self._recomputed, self._training = split, recomputed, training
        self._accumulation, self._num_microbatches = accumulation, num_microbatches
        self._left = 0  # backwards still to come in this step
        self._saved: dict[int, Saved] = {}
        self._batch = Batch()
        self._measured: dict[tuple[int, bool], int] = {}  # bytes held, by size of the input and with or without a graph
        self._bytes: dict[tuple[int, bool], int] = {}  # the same by microbatch
        self._sums: dict[int, Tensor] = {}  # of the losses of each microbatch's targets
        parameter = next(stage.parameters(), torch.empty(0))
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._one = torch.ones((), dtype=dtype, device=parameter.device)
        self._share = self._one  # of a single target in the step's loss, as a gradient

    @property
    def losses(self) -> dict[int, Tensor]:
        """What each microbatch adds to the step's loss; of the last stage."""
        return {m: total / max(1, self._batch.num_targets) for m, total in self._sums.items()}

    @property
    def live(self) -> int:
        return len(self._saved)

    @property
    def held_bytes(self) -> int:
        held = sum([saved.num_bytes for saved in self._saved.values()])
        return held if self._accumulation is None else held + self._accumulation.held_bytes()

    def begin(self, batch: Batch) -> None:
        assert not self._saved, "a step ended with activations held"
        if batch is not self._batch and _sizes(batch) != _sizes(self._batch):
            self._bytes.clear()
        self._batch = batch
        self._left = self._num_microbatches or len(batch.tokens or batch.targets)
        self._sums = {}
        self._share = self._one / max(1, batch.num_targets)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        if not self._training:
            with torch.no_grad():
                return self._compute(microbatch, Saved(x))
        if x is not None and not x.requires_grad:
            x.requires_grad_()
        saved = self._saved[microbatch] = Saved(x)
        if not self._recomputed:
            return self._weighed(microbatch, saved).detach()
        with torch.no_grad():
            return self._weighed(microbatch, saved)

    def recompute(self, microbatch: int) -> None:
        self._weighed(microbatch, self._saved[microbatch])

    def _weighed(self, microbatch: int, saved: Saved) -> Tensor:
        """Compute, and know what stays: measured once for each size of microbatch, by what autograd keeps."""
        known = self._bytes.get((microbatch, torch.is_grad_enabled()))
        if known is not None:
            saved.num_bytes = known
            return self._compute(microbatch, saved)
        source = self._batch.tokens[microbatch] if saved.source is None else saved.source
        key = source.numel(), torch.is_grad_enabled()
        if key in self._measured:
            result = self._compute(microbatch, saved)
        else:
            with weighing(without=self._resident) as kept:
                result = self._compute(microbatch, saved)
            kept[source.untyped_storage().data_ptr()] = source.untyped_storage().nbytes()
            self._measured[key] = sum(kept.values())
        saved.num_bytes = self._bytes[microbatch, key[1]] = self._measured[key]
        return result

    def _compute(self, microbatch: int, saved: Saved) -> Tensor:
        """Run the stage and note the ends of its graph. The output itself is not held: only its gradient is needed."""
        stage, batch = self.stage, self._batch
        x = batch.tokens[microbatch] if stage.is_first else saved.source
        assert x is not None, "only the first stage has no input"

        def entered(hidden: Tensor) -> Tensor:
            if not (self._split and hidden.requires_grad):
                return hidden
            saved.entered, saved.source = _edge(hidden), hidden.detach().requires_grad_()
            return saved.source

        result: Tensor = stage(x, batch.targets[microbatch] if stage.is_last else None, entered=entered)
        if stage.is_last:
            self._sums[microbatch] = result.detach()
        if result.requires_grad:
            saved.output = _edge(result)
        return result

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._before_backward()
        saved = self._saved.pop(microbatch)
        torch.autograd.backward((_known(saved.output),), (self._start(gradient),))
        result = None if saved.source is None else saved.source.grad
        if saved.entered is not None:  # only where a split order also has whole backwards
            torch.autograd.backward((saved.entered,), (result,))
            result = None
        self._after_backward()
        return result

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._before_backward()
        saved = self._saved[microbatch]
        assert saved.source is not None, "an order with split backwards says so"
        result, saved.deferred = backward_input(_known(saved.output), self._start(gradient), saved.source)
        saved.output = None
        if saved.entered is not None:
            saved.source.grad = result
            return None
        saved.source = None
        return result

    def _start(self, gradient: Tensor | None) -> Tensor:
        """What a backward starts with: what came from the next stage or, on the last, a target's share of the loss."""
        return self._share if gradient is None else gradient

    def backward_weight(self, microbatch: int) -> None:
        saved = self._saved.pop(microbatch)
        assert saved.deferred is not None, "the input's gradient comes first"
        saved.deferred.finish()
        if saved.entered is not None:
            assert saved.source is not None
            torch.autograd.backward((saved.entered,), (saved.source.grad,))
        self._after_backward()

    def _before_backward(self) -> None:
        if self._accumulation is not None:  # a split backward is over when its last weights are: later than any hook
            self._accumulation.before_backward(is_last=self._left == 1 and not self._split)

    def _after_backward(self) -> None:
        self._left -= 1
        if self._accumulation is not None:
            self._accumulation.after_backward(is_last=self._left == 0, is_split=self._split)

    def _resident(self) -> Iterable[Tensor]:
        return self.stage.parameters() if self._accumulation is None else self._accumulation.resident()


def _sizes(batch: Batch) -> list[int]:
    return [tokens.numel() for tokens in (batch.tokens or batch.targets).values()]


@contextmanager
def weighing(*, without: Callable[[], Iterable[Tensor]]) -> Iterator[dict[int, int]]:
    """The storages that autograd keeps for a backward and their bytes, each once, without those that stay anyway.

    What stays is asked for with each of them: parameters that are gathered have other places every time.
    """
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {other.untyped_storage().data_ptr() for other in without()}:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node saved would keep the node alive, and the node it

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def _edge(made: Tensor) -> GradientEdge:
    """Where a backward begins; torch's own function for it also serves leaves, and takes many times as long."""
    assert made.grad_fn is not None
    return GradientEdge(made.grad_fn, made.output_nr)


def _known(output: GradientEdge | None) -> GradientEdge:
    assert output is not None, "a backward comes after a forward with a graph"
    return output


@dataclass(frozen=True)
class Durations:
    """Seconds that the actions of a stage take."""

    f: float
    i: float
    w: float


class Emulated:
    """A stage whose actions take their planned time and compute nothing; its messages are real."""

    def __init__(self, durations: Durations, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self._seconds, self._shape, self._dtype = durations, shape, dtype
        self._saved: set[int] = set()
        sharpen_timer()
        self.waited_s = 0.0  # in all, for checking that what was planned was done

    @property
    def live(self) -> int:
        return len(self._saved)

    @property
    def held_bytes(self) -> int:
        return 0

    def begin(self, batch: Batch) -> None:  # noqa: ARG002
        assert not self._saved, "a step ended with activations held"

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:  # noqa: ARG002
        self._take(self._seconds.f)
        self._saved.add(microbatch)
        return torch.empty(self._shape, dtype=self._dtype)

    def recompute(self, microbatch: int) -> None:  # noqa: ARG002
        self._take(self._seconds.f)

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:  # noqa: ARG002
        self._take(self._seconds.i + self._seconds.w)
        self._saved.remove(microbatch)
        return torch.empty(self._shape, dtype=self._dtype)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:  # noqa: ARG002
        self._take(self._seconds.i)
        return torch.empty(self._shape, dtype=self._dtype)

    def backward_weight(self, microbatch: int) -> None:
        self._take(self._seconds.w)
        self._saved.remove(microbatch)

    def _take(self, seconds: float) -> None:
        wait_until(time.monotonic() + seconds)
        self.waited_s += seconds


def sharpen_timer() -> None:
    """Let this thread's sleeps end when they should: the kernel rounds up by 50 us unless told not to."""
    with suppress(OSError, AttributeError):  # another system has no such rounding, or no such call
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def wait_until(moment_s: float) -> None:
    """Sleep until a moment of the monotonic clock, the last of it spinning."""
    rest = moment_s - time.monotonic() - SPIN_S
    if rest > 0:
        time.sleep(rest)
    while time.monotonic() < moment_s:
        pass
