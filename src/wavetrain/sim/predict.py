"""From a plan to a `Prediction`: time in named terms, memory by name, power, money; the events on request.

Data-parallel replicas are alike, so one pipeline is simulated whatever the number of devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from wavetrain.base.errors import InputError, Problem
from wavetrain.cluster.laws import Laws
from wavetrain.cost.compute import peak_rate
from wavetrain.cost.money import usd_per_million_tokens
from wavetrain.cost.power import device_watts
from wavetrain.model.operator import Attention, Work
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan
from wavetrain.schedule.action import COMPUTE, Actions, Kind
from wavetrain.schedule.evaluate import Costs as OrderCosts
from wavetrain.schedule.schedules import SCHEDULES, Shape
from wavetrain.sim import engine
from wavetrain.sim.algorithms import algorithms
from wavetrain.sim.batch import Batch, Floats
from wavetrain.sim.breakdown import breakdown, idle_share
from wavetrain.sim.engine import Result, StageBytes, StageTimes
from wavetrain.sim.estimate import Estimate, estimate, straggling
from wavetrain.sim.gather import gather, variants
from wavetrain.sim.stages import fullest_rank, peak_parts, stage_bytes, stage_times, static_bytes
from wavetrain.timeline.timeline import Timeline


@dataclass(frozen=True)
class Prediction:
    """What a plan is predicted to do."""

    step_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    peak_bytes: float  # tensors on the fullest rank
    reserve_bytes: float  # needed beside them
    capacity_bytes: float
    memory: dict[str, float]
    breakdown: dict[str, float]
    algorithms: dict[str, str]  # of collectives, by term
    bubble_fraction: float
    power_w_per_device: float
    tokens_per_joule: float
    usd_per_hour: float
    usd_per_million_tokens: float
    error_share: float
    _result: Result = field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return self.peak_bytes + self.reserve_bytes <= self.capacity_bytes

    @property
    def error_band(self) -> tuple[float, float]:
        """Step times between which four of five published runs lay, relative to what was predicted for them."""
        return self.step_s / (1 + self.error_share), self.step_s * (1 + self.error_share)

    @cached_property
    def timeline(self) -> Timeline:
        return self._result.timeline


@dataclass(frozen=True)
class Simulation:
    """One pipeline of a plan, simulated."""

    program: engine.Program
    sizes: tuple[StageBytes, ...]
    static: dict[str, Floats]
    result: Result
    step_s: float


def simulate(plan: Plan, laws: Laws | None = None) -> Prediction:
    """Simulate one step of a plan."""
    laws = laws or plan.cluster.laws
    batch = gather([plan])
    found = estimate(batch, laws)
    run = play(plan, batch, found, laws)
    terms = breakdown(plan, found, run.result, run.step_s)
    step_s = sum(terms.values())
    rank, reserve = fullest_rank(run.static, run.result, laws)
    devices, tokens = plan.layout.num_devices, plan.layout.global_batch * plan.seq_len
    model_flops, repeated_flops = step_flops(plan)
    peak = peak_rate(plan.cluster.device, plan.precision.products) * devices
    watts = device_watts(plan.cluster.device, terms, laws)
    usd = plan.cluster.device.usd_per_hour * devices
    return Prediction(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_device=tokens / step_s / devices,
        mfu=model_flops / step_s / peak,
        hfu=(model_flops + repeated_flops) / step_s / peak,
        peak_bytes=run.result.peak_bytes[rank],
        reserve_bytes=reserve,
        capacity_bytes=float(plan.cluster.device.memory_bytes),
        memory=peak_parts(rank, run.static, run.result, run.program.actions, run.sizes),
        breakdown=terms,
        algorithms=algorithms(batch),
        bubble_fraction=idle_share(run.result),
        power_w_per_device=watts,
        tokens_per_joule=tokens / step_s / devices / watts,
        usd_per_hour=usd,
        usd_per_million_tokens=usd_per_million_tokens(usd, tokens / step_s),
        error_share=laws.error_share,
        _result=run.result,
    )


@dataclass(frozen=True)
class Outline:
    """The two numbers that a search compares plans by."""

    step_s: float
    needed_bytes: float


def outline(plan: Plan, laws: Laws) -> Outline:
    """What `simulate` says of a plan's step and memory, without the rest."""
    batch = gather([plan])
    found = estimate(batch, laws)
    run = _play_once(plan, batch, found, laws)
    rank, reserve = fullest_rank(run.static, run.result, laws)
    slow_s = float(straggling(batch, laws)[0]) * run.result.makespan_s
    return Outline(run.step_s + slow_s, run.result.peak_bytes[rank] + reserve)


def play(plan: Plan, batch: Batch, found: Estimate, laws: Laws) -> Simulation:
    """Run the plan's actions; what happens once per step follows on every rank, waiting for slow nodes last."""
    once = _play_once(plan, batch, found, laws)
    slow_s = float(straggling(batch, laws)[0]) * once.result.makespan_s
    return _play_once(plan, batch, found, laws, late=(("stragglers", slow_s),), program=once.program)


