"""Our executor beside torch.distributed.pipelining: measured step over the ideal of the same order, in one run.

Stages are emulated: autograd functions that wait, F, I and W separately; messages are real. The ideal is the schedule's
own length with these times and no transfer. Repetitions of all implementations alternate in the same processes; a step
is the latest rank's end minus a common start. The time waited by each rank is checked against the nominal.

    python benchmarks/executor.py [--ranks 2,4,8] [--chunk-ms 10] [--kilobytes 64] [--repeats 7] [--only wave-2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from wavetrain.runtime.chunk import SPIN_S, Batch, Computed, sharpen_timer, wait_until
from wavetrain.runtime.executor import Boundary, Executor
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.samehost import open_same_host
from wavetrain.runtime.settle import settle
from wavetrain.runtime.transport import Grouped, Transport, links_of, tagged
from wavetrain.runtime.world import World, gloo_group
from wavetrain.schedule import SCHEDULES, Actions, Costs, Shape, evaluate, write_text

ORDERS = {
    "1f1b": ("1f1b", {}),
    "interleaved": ("interleaved", {"chunks": 2}),
    "wave-1": ("wave", {"waves": 1}),
    "wave-2": ("wave", {"waves": 2}),
    "wave-4": ("wave", {"waves": 4}),
    "split wave-1": ("wave-zb", {"waves": 1}),
    "split wave-2": ("wave-zb", {"waves": 2}),
}
WARM_S = 300e-6
NOTHING, GRADIENT = torch.zeros(8, requires_grad=True), torch.zeros(8)
waited_s = 0.0  # by this process


def take(seconds: float) -> None:
    """Wait, and end with autograd at work, as on the host of a busy accelerator.

    A core that has slept runs the first autograd call ten times as slow as a busy one (320 instead of 40 us here),
    which would be most of what is measured, and has nothing to do with who calls it.
    """
    if not seconds:
        return
    global waited_s  # noqa: PLW0603 - autograd calls this; a process has one clock
    end = time.monotonic() + seconds
    wait_until(end - WARM_S)
    with torch.enable_grad():
        while time.monotonic() < end - SPIN_S:
            torch.autograd.backward(Work.apply(NOTHING, Weight.apply(NOTHING, 0.0), 0.0, 0.0), GRADIENT)
    wait_until(end)
    waited_s += seconds


class Work(torch.autograd.Function):
    """What a stage does: F forward, I backward. Whatever else there is to do is done before a wait, not after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, f_s: float, i_s: float) -> Tensor:
        ctx.weight, ctx.i_s, result = weight, i_s, torch.empty_like(x)
        take(f_s)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        result, i_s, ctx.i_s = torch.empty_like(gradient), ctx.i_s, 0.0  # a weight's branch passes here once more
        take(i_s)
        return result, ctx.weight, None, None


