"""A plan from the flags of a Megatron-LM run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wavetrain.base.errors import InputError, Problem
from wavetrain.cluster.cluster import Cluster
from wavetrain.model.model import Model
from wavetrain.plan.check import check
from wavetrain.plan.flags.parse import MOST, OPTION, Flags, read_flags
from wavetrain.plan.flags.shape import contradictions, model_of
from wavetrain.plan.flags.stages import cut_of
from wavetrain.plan.flags.words import ATTENTION
from wavetrain.plan.plan import Plan
from wavetrain.plan.request import Request, plan_of
from wavetrain.plan.stack import AttentionImpl

# our options, and the flags that said them
NAMES = {
    "--tp": "tensor-model-parallel-size",
    "--pp": "pipeline-model-parallel-size",
    "--cp": "context-parallel-size",
    "--tp, --pp, --cp": "tensor-model-parallel-size",
    "--global-batch": "global-batch-size",
    "--microbatch": "micro-batch-size",
    "--seq-len": "seq-length",
    "--chunks": "num-virtual-stages-per-pipeline-rank",
    "--shard": "num-distributed-optimizer-instances",
}


def plan_of_megatron(
    text: str,
    *,
    model: Model | None = None,
    cluster: Cluster,
    attention: str | None = None,
    elementwise: str | None = None,
) -> tuple[Plan, list[str]]:
    """The plan that flags mean on a cluster, and a line for each flag that was not looked at.

    `model` stands in for the flags of shape, `attention` and `elementwise` for what the flags say of kernels.
    """
    flags = read_flags(text)
    _check_combinations(flags)
    if model is None:
        model = model_of(flags)
    else:
        contradictions(flags, model)
    flags.finish()
    values = _degrees(flags, cluster) | _pipeline(flags, model) | _sharding(flags, cluster) | _software(flags)
    flags.finish()
    values |= {key: value for key, value in (("attention", attention), ("elementwise", elementwise)) if value}
    seq_len = flags.whole("seq-length", model.seq_len)
    try:
        plan = plan_of(Request(model=model, cluster=cluster, seq_len=seq_len, **values))
    except InputError as error:
        raise InputError([_as_flag(problem, flags) for problem in error.problems]) from None
    _check_interleaving(plan, flags)
    if flags.on("use-tp-pp-dp-mapping"):
        plan = _with_stages_inside(plan, flags)
    return plan, flags.ignored


def _check_interleaving(plan: Plan, flags: Flags) -> None:
    """Megatron-LM runs whole rounds of `pp` microbatches only (core/pipeline_parallel/schedules.py)."""
    layout = plan.layout
    if layout.chunks > 1 and layout.num_microbatches % layout.pp:
        unit = layout.pp * layout.dp * layout.microbatch
        below = layout.global_batch // unit * unit
        near = tuple(str(number) for number in (below, below + unit) if number)
        rule = (
            f"{layout.num_microbatches} microbatches; interleaving needs a multiple of the {layout.pp} pipeline ranks"
        )
        flags.complain("global-batch-size", rule, near=near)
        flags.finish()


def _with_stages_inside(plan: Plan, flags: Flags) -> Plan:
    if plan.layout.cp > 1:
        flags.ignored.append("--use-tp-pp-dp-mapping: with context parallelism, ranks are priced as tp, cp, dp, pp")
        return plan
    plan = replace(plan, layout=replace(plan.layout, pp_inside=True))
    if problems := check(plan):
        raise InputError([_as_flag(problem, flags) for problem in problems])
    return plan


def _as_flag(problem: Problem, flags: Flags) -> Problem:
    name = NAMES.get(problem.where)
    if name is None:
        return problem
    return replace(problem, where=OPTION, key=f"--{name}", value=flags.values.get(name))


def _check_combinations(flags: Flags) -> None:
    if not flags.has("micro-batch-size"):
        flags.missing("micro-batch-size", "Megatron-LM needs it")
    if flags.on("bf16") and flags.on("fp16"):
        flags.complain("bf16", "means nothing beside --fp16")
    if flags.on("tp-comm-overlap") and not flags.on("sequence-parallel"):
        flags.complain("tp-comm-overlap", "Megatron-LM runs it with --sequence-parallel only")
    _check_length(flags)
    _check_fsdp(flags)


def _check_length(flags: Flags) -> None:
    length, rows, unit = "seq-length", "max-position-embeddings", 2 * flags.whole("context-parallel-size")
    if flags.has(length) and flags.whole(length) > flags.whole(rows, MOST):
        flags.complain(length, f"must be at most --{rows} {flags.whole(rows)}", near=(str(flags.whole(rows)),))
    if unit > 2 and flags.whole(length, unit) % unit:
        below = flags.whole(length) // unit * unit
        near = tuple(str(number) for number in (below, below + unit) if number)
        flags.complain(length, f"must be a multiple of 2 x --context-parallel-size = {unit}", near=near)


def _check_fsdp(flags: Flags) -> None:
    fsdp = [name for name in ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2") if flags.on(name)]
    if "use-torch-fsdp2" in fsdp:
        if len(fsdp) > 1:
            flags.complain("use-torch-fsdp2", f"means nothing beside --{fsdp[0]}")
        if flags.whole("pipeline-model-parallel-size") > 1:
            flags.complain("use-torch-fsdp2", "Megatron-LM does not run it in a pipeline")
        if flags.on("use-distributed-optimizer"):
            flags.complain("use-torch-fsdp2", "Megatron-LM does not run it with --use-distributed-optimizer")


def _replicas(flags: Flags, cluster: Cluster) -> int:
    degrees = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    others = 1
    for name in degrees:
        others *= flags.whole(name)
    return max(1, cluster.num_devices // others)  # what does not divide is refused with the rest of the layout


def _degrees(flags: Flags, cluster: Cluster) -> dict[str, Any]:
    tp = flags.whole("tensor-model-parallel-size")
    micro = flags.whole("micro-batch-size")
    if flags.on("sequence-parallel") and tp == 1:
        flags.ignored.append("--sequence-parallel: Megatron-LM turns it off without tensor parallelism")
    _check_experts(flags, tp)
    return {
        "tp": tp,
        "pp": flags.whole("pipeline-model-parallel-size"),
        "cp": flags.whole("context-parallel-size"),
        "sequence_parallel": flags.on("sequence-parallel") and tp > 1,
        "microbatch": micro,
        "global_batch": flags.whole("global-batch-size", micro * _replicas(flags, cluster)),
    }


def _check_experts(flags: Flags, tp: int) -> None:
    """Ours are dealt out whole to the tensor-parallel ranks."""
    if not flags.whole("num-experts", 0):
        return
    parallel, cut = flags.whole("expert-model-parallel-size"), flags.whole("expert-tensor-parallel-size", tp)
    if (parallel, cut) != (tp, 1):
        flags.ignored.append(
            f"--expert-model-parallel-size {parallel}, --expert-tensor-parallel-size {cut}: "
            f"priced as whole experts over the {tp} tensor-parallel ranks"
        )


def _pipeline(flags: Flags, model: Model) -> dict[str, Any]:
    pp = flags.whole("pipeline-model-parallel-size")
    cut = cut_of(flags, model.num_blocks, pp)
    chunks = max(1, len(cut) // pp)
    values: dict[str, Any] = {"cut": cut, "schedule": "1f1b"}
    if chunks > 1:
        values |= {"schedule": "interleaved", "chunks": chunks}
    return values


def _sharding(flags: Flags, cluster: Cluster) -> dict[str, Any]:
    """What FSDP shards, or the distributed optimizer alone."""
    strategy = flags.word("data-parallel-sharding-strategy", "no_shard")
    torch = flags.on("use-torch-fsdp2")
    if not torch and not flags.on("use-megatron-fsdp", "use-custom-fsdp"):
        if strategy != "no_shard":
            flags.ignored.append("--data-parallel-sharding-strategy: means nothing without --use-megatron-fsdp")
        return {"zero1": flags.on("use-distributed-optimizer")}
    dp, instances = _replicas(flags, cluster), flags.whole("num-distributed-optimizer-instances")
    if dp % instances:
        flags.complain("num-distributed-optimizer-instances", f"must divide the {dp} replicas")
    if torch:
        keep = flags.on("torch-fsdp2-no-reshard-after-forward")
        return {"shard": str(dp), "keep": keep and dp > 1}
    if strategy in ("no_shard", "optim"):
        return {"zero1": strategy == "optim"}
    group = dp // instances
    return {"shard": str(group), "keep": strategy == "optim_grads" and group > 1}


def _software(flags: Flags) -> dict[str, Any]:
    half = "bf16" if flags.on("bf16") else "fp16" if flags.on("fp16") else "fp32"
    eager = flags.on("no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion")
    overlap = [
        word for word, flag in (("gradients", "overlap-grad-reduce"), ("tensor", "tp-comm-overlap")) if flags.on(flag)
    ]
    return {
        "recompute": _recompute(flags),
        "attention": _attention(flags),
        "elementwise": "eager" if eager else "fused",
        "precision": "fp8" if flags.has("fp8-format") else half,
        "gradients": _gradients(flags, half),
        "overlap": tuple(overlap) or ("none",),
    }


def _gradients(flags: Flags, half: str) -> str:
    """bf16 reduces in fp32 unless told otherwise; fp16 the other way round (validate_args)."""
    if half == "bf16":
        return "bf16" if flags.on("grad-reduce-in-bf16") else "fp32"
    return half if half == "fp32" or not flags.on("accumulate-allreduce-grads-in-fp32") else "fp32"


def _recompute(flags: Flags) -> str:
    if flags.on("recompute-activations"):
        return "selective"
    kind = flags.word("recompute-granularity", "none")
    method = flags.word("recompute-method")
    if kind == "selective" and method:
        flags.complain("recompute-method", "means nothing beside --recompute-granularity selective")
    if kind == "full" and not method:
        flags.complain("recompute-method", "missing: without it nothing is recomputed", legal=("uniform", "block"))
    if kind == "full" and (method == "block" or flags.whole("recompute-num-layers") > 1):
        number = flags.whole("recompute-num-layers")
        flags.ignored.append(
            f"--recompute-method {method}, --recompute-num-layers {number}: priced as every layer by itself"
        )
    return kind


def _attention(flags: Flags) -> str:
    if flags.on("use-flash-attn") and not flags.has("attention-backend"):
        return AttentionImpl.FLASH2.value
    found = ATTENTION[flags.word("attention-backend", "auto")]
    if found is AttentionImpl.FUSED_SOFTMAX and flags.on("no-masked-softmax-fusion"):
        return AttentionImpl.UNFUSED.value
    return found.value
