"""How parameters learn: AdamW's groups, learning rates as functions of the step, clipping by the global norm.

The norm does not depend on the layout: each parameter's squares are added in float64 in pieces of a fixed size, on the
one rank that counts it, and the parameters' sums meet in one vector, so a pipeline gives the bits of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from wavetrain.base.errors import InputError, Problem, RunError, nearest

ROW = 1 << 12  # squares added by one thread, whatever the number of threads
BLOCK = ROW << 6  # elements held in float64 at a time: 2 MiB, which stay in a cache (8 MiB took 7 times as long)

AddOverRanks: TypeAlias = Callable[[Tensor], object]  # adds a tensor over all ranks in place: dist.all_reduce

SCHEDULES: dict[str, Callable[[float], float]] = {  # share of the peak, by how much of the run after warmup is done
    "constant": lambda done: 1.0,  # noqa: ARG005
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),  # Loshchilov and Hutter, SGDR, 2017, equation 5
}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A learning rate over a run: up to the peak in `warmup` steps, then by the schedule down to `floor` of it."""

    peak: float
    schedule: str = "constant"  # of SCHEDULES
    warmup: int = 0
    steps: int = 1  # of the whole run
    floor: float = 0.0  # share of the peak that is left when the run ends

    def __post_init__(self) -> None:
        rules = (
            ("peak", math.isfinite(self.peak) and self.peak >= 0, "must be a finite number, 0 or more"),
            ("schedule", self.schedule in SCHEDULES, "must be one of the possible values"),
            ("steps", self.steps >= 1, "must be 1 or more"),
            ("warmup", 0 <= self.warmup <= self.steps, f"must be from 0 to the {self.steps} steps of the run"),
            ("floor", 0 <= self.floor <= 1, "must be from 0 to 1, a share of the peak"),
        )
        problems = [_problem(key, getattr(self, key), rule) for key, holds, rule in rules if not holds]
        if problems:
            raise InputError(problems)


def _problem(key: str, value: object, rule: str) -> Problem:
    legal = tuple(SCHEDULES) if key == "schedule" else ()
    close = nearest(str(value), legal) if legal else ()
    return Problem(where="learning rate", key=key, value=value, rule=rule, legal=legal, nearest=close)


def learning_rate(rate: Rate, *, step: int) -> float:
    """The learning rate of a step: 0 just before the first, the peak after warmup, the floor just after the last."""
    if step < rate.warmup:
        return rate.peak * (step + 1) / (rate.warmup + 1)
    done = min(1.0, (step - rate.warmup) / max(1, rate.steps - rate.warmup))
    return rate.peak * (rate.floor + (1.0 - rate.floor) * SCHEDULES[rate.schedule](done))


# --- AdamW ---


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """What AdamW is told beside the learning rate; torch's own defaults."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01  # of matrices


def optimizer_of(parameters: Mapping[str, Tensor], settings: AdamW) -> torch.optim.AdamW:
    """AdamW over a rank's parameters; its learning rate is set before every step."""
    groups = decay_groups(parameters, weight_decay=settings.weight_decay)
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.epsilon, foreach=False)


def decay_groups(parameters: Mapping[str, Tensor], *, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups, each by name: matrices decay, biases and the scales of norms do not."""
    named = sorted(parameters.items())
    decaying, staying = ([p for _, p in named if (p.ndim >= 2) is matrix] for matrix in (True, False))
    groups = ({"params": decaying, "weight_decay": weight_decay}, {"params": staying, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Let the next step be taken at this rate."""
    for group in optimizer.param_groups:
        group["lr"] = value


# --- the global norm ---


class Held(NamedTuple):
    """This rank's gradient of a parameter, or its shard of it. Of several equal copies, one in all ranks counts."""

    name: str
    gradient: Tensor
    counts: bool = True


def clip(
    held: Iterable[Held], *, names: Sequence[str], most: float, add_over_ranks: AddOverRanks | None = None
) -> float:
    """Scale a rank's gradients in place so that the global norm is at most `most`; the norm before.

    `names` are those of all parameters that are counted anywhere, the same on every rank; all ranks call this together.
    """
    gradients = list(held)
    norm = global_norm(gradients, names=names, add_over_ranks=add_over_ranks)
    if norm > most:
        for gradient in {id(item.gradient): item.gradient for item in gradients}.values():
            gradient.mul_(most / norm)
    return norm


def global_norm(held: Iterable[Held], *, names: Sequence[str], add_over_ranks: AddOverRanks | None = None) -> float:
    """The norm of all gradients of all ranks as one vector; all ranks get the same bits, or the same error."""
    places = {name: place for place, name in enumerate(sorted(names))}
    squares = torch.zeros(len(places), dtype=torch.float64)
    for item in held:
        if item.counts:
            squares[places[item.name]] += sum_of_squares(item.gradient)
    if add_over_ranks is not None:
        add_over_ranks(squares)  # a whole parameter is on one rank and 0 on others: its value stays exact
    known = squares.tolist()
    for name, value in zip(places, known, strict=True):
        if not math.isfinite(value):
            raise RunError(f"the gradient of {name} is not finite: its squares add up to {value}")
    return math.sqrt(_exact_sum(known))


def sum_of_squares(values: Tensor) -> float:
    """The squares of all elements, added in float64; neither threads nor blocks change a bit."""
    rows = [piece.square_().sum(dim=1) for piece in _rows(values)]
    return _exact_sum(torch.cat(rows).tolist()) if rows else 0.0


def _rows(values: Tensor) -> Iterator[Tensor]:
    """The elements in float64, in rows of one length and at most a block at a time: the copy is never large."""
    flat = values.detach().reshape(-1)
    whole = len(flat) - len(flat) % ROW
    for start in range(0, whole, BLOCK):
        yield flat[start : min(start + BLOCK, whole)].to(torch.float64, copy=True).view(-1, ROW)
    if whole < len(flat):
        yield flat[whole:].to(torch.float64, copy=True).view(1, -1)


def _exact_sum(values: Iterable[float]) -> float:
    """Rounded once, so in any order the same."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
