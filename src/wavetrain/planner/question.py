"""`Question`: what a search is asked, and `Objective`: what it should find the least of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wavetrain.cluster.cluster import Cluster
from wavetrain.cost.laws import Laws, load_laws
from wavetrain.model.model import Model
from wavetrain.plan.layout import Recompute
from wavetrain.plan.stack import Precision, Stack
from wavetrain.schedule.schedules import SCHEDULES


Array = Any  # a number, or an array of them


class Objective(StrEnum):
    """What makes one plan better than another."""

    THROUGHPUT = "throughput"  # tokens per second
    COST = "cost"  # dollars per token
    ENERGY = "energy"  # joules per token
    DEVICES = "devices"  # fewest devices that fit (and meet the deadline), then throughput
    BATCH = "batch"  # most sequences per step, then throughput


@dataclass(frozen=True)
class Pins:
    """Values that a plan must have; None where it is free."""

    tp: int | None = None
    sequence_parallel: bool | None = None
    cp: int | None = None
    pp: int | None = None
    dp: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    waves: int | None = None
    chunks: int | None = None
    recompute: Recompute | None = None
    shard: int | str | None = None  # a group size, or dp, node, none
    keep: bool | None = None
    shard_optimizer: bool | None = None
    pp_inside: bool | None = None
    devices: int | None = None


FAMILIES = {
    "ddp": "replicas, nothing sharded",
    "zero1": "replicas, optimizer states sharded",
    "zero2": "all sharded over all replicas, gathered parameters kept until the backward",
    "fsdp": "all sharded over all replicas, gathered again for the backward (ZeRO-3)",
    "hsdp": "sharded inside the node, replicated across",
    "megatron": "tensor and pipeline parallelism, replicas with or without sharded optimizer states",
    "wave": "any plan with a wave-like pipeline",
    "no-pipeline": "any plan without pipeline parallelism",
    "no-tensor": "any plan without tensor parallelism",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a cluster, a batch, and what is wanted."""

    model: Model
    cluster: Cluster
    global_batch: int
    seq_len: int
    objective: Objective = Objective.THROUGHPUT
    pins: Pins = field(default_factory=Pins)
    only: tuple[str, ...] = ()  # families of FAMILIES; none: all plans
    headroom: float = 0.0  # share of a device's memory to leave free
    power_w: float | None = None  # most that all devices together may draw
    deadline_s: float | None = None  # for `tokens`
    tokens: float | None = None
    mixed: bool = True  # operators and blocks may be chosen one by one
    stack: Stack = field(default_factory=Stack)
    precision: Precision = field(default_factory=Precision)
    laws: Laws = field(default_factory=load_laws)

    @property
    def capacity_bytes(self) -> float:
        return self.cluster.device.memory_bytes * (1 - self.headroom)

    @property
    def step_tokens(self) -> int:
        return self.global_batch * self.seq_len

    def cost(self, step_s: Array, devices: Array) -> Array:
        """What the objective makes least; of energy, at least that."""
        device = self.cluster.device
        if self.objective is Objective.COST:
            return step_s * devices * device.usd_per_hour / self.step_tokens
        if self.objective is Objective.ENERGY:
            return step_s * devices * device.idle_w / self.step_tokens
        if self.objective is Objective.DEVICES:
            return devices + 0.0 * step_s
        return step_s / self.step_tokens

    @property
    def longest_step_s(self) -> float:
        """The step that the deadline allows."""
        if self.deadline_s is None or self.tokens is None:
            return float("inf")
        return self.deadline_s * self.step_tokens / self.tokens


# Not searched: what does not train, what holds the model twice, and ZB-V, which is a split wave of one wave.
KINDS = tuple(name for name in SCHEDULES if name not in ("forward-only", "chimera", "zb-v"))
