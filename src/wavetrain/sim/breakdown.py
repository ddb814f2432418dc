"""Where the time of a step goes: named terms of the busiest rank, which sum to the step exactly."""

from __future__ import annotations

from collections.abc import Mapping

from wavetrain.plan.plan import Plan
from wavetrain.schedule.action import COMPUTE
from wavetrain.sim.engine import Result
from wavetrain.sim.estimate import Estimate
from wavetrain.sim.stages import rank_counts

TERMS = {
    "compute": "forward and backward kernels",
    "recompute": "forward kernels run again",
    "tensor": "tensor parallelism",
    "context": "keys and values exchanged",
    "sharding": "gather and scatter",
    "transfer": "messages between stages",
    "bubble": "waiting for other stages",
    "reduction": "gradients summed",
    "gather": "updated parameters collected",
    "optimizer": "optimizer step",
    "host": "once per step",
    "stragglers": "waiting for slower nodes",
}  # of communication, what shows beside compute
ROUNDING = 1e-12  # of a step: the rest of a sum of floats, not time
TAIL = ("reduction", "gather", "optimizer", "host", "stragglers")


def breakdown(plan: Plan, found: Estimate, result: Result, step_s: float) -> dict[str, float]:
    """Seconds of every term on the rank that computes longest; what it waits is what is left of the step."""
    rank = busiest(result)
    busy = result.busy_s[rank]
    blocks = rank_counts(plan)[rank] * plan.layout.num_microbatches / copies(plan)
    block = found.variants
    terms = {
        "recompute": float(blocks @ block.recompute_s[0]),
        "tensor": float(blocks @ (block.tensor_f_s + block.tensor_b_s)[0]),
        "context": float(blocks @ (block.context_f_s + block.context_b_s)[0]),
        "sharding": float(blocks @ (block.shard_f_s + block.shard_b_s)[0]),
    }
    firsts = sum(map(plan.placement.is_first, plan.placement.local[rank]))
    ends = firsts * plan.layout.num_microbatches / copies(plan)
    terms["sharding"] += ends * float(found.embedding.shard_s[0])
    terms = {"compute": computing(busy) - sum(terms.values())} | terms
    launched = sum(seconds for name, seconds in busy.items() if name.startswith(("SEND", "RECV")))
    terms["transfer"] = launched + result.waiting_transfer_s[rank]
    tail = {name: busy.get(name, 0.0) for name in TAIL}
    left_s = step_s - sum(terms.values()) - sum(tail.values())
    terms["bubble"] = left_s if left_s > ROUNDING * step_s else 0.0
    return {name: value for name in TERMS if (value := (terms | tail)[name])}


def copies(plan: Plan) -> int:
    """How often a pipeline holds the model; its copies share the microbatches."""
    return plan.placement.num_stages // plan.placement.depth


def busiest(result: Result) -> int:
    """The rank that computes longest, the first of equals."""
    return max(range(len(result.busy_s)), key=lambda rank: (computing(result.busy_s[rank]), -rank))


def computing(busy: Mapping[str, float]) -> float:
    return sum(busy.get(kind.value, 0.0) for kind in COMPUTE)


def idle_share(result: Result) -> float:
    """Idle time of all ranks' compute lanes over all their time, before the end of a step."""
    idle = sum(result.waiting_s) + sum(result.waiting_transfer_s)
    return idle / (result.makespan_s * len(result.waiting_s))
