"""`Model`: layers of operators in the order data crosses them, equal layers stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from wavetrain.base.errors import InputError, Problem
from wavetrain.model.architecture import Architecture
from wavetrain.model.limits import MOST_LAYERS, MOST_SEQ_LEN
from wavetrain.model.operator import (
    NOTHING,
    Elementwise,
    Operator,
    Parameter,
    Work,
    num_active_parameters,
    num_parameters,
)

SCHEMA = "wavetrain.model/1"


@dataclass(frozen=True)
class Layer:
    """Operators that are always placed together; `path` has `{}` where repeats are numbered."""

    name: str
    path: str
    operators: tuple[Operator, ...]


EMPTY = Layer("nothing", "", (Elementwise("nothing", "add", 1, NOTHING),))


@dataclass(frozen=True)
class Run:
    """`count` equal layers in a row, the first of them numbered `first` in the module tree."""

    layer: str
    count: int
    first: int = 0


@dataclass(frozen=True)
class Model:
    """What is to be trained. `seq_len` is the length it is described for unless a `Work` says otherwise."""

    name: str
    seq_len: int
    layers: tuple[Layer, ...]  # the distinct ones
    order: tuple[Run, ...]
    architecture: Architecture | None = None  # None for a traced module
    source: str = ""
    fixed_length: bool = False  # a traced module that works at its sample's length only

    def __post_init__(self) -> None:
        unknown = {run.layer for run in self.order} - set(self.by_name)
        if unknown:
            raise ValueError(f"order names layers that are not described: {', '.join(sorted(unknown))}")
        if len(self.by_name) != len(self.layers):
            raise ValueError("two layers have the same name")
        if not self.order:
            raise ValueError("a model must have a layer")
        if not 1 <= self.seq_len <= MOST_SEQ_LEN:
            raise ValueError(f"seq_len must be from 1 to {MOST_SEQ_LEN:,}")
        if any(run.count < 1 or run.first < 0 for run in self.order) or self.num_layers > MOST_LAYERS + 2:
            raise ValueError(f"the counts in order must be at least 1, and {MOST_LAYERS + 2:,} together at most")

    @cached_property
    def by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def counts(self) -> dict[str, int]:
        """How often each distinct layer occurs."""
        counts = dict.fromkeys(self.by_name, 0)
        for run in self.order:
            counts[run.layer] += run.count
        return counts

    @property
    def can_be_cut(self) -> bool:
        """Whether a pipeline may cut it: a first layer, others, a last one. Anything else stays in one stage."""
        return len(self.order) >= 3 and self.order[0].count == self.order[-1].count == 1

    @cached_property
    def blocks(self) -> tuple[Run, ...]:
        """The layers that a cut deals out: those between the first and the last, or all of what can't be cut."""
        return self.order[1:-1] if self.can_be_cut else self.order

    @cached_property
    def num_blocks(self) -> int:
        return sum(run.count for run in self.blocks)

    @cached_property
    def block_counts(self) -> dict[str, int]:
        """How often each distinct layer occurs among the blocks."""
        counts = {run.layer: 0 for run in self.blocks}
        for run in self.blocks:
            counts[run.layer] += run.count
        return counts

    @property
    def ends(self) -> tuple[Layer, Layer]:
        """The first and the last layer; empty ones of a model that can't be cut."""
        if not self.can_be_cut:
            return EMPTY, EMPTY
        return self.by_name[self.order[0].layer], self.by_name[self.order[-1].layer]

    @property
    def num_layers(self) -> int:
        """All layers, embedding and head included."""
        return sum(run.count for run in self.order)

    def instances(self) -> Iterator[tuple[Layer, int]]:
        """Every layer in order, with its number in the module tree."""
        for run in self.order:
            for number in range(run.first, run.first + run.count):
                yield self.by_name[run.layer], number

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter under its own name, tied ones included."""
        for layer, number in self.instances():
            for operator in layer.operators:
                for p in operator.parameters:
                    name, tied = (text.replace("{}", str(number)) for text in (p.name, p.tied))
                    yield Parameter(name, p.shape, tied)

    def total(self, quantity: Callable[[Operator], float]) -> float:
        """The sum of a quantity over all operators of all layers."""
        return sum(
            count * sum(map(quantity, self.by_name[name].operators)) for name, count in self.counts.items() if count
        )

    @cached_property
    def num_parameters(self) -> int:
        return int(self.total(num_parameters))

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets; fewer than all only with mixtures of experts."""
        return int(self.total(num_active_parameters))

    def forward_flops(self, work: Work) -> int:
        self._check(work)
        return int(self.total(lambda operator: operator.forward_flops(work)))

    def backward_flops(self, work: Work) -> int:
        self._check(work)
        return int(self.total(lambda operator: sum(operator.backward_flops(work))))

    def saved_bytes(self, work: Work) -> float:
        """Bytes kept from forward to backward without recomputation."""
        self._check(work)
        return self.total(lambda operator: operator.saved_bytes(work))

    def _check(self, work: Work) -> None:
        if self.fixed_length and work.seq_len != self.seq_len:
            rule = f"{self.name} fixes its length: it was traced at {self.seq_len} and is known at no other"
            remedy = "trace it again with a sample of that length"
            raise InputError(Problem(where=self.name, key="seq_len", value=work.seq_len, rule=rule, remedy=remedy))
