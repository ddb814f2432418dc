"""What people run today, each as a function from a question to the plan it leads to: what a search must never lose to.

Every family has the rules of thumb of its users and nothing of ours, except that the simulator says what fits. Pins and
wishes of the question are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.cluster import Tier
from wavetrain.cost.collective import Collective, Span, seconds
from wavetrain.cost.memory import state_bytes
from wavetrain.model.limits import divisors
from wavetrain.model.operator import num_parameters
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import EVERY, OperatorChoice, Plan, num_stages
from wavetrain.planner.question import Pins, Question
from wavetrain.planner.space import legal_tp, node_group
from wavetrain.sim.estimate import estimate
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import saved_bytes
from wavetrain.sim.predict import MOST_CELLS, outline
from wavetrain.sim.stages import block_order, static_bytes

Family = Callable[[Question], Plan | None]

RECOMPUTES = (Recompute.NONE, Recompute.FULL)  # in the order of preference


# --- what all of them do ---


def most_replicas(question: Question, ranks: int) -> int:
    """The most replicas of so many ranks that share the batch evenly on whole nodes, or on some devices of one."""
    total, node = question.cluster.num_devices, question.cluster.node.num_devices
    used = {dp: dp * ranks for dp in divisors(question.global_batch)}
    return max((dp for dp, n in used.items() if n <= total and (n % node == 0 or n < node)), default=0)


def microbatch_sizes(question: Question, dp: int, *, most: int | None = None) -> list[int]:
    """Powers of two that divide what one replica gets, the largest first."""
    each = question.global_batch // dp
    powers = (1 << bit for bit in reversed(range(each.bit_length())))
    return [size for size in powers if each % size == 0 and (most is None or size <= most)]


def drawn_up(
    question: Question, layout: Layout, *, choice: Choice | None = None, recompute: Recompute = Recompute.NONE
) -> Plan:
    """The plan of a layout, cut evenly."""
    return Plan(
        model=question.model,
        cluster=question.cluster.part(layout.num_devices),
        layout=layout,
        cut=even_cut(question.model.num_blocks, num_stages(layout)),
        seq_len=question.seq_len,
        recompute=recompute,
        choice=choice or Choice(),
        stack=question.stack,
        precision=question.precision,
    )


def fits(question: Question, plan: Plan) -> bool:
    """Whether a plan fits into memory; states that do not are noticed before anything is simulated."""
    if plan.placement.num_stages * plan.layout.num_microbatches > MOST_CELLS:
        return False
    static = np.asarray(sum(static_bytes(plan, gather([plan]), question.laws).values()))
    if static.max() > question.capacity_bytes:
        return False
    return outline(plan, question.laws).needed_bytes <= question.capacity_bytes


def first_that_fits(question: Question, plans: Iterable[Plan]) -> Plan | None:
    return next((plan for plan in plans if fits(question, plan)), None)


# --- data parallelism, all parameters treated alike ---


def data_parallel(question: Question, choice_of: Callable[[Question, int], Choice]) -> Plan | None:
    """Replicas on all devices, the largest microbatch that fits; activations are recomputed only where none does."""
    choice = choice_of(question, most_replicas(question, 1))
    plans = (plan for recompute in RECOMPUTES for plan in replica_plans(question, choice, recompute))
    return first_that_fits(question, plans)


def replica_plans(question: Question, choice: Choice, recompute: Recompute) -> Iterator[Plan]:
    """Plans of nothing but replicas, the largest microbatch first."""
    dp = most_replicas(question, 1)
    for size in microbatch_sizes(question, dp):
        layout = Layout(global_batch=question.global_batch, microbatch=size, dp=dp)
        yield drawn_up(question, layout, choice=choice, recompute=recompute)


def replicated(_question: Question, _dp: int) -> Choice:
    return Choice()


def kept(_question: Question, dp: int) -> Choice:
    return Choice(shard=dp, keep=dp > 1)


def freed(_question: Question, dp: int) -> Choice:
    return Choice(shard=dp)


def freed_in_node(question: Question, dp: int) -> Choice:
    return Choice(shard=node_group(question.cluster.node.num_devices, 1, 1, dp))


ddp: Family = partial(data_parallel, choice_of=replicated)
zero2: Family = partial(data_parallel, choice_of=kept)
zero3: Family = partial(data_parallel, choice_of=freed)  # what FSDP does by default
hsdp: Family = partial(data_parallel, choice_of=freed_in_node)


# --- DeepCompile: which parameters stay gathered ---

MARGIN = 0.1  # share of the memory that is left free


def deepcompile(question: Question) -> Plan | None:
    """ZeRO-3, and as many blocks kept gathered as profiled memory has room for, the slowest to gather per byte first.

    DeepSpeed's selective gather: greedy, until the first that does not fit.
    """
    plan = zero3(question)
    if plan is None or plan.layout.dp == 1:
        return plan
    room = (1 - MARGIN) * question.capacity_bytes - outline(plan, question.laws).needed_bytes
    chosen: list[int] = []
    for number, num_bytes in slowest_first(plan):
        room -= num_bytes
        if room < 0:
            break
        chosen.append(number)
    stays = Choice(shard=plan.layout.dp, keep=True)
    plans = (replace(plan, choices=chosen_blocks(plan, chosen[:n], stays)) for n in range(len(chosen), -1, -1))
    return first_that_fits(question, plans)


def slowest_first(plan: Plan) -> list[tuple[int, float]]:
    """Blocks and their bytes by the seconds that gathering takes per byte, descending; equal ones in order."""
    layout, format_bytes = plan.layout, plan.precision.compute.num_bytes
    sizes, pace = {}, {}
    for name in plan.model.block_counts:
        size = sum(map(num_parameters, plan.model.by_name[name].operators)) * format_bytes
        gather_s = seconds(Collective.ALL_GATHER, size, Span(layout.dp, layout.data_stride), plan.cluster.tiers)
        sizes[name], pace[name] = size, float(gather_s) / max(size, 1)
    names = [variant.layer for variant in plan.blocks]
    ranking = sorted(range(len(names)), key=lambda number: (-pace[names[number]], number))
    return [(number, sizes[names[number]]) for number in ranking]


def chosen_blocks(plan: Plan, numbers: Iterable[int], choice: Choice) -> tuple[OperatorChoice, ...]:
    """One choice for some blocks; neighbours of a kind are named together."""
    names = [variant.layer for variant in plan.blocks]
    listed = sorted(numbers)
    starts = [0] + [i + 1 for i, (a, b) in enumerate(pairwise(listed)) if b != a + 1 or names[a] != names[b]]
    runs = [listed[a:b] for a, b in pairwise([*starts, len(listed)]) if a < b]
    return tuple(OperatorChoice(names[run[0]], EVERY, choice, run[0], len(run)) for run in runs)


# --- Megatron-LM: tensor, pipeline and data parallelism ---

MOST_MICROBATCH = 8
CHUNKS = 2


def megatron(question: Question) -> Plan | None:
    """Tensor parallelism up to the node before pipelines across nodes, no more of either than memory asks for.

    Narayanan et al. 2021, takeaways 1 to 3; sequence parallelism and the distributed optimizer always; interleaved in
    two chunks where layers and microbatches divide evenly and it fits.
    """
    plans = (plan for again in RECOMPUTES for plan in megatron_plans(question, again))
    plan = first_that_fits(question, plans)
    return plan and (first_that_fits(question, interleaved(question, plan)) or plan)


def megatron_plans(question: Question, recompute: Recompute) -> Iterator[Plan]:
    """Plans in the order in which they are tried."""
    for tp, pp in megatron_degrees(question):
        dp = most_replicas(question, tp * pp)
        for size in microbatch_sizes(question, dp, most=MOST_MICROBATCH) if dp else ():
            layout = Layout(
                global_batch=question.global_batch,
                microbatch=size,
                tp=tp,
                sequence_parallel=tp > 1 and question.seq_len % tp == 0,
                dp=dp,
                pp=pp,
                shard_optimizer=dp > 1,
            )
            yield drawn_up(question, layout, recompute=recompute)


def megatron_degrees(question: Question) -> Iterator[tuple[int, int]]:
    """(tp, pp): tensor parallelism grows inside the node, then stages that share the blocks evenly are added."""
    node, model = question.cluster.node.num_devices, question.model
    widths = [tp for tp in legal_tp(replace(question, pins=Pins())) if node % tp == 0]
    yield from ((tp, 1) for tp in widths)
    deeper = divisors(model.num_blocks)[1:] if model.can_be_cut else ()
    yield from ((widths[-1], pp) for pp in deeper)


def interleaved(question: Question, plan: Plan) -> Iterator[Plan]:
    """The same plan with two stages per rank, where Megatron-LM allows it."""
    layout = plan.layout
    even = question.model.num_blocks % (CHUNKS * layout.pp) == 0 and layout.num_microbatches % layout.pp == 0
    if layout.pp > 1 and even:
        looped = replace(layout, schedule="interleaved", chunks=CHUNKS)
        yield drawn_up(question, looped, recompute=plan.recompute)


# --- OSDP: replicated or sharded, block by block, by an additive model ---

MB = 2**20
FIXED_MB = 800  # that the artifact takes off the limit
LIMITS = tuple(1 - 0.05 * step for step in range(20))  # of the memory; lower where its plan does not fit after all


@dataclass(frozen=True)
class Unit:
    """What OSDP decides about, for one microbatch: replicated (DP) or sharded over all and freed (ZDP)."""

    whole_mb: int  # states and activations if replicated
    shard_mb: int  # and if sharded
    gathered_mb: int  # while it runs, if sharded
    whole_s: float
    shard_s: float


@dataclass(frozen=True)
class Decision:
    """Which units are sharded, and what OSDP's own model says of one microbatch."""

    time_s: float
    sharded: tuple[bool, ...]


