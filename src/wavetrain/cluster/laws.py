"""`Laws`: the constants of training software that the laws need, read from `laws.yaml`; those of hardware are devices'.

They were fitted together on published step times by `validation/fit.py`, starting from the values measured for single
kernels; none belongs to a source or a model. A cluster may have its own, as `wavetrain measure` finds them: another
software on other hardware moves other bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from wavetrain.base.document import parse_yaml
from wavetrain.base.fields import Fields

MOST = 1e15  # of any constant


class Traffic(StrEnum):
    """Classes of memory-bound work, told apart by the bytes they move per element."""

    NORM = "norm"
    NORM_EAGER = "norm-eager"
    RMS_NORM = "rms-norm"
    ACTIVATION = "activation"
    GATED = "gated"
    RESIDUAL = "residual"
    RESIDUAL_EAGER = "residual-eager"
    DROPOUT = "dropout"
    ROTARY = "rotary"
    SOFTMAX = "softmax"
    SOFTMAX_EAGER = "softmax-eager"
    SCORE_DROPOUT = "score-dropout"
    LOOKUP = "lookup"
    LOGITS = "logits"
    CAST = "cast"
    OTHER = "other"


TRAFFICS = tuple(Traffic)


@dataclass(frozen=True)
class Laws:
    """Constants of the software; seconds, bytes, shares of one."""

    # compute
    forward_bytes: tuple[float, ...]  # moved per element, for each class in TRAFFICS
    backward_bytes: tuple[float, ...]
    eager_factor: float  # traffic of eager activations and rotary embeddings over fused ones
    attention_backward: float  # time of fused attention's backward over its forward
    accumulation: float  # times that a microbatch's weight gradients cross memory in the accumulation format
    optimizer_bytes: float  # moved per parameter by an optimizer step
    # host
    gap_s: float  # device time lost between two kernels
    launch_s: float  # host time per kernel
    tensor_host_s: float  # added per layer pass by tensor parallelism
    recompute_host_s: float  # added per layer that is computed again (random states saved and restored)
    recompute_gap_s: float  # lost per layer that is computed again where nothing is launched ahead
    recompute_tail: float  # share that is computed again of a layer's last product, of which a backward needs no result
    message_s: float  # added to every message between stages: both ends wait for the host
    step_s: float  # once per step
    tensor_step_s: float  # and per tensor of parameters: an optimizer that takes them one by one
    # overlap: the share of the shorter of compute and communication that stays visible
    link_exposed: float  # sharded parameters and gradients inside a node
    network_exposed: float  # and across nodes
    head_exposed: float  # of the head's, whose products are the longest
    gradient_exposed: float  # gradient reduction behind the backward
    tensor_exposed: float  # tensor-parallel collectives with overlap
    context_exposed: float  # keys and values of context parallelism
    # scale
    doubling: float  # slow-down per doubling of nodes: stragglers, jitter
    # power: share of what compute draws above idle
    communication_power: float
    waiting_power: float
    # how far published runs lie from their prediction
    error_share: float  # four of five are nearer
    # memory
    reserve_bytes: float  # context, libraries, allocator at rest
    fragmentation: float  # memory that an allocator can't use, over the activations that come and go
    fused_logit_bytes: float  # held per logit while the loss is computed, by how it is
    compiled_logit_bytes: float
    eager_logit_bytes: float
    eager_norm_bytes: float  # kept per element by an eager norm beyond its input
    eager_activation_bytes: float  # kept per element by eager gated activations and rotary embeddings
    buffer_bytes: float  # gradient buckets and communication


_BY_CLASS = ("forward_bytes", "backward_bytes")


@cache
def load_laws() -> Laws:
    """The constants that ship with the package."""
    file = resources.files("wavetrain.cluster").joinpath("laws.yaml")
    f = Fields(parse_yaml(file.read_text(encoding="utf-8"), file="laws.yaml"))
    laws = Laws(**_stated(f))
    f.finish()
    return laws


def read_laws(f: Fields) -> Laws:
    """The constants that a mapping states; those that ship where it says nothing."""
    laws = replace(load_laws(), **_stated(f, load_laws()))
    f.check_unknown()
    return laws


def _stated(f: Fields, usual: Laws | None = None) -> dict[str, Any]:
    """Every constant by name; `usual` are those that may be left out."""
    found: dict[str, Any] = {}
    for item in fields(Laws):
        known = getattr(usual, item.name, None)
        if item.name not in _BY_CLASS:
            found[item.name] = _number(f, item.name, known)
        elif usual is None or f.has(item.name):
            own = f.section(item.name)
            pairs = zip(TRAFFICS, known or (None,) * len(TRAFFICS), strict=True)
            found[item.name] = tuple(_number(own, traffic.value, value) for traffic, value in pairs)
            own.check_unknown()
    return found


def _number(f: Fields, key: str, usual: float | None) -> float:
    return f.number(key, most=MOST) if usual is None else f.number(key, most=MOST, default=usual)


def write_laws(laws: Laws) -> dict[str, Any]:
    """What differs from the constants that ship, as `read_laws` reads it."""
    data: dict[str, Any] = {}
    for item in fields(Laws):
        own, usual = getattr(laws, item.name), getattr(load_laws(), item.name)
        if own == usual:
            continue
        if item.name in _BY_CLASS:
            rows = zip(TRAFFICS, own, usual, strict=True)
            data[item.name] = {traffic.value: value for traffic, value, other in rows if value != other}
        else:
            data[item.name] = own
    return data
