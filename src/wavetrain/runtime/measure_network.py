"""Times of messages and collectives between the ranks of a `World`: what `wavetrain measure` fits laws to.

Every pass begins on all ranks at a common moment; messages count until the last rank is done. In training one
collective follows another, out of step: two ranks that send to each other begin together only once, and from then on
hold up each other's acknowledgments. So of collectives several follow each other, and the first and the last do not
count. Groups that would be busy at once in training are: all pairs of a host, all rings over hosts. Passes of all kinds
and sizes take turns, so that what else happens on the machine falls on all of them alike; of each the median of the
quicker half of its passes counts.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.base.errors import RunError
from wavetrain.base.units import KIB, MIB
from wavetrain.runtime.chunk import sharpen_timer, wait_until
from wavetrain.runtime.links import on_one_host, own_host
from wavetrain.runtime.samehost import open_same_host
from wavetrain.runtime.samples import Sample
from wavetrain.runtime.settle import settle
from wavetrain.runtime.transport import FORWARD, Grouped, Message, Transport, open_links, ordered, tagged
from wavetrain.runtime.turns import Told
from wavetrain.runtime.world import World, gloo_group

# the calls of FSDP2, under the names that torch has for them from 2.13 on
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ELEMENT_BYTES = 4  # fp32
SIZES = (KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
MOST_NEAR = 4 * MIB  # of messages through memory: what caches hold
QUICK_SIZES = (4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB)
MOST_PASSES = 60
LEAST_COUNTED = 3  # of fewer passes all count, not their quicker half
LEAST_AHEAD_S, MOST_AHEAD_S = 0.5e-3, 20e-3  # from the word to start until the start
SMALL_S = 2e-3  # shorter passes are repeated within a turn
SHORT_S = 8e-3  # a pass that several short collectives fill
FEW, MANY = 3, 20  # collectives that count in a pass: long ones, short ones
PATIENCE_S = 300.0
MOST_S = 20.0  # of all turns: over slow links warming up alone takes seconds
PAIR = 2  # hosts


@dataclass(frozen=True)
class Effort:
    """How much time is given to it."""

    sizes: tuple[int, ...]
    turns_s: float  # for turns, after the first
    pass_s: float  # a kind's next size is left out where a pass took longer
    passes: int = 3  # at least

    def part(self, count: int) -> Effort:
        """Of so many turns one."""
        return replace(self, turns_s=self.turns_s / count, passes=-(-self.passes // count))


FULL = Effort(SIZES, turns_s=12.0, pass_s=0.1)
QUICK = Effort(QUICK_SIZES, turns_s=3.0, pass_s=0.05)


@dataclass(frozen=True)
class Hosts:
    """How ranks lie on hosts: as many on each, one host after the other."""

    count: int
    each: int


class Shape(NamedTuple):
    """What is timed, and between how many."""

    what: str
    num_bytes: int
    ranks: int
    hosts: int

    def sample(self, seconds: float) -> Sample:
        return Sample(self.what, (self.num_bytes,), seconds, "fp32", self.ranks, self.hosts)


@dataclass
class Pass:
    """Something to time; `ready` runs before the common start, `act` from then on; `starts`: not by receiving.

    `counted`: how many in between a first and a last one that are not; 0: there is one, which is.
    """

    shape: Shape
    act: Callable[[], object]
    ready: Callable[[], object] = lambda: None
    starts: bool = True
    counted: int = 0
    took_s: list[float] = field(default_factory=list)


def hosts_of(world: World) -> Hosts:
    """Where all ranks are; RunError where hosts have unequal numbers of them, or ranks of a host are not neighbours."""
    world.store.set(f"measure-host/{world.rank}", f"{socket.gethostname()} {own_host()}")
    names = [world.store.get(f"measure-host/{rank}").decode() for rank in range(world.size)]
    order = list(dict.fromkeys(names))
    each = world.size // len(order)
    if names != [name for name in order for _ in range(each)]:
        counts = ", ".join(str(names.count(name)) for name in order)
        rule = f"hosts must have equal numbers of ranks, one host's after another's; there are {counts} on them"
        raise RunError(f"the network of unequal hosts is not measured: {rule}")
    return Hosts(len(order), each)


def network_samples(world: World, told: Told = lambda *_: None, *, device: str, effort: Effort) -> list[Sample]:
    """All kinds, sizes and groups, over new connections; nothing where there is one rank. All ranks return the same."""
    hosts = hosts_of(world)
    if world.size == 1:
        return []
    settle(world.place if device == "cpu" else None)
    sharpen_timer()
    with _process_groups(world, device):
        timer = _Timer(world, hosts, device)
        passes = _warmed(_kinds(world, hosts, device, effort), timer, effort)
        _take_turns(passes, timer, effort, told)
        timer.together()  # nobody leaves while another still listens
    return [one.shape.sample(_typical(one.took_s)) for one in passes]


def _typical(took_s: Sequence[float]) -> float:
    """The median of the quicker half of a turn's passes: other programs only ever lengthen one."""
    return statistics.median(sorted(took_s)[: max(LEAST_COUNTED, -(-len(took_s) // 2))])


@contextmanager
def _process_groups(world: World, device: str) -> Iterator[None]:
    if device != "cuda":
        with gloo_group(world, timeout_s=PATIENCE_S):
            yield
        return
    torch.cuda.set_device(world.local_rank)
    limit, both = timedelta(seconds=PATIENCE_S), "cpu:gloo,cuda:nccl"  # words to start go over gloo
    dist.init_process_group(both, store=world.store, rank=world.rank, world_size=world.size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- what is timed ---


@dataclass(frozen=True)
class Ring:
    """The group of which this rank is a member; all groups of its shape are busy at once."""

    group: dist.ProcessGroup
    ranks: int
    hosts: int


def _kinds(world: World, hosts: Hosts, device: str, effort: Effort) -> list[list[Pass]]:
    """For each kind and group its passes, smallest first."""
    rings = _rings(world, hosts)
    full, part = (torch.zeros(effort.sizes[-1] // ELEMENT_BYTES, device=device) for _ in range(2))
    made = [
        [_collective(what, ring, size, full, part) for size in effort.sizes]
        for ring in rings
        for what in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    memory = device != "cuda" and on_one_host(world)
    steps = [1] * (hosts.each > 1) + [hosts.each] * (hosts.count > 1)
    sizes = [size for size in effort.sizes if size <= MOST_NEAR or not memory]
    return made + [_sends(world, hosts, step, full, sizes, memory=memory) for step in steps]


def _rings(world: World, hosts: Hosts) -> list[Ring]:
    """Groups of 2, 4, ... neighbours and all of a host; a rank of two hosts, of all; all. All make all groups."""
    every = range(world.size)
    sizes = [2**k for k in range(1, 10) if 2**k < hosts.each and hosts.each % 2**k == 0] + [hosts.each]
    shapes = [([list(every[i : i + n]) for i in every[::n]], n, 1) for n in sizes if n > 1]
    if hosts.count > PAIR and hosts.count % PAIR == 0:
        firsts = [a for a in every if a // hosts.each % PAIR == 0]
        shapes.append(([[a, a + hosts.each] for a in firsts], PAIR, PAIR))
    if hosts.count > 1:
        shapes.append(([list(every[i :: hosts.each]) for i in range(hosts.each)], hosts.count, hosts.count))
        if hosts.each > 1:
            shapes.append(([list(every)], world.size, hosts.count))
    made = []
    for groups, ranks, over in shapes:
        opened = [dist.new_group(members) for members in groups]
        mine = next(i for i, members in enumerate(groups) if world.rank in members)
        made.append(Ring(opened[mine], ranks, over))
    return made


def _collective(what: str, ring: Ring, size: int, full: Tensor, part: Tensor) -> Pass:
    """Exactly the calls of FSDP2 and of gradients' reduction; bytes are those of the full tensor."""
    each = max(1, size // (ELEMENT_BYTES * ring.ranks))
    whole, own = full[: each * ring.ranks], part[:each]
    acts = {
        "all_reduce": partial(dist.all_reduce, whole, group=ring.group),
        "all_gather": partial(_gather, whole, own, group=ring.group),
        "reduce_scatter": partial(_reduce_scatter, own, whole, group=ring.group),
    }
    return Pass(Shape(what, whole.nbytes, ring.ranks, ring.hosts), acts[what], counted=FEW)


def _sends(world: World, hosts: Hosts, step: int, full: Tensor, sizes: Sequence[int], *, memory: bool) -> list[Pass]:
    """Messages from every other rank (or host) to the next, by the transport that training uses."""
    pairs = [(a, a + step) for a in range(world.size - step) if a // step % 2 == 0]
    sent, received = dict(pairs), {b: a for a, b in pairs}
    carrier = _carrier(world, pairs, sizes, memory=memory, nccl=full.is_cuda)

    def one(number: int, size: int) -> Pass:
        tensor, message = full[: size // ELEMENT_BYTES], Message(FORWARD, 0, number)
        told = Pass(Shape("send", tensor.nbytes, 2, 1 if step < hosts.each else 2), lambda: None)
        if world.rank in sent:
            told.act = partial(_send, carrier, message, sent[world.rank], tensor)
        elif world.rank in received:
            told.ready = partial(carrier.post, message, received[world.rank], tensor)
            told.act = partial(carrier.wait, message)
        told.starts = world.rank in sent
        return told

    return [one(number, size) for number, size in enumerate(sizes)]


def _send(carrier: Transport, message: Message, target: int, tensor: Tensor) -> None:
    carrier.send(message, target, tensor)
    carrier.finish()


def _carrier(
    world: World, pairs: list[tuple[int, int]], sizes: Sequence[int], *, memory: bool, nccl: bool
) -> Transport:
    """As `links.carrier` chooses: through memory where all ranks are on one host."""
    if memory:
        crowded = world.size > world.place.num_cores
        return open_same_host(world.rank, world.size, world.store, pairs, most_bytes=sizes[-1], crowded=crowded)
    return Grouped(world.rank, ordered(open_links(pairs)) if nccl else tagged(1, len(sizes)))


# --- how it is timed ---


class _Timer:
    """Starts passes on all ranks at one moment."""

    def __init__(self, world: World, hosts: Hosts, device: str) -> None:
        self._world = world
        self._settle: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self._crowded = device != "cuda" and hosts.each > world.place.num_cores
        self.ahead_s = MOST_AHEAD_S  # from the word to start until the start
        self._shift_s = _clock_shift(world)
        self.ahead_s = self._needed_ahead()

    def together(self) -> None:
        dist.all_reduce(torch.zeros(1))

    def time(self, one: Pass) -> float:
        """Seconds from when the last sender began, which is at the common start, until the last rank is done.

        Of several, what one takes on average over ranks.
        """
        self._world.progress.together()
        one.ready()
        start = torch.tensor([self._now() + self.ahead_s], dtype=torch.float64)
        dist.broadcast(start, 0)
        self._await(start.item())
        one.took_s.append(self._average(one) if one.counted else self._latest(one, start.item()))
        return one.took_s[-1]

    def _latest(self, one: Pass, start_s: float) -> float:
        begun = self._now() - start_s
        one.act()
        self._settle()
        done = self._now() - start_s
        latest = torch.tensor([done, begun if one.starts else -1.0], dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        done, begun = latest.tolist()
        return float(done - begun)

    def _average(self, one: Pass) -> float:
        ends = []
        for _ in range(one.counted + 2):
            one.act()
            self._settle()
            ends.append(self._now())
        took = torch.tensor([(ends[-2] - ends[0]) / one.counted], dtype=torch.float64)
        dist.all_reduce(took)
        return float(took.item()) / self._world.size

    def all_agree(self, wanted: bool) -> bool:
        """What rank 0 wants."""
        word = torch.tensor([int(wanted)])
        dist.broadcast(word, 0)
        return bool(word.item())

    def _now(self) -> float:
        return time.monotonic() - self._shift_s

    def _await(self, moment_s: float) -> None:
        """Ranks that share cores don't spin: they would keep one another from starting."""
        if self._crowded:
            time.sleep(max(0.0, moment_s - self._now()))
        else:
            wait_until(moment_s + self._shift_s)

    def _needed_ahead(self) -> float:
        """Long enough for the word to start to reach all ranks nearly always."""
        empty = Pass(Shape("nothing", 0, 1, 1), lambda: None)
        reached = []
        for _ in range(10):
            self.time(empty)
            begun = self._now()
            self.together()
            reached.append(self._now() - begun)
        need = torch.tensor([2 * statistics.median(reached)], dtype=torch.float64)
        dist.all_reduce(need, dist.ReduceOp.MAX)
        return min(MOST_AHEAD_S, max(LEAST_AHEAD_S, need.item()))


def _clock_shift(world: World) -> float:
    """This rank's monotonic clock minus rank 0's; one kernel has one clock, others are asked over the network."""
    own = _boot()
    world.store.set(f"measure-boot/{world.rank}", own)
    boots = [world.store.get(f"measure-boot/{rank}").decode() for rank in range(world.size)]
    shift_s = 0.0
    for rank in (rank for rank in range(1, world.size) if boots[rank] != boots[0] or not boots[0]):
        if world.rank == 0:
            _tell_time(rank)
        elif world.rank == rank:
            shift_s = _ask_time()
    return shift_s


QUESTIONS = 50


def _tell_time(rank: int) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    for _ in range(QUESTIONS):
        dist.recv(word, rank)
        dist.send(torch.tensor([time.monotonic()], dtype=torch.float64), rank)


def _ask_time() -> float:
    """From the quickest answer, which was on its way for as long as the question."""
    word, found = torch.zeros(1, dtype=torch.float64), []
    for _ in range(QUESTIONS):
        asked = time.monotonic()
        dist.send(word, 0)
        dist.recv(word, 0)
        answered = time.monotonic()
        found.append((answered - asked, (asked + answered) / 2 - word.item()))
    return min(found)[1]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _warmed(kinds: list[list[Pass]], timer: _Timer, effort: Effort) -> list[Pass]:
    """A few passes of each, which are not counted; larger sizes of a kind are left out once one takes too long."""
    kept: list[Pass] = []
    for passes in kinds:
        for one in passes:
            took_s = timer.time(one)  # the same on all ranks
            if took_s < SHORT_S:
                took_s = min(timer.time(one) for _ in range(2))
                one.counted = min(MANY, max(FEW, int(SHORT_S / took_s))) if one.counted else 0
            elif took_s > effort.pass_s:  # the first may open a connection
                took_s = min(took_s, timer.time(one))
            one.took_s.clear()
            kept.append(one)
            if took_s > effort.pass_s:
                break
    return kept


def _take_turns(passes: list[Pass], timer: _Timer, effort: Effort, told: Told) -> None:
    begun = time.monotonic()
    for turn in range(MOST_PASSES):
        share = min(1.0, (time.monotonic() - begun) / effort.turns_s)
        if turn >= effort.passes and not timer.all_agree(share < 1.0):
            break
        told("network", share)
        for one in passes if turn % 2 else reversed(passes):
            took_s = timer.time(one)
            if took_s < SMALL_S:
                timer.time(one)
                timer.time(one)
    told("network", 1.0)
