"""Flags of Megatron-LM's pretrain_gpt.py, as a Bash array. Source of names: `plan/flags/words.py`."""

from __future__ import annotations

from collections.abc import Iterator

from wavetrain.base.units import DType
from wavetrain.model.architecture import Architecture
from wavetrain.plan.export.exported import Exported, comments
from wavetrain.plan.export.features import CHOICES, beyond, in_group, in_order
from wavetrain.plan.flags.words import ATTENTION, NORMS, POSITIONS, VOCAB_UNIT
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan
from wavetrain.plan.stack import AttentionImpl, Fusion

Flag = tuple[object, ...]

EXPRESSED = (
    *(*CHOICES, "batch", "length", "tensor", "sequence", "context", "pipeline", "schedule", "cut", "zero1"),
    *("devices", "recompute", "attention", "kernels", "compute", "fp8", "gradients"),
    *("reduced_during", "reduced_after", "tensor_overlap", "message_overlap"),
)
ORDERS = ("1f1b", "interleaved")


def write_megatron(plan: Plan) -> Exported:
    """Shape, degrees, batch, sharding, recomputation, precision; data, tokenizer and learning rate are the user's."""
    architecture = plan.model.architecture
    shape = list(_shape(architecture, plan)) if architecture else []
    expressed = (*EXPRESSED, "model") if architecture else EXPRESSED
    if plan.layout.pp_inside and plan.layout.cp == 1:
        expressed = (*expressed, "rank_order")
    notes = (*beyond(plan, expressed), *_own_notes(plan), *(_shape_notes(architecture, plan) if architecture else ()))
    flags = [*shape, *_layout(plan), *_sharding(plan), *_software(plan)]
    lines = "".join(f"    --{' '.join(map(str, flag))}\n" for flag in flags)
    title = (
        f"Megatron-LM pretrain_gpt.py: {plan.model.name} on {plan.cluster.name}; data and tokenizer are yours to add"
    )
    text = f"{comments(title, notes)}{_environment(plan)}MEGATRON_ARGS=(\n{lines})\n"
    return Exported("megatron", text, "megatron_args.sh", notes)


def _environment(plan: Plan) -> str:
    """Before Blackwell it asks for this with tensor or context parallelism, and refuses it with FSDP."""
    needed = plan.layout.tp * plan.layout.cp > 1 and plan.choice.shard == 1
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if needed else ""


# --- the model ---


def _shape(a: Architecture, plan: Plan) -> Iterator[Flag]:
    yield "num-layers", a.num_layers
    yield "hidden-size", a.hidden
    yield "ffn-hidden-size", a.ffn
    yield "num-attention-heads", a.heads
    if a.heads * a.head_dim != a.hidden:
        yield "kv-channels", a.head_dim
    if a.kv_heads != a.heads:
        yield ("group-query-attention",)
        yield "num-query-groups", a.kv_heads
    yield "max-position-embeddings", a.position_rows or max(a.seq_len, plan.seq_len)
    positions = {ours: theirs for theirs, ours in POSITIONS.items()}
    yield "position-embedding-type", positions.get(a.positions, "none")
    yield "normalization", next(theirs for theirs, ours in NORMS.items() if ours == a.norm)
    yield from _mlp(a)
    yield from _vocabulary(a, plan.layout.tp)
    if not a.dropout:
        yield "hidden-dropout", 0.0
    if not a.attention_dropout:
        yield "attention-dropout", 0.0


def _mlp(a: Architecture) -> Iterator[Flag]:
    activations = {
        ("gated", "silu"): "swiglu",
        ("gated", "quick_gelu"): "quick-geglu",
        ("plain", "relu2"): "squared-relu",
    }
    if flag := activations.get((a.mlp, a.activation)):
        yield (flag,)
    elif a.mlp == "gated":
        yield ("swiglu",)
    if not a.mlp_bias:
        yield ("disable-bias-linear",)
        if a.qkv_bias:
            yield ("add-qkv-bias",)
    if a.qk_norm:
        yield ("qk-layernorm",)
    if a.experts:
        yield "num-experts", a.experts
        yield "moe-router-topk", a.experts_per_token
        yield "moe-ffn-hidden-size", a.expert_ffn


