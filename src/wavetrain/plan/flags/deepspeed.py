"""A plan from a DeepSpeed config, for a model, a cluster and whatever else the config does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wavetrain.base.document import Node, read_document
from wavetrain.base.errors import nearest
from wavetrain.base.fields import Fields
from wavetrain.cluster.cluster import Cluster
from wavetrain.model.limits import closest, divisors
from wavetrain.model.model import Model
from wavetrain.plan.plan import Plan
from wavetrain.plan.request import Request, plan_of

AUTO = "auto"  # what Hugging Face's trainer fills in
FORMATS = ("fp32", "bf16", "fp16")
WRITTEN = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
HALVES = ("bf16", "bfloat16", "fp16")
READ = (
    *(*BATCH, *HALVES, "zero_optimization", "communication_data_type", "data_types"),
    *("tensor_parallel", "pipeline"),
)
NO_BEARING = (
    *("optimizer", "scheduler", "steps_per_print", "wall_clock_breakdown", "gradient_clipping", "dump_state"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("flops_profiler", "comms_logger", "checkpoint", "dataloader_drop_last", "memory_breakdown", "prescale_gradients"),
    *("gradient_predivide_factor", "activation_checkpointing", "seed", "monitor_config"),
)
ZERO_UNPRICED = (
    *("offload_optimizer", "offload_param", "zero_hpz_partition_size", "zero_quantized_weights"),
    *("zero_quantized_gradients", "mics_hierarchical_params_gather", "cpu_offload"),
)
MOST_STAGE = 3


def plan_of_deepspeed(
    path: Path | str, *, model: Model, cluster: Cluster, options: Mapping[str, Any] | None = None
) -> tuple[Plan, list[str]]:
    """The plan that a config means, and a line for each key that was not looked at.

    `options` are a `Request`'s: what a config can't say (pp, cp, recompute, seq_len ...), and its batch where it
    leaves that to be filled in.
    """
    node = _without_auto(read_document(Path(path)))
    fields = Fields(node, strict=False)
    ignored: list[str] = []
    _name_unread(fields, ignored)
    values = dict(options or {})
    _degree(fields, "tensor_parallel", "autotp_size", values, "tp")
    _degree(fields, "pipeline", "stages", values, "pp")
    dp = _replicas(values, cluster)
    values |= _batch(fields, values, dp) | _zero(fields, dp, ignored) | _precision(fields)
    if values.get("pp", 1) > 1 and "shard" in values:
        rule = "DeepSpeed's pipelines run with stages 0 and 1"
        fields.section("zero_optimization").complain("stage", rule, legal=(0, 1), near=(1,))
    fields.finish()
    return plan_of(Request(model=model, cluster=cluster, **values)), ignored


def _without_auto(node: Node) -> Node:
    """The config without the values it leaves to somebody else."""
    if not isinstance(node.value, dict):
        return node
    kept = {key: _without_auto(item) for key, item in node.value.items() if item.value != AUTO}
    return replace(node, value=kept)


def _name_unread(fields: Fields, ignored: list[str]) -> None:
    for key in fields.items:
        if key not in READ and key not in NO_BEARING:
            near = nearest(key, READ, most=1)
            ignored.append(f"{key}: not a key that is known here" + (f"; nearest is {near[0]}" if near else ""))


def _degree(fields: Fields, section: str, key: str, values: dict[str, Any], name: str) -> None:
    if not fields.has(section):
        return
    inner = fields.section(section)
    stated = inner.whole(key, most=10**6, default=None)
    if stated is not None and values.setdefault(name, stated) != stated:
        inner.complain(key, f"--{name} says {values[name]}")


def _replicas(values: Mapping[str, Any], cluster: Cluster) -> int:
    others = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    return int(values.get("dp") or max(1, cluster.num_devices // others))


def _batch(fields: Fields, values: Mapping[str, Any], dp: int) -> dict[str, Any]:
    """Any two of batch, microbatch and accumulation give the third; of one, the accumulation is 1."""
    total, micro, steps = (fields.whole(key, most=10**9, default=None) for key in BATCH)
    for name, key, stated in (("global_batch", BATCH[0], total), ("microbatch", BATCH[1], micro)):
        if stated is not None and values.get(name, stated) != stated:
            fields.complain(key, f"--{name.replace('_', '-')} says {values[name]}")
    total, micro = total or values.get("global_batch"), micro or values.get("microbatch")
    if not fields.good(*BATCH):
        return {}
    if total is None:
        if micro is None:
            fields.complain(BATCH[1], "missing, and so is train_batch_size", remedy="add one, or --global-batch")
            return {}
        return {"global_batch": micro * dp * (steps or 1), "microbatch": micro}
    if micro is None:
        micro = max(1, total // (dp * (steps or 1)))
    _check_product(fields, total, (micro, steps, dp))
    return {"global_batch": total, "microbatch": micro}


def _check_product(fields: Fields, total: int, factors: tuple[int, int | None, int]) -> None:
    micro, steps, dp = factors
    unit = micro * dp * (steps or 1)
    if total == unit or (steps is None and total % unit == 0):
        return
    accumulation = f"x gradient_accumulation_steps {steps}" if steps else "x some gradient_accumulation_steps"
    rule = f"must be train_micro_batch_size_per_gpu {micro} {accumulation} x {dp} replicas"
    below = total // unit * unit
    near = (unit,) if steps else tuple(number for number in (below, below + unit) if number)
    fields.complain(BATCH[0], rule + (f" = {unit}" if steps else ""), near=near)


def _zero(fields: Fields, dp: int, ignored: list[str]) -> dict[str, Any]:
    if not fields.has("zero_optimization"):
        return {"overlap": ("none",)}
    zero = fields.section("zero_optimization")
    stage = zero.whole("stage", least=0, most=MOST_STAGE, default=0)
    overlap = zero.flag("overlap_comm", default=stage == MOST_STAGE) and stage > 0
    unpriced = (key for key in ZERO_UNPRICED if zero.has(key) and zero.items[key].value not in (False, 0, 1))
    ignored += (f"zero_optimization.{key}: known to DeepSpeed, but not priced here" for key in unpriced)
    group = zero.whole("mics_shard_size", least=-1, default=-1)
    values: dict[str, Any] = {"overlap": ("gradients",) if overlap else ("none",)}
    if stage == 1:
        return values | {"zero1": True}
    if stage >= 2 and dp > 1:
        if group > 0 and dp % group:
            legal = divisors(dp)
            zero.complain("mics_shard_size", f"must divide the {dp} replicas", legal=legal, near=closest(group, legal))
            group = dp
        size = group if stage == MOST_STAGE and group > 0 else dp
        values |= {"shard": str(size), "keep": stage == 2}
    return values


def _precision(fields: Fields) -> dict[str, Any]:
    on = {name: fields.has(name) and fields.section(name).flag("enabled", default=False) for name in HALVES}
    if (on["bf16"] or on["bfloat16"]) and on["fp16"]:
        fields.complain("fp16", "means nothing beside bf16: DeepSpeed refuses both")
    compute = "bf16" if on["bf16"] or on["bfloat16"] else "fp16" if on["fp16"] else "fp32"
    legal = (*FORMATS, *WRITTEN)
    sent = fields.choice("communication_data_type", legal, default=None)
    summed = None
    if fields.has("data_types"):
        summed = fields.section("data_types").choice("grad_accum_dtype", legal, default=None)
    gradients = summed or sent or compute
    return {"precision": compute, "gradients": WRITTEN.get(gradients, gradients)}
