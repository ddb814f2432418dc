"""The model that Megatron-LM's shape flags describe, with its defaults for what they leave out."""

from __future__ import annotations

from dataclasses import replace

from wavetrain.base.document import Node, Scalar
from wavetrain.base.errors import InputError, Problem
from wavetrain.base.fields import Fields
from wavetrain.model.model import Model
from wavetrain.model.short import read_short
from wavetrain.model.transformer import build
from wavetrain.plan.flags.parse import OPTION, Flags
from wavetrain.plan.flags.words import NORMS, POSITIONS, VOCAB_UNIT

REQUIRED = ("num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings", "seq-length")
DROPOUT = 0.1
TOP_K = 2
FFN_UNIT = 64
# keys of the short form of a model, and the flags they come from
SOURCES = {
    "layers": "num-layers",
    "hidden": "hidden-size",
    "heads": "num-attention-heads",
    "kv_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "ffn": "ffn-hidden-size",
    "vocab": "vocab-size",
    "seq_len": "max-position-embeddings",
    "experts": "num-experts",
    "experts_per_token": "moe-router-topk",
    "expert_ffn": "moe-ffn-hidden-size",
}


def model_of(flags: Flags) -> Model:
    """The model of the flags; what they must say and do not is raised together."""
    for name in REQUIRED:
        if not flags.has(name):
            flags.missing(name, "Megatron-LM needs it; or name a model with --model")
    if not flags.has("vocab-size", "padded-vocab-size"):
        flags.missing("vocab-size", "the tokenizer's is not known here; or name a model with --model")
    if flags.on("swiglu") and flags.on("squared-relu", "quick-geglu"):
        flags.complain("swiglu", "means nothing beside another activation")
    flags.finish()
    values = {**_sizes(flags), **_style(flags)}
    nodes = {key: Node(value, OPTION, 1) for key, value in values.items() if value is not None}
    fields = Fields(Node(nodes, OPTION, 1))
    architecture = read_short(fields)
    try:
        fields.finish()
    except InputError as error:
        raise InputError([_as_flag(problem) for problem in error.problems]) from None
    attention_dropout = flags.number("attention-dropout", DROPOUT) > 0
    name = f"megatron-{architecture.num_layers}x{architecture.hidden}"
    return build(replace(architecture, attention_dropout=attention_dropout), name=name, source="Megatron-LM flags")


def contradictions(flags: Flags, model: Model) -> None:
    """Sizes that flags state and a model has otherwise."""
    a = model.architecture
    if a is None:
        return
    sizes = {"num-layers": a.num_layers, "hidden-size": a.hidden, "num-attention-heads": a.heads}
    sizes |= {"ffn-hidden-size": a.ffn, "num-query-groups": a.kv_heads, "num-experts": a.experts}
    for name, size in sizes.items():
        if flags.has(name) and flags.whole(name) != size:
            flags.complain(name, f"--model {model.name} has {size}", near=(str(size),))


def _sizes(flags: Flags) -> dict[str, Scalar]:
    experts = flags.whole("num-experts", 0)
    ffn = flags.whole("ffn-hidden-size", _usual_ffn(flags))
    learned = _positions(flags) == "learned"
    return {
        "layers": flags.whole("num-layers"),
        "hidden": flags.whole("hidden-size"),
        "heads": flags.whole("num-attention-heads"),
        "kv_heads": flags.whole("num-query-groups") if flags.on("group-query-attention") else None,
        "head_dim": flags.whole("kv-channels") if flags.has("kv-channels") else None,
        "ffn": ffn,
        "vocab": _vocab(flags),
        "seq_len": flags.whole("max-position-embeddings" if learned else "seq-length"),
        "experts": experts or None,
        "experts_per_token": flags.whole("moe-router-topk", TOP_K) if experts else None,
        "expert_ffn": flags.whole("moe-ffn-hidden-size", ffn) if experts else None,
    }


def _style(flags: Flags) -> dict[str, Scalar]:
    gated = flags.on("swiglu", "quick-geglu")
    bias = not flags.on("disable-bias-linear")
    activation = "silu" if flags.on("swiglu") else "quick_gelu" if flags.on("quick-geglu") else "gelu"
    return {
        "family": "gpt",
        "positions": _positions(flags),
        "norm": NORMS[flags.word("normalization", "LayerNorm")],
        "mlp": "gated" if gated else "plain",
        "activation": "relu2" if flags.on("squared-relu") else activation,
        "bias": bias,
        "qkv_bias": bias or flags.on("add-qkv-bias"),
        "qk_norm": flags.on("qk-layernorm"),
        "tied": not flags.on("untie-embeddings-and-output-weights"),
        "dropout": flags.number("hidden-dropout", DROPOUT) > 0,
    }


def _positions(flags: Flags) -> str:
    if flags.on("use-rotary-position-embeddings"):
        return "rotary"
    return POSITIONS[flags.word("position-embedding-type", "learned_absolute")]


def _usual_ffn(flags: Flags) -> int:
    """As validate_args has it: 4 x hidden, or 8/3 of it in multiples of 64."""
    hidden = flags.whole("hidden-size")
    return int((4 * hidden * 2 / 3) / FFN_UNIT) * FFN_UNIT if flags.on("swiglu") else 4 * hidden


def _vocab(flags: Flags) -> int:
    """Padded so that every tensor-parallel rank has as many rows, in convenient multiples."""
    if flags.has("padded-vocab-size"):
        return flags.whole("padded-vocab-size")
    unit = flags.whole("make-vocab-size-divisible-by", VOCAB_UNIT) * flags.whole("tensor-model-parallel-size")
    return -(-flags.whole("vocab-size") // unit) * unit


def _as_flag(problem: Problem) -> Problem:
    return replace(problem, where=OPTION, key=f"--{SOURCES.get(problem.key, problem.key)}")