def _vocabulary(a: Architecture, tp: int) -> Iterator[Flag]:
    yield "vocab-size", a.vocab
    if a.vocab % (VOCAB_UNIT * tp):
        yield "make-vocab-size-divisible-by", 1
    if not a.tied:
        yield ("untie-embeddings-and-output-weights",)


def _shape_notes(a: Architecture, plan: Plan) -> Iterator[str]:
    missing = {
        f"{a.positions} positions": a.positions not in POSITIONS.values(),
        "a masked head; pretrain_bert.py has one": a.head == "masked",
        f"norms {a.norm_place} the operators": a.norm_place != "before",
        "a norm of the embedding": a.embedding_norm,
        "attention and MLP beside each other": a.parallel_residual,
        "an embedding of another width": a.embedding_width > 0,
        "a window of attention": a.window is not None,
        f"the activation {a.activation}": (a.mlp, a.activation)
        not in {("gated", "silu"), ("gated", "quick_gelu"), ("plain", "relu2"), ("plain", "gelu")},
        "norms without bias": a.norm == "layernorm" and not a.norm_bias,
        "biases of one half of a block alone": a.out_bias != a.mlp_bias or (a.mlp_bias and not a.qkv_bias),
        "layers without experts between those with": len({stretch.experts for stretch in a.layers}) > 1,
        f"a vocabulary of {a.vocab}, it is padded to a multiple of {plan.layout.tp}": a.vocab % plan.layout.tp > 0,
    }
    yield from (what for what, holds in missing.items() if holds)


# --- the layout ---


def _layout(plan: Plan) -> Iterator[Flag]:
    layout = plan.layout
    yield "seq-length", plan.seq_len
    yield "micro-batch-size", layout.microbatch
    yield "global-batch-size", layout.global_batch
    yield "tensor-model-parallel-size", layout.tp
    if layout.sequence_parallel:
        yield ("sequence-parallel",)
    if layout.cp > 1:
        yield "context-parallel-size", layout.cp
    if plan.model.architecture and plan.model.architecture.experts and layout.tp > 1:
        yield "expert-model-parallel-size", layout.tp  # whole experts on each rank, as ours are
        yield "expert-tensor-parallel-size", 1
    yield "pipeline-model-parallel-size", layout.pp
    if layout.pp > 1:
        yield from _stages(plan)
    if layout.pp_inside and layout.cp == 1 and layout.pp > 1:
        yield ("use-tp-pp-dp-mapping",)


def _stages(plan: Plan) -> Iterator[Flag]:
    """Equal stages; others by their ends where that says all; else each of them written out."""
    cut, pp = plan.cut, plan.layout.pp
    chunks = len(cut) // pp
    if len(set(cut)) == 1:
        if chunks > 1:
            yield "num-virtual-stages-per-pipeline-rank", chunks
    elif chunks == 1 and pp > 2 and len(set(cut[1:-1])) == 1:
        yield "decoder-first-pipeline-num-layers", cut[0]
        yield "decoder-last-pipeline-num-layers", cut[-1]
    else:
        stages = [f"t*{count}" if count > 1 else "t" * count for count in cut]
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
        yield "pipeline-model-parallel-layout", f"'{'|'.join(stages)}'"


def _sharding(plan: Plan) -> Iterator[Flag]:
    layout, choice = plan.layout, plan.choice
    if choice.shard > 1:
        yield ("use-megatron-fsdp",)
        yield "data-parallel-sharding-strategy", "optim_grads" if choice.keep else "optim_grads_params"
        if in_group(plan):
            yield "num-distributed-optimizer-instances", layout.dp // choice.shard
        yield ("use-distributed-optimizer",)  # it asks for these three
        yield ("no-gradient-accumulation-fusion",)
        yield "ckpt-format", "fsdp_dtensor"
    elif layout.shard_optimizer:
        yield ("use-distributed-optimizer",)
    if plan.stack.gradient_overlap:
        yield ("overlap-grad-reduce",)
    if plan.stack.tensor_overlap and layout.sequence_parallel:
        yield ("tp-comm-overlap",)


# --- precision, recomputation, kernels ---


