"""Ranks that wait instead of computing; whatever they send is real.

One pipeline may stand for all replicas: its messages are sent, and each action takes what it was predicted to take,
collectives included. Or every replica runs: then only compute is waited for, layer by layer, and what layers gather,
scatter and reduce over replicas goes over gloo in the sizes that the simulator counts. Nothing is gathered beside
compute, as FSDP2 on gloo has it; gradients of what is replicated are reduced beside it where the plan says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wavetrain.model.model import Model
from wavetrain.plan.emulation import LayerWork, Travel
from wavetrain.plan.plan import Plan
from wavetrain.runtime.chunk import Batch, Chunk, Emulated, sharpen_timer
from wavetrain.runtime.executor import Boundary, Executor, Moment
from wavetrain.runtime.grid import REPLICATE, SHARD, Grid, open_grid
from wavetrain.runtime.inject import injector, slowed
from wavetrain.runtime.job import Job
from wavetrain.runtime.learner import Done
from wavetrain.runtime.links import carrier
from wavetrain.runtime.sharded import FORMATS
from wavetrain.runtime.spent import HOST, RUNNING, WAITING, spending
from wavetrain.runtime.world import World

# Their old names warn where there are new ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_reduce = dist.all_reduce


class Emulator:
    """One rank."""

    static_bytes = 0

    def __init__(self, job: Job, world: World) -> None:
        """All ranks call this together."""
        plan, local = job.plan, job.actions.placement.local
        self._job, self._progress, self._clock = job, world.progress, Clock()
        grid = open_grid(plan, rank=world.rank, size=world.size) if job.emulation else None
        rank = world.rank if grid is None else grid.stage_rank
        shape = (plan.layout.microbatch, plan.seq_len // plan.layout.cp, _width(plan.model))
        dtype = FORMATS.get(plan.precision.compute, torch.bfloat16)
        ranks = () if grid is None else grid.pipeline
        boundary = Boundary(dict.fromkeys(range(job.actions.num_microbatches), shape), dtype, ranks=ranks)
        transport = carrier(job, world, grid, boundary)
        self._exchange = None if grid is None else Exchange(plan, grid)
        attempt = world.place.attempt
        self._executor = Executor(
            rank,
            job.actions,
            slowed(self._chunks(local[rank], boundary), job.faults, world.progress, attempt=attempt),
            transport,
            boundary,
            progress=world.progress,
            before=injector(job.faults, rank=world.rank, attempt=attempt),
        )

    def _chunks(self, stages: Sequence[int], boundary: Boundary) -> dict[int, Chunk]:
        job, shape = self._job, boundary.shapes[0]
        if job.emulation is None or self._exchange is None:
            assert job.emulated is not None
            return {stage: Emulated(job.emulated[stage], shape, boundary.dtype) for stage in stages}
        result = torch.empty(shape, dtype=boundary.dtype)
        counts = job.actions.microbatches
        layers = job.emulation.stages
        return {
            stage: Layered(layers[stage], self._exchange, self._clock, result=result, backwards=len(counts[stage]))
            for stage in stages
        }

    def memory(self, moments: Sequence[Moment]) -> dict[str, int]:  # noqa: ARG002
        return {}

    def step(self, step: int) -> Done:  # noqa: ARG002
        """Every microbatch; where all replicas run, also what follows them."""
        with spending(RUNNING):
            moments = self._executor.step(Batch())
        emulation, exchange = self._job.emulation, self._exchange
        if emulation is None or exchange is None:
            return Done(moments)
        self._progress.together()
        with spending("reduction"):
            exchange.finish()
        with spending(WAITING):
            _all_reduce(torch.zeros(2, dtype=torch.float64))  # the loss and the norm of the gradients
        self._progress.computing(-1, "optimizer")
        with spending("optimizer"):
            self._clock.wait(emulation.optimizer_s)
        with spending("gather"):
            exchange.collect()
        with spending(HOST):
            self._clock.wait(emulation.host_s)
        return Done(moments)


class Clock:
    """Waits. What one takes too long, as sleeps do, the next one makes up for: so nobody has to spin."""

    def __init__(self) -> None:
        sharpen_timer()
        self.waited_s = 0.0
        self._late_s = 0.0

    def wait(self, seconds: float) -> None:
        start = time.monotonic()
        self.waited_s += seconds
        rest = seconds - self._late_s
        if rest > 0:
            time.sleep(rest)
        self._late_s += time.monotonic() - start - seconds


class Layered:
    """A stage whose layers wait for their compute and exchange what they have cut or copied."""

    held_bytes = 0

    def __init__(
        self, layers: Sequence[LayerWork], exchange: Exchange, clock: Clock, *, result: Tensor, backwards: int
    ) -> None:
        self._layers, self._exchange, self._clock, self._result = layers, exchange, clock, result
        self._backwards = self._left = backwards  # in a step
        self._saved: set[int] = set()
        self._kept: set[int] = set()  # layers that are gathered for the rest of the step

    @property
    def live(self) -> int:
        return len(self._saved)

    def begin(self, batch: Batch) -> None:  # noqa: ARG002
        assert not self._saved, "a step ended with activations held"
        self._left = self._backwards
        self._kept.clear()

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:  # noqa: ARG002
        for number, layer in enumerate(self._layers):
            for travel in layer.sharded:
                if not (travel.keep and number in self._kept):
                    self._exchange.gather(travel)
            self._kept.add(number)
            self._clock.wait(layer.forward_s)
        self._saved.add(microbatch)
        return self._result

    def recompute(self, microbatch: int) -> None:  # noqa: ARG002
        self._clock.wait(sum(layer.forward_s for layer in self._layers))

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:  # noqa: ARG002
        for layer in reversed(self._layers):
            self._back(layer, layer.input_s + layer.weight_s)
            if self._left == 1:
                self._exchange.reduce(layer)
        self._end(microbatch)
        return self._result

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:  # noqa: ARG002
        for layer in reversed(self._layers):
            self._back(layer, layer.input_s)
        return self._result

    def backward_weight(self, microbatch: int) -> None:
        for layer in reversed(self._layers):
            self._clock.wait(layer.weight_s)
            if self._left == 1:
                self._exchange.reduce(layer)
        self._end(microbatch)

    def _back(self, layer: LayerWork, seconds: float) -> None:
        """Of a backward that is split, scatters are with the first part: so the simulator has it."""
        for travel in layer.sharded:
            if travel.in_backward and not travel.keep:
                self._exchange.gather(travel)
        self._clock.wait(seconds)
        for travel in layer.sharded:
            self._exchange.scatter(travel)

    def _end(self, microbatch: int) -> None:
        self._left -= 1
        self._saved.remove(microbatch)


class Exchange:
    """Collectives of one rank with its replicas; zeros of the right sizes."""

    def __init__(self, plan: Plan, grid: Grid) -> None:
        precision, layout = plan.precision, plan.layout
        self._compute, self._gradients = FORMATS[precision.compute], FORMATS[precision.gradients]
        self._beside, self._bucket_bytes = plan.stack.gradient_overlap, plan.stack.bucket_bytes
        self._zero1, self._dp = layout.shard_optimizer, layout.dp
        self._all = grid.dp.get_group() if layout.dp > 1 else None
        self._shards = {size: mesh[SHARD].get_group() for size, mesh in grid.meshes.items() if size > 1}
        inside = [size for size in self._shards if size < layout.dp]
        self._copies = {size: grid.meshes[size][REPLICATE].get_group() for size in inside}
        self._zeros: dict[tuple[torch.dtype, bool], Tensor] = {}
        self._works: list[dist.Work] = []
        self._waiting: Counter[int] = Counter()  # elements to be added over copies of a group; 0: over all replicas
        self._replicated = 0  # elements of this step that every replica has whole

    def gather(self, travel: Travel) -> None:
        """Before a forward or a backward."""
        if travel.hidden:
            return
        each = -(-travel.elements // travel.collectives // travel.group)
        with spending("sharding"):
            for _ in range(travel.collectives):
                whole = self._buffer(each * travel.group, self._compute)
                _gather(whole, self._buffer(each, self._compute, own=True), group=self._shards[travel.group])

    def scatter(self, travel: Travel) -> None:
        """A microbatch's gradients."""
        if travel.hidden:
            return
        each = -(-travel.elements // travel.collectives // travel.group)
        with spending("sharding"):
            for _ in range(travel.collectives):
                whole = self._buffer(each * travel.group, self._gradients)
                mine = self._buffer(each, self._gradients, own=True)
                _reduce_scatter(mine, whole, group=self._shards[travel.group])

    def reduce(self, layer: LayerWork) -> None:
        """A layer's gradients are complete: add them over replicas now, or remember to."""
        if self._all is None:
            return
        own = Counter({0: layer.replicated})
        for travel in layer.sharded:
            if travel.group in self._copies:
                own[travel.group] += -(-travel.elements // travel.group)
        self._replicated += layer.replicated
        if self._beside:
            self._launch(own)
        else:
            self._waiting += own

    def finish(self) -> None:
        """Wait until all gradients are added."""
        self._launch(self._waiting)
        self._waiting.clear()
        for work in self._works:
            work.wait()
        self._works.clear()

    def collect(self) -> None:
        """Parameters whose states are cut over replicas, whole again (ZeRO-1)."""
        elements, self._replicated = self._replicated, 0
        if self._zero1 and self._all is not None and elements:
            each = -(-elements // self._dp)
            whole = self._buffer(each * self._dp, self._compute)
            _gather(whole, self._buffer(each, self._compute, own=True), group=self._all)

    def _launch(self, elements: Counter[int]) -> None:
        for group, count in sorted(elements.items()):
            pieces = 1
            if group == 0 and self._bucket_bytes is not None:
                pieces = max(1, -(-count * self._gradients.itemsize // int(self._bucket_bytes)))
            for _ in range(pieces if count else 0):
                self._works.append(self._added(-(-count // pieces), group))

    def _added(self, count: int, group: int) -> dist.Work:
        if group == 0 and self._zero1:
            each = -(-count // self._dp)
            whole, mine = self._buffer(each * self._dp, self._gradients), self._buffer(each, self._gradients, own=True)
            work: dist.Work | None = _reduce_scatter(mine, whole, group=self._all, async_op=True)
        else:
            among = self._copies[group] if group else self._all
            work = _all_reduce(self._buffer(count, self._gradients), group=among, async_op=True)
        assert work is not None
        return work

    def _buffer(self, count: int, dtype: torch.dtype, *, own: bool = False) -> Tensor:
        """So many zeros, always the same: sums of zeros are zeros, so collectives may use them at the same time."""
        known = self._zeros.get((dtype, own))
        if known is None or known.numel() < count:
            known = self._zeros[dtype, own] = torch.zeros(count, dtype=dtype)
        return known[:count]


def _width(model: Model) -> int:
    assert model.architecture is not None
    return model.architecture.hidden
