"""Hugging Face accelerate's config, YAML, with FSDP2. Source of keys: accelerate 1.15.0, commands/config/cluster.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from wavetrain.base.units import DType
from wavetrain.plan.export.exported import Exported, comments
from wavetrain.plan.export.features import CHOICES, beyond
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan

EXPRESSED = (*CHOICES, "devices", "tensor", "context", "compute", "fp8", "reduced_during")
FORMATS = {DType.BF16: "bf16", DType.FP16: "fp16", DType.FP32: "no"}


def write_accelerate(plan: Plan) -> Exported:
    """Processes, precision, sharding, tensor and context parallelism; the batch is the script's."""
    full = plan.recompute is Recompute.FULL
    notes = (*beyond(plan, (*EXPRESSED, "recompute") if full else EXPRESSED), *_own_notes(plan))
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(plan),
        "mixed_precision": "fp8" if plan.precision.products is DType.FP8 else FORMATS.get(plan.precision.compute, "no"),
        "num_machines": plan.cluster.num_nodes,
        "num_processes": plan.layout.num_devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if plan.cluster.num_nodes == 1 else "c10d",
    }
    if plan.precision.products is DType.FP8:
        values["fp8_config"] = {"fp8_backend": "TE"}
    if values["distributed_type"] == "FSDP":
        values |= {"fsdp_config": _fsdp(plan, full), "parallelism_config": _parallelism(plan)}
    title = f"accelerate: {plan.model.name} on {plan.cluster.name}"
    if plan.cluster.num_nodes > 1:
        title += "; each machine has its own machine_rank, and main_process_ip is the first of them"
    text = yaml.safe_dump(values, sort_keys=False)
    return Exported("accelerate", comments(title, notes) + text, "accelerate.yaml", notes)


def _kind(plan: Plan) -> str:
    layout = plan.layout
    if layout.num_devices == 1:
        return "NO"
    plain = plan.choice.shard == 1 and layout.tp * layout.cp == 1
    return "MULTI_GPU" if plain else "FSDP"


def _fsdp(plan: Plan, full: bool) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": not (plan.choice.keep or _refused(plan)),
        "fsdp_activation_checkpointing": full,
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _parallelism(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    shard = layout.dp if _refused(plan) else plan.choice.shard
    values: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": layout.dp * layout.pp // shard,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": layout.tp,
        "parallelism_config_cp_size": layout.cp,
    }
    if layout.cp > 1:
        values["parallelism_config_cp_comm_strategy"] = "allgather"
    return values


def _refused(plan: Plan) -> bool:
    """It has no plain replicas beside tensor or context parallelism."""
    return plan.choice.shard == 1 and plan.layout.dp > 1 and plan.layout.tp * plan.layout.cp > 1


def _own_notes(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.num_microbatches > 1:
        yield f"accumulation: Accelerator(gradient_accumulation_steps={layout.num_microbatches}) in the script"
    if layout.pp > 1:
        yield f"what the {layout.pp} stages are for; they are replicas here, the nearest it can do"
    if _refused(plan):
        yield f"{layout.dp} plain replicas beside tensor or context parallelism; here they are sharded, and kept"
    if layout.cp > 1 and plan.choice.shard > 1:
        yield "sharding over replicas alone; accelerate shards over replicas and context ranks together"
    if plan.precision.compute not in FORMATS:
        yield f"activations and parameters in {plan.precision.compute.value}"
    if plan.precision.products not in (plan.precision.compute, DType.FP8):
        yield f"matrix products in {plan.precision.products.value}"
