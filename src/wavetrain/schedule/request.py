"""What a user asks of a schedule, checked and carried out: kind, sizes and durations in, order and numbers out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.schedule.action import Actions, Kind
from wavetrain.schedule.bound import bound_for
from wavetrain.schedule.derive import derive
from wavetrain.schedule.evaluate import Costs, Evaluation, Time, evaluate
from wavetrain.schedule.placement import Placement, linear, loop, snake
from wavetrain.schedule.schedules import SCHEDULES, Shape
from wavetrain.schedule.verify import Proof, verify

DERIVED = "derived"
KINDS = (*SCHEDULES, DERIVED)
MOST_RANKS = 65_536
MOST_ACTIONS = 4_000_000
MOST_DERIVED = 100_000


@dataclass(frozen=True)
class Times:
    """Durations of one stage's forward, input and weight gradient, and of a transfer."""

    f: Fraction = Fraction(1)
    i: Fraction = Fraction(1)
    w: Fraction = Fraction(1)
    transfer: Fraction = Fraction(0)

    def costs(self, num_stages: int) -> Costs:
        """Whole numbers where all are whole: they are as exact as fractions and much faster."""
        times = [_plain(time) for time in (self.f, self.i, self.w, self.transfer)]
        return Costs.uniform(num_stages, f=times[0], i=times[1], w=times[2], transfer=times[3])


@dataclass(frozen=True)
class Request:
    """A schedule as asked for on the command line."""

    kind: str
    ranks: int
    microbatches: int
    waves: int | None = None
    chunks: int | None = None
    times: Times = Times()
    cap: Fraction | None = None
    split: bool = True  # whether a derived order may part the backward


@dataclass(frozen=True)
class Answer:
    """The order, its proof and what it costs."""

    actions: Actions
    proof: Proof
    costs: Costs
    evaluation: Evaluation
    lower_bound: Time


def _plain(time: Fraction) -> Time:
    return int(time) if time.denominator == 1 else time


def answer(request: Request) -> Answer:
    """Make the schedule that is asked for and prove it."""
    _check(request)
    placement = placed(request)
    costs = request.times.costs(placement.num_stages)
    split = request.split if request.kind == DERIVED else SCHEDULES[request.kind].split
    if request.kind == DERIVED:
        actions = derive(placement, request.microbatches, costs, split=split, cap=request.cap).actions
    else:
        actions = SCHEDULES[request.kind].order(_shape(request, costs))
    return prove(actions, request.times, cap=request.cap, microbatches=request.microbatches)


def prove(actions: Actions, times: Times, *, cap: Fraction | None = None, microbatches: int | None = None) -> Answer:
    """Prove and evaluate any schedule, also one that somebody else wrote."""
    proof = verify(actions, cap=cap, microbatches=microbatches)
    placement = actions.placement
    costs = times.costs(placement.num_stages)
    own = {stage: len(numbers) for stage, numbers in actions.microbatches.items()}
    backward = any(action.kind is not Kind.F for _, action in actions.compute())
    bound = bound_for(placement, own, costs, split=actions.is_split, backward=backward)
    return Answer(actions, proof, costs, evaluate(actions, costs), bound)


def placed(request: Request) -> Placement:
    """Where the stages of a request go; `derived` takes a snake for waves, a loop for chunks, else one stage a rank."""
    if request.kind != DERIVED:
        return SCHEDULES[request.kind].placement(_shape(request, None))
    if request.waves is not None:
        return snake(request.ranks, request.waves)
    return loop(request.ranks, request.chunks) if request.chunks else linear(request.ranks)


def _shape(request: Request, costs: Costs | None) -> Shape:
    default_chunks = 2 if SCHEDULES[request.kind].chunked else 1
    chunks = request.chunks if request.chunks is not None else default_chunks
    return Shape(request.ranks, request.microbatches, chunks=chunks, waves=request.waves or 1, costs=costs)


def _check(request: Request) -> None:
    """Refuse what can't be drawn up: the sizes by themselves, then together, then how much there would be."""
    for rules in (_size_problems, _kind_problems, _amount_problems):
        problems = list(rules(request))
        if problems:
            raise InputError(problems)


def _size_problems(request: Request) -> Iterator[Problem]:
    if request.kind not in KINDS:
        near = nearest(request.kind, KINDS)
        yield Problem(where="--kind", rule=f"unknown schedule {request.kind}", legal=KINDS, nearest=near)
    sizes = {"ranks": request.ranks, "microbatches": request.microbatches}
    sizes |= {"waves": request.waves or 1, "chunks": request.chunks or 1}
    sizes |= {name: 0 for name in ("waves", "chunks") if getattr(request, name) == 0}
    for name, value in sizes.items():
        if not 1 <= value <= MOST_RANKS:
            rule = f"{value}: must be a whole number from 1 to {MOST_RANKS:,}"
            yield Problem(where=f"--{name}", rule=rule)


def _kind_problems(request: Request) -> Iterator[Problem]:
    schedule = SCHEDULES.get(request.kind)
    if schedule is None:
        if request.waves is not None and request.chunks is not None:
            yield Problem(where="--chunks", rule="a snake has waves, a loop has chunks; give one or the other")
        return
    for name, given, has in (("waves", request.waves, "waved"), ("chunks", request.chunks, "chunked")):
        if given is not None and not getattr(schedule, has):
            legal = tuple(kind for kind, entry in SCHEDULES.items() if getattr(entry, has))
            yield Problem(where=f"--{name}", rule=f"{request.kind} has no {name}; these have", legal=legal)
    if schedule.even_ranks and request.ranks % 2:
        near = tuple(str(number) for number in (request.ranks - 1, request.ranks + 1) if number)
        rule = f"{request.ranks}: {request.kind} needs an even number of ranks"
        yield Problem(where="--ranks", rule=rule, nearest=near)


def _amount_problems(request: Request) -> Iterator[Problem]:
    size = 3 * placed(request).num_stages * request.microbatches
    most = MOST_DERIVED if request.kind == DERIVED else MOST_ACTIONS
    if size > most:
        rule = f"{size:,} actions are more than the {most:,} that can be drawn up at once"
        yield Problem(where="--microbatches", rule=rule, remedy="fewer microbatches, ranks or waves")
