"""DeepSpeed's config, JSON. Source of keys: deepspeed 0.19.8, runtime/config.py and runtime/zero/config.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from wavetrain.base.units import DType
from wavetrain.plan.export.exported import Exported
from wavetrain.plan.export.features import CHOICES, beyond, in_group
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan

EXPRESSED = (*CHOICES, "batch", "tensor", "zero1", "compute", "gradients", "buckets", "reduced_after")
MOST_PIPELINE_STAGE = 1
GROUPS = (
    "zero_hpz_partition_size keeps one more copy of the parameters per group; states stay sharded over all replicas"
)


def write_deepspeed(plan: Plan) -> Exported:
    """Batch, ZeRO stage, precision; the model, its pipeline and its recomputation are code there."""
    during = ("reduced_during",) if zero_stage(plan) else ()  # without ZeRO it reduces after the backward
    expressed = (*EXPRESSED, *during)
    notes = (*beyond(plan, expressed), *_own_notes(plan))
    config = _batch(plan) | {"zero_optimization": _zero(plan)} | _precision(plan)
    if plan.layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.layout.tp}
    if plan.recompute is Recompute.FULL:
        config["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    return Exported("deepspeed", json.dumps(config, indent=2) + "\n", "ds_config.json", notes)


def zero_stage(plan: Plan) -> int:
    """What of a replica is sharded: 0 nothing, 1 states, 2 gradients too, 3 parameters too."""
    if plan.choice.shard == 1:
        return 1 if plan.layout.shard_optimizer else 0
    return 2 if plan.choice.keep and not in_group(plan) else 3


def _batch(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": layout.num_microbatches,
    }


def _zero(plan: Plan) -> dict[str, Any]:
    stage = zero_stage(plan)
    values: dict[str, Any] = {"stage": stage}
    if stage:
        values["overlap_comm"] = plan.stack.gradient_overlap
    if in_group(plan):
        values["zero_hpz_partition_size"] = plan.choice.shard
    if stage and plan.stack.bucket_bytes is not None:  # counted in elements
        values["reduce_bucket_size"] = round(plan.stack.bucket_bytes / plan.precision.gradients.num_bytes)
    return values


def _precision(plan: Plan) -> dict[str, Any]:
    formats = {DType.BF16: "bf16", DType.FP16: "fp16"}
    compute = formats.get(plan.precision.compute)
    values: dict[str, Any] = {compute: {"enabled": True}} if compute else {}
    gradients = plan.precision.gradients.value
    return values | {"communication_data_type": gradients, "data_types": {"grad_accum_dtype": gradients}}


def _own_notes(plan: Plan) -> Iterator[str]:
    choice = plan.choice
    if in_group(plan):
        yield f"groups of {choice.shard} replicas exactly; {GROUPS}"
        if plan.layout.shard_optimizer:
            yield "optimizer states apart from parameters"
    if choice.keep and zero_stage(plan) == 3:
        yield "gathered parameters kept from forward to backward, inside groups"
    if zero_stage(plan) == 2:
        yield "parameters sharded between steps; stage 2 has them whole on every rank all the time"
    if plan.recompute is Recompute.FULL:
        yield "where to recompute: the model must call deepspeed.checkpointing.checkpoint"
    if plan.layout.pp > 1:
        yield f"the stages: code them as PipelineModule(layers, num_stages={plan.layout.pp})"
        if zero_stage(plan) > MOST_PIPELINE_STAGE:
            yield f"stage {zero_stage(plan)} in a pipeline; DeepSpeed's run with stages 0 and 1"
    if plan.precision.compute not in (DType.BF16, DType.FP16, DType.FP32):
        yield f"activations and parameters in {plan.precision.compute.value}"
    if zero_stage(plan) == 0 and plan.stack.bucket_bytes is not None:
        yield "the size of the pieces that gradients are reduced in"
