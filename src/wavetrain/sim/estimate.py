"""The closed form: what a step takes, in named terms, for a whole `Batch` of plans at once.

Equal to the event simulation where its assumptions hold: stages of one length (or one that is longest), messages that
never queue, at least as many microbatches as ranks. Formulas of the bubble: Narayanan et al. 2021 (1F1B, interleaved),
Qi et al. 2023 (zero bubble), Liu et al. 2023 (waves); each is checked against executed orders by a property test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from wavetrain.cluster.laws import Laws
from wavetrain.cost.collective import Collective, Span, seconds
from wavetrain.cost.compute import stream_seconds
from wavetrain.cost.layers import LayerSeconds, layer_seconds
from wavetrain.cost.overlap import exposed
from wavetrain.sim.batch import Batch, Sharded
from wavetrain.sim.ending import tail_seconds

Floats = NDArray[np.float64]

SCHEDULE_KINDS = (
    "1f1b",
    "gpipe",
    "interleaved",
    "looped-bfs",
    "wave",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "wave-zb",
    "zb-v",
    "chimera",
)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one microbatch in one block, by part; forward, input gradient, weight gradient.

    One entry per plan and variant of blocks, or one per plan for the average block.
    """

    forward_s: Floats
    input_s: Floats
    weight_s: Floats
    recompute_s: Floats
    tensor_f_s: Floats  # visible tensor-parallel communication
    tensor_b_s: Floats  # that of recomputation included
    context_f_s: Floats
    context_b_s: Floats
    shard_f_s: Floats  # visible gathering and scattering of sharded parameters
    shard_b_s: Floats
    slice_f_s: Floats  # lost by products that are computed in slices
    slice_b_s: Floats

    @property
    def f_s(self) -> Floats:
        return self.forward_s + self.slice_f_s + self.tensor_f_s + self.context_f_s + self.shard_f_s

    @property
    def b_s(self) -> Floats:
        return self.i_s + self.weight_s

    @property
    def i_s(self) -> Floats:
        return self.hiding_s - self.weight_s + self.slice_b_s + self.shard_b_s

    @property
    def hiding_s(self) -> Floats:
        """Of a backward, what communication hides behind."""
        return self.input_s + self.weight_s + self.recompute_s + self.tensor_b_s + self.context_b_s


@dataclass(frozen=True)
class EndTimes:
    """Seconds of one microbatch in the embedding or the head."""

    f_s: Floats
    i_s: Floats
    w_s: Floats
    shard_s: Floats  # the part of them that gathers and scatters shards

    @property
    def total_s(self) -> Floats:
        return self.f_s + self.i_s + self.w_s


@dataclass(frozen=True)
class MessageTimes:
    """Seconds of one message between stages: on the wire, and on both hosts."""

    wire_s: Floats
    host_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.wire_s + self.host_s

    def steady_s(self, batch: Batch) -> Floats:
        """What a message adds per microbatch and stage once the pipeline is full.

        Messages that travel beside compute are hidden where a rank has other stages to go on with; with one stage per
        rank the next microbatch waits for them all the same.
        """
        hidden = batch.stack.message_overlap & (batch.stages > 1)
        return np.where(hidden, self.host_s, self.total_s)


@dataclass(frozen=True)
class Estimate:
    """What was found, one entry per plan: named terms that sum to the step."""

    step_s: Floats
    terms: dict[str, Floats]
    block: BlockTimes  # the average one
    variants: BlockTimes
    embedding: EndTimes
    head: EndTimes
    message: MessageTimes
    tail: dict[str, Floats]


def estimate(batch: Batch, laws: Laws) -> Estimate:
    """Price every plan of a batch."""
    times = layer_seconds(batch.facts.table, batch.device, batch.stack, batch.precision, laws)
    variants = block_times(batch, times, laws)
    block = BlockTimes(*(batch.mean(getattr(variants, item.name)) for item in fields(variants)))
    embedding, head = end_times(batch, times, batch.embedding, laws), end_times(batch, times, batch.head, laws)
    host_s = laws.message_s if batch.stack.message_s is None else batch.stack.message_s
    message = MessageTimes(transfer_seconds(batch), np.where(batch.pp > 1, host_s, 0.0))
    tail = tail_seconds(batch, block, laws)
    terms = _pipeline_terms(batch, block, embedding, head, message) | tail
    busy = sum(terms.values(), np.zeros(len(batch.tp)))
    terms["stragglers"] = busy * straggling(batch, laws)
    return Estimate(busy + terms["stragglers"], terms, block, variants, embedding, head, message, tail)


