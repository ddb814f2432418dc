"""The table of schedules: what each is called, what it runs on, what it takes. A new one is one entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wavetrain.schedule import orders
from wavetrain.schedule.action import Actions
from wavetrain.schedule.evaluate import Costs
from wavetrain.schedule.listing import wave_zb
from wavetrain.schedule.placement import Placement, bidirectional, linear, loop, snake


@dataclass(frozen=True)
class Shape:
    """What a schedule is asked for: ranks, chunks per rank (loops), waves (snakes), microbatches, and costs."""

    ranks: int
    microbatches: int
    chunks: int = 1
    waves: int = 1
    costs: Costs | None = None  # only orders that fill gaps look at them


@dataclass(frozen=True)
class Schedule:
    """A way to order a pipeline."""

    order: Callable[[Shape], Actions]
    placement: Callable[[Shape], Placement]
    split: bool = False
    even_ranks: bool = False
    chunked: bool = False
    waved: bool = False


def _linear(shape: Shape) -> Placement:
    return linear(shape.ranks)


def _loop(shape: Shape) -> Placement:
    return loop(shape.ranks, shape.chunks)


def _snake(shape: Shape) -> Placement:
    return snake(shape.ranks, shape.waves)


def _one_wave(shape: Shape) -> Placement:
    return snake(shape.ranks, 1)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(lambda s: orders.gpipe(s.ranks, s.microbatches), _linear),
    "1f1b": Schedule(lambda s: orders.one_f_one_b(s.ranks, s.microbatches), _linear),
    "interleaved": Schedule(lambda s: orders.interleaved(s.ranks, s.chunks, s.microbatches), _loop, chunked=True),
    "looped-bfs": Schedule(lambda s: orders.looped_bfs(s.ranks, s.chunks, s.microbatches), _loop, chunked=True),
    "chimera": Schedule(
        lambda s: orders.chimera(s.ranks, s.microbatches), lambda s: bidirectional(s.ranks), even_ranks=True
    ),
    "wave": Schedule(lambda s: orders.wave(s.ranks, s.waves, s.microbatches), _snake, waved=True),
    "zb-h1": Schedule(lambda s: orders.zb_h1(s.ranks, s.microbatches), _linear, split=True),
    "zb-h2": Schedule(lambda s: orders.zb_h2(s.ranks, s.microbatches), _linear, split=True),
    "zb-v": Schedule(lambda s: wave_zb(s.ranks, 1, s.microbatches, s.costs), _one_wave, split=True),
    "interleaved-zb": Schedule(
        lambda s: orders.interleaved_zb(s.ranks, s.chunks, s.microbatches), _loop, split=True, chunked=True
    ),
    "wave-zb": Schedule(lambda s: wave_zb(s.ranks, s.waves, s.microbatches, s.costs), _snake, split=True, waved=True),
    "forward-only": Schedule(lambda s: orders.forward_only(s.ranks, s.waves, s.microbatches), _snake, waved=True),
}


def fixed_orders(placement: Placement, microbatches: int, costs: Costs) -> Iterator[tuple[str, Actions]]:
    """Every schedule of the table that runs on a placement, as its order for these microbatches."""
    ranks = placement.num_ranks
    per_rank = placement.num_stages // max(1, ranks)
    for name, schedule in SCHEDULES.items():
        shape = Shape(ranks, microbatches, chunks=per_rank, waves=max(1, per_rank // 2), costs=costs)
        possible = not (schedule.even_ranks and ranks % 2) and name != "forward-only"
        if possible and schedule.placement(shape) == placement:
            yield name, schedule.order(shape)
