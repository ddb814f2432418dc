"""`Laws`: the constants of training software that the laws need, read from `laws.yaml`; those of hardware are devices'.

They were fitted together on published step times by `validation/fit.py`, starting from the values measured for single
kernels; none belongs to a source, a model or a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from wavetrain.base.document import parse_yaml
from wavetrain.base.fields import Fields
from wavetrain.cost.kernels import TRAFFICS


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
    message_s: float  # added to every message between stages: both ends wait for the host
    step_s: float  # once per step
    # overlap: the share of the shorter of compute and communication that stays visible
    link_exposed: float  # sharded parameters and gradients inside a node
    network_exposed: float  # and across nodes
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


@cache
def load_laws() -> Laws:
    """The constants that ship with the package."""
    file = resources.files("wavetrain.cost").joinpath("laws.yaml")
    f = Fields(parse_yaml(file.read_text(encoding="utf-8"), file="laws.yaml"))
    forward, backward = f.section("forward_bytes"), f.section("backward_bytes")
    values = {
        "forward_bytes": tuple(forward.number(name.value) for name in TRAFFICS),
        "backward_bytes": tuple(backward.number(name.value) for name in TRAFFICS),
    }
    scalars = [item.name for item in fields(Laws) if item.name not in values]
    laws = Laws(**values, **{name: f.number(name) for name in scalars})  # type: ignore[arg-type]
    forward.check_unknown()
    backward.check_unknown()
    f.finish()
    return laws