def straggling(batch: Batch, laws: Laws) -> Floats:
    """The share that slow nodes and jitter add: a constant per doubling of the nodes that wait for each other.

    Those are the nodes of one data-parallel group, which ends every step together; stages of a pipeline only wait for
    their neighbours. Fitted: runs of 280 and 512 devices without data parallelism (Korthikanti et al.) are as fast per
    device as single nodes, the same models with it (SC'21) are 8 % slower.
    """
    nodes = np.ceil(batch.data_stride * batch.data_ranks / batch.node_devices)
    return laws.doubling * np.log2(np.maximum(nodes, 1.0))


# --- layers ---


def block_times(batch: Batch, times: LayerSeconds, laws: Laws) -> BlockTimes:
    """Seconds of every variant: kernels or launches, whichever is longer, and what communication shows."""
    of, launch_s = batch.blocks, times.launches * laws.launch_s
    extra_s = np.where(batch.tp > 1, laws.tensor_host_s, 0.0)[:, None]
    forward_s = np.maximum(times.kernels_s[of, 0], launch_s[of, 0] + extra_s)
    input_s = np.maximum(times.kernels_s[of, 1], launch_s[of, 1] + extra_s)
    weight_s = np.maximum(times.kernels_s[of, 2], launch_s[of, 2]) + accumulation_seconds(batch, of, laws)
    backward_s = input_s + weight_s
    needed_s = times.kernels_s[of, 0] - (1 - laws.recompute_tail) * times.tail_s[of]
    again_s = np.maximum(needed_s, launch_s[of, 0] + laws.recompute_host_s)
    gap_s = laws.recompute_gap_s
    parts_s = [again_s + gap_s, times.attention_s[of] + gap_s, times.chosen_s[of]]
    recompute_s = np.select([batch.recompute == kind for kind in (2, 1, 3)], parts_s, 0.0)
    tensor_s, tensor_b_s = tensor_seconds(batch, laws)
    context_f_s, context_b_s = context_seconds(batch, laws)
    compute_b_s = backward_s + recompute_s + tensor_b_s + context_b_s
    lost_s = np.maximum(times.kernels_s[batch.sliced] - times.kernels_s[of], 0.0)
    shard_f_s, shard_b_s = shard_seconds(batch, forward_s + tensor_s + context_f_s, compute_b_s, laws)
    return BlockTimes(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        recompute_s=recompute_s,
        tensor_f_s=tensor_s,
        tensor_b_s=tensor_b_s,
        context_f_s=context_f_s,
        context_b_s=context_b_s,
        shard_f_s=shard_f_s,
        shard_b_s=shard_b_s,
        slice_f_s=lost_s[..., 0],
        slice_b_s=lost_s[..., 1] + lost_s[..., 2],
    )


def accumulation_seconds(batch: Batch, cases: NDArray[np.intp], laws: Laws) -> Floats:
    """Adding a microbatch's weight gradients to what earlier ones left: read, add, write, whatever its length.

    Gradients of sharded parameters are copied into the scatter's buffer instead, which moves as much. Found missing on
    runs with 1,024 tokens per microbatch, which it slows by a tenth.
    """
    moved = batch.facts.parameters[cases] * laws.accumulation * batch.precision.gradients.num_bytes
    return stream_seconds(moved, batch.device)


