"""Hanayo's claim, executed: waves against 1F1B, with emulated accelerators (P = 8) and with real compute (P = 2).

Emulated: the same model, cut ever finer; every order's actions take their nominal time, messages are real. Real: blocks
of a transformer on two ranks, one core each; the step beside the simulation that is fed with its own action times.
Repetitions of all orders alternate. `--record` puts what was measured beside the claims of `docs/claims.md`.

    python benchmarks/waves.py [--repeats 7] [--only real] [--record src/wavetrain/study/claims/executed.yaml]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wavetrain.model import load_model
from wavetrain.runtime.chunk import Batch, Computed, Durations, Emulated, wait_until
from wavetrain.runtime.executor import Boundary, Executor, Moment
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.record import read_moments, timeline_of, write_moments
from wavetrain.runtime.samehost import open_same_host
from wavetrain.runtime.stages import cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.transport import Transport, links_of
from wavetrain.runtime.world import World, gloo_group
from wavetrain.schedule import SCHEDULES, Actions, Costs, Shape, evaluate
from wavetrain.sim.replay import idle_share, replay
from wavetrain.study.claims.executed import record

EMULATED = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "wave, W = 1": ("wave", 1),
    "wave, W = 2": ("wave", 2),
    "wave, W = 4": ("wave", 4),
    "split wave, W = 2": ("wave-zb", 2),
    "split wave, W = 4": ("wave-zb", 4),
}
RANKS, MICROBATCHES, STAGE_S = 8, 8, 0.080  # a rank's whole forward; finer cuts share it out
REAL = {"1F1B": ("1f1b", 1), "wave, W = 1": ("wave", 1), "wave, W = 2": ("wave", 2), "wave, W = 4": ("wave", 4)}
MODEL = "family: gpt\nlayers: 16\nhidden: 256\nheads: 4\nvocab: 512\nseq_len: 192\n"
REAL_RANKS, REAL_MICROBATCHES, SIZE = 2, 2, 2

Step = Callable[[], list[Moment]]
Found = dict[str, list[tuple[float, dict[int, list[Moment]]]]]  # seconds of a step, and what happened in it


def order(kind: str, waves: int, ranks: int, count: int) -> Actions:
    return SCHEDULES[kind].order(Shape(ranks, count, waves=waves))


def memory(world: World, actions: Actions, most_bytes: int, number: int) -> Transport:
    store = dist.PrefixStore(str(number), world.store)  # an order's own boxes
    crowded = world.size > world.place.num_cores
    return open_same_host(
        world.rank,
        world.size,
        store,
        links_of(actions),
        most_bytes=most_bytes,
        crowded=crowded,
    )


def emulated_steps(world: World) -> dict[str, Step]:
    steps = {}
    for number, (name, (kind, waves)) in enumerate(EMULATED.items()):
        actions = order(kind, waves, RANKS, MICROBATCHES)
        local = actions.placement.local[world.rank]
        t = STAGE_S / len(local)
        shape = (1, 16384)
        chunks = {stage: Emulated(Durations(t, t, t), shape) for stage in local}
        boundary = Boundary(dict.fromkeys(range(MICROBATCHES), shape))
        transport = memory(world, actions, boundary.most_bytes, number)
        executor = Executor(world.rank, actions, chunks, transport, boundary, progress=world.progress)
        steps[name] = lambda executor=executor: executor.step(Batch())
    return steps


def real_steps(world: World) -> dict[str, Step]:
    os.sched_setaffinity(0, {world.rank})
    file = Path(f"waves-{os.getpid()}.yaml")
    file.write_text(MODEL)
    parts = parts_of(load_model(str(file)))
    file.unlink()
    generator = torch.Generator().manual_seed(0)
    numbers = range(REAL_MICROBATCHES)
    tokens = {m: torch.randint(512, (SIZE, 192), generator=generator) for m in numbers}
    batch = Batch(tokens, tokens, SIZE * 192 * REAL_MICROBATCHES)
    steps = {}
    for number, (name, (kind, waves)) in enumerate(REAL.items()):
        actions = order(kind, waves, REAL_RANKS, REAL_MICROBATCHES)
        depth = actions.placement.depth
        stages = cut_into_stages(parts, (16 // depth,) * depth, actions.placement.local[world.rank])
        materialize(stages, seed=0)
        chunks = {stage: Computed(module) for stage, module in stages.items()}
        boundary = Boundary(dict.fromkeys(numbers, (SIZE, 192, 256)))
        transport = memory(world, actions, boundary.most_bytes, number)
        executor = Executor(world.rank, actions, chunks, transport, boundary, progress=world.progress)
        steps[name] = lambda executor=executor: executor.step(batch)
    return steps


def measure(make: Callable[[World], dict[str, Step]], ranks: int, repeats: int) -> Found:
    """Alternating repetitions of every order."""

    def work(world: World) -> None:
        with gloo_group(world, timeout_s=120):
            steps = make(world)
            found: dict[str, list[Any]] = {name: [] for name in steps}
            for repeat in range(repeats + 1):
                for name, step in steps.items():
                    start = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
                    dist.broadcast(start, 0)
                    wait_until(start.item())
                    moments = step()
                    took = torch.tensor([time.monotonic() - start.item()], dtype=torch.float64)
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    if repeat:  # the first warms up
                        found[name].append((took.item(), write_moments(moments)))
        world.give(json.dumps(found).encode())

    outcome = run_local(work, ranks).check()
    rows = [json.loads(result) for result in outcome.results]
    return {
        name: [
            (rows[0][name][at][0], {rank: read_moments(row[name][at][1]) for rank, row in enumerate(rows)})
            for at in range(repeats)
        ]
        for name in rows[0]
    }


def median_s(found: Found, name: str) -> float:
    return statistics.median(seconds for seconds, _ in found[name])


def median_bubble(found: Found, name: str) -> float:
    return statistics.median(idle_share(timeline_of(moments)) for _, moments in found[name])


def emulated_table(found: Found) -> list[str]:
    lines = [
        "| order | ideal ms | measured ms | over ideal | bubble, simulated | bubble, measured | 1F1B takes longer by |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    plain = median_s(found, "1F1B")
    for name, (kind, waves) in EMULATED.items():
        actions = order(kind, waves, RANKS, MICROBATCHES)
        t = STAGE_S / len(actions.placement.local[0])
        ideal = evaluate(actions, Costs.uniform(actions.placement.num_stages, f=t, i=t, w=t))
        seconds = median_s(found, name)
        bubble = median_bubble(found, name)
        cells = [f"{float(ideal.makespan) * 1e3:.0f}", f"{seconds * 1e3:.0f}", f"{seconds / float(ideal.makespan):.3f}"]
        cells += [f"{float(ideal.bubble_fraction):.1%}", f"{bubble:.1%}", f"{plain / seconds - 1:.0%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def real_table(found: Found) -> list[str]:
    lines = ["| order | measured ms | of 1F1B's | simulated with its action times, ms | measured over that |"]
    lines.append("|---|---|---|---|---|")
    plain = median_s(found, "1F1B")
    for name, (kind, waves) in REAL.items():
        actions = order(kind, waves, REAL_RANKS, REAL_MICROBATCHES)
        seconds = median_s(found, name)
        pairs = [(s, replay(actions, timeline_of(moments)).duration_s) for s, moments in found[name]]
        ideal = statistics.median(i for _, i in pairs)
        ratio = statistics.median(s / i for s, i in pairs)
        lines.append(f"| {name} | {seconds * 1e3:.0f} | {seconds / plain:.2f} | {ideal * 1e3:.0f} | {ratio:.3f} |")
    return lines


CLAIMED = {"GPipe": "gpipe", "1F1B": "dapple", "wave, W = 2": "wave 2", "wave, W = 4": "wave 4"}  # names in the claims


def emulated_values(found: Found) -> dict[str, float]:
    """What the claims ask for, in percent: bubbles, and rates of waves over others'."""
    values = {f"bubble {claimed}": 100 * median_bubble(found, name) for name, claimed in CLAIMED.items()}
    for name in ("wave, W = 2", "wave, W = 4"):
        for other in ("1F1B", "GPipe"):
            ratio = median_s(found, other) / median_s(found, name)
            values[f"{CLAIMED[name]} over {CLAIMED[other]}"] = 100 * ratio
    return values


