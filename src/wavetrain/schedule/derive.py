"""The best order we find for given stages, times and memory: fixed schedules, lists, repeating orders, improvement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from wavetrain.base.errors import InputError, Problem
from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.bound import lower_bound
from wavetrain.schedule.evaluate import Costs, Stuck, Time, evaluate, peak_in_flight
from wavetrain.schedule.improve import improve
from wavetrain.schedule.listing import Priority, list_schedule
from wavetrain.schedule.periodic import periodic
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import fixed_orders

EFFORT = 12_000_000  # evaluated actions, a few seconds
MOST_LISTED = 50_000  # forwards in all list schedules of one rule; with more, only two windows are tried
ROUNDS = ((0.3, 12), (0.3, 4), (0.4, 2))  # share of the effort, and how many of the best orders so far it goes to


@dataclass(frozen=True)
class Derived:
    """An order, how long it takes and how far that can be from the best."""

    actions: Actions
    makespan: Time
    lower_bound: Time
    start: str  # what it was improved from

    @property
    def gap(self) -> float:
        return max(0.0, float(self.makespan / self.lower_bound - 1)) if self.lower_bound else 0.0


def derive(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    *,
    split: bool,
    cap: Fraction | None = None,
    effort: int = EFFORT,
) -> Derived:
    """Find an order. `cap` bounds the activations each rank holds, in microbatches; None is no bound."""
    caps = slots(placement, microbatches, cap)
    costs, scale = _whole(costs)
    bound = lower_bound(placement, microbatches, costs, split=split)
    fixed = {name: _in_form(order, split) for name, order in fixed_orders(placement, microbatches, costs)}
    fixed = {name: order for name, order in fixed.items() if order.is_split == split or microbatches == 0}
    starts = {name: order for name, order in fixed.items() if _fits(order, placement, caps)}
    starts |= dict(_lists(placement, microbatches, costs, split, caps, fixed))
    repeating = periodic(placement, microbatches, costs, caps=caps, split=split)
    if repeating is not None:
        starts["periodic"] = repeating
    timed = sorted(((evaluate(order, costs).makespan, name, order) for name, order in starts.items()), key=_length)
    for share, kept in ROUNDS:
        timed = timed[:kept]
        if timed[0][0] <= bound:
            break
        room = int(effort * share / len(timed))
        if room < timed[0][2].size:
            break
        better = [(name, improve(order, costs, caps=caps, effort=room, goal=bound)) for _, name, order in timed]
        timed = sorted(((evaluate(order, costs).makespan, name, order) for name, order in better), key=_length)
    best, name, actions = timed[0]
    return Derived(actions, _scaled(best, scale), _scaled(bound, scale), name)


def _whole(costs: Costs) -> tuple[Costs, int]:
    """Exact times as whole numbers, which are much faster than fractions, and what they were multiplied by."""
    times = [*costs.f, *costs.i, *costs.w, costs.transfer, *(time for _, _, time in costs.links)]
    if any(isinstance(time, float) for time in times):
        return costs, 1
    scale = lcm(*(Fraction(time).denominator for time in times))
    rows = [tuple(int(time * scale) for time in row) for row in (costs.f, costs.i, costs.w)]
    links = tuple((a, b, int(time * scale)) for a, b, time in costs.links)
    return Costs(rows[0], rows[1], rows[2], int(costs.transfer * scale), links), scale


def _scaled(time: Time, scale: int) -> Time:
    if scale == 1 or isinstance(time, float):
        return time
    exact = Fraction(time) / scale
    return int(exact) if exact.denominator == 1 else exact


def _length(item: tuple[Time, str, Actions]) -> tuple[Time, str]:
    return item[:2]


def _in_form(order: Actions, split: bool) -> Actions:
    return as_split(order) if split else order


def slots(placement: Placement, microbatches: int, cap: Fraction | None) -> tuple[int, ...]:
    """The cap in stage activations per rank."""
    if cap is None:
        return tuple(len(stages) * microbatches for stages in placement.local)
    caps = tuple(int(cap * placement.chunks(rank)) for rank in range(placement.num_ranks))
    needed = tuple(placement.chunks(rank) for rank in range(placement.num_ranks))
    if any(have < need for have, need in zip(caps, needed, strict=True)):
        rule = "too small for one microbatch, which needs room for all of a rank's stages"
        raise InputError(Problem(where="--memory-cap", value=str(cap), rule=rule, nearest=("1",)))
    return caps


def as_split(order: Actions) -> Actions:
    """The same order with every full backward parted into its two halves, one right after the other."""
    rows = []
    for row in order.ranks:
        parted: list[Action] = []
        for action in row:
            if action.kind is Kind.B:
                parted += [action._replace(kind=Kind.I), action._replace(kind=Kind.W)]
            else:
                parted.append(action)
        rows.append(tuple(parted))
    return Actions(tuple(rows))


def _fits(order: Actions, placement: Placement, caps: tuple[int, ...]) -> bool:
    peaks = enumerate(peak_in_flight(order))
    return all(peak * placement.chunks(rank) <= caps[rank] for rank, peak in peaks)


def _lists(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    split: bool,
    caps: tuple[int, ...],
    fixed: dict[str, Actions],
) -> Iterator[tuple[str, Actions]]:
    """List schedules whose urgency is when an action starts in a fixed schedule, or a simple rule."""
    rules: dict[str, Priority] = {"oldest first": _oldest_first(placement)}
    for name, order in fixed.items():
        try:
            rules[f"list by {name}"] = _by_start(order, costs)
        except Stuck:
            continue
    ranks = placement.num_ranks
    windows: list[int | None] = [None, *range(2, min(microbatches, 2 * ranks) + 1)]
    if len(windows) * placement.num_stages * microbatches > MOST_LISTED:
        windows = [None, ranks]
    for name, rule in rules.items():
        for window in windows:
            order = list_schedule(placement, microbatches, costs, priority=rule, caps=caps, split=split, window=window)
            yield f"{name}, window {window}" if window else name, order


def _oldest_first(placement: Placement) -> Priority:
    depth = placement.depth

    def priority(action: Action) -> Time:
        inner = action.stage % depth
        progress = inner if action.kind is Kind.F else 2 * depth - inner
        return (action.microbatch or 0) * 2 * depth - progress

    return priority


def _by_start(order: Actions, costs: Costs) -> Priority:
    starts = evaluate(order, costs).starts
    known: dict[tuple[bool, int, int | None], Time] = {}
    for row, times in zip(order.ranks, starts, strict=True):
        for (stage, kind, m), time in zip(row, times, strict=True):
            if kind is not Kind.W:
                known[kind is Kind.F, stage, m] = time
    return lambda action: known[action.kind is Kind.F, action.stage, action.microbatch]
