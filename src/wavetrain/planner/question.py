"""`Question`: what a search is asked, and `Objective`: what it should find the least of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from wavetrain.base.units import DType
from wavetrain.cluster.cluster import Cluster, Device
from wavetrain.cluster.laws import Laws
from wavetrain.model.model import Model
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan
from wavetrain.plan.stack import Precision, Stack
from wavetrain.schedule.schedules import SCHEDULES
from wavetrain.sim.predict import simulate

Array = Any  # a number, or an array of them


def precision_for(device: Device) -> Precision:
    """Mixed precision in the format that a device has units for."""
    known = [dtype for dtype in (DType.BF16, DType.FP16, DType.FP32) if device.peak.of(dtype) is not None]
    best = known[0] if known else DType.FP32
    return Precision(compute=best, products=best)


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


OF_ALL_BLOCKS = ("shard", "keep", "recompute", "shard_optimizer")  # pins that say the same of every block
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
    mixed: bool = True  # blocks and operators may be chosen one by one
    stack: Stack = field(default_factory=Stack)
    precision: Precision = field(default_factory=Precision)

    @property
    def laws(self) -> Laws:
        return self.cluster.laws

    @property
    def capacity_bytes(self) -> float:
        return self.cluster.device.memory_bytes * (1 - self.headroom)

    @property
    def is_free(self) -> bool:
        """Whether blocks and operators may be chosen one by one: nothing is said that holds for all of them."""
        return self.mixed and not self.only and all(getattr(self.pins, name) is None for name in OF_ALL_BLOCKS)

    @property
    def step_tokens(self) -> int:
        return self.global_batch * self.seq_len

    def cost(self, step_s: Array, devices: Array) -> Array:
        """What the objective makes least, from a step; of energy what it is at least; infinite beyond a limit."""
        device = self.cluster.device
        if self.objective is Objective.COST:
            cost = step_s * devices * device.usd_per_hour / 3600 / self.step_tokens
        elif self.objective is Objective.ENERGY:
            cost = step_s * devices * self.least_w / self.step_tokens
        elif self.objective is Objective.DEVICES:
            cost = devices + step_s / (1 + step_s)  # the faster of as many
        else:
            cost = step_s / self.step_tokens
        broken = step_s > self.longest_step_s
        if self.power_w is not None:
            broken = broken | (devices * self.least_w > self.power_w)
        return np.where(broken, np.inf, cost)

    @property
    def least_w(self) -> float:
        """What a device draws at least while a step runs."""
        device, laws = self.cluster.device, self.laws
        share = min(1.0, laws.communication_power, laws.waiting_power)
        return device.idle_w + (device.busy_w - device.idle_w) * share

    def true_cost(self, plan: Plan, step_s: float) -> float:
        """What the objective makes least, for a plan that was simulated."""
        cost = float(self.cost(step_s, plan.layout.num_devices))
        if self.objective is not Objective.ENERGY and self.power_w is None:
            return cost
        found = simulate(plan, self.laws)
        devices = plan.layout.num_devices
        if self.power_w is not None and found.power_w_per_device * devices > self.power_w:
            return float("inf")
        return 1 / (found.tokens_per_joule) if self.objective is Objective.ENERGY else cost

    @property
    def longest_step_s(self) -> float:
        """The step that the deadline allows."""
        if self.deadline_s is None or self.tokens is None:
            return float("inf")
        return self.deadline_s * self.step_tokens / self.tokens


# Not searched: what does not train, what holds the model twice, and ZB-V, which is a split wave of one wave.
KINDS = tuple(name for name in SCHEDULES if name not in ("forward-only", "chimera", "zb-v"))
