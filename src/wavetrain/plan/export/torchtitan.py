"""torchtitan's job config, TOML (0.2; 0.3 takes the same names on its command line, `--parallelism.<key>`).

Source of keys and of what is refused: torchtitan 0.2.2, config/job_config.py, distributed/pipeline_parallel.py and
models/llama3/infra/parallelize.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from wavetrain.base.units import DType
from wavetrain.plan.export.exported import Exported, comments
from wavetrain.plan.export.features import BF16_OR_FP32, CHOICES, all_choices, beyond, in_order
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan
from wavetrain.plan.stack import Fusion

Values = Mapping[str, object]

# Its own orders; `zb-v` and the rest of a snake of one wave are placed as a V.
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
BY_CSV = {"zb-h1": "1F1B", "zb-h2": "1F1B", "wave": "ZBVZeroBubble", "wave-zb": "ZBVZeroBubble"}  # name: placement
CSV_FILE = "schedule.csv"
DTYPES = {DType.BF16: "bfloat16", DType.FP32: "float32"}
EXPRESSED = (*CHOICES, "batch", "length", "tensor", "sequence", "context", "pipeline", "schedule", "cut", "recompute")
ALWAYS = ("devices", "compute", "fp8", "gradients", "kernels", "reduced_during", "tensor_overlap", "whole_logits")


def write_torchtitan(plan: Plan) -> Exported:
    """Parallelism, batch, precision and recomputation; which model it is, torchtitan is told by name and flavor."""
    notes = (*beyond(plan, (*EXPRESSED, *ALWAYS)), *_own_notes(plan))
    sections: dict[str, Values] = {
        "training": _training(plan),
        "parallelism": _parallelism(plan),
        "activation_checkpoint": _recomputation(plan),
    }
    if plan.precision.products is DType.FP8:
        sections["model"] = {"converters": ["quantize.linear.float8"]}
        sections["quantize.linear.float8"] = {"recipe_name": "tensorwise"}
    if Fusion.COMPILED in (plan.stack.elementwise, plan.stack.norm) or _overlaps_tensor(plan):
        sections["compile"] = {"enable": True, "components": ["model", "loss"]}
    title = f"torchtitan 0.2: {plan.model.name} on {plan.cluster.name}; model.name and model.flavor are yours to add"
    body = "\n".join(_section(name, values) for name, values in sections.items())
    return Exported("torchtitan", f"{comments(title, notes)}\n{body}", "train.toml", notes)


def _section(name: str, values: Values) -> str:
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in values.items())  # TOML writes these as JSON does
    return f"[{name}]\n{''.join(lines)}"


def _training(plan: Plan) -> Values:
    layout = plan.layout
    piped = layout.pp > 1  # only a pipeline cuts a rank's batch; elsewhere steps are accumulated up to the global one
    return {
        "local_batch_size": layout.global_batch // layout.dp if piped else layout.microbatch,
        "global_batch_size": layout.global_batch,
        "seq_len": plan.seq_len,
        "mixed_precision_param": DTYPES.get(plan.precision.compute, "bfloat16"),
        "mixed_precision_reduce": "float32",
    }


def _parallelism(plan: Plan) -> Values:
    layout = plan.layout
    shard = layout.dp if _only_sharded(plan) else plan.choice.shard
    values: dict[str, object] = {
        "data_parallel_replicate_degree": layout.dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "never" if plan.choice.keep or _only_sharded(plan) else "always",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if _overlaps_tensor(plan):
        values["enable_async_tensor_parallel"] = True
    if layout.tp > 1 and not plan.stack.logits_parallel:
        values["disable_loss_parallel"] = True
    if layout.pp > 1:
        values |= _pipeline(plan)
    return values


def _only_sharded(plan: Plan) -> bool:
    """It has no plain replicas beside other degrees."""
    return plan.choice.shard == 1 and 1 < plan.layout.dp < plan.layout.num_devices


def _pipeline(plan: Plan) -> Values:
    schedule = plan.layout.schedule
    names = SCHEDULES | BY_CSV if _needs_csv(plan) else SCHEDULES
    values: dict[str, object] = {"pipeline_parallel_schedule": names.get(schedule, _nearest(plan))}
    if _needs_csv(plan):
        values["pipeline_parallel_schedule_csv"] = CSV_FILE
    values["pipeline_parallel_microbatch_size"] = plan.layout.microbatch
    values["module_fqns_per_model_part"] = list(_parts(plan.cut))
    return values


def _needs_csv(plan: Plan) -> bool:
    """Whether its runtime runs the order only from a file."""
    return (plan.layout.schedule in BY_CSV and plan.layout.waves == 1) or _is_refused(plan)


def _is_refused(plan: Plan) -> bool:
    """PyTorch's own orders don't take every number of microbatches (schedules.py, their `__init__`)."""
    schedule, pp, number = plan.layout.schedule, plan.layout.pp, plan.layout.num_microbatches
    if schedule == "1f1b":
        return number < pp
    return schedule in ("interleaved", "interleaved-zb") and number % max(1, number // pp) > 0


def _nearest(plan: Plan) -> str:
    """For what it has neither an order nor a placement for: as many stages per rank, in a loop."""
    return "Interleaved1F1B" if len(plan.cut) > plan.layout.pp else "1F1B"


def _parts(cut: tuple[int, ...]) -> Iterator[list[str]]:
    first = 0
    for stage, count in enumerate(cut):
        layers = [f"layers.{first + number}" for number in range(count)]
        before = ["tok_embeddings"] if stage == 0 else []
        after = ["norm", "output"] if stage == len(cut) - 1 else []
        yield [*before, *layers, *after]
        first += count


def _recomputation(plan: Plan) -> Values:
    if plan.recompute is Recompute.SELECTIVE:
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": plan.recompute.value}


def _overlaps_tensor(plan: Plan) -> bool:
    return plan.stack.tensor_overlap and plan.layout.tp > 1


def _own_notes(plan: Plan) -> Iterator[str]:
    layout, precision = plan.layout, plan.precision
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "tensor parallelism without sequence parallelism; torchtitan 0.2 always has both"
    if layout.pp > 1:
        yield from _order_notes(plan)
    if _only_sharded(plan):
        yield f"{layout.dp} plain replicas beside other degrees; torchtitan refuses them, here they are sharded"
    if layout.cp > 1 and any(choice.shard > 1 for choice in all_choices(plan)):
        yield "sharding over replicas alone; torchtitan shards over replicas and context ranks together"
    if plan.recompute is Recompute.SELECTIVE:
        yield "recomputation of attention alone; torchtitan's selective mode recomputes by kind of operator"
    if precision.compute not in BF16_OR_FP32:
        yield f"activations and parameters in {precision.compute.value}; torchtitan has bfloat16 and float32"
    if precision.products not in (precision.compute, DType.FP8):
        yield f"matrix products in {precision.products.value}"
    if precision.gradients is not DType.FP32:
        yield f"gradients in {precision.gradients.value}; torchtitan reduces in float32"
    if Fusion.FUSED in (plan.stack.elementwise, plan.stack.norm):
        yield "hand-fused kernels; torchtitan runs PyTorch's, or compiles them ([compile] enable = true)"


def _order_notes(plan: Plan) -> Iterator[str]:
    schedule = plan.layout.schedule
    if _needs_csv(plan):
        how = f"write it with --to pytorch-pipeline-csv -o {CSV_FILE}"
        yield f"the order {schedule} in this file; it is in {CSV_FILE}: {how}"
    elif schedule not in SCHEDULES:
        where = "places stages in a loop or in one V" if plan.layout.waves > 1 else "has no second copy of the model"
        yield f"schedule {in_order(plan)}; torchtitan {where}, nearest is {_nearest(plan)}"
