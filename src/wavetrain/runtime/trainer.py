"""Trains: every rank builds its stages, runs the plan's actions step by step and takes the optimizer's step.

What a rank must compare itself with (the order, how long actions were predicted to take) comes with the job: the
runtime knows no predictions of its own.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: here once for all, or over a second in every forked rank
from torch import Tensor

from wavetrain.base.errors import RunError
from wavetrain.model.model import Model
from wavetrain.plan.plan import Plan
from wavetrain.runtime.board import kernel
from wavetrain.runtime.chunk import Batch, Chunk, Computed, Durations, Emulated
from wavetrain.runtime.data import MASKED, microbatches, open_dataset, sampling_of
from wavetrain.runtime.executor import Boundary, Executor, Moment
from wavetrain.runtime.inject import Fault, injector
from wavetrain.runtime.parts import Parts
from wavetrain.runtime.record import clock_ahead_s, read_moments, write_moments
from wavetrain.runtime.samehost import open_same_host
from wavetrain.runtime.shared import Group, add_shared, groups_of
from wavetrain.runtime.stages import IGNORED, Stage, cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.transport import Grouped, Transport, links_of, tagged
from wavetrain.runtime.world import World, gloo_group
from wavetrain.schedule.action import Actions, Kind

LOG = logging.getLogger(__name__)
CARRIERS = ("auto", "memory", "gloo")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks know before they start."""

    plan: Plan
    actions: Actions
    steps: int
    seed: int = 0
    learning_rate: float = 1e-3
    emulated: tuple[Durations, ...] | None = None  # of every stage, where nothing is computed
    step_s: float = 0.0  # as predicted
    data: Path | None = None  # tokens, or any file as bytes; None: sequences that count
    transport: str = "auto"  # of CARRIERS
    fault: Fault | None = None  # on purpose
    timeout_s: float = 600.0  # of a single message; the launcher's watch is far quicker


@dataclass(frozen=True)
class RankRecord:
    """What a rank hands in at the end."""

    moments: list[Moment]  # of the last step
    step_ends_s: list[float]
    losses: list[float]  # of each step, on the rank that has the last stage
    static_bytes: int


def train(job: Job, world: World) -> dict[int, RankRecord]:
    """One rank's part of a run; rank 0 gets what all have recorded."""
    torch.set_num_threads(1)
    with gloo_group(world, timeout_s=job.timeout_s):
        runner = _Emulator(job, world) if job.emulated else _Learner(job, world)
        ends, losses, moments = [], [], list[Moment]()
        for step in range(job.steps):
            moments, loss = runner.step(step)
            ends.append(time.monotonic())
            if loss is not None:
                losses.append(loss)
                _tell(job, step, loss)
        ahead_s = clock_ahead_s(world.rank, world.size)
        ends = [end - ahead_s for end in ends]
        world.store.set(f"record/{world.rank}", json.dumps([ends, losses, runner.static_bytes]))
        world.store.set(f"moments/{world.rank}", write_moments(moments, ahead_s=ahead_s))
        return {rank: _record(world, rank) for rank in range(world.size)} if world.rank == 0 else {}


def _tell(job: Job, step: int, loss: float) -> None:
    """A step's loss, where one rank knows all of it; one that is no number ends the run."""
    if not math.isfinite(loss):
        raise RunError(f"the loss of step {step} is {loss}: a smaller --learning-rate, or other data")
    if job.actions.placement.chains == 1:
        LOG.info("step %d  loss %.4f", step, loss)


def _record(world: World, rank: int) -> RankRecord:
    ends, losses, static = json.loads(world.store.get(f"record/{rank}"))
    return RankRecord(read_moments(world.store.get(f"moments/{rank}").decode()), ends, losses, static)


