"""What is legal: every layout of a model on a cluster, as columns, in three steps that each add decisions.

Degrees (tp, cp, pp, dp, microbatch), then options (sequence parallelism, placement, recomputation, sharding), then the
schedule. Each step is expanded only where a bound leaves something to find.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wavetrain.model.limits import divisors
from wavetrain.model.operator import Attention, Experts
from wavetrain.plan.layout import Layout
from wavetrain.planner.question import KINDS, Pins, Question
from wavetrain.schedule.schedules import SCHEDULES
from wavetrain.sim.estimate import SCHEDULE_KINDS
from wavetrain.sim.predict import GREEDY
from wavetrain.sim.sweep import distinct

Numbers = NDArray[np.intp]
Flags = NDArray[np.bool_]

MOST_CP = 64
MOST_MICROBATCH = 1024
MOST_PER_RANK = 8  # stages of a rank
MOST_PLAYED_CELLS = 100_000  # stages times microbatches: longer steps are simulated, but not searched
MOST_DRAWN_CELLS = 8_192  # the same where orders look at times; with more microbatches there is no bubble left to fill
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism as columns."""

    tp: Numbers
    cp: Numbers
    pp: Numbers
    dp: Numbers
    microbatch: Numbers
    microbatches: Numbers

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def devices(self) -> Numbers:
        return self.tp * self.cp * self.pp * self.dp

    def take(self, rows: Numbers | Flags) -> Degrees:
        return Degrees(*(getattr(self, item.name)[rows] for item in fields(self)))