def osdp(question: Question) -> Plan | None:
    """The plan of OSDP's search (Jiang et al. 2023): blocks replicated or sharded, by its own model of time and memory.

    It picks the microbatch of the best throughput, as the paper does (the artifact takes the shortest time). Where the
    simulator does not let its plan fit, it gets less memory to plan with, and less, until it does.
    """
    sharded = Choice(shard=most_replicas(question, 1))
    for recompute in RECOMPUTES:
        profiles = [(plan, osdp_units(question, plan)) for plan in replica_plans(question, sharded, recompute)]
        found = first_that_fits(question, osdp_plans(question, profiles))
        if found:
            return found
    return None


def osdp_plans(question: Question, profiles: list[tuple[Plan, list[Unit]]]) -> Iterator[Plan]:
    """Its best plan for every limit, from all of the memory down."""
    for share in LIMITS:
        limit_mb = int(share * question.capacity_bytes / MB) - FIXED_MB
        decisions = ((decide(units, limit_mb), plan) for plan, units in profiles)
        timed = [(plan.layout.num_microbatches * d.time_s, d, plan) for d, plan in decisions if d is not None]
        if not timed:
            return
        _, best, plan = min(timed, key=lambda item: item[0])
        yield replace(plan, choices=replicated_units(plan, best.sharded))