def end_times(batch: Batch, times: LayerSeconds, case: NDArray[np.intp], laws: Laws) -> EndTimes:
    """Seconds of the embedding or the head, with the collective that tensor parallelism needs there."""
    parts = np.maximum(times.kernels_s, times.launches * laws.launch_s)[case]
    weight_s = parts[:, 2] + accumulation_seconds(batch, case, laws)
    one_s = np.zeros(len(batch.tp))
    if (batch.tp > 1).any():
        size = batch.mean_block(batch.facts.output_elements) * batch.precision.compute.num_bytes
        whole = np.where(batch.sequence_parallel, batch.tp, 1.0)
        one_s = np.asarray(seconds(Collective.ALL_REDUCE, size * whole, Span(batch.tp, 1.0), batch.tiers))
    head = case is batch.head
    forward_s = parts[:, 0] + (0.0 if head else one_s)
    if head and not batch.stack.logits_parallel:
        size = batch.facts.logits[case] * batch.precision.compute.num_bytes
        forward_s = forward_s + seconds(Collective.ALL_GATHER, size, Span(batch.tp, 1.0), batch.tiers)
    if head:
        gather_s, scatter_s = (laws.head_exposed * part_s for part_s in end_shard_seconds(batch, case))
        back_s = gather_s + scatter_s
        return EndTimes(forward_s + gather_s, parts[:, 1] + one_s + back_s, weight_s, gather_s + back_s)
    gather_s, scatter_s = end_shard_seconds(batch, case)
    return EndTimes(forward_s + gather_s, parts[:, 1] + scatter_s, weight_s, gather_s + scatter_s)


def tensor_seconds(batch: Batch, laws: Laws) -> tuple[Floats, Floats]:
    """Visible tensor-parallel communication of one block, forward and backward.

    An all-reduce behind each row cut, and its mirror image in the backward; with sequence parallelism a scatter and a
    gather instead, and one more gather in the backward for the inputs that were kept cut (Korthikanti et al. 2022,
    section 4.2.2). What is recomputed repeats its own of the forward.
    """
    of = batch.blocks
    count, total = batch.facts.messages[of], batch.facts.message_elements[of] * batch.precision.compute.num_bytes
    each = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    shown = laws.tensor_exposed if batch.stack.tensor_overlap else 1.0
    span = Span(batch.tp[:, None], 1.0)
    forward_s = np.asarray(count * seconds(Collective.ALL_REDUCE, each, span, batch.tiers) * shown)
    again = np.where(batch.sequence_parallel[:, None], each, 0.0)
    backward_s = forward_s + count * seconds(Collective.ALL_GATHER, again, span, batch.tiers) * shown
    chosen = batch.facts.repeated_elements[of] * batch.precision.compute.num_bytes
    repeated = np.divide(chosen, total, out=np.zeros_like(total), where=total > 0)
    again_s = forward_s * np.select([batch.recompute == 2, batch.recompute == 3], [1.0, repeated], 0.0)
    return forward_s, backward_s + again_s


def context_seconds(batch: Batch, laws: Laws) -> tuple[Floats, Floats]:
    """Visible exchange of keys and values over the context-parallel group, forward and backward (gather, scatter)."""
    cp, stride = batch.cp[:, None], batch.data_stride[:, None]
    size = batch.facts.context_elements[batch.blocks] * batch.precision.compute.num_bytes * cp
    once_s = np.asarray(seconds(Collective.ALL_GATHER, size, Span(cp, stride), batch.tiers))
    return once_s * laws.context_exposed, 2 * once_s * laws.context_exposed


def shard_seconds(batch: Batch, forward_s: Floats, backward_s: Floats, laws: Laws) -> tuple[Floats, Floats]:
    """Visible gathering before each pass and scattering of gradients, block by block, prefetched one block ahead.

    What is kept is gathered once per step, whatever the number of microbatches. A block of which operators travel by
    themselves shows the network's share as soon as replicas are on several nodes.
    """
    stride, microbatches = batch.shard_stride[:, None], batch.microbatches[:, None]
    gather_f_s, gather_b_s = np.zeros(batch.blocks.shape), np.zeros(batch.blocks.shape)
    crosses, named = np.zeros(batch.blocks.shape, dtype=bool), np.zeros(batch.blocks.shape, dtype=bool)
    for part in batch.sharded:
        gather_s, scatter_s = part_seconds(batch, part)
        gather_f_s = gather_f_s + np.where(part.keep, gather_s / microbatches, gather_s)
        gather_b_s = gather_b_s + np.where(part.keep, 0.0, gather_s) + scatter_s
        crosses |= part.group * stride > batch.node_devices
        named |= part.named
    wide = batch.dp[:, None] * stride > batch.node_devices
    share = np.where(np.where(named, wide, crosses), laws.network_exposed, laws.link_exposed)
    return exposed(gather_f_s, forward_s, share), exposed(gather_b_s, backward_s, share)


