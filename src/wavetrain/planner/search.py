"""`search`: the best plan for a model on a cluster, with a proof that no plan of the space is better.

Branch and bound, best first. Degrees whose bound is below the best plan so far get options; options whose bound is get
schedules and cuts; what is left is simulated in order of its bound until no bound is below the best.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from wavetrain.plan.cut import balanced_cut, even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan
from wavetrain.planner.bounds import (
    BELOW,
    Priced,
    Scheduled,
    closed_form,
    degree_bounds,
    least_bytes,
    option_bounds,
    order_bound,
    order_bytes,
    placed_bound,
    price,
    schedule,
    stage_seconds,
)
from wavetrain.planner.question import Question
from wavetrain.planner.space import RECOMPUTES, Degrees, Options, Order, degrees, options
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import SCHEDULES, Shape
from wavetrain.sim.predict import Outline, outline

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]

CHUNK = 128  # degrees that are expanded together
LOOKED_AT = 4096  # schedules of each that the closed form looks at
TRIED = 4  # candidates of each that are simulated at once, for a good plan to compare with


@dataclass(frozen=True)
class Candidate:
    """A plan of the space that is not drawn up yet, and what its step is not below."""

    bound_s: float
    degrees: tuple[int, ...]  # in the order of `Degrees`
    option: tuple[int, ...]  # in the order of `Options`, without the row
    order: Order
    cut: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.bound_s, self.degrees, self.option, self.order.kind, self.order.per_rank, self.cut)

    @property
    def devices(self) -> int:
        tp, cp, pp, dp, *_ = self.degrees
        return tp * cp * pp * dp

    def plan(self, question: Question) -> Plan:
        tp, cp, pp, dp, microbatch, _ = self.degrees
        sequence_parallel, pp_inside, recompute, shard, keep, shard_optimizer = self.option
        return Plan(
            model=question.model,
            cluster=question.cluster.part(self.devices),
            layout=Layout(
                global_batch=question.global_batch,
                microbatch=microbatch,
                tp=tp,
                sequence_parallel=bool(sequence_parallel),
                cp=cp,
                dp=dp,
                pp=pp,
                schedule=self.order.name,
                chunks=self.order.chunks,
                waves=self.order.waves,
                pp_inside=bool(pp_inside),
                shard_optimizer=bool(shard_optimizer),
            ),
            cut=self.cut,
            seq_len=question.seq_len,
            recompute=Recompute(RECOMPUTES[recompute]),
            choice=Choice(shard=shard, keep=bool(keep)),
            stack=question.stack,
            precision=question.precision,
        )


@dataclass(frozen=True)
class Found:
    """A plan with what the simulator says of it; `cost` is what the objective makes of that."""

    cost: float
    plan: Plan
    outline: Outline
    fits: bool


@dataclass
class Count:
    """How the space was dealt with; degrees and options that were left out count all the plans they stand for."""

    evaluated: int = 0
    bounded: int = 0  # a bound says they are no better
    too_large: int = 0  # their states, or what the closed form says they hold, do not fit


@dataclass(frozen=True)
class Answer:
    """What a search found."""

    question: Question
    found: tuple[Found, ...]  # evaluated and fitting, best first
    least_bad: Found | None  # the plan that comes nearest to fitting
    count: Count
    lower: float  # cost that no plan of the space is below
    search_s: float = field(compare=False)

    @property
    def best(self) -> Plan | None:
        return self.found[0].plan if self.found else None

    @property
    def gap(self) -> float:
        """No plan of the space is better by more than this share."""
        return max(0.0, 1 - self.lower / self.found[0].cost) if self.found else 1.0


def search(question: Question, *, time_limit_s: float | None = None) -> Answer:
    """The best plan of the space."""
    started = time.perf_counter()
    state = _State(question, started + time_limit_s if time_limit_s is not None else float("inf"))
    known = degrees(question)
    bounds = question.cost(degree_bounds(question, known), known.devices)
    ranking = np.lexsort((np.arange(len(known)), bounds))
    for start in range(0, len(ranking), CHUNK):
        rows = ranking[start : start + CHUNK]
        if bounds[rows[0]] >= state.upper or state.is_late:
            state.leave(ranking[start:], bounds)
            break
        state.expand(known.take(rows[bounds[rows] < state.upper]))
    state.drain()
    return state.answer(time.perf_counter() - started)


@dataclass(frozen=True)
class Expansion:
    """Options and schedules of some degrees."""

    known: Degrees
    options: Options
    priced: Priced
    rows: Scheduled
    devices: Numbers
    cost: Floats  # at least
    ranking: Numbers  # rows by cost

    @staticmethod
    def of(question: Question, known: Degrees, every: Options, priced: Priced) -> Expansion:
        rows = schedule(question, known, every, priced)
        devices = known.devices[every.row[rows.option]]
        cost = question.cost(rows.bound_s, devices)
        small = np.flatnonzero(rows.least_bytes * BELOW <= question.capacity_bytes)
        return Expansion(known, every, priced, rows, devices, cost, small[np.lexsort((small, cost[small]))])

    def likely(self, question: Question, upper: float) -> Numbers:
        """Some rows that the closed form finds fastest among those it expects to fit."""
        rows = self.ranking[: int(np.searchsorted(self.cost[self.ranking], upper))][:LOOKED_AT]
        estimate_s, needed_bytes = closed_form(question, self.known, self.options, self.rows, rows)
        fits = needed_bytes <= question.capacity_bytes
        rows, cost = rows[fits], question.cost(estimate_s, self.devices[rows])[fits]
        return rows[np.lexsort((rows, cost))][:TRIED]

    def candidates(self, question: Question, row: int, upper: float) -> Iterator[Candidate]:
        """The cuts of one schedule, each with its own bound."""
        rows, priced = self.rows, self.priced
        option, order = int(rows.option[row]), rows.orders[int(rows.order[row])]
        at = int(self.options.row[option])
        shape = tuple(int(getattr(self.known, item.name)[at]) for item in fields(self.known))
        chosen = tuple(int(getattr(self.options, item.name)[option]) for item in fields(self.options)[1:])
        pp, microbatches, blocks = shape[2], shape[5], question.model.num_blocks
        ends = [float(part[option].sum() / priced.block_s[option]) for part in (priced.first_s, priced.last_s)]
        tail_s, slower, devices = float(priced.tail_s[option]), float(priced.slower[option]), int(self.devices[row])
        for cut in cuts(blocks, pp, order, *ends):
            ranks = placed(order.name, pp, order.chunks, order.waves).ranks
            stages = stage_seconds(question, priced, option, cut, ranks)
            roughly = (placed_bound(order, pp, microbatches, stages) + tail_s) * slower * BELOW
            if question.cost(roughly, devices) >= upper:
                continue
            if order_bytes(order, pp, microbatches, cut, priced, option) > question.capacity_bytes:
                continue
            bound = (order_bound(order, pp, microbatches, stages) + tail_s) * slower * BELOW
            yield Candidate(bound, shape, chosen, order, cut)


class _State:
    """Where a search stands."""

    def __init__(self, question: Question, until: float) -> None:
        self.question, self.until = question, until
        self.count, self.lower = Count(), float("inf")
        self.waiting: list[tuple[float, int, int]] = []  # cost at least, number of an expansion, row in it
        self.expansions: list[Expansion] = []
        self.seen: set[Candidate] = set()
        self.found: list[Found] = []
        self.least_bad: Found | None = None

    @property
    def upper(self) -> float:
        return self.found[0].cost if self.found else float("inf")

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.until

    def leave(self, rows: Numbers, bounds: Floats) -> None:
        """Degrees that are not looked at: because they are no better, or because time is up."""
        self.count.bounded += len(rows)
        if len(rows):
            self.lower = min(self.lower, float(bounds[rows[0]]))

    def expand(self, known: Degrees) -> None:
        """Options, then schedules, of some degrees; the most promising are simulated at once."""
        question = self.question
        every = options(question, known)
        priced = price(question, known, every)
        open_ = question.cost(option_bounds(question, known, every, priced), known.devices[every.row]) < self.upper
        small = least_bytes(question, known.pp[every.row], priced) * BELOW <= question.capacity_bytes
        self.count.bounded += int((~open_).sum())
        self.count.too_large += int((open_ & ~small).sum())
        keep = np.flatnonzero(open_ & small)
        if not len(keep):
            return
        made = Expansion.of(question, known, every.take(keep), priced.take(keep))
        self.count.too_large += len(made.rows) - len(made.ranking)
        if not len(made.ranking):
            return
        number = len(self.expansions)
        self.expansions.append(made)
        heappush(self.waiting, (float(made.cost[made.ranking[0]]), number, 0))
        for row in made.likely(question, self.upper).tolist():
            for candidate in made.candidates(question, row, self.upper):
                self.evaluate(candidate)

    def drain(self) -> None:
        """Simulate what waits, until no bound is below the best."""
        refined: list[tuple[float, tuple[object, ...], Candidate]] = []
        while self.waiting or refined:
            rough = self.waiting[0][0] if self.waiting else float("inf")
            fine = refined[0][0] if refined else float("inf")
            if min(rough, fine) >= self.upper or self.is_late:
                self.lower = min(self.lower, rough, fine)
                break
            if fine <= rough:
                self.evaluate(heappop(refined)[2])
                continue
            _, number, position = heappop(self.waiting)
            made = self.expansions[number]
            if position + 1 < len(made.ranking):
                heappush(self.waiting, (float(made.cost[made.ranking[position + 1]]), number, position + 1))
            for candidate in made.candidates(self.question, int(made.ranking[position]), self.upper):
                cost = self.question.cost(candidate.bound_s, candidate.devices)
                heappush(refined, (cost, candidate.key, candidate))

    def evaluate(self, candidate: Candidate) -> None:
        if candidate in self.seen:
            return
        self.seen.add(candidate)
        self.add(candidate.plan(self.question))

    def add(self, plan: Plan) -> None:
        seen = outline(plan, self.question.laws)
        self.count.evaluated += 1
        fits = seen.needed_bytes <= self.question.capacity_bytes
        found = Found(float(self.question.cost(seen.step_s, plan.layout.num_devices)), plan, seen, fits)
        if fits:
            insort(self.found, found, key=lambda item: item.cost)
        elif self.least_bad is None or seen.needed_bytes < self.least_bad.outline.needed_bytes:
            self.least_bad = found

    def answer(self, search_s: float) -> Answer:
        lower = min(self.lower, self.upper)
        return Answer(self.question, tuple(self.found), self.least_bad, self.count, lower, search_s)


@lru_cache(maxsize=100_000)
def cuts(blocks: int, pp: int, order: Order, first: float, last: float) -> tuple[tuple[int, ...], ...]:
    """The cuts that are tried: even, and balanced with embedding and head counted."""
    placement = placed(order.name, pp, order.chunks, order.waves)
    found = [even_cut(blocks, placement.depth), balanced_cut(blocks, placement.ranks, first=first, last=last)]
    return tuple(dict.fromkeys(cut for cut in found if cut and all(cut[1:-1])))


@lru_cache(maxsize=10_000)
def placed(name: str, pp: int, chunks: int, waves: int) -> Placement:
    return SCHEDULES[name].placement(Shape(pp, 1, chunks=chunks, waves=waves))
