"""What a plan says, feature by feature. An exporter names the ones it has words for; the others are told to the user.

Numbers that only describe how fast known software is (time per message, copies of what is kept) are no features: no
program can be set to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from wavetrain.base.units import DType
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Recompute
from wavetrain.plan.plan import EVERY, OperatorChoice, Plan

ADAM_BYTES = 12  # fp32 master copy and two moments
MOST_NAMED = 3


def beyond(plan: Plan, expressed: Collection[str]) -> tuple[str, ...]:
    """A sentence for every feature that a plan makes use of and a target does not express."""
    unknown = set(expressed) - set(FEATURES)
    assert not unknown, unknown
    found = (said(plan) for name, said in FEATURES.items() if name not in expressed)
    return tuple(sentence for sentence in found if sentence)


def all_choices(plan: Plan) -> Iterator[Choice]:
    yield plan.choice
    yield from (item.choice for item in plan.choices)


def in_group(plan: Plan) -> bool:
    """Whether parameters are sharded inside groups and replicated across them."""
    return 1 < plan.choice.shard < plan.layout.dp


def is_even(plan: Plan) -> bool:
    return plan.cut == even_cut(plan.model.num_blocks, len(plan.cut))


def in_order(plan: Plan) -> str:
    """A schedule in words: its name and what it is asked for."""
    layout = plan.layout
    waves = f", {layout.waves} waves" if layout.waves > 1 else ""
    chunks = f", {layout.chunks} stages per rank" if layout.chunks > 1 else ""
    return f"{layout.schedule}{waves}{chunks}"


def _cut(plan: Plan) -> str:
    return "" if is_even(plan) else f"layers per stage {', '.join(map(str, plan.cut))}"


def _rank_order(plan: Plan) -> str:
    inside = plan.layout.pp_inside and plan.layout.pp > 1 and plan.layout.dp * plan.layout.cp > 1
    return "ranks numbered tp, pp, cp, dp: stages are neighbours" if inside else ""


def _choices(plan: Plan) -> str:
    own = [item for item in plan.choices if item.choice != plan.choice or item.operator != EVERY]
    if not own:
        return ""
    more = f" and {len(own) - MOST_NAMED} more" if len(own) > MOST_NAMED else ""
    return f"choices of their own: {'; '.join(map(_own_choice, own[:MOST_NAMED]))}{more}"


def _own_choice(item: OperatorChoice) -> str:
    name = f"all of {item.layer}" if item.operator == EVERY else item.operator
    end = "" if item.count is None else str(item.first + item.count - 1)
    blocks = f" of blocks {item.first} to {end or 'the last'}" if item.first or end else ""
    choice = item.choice
    kept = ", kept" if choice.keep else ""
    slices = f", {choice.slices} slices" if choice.slices > 1 else ""
    again = ", recomputed" if choice.recompute else ""
    return f"{name}{blocks}: shard {choice.shard}{kept}{slices}{again}"


def _slices(plan: Plan) -> str:
    most = max(choice.slices for choice in all_choices(plan))
    return f"operators gathered and used in up to {most} slices" if most > 1 else ""


def _operator_recompute(plan: Plan) -> str:
    chosen = plan.recompute is Recompute.NONE and any(choice.recompute for choice in all_choices(plan))
    return "recomputation of single operators" if chosen else ""


def _fp8(plan: Plan) -> str:
    products, compute = plan.precision.products, plan.precision.compute
    return "" if products is compute else f"matrix products in {products.value}, all else in {compute.value}"


def _reduction(plan: Plan, *, during: bool) -> str:
    if plan.layout.dp == 1 or plan.stack.gradient_overlap != during:
        return ""
    return "gradients reduced while the backward runs" if during else "gradients reduced after the backward"


def _batch(plan: Plan) -> str:
    return f"{plan.layout.global_batch} sequences per step, {plan.layout.microbatch} per microbatch"


def _kernels(plan: Plan) -> str:
    return f"{plan.stack.elementwise.value} elementwise kernels, {plan.stack.norm.value} norms"


def _if(holds: bool, sentence: str) -> str:
    return sentence if holds else ""


FEATURES: dict[str, Callable[[Plan], str]] = {
    "model": lambda plan: f"the model itself, {plan.model.name}",
    "devices": lambda plan: f"{plan.layout.num_devices} devices",
    "batch": _batch,
    "length": lambda plan: f"sequences of {plan.seq_len} tokens",
    "replicas": lambda plan: _if(plan.layout.dp > 1, f"{plan.layout.dp} replicas"),
    "tensor": lambda plan: _if(plan.layout.tp > 1, f"tensor parallelism over {plan.layout.tp} ranks"),
    "sequence": lambda plan: _if(plan.layout.sequence_parallel, "sequence parallelism"),
    "context": lambda plan: _if(plan.layout.cp > 1, f"context parallelism over {plan.layout.cp} ranks"),
    "pipeline": lambda plan: _if(plan.layout.pp > 1, f"a pipeline of {plan.layout.pp} ranks"),
    "schedule": lambda plan: _if(plan.layout.pp > 1 or plan.layout.schedule != "1f1b", f"schedule {in_order(plan)}"),
    "cut": _cut,
    "rank_order": _rank_order,
    "zero1": lambda plan: _if(plan.layout.shard_optimizer, "optimizer states sharded over all replicas (ZeRO-1)"),
    "shard": lambda plan: _if(plan.choice.shard > 1, f"parameters sharded over {plan.choice.shard} replicas"),
    "group": lambda plan: _if(
        in_group(plan), f"a copy of the parameters in each group of {plan.choice.shard} of {plan.layout.dp} replicas"
    ),
    "keep": lambda plan: _if(plan.choice.keep, "gathered parameters kept from forward to backward"),
    "choices": _choices,
    "slices": _slices,
    "recompute": lambda plan: _if(
        plan.recompute is not Recompute.NONE, f"{plan.recompute.value} recomputation of activations"
    ),
    "operator_recompute": _operator_recompute,
    "attention": lambda plan: f"attention kernel {plan.stack.attention.value}",
    "kernels": _kernels,
    "compute": lambda plan: f"activations and parameters in {plan.precision.compute.value}",
    "fp8": _fp8,
    "gradients": lambda plan: f"gradients in {plan.precision.gradients.value}",
    "states": lambda plan: _if(
        plan.precision.state_bytes != ADAM_BYTES,
        f"{plan.precision.state_bytes} bytes of optimizer states per parameter",
    ),
    "reduced_during": lambda plan: _reduction(plan, during=True),
    "reduced_after": lambda plan: _reduction(plan, during=False),
    "tensor_overlap": lambda plan: _if(
        plan.stack.tensor_overlap and plan.layout.tp > 1, "tensor-parallel collectives beside their products"
    ),
    "message_overlap": lambda plan: _if(
        plan.stack.message_overlap and plan.layout.pp > 1, "messages between stages while both ends compute"
    ),
    "whole_logits": lambda plan: _if(
        not plan.stack.logits_parallel and plan.layout.tp > 1, "the vocabulary projection whole on every rank"
    ),
    "buckets": lambda plan: _if(
        plan.stack.bucket_bytes is not None, f"gradients reduced in pieces of {plan.stack.bucket_bytes or 0:,.0f} bytes"
    ),
    "no_barrier": lambda plan: _if(not plan.stack.barrier, "an optimizer step without waiting for all ranks"),
}

CHOICES = ("replicas", "shard", "group", "keep")
BF16_OR_FP32 = (DType.BF16, DType.FP32)