def part_seconds(batch: Batch, part: Sharded) -> tuple[Floats, Floats]:
    """Gathering the parameters of a part, and scattering their gradients, in its collectives one after the other.

    Where operators of a block travel by themselves, the others go on at the rate that the whole block would have.
    """
    span, share = Span(part.group, batch.shard_stride[:, None]), part.parameters / part.whole
    partial = bool(np.any((share > 0) & (share < 1)))
    found = []
    for kind, dtype in (
        (Collective.ALL_GATHER, batch.precision.compute),
        (Collective.REDUCE_SCATTER, batch.precision.gradients),
    ):
        whole = np.where(share > 0, part.whole / part.collectives * dtype.num_bytes, 0.0)
        whole_s = np.asarray(seconds(kind, whole, span, batch.tiers))
        if partial:
            start_s = np.asarray(seconds(kind, np.where(share > 0, 1.0, 0.0), span, batch.tiers))
            whole_s = start_s + share * (whole_s - start_s)
        found.append(part.collectives * whole_s)
    return found[0], found[1]


def end_shard_seconds(batch: Batch, case: NDArray[np.intp]) -> tuple[Floats, Floats]:
    """Gathering the embedding before a forward and scattering its gradient after a backward, once per microbatch.

    Nothing runs beside them: one is the first thing in a step, the other the last. The head's hide behind its products
    where anything does (`head_exposed`); its backward gathers it again.
    """
    size, span = batch.facts.parameters[case], Span(batch.end_group, batch.shard_stride)
    gather_s = seconds(Collective.ALL_GATHER, size * batch.precision.compute.num_bytes, span, batch.tiers)
    scatter_s = seconds(Collective.REDUCE_SCATTER, size * batch.precision.gradients.num_bytes, span, batch.tiers)
    return np.asarray(gather_s), np.asarray(scatter_s)


# --- the pipeline ---


def message_bytes(batch: Batch) -> Floats:
    """Bytes between neighbouring stages: a layer's output, cut by tensor parallelism (scatter and gather)."""
    size = batch.mean_block(batch.facts.output_elements) * batch.precision.compute.num_bytes
    return size / np.where(batch.sequence_parallel, 1.0, batch.tp)


def hop_seconds(batch: Batch) -> Floats:
    """One message to the next rank over each tier, innermost first (rows), where that is the nearest they share.

    Where a domain holds several stages, only the devices of the one at its border send beyond it. A domain between
    two others has two borders, but a stage's forwards and backwards take turns, and so do their messages.
    """
    stride, size = batch.stage_stride, message_bytes(batch)
    rows, beneath = [], np.ones_like(stride)
    for tier in batch.tiers:
        apart = np.maximum(stride, beneath)
        reached = (batch.pp > 1) & (2 * apart <= tier.size)
        span = Span(np.where(reached, 2.0, 1.0), np.where(reached, apart, 1.0), together=stride)
        rows.append(np.asarray(seconds(Collective.SEND, size, span, batch.tiers)))
        beneath = np.full_like(stride, tier.size)
    return np.stack(rows) if rows else np.zeros((1, len(stride)))


