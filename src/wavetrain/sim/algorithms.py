"""Which algorithm each of a plan's collectives runs as: what NCCL would choose for its size and group."""

from __future__ import annotations

from wavetrain.cost.collective import Collective, Span, fastest
from wavetrain.sim.batch import Batch
from wavetrain.sim.ending import replicated_parameters


def algorithms(batch: Batch) -> dict[str, str]:
    """The algorithm of every kind of collective that the first plan of a batch has, by the term it belongs to."""
    tp, stride = float(batch.tp[0]), float(batch.shard_stride[0])
    compute, gradients = batch.precision.compute.num_bytes, batch.precision.gradients.num_bytes
    found = {}
    count = float(batch.mean_block(batch.facts.messages)[0])
    if tp > 1 and count:
        each = float(batch.mean_block(batch.facts.message_elements)[0]) / count * compute
        found["tensor"] = fastest(Collective.ALL_REDUCE, each, Span(tp), batch.tiers)[1]
    part = max(batch.sharded, key=lambda part: float(part.parameters[0].max()), default=None)
    if part is not None and part.parameters[0].max() > 0:
        variant = int(part.parameters[0].argmax())
        size = float(part.parameters[0, variant] / part.collectives[0, variant]) * compute
        span = Span(float(part.group[0, variant]), stride)
        found["sharding"] = fastest(Collective.ALL_GATHER, size, span, batch.tiers)[1]
    whole, group = float(replicated_parameters(batch)[0]), float(batch.data_ranks[0])
    if group > 1 and whole:
        kind = Collective.REDUCE_SCATTER if batch.shard_optimizer[0] else Collective.ALL_REDUCE
        found["reduction"] = fastest(kind, whole * gradients, Span(group, float(batch.data_stride[0])), batch.tiers)[1]
    return found