class _Emulator:
    """A rank that waits instead of computing."""

    static_bytes = 0

    def __init__(self, job: Job, world: World) -> None:
        plan, durations = job.plan, job.emulated
        assert durations is not None
        width = _width(plan.model)
        shape = (plan.layout.microbatch, plan.seq_len // plan.layout.cp, width)
        dtype = _dtype(plan)
        local = job.actions.placement.local[world.rank]
        chunks: dict[int, Chunk] = {stage: Emulated(durations[stage], shape, dtype) for stage in local}
        boundary = Boundary(dict.fromkeys(range(job.actions.num_microbatches), shape), dtype)
        transport = carrier(job, world, boundary)
        self._executor = _executor(job, world, chunks, transport, boundary)

    def step(self, step: int) -> tuple[list[Moment], float | None]:  # noqa: ARG002
        return self._executor.step(Batch()), None


class _Learner:
    """A rank that computes."""

    def __init__(self, job: Job, world: World) -> None:
        plan, actions = job.plan, job.actions
        parts = parts_of(plan.model)
        self._job, self._rank, self._progress = job, world.rank, world.progress
        self._dataset = open_dataset(job.data, vocab=parts.vocab, seq_len=plan.seq_len) if job.data else None
        shape = (plan.layout.microbatch, plan.seq_len, parts.hidden)
        boundary = Boundary(dict.fromkeys(range(actions.num_microbatches), shape))
        transport = carrier(job, world, boundary)  # ranks meet here: before their unequal shares of memory are filled
        self._groups = shared_groups(parts, plan, actions)
        self._gradients = Grouped(world.rank, tagged(actions.placement.num_stages, max(1, len(self._groups))))
        self._stages = cut_into_stages(parts, plan.cut, actions.placement.local[world.rank])
        materialize(self._stages, seed=job.seed)
        recomputed = {a.stage for a in actions.ranks[world.rank] if a.kind is Kind.RECOMPUTE}
        self._chunks = {
            number: Computed(stage, split=actions.is_split, recomputed=number in recomputed)
            for number, stage in self._stages.items()
        }
        self._executor = _executor(job, world, self._chunks, transport, boundary)
        self._parameters = own_parameters(self._stages)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=job.learning_rate, foreach=False)

    def _batch(self, step: int) -> Batch:
        if self._dataset is None:
            return synthetic(self._job, step)
        sampling = sampling_of(self._job.plan, seed=self._job.seed)
        return microbatches(self._dataset, sampling, step=step, microbatch=self._job.plan.layout.microbatch)

    @property
    def static_bytes(self) -> int:
        """Parameters, gradients and the optimizer's two moments."""
        return sum(4 * p.numel() * p.element_size() for p in self._parameters)

    def step(self, step: int) -> tuple[list[Moment], float | None]:
        self._progress.computing(-1, "batch")
        moments = self._executor.step(self._batch(step))
        add_shared(self._groups, self._stages, self._job.actions.placement, self._rank, self._gradients)
        self._progress.computing(-1, "optimizer")
        self._optimizer.step()
        for stage in self._stages.values():
            stage.zero_grad(set_to_none=True)
        losses = [loss for chunk in self._chunks.values() for _, loss in sorted(chunk.losses.items())]
        return moments, float(sum(losses)) if losses else None


def own_parameters(stages: dict[int, Stage]) -> list[Tensor]:
    """Every parameter of a rank once; tied ones that share their values are one."""
    by_place = {p.data_ptr(): p for stage in stages.values() for _, p in stage.named()}
    return list(by_place.values())


def shared_groups(parts: Parts, plan: Plan, actions: Actions) -> tuple[Group, ...]:
    """Parameters that several stages have, known on every rank from the model alone."""
    whole = cut_into_stages(parts, plan.cut, range(actions.placement.depth))
    names = {number: [name for name, _ in stage.named()] for number, stage in whole.items()}
    return groups_of(names, parts.ties, actions.placement)


def synthetic(job: Job, step: int) -> Batch:
    """Sequences that can be learnt: each counts on by a step of its own, and starts anywhere. By seed and step."""
    plan = job.plan
    assert plan.model.architecture is not None
    vocab, length = plan.model.architecture.vocab, plan.seq_len
    generator = torch.Generator().manual_seed((job.seed << 32) + step)
    tokens, targets = {}, {}
    for m in range(job.actions.num_microbatches):
        size = (plan.layout.microbatch, 1)
        first, stride = torch.randint(vocab, size, generator=generator), torch.randint(1, 4, size, generator=generator)
        sequence = (first + stride * torch.arange(length + 1)) % vocab
        if plan.model.architecture.head == "causal":
            tokens[m], targets[m] = sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
        else:
            hidden = torch.rand(size[0], length, generator=generator) < MASKED
            hidden[:, 0] = True  # a microbatch without a target would teach nothing
            tokens[m] = sequence[:, :-1].masked_fill(hidden, 0)
            targets[m] = sequence[:, :-1].masked_fill(~hidden, IGNORED)
    return Batch(tokens, targets, sum(int((target != IGNORED).sum()) for target in targets.values()))


def _executor(
    job: Job, world: World, chunks: Mapping[int, Chunk], transport: Transport, boundary: Boundary
) -> Executor:
    before = injector(job.fault, world.rank) if job.fault else None
    rank, actions = world.rank, job.actions
    return Executor(rank, actions, chunks, transport, boundary, progress=world.progress, before=before)


def carrier(job: Job, world: World, boundary: Boundary) -> Transport:
    """How messages between stages travel: through memory where all ranks are on one host, else over gloo."""
    near = job.transport != "gloo" and on_one_host(world)
    if job.transport == "memory" and not near:
        raise RunError("--transport memory: the ranks are not all on one host; gloo goes over the network")
    if near:
        return open_same_host(
            world.rank, world.size, world.store, links_of(job.actions), most_bytes=boundary.most_bytes
        )
    return Grouped(world.rank, tagged(job.actions.placement.num_stages, job.actions.num_microbatches))


def on_one_host(world: World) -> bool:
    """Whether all ranks run under one kernel."""
    world.store.set(f"kernel/{world.rank}", kernel())
    kernels = {world.store.get(f"kernel/{rank}") for rank in range(world.size)}
    return len(kernels) == 1 and b"" not in kernels


def _width(model: Model) -> int:
    assert model.architecture is not None
    return model.architecture.hidden


def _dtype(plan: Plan) -> torch.dtype:
    return torch.float32 if plan.precision.compute.num_bytes == 4 else torch.bfloat16
