"""`Learner`: one rank that computes. Its stages as the plan runs them, their actions, and the optimizer's step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.base.errors import RunError
from wavetrain.plan.plan import Plan
from wavetrain.runtime.beside import alive
from wavetrain.runtime.budget import Budget
from wavetrain.runtime.chunk import Batch, Computed
from wavetrain.runtime.composed import Composed, Leaf, choices_of, compose, laid_apart
from wavetrain.runtime.data import counting, microbatches, open_dataset, sampling_of
from wavetrain.runtime.executor import Boundary, Executor, Moment
from wavetrain.runtime.grid import open_grid
from wavetrain.runtime.imported import is_loaded, load_values
from wavetrain.runtime.inject import When, injector, slowed, strike
from wavetrain.runtime.job import Job
from wavetrain.runtime.learn import Held, clip, learning_rate, optimizer_of, set_learning_rate
from wavetrain.runtime.links import carrier
from wavetrain.runtime.parts import Parts
from wavetrain.runtime.sharded import policy_of
from wavetrain.runtime.shared import Group, Holder, add_shared, groups_of
from wavetrain.runtime.spent import RUNNING, WAITING, Weighed, charged, spending
from wavetrain.runtime.stages import cut_into_stages, materialize
from wavetrain.runtime.transport import Grouped, tagged
from wavetrain.runtime.world import World
from wavetrain.schedule.action import Actions, Kind

ADAM_STATES = 2  # moments


@dataclass(frozen=True)
class Done:
    """What a step came to."""

    moments: list[Moment]
    loss: float | None = None  # of the whole step, the same on every rank
    gradient_norm: float | None = None  # before clipping
    learning_rate: float | None = None


class Learner:
    """Builds its stages, then takes steps."""

    def __init__(self, job: Job, world: World) -> None:
        plan, actions = job.plan, job.actions
        self._job, self._world, self._progress = job, world, world.progress
        self.grid = grid = open_grid(plan, rank=world.rank, size=world.size)
        self._parts = parts = job.parts()
        self.ties, self.depth = parts.ties, actions.placement.depth
        self._dataset = open_dataset(job.data, vocab=parts.vocab, seq_len=plan.seq_len) if job.data else None
        boundary = boundary_of(plan, parts.hidden, job.dtype, grid.pipeline)
        transport = carrier(job, world, grid, boundary)  # ranks meet here: before their shares of memory are filled
        self._groups = shared_groups(parts, plan, actions)
        route = tagged(actions.placement.num_stages, max(1, len(self._groups)))
        self._shared = Grouped(grid.stage_rank, route, ranks=grid.pipeline)
        self.stages = self._build()
        self._weighed: list[Weighed] = []
        self._chunks = {number: self._chunk(composed) for number, composed in self.stages.items()}
        before = injector(job.faults, rank=world.rank, attempt=world.place.attempt)
        self._executor = Executor(
            grid.stage_rank,
            actions,
            slowed(self._chunks, job.faults, world.progress, attempt=world.place.attempt),
            transport,
            boundary,
            progress=world.progress,
            before=before,
        )
        self.leaves = {number: tuple(composed.leaves()) for number, composed in self.stages.items()}
        self._trained = trained([leaf for own in self.leaves.values() for leaf in own])
        self._optimizer = optimizer_of(self._trained, job.adamw)
        self._names = counted_names(parts, plan, actions, self._groups)
        self._budget = None if job.memory_limit is None else self._limited(world.rank, job.memory_limit)
        if job.load is not None and is_loaded(job):
            alive(world.progress, partial(load_values, job.load, self.every_leaf(), parts))

    def _build(self) -> dict[int, Composed]:
        job, plan, grid = self._job, self._job.plan, self.grid
        stages = cut_into_stages(self._parts, cut_of(plan, self._parts), job.actions.placement.local[grid.stage_rank])
        materialize(stages, seed=job.seed, dtype=job.dtype)
        apart = laid_apart(self._groups, choices_of(plan))
        split = job.actions.is_split
        self._modules = stages
        return {number: compose(s, plan, grid, is_split=split, apart=apart) for number, s in stages.items()}

    def _chunk(self, composed: Composed) -> Computed:
        actions, number = self._job.actions, composed.number
        row = actions.ranks[self.grid.stage_rank]
        watched = None if composed.is_plain else Weighed(composed)
        self._weighed += [] if watched is None else [watched]
        return Computed(
            self._modules[number],
            split=actions.is_split,
            recomputed=any(a.kind is Kind.RECOMPUTE and a.stage == number for a in row),
            accumulation=watched,
            num_microbatches=len(actions.microbatches[number]),
        )

    def _limited(self, rank: int, limit: int) -> Budget:
        """Hold no more than the limit, or say what does."""
        budget = Budget(rank, limit, self.static_bytes)
        leaves = chain.from_iterable(self.leaves.values())
        budget.check_static((leaf.name, (2 + ADAM_STATES) * leaf.values.nbytes) for leaf in leaves)
        for composed in self.stages.values():
            budget.watch(composed.sharded.units, lambda: sum(chunk.held_bytes for chunk in self._chunks.values()))
        return budget

    @property
    def static_bytes(self) -> int:
        """Parameters, gradients and the optimizer's moments."""
        return sum((2 + ADAM_STATES) * values.nbytes for values in self._trained.values())

    def memory(self, moments: Sequence[Moment]) -> dict[str, int]:
        """Bytes by the simulator's names, at the fullest end of an action; what comes and goes within is not known."""
        values = sum(values.nbytes for values in self._trained.values())
        held = max((moment.held_bytes for moment in moments), default=0)
        gathered = min(held, sum(watched.gathered_bytes for watched in self._weighed))
        states = {"parameters": values, "gradients": values, "optimizer": ADAM_STATES * values}
        return states | {"gathered": gathered, "activations": held - gathered}

    def step(self, step: int) -> Done:
        """Every microbatch of a step, forward and backward, and the optimizer's step."""
        job, progress = self._job, self._progress
        progress.computing(-1, "batch")
        batch = self._batch(step)
        with spending(RUNNING):
            moments = self._executor.step(batch)
        if self._budget is not None:
            self._budget.check_moments(moments)
        progress.together()
        placement = job.actions.placement
        with spending(WAITING):
            add_shared(self._groups, self.stages, placement, self.grid.stage_rank, self._shared)
        loss, norm = self._agree(step)
        progress.computing(-1, "optimizer")
        strike(job.faults, When.OPTIMIZER, rank=self.grid.rank, attempt=self._world.place.attempt, step=step)
        rate = learning_rate(job.rate, step=step)
        with spending("optimizer"):
            self._learn(rate)
        return Done(moments, loss, norm, rate)

    def every_leaf(self) -> Iterator[Leaf]:
        """All that this rank trains."""
        return chain.from_iterable(self.leaves.values())

    def counted_leaves(self) -> Iterator[Leaf]:
        """Of equal copies on all ranks one; none under a name that has another one's values."""
        for number, leaves in self.leaves.items():
            if number < self.depth:  # a second copy of the model has nothing new
                yield from (leaf for leaf in leaves if leaf.counts and leaf.name not in self.ties)

    def optimizer_state(self, leaf: Leaf) -> dict[str, Tensor]:
        """What the optimizer keeps for a leaf; nothing before the first step, and of what has no gradient."""
        values = self._trained.get(leaf.key)
        return {} if values is None else self._optimizer.state.get(values, {})

    def set_optimizer_state(self, leaf: Leaf, state: dict[str, Tensor], *, step: int) -> None:
        values = self._trained.get(leaf.key)
        if values is not None and state:
            self._optimizer.state[values] = {"step": torch.tensor(float(step)), **state}

    def _batch(self, step: int) -> Batch:
        plan, grid = self._job.plan, self.grid
        sampling = sampling_of(plan, seed=self._job.seed)
        share = {"microbatch": plan.layout.microbatch, "replica": grid.replica, "replicas": plan.layout.dp}
        if self._dataset is None:
            return counting(sampling, vocab=self._parts.vocab, step=step, **share)
        return microbatches(self._dataset, sampling, step=step, **share)

    def _agree(self, step: int) -> tuple[float, float]:
        """The step's loss and the norm of its gradients, the same on all ranks; gradients are clipped."""
        own = [loss for chunk in self._chunks.values() for _, loss in sorted(chunk.losses.items())]
        loss = torch.zeros((), dtype=torch.float64)
        if own and self.grid.part == 0:
            loss += sum(float(part) for part in own)

        def add_over_ranks(squares: Tensor) -> None:
            together = torch.cat([squares, loss.reshape(1)])
            if dist.get_world_size() > 1:
                charged(WAITING, dist.all_reduce)(together)
            squares.copy_(together[:-1])
            loss.copy_(together[-1])

        held = self._held()
        try:
            norm = clip(held, names=self._names, most=self._job.clip, add_over_ranks=add_over_ranks)
        except RunError:
            raise self._broken(step, loss.item(), held) from None
        if not math.isfinite(loss.item()):
            raise self._broken(step, loss.item(), held)
        return loss.item(), norm

    def _broken(self, step: int, loss: float, held: Sequence[Held]) -> RunError:
        """What is no number, and where: the parameter nearest to the loss, where the backward began. All ranks ask."""
        mine = [item.name for item in held if not torch.isfinite(item.gradient).all()]
        deepest = max(self.stages)  # a rank's last stage
        self._world.store.set(f"broken/{self.grid.rank}", json.dumps([deepest, mine]))
        told = [json.loads(self._world.store.get(f"broken/{rank}")) for rank in range(self._world.size)]
        _, least = max((bool(names), stage, -rank) for rank, (stage, names) in enumerate(told))[1:]
        rank, names = -least, told[-least][1]
        rate = learning_rate(self._job.rate, step=step)
        what = f"the gradient of {names[-1]} on rank {rank} is not finite" if names else "all gradients are finite"
        several = f", nor are {sum(len(own) for _, own in told) - 1} others on all ranks" if names else ""
        remedy = "a smaller --learning-rate, a --warmup, a --clip, or other data"
        return RunError(
            f"step {step}: the loss is {loss:.6g} at a learning rate of {rate:.3g}, {what}{several}; try {remedy}"
        )

    def _held(self) -> list[Held]:
        """This rank's gradients; of what stages share the first holder counts."""
        first = {holder: group.holders[0] for group in self._groups for holder in group.holders}
        held = []
        for number, leaves in self.leaves.items():
            for leaf in leaves:
                holder, gradient = Holder(number, leaf.name), leaf.gradient
                if gradient is not None:
                    counting_one = first.get(holder, holder)
                    held.append(Held(counting_one.name, gradient, counts=leaf.counts and counting_one == holder))
        return held

    def _learn(self, rate: float) -> None:
        set_learning_rate(self._optimizer, rate)
        for leaf in self.every_leaf():
            values = self._trained.get(leaf.key)
            if values is not None:
                values.grad = leaf.gradient
        self._optimizer.step()
        self._optimizer.zero_grad()
        for composed in self.stages.values():
            composed.module.zero_grad(set_to_none=True)