def osdp_units(question: Question, plan: Plan) -> list[Unit]:
    """Blocks, and embedding and head as one, as OSDP's profiler and its formulas see them."""
    batch, laws, dp = gather([plan]), question.laws, plan.layout.dp
    found, saved = estimate(batch, laws), saved_bytes(batch, laws)
    link = Link.measured(dp, plan.cluster.tiers)
    times = found.variants
    compute_s = (times.forward_s + times.input_s + times.weight_s + times.recompute_s)[0]
    parameters = batch.facts.parameters
    ends_s = found.embedding.total_s + found.head.total_s - found.embedding.shard_s
    kinds = [*zip(parameters[batch.blocks[0]], saved.block[0], compute_s, strict=True)]
    ends = (
        float((parameters[batch.embedding] + parameters[batch.head])[0]),
        float((saved.embedding + saved.head)[0]),
        float(ends_s[0]),
    )
    cases = [kinds[number] for number in block_order(plan)] + [ends]
    return [_unit(plan, link, *case) for case in cases]


@dataclass(frozen=True)
class Link:
    """A ring over all ranks: seconds of one step, and per byte."""

    ranks: int
    alpha_s: float
    beta_s: float

    @staticmethod
    def measured(ranks: int, tiers: tuple[Tier, ...]) -> Link:
        """The line through a short and a long gather, which is how such constants are profiled."""
        if ranks == 1:
            return Link(1, 0.0, 0.0)
        short, long = float(MB), 1024.0 * MB
        short_s, long_s = (float(seconds(Collective.ALL_GATHER, size, Span(ranks, 1), tiers)) for size in (short, long))
        per_byte_s = (long_s - short_s) / (long - short)
        return Link(ranks, (short_s - short * per_byte_s) / (ranks - 1), per_byte_s * ranks / (ranks - 1))

    def rounds_s(self, rounds: int, num_bytes: float) -> float:
        return rounds * (self.ranks - 1) * (self.alpha_s + num_bytes * self.beta_s / self.ranks)


