"""Trains: every rank runs the plan's actions step by step and records what happened; rank 0 keeps the log."""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from wavetrain.base.codec import Json
from wavetrain.base.units import format_bytes
from wavetrain.runtime.beside import alive
from wavetrain.runtime.emulator import Emulator
from wavetrain.runtime.executor import Moment
from wavetrain.runtime.export import save_model
from wavetrain.runtime.inject import When, strike
from wavetrain.runtime.job import Job
from wavetrain.runtime.learner import Done, Learner
from wavetrain.runtime.logs import RunLog, StepRecord
from wavetrain.runtime.pace import Pace
from wavetrain.runtime.record import clock_ahead_s, read_moments, write_moments
from wavetrain.runtime.saving import Saver, is_saved
from wavetrain.runtime.settle import settle
from wavetrain.runtime.spent import Spent
from wavetrain.runtime.stragglers import as_document
from wavetrain.runtime.world import World, gloo_group

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankRecord:
    """What a rank hands in at the end."""

    moments: list[Moment]  # of the last step
    step_ends_s: list[float]
    losses: list[float]  # of each step, the same on every rank
    gradient_norms: list[float]
    static_bytes: int
    peak_bytes: int  # parameters, gradients, the optimizer's states, what was gathered, activations
    busy_s: float = 0.0  # computing, of a step
    spent: dict[str, float] = field(default_factory=dict)  # seconds of a step by term
    waited_s: float = 0.0  # in the last step
    memory: dict[str, int] = field(default_factory=dict)  # bytes by kind
    stragglers: Json = field(default_factory=dict)  # who held the run up; rank 0 knows


def train(job: Job, world: World) -> dict[int, RankRecord]:
    """One rank's part of a run; rank 0 gets what all have recorded."""
    settle(world.place)
    strike(job.faults, When.START, rank=world.rank, attempt=world.place.attempt)
    with ExitStack() as stack:
        stack.enter_context(gloo_group(world, timeout_s=job.timeout_s))
        runner = Emulator(job, world) if job.emulated else Learner(job, world)
        saver = Saver(job, world, runner) if isinstance(runner, Learner) and is_saved(job) else None
        first = world.progress.step = saver.resume() if saver else 0
        log = stack.enter_context(RunLog(job.logs)) if job.logs is not None and world.rank == 0 else None
        pace = Pace(job, world)
        ends, done = [], list[Done]()
        begun, spent = time.monotonic(), Spent()
        for step in range(first, job.steps):
            done.append(runner.step(step))
            ends.append(time.monotonic())
            pace.after(done[-1].moments)
            if saver is not None:
                saver.after(step + 1)
            if world.rank == 0 and done[-1].loss is not None:
                _tell(_step_record(job, step, done[-1], ends[-1] - (ends[-2] if done[1:] else begun), runner), log)
            spent.after(done[-1].moments)
            if done[1:]:
                done[-2] = Done([], done[-2].loss, done[-2].gradient_norm)  # a long run keeps its last step's moments
        if saver is not None:
            saver.finish()
        if job.save is not None and isinstance(runner, Learner):
            alive(world.progress, partial(save_model, runner, world, job.save, config=job.config))
        if saver is not None:
            saver.end()
        moments = done[-1].moments if done else []  # nothing was left to do
        peak = runner.static_bytes + max((moment.held_bytes for moment in moments), default=0)
        ahead_s = clock_ahead_s(world.rank, world.size)
        losses = [d.loss for d in done if d.loss is not None]
        norms = [d.gradient_norm for d in done if d.gradient_norm is not None]
        pace.tell(ahead_s)
        record = [[end - ahead_s for end in ends], losses, norms, runner.static_bytes, peak, pace.busy_s]
        record += [spent.medians, spent.waited_s, runner.memory(moments)]
        world.store.set(f"record/{world.rank}", json.dumps(record))
        world.store.set(f"moments/{world.rank}", write_moments(moments, ahead_s=ahead_s))
        if world.rank != 0:
            return {}
        records = {rank: _record(world, rank) for rank in range(world.size)}
        return records | {0: replace(records[0], stragglers=as_document(pace.conclude()))}


def _record(world: World, rank: int) -> RankRecord:
    moments = read_moments(world.store.get(f"moments/{rank}").decode())
    return RankRecord(moments, *json.loads(world.store.get(f"record/{rank}")))


def _step_record(job: Job, step: int, done: Done, seconds: float, runner: Learner | Emulator) -> StepRecord:
    held = max((moment.held_bytes for moment in done.moments), default=0)
    return StepRecord(
        step=step,
        loss=done.loss,
        tokens_per_s=job.plan.layout.global_batch * job.plan.seq_len / seconds,
        learning_rate=done.learning_rate,
        gradient_norm=done.gradient_norm,
        peak_bytes=runner.static_bytes + held,
        mfu=job.step_flops / seconds / job.peak_flops if job.peak_flops else None,
    )


def _tell(record: StepRecord, log: RunLog | None) -> None:
    if log is not None:
        log.write(record)
    known = {"loss": f"{record.loss:.4f}", "norm": f"{record.gradient_norm:.3g}"}
    known["tokens/s"] = f"{record.tokens_per_s:,.0f}"
    known["memory"] = format_bytes(record.peak_bytes or 0)
    if record.mfu is not None:
        known["MFU"] = f"{record.mfu:.1%}"
    LOG.info("step %d  %s", record.step, "  ".join(f"{name} {value}" for name, value in known.items()))