def cut_of(plan: Plan, parts: Parts) -> tuple[int, ...]:
    """How many blocks each stage has; a module that was not taken apart has none."""
    return (0,) if parts.is_whole else plan.cut


def boundary_of(plan: Plan, hidden: int, own: torch.dtype, ranks: tuple[int, ...]) -> Boundary:
    """What crosses between stages: with sequence parallelism each part's share of a sequence."""
    layout = plan.layout
    length = plan.seq_len // (layout.tp if layout.sequence_parallel else 1)
    shape = (layout.microbatch, length, hidden)
    dtype = policy_of(plan.precision, own).param_dtype or own
    return Boundary(dict.fromkeys(range(layout.num_microbatches), shape), dtype, ranks=ranks)


def trained(leaves: Sequence[Leaf]) -> dict[str, Tensor]:
    """What the optimizer steps: every leaf once, where tied ones share their values, by its key."""
    found: dict[int, tuple[str, Tensor]] = {}
    for leaf in leaves:
        place = leaf.values.data_ptr() if leaf.values.numel() else id(leaf.parameter)  # empty shards are all at 0
        found.setdefault(place, (leaf.key, leaf.values))
    return dict(found.values())


def shared_groups(parts: Parts, plan: Plan, actions: Actions) -> tuple[Group, ...]:
    """Parameters that several stages have, known on every rank from the model alone."""
    return groups_of(_names(parts, plan, actions), parts.ties, actions.placement)


def counted_names(parts: Parts, plan: Plan, actions: Actions, groups: Sequence[Group]) -> list[str]:
    """The names under which gradients count for the norm."""
    first = {holder: group.holders[0].name for group in groups for holder in group.holders}
    names = _names(parts, plan, actions)
    return sorted({first.get(Holder(stage, name), name) for stage, own in names.items() for name in own})


def _names(parts: Parts, plan: Plan, actions: Actions) -> dict[int, list[str]]:
    whole = cut_into_stages(parts, cut_of(plan, parts), range(actions.placement.depth))
    return {number: [name for name, _ in stage.named()] for number, stage in whole.items()}