def _unit(plan: Plan, link: Link, parameters: float, activations: float, compute_s: float) -> Unit:
    """Two rounds of communication replicated, three sharded, none hidden; memory in whole MB, cut off as they do."""
    whole, none = np.array(parameters), np.array(0.0)
    states = float(sum(state_bytes(whole, none, plan.precision, np.array(1.0))))
    weights = parameters * plan.precision.compute.num_bytes
    return Unit(
        whole_mb=int((states + activations) / MB),
        shard_mb=int((states / link.ranks + activations) / MB),
        gathered_mb=int(weights / MB),
        whole_s=compute_s + link.rounds_s(2, weights),
        shard_s=compute_s + link.rounds_s(3, weights),
    )


def decide(units: list[Unit], limit_mb: int) -> Decision | None:
    """The least time of the additive model in so much memory: states and activations of all, and the largest gather.

    A forward dynamic programme over whole MB, once for every size that the largest gather may have.
    """
    found = [_within(units, limit_mb, most) for most in sorted({0, *(unit.gathered_mb for unit in units)})]
    return min((decision for decision in found if decision), key=lambda decision: decision.time_s, default=None)


def _within(units: list[Unit], limit_mb: int, most_gathered_mb: int) -> Decision | None:
    """The least time where no gather is larger than so much."""
    room = limit_mb - most_gathered_mb
    if room < 0:
        return None
    least = np.zeros(room + 1)  # seconds of the units so far, for every memory that they may take
    picked = np.zeros((len(units), room + 1), dtype=bool)
    for number, unit in enumerate(units):
        whole_s = _after(least, unit.whole_mb, unit.whole_s)
        small = unit.gathered_mb <= most_gathered_mb
        shard_s = _after(least, unit.shard_mb, unit.shard_s) if small else np.full(room + 1, np.inf)
        picked[number] = shard_s < whole_s
        least = np.minimum(whole_s, shard_s)
    if not np.isfinite(least[room]):
        return None
    sharded, at = [], room
    for unit, cells in zip(reversed(units), picked[::-1], strict=True):
        sharded.append(bool(cells[at]))
        at -= unit.shard_mb if sharded[-1] else unit.whole_mb
    return Decision(float(least[room]), tuple(reversed(sharded)))


def _after(least: NDArray[np.float64], taken_mb: int, time_s: float) -> NDArray[np.float64]:
    """The least time if one more unit takes so much memory and so long."""
    moved = np.full_like(least, np.inf)
    moved[taken_mb:] = least[: max(len(least) - taken_mb, 0)] + time_s
    return moved


def replicated_units(plan: Plan, sharded: tuple[bool, ...]) -> tuple[OperatorChoice, ...]:
    """Choices of the units that a plan of sharded ones replicates; the last unit is embedding and head."""
    *blocks, ends = sharded
    names = [] if ends or not plan.model.can_be_cut else [layer.name for layer in plan.model.ends]
    whole = [number for number, cut in enumerate(blocks) if not cut]
    return (*chosen_blocks(plan, whole, Choice()), *(OperatorChoice(name, EVERY, Choice()) for name in names))


FAMILY_PLANS: dict[str, Family] = {
    "ddp": ddp,
    "zero2": zero2,
    "zero3": zero3,
    "hsdp": hsdp,
    "deepcompile": deepcompile,
    "megatron": megatron,
    "osdp": osdp,
}