def transfer_seconds(batch: Batch) -> Floats:
    """The mean message between neighbouring ranks of a pipeline: most stay inside a node, some leave it."""
    stride, left = batch.stage_stride, batch.pp
    total = np.zeros_like(stride)
    for tier, hop_s in zip(batch.tiers, hop_seconds(batch), strict=False):
        domains = np.ceil(batch.pp / np.maximum(tier.size // stride, 1.0))  # hops between them leave this tier
        total = total + (left - domains) * hop_s
        left = domains
    return np.asarray(total / np.maximum(batch.pp - 1, 1.0))


def _pipeline_terms(
    batch: Batch, block: BlockTimes, embedding: EndTimes, head: EndTimes, message: MessageTimes
) -> dict[str, Floats]:
    """The slowest rank's microbatches, by part, and what it waits for."""
    block_s, copies = block.f_s + block.b_s, batch.copies
    head_first = np.where(batch.folded, head.total_s, 0.0)
    first = (batch.first * block_s + embedding.total_s + head_first) / copies
    last = (batch.last * block_s + np.where(batch.folded & (copies == 1), 0.0, head.total_s)) / copies
    whole = batch.num_blocks * block_s + embedding.total_s + head.total_s
    single = batch.pp == 1
    loads = np.stack([first, batch.most / copies * block_s * (batch.pp > 2), last])
    slowest = np.where(single, whole, loads.max(axis=0))
    which = np.where(single, 3, loads.argmax(axis=0))
    blocks = np.choose(which, [batch.first / copies, batch.most / copies, batch.last / copies, batch.num_blocks])
    ends_s = slowest - blocks * block_s
    m = batch.microbatches
    per_block = {
        "compute": block.forward_s + block.input_s + block.weight_s + block.slice_f_s + block.slice_b_s,
        "recompute": block.recompute_s,
        "tensor": block.tensor_f_s + block.tensor_b_s,
        "context": block.context_f_s + block.context_b_s,
        "sharding": block.shard_f_s + block.shard_b_s,
    }
    terms = {name: m * blocks * value for name, value in per_block.items()}
    ends_shard_s = np.where((which == 0) | (which == 3), embedding.shard_s / copies, 0.0)
    terms["compute"] = terms["compute"] + m * (ends_s - ends_shard_s)
    terms["sharding"] = terms["sharding"] + m * ends_shard_s
    terms["bubble"] = bubble_seconds(batch, block, whole, slowest)
    terms["transfer"] = np.where(
        single, 0.0, 2 * (m * batch.stages * message.steady_s(batch) + (batch.pp - 1) * message.total_s)
    )
    return terms


def bubble_seconds(batch: Batch, block: BlockTimes, whole_s: Floats, slowest_s: Floats) -> Floats:
    """Idle time of the slowest rank while the pipeline fills and drains; formulas in units of one stage's work."""
    ranks, per_stage = batch.pp, batch.num_blocks / batch.pp / batch.stages
    f, i, w = per_stage * block.f_s, per_stage * block.i_s, per_stage * block.weight_s
    fill = (whole_s - slowest_s) / batch.stages  # what the other ranks do before and after, one stage each
    idle_ranks = np.maximum(ranks - 1, 1.0)
    uneven = fill - idle_ranks * (f + i + w)  # embedding and head on other ranks
    ahead = batch.microbatches * (slowest_s - whole_s / ranks)  # what both ends on one rank fill of its own idle time
    kinds = {name: batch.schedule == number for number, name in enumerate(SCHEDULE_KINDS)}
    late = np.where(batch.barrier, f, 0.0)  # ranks start one after the other, and so end where none waits for all
    as_h1 = kinds["zb-h1"] | kinds["interleaved-zb"] | (kinds["zb-h2"] & (batch.microbatches < 2 * ranks - 1))
    found = np.select(
        [kinds["wave"], as_h1, kinds["zb-h2"], kinds["wave-zb"] | kinds["zb-v"], kinds["chimera"]],
        [
            idle_ranks * np.maximum(2 * np.maximum(f, i + w) - ahead / idle_ranks, np.maximum(f, i)),
            idle_ranks * np.maximum(np.maximum(f + i - w, i), late) + uneven,
            idle_ranks * np.maximum(np.maximum(f + i - 2 * w, i - f), late),
            idle_ranks * np.maximum(f, i),
            np.maximum(ranks - 2, 0) * np.maximum(f, i + w),
        ],
        fill,
    )
    return np.where(ranks > 1, np.maximum(found, 0.0), 0.0)
