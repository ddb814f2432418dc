"""`search`: the best plan for a model on a cluster, with a proof that no plan of the space is better.

Branch and bound, best first. Degrees whose bound is below the best plan so far get options; options whose bound is get
schedules and cuts; what is left is simulated in order of its bound until no bound is below the best.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

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
    mixture_bound,
    option_bounds,
    price,
    schedule,
)
from wavetrain.planner.choose import choose
from wavetrain.planner.families import FAMILY_PLANS
from wavetrain.planner.leaves import Certificate
from wavetrain.planner.mixed import instance, plan_of
from wavetrain.planner.pairs import best_pair
from wavetrain.planner.progress import Progress, Watch, to_log
from wavetrain.planner.question import Pins, Question
from wavetrain.planner.space import (
    RECOMPUTES,
    Degrees,
    Options,
    Order,
    degrees,
    end_groups,
    legal_sequences,
    num_options,
    options,
    orders,
)
from wavetrain.planner.waits import order_bound, order_bytes, placed_bound, stage_seconds
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import SCHEDULES, Shape
from wavetrain.sim.predict import Outline, outline
from wavetrain.sim.sweep import distinct

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]

CHUNK = 128  # degrees that are expanded together
LOOKED_AT = 4096  # schedules of each that the closed form looks at
MOST_SOLVE_S = 10.0  # of one inner problem
TOLD_EVERY_S = 0.1  # at most, where a search stands
TIE = 1 - 1e-8  # plans that are nearer to each other are equally good
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
class Inner:
    """The inner problem that a plan solves, and the proof that it does."""

    layout: Layout
    end_shard: int
    sliced: bool
    certificate: Certificate


@dataclass(frozen=True)
class Found:
    """A plan with what the simulator says of it; `cost` is what the objective makes of that."""

    cost: float  # infinite where a limit is broken
    plan: Plan
    outline: Outline
    inner: Inner | None = None  # where its blocks and operators were chosen one by one


@dataclass(frozen=True)
class Answer:
    """What a search found."""

    question: Question
    found: tuple[Found, ...]  # evaluated and fitting, best first
    least_bad: Found | None  # the plan that comes nearest to fitting
    space: int  # layouts that there are
    evaluated: int  # of them, simulated
    lower: float  # cost that no plan of the space is below
    search_s: float = field(compare=False)

    @property
    def best(self) -> Plan | None:
        return self.found[0].plan if self.found else None

    @property
    def rejected(self) -> tuple[Found, ...]:
        """Plans that were simulated, fit, and are not as good; the nearest first."""
        return self.found[1:]

    @property
    def certificate(self) -> dict[str, Any]:
        """What proves the best plan (`planner.certificate`)."""
        from wavetrain.planner.certificate import certificate  # noqa: PLC0415 - it is made of answers

        return certificate(self)

    @property
    def frontier(self) -> tuple[Found, ...]:
        """Of the plans that were simulated and fit, those that none beats in time, memory and device time at once."""
        return pareto(self.found)

    @property
    def gap(self) -> float:
        """No plan of the space is better by more than this share."""
        if not self.found:
            return 1.0
        cost = self.found[0].cost
        gap = 1 - self.lower / cost if cost else 0.0  # nothing is cheaper than what is free
        return gap if gap > 1 - TIE else 0.0


def search(
    question: Question,
    *,
    time_limit_s: float | None = None,
    below: float = float("inf"),
    watch: Watch = to_log,
    interruptible: bool = True,
) -> Answer:
    """The best plan of the space; plans that cost no less than `below` are of no interest."""
    started = time.perf_counter()
    state = _State(question, started + time_limit_s if time_limit_s is not None else float("inf"), below, watch)
    state.tell("listing degrees", 0, 0)
    known = degrees(question)
    bounds = question.cost(degree_bounds(question, known), known.devices)
    ranking = np.lexsort((np.arange(len(known)), bounds))
    done = 0
    try:
        for done in range(0, len(ranking), CHUNK):
            rows = ranking[done : done + CHUNK]
            if bounds[rows[0]] >= state.upper * TIE or state.is_late:
                break
            state.tell("degrees and options", done, len(ranking))
            state.expand(known.take(rows))
        else:
            done = len(ranking)
        state.leave(ranking[done:], bounds)
        state.drain()
        state.mix()
    except KeyboardInterrupt:
        if not interruptible:  # who asks would take an answer for final
            raise
        state.lower = min(state.lower, float(bounds.min(initial=np.inf)))  # what is proven of what was found so far
    state.try_customs()
    return state.answer(space_size(question, known), time.perf_counter() - started)


def row_of(columns: Degrees | Options, row: int) -> tuple[int, ...]:
    """One row of columns, in their order."""
    return tuple(int(getattr(columns, item.name)[row]) for item in fields(columns))


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
        shape, chosen = row_of(self.known, at), row_of(self.options, option)[1:]
        pp, microbatches, blocks = shape[2], shape[5], question.model.num_blocks
        ends = [
            round(float(part[option].sum() / priced.block_s[option]), 1) for part in (priced.first_s, priced.last_s)
        ]
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

    def __init__(self, question: Question, until: float, below: float = float("inf"), watch: Watch = to_log) -> None:
        self.question, self.until, self.below, self.watch = question, until, below, watch
        self.told = 0.0  # when
        self.evaluated, self.lower = 0, float("inf")
        self.waiting: list[tuple[float, int, int]] = []  # cost at least, number of an expansion, row in it
        self.expansions: list[Expansion] = []
        self.mixtures: list[tuple[float, float, Layout]] = []
        self.seen: set[Candidate] = set()
        self.found: list[Found] = []
        self.least_bad: Found | None = None
        self.smallest: Candidate | None = None  # by what its states need at least
        self.smallest_bytes = float("inf")

    @property
    def upper(self) -> float:
        return min(self.found[0].cost, self.below) if self.found else self.below

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.until

    def tell(self, deciding: str, done: int, total: int) -> None:
        """Where it stands, to who watches; not too often."""
        now = time.perf_counter()
        if now - self.told >= TOLD_EVERY_S:
            self.told, best = now, self.found[0].outline.step_s if self.found else None
            self.watch(Progress(deciding, done, total, self.evaluated, best))

    def leave(self, rows: Numbers, bounds: Floats) -> None:
        """Degrees that are not looked at: because they are no better, or because time is up."""
        if len(rows):
            self.lower = min(self.lower, float(bounds[rows[0]]))

    def expand(self, known: Degrees) -> None:
        """Options, then schedules, of some degrees; the most promising are simulated at once."""
        question = self.question
        every = options(question, known)
        if not len(every):
            return
        priced = price(question, known, every)
        open_ = question.cost(option_bounds(question, known, every, priced), known.devices[every.row]) < self.upper
        needed = least_bytes(question, known.pp[every.row], priced) * BELOW
        small = needed <= question.capacity_bytes
        own, blocks = known.take(every.row), question.model.num_blocks
        held = np.ceil(blocks / own.pp) * priced.saved_bytes * np.minimum(own.pp, own.microbatches)  # as 1F1B does
        self._note_smallest(known, every, needed + np.where(own.pp > 1, held, 0.0))
        self._note_mixtures(known, every, priced)
        keep = np.flatnonzero(open_ & small)
        if not len(keep):
            return
        made = Expansion.of(question, known, every.take(keep), priced.take(keep))
        if not len(made.ranking):
            return
        number = len(self.expansions)
        self.expansions.append(made)
        heappush(self.waiting, (float(made.cost[made.ranking[0]]), number, 0))
        for row in made.likely(question, self.upper).tolist():
            for candidate in made.candidates(question, row, self.upper):
                self.evaluate(candidate)

    def _note_smallest(self, known: Degrees, every: Options, needed: Floats) -> None:
        """The option that needs least, to have something to show where nothing fits."""
        if not len(needed) or self.found or needed.min() >= self.smallest_bytes:
            return
        option = int(needed.argmin())
        shape, chosen = row_of(known, int(every.row[option])), row_of(every, option)[1:]
        legal = orders(shape[2], shape[5], self.question.model.num_blocks, self.question.pins)
        for order in sorted(legal, key=lambda order: order.name != "1f1b")[:1]:
            self.smallest_bytes = float(needed[option])
            cut = next(iter(cuts(self.question.model.num_blocks, shape[2], order, 0.0, 0.0)), ())
            self.smallest = Candidate(0.0, shape, chosen, order, cut) if cut else None

    def _note_mixtures(self, known: Degrees, every: Options, priced: Priced) -> None:
        """Layouts without a pipeline, in which blocks and operators may be chosen one by one."""
        if not self.question.is_free:
            return
        single = np.flatnonzero((known.pp[every.row] == 1) & (known.dp[every.row] > 1))
        key = every.row[single] * 2 + every.sequence_parallel[single]
        for value in np.unique(key).tolist():
            rows, row = single[key == value], value // 2
            tp, cp, _, dp, microbatch, microbatches = row_of(known, row)
            bound_s = mixture_bound(self.question, microbatches, priced.take(rows), every.take(rows))
            layout = Layout(
                global_batch=self.question.global_batch,
                microbatch=microbatch,
                tp=tp,
                sequence_parallel=bool(value % 2),
                cp=cp,
                dp=dp,
            )
            self.mixtures.append((float(self.question.cost(bound_s, layout.num_devices)), bound_s, layout))

    def try_customs(self) -> None:
        """What people do by rule of thumb, where there was no time for a proof: never worse than that."""
        question = self.question
        if self.lower >= self.upper * TIE or question.pins != Pins() or question.only:
            return
        for custom in FAMILY_PLANS.values():
            plan = custom(question)
            if plan is not None:
                self.add(plan)

    def mix(self) -> None:
        """Solve the inner problem of layouts, until no bound is below the best."""
        self.mixtures.sort(key=lambda item: (item[0], item[2].microbatch, item[2].tp, item[2].cp))
        for number, (cost, _, layout) in enumerate(self.mixtures):
            if cost >= self.upper * TIE or self.is_late:
                self.lower = min(self.lower, cost)
                break
            for zero1 in (False, True):
                for group in end_groups(self.question, layout):
                    self.tell("blocks and operators of layout", number, len(self.mixtures))
                    self._solve(replace(layout, shard_optimizer=zero1), group)

    def _solve(self, layout: Layout, end_shard: int) -> None:
        """One inner problem; in slices only if nothing fits without."""
        for sliced in (False, True):
            made = instance(self.question, layout, end_shard, sliced=sliced)
            chosen = choose(made.problem, time_limit_s=max(0.0, min(self.until - time.perf_counter(), MOST_SOLVE_S)))
            if chosen.lower is not None:
                break
        if chosen.selection is not None:
            self.add(plan_of(made, chosen.selection), Inner(layout, end_shard, sliced, chosen.certificate))
        if chosen.selection is None and chosen.lower is not None:  # there was no time for one
            pair = best_pair(made.problem)
            if pair is not None:
                self.add(plan_of(made, pair))
        if chosen.lower is not None and chosen.gap != 0:
            bound = made.step_s(chosen.lower)
            self.lower = min(self.lower, float(self.question.cost(bound, layout.num_devices)))

    def drain(self) -> None:
        """Simulate what waits, until no bound is below the best."""
        refined: list[tuple[float, tuple[object, ...], Candidate]] = []
        while self.waiting or refined:
            rough = self.waiting[0][0] if self.waiting else float("inf")
            fine = refined[0][0] if refined else float("inf")
            if min(rough, fine) >= self.upper * TIE or self.is_late:
                self.lower = min(self.lower, rough, fine)
                break
            self.tell("schedules and cuts", len(self.seen), len(self.seen) + len(refined) + len(self.waiting))
            if fine <= rough:
                self.evaluate(heappop(refined)[2])
                continue
            _, number, position = heappop(self.waiting)
            made = self.expansions[number]
            if position + 1 < len(made.ranking):
                heappush(self.waiting, (float(made.cost[made.ranking[position + 1]]), number, position + 1))
            for candidate in made.candidates(self.question, int(made.ranking[position]), self.upper):
                cost = float(self.question.cost(candidate.bound_s, candidate.devices))
                heappush(refined, (cost, candidate.key, candidate))

    def evaluate(self, candidate: Candidate) -> None:
        if candidate in self.seen:
            return
        self.seen.add(candidate)
        self.add(candidate.plan(self.question))

    def add(self, plan: Plan, inner: Inner | None = None) -> None:
        seen = outline(plan, self.question.laws)
        self.evaluated += 1
        fits = seen.needed_bytes <= self.question.capacity_bytes
        cost = self.question.true_cost(plan, seen.step_s) if fits else float("inf")
        found = Found(cost, plan, seen, inner)
        if cost < float("inf"):
            insort(self.found, found, key=lambda item: item.cost)
        elif not fits and (self.least_bad is None or seen.needed_bytes < self.least_bad.outline.needed_bytes):
            self.least_bad = found

    def answer(self, space: int, search_s: float) -> Answer:
        if not self.found and self.least_bad is None and self.smallest is not None:
            self.evaluate(self.smallest)
        lower = min(self.lower, self.upper)
        return Answer(self.question, tuple(self.found), self.least_bad, space, self.evaluated, lower, search_s)


def pareto(found: tuple[Found, ...]) -> tuple[Found, ...]:
    """Those that no other beats in step time, memory needed and device seconds at once."""
    kept: list[tuple[tuple[float, float, float], Found]] = []
    for item in found:
        seen = item.outline
        values = (seen.step_s, seen.needed_bytes, seen.step_s * item.plan.layout.num_devices)
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
            kept.append((values, item))
    return tuple(item for _, item in kept)


def space_size(question: Question, known: Degrees) -> int:
    """Plans of the space: degrees times options times schedules times cuts; mixtures are counted by layout."""
    waves, blocks = question.only == ("wave",), question.model.num_blocks
    shapes, shape = distinct(known.pp, known.microbatches)
    per_shape = [
        len(orders(pp, m, blocks, question.pins, waves=waves)) * (2 if pp > 1 else 1) for pp, m in shapes.tolist()
    ]
    keys, key = distinct(known.tp, known.cp, known.pp, known.dp)
    per_key = [num_options(question, *map(int, row)) for row in keys]
    uniform = int((np.array(per_shape, dtype=np.int64)[shape] * np.array(per_key, dtype=np.int64)[key]).sum())
    return uniform + num_mixtures(question, known)


def num_mixtures(question: Question, known: Degrees) -> int:
    """Inner problems: layouts without a pipeline, optimizer states cut or not, times the ways to cut the ends."""
    if not question.is_free:
        return 0
    total = 0
    for row in np.flatnonzero((known.pp == 1) & (known.dp > 1)).tolist():
        tp, cp, dp = (int(column[row]) for column in (known.tp, known.cp, known.dp))
        ways = len(end_groups(question, Layout(global_batch=1, tp=tp, cp=cp, dp=dp)))
        total += 2 * ways * len(legal_sequences(tp, cp, question.seq_len, question.pins))
    return total


@lru_cache(maxsize=100_000)
def cuts(blocks: int, pp: int, order: Order, first: float, last: float) -> tuple[tuple[int, ...], ...]:
    """The cuts that are tried: even, and balanced with embedding and head counted, to a tenth of a block."""
    placement = placed(order.name, pp, order.chunks, order.waves)
    found = [even_cut(blocks, placement.depth), balanced_cut(blocks, placement.ranks, first=first, last=last)]
    return tuple(dict.fromkeys(cut for cut in found if cut and all(cut[1:-1])))


@lru_cache(maxsize=10_000)
def placed(name: str, pp: int, chunks: int, waves: int) -> Placement:
    return SCHEDULES[name].placement(Shape(pp, 1, chunks=chunks, waves=waves))