def _software(plan: Plan) -> Iterator[Flag]:
    precision, stack = plan.precision, plan.stack
    if precision.compute in (DType.BF16, DType.FP16):
        yield (precision.compute.value,)
    if precision.products is DType.FP8:
        yield "fp8-format", "hybrid"
    if precision.compute is DType.BF16 and precision.gradients is DType.BF16:
        yield ("grad-reduce-in-bf16",)
    if precision.compute is not DType.FP32 and precision.gradients is DType.FP32:
        yield ("accumulate-allreduce-grads-in-fp32",)
    if plan.recompute is not Recompute.NONE:
        yield "recompute-granularity", plan.recompute.value
    if plan.recompute is Recompute.FULL:
        yield "recompute-method", "uniform"
        yield "recompute-num-layers", 1
    yield "attention-backend", _backend(stack.attention)
    if stack.attention is AttentionImpl.UNFUSED:
        yield ("no-masked-softmax-fusion",)
    if stack.elementwise is Fusion.EAGER:
        gated = plan.model.architecture is not None and plan.model.architecture.mlp == "gated"
        yield ("no-bias-swiglu-fusion" if gated else "no-bias-gelu-fusion",)
        yield ("no-bias-dropout-fusion",)


def _backend(attention: AttentionImpl) -> str:
    if attention is AttentionImpl.UNFUSED:
        return "unfused"
    return next((word for word, ours in ATTENTION.items() if ours is attention), "flash")


# --- what it has no words for ---


def _own_notes(plan: Plan) -> Iterator[str]:
    yield from _order_notes(plan)
    yield from _sharding_notes(plan)
    layout, stack, precision = plan.layout, plan.stack, plan.precision
    if layout.cp > 1 and plan.seq_len % (2 * layout.cp):
        yield f"sequences of {plan.seq_len} tokens; Megatron-LM asks for a multiple of 2 x cp = {2 * layout.cp}"
    if stack.attention not in (*ATTENTION.values(), AttentionImpl.UNFUSED):
        yield f"attention kernel {stack.attention.value}; nearest is flash"
    if stack.elementwise is Fusion.COMPILED or stack.norm is not stack.elementwise:
        yield f"{stack.elementwise.value} elementwise kernels with {stack.norm.value} norms"
    if stack.tensor_overlap and layout.tp > 1 and not layout.sequence_parallel:
        yield "tensor-parallel collectives beside their products; it does so with sequence parallelism only"
    if stack.message_overlap and layout.pp > 1 and layout.schedule != "interleaved":
        yield "messages between stages while both ends compute; it does so with an interleaved schedule only"
    if precision.compute not in (DType.BF16, DType.FP16, DType.FP32):
        yield f"activations and parameters in {precision.compute.value}"
    if precision.products not in (precision.compute, DType.FP8):
        yield f"matrix products in {precision.products.value}"
    if precision.gradients not in (DType.FP32, precision.compute):
        yield f"gradients in {precision.gradients.value} beside {precision.compute.value}"


def _order_notes(plan: Plan) -> Iterator[str]:
    layout, stages = plan.layout, len(plan.cut)
    if layout.schedule not in ORDERS:
        kind = "no wave schedule" if layout.schedule.startswith("wave") else "no such schedule"
        loop = f"interleaved, {stages // layout.pp} stages per rank" if stages > layout.pp else "1F1B"
        nearest = loop if layout.pp > 1 else "one microbatch after the other"
        yield f"schedule {in_order(plan)}; Megatron-LM has {kind}, nearest is {nearest}"
    elif layout.pp == 1 and stages > 1:
        yield f"{stages} stages on one rank"
    if stages > layout.pp > 1 and layout.num_microbatches % layout.pp:
        number = f"{layout.num_microbatches} microbatches"
        yield f"{number} in an interleaved schedule; Megatron-LM asks for a multiple of pp {layout.pp}"


def _sharding_notes(plan: Plan) -> Iterator[str]:
    layout, choice = plan.layout, plan.choice
    if choice.shard > 1 and layout.pp > 1:
        yield "sharded parameters inside a pipeline for certain; Megatron-FSDP does not promise to run in one"
    if choice.keep:
        yield "parameters sharded between steps; optim_grads has them whole on every rank all the time"
    if in_group(plan) and layout.shard_optimizer:
        yield "optimizer states sharded over all replicas beside parameters sharded in groups"
    if layout.pp_inside and layout.pp > 1 and layout.cp > 1:
        yield "stages inside context ranks; --use-tp-pp-dp-mapping numbers tp, cp, pp, dp"
