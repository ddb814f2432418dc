"""Bounds: what no plan of some degrees, options or schedule can be faster than, under the simulator.

Each is a sum of what the fullest rank must do, whatever the schedule and the cut; `planner.waits` is about one order.
Messages count with their host time only. That a bound never exceeds the simulator is a property test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from wavetrain.planner.question import Question
from wavetrain.planner.space import Degrees, Options, Order, orders, waves_only
from wavetrain.sim.batch import Batch
from wavetrain.sim.ending import (
    optimizer_seconds,
    rank_parameters,
    rank_reduction_seconds,
    replica_seconds,
    replicated_parameters,
)
from wavetrain.sim.estimate import SCHEDULE_KINDS, Estimate, estimate, hop_seconds, straggling
from wavetrain.sim.memory import Place, chunks_in_flight, memory, reserve_bytes, saved_bytes, static_parts
from wavetrain.sim.predict import GREEDY
from wavetrain.sim.sweep import Layouts, distinct, sweep

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]
Flags = NDArray[np.bool_]

BELOW = 1 - 1e-9  # rounding of sums of floats


def degree_bounds(question: Question, found: Degrees) -> Floats:
    """Seconds that no step of some degrees is below: compute and tensor communication, blocks dealt out evenly."""
    if not len(found):
        return np.zeros(0)
    unique, row = distinct(found.tp, found.cp, np.where(found.cp > 1, found.pp, 1), found.microbatch)
    pieces = _pieces(question, unique)
    busy = np.min([_pipeline_bounds(question, found, parts.take(row)) for parts in pieces], axis=0)
    nodes = np.ceil(found.tp * found.cp * found.dp / question.cluster.node.num_devices)
    slower = 1 + question.laws.doubling * np.log2(np.maximum(nodes, 1.0))
    return np.asarray((busy + question.laws.step_s) * slower * BELOW)


@dataclass(frozen=True)
class Pieces:
    """Seconds of one microbatch: in a block forward, input and weight gradient (columns); in embedding and head."""

    block_s: Floats  # the average one
    least_s: Floats  # of the kinds of blocks, the least of each column
    ends_s: Floats  # together

    def take(self, rows: Numbers) -> Pieces:
        return Pieces(*(getattr(self, item.name)[rows] for item in fields(self)))


def _pipeline_bounds(question: Question, own: Degrees, parts: Pieces) -> Floats:
    """Seconds that no pipeline is below, whatever its schedule and cut.

    The fullest rank has at least the blocks that an even deal leaves it. It runs all microbatches through them; the
    last of its forwards is followed by a whole backward, the first of its backwards by a whole forward before it. An
    average rank has its share of all messages; any rank has two each way of one boundary per microbatch.
    """
    m, blocks = own.microbatches, question.model.num_blocks
    most = np.ceil(blocks / own.pp)
    share = (blocks * parts.block_s.sum(axis=1) + parts.ends_s) / own.pp
    around = 0.0 if question.stack.barrier else 1.0  # the first receive and the last send are outside of a span
    host_s = np.where(own.pp > 1, _host_seconds(question), 0.0)
    average = np.maximum(2 * (own.pp - 1) / own.pp * m - around, 0.0) * host_s
    busy = np.maximum(m * share + average, m * most * parts.least_s.sum(axis=1) + (m - around) * host_s)
    if not question.stack.barrier:
        return np.asarray(busy)
    there = m * most * parts.least_s[:, 0] + blocks * parts.block_s[:, 1]
    back = blocks * parts.block_s[:, 0] + m * most * parts.least_s[:, 1]
    return np.asarray(np.where(own.pp == 1, m * share, np.maximum(busy, np.maximum(there, back))))


def _host_seconds(question: Question) -> float:
    """Host time of a message, half of it at either end."""
    return question.laws.message_s if question.stack.message_s is None else question.stack.message_s


def _pieces(question: Question, unique: Numbers) -> list[Pieces]:
    """Seconds of one microbatch for rows of (tp, cp, pp, microbatch): by sequence parallelism and whether pp is inside.

    What is not possible takes forever.
    """
    ways, number = 4, len(unique)
    tp, cp, pp, microbatch = (np.tile(column, ways) for column in unique.T)
    sequence, inside = (np.repeat(flags, number) for flags in ([False, True, False, True], [False, False, True, True]))
    possible = ~sequence | ((tp > 1) & (question.seq_len % (tp * cp) == 0))
    possible &= ~inside | ((pp > 1) & (cp > 1))
    if question.pins.sequence_parallel is not None:
        possible &= (sequence == question.pins.sequence_parallel) | ~sequence
    one, no = np.ones(len(tp), dtype=np.intp), np.zeros(len(tp), dtype=bool)
    layouts = _layouts(
        Degrees(tp, cp, pp, one, microbatch, one),
        Options(
            row=np.arange(len(tp)),
            sequence_parallel=sequence & possible,
            pp_inside=inside & possible,
            recompute=0 * one,
            shard=one,
            keep=no,
            shard_optimizer=no,
        ),
    )
    priced = estimate(_batch(question, layouts), question.laws)
    ends_s = np.where(possible, priced.embedding.total_s + priced.head.total_s, np.inf)
    kinds_s = np.where(possible[:, None, None], _kind_seconds(priced), np.inf)
    every = Pieces(_block_seconds(priced), kinds_s.min(axis=1), ends_s)
    return [every.take(np.arange(way * number, (way + 1) * number)) for way in range(ways)]


def _block_seconds(priced: Estimate) -> Floats:
    """Forward, input and weight gradient (columns) of the average block."""
    return np.stack([priced.block.f_s, priced.block.i_s, priced.block.weight_s], axis=-1)


def _kind_seconds(priced: Estimate) -> Floats:
    """The same of every kind of block (second axis)."""
    return np.stack([priced.variants.f_s, priced.variants.i_s, priced.variants.weight_s], axis=-1)


def _batch(question: Question, layouts: Layouts) -> Batch:
    return sweep(
        question.model,
        question.cluster,
        layouts,
        seq_len=question.seq_len,
        stack=question.stack,
        precision=question.precision,
    )


def _layouts(found: Degrees, options: Options) -> Layouts:
    """Columns for the closed form, as a pipeline of one stage per rank."""
    own = found.take(options.row)
    none = np.zeros(len(options), dtype=np.intp)
    return Layouts(
        tp=own.tp,
        sequence_parallel=options.sequence_parallel,
        cp=own.cp,
        dp=own.dp,
        pp=own.pp,
        pp_inside=options.pp_inside,
        schedule=none + SCHEDULE_KINDS.index("1f1b"),
        stages=none + 1,
        microbatch=own.microbatch,
        microbatches=own.microbatches,
        recompute=options.recompute,
        shard=options.shard,
        keep=options.keep,
        shard_optimizer=options.shard_optimizer,
    )


@dataclass(frozen=True)
class Priced:
    """What options cost, one entry each: parts of a microbatch, the end of a step, what is static on a rank."""

    f_s: Floats  # of the average block
    i_s: Floats
    w_s: Floats
    kinds_s: Floats  # of every kind of block: forward, input gradient, weight gradient (columns)
    first_s: Floats  # embedding: forward, input gradient, weight gradient (columns)
    last_s: Floats
    shown_s: Floats  # of i_s and f_s, what sharding shows: forward, backward (columns)
    behind_s: Floats  # what it hides behind: forward, backward
    tail_s: Floats  # at least
    linear_tail_s: Floats  # at least, in proportion to what lies where
    slower: Floats  # factor for slow nodes
    host_s: Floats
    hops_s: Floats  # a message over each tier (columns)
    stride: Numbers  # devices from one rank of a pipeline to the next
    state_bytes: Floats  # per block, of the kind that has least
    saved_bytes: Floats  # per block and microbatch, of the kind that has least
    first_bytes: Floats  # embedding: states, saved per microbatch (columns)
    last_bytes: Floats  # head
    copy_bytes: Floats  # the part of a tied head's states that it shares with the embedding on the same rank
    other_bytes: Floats  # buffers, and what a device needs beside its tensors
    logit_bytes: Floats  # beside all activations of a rank that has every block

    def take(self, rows: Numbers) -> Priced:
        return Priced(*(getattr(self, item.name)[rows] for item in fields(self)))

    @property
    def block_s(self) -> Floats:
        return self.f_s + self.i_s + self.w_s

    @property
    def pieces(self) -> Pieces:
        block_s = np.stack([self.f_s, self.i_s, self.w_s], axis=1)
        return Pieces(block_s, self.kinds_s.min(axis=1), self.first_s.sum(axis=1) + self.last_s.sum(axis=1))


def price(question: Question, found: Degrees, options: Options) -> Priced:
    """Price options without a schedule."""
    batch = _batch(question, _layouts(found, options))
    priced = estimate(batch, question.laws)
    least_s = _least_tail(question, batch)
    return Priced(
        f_s=priced.block.f_s,
        i_s=priced.block.i_s,
        w_s=priced.block.weight_s,
        kinds_s=_kind_seconds(priced),
        first_s=np.stack([priced.embedding.f_s, priced.embedding.i_s, priced.embedding.w_s], axis=1),
        last_s=np.stack([priced.head.f_s, priced.head.i_s, priced.head.w_s], axis=1),
        shown_s=np.stack([priced.block.shard_f_s, priced.block.shard_b_s], axis=1),
        behind_s=np.stack([priced.block.f_s - priced.block.shard_f_s, priced.block.hiding_s], axis=1),
        tail_s=np.where(batch.pp == 1, sum(priced.tail.values()), least_s),
        linear_tail_s=least_s,
        slower=1 + straggling(batch, question.laws),
        host_s=priced.message.host_s,
        hops_s=hop_seconds(batch).T,
        stride=batch.stage_stride.astype(np.intp),
        **_bytes(question, batch),
    )


def _least_tail(question: Question, batch: Batch) -> Floats:
    """The end of a step on a rank with as few blocks as the fullest must have; of what overlaps, the share that shows.

    The same laws as `ending.tail_seconds`, without what is too long to hide behind the backward.
    """
    laws = question.laws
    whole, every = replicated_parameters(batch), rank_parameters(batch)
    share = np.divide(whole, every, out=np.zeros_like(whole), where=every > 0)
    reduce_s, gather_s = rank_reduction_seconds(batch, every)
    shown = laws.gradient_exposed if batch.stack.gradient_overlap else 1.0
    least = shown * (share * (reduce_s + gather_s) + replica_seconds(batch, every))
    blocks = np.where(batch.pp == 1, batch.num_blocks, batch.most)
    return np.asarray(least + optimizer_seconds(batch, whole, blocks, laws) + laws.step_s)


def _bytes(question: Question, batch: Batch) -> dict[str, Floats]:
    """Bytes that blocks and ends hold, as `sim.memory` counts them."""
    laws, (rows, kinds) = question.laws, batch.block_counts.shape
    yes, no, none = np.ones((1, rows)), np.zeros((1, rows)), np.zeros((1, rows, kinds))

    def held(place: Place, where: Batch = batch) -> Floats:
        return np.asarray(np.asarray(sum(static_parts(where, place, laws).values()))[0])

    buffers = held(Place(none, no, no))
    block = np.min([held(Place(none + np.eye(kinds)[kind], no, no)) for kind in range(kinds)], axis=0)
    first, last = held(Place(none, yes, no)) - buffers, held(Place(none, no, yes)) - buffers
    folded = held(Place(none, no, yes), replace(batch, folded=batch.pp > 1)) - buffers
    saved = saved_bytes(batch, laws)
    grown = 1 + laws.fragmentation
    return {
        "state_bytes": block - buffers,
        "saved_bytes": grown * saved.block.min(axis=1),
        "first_bytes": np.stack([first, grown * saved.embedding], axis=1),
        "last_bytes": np.stack([last, grown * saved.head], axis=1),
        "copy_bytes": last - folded,
        "other_bytes": buffers + reserve_bytes(no[0], laws),
        "logit_bytes": grown * saved.logits,
    }


def least_bytes(question: Question, pp: Numbers, priced: Priced) -> Floats:
    """What the fullest rank holds at least, whatever the schedule and the cut: states; on a single rank activations."""
    blocks = question.model.num_blocks
    ends = (priced.first_bytes + priced.last_bytes).sum(axis=1) + priced.logit_bytes
    whole = blocks * (priced.state_bytes + priced.saved_bytes) + ends
    part = np.ceil(blocks / pp) * priced.state_bytes
    return np.asarray(np.where(pp == 1, whole, part) + priced.other_bytes)


def option_bounds(question: Question, found: Degrees, options: Options, priced: Priced) -> Floats:
    """Seconds that no step of some options is below, whatever the schedule and the cut."""
    busy = _pipeline_bounds(question, found.take(options.row), priced.pieces)
    return np.asarray((busy + priced.tail_s) * priced.slower * BELOW)


PRICES = np.concatenate([[0.0], np.logspace(-14, -6, 161)])  # seconds per byte that are tried


def mixture_bound(question: Question, microbatches: int, priced: Priced, options: Options) -> float:
    """Seconds that no mixture of one layout's options is below: blocks and operators may each take another.

    A Lagrangian bound (osdp-and-planners 5.2): every byte of memory has a price, so that each parameter and each
    activation is best by itself; what communication shows is at least its share, wherever it is hidden.
    """
    laws, blocks, m = question.laws, question.model.num_blocks, microbatches
    least, most = sorted((laws.link_exposed, laws.network_exposed))
    travel = np.minimum(priced.shown_s / most, priced.shown_s + (1 - most) * priced.behind_s)
    linear = m * blocks * least * travel.sum(axis=1) + priced.linear_tail_s - laws.step_s
    plain = options.recompute == 0
    compute = (priced.block_s - priced.shown_s.sum(axis=1))[plain].min()
    again = m * blocks * np.maximum(priced.block_s - priced.shown_s.sum(axis=1) - compute, 0.0)
    ends = (priced.first_s + priced.last_s).sum(axis=1).min()
    states, saved = blocks * priced.state_bytes, blocks * priced.saved_bytes
    held = (priced.first_bytes + priced.last_bytes).sum(axis=1).min() + priced.other_bytes.min()
    held += priced.logit_bytes.min()
    if states.min() + saved.min() + held > question.capacity_bytes / BELOW:
        return float("inf")
    price = PRICES[:, None]
    total = (linear + price * states).min(axis=1) + (again + price * saved).min(axis=1)
    dual = total + PRICES * (held - question.capacity_bytes)
    return float((m * (blocks * compute + ends) + laws.step_s + dual.max()) * priced.slower.min() * BELOW)


@dataclass(frozen=True)
class Scheduled:
    """Options (by number) with schedules (by number), and what the closed form says of them."""

    option: Numbers
    order: Numbers  # number in `orders`
    orders: tuple[Order, ...]
    bound_s: Floats
    least_bytes: Floats

    def __len__(self) -> int:
        return len(self.option)


def schedule(question: Question, found: Degrees, options: Options, priced: Priced) -> Scheduled:
    """Every schedule of some options, with a bound for any cut."""
    own, pins = found.take(options.row), question.pins
    unique, row = distinct(own.pp, own.microbatches, waves_only(question, found, options))
    known, blocks = dict[Order, int](), question.model.num_blocks
    found_orders = (orders(pp, m, blocks, pins, waves=bool(waves)) for pp, m, waves in unique.tolist())
    legal = [np.array([known.setdefault(order, len(known)) for order in some], dtype=np.intp) for some in found_orders]
    counts = np.array([len(numbers) for numbers in legal], dtype=np.intp)[row]
    option = np.repeat(np.arange(len(options)), counts)
    order = np.concatenate([legal[r] for r in row]) if len(row) else np.zeros(0, dtype=np.intp)
    table = tuple(known)
    per_rank = np.array([o.per_rank for o in table], dtype=np.intp)[order]
    split = np.array([o.split for o in table], dtype=bool)[order]
    return Scheduled(
        option=option,
        order=order,
        orders=table,
        bound_s=_scheduled_bounds(question, priced, own, option, per_rank, split),
        least_bytes=_scheduled_bytes(question, priced, own, option, [table[n] for n in order]),
    )


def closed_form(
    question: Question, found: Degrees, options: Options, made: Scheduled, rows: Numbers
) -> tuple[Floats, Floats]:
    """What the closed form says of some schedules: seconds of a step, bytes needed; no bounds, but near."""
    if not len(rows):
        return np.zeros(0), np.zeros(0)
    chosen = options.take(made.option[rows])
    kind, per_rank = (
        np.array([getattr(order, name) for order in made.orders], dtype=np.intp)[made.order[rows]]
        for name in ("kind", "per_rank")
    )
    batch = _batch(question, replace(_layouts(found, chosen), schedule=kind, stages=per_rank))
    held = memory(batch, question.laws)
    return estimate(batch, question.laws).step_s, held.peak_bytes + held.reserve_bytes


def _scheduled_bounds(
    question: Question, priced: Priced, own: Degrees, option: Numbers, per_rank: Numbers, split: Flags
) -> Floats:
    """The last rank to start: what it waits for at both ends, and at least its share of the work less a block."""
    busy = _pipeline_bounds(question, own, priced.pieces)[option]
    tail_s, slower = priced.tail_s[option], priced.slower[option]
    if not question.stack.barrier:  # it ends as late as it starts
        return np.asarray((busy + tail_s) * slower * BELOW)
    pp, m, blocks = own.pp[option], own.microbatches[option], question.model.num_blocks
    f_s, i_s, w_s = priced.kinds_s.min(axis=1)[option].T
    fewest = np.maximum(blocks // pp // per_rank, 1) * np.maximum(pp - 2, 0)  # blocks ahead, whatever the cut
    waits = fewest * (f_s + np.where(split, 0.0, i_s + w_s))
    least = (blocks / pp - 1) * (f_s + i_s + w_s)
    late = np.where(pp > 1, waits + m * least, 0.0)
    return np.asarray((np.maximum(busy, late) + tail_s) * slower * BELOW)


def _scheduled_bytes(
    question: Question, priced: Priced, own: Degrees, option: Numbers, order: Sequence[Order]
) -> Floats:
    """States and activations of a rank between the ends, as few blocks as any cut leaves it."""
    kind, per_rank = (np.array([getattr(o, name) for o in order], dtype=np.intp) for name in ("kind", "per_rank"))
    known = ~np.isin(kind, [SCHEDULE_KINDS.index(name) for name in GREEDY])  # the others hold what they please
    pp, m = own.pp[option], own.microbatches[option]
    live = chunks_in_flight(kind, *(column.astype(np.float64) for column in (pp, per_rank, m)))[1]
    blocks = question.model.num_blocks
    fewest = np.maximum(blocks // (pp * per_rank), 1)
    held = blocks // pp * priced.state_bytes[option] + np.where(known, live, 0.0) * fewest * priced.saved_bytes[option]
    return np.asarray(np.where(pp > 2, held, 0.0) + priced.other_bytes[option])
