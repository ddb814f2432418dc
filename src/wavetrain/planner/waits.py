"""Bounds of one order on one cut: what some rank must do and must wait for.

* a rank runs every microbatch through its stages;
* its first action is the forward of its first stage, before which a microbatch went through all stages ahead;
* its last backward is that of its first stage, after which the gradient goes back through the same stages;
* its first backward waits until a microbatch has gone all the way to the end and back to it, and until then a rank does
  no more forwards than its order has before it.

Where ranks do not wait for each other before the optimizer, a step is the longest span of a rank: what others do before
its first action and after its last does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.cluster import Tier
from wavetrain.model.model import Model
from wavetrain.planner.bounds import BELOW, Priced
from wavetrain.planner.question import Question
from wavetrain.planner.space import Order
from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.schedules import SCHEDULES, Shape
from wavetrain.sim.predict import GREEDY, drawn_up

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]

AT_ONCE = ("gpipe", "looped-bfs")  # orders that run all forwards of a stage before a backward
ANY = 1e30  # forwards before a backward, of an order that is not looked at


@dataclass(frozen=True)
class Stages:
    """Seconds of every stage's actions, and of a message at either of its ends."""

    f: Floats
    i: Floats
    w: Floats
    message_s: Floats
    barrier: bool  # all ranks wait for each other before the optimizer


def stage_seconds(
    question: Question, priced: Priced, option: int, cut: tuple[int, ...], ranks: tuple[int, ...]
) -> Stages:
    """What the stages of a cut take with an option: the same as `sim.stages.stage_times`."""
    parts = list((kind_counts(question.model, cut) @ priced.kinds_s[option]).T)
    for part, first, last in zip(parts, priced.first_s[option], priced.last_s[option], strict=True):
        part[0] += first
        part[-1] += last
    f, i, w = parts
    return Stages(f, i, w, _message_ends(question, priced, option, ranks), question.stack.barrier)


def kind_counts(model: Model, cut: tuple[int, ...]) -> Floats:
    """Blocks of each kind (columns) in every stage of a cut."""
    kinds = list(model.block_counts)
    if len(kinds) == 1:
        return np.array(cut, dtype=np.float64)[:, None]
    blocks = [kinds.index(run.layer) for run in model.blocks for _ in range(run.count)]
    counts = np.zeros((len(cut), len(kinds)))
    np.add.at(counts, (np.repeat(np.arange(len(cut)), cut), np.array(blocks)), 1.0)
    return counts


def _message_ends(question: Question, priced: Priced, option: int, ranks: tuple[int, ...]) -> Floats:
    host_s = float(priced.host_s[option])
    if question.stack.message_overlap:
        return np.full(len(ranks), host_s / 2)
    wire_s = wires(ranks, int(priced.stride[option]), question.cluster.tiers) @ priced.hops_s[option]
    return np.asarray((host_s + wire_s) / 2)