def real_values(found: Found) -> dict[str, float]:
    names = ("wave, W = 2", "wave, W = 4")
    return {f"{CLAIMED[name]} over dapple": 100 * median_s(found, "1F1B") / median_s(found, name) for name in names}


# Per part: its heading, how many ranks do which steps, its table, what the claims ask of it.
PARTS = {
    "emulated": (
        f"{RANKS} ranks, {MICROBATCHES} microbatches, F = I = W = {STAGE_S * 1e3:.0f} ms per rank, 64 KB",
        (emulated_steps, RANKS),
        emulated_table,
        emulated_values,
    ),
    "real": (
        f"16 blocks of width 256, {REAL_RANKS} ranks, {REAL_MICROBATCHES} microbatches of {SIZE} x 192",
        (real_steps, REAL_RANKS),
        real_table,
        real_values,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=tuple(PARTS), help="one part; the emulated one hardly needs cores")
    parser.add_argument("--record", type=Path, help="file to write what was measured to")
    given = parser.parse_args()
    for name in (given.only,) if given.only else PARTS:
        heading, (steps, ranks), table, values = PARTS[name]
        load = os.getloadavg()[0]
        print(f"{name.capitalize()}: {heading}\n", flush=True)
        found = measure(steps, ranks, given.repeats)
        print("\n".join(table(found)), end="\n\n", flush=True)
        if given.record:
            command = f"python benchmarks/waves.py --repeats {given.repeats} --only {name} --record {given.record}"
            how = f"{name}: {heading}; median of {given.repeats}; load of the machine before: {load:.1f}"
            record(given.record, f"waves {name}", command, how, values(found))


if __name__ == "__main__":
    main()
