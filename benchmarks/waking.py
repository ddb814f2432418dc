"""What it changes that a rank's threads wait for their turn and stay on its core (`runtime/settle.py`):
all-reduces over gloo, two ranks.

Runs with the usual scheduling, under SCHED_BATCH and also on a core each take turns.
`python benchmarks/waking.py [--turns 8]`
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import numpy as np
import torch
import torch.distributed as dist

from wavetrain.base.units import KIB, MIB, format_bytes
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.settle import settle
from wavetrain.runtime.world import World, gloo_group

RANKS = 2
SIZES = {KIB: 1000, 4 * MIB: 200}  # bytes, and how often
POLICIES = ("usual", "in turn", "in turn, own core")
LONG = 5.0  # times the quickest tenth: another thread was waited for


def seconds(num_bytes: int, count: int, policy: str) -> list[float]:
    """Of all-reduces one after the other, on rank 0."""

    def work(world: World) -> None:
        settle(world.place if policy.endswith("own core") else None)
        if policy == "usual":
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # inherited by gloo's threads
        with gloo_group(world, timeout_s=60):
            values, found = torch.zeros(num_bytes // 4), []
            for _ in range(count):
                begun = time.perf_counter()
                dist.all_reduce(values)
                found.append(time.perf_counter() - begun)
        if world.rank == 0:
            world.give(json.dumps(found[count // 10 :]).encode())

    return list(json.loads(run_local(work, RANKS).check().results[0]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=8)
    turns = parser.parse_args().turns
    print(
        "| all-reduce of | threads | median | mean | 90th percentile | long ones | mean, of the usual | runs vary by |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size, count in SIZES.items():
        runs: dict[str, list[list[float]]] = {policy: [] for policy in POLICIES}
        for _ in range(turns):
            for policy in POLICIES:
                runs[policy].append(seconds(size, count, policy))
        found = {policy: [value for run in own for value in run] for policy, own in runs.items()}
        quick = float(np.percentile(found["in turn"], 10))
        for policy, own in found.items():
            middles = [np.median(run) for run in runs[policy]]
            times = (np.median(own), np.mean(own), np.percentile(own, 90))
            cells = [f"{1e3 * value:.2f} ms" for value in times]
            cells.append(f"{np.mean([value > LONG * quick for value in own]):.0%}")
            cells.append(f"{np.mean(own) / np.mean(found['usual']):.2f}")
            cells.append(f"{np.std(middles) / np.mean(middles):.1%}")
            print(f"| {format_bytes(size)} | {policy} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