@lru_cache(maxsize=10_000)
def wires(ranks: tuple[int, ...], stride: int, tiers: tuple[Tier, ...]) -> Floats:
    """Of the boundaries of every stage that a message crosses, the share over each tier."""
    at = np.array(ranks) * stride
    shares = np.zeros((len(ranks), max(1, len(tiers))))
    sides = np.zeros(len(ranks))
    for boundary in range(len(ranks) - 1):
        here, there = at[boundary], at[boundary + 1]
        tier = next((n for n, tier in enumerate(tiers) if here // tier.size == there // tier.size), None)
        if here != there and tier is not None:
            shares[boundary : boundary + 2, tier] += 1
            sides[boundary : boundary + 2] += 1
    return shares / np.maximum(sides, 1)[:, None]


def order_bound(order: Order, pp: int, microbatches: int, stages: Stages) -> float:
    """Seconds that no run of an order is below, without the end of the step."""
    some = known_microbatches(order, pp, microbatches)
    found = warm_ups(order.name, pp, some, order.chunks, order.waves, whole=some == microbatches)
    return min(_run_bound(order, warm, microbatches, some, stages) for warm in found) * BELOW


def placed_bound(order: Order, pp: int, microbatches: int, stages: Stages) -> float:
    """The same from where stages lie, without looking at the order."""
    warm = _placed(order.name, pp, order.chunks, order.waves)
    return _run_bound(order, warm, microbatches, microbatches, stages) * BELOW


@lru_cache(maxsize=4096)
def _placed(name: str, pp: int, chunks: int, waves: int) -> WarmUp:
    placement = SCHEDULES[name].placement(Shape(pp, 1, chunks=chunks, waves=waves))
    first, last = (np.array([pick(stages) for stages in placement.local]) for pick in (min, max))
    anything = np.full((pp, placement.num_stages), ANY)
    return WarmUp(placement.ranks, first, last, anything, np.zeros((0, 0)), np.zeros(0, dtype=np.intp))


def known_microbatches(order: Order, pp: int, microbatches: int) -> int:
    """Microbatches that show all that an order does before it repeats itself.

    Orders go by units of pp microbatches, or a little more where they do not come out even, the longer ones first.
    Those that look at times do the same, however many microbatches are still to come, until all are on their way.
    """
    units = microbatches // pp
    if order.name in GREEDY:
        return min(microbatches, 4 * pp)
    if units <= 3:
        return microbatches
    size, longer = divmod(microbatches, units)
    return 3 * size + min(3, longer)


def _run_bound(order: Order, warm: WarmUp, microbatches: int, some: int, stages: Stages) -> float:
    ranks, pp = np.array(warm.ranks), len(warm.first)
    ahead = np.append(ranks[1:] != ranks[:-1], False) * stages.message_s  # its output goes to another rank
    behind = np.concatenate([[False], ranks[1:] != ranks[:-1]]) * stages.message_s  # its input comes from one
    f, i, w = stages.f + ahead, stages.i + behind, stages.w  # on the way of one microbatch: what it sends
    busy_f, busy_i = f + behind, i + ahead
    back, busy_back = (i, busy_i) if order.split else (i + w, busy_i + w)
    own_f, own_b, own_w = (np.bincount(ranks, microbatches * part, pp) for part in (busy_f, busy_back, w))
    ahead_f = np.concatenate([[0.0], np.cumsum(f)])
    ahead_b = np.concatenate([[0.0], np.cumsum(back)])
    first, last = warm.first, warm.last
    forwards = np.where(warm.forwards == some, microbatches, warm.forwards) if order.name in AT_ONCE else warm.forwards
    turned = ahead_f[-1] + (ahead_b[-1] - ahead_b[last + 1]) - ahead[last]  # before the first backward of each rank
    left = (ahead_f[-1] - ahead_f[last + 1]) + ahead_b[-1]  # after the last forward
    if stages.barrier:
        fill = ahead_f[first] - behind[first]  # a receive may be launched before there is anything to receive
        drain = ahead_b[first] + (w[0] if order.split else 0.0)
        late = w[0] if order.split else 0.0
    else:  # from its first action to its last, without the receive before and the send after
        fill = -behind[first]
        drain = late = w[first] if order.split else -behind[first]
        turned, left = turned - ahead_f[first], left - ahead_b[first]
    begun = np.maximum(fill, turned - (forwards * busy_f).sum(axis=1))
    needs = [begun + own_f + own_b + drain, fill + own_f + left + late, turned + own_b + drain]
    if order.split:  # weight gradients may come while others drain
        needs += [begun + own_f + own_b + own_w, turned + own_b + own_w]
    return float(max(need.max() for need in needs))


@dataclass(frozen=True)
class WarmUp:
    """Of an order: every rank's first and last stage, and what it has run before its first backward."""

    ranks: tuple[int, ...]
    first: Numbers
    last: Numbers
    forwards: Floats  # how often (ranks, stages)
    alive: Floats  # microbatches that the stages of a rank hold at once, as many as they ever do (moments, stages)
    owner: Numbers  # rank of every moment


@lru_cache(maxsize=4096)
def warm_ups(
    name: str, pp: int, microbatches: int, chunks: int, waves: int, *, whole: bool = False
) -> tuple[WarmUp, ...]:
    """What the orders of a schedule do and hold; with many microbatches the same as with some, or these are all."""
    shape = Shape(pp, microbatches, chunks=chunks, waves=waves)
    return tuple(_warm_up(actions, ends_early=name in GREEDY and not whole) for actions in drawn_up(name, shape))


def _warm_up(order: Actions, *, ends_early: bool) -> WarmUp:
    placement = order.placement
    first, last = (np.array([pick(stages) for stages in placement.local]) for pick in (min, max))
    forwards = np.zeros((order.num_ranks, placement.num_stages))
    found: set[tuple[int, tuple[int, ...]]] = set()
    for rank, actions in enumerate(order.ranks):
        until = order.num_microbatches - order.num_ranks - 1 if ends_early else order.num_microbatches
        found |= {(rank, moment) for moment in _fullest(actions, placement.num_stages, until)}
        for action in actions:
            if action.kind in (Kind.B, Kind.I):
                break
            forwards[rank, action.stage] += action.kind is Kind.F
    held = sorted(found)
    alive, owner = np.array([moment for _, moment in held], dtype=np.float64), np.array([rank for rank, _ in held])
    return WarmUp(placement.ranks, first, last, forwards, alive, owner)


def _fullest(actions: Sequence[Action], num_stages: int, until: int) -> set[tuple[int, ...]]:
    """What the stages of a rank hold whenever a forward is followed by something that frees.

    Only what comes before a microbatch: of an order that looks at times, while there are more behind it than ranks, so
    that it can't know yet how many there are.
    """
    held, found, grew = [0] * num_stages, set[tuple[int, ...]](), False
    ends = Kind.W if any(action.kind is Kind.W for action in actions) else Kind.B
    for stage, kind, microbatch in actions:
        if (microbatch or 0) >= max(until, 1):
            found.add(tuple(held))
            break
        if kind is Kind.F:
            held[stage] += 1
            grew = True
        elif kind is ends:
            if grew:
                found.add(tuple(held))
            held[stage] -= 1
            grew = False
    return found


def order_bytes(order: Order, pp: int, microbatches: int, cut: tuple[int, ...], priced: Priced, option: int) -> float:
    """Bytes that the fullest rank of an order holds at least: states and activations, without what is in passing."""
    some = known_microbatches(order, pp, microbatches)
    found = warm_ups(order.name, pp, some, order.chunks, order.waves, whole=some == microbatches)
    counts, last = np.array(cut, dtype=np.float64), priced.last_bytes[option]
    if found[0].ranks[0] == found[0].ranks[-1]:
        last = last - [priced.copy_bytes[option], 0.0]
    states, saved = counts * priced.state_bytes[option], counts * priced.saved_bytes[option]
    for part, column in ((states, 0), (saved, 1)):
        part[0] += priced.first_bytes[option, column]
        part[-1] += last[column]
    least = float("inf")
    for warm in found:
        every = order.name in AT_ONCE
        alive = np.where(warm.alive == some, microbatches, warm.alive) if every else warm.alive
        held = np.bincount(np.array(warm.ranks), states, pp)[warm.owner] + alive @ saved
        least = min(least, float(held.max()))
    return (least + float(priced.other_bytes[option])) * BELOW
