"""`Model`: layers of operators in the order data crosses them, equal layers stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from wavetrain.model.architecture import Architecture
from wavetrain.model.operator import Operator, Parameter, Work, num_active_parameters, num_parameters

SCHEMA = "wavetrain.model/1"


@dataclass(frozen=True)
class Layer:
    """Operators that are always placed together; `path` has `{}` where repeats are numbered."""

    name: str
    path: str
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Run:
    """`count` equal layers in a row."""

    layer: str
    count: int


@dataclass(frozen=True)
class Model:
    """What is to be trained. `seq_len` is the length it is described for unless a `Work` says otherwise."""

    name: str
    seq_len: int
    layers: tuple[Layer, ...]  # the distinct ones
    order: tuple[Run, ...]
    architecture: Architecture | None = None  # None for a traced module
    source: str = ""

    def __post_init__(self) -> None:
        unknown = {run.layer for run in self.order} - set(self.by_name)
        if unknown:
            raise ValueError(f"order names layers that are not described: {', '.join(sorted(unknown))}")
        if len(self.by_name) != len(self.layers):
            raise ValueError("two layers have the same name")
        if self.seq_len < 1 or any(run.count < 1 for run in self.order):
            raise ValueError("seq_len and the counts in order must be at least 1")

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
    def num_layers(self) -> int:
        """All layers, embedding and head included."""
        return sum(run.count for run in self.order)

    def instances(self) -> Iterator[tuple[Layer, int]]:
        """Every layer in order, with its number among those that share its path."""
        next_number: dict[str, int] = {}
        for run in self.order:
            layer = self.by_name[run.layer]
            for _ in range(run.count):
                number = next_number.get(layer.path, 0)
                next_number[layer.path] = number + 1
                yield layer, number

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter under its own name, tied ones included."""
        for layer, number in self.instances():
            for operator in layer.operators:
                for p in operator.parameters:
                    yield Parameter(p.name.replace("{}", str(number)), p.shape, p.tied)

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
        return int(self.total(lambda operator: operator.forward_flops(work)))

    def backward_flops(self, work: Work) -> int:
        return int(self.total(lambda operator: sum(operator.backward_flops(work))))

    def saved_bytes(self, work: Work) -> float:
        """Bytes kept from forward to backward without recomputation."""
        return self.total(lambda operator: operator.saved_bytes(work))