def _play_once(
    plan: Plan,
    batch: Batch,
    found: Estimate,
    laws: Laws,
    *,
    late: tuple[tuple[str, float], ...] = (),
    program: engine.Program | None = None,
) -> Simulation:
    """Run the plan's actions and what happens once per step, with something more at its end."""
    _refuse_endless(plan)
    times, sizes = stage_times(plan, batch, found), stage_bytes(plan, batch, laws)
    program = program or _program(plan, times)
    static = static_bytes(plan, batch, laws)
    held = np.asarray(sum(static.values())).tolist()
    tail = (*((name, float(value[0])) for name, value in found.tail.items()), *late)
    result = engine.run(program, times, sizes, static_bytes=held, tail=[tail] * plan.layout.pp)
    step_s = result.makespan_s if plan.stack.barrier else period_seconds(program.actions, times, result, tail=tail)
    return Simulation(program, sizes, static, result, step_s)


def period_seconds(
    actions: Actions, times: tuple[StageTimes, ...], result: Result, *, tail: tuple[tuple[str, float], ...]
) -> float:
    """From one step to the next where no rank waits for all others: each begins anew when it has ended.

    Ranks start in the same staggered way each time, so the longest span of a rank decides (Qi et al. 2023, section 4).
    """
    last = 0.0
    for rank, starts in enumerate(result.starts_s):
        stage, kind, _ = next(a for a in reversed(actions.ranks[rank]) if a.kind in COMPUTE)
        t = times[stage]
        took = {Kind.F: t.f, Kind.I: t.i, Kind.W: t.w, Kind.B: t.i + t.w}[kind]
        last = max(last, starts[-1] + took - starts[0])
    return last + sum(seconds for _, seconds in tail)


GREEDY = ("wave-zb", "zb-v")  # orders that look at what actions take, without looking far
MOST_CELLS = 1_000_000  # stages times microbatches that are played; greedy orders take longer to draw up
MOST_GREEDY_CELLS = 20_000


def _refuse_endless(plan: Plan) -> None:
    """A step of too many actions is refused, with the largest batch that is played."""
    layout, stages = plan.layout, plan.placement.num_stages
    most = MOST_GREEDY_CELLS if layout.schedule in GREEDY else MOST_CELLS
    if stages * layout.num_microbatches > most:
        batch = most // stages * layout.dp * layout.microbatch
        rule = (
            f"{stages} stages x {layout.num_microbatches:,} microbatches are more than the {most:,} that are simulated"
        )
        remedy = f"a global batch of at most {batch:,}, or larger microbatches; a step's terms grow evenly beyond"
        raise InputError(Problem(where="plan", key="layout.global_batch", rule=rule, remedy=remedy))


# What a forward, an input and a weight gradient take when orders that look at times are drawn up: equal parts,
# transformers, transformers that are recomputed. A plan runs the one that is fastest for it.
DRAWN_FOR = ((1, 1, 1), (4, 5, 3), (4, 9, 3))


@lru_cache(maxsize=512)
def drawn_up(schedule: str, shape: Shape) -> tuple[Actions, ...]:
    """The orders of a schedule for a shape: one, or several where it looks at times."""
    order = SCHEDULES[schedule].order
    if schedule not in GREEDY:
        return (order(shape),)
    stages = SCHEDULES[schedule].placement(shape).num_stages
    every = (OrderCosts.uniform(stages, f=f, i=i, w=w) for f, i, w in DRAWN_FOR)
    return tuple(dict.fromkeys(order(replace(shape, costs=costs)) for costs in every))


def _program(plan: Plan, times: tuple[StageTimes, ...]) -> engine.Program:
    """The plan's order, ready to run."""
    found = _ready(plan.layout.schedule, plan.shape)
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda program: engine.run(program, times).makespan_s)


def plan_actions(plan: Plan, times: tuple[StageTimes, ...]) -> Actions:
    """The order that the plan's schedule draws up."""
    return _program(plan, times).actions


def to_run(plan: Plan, laws: Laws | None = None) -> tuple[Actions, tuple[StageTimes, ...]]:
    """What one pipeline of a plan does, and how long each stage's actions are predicted to take."""
    _refuse_endless(plan)
    batch = gather([plan])
    times = stage_times(plan, batch, estimate(batch, laws or plan.cluster.laws))
    return plan_actions(plan, times), times


@lru_cache(maxsize=256)
def _ready(schedule: str, shape: Shape) -> tuple[engine.Program, ...]:
    return tuple(map(engine.compile, drawn_up(schedule, shape)))


def step_flops(plan: Plan) -> tuple[float, float]:
    """FLOPs of a step that the model needs (attention counted whole, PaLM's convention), and of what is repeated."""
    work = Work(plan.seq_len, plan.layout.microbatch, plan.precision.compute)
    microbatches = plan.layout.num_microbatches * plan.layout.dp
    needed = plan.model.forward_flops(work) + plan.model.backward_flops(work)
    again = 0.0
    for variant, count in variants(plan).items():
        for operator in plan.model.by_name[variant.layer].operators:
            whole = plan.recompute is Recompute.FULL or variant.of(operator.name).recompute
            if whole or (plan.recompute is Recompute.SELECTIVE and isinstance(operator, Attention)):
                again += count * operator.forward_flops(work)
    return microbatches * needed, microbatches * again
