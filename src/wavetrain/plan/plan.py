"""`Plan`: one way to train a model on a cluster, complete enough to be priced and run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from wavetrain.cluster.cluster import Cluster
from wavetrain.model.model import Model
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.stack import Precision, Stack
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import SCHEDULES, Shape

SCHEMA = "wavetrain.plan/1"


EVERY = "*"


@dataclass(frozen=True)
class OperatorChoice:
    """A choice that differs from the plan's, for operators of one kind of layer.

    An operator that is named is gathered and scattered by itself. `*` means all operators that are not named: like
    those under the plan's own choice, they travel together, one collective per layer.
    """

    layer: str
    operator: str
    choice: Choice
    first: int = 0  # block it begins with, counted from 0 between embedding and head
    count: int | None = None  # blocks from there on; None: all


class Variant(NamedTuple):
    """How a layer is run: its kind, the choice of its operators together, and those that have one of their own."""

    layer: str
    choice: Choice
    named: tuple[tuple[str, Choice], ...] = ()

    def of(self, operator: str) -> Choice:
        return dict(self.named).get(operator, self.choice)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, on what, and how."""

    model: Model
    cluster: Cluster
    layout: Layout
    cut: tuple[int, ...]  # blocks per stage; the embedding is with the first, the head with the last
    seq_len: int
    recompute: Recompute = Recompute.NONE
    choice: Choice = field(default_factory=Choice)  # of every operator that `choices` does not name
    choices: tuple[OperatorChoice, ...] = ()
    stack: Stack = field(default_factory=Stack)
    precision: Precision = field(default_factory=Precision)

    @cached_property
    def blocks(self) -> tuple[Variant, ...]:
        """How each block is run, in order."""
        names = [run.layer for run in self.model.blocks for _ in range(run.count)]
        if not self.choices:
            return tuple(Variant(name, self.choice) for name in names)
        return tuple(self._variant(name, number) for number, name in enumerate(names))

    @cached_property
    def ends(self) -> tuple[Variant, Variant]:
        """How the embedding and the head are run."""
        first, last = (self._variant(layer.name, 0) for layer in self.model.ends)
        return first, last

    def _variant(self, layer: str, number: int) -> Variant:
        chosen = {item.operator: item.choice for item in self.choices if item.layer == layer and _covers(item, number)}
        return Variant(layer, chosen.pop(EVERY, self.choice), tuple(chosen.items()))

    @property
    def shape(self) -> Shape:
        """What the plan's schedule is asked for."""
        layout = self.layout
        return Shape(layout.pp, layout.num_microbatches, chunks=layout.chunks, waves=layout.waves)

    @cached_property
    def placement(self) -> Placement:
        """Which rank runs which stage."""
        return SCHEDULES[self.layout.schedule].placement(self.shape)

    @cached_property
    def blocks_by_rank(self) -> tuple[int, ...]:
        """Blocks on each rank of the pipeline; a second copy of the model counts again."""
        counts = [0] * self.layout.pp
        for stage, rank in enumerate(self.placement.ranks):
            counts[rank] += self.cut[stage % len(self.cut)]
        return tuple(counts)


def _covers(item: OperatorChoice, number: int) -> bool:
    return item.first <= number and (item.count is None or number < item.first + item.count)


def num_stages(layout: Layout) -> int:
    """Stages that a layout's schedule cuts the model into."""
    shape = Shape(layout.pp, 1, chunks=layout.chunks, waves=layout.waves)
    return SCHEDULES[layout.schedule].placement(shape).depth