def degrees(question: Question) -> Degrees:
    """Every legal combination of degrees: whole nodes, or some devices of one; the batch divides evenly."""
    pins, cluster = question.pins, question.cluster
    total, node = cluster.num_devices, cluster.node.num_devices
    batches = [
        (dp, size, question.global_batch // dp // size)
        for dp in divisors(question.global_batch)
        if dp <= total and pins.dp in (None, dp)
        for size in divisors(question.global_batch // dp)
        if (size <= MOST_MICROBATCH if pins.microbatch is None else size == pins.microbatch)
    ]
    table = np.array(batches, dtype=np.intp).reshape(-1, 3)
    found = []
    for tp in legal_tp(question):
        for cp in legal_cp(question):
            for pp in legal_pp(question, total // (tp * cp)):
                used = table[:, 0] * (tp * cp * pp)
                fits = (used <= total) & ((used % node == 0) | (used < node))
                if pins.devices is not None:
                    fits &= used == pins.devices
                rows = table[fits]
                if len(rows):
                    found.append(np.column_stack([np.broadcast_to((tp, cp, pp), (len(rows), 3)), rows]))
    columns = np.concatenate(found).T if found else np.zeros((6, 0), dtype=np.intp)
    return Degrees(*columns)


def legal_tp(question: Question) -> list[int]:
    """Degrees that deal out whole heads and experts; 1 for a model without attention."""
    operators = [operator for layer in question.model.layers for operator in layer.operators]
    heads = {(o.heads, o.kv_heads) for o in operators if isinstance(o, Attention)}
    experts = {o.experts for o in operators if isinstance(o, Experts)}
    if not heads:
        return [1] if question.pins.tp in (None, 1) else []
    return [
        tp
        for tp in divisors(min(h for h, _ in heads))
        if tp <= question.cluster.num_devices
        and question.pins.tp in (None, tp)
        and all(h % tp == 0 and (kv % tp == 0 or tp % kv == 0) for h, kv in heads)
        and all(number % tp == 0 for number in experts)
    ]


def legal_cp(question: Question) -> list[int]:
    """Powers of two that divide the sequence; a pinned degree need only divide it."""
    legal, pinned = [cp for cp in divisors(question.seq_len) if cp <= question.cluster.num_devices], question.pins.cp
    return [cp for cp in legal if (cp <= MOST_CP and cp & (cp - 1) == 0 if pinned is None else cp == pinned)]


def legal_pp(question: Question, most: int) -> list[int]:
    blocks = question.model.num_blocks if question.model.can_be_cut else 1
    return [pp for pp in range(1, min(blocks, most) + 1) if question.pins.pp in (None, pp)]


@dataclass(frozen=True)
class Options:
    """Degrees (by row number) with the options that do not depend on the schedule, as columns."""

    row: Numbers
    sequence_parallel: Flags
    pp_inside: Flags
    recompute: Numbers
    shard: Numbers
    keep: Flags
    shard_optimizer: Flags

    def __len__(self) -> int:
        return len(self.row)

    def take(self, rows: Numbers | Flags) -> Options:
        return Options(*(getattr(self, item.name)[rows] for item in fields(self)))


def options(question: Question, found: Degrees) -> Options:
    """Every legal option of some degrees."""
    made = []
    columns = (found.tp, found.cp, found.pp, found.dp)
    for number, (tp, cp, pp, dp) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        table = _options(
            _Key(tp, cp, pp, dp, question.cluster.node.num_devices, question.seq_len), _Wanted.of(question)
        )
        if len(table):
            made.append(np.column_stack([np.full(len(table), number), table]))
    columns_of = np.concatenate(made).T if made else np.zeros((7, 0), dtype=np.intp)
    row, sequence, inside, recompute, shard, keep, zero1 = columns_of
    flags = (column.astype(bool) for column in (sequence, inside, keep, zero1))
    sequence_parallel, pp_inside, kept, cut = flags
    return Options(row, sequence_parallel, pp_inside, recompute, shard, kept, cut)


def num_options(question: Question, tp: int, cp: int, pp: int, dp: int) -> int:
    """How many options some degrees have."""
    key = _Key(tp, cp, pp, dp, question.cluster.node.num_devices, question.seq_len)
    return len(_options(key, _Wanted.of(question)))


@dataclass(frozen=True)
class _Key:
    tp: int
    cp: int
    pp: int
    dp: int
    node: int
    seq_len: int


@dataclass(frozen=True)
class _Wanted:
    """What of a question narrows options down."""

    pins: Pins
    only: tuple[str, ...]
    keeps_scores: bool

    @staticmethod
    def of(question: Question) -> _Wanted:
        return _Wanted(question.pins, question.only, question.stack.attention.keeps_scores)


@lru_cache(maxsize=100_000)
def _options(key: _Key, wanted: _Wanted) -> Numbers:
    """Rows of (sequence parallel, pp inside, recompute, shard, keep, shard optimizer)."""
    pins = wanted.pins
    sequences = legal_sequences(key.tp, key.cp, key.seq_len, pins)
    insides = [v for v in (0, 1) if v == 0 or _may_lie_inside(key)]
    insides = [v for v in insides if pins.pp_inside in (None, bool(v))]
    recomputes = [v for v in (0, 1, 2) if pins.recompute == RECOMPUTES[v]]
    if pins.recompute is None:
        recomputes = [0, 1, 2] if wanted.keeps_scores else [0, 2]
    rows = [
        (sequence, inside, recompute, *sharding)
        for sharding in _shardings(key, pins)
        for sequence in sequences
        for inside in insides
        for recompute in recomputes
        if _is_wanted(key, sharding, wanted.only)
    ]
    return np.array(rows, dtype=np.intp).reshape(-1, 6)


def legal_sequences(tp: int, cp: int, seq_len: int, pins: Pins) -> list[int]:
    """Without (0) and with (1) sequence parallelism, where the sequence can be cut so."""
    possible = [0, 1] if tp > 1 and seq_len % (tp * cp) == 0 else [0]
    return [value for value in possible if pins.sequence_parallel in (None, bool(value))]


def _may_lie_inside(key: _Key) -> bool:
    """Whether stages can be neighbours without a pipeline that begins in the middle of a node's."""
    near = key.tp * key.pp
    return key.pp > 1 and key.dp * key.cp > 1 and (key.node % near == 0 or near % key.node == 0)


def _shardings(key: _Key, pins: Pins) -> list[tuple[int, int, int]]:
    """(group, keep, shard optimizer): replicated, optimizer states cut, parameters cut over a group and kept or not."""
    node = node_group(key.node, key.tp, key.cp, key.dp)
    wanted = {"dp": key.dp, "node": node, "none": 1, None: None}.get(pins.shard, pins.shard)  # type: ignore[arg-type]
    found = [(1, 0, 0)] + ([(1, 0, 1)] if key.dp * key.cp > 1 else [])
    found += [(group, keep, 0) for group in divisors(key.dp) if group > 1 for keep in (0, 1)]
    return [
        (group, keep, zero1)
        for group, keep, zero1 in found
        if wanted in (None, group) and pins.keep in (None, bool(keep)) and pins.shard_optimizer in (None, bool(zero1))
    ]


def node_group(node: int, tp: int, cp: int, dp: int) -> int:
    """The most replicas that share a node and divide all of them."""
    most = max(1, min(dp, node // (tp * cp)))
    return max(group for group in divisors(dp) if group <= most)


def end_groups(question: Question, layout: Layout) -> list[int]:
    """Groups that embedding and head may be cut over: none, the node's, all replicas."""
    node = node_group(question.cluster.node.num_devices, layout.tp, layout.cp, layout.dp)
    return sorted({1, node, layout.dp})


def _is_wanted(key: _Key, sharding: tuple[int, int, int], only: tuple[str, ...]) -> bool:
    """Whether some family has such a plan; what a schedule decides is looked at later."""
    if not only:
        return True
    group, keep, zero1 = sharding
    plain = key.tp == key.cp == key.pp == 1
    node = node_group(key.node, key.tp, key.cp, key.dp)
    tests = {
        "ddp": plain and group == 1 and not zero1,
        "zero1": plain and group == 1 and (bool(zero1) or key.dp == 1),
        "zero2": plain and group == key.dp and (bool(keep) or key.dp == 1),
        "fsdp": plain and group == key.dp and not keep,
        "hsdp": plain and group == node and not keep,
        "megatron": group == 1,
        "wave": key.pp > 1,
        "no-pipeline": key.pp == 1,
        "no-tensor": key.tp == 1,
    }
    return any(tests[name] for name in only)


def waves_only(question: Question, found: Degrees, every: Options) -> Flags:
    """Options that only families of wave-like pipelines have."""
    only, own = question.only, found.take(every.row)
    if "wave" not in only:
        return np.zeros(len(every), dtype=bool)
    others = (own.pp == 1) | (("megatron" in only) & (every.shard == 1)) | (("no-tensor" in only) & (own.tp == 1))
    return np.asarray(~others)


@dataclass(frozen=True)
class Order:
    """A schedule with its stages per rank."""

    kind: int  # number in SCHEDULE_KINDS
    per_rank: int
    chunks: int
    waves: int

    @property
    def name(self) -> str:
        return SCHEDULE_KINDS[self.kind]

    @property
    def split(self) -> bool:
        return SCHEDULES[self.name].split


ONE_RANK = Order(SCHEDULE_KINDS.index("1f1b"), 1, 1, 1)


@lru_cache(maxsize=10_000)
def orders(pp: int, microbatches: int, blocks: int, pins: Pins, *, waves: bool = False) -> tuple[Order, ...]:
    """The schedules, or those in waves only, that pp ranks and so many microbatches may run."""
    if pp == 1:
        legal = pins.schedule in (None, "1f1b") and pins.waves in (None, 1) and pins.chunks in (None, 1)
        return (ONE_RANK,) if legal and microbatches <= MOST_PLAYED_CELLS else ()
    found = []
    for name in KINDS:
        schedule = SCHEDULES[name]
        if pins.schedule not in (None, name) or (schedule.even_ranks and pp % 2):
            continue
        if waves and not schedule.waved:
            continue
        for number in range(1, MOST_PER_RANK + 1) if schedule.chunked or schedule.waved else (1,):
            order = _order(name, number)
            if order is not None and _is_legal(order, pp, microbatches, blocks, pins):
                found.append(order)
    return tuple(found)


def _order(name: str, number: int) -> Order | None:
    schedule, kind = SCHEDULES[name], SCHEDULE_KINDS.index(name)
    if schedule.chunked:
        return Order(kind, number, number, 1) if number > 1 else None
    if schedule.waved:
        return Order(kind, 2 * number, 1, number)
    return Order(kind, 2 if name == "zb-v" else 1, 1, 1)


def _is_legal(order: Order, pp: int, microbatches: int, blocks: int, pins: Pins) -> bool:
    stages = pp * order.per_rank
    cells = stages * microbatches
    fits = order.per_rank <= MOST_PER_RANK and stages <= blocks + 2
    played = cells <= (MOST_DRAWN_CELLS if order.name in GREEDY else MOST_PLAYED_CELLS)
    return fits and played and pins.waves in (None, order.waves) and pins.chunks in (None, order.chunks)


def playable(question: Question) -> Degrees:
    """Degrees for which some option and some schedule are legal, whatever they need."""
    known = degrees(question)
    every = options(question, known)
    own, blocks = known.take(every.row), question.model.num_blocks
    shapes, shape = distinct(own.pp, own.microbatches, waves_only(question, known, every))
    found = [bool(orders(pp, m, blocks, question.pins, waves=bool(waves))) for pp, m, waves in shapes.tolist()]
    return known.take(np.unique(every.row[np.array(found, dtype=bool)[shape]]))
