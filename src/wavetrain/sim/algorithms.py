"""Which algorithm each of a plan's collectives runs as: what NCCL would choose for its size and group."""

from __future__ import annotations

from wavetrain.cost.collective import Collective, Span, fastest
from wavetrain.sim.batch import Batch
from wavetrain.sim.estimate import replicated_parameters


def algorithms(batch: Batch) -> dict[str, str]:
    """The algorithm of every kind of collective that the first plan of a batch has, by the term it belongs to."""
    tp, stride = float(batch.tp[0]), float(batch.tp[0] * batch.cp[0])
    compute, gradients = batch.precision.compute.num_bytes, batch.precision.gradients.num_bytes
    found = {}
    count = float(batch.mean_block(batch.facts.messages)[0])
    if tp > 1 and count:
        each = float(batch.mean_block(batch.facts.message_elements)[0]) / count * compute
        found["tensor"] = fastest(Collective.ALL_REDUCE, each, Span(tp), batch.tiers)[1]
    part = max(batch.sharded, key=lambda part: float(part.parameters[0]), default=None)
    if part is not None and part.group[0] > 1:
        size = float(part.parameters[0] / part.collectives[0]) * compute
        found["sharding"] = fastest(Collective.ALL_GATHER, size, Span(float(part.group[0]), stride), batch.tiers)[1]
    whole, group = float(replicated_parameters(batch)[0]), float(batch.data_ranks[0])
    if group > 1 and whole:
        kind = Collective.REDUCE_SCATTER if batch.shard_optimizer[0] else Collective.ALL_REDUCE
        found["reduction"] = fastest(kind, whole * gradients, Span(group, tp), batch.tiers)[1]
    return found
