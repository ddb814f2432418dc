"""`Plan`: one way to train a model on a cluster, complete enough to be priced and run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from wavetrain.cluster.cluster import Cluster
from wavetrain.model.model import Layer, Model
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.stack import Precision, Stack
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import SCHEDULES, Shape

SCHEMA = "wavetrain.plan/1"


@dataclass(frozen=True)
class OperatorChoice:
    """A choice that differs from the plan's, for one operator of one kind of layer."""

    layer: str
    operator: str
    choice: Choice


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
    def by_operator(self) -> dict[tuple[str, str], Choice]:
        return {(item.layer, item.operator): item.choice for item in self.choices}

    def choice_of(self, layer: Layer, operator: str) -> Choice:
        return self.by_operator.get((layer.name, operator), self.choice)

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


def num_stages(layout: Layout) -> int:
    """Stages that a layout's schedule cuts the model into."""
    shape = Shape(layout.pp, 1, chunks=layout.chunks, waves=layout.waves)
    return SCHEDULES[layout.schedule].placement(shape).depth