class Weight(torch.autograd.Function):
    """What a stage does for the gradient of its weight: W, in the backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, w_s: float) -> Tensor:
        ctx.w_s = w_s
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        result = torch.empty_like(gradient)
        take(ctx.w_s)
        return result, None


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = torch.empty_like(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return ctx.like


class Slow(nn.Module):
    """An emulated stage. The first has a parameter on its input's path: without one its I would not run in PyTorch."""

    def __init__(self, number: int, depth: int, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.is_first, self.is_last = number == 0, number == depth - 1
        self.seconds = seconds
        self.entry = nn.Parameter(torch.zeros(())) if self.is_first else None

    def forward(
        self, x: Tensor, targets: Tensor | None = None, *, entered: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """As a stage of ours, and without targets as one of PyTorch's, which has a loss of its own."""
        f_s, i_s, w_s = self.seconds
        hidden = Work.apply(self.entry.expand_as(x), x, 0.0, 0.0) if self.is_first else x
        if self.is_first and entered is not None:
            hidden = entered(hidden)
        result = Work.apply(hidden, Weight.apply(self.weight, w_s), f_s, i_s)
        return result if targets is None else Loss.apply(result)


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    order: str
    ranks: int
    microbatches: int
    chunk_s: float
    kilobytes: int
    repeats: int

    @property
    def actions(self) -> Actions:
        kind, more = ORDERS[self.order]
        return SCHEDULES[kind].order(Shape(self.ranks, self.microbatches, **more))

    @property
    def costs(self) -> Costs:
        t = self.chunk_s
        return Costs.uniform(self.actions.placement.num_stages, f=t, i=t, w=t)

    @property
    def ideal_s(self) -> float:
        return float(evaluate(self.actions, self.costs).makespan)


Step = Callable[[], object]


Carrier = Callable[[Setting, World], Transport]


def by_memory(setting: Setting, world: World) -> Transport:
    """Shared memory: what `wavetrain train --local` uses."""
    links, crowded = links_of(setting.actions), world.size > world.place.num_cores
    return open_same_host(
        world.rank,
        world.size,
        world.store,
        links,
        most_bytes=setting.kilobytes * 1024,
        crowded=crowded,
    )


def by_gloo(setting: Setting, world: World) -> Transport:
    return Grouped(world.rank, tagged(setting.actions.placement.num_stages, setting.microbatches))


def our_step(setting: Setting, world: World, stages: dict[int, Slow], batch: Tensor, carrier: Carrier) -> Step:
    actions, split = setting.actions, setting.actions.is_split
    count = setting.microbatches
    chunks = {number: Computed(stage, split=split) for number, stage in stages.items()}
    boundary = Boundary(dict.fromkeys(range(count), (1, batch.shape[1])))
    executor = Executor(world.rank, actions, chunks, carrier(setting, world), boundary, progress=world.progress)
    tokens = {m: batch[m : m + 1] for m in range(count)}
    step = Batch(tokens, tokens, count)
    return lambda: executor.step(step)


def torch_step(setting: Setting, _world: World, stages: dict[int, Slow], batch: Tensor) -> Step:
    depth, count = setting.actions.placement.num_stages, setting.microbatches
    device, one = torch.device("cpu"), batch[:1].clone()
    inner = one.clone().requires_grad_()  # said to need a gradient: PyTorch sends none otherwise
    theirs = [
        PipelineStage(stage, number, depth, device, input_args=inner if number else one, output_args=inner)
        for number, stage in stages.items()
    ]
    if setting.order == "1f1b":
        schedule: Any = Schedule1F1B(theirs[0], count, loss_fn=loss)
    elif setting.order == "interleaved":
        schedule = ScheduleInterleaved1F1B(theirs, count, loss_fn=loss)
    else:
        schedule = _PipelineScheduleRuntime(theirs, count, loss_fn=loss)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "order.csv"
            file.write_text(write_text(setting.actions), encoding="utf-8")
            schedule._load_csv(str(file))  # noqa: SLF001 - the only way to run an order of one's own
    given = (batch,) if 0 in stages else ()
    more = {"target": batch} if depth - 1 in stages else {}
    return lambda: schedule.step(*given, **more)


def loss(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001
    return Loss.apply(output)


def timed(step: Step) -> float:
    """Seconds from a common start to the end of the last rank."""
    start = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
    dist.broadcast(start, 0)
    wait_until(start.item())
    step()
    took = torch.tensor([time.monotonic() - start.item()], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(setting: Setting, world: World) -> dict[str, list[float]]:
    settle()  # as a rank that trains
    sharpen_timer()
    warnings.simplefilter("ignore")
    actions = setting.actions
    placement, t = actions.placement, setting.chunk_s
    batch = torch.zeros(setting.microbatches, setting.kilobytes * 256)
    makers = {
        "ours": partial(our_step, carrier=by_memory),
        "gloo": partial(our_step, carrier=by_gloo),
        "torch": torch_step,
    }
    steps = {}
    for name, make in makers.items():
        own = {s: Slow(s, placement.num_stages, (t, t, t)) for s in placement.local[world.rank]}
        steps[name] = make(setting, world, own, batch)
    nominal = 3 * t * len(placement.local[world.rank]) * setting.microbatches
    found: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(setting.repeats + 1):
        for name, step in steps.items():
            before = waited_s
            seconds = timed(step)
            if abs(waited_s - before - nominal) > 1e-9:
                raise AssertionError(f"{name} waited {waited_s - before} s instead of {nominal} s on rank {world.rank}")
            if repeat:  # the first warms up
                found[name].append(seconds)
    return found


def run(setting: Setting) -> dict[str, list[float]]:
    def work(world: World) -> None:
        with gloo_group(world, timeout_s=60):
            found = measure(setting, world)
        if world.rank == 0:
            world.give(json.dumps(found).encode())

    outcome = run_local(work, setting.ranks)
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return json.loads(outcome.results[0])


# ranks, milliseconds of a chunk, kilobytes of a message
TABLE = ((2, 20, 64), (4, 20, 64), (2, 10, 64), (4, 10, 64), (8, 10, 64), (8, 10, 1024))
ASKED = dict(zip(TABLE, (1.02, 1.02, 1.03, 1.03, 1.05, 1.09), strict=True))  # at most so much over the ideal
SHARE = 0.65  # of PyTorch's excess at most
HEAD = "| ranks | chunk ms | KB | order | ideal ms | ours | ours over gloo | torch | excess / torch's | over gloo |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default=",".join(ORDERS), help="orders, of " + ", ".join(ORDERS))
    parser.add_argument("--ranks", type=int, help="only rows with so many ranks")
    parser.add_argument("--summary", type=Path, help="only sum up the table in this file")
    given = parser.parse_args()
    if given.summary:
        print("\n".join(summary(given.summary.read_text(encoding="utf-8"))))
        return
    print(f"{HEAD}\n|{'---|' * 10}", flush=True)
    for ranks, ms, kilobytes in TABLE:
        if given.ranks in (None, ranks):
            for order in given.only.split(","):
                report(Setting(order, ranks, ranks, ms / 1e3, kilobytes, given.repeats))


def summary(text: str) -> list[str]:
    """A table's rows by setting: from the least to the greatest median over ideal, and who is above the asked share."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 10 and row[0].isdigit()]
    lines = ["| ranks | chunk ms | KB | asked | ours |", "|---|---|---|---|---|"]
    for setting, asked in ASKED.items():
        medians = sorted(row[5].split()[0] for row in rows if tuple(map(int, row[:3])) == setting)
        lines.append(f"| {setting[0]} | {setting[1]} | {setting[2]} | {asked} | {medians[0]} to {medians[-1]} |")
    above = [row for row in rows if float(row[8]) > SHARE]
    named = ", ".join(f"{row[3]} on {row[0]} ranks at {row[1]} ms and {row[2]} KB ({row[8]})" for row in above)
    told = f"Our excess is at most {SHARE} of PyTorch's in {len(rows) - len(above)} of {len(rows)} rows"
    return [*lines, "", f"{told}; not in {named}." if above else f"{told}."]


def report(setting: Setting) -> None:
    """Medians over ideal (and the least), and what is above it as a share of what PyTorch is above it."""
    found = {name: [s / setting.ideal_s for s in seconds] for name, seconds in run(setting).items()}
    median = {name: statistics.median(ratios) for name, ratios in found.items()}
    cells = [f"{setting.ranks}", f"{setting.chunk_s * 1e3:.0f}", f"{setting.kilobytes}", setting.order]
    cells += [f"{setting.ideal_s * 1e3:.0f}", *(f"{median[name]:.3f} ({min(found[name]):.3f})" for name in found)]
    cells += [f"{(median[name] - 1) / (median['torch'] - 1):.2f}" for name in ("ours", "gloo")]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
