"""Predicted against measured steps on virtual clusters: real collectives over shaped links, emulated compute.

In each case hosts are network namespaces whose NICs have a given rate. The network is measured first, as `wavetrain
measure --network-only` does; the planner is asked for its best plan, and random plans are drawn beside it. All are
predicted from that cluster alone, then run. Needs root.

    python benchmarks/accuracy_virtual.py [--plans 10] [--steps 6] [--cases 0 1 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import numpy as np

from wavetrain.base.document import parse_yaml
from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.cluster import Cluster, Device, Group, Node, Rates, load_cluster
from wavetrain.commands.train_run import job_of
from wavetrain.model import Model
from wavetrain.model.limits import divisors
from wavetrain.model.read import read_model
from wavetrain.plan import Plan, Precision, Request, plan_of
from wavetrain.planner.ask import question
from wavetrain.planner.search import search
from wavetrain.runtime.measure_network import network_samples
from wavetrain.runtime.report import Limits
from wavetrain.runtime.samples import Sample
from wavetrain.runtime.trainer import train
from wavetrain.runtime.virtual import VirtualCluster, virtual_cluster
from wavetrain.runtime.world import World
from wavetrain.sim.predict import simulate
from wavetrain.study.calibrate import runtime_laws
from wavetrain.study.calibrate_network import Joined, calibrate_network

MEGABIT = 1e6 / 8
PATIENT = Limits(floor_s=120.0, start_s=120.0)
FULL = Precision(compute=DType.FP32, products=DType.FP32)
WITHIN = 1.03  # of the best that was measured


@dataclass(frozen=True)
class Case:
    hosts: int
    each: int  # ranks on a host
    megabits: int
    model: Model
    batch: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.each


def _model(name: str, hidden: int, layers: int) -> Model:
    sizes = f"layers: {layers}, hidden: {hidden}, heads: 4, vocab: 1000, seq_len: 256"
    return read_model(parse_yaml(f"{{name: {name}, family: gpt, {sizes}}}", file="model"))


SMALL, LARGE = _model("small", 128, 8), _model("large", 256, 8)
CASES = (
    Case(2, 1, 100, SMALL, 8),
    Case(2, 1, 1000, LARGE, 8),
    Case(2, 2, 250, SMALL, 16),
    Case(2, 2, 2000, LARGE, 16),
    Case(2, 4, 1000, LARGE, 16),
    Case(3, 1, 500, LARGE, 12),
    Case(4, 1, 100, SMALL, 16),
    Case(4, 1, 1000, LARGE, 16),
    Case(4, 2, 1000, LARGE, 16),
    Case(4, 4, 2000, LARGE, 16),
)


def accelerator() -> Device:
    """What is emulated: with these models, about as long in compute as in communication."""
    usual = load_cluster("cpu-host").device
    return replace(usual, name="emulated", title="emulated", peak=Rates(fp32=0.4e12), memory_bytes_per_s=200e9)


def described(case: Case, joined: Joined) -> Cluster:
    node = Node("host", "a namespace", accelerator(), case.each, 0.0, joined.tiers, joined.network)
    laws = replace(runtime_laws(), step_s=0.0, gradient_exposed=0.0)  # waiting takes no processor from gloo
    return Cluster("virtual", (Group(node, case.hosts),), own_laws=laws, overlap=("gradients", "messages"))


def measured_network(case: Case, virtual: VirtualCluster) -> Joined:
    def work(world: World) -> None:
        found = network_samples(world, device="cpu", quick=False, told=lambda *_: None)
        if world.rank == 0:
            world.give(json.dumps([(s.what, s.sizes, s.seconds, s.dtype, s.ranks, s.hosts) for s in found]).encode())

    rows = json.loads(virtual.run(work, case.ranks, limits=PATIENT).check().results[0])
    samples = [Sample(what, tuple(sizes), *rest) for what, sizes, *rest in rows]
    return calibrate_network(samples, devices=case.each, hosts=case.hosts, tree=False)


def drawn(case: Case, cluster: Cluster, seed: int) -> Iterator[Plan]:
    """Different plans without tensor parallelism, without end."""
    dice, seen = random.Random(seed), set()
    for _ in range(10_000):
        pp = dice.choice([d for d in divisors(case.ranks) if d <= 8])
        dp = case.ranks // pp
        schedule = dice.choice(("1f1b", "gpipe", "wave", "zb-h1")) if pp > 1 else "1f1b"
        asked = Request(
            model=case.model,
            cluster=cluster,
            global_batch=case.batch,
            microbatch=dice.choice((1, 2, 4)),
            pp=pp,
            dp=dp,
            schedule=schedule,
            shard=str(dice.choice([1, *divisors(dp)])),
            keep=dp > 1 and dice.random() < 0.3,
            recompute=dice.choice(("none", "full")),
            overlap=("gradients", "messages") if dice.random() < 0.5 else ("messages",),
            precision="fp32",
        )
        try:
            plan = plan_of(asked)
        except InputError:
            continue
        key = (plan.layout, plan.choice, plan.recompute, plan.stack)
        if key not in seen and plan.layout.num_microbatches <= 16:
            seen.add(key)
            yield plan


def measured_seconds(plan: Plan, virtual: VirtualCluster, steps: int) -> float:
    """From the end of one step to the end of the next, the median without the first."""
    job = job_of(plan, emulate=True, every_rank=True, steps=steps)

    def work(world: World) -> None:
        records = train(job, world)
        if world.rank == 0:
            world.give(json.dumps([record.step_ends_s for record in records.values()]).encode())

    ends = json.loads(virtual.run(work, plan.layout.num_devices, limits=PATIENT).check().results[0])
    latest = [max(each) for each in zip(*ends, strict=True)]
    return statistics.median(b - a for a, b in pairwise(latest))


def said(plan: Plan) -> str:
    layout = plan.layout
    words = [f"pp {layout.pp}, dp {layout.dp}, {layout.num_microbatches} x {layout.microbatch}"]
    words += [layout.schedule] * (layout.pp > 1)
    shards = sorted({plan.choice.shard, *(item.choice.shard for item in plan.choices)})
    words += [f"shards of {' and '.join(map(str, shards))}"] * (shards != [1])
    words += ["kept"] * plan.choice.keep + ["overlap"] * plan.stack.gradient_overlap
    words += [f"recompute {plan.recompute.value}"] * (plan.recompute.value != "none")
    return "; ".join(words)


def run_case(case: Case, number: int, plans: int, steps: int) -> tuple[list[float], float]:
    """The errors of random plans, and the pick's time over the best one's."""
    where = f"{case.hosts} x {case.each}, {case.megabits} Mbit/s"
    with virtual_cluster(case.hosts, rate_bytes_per_s=case.megabits * MEGABIT) as virtual:
        cluster = described(case, measured_network(case, virtual))
        asked = question(case.model, cluster, global_batch=case.batch, precision=FULL, tp=1, cp=1)
        pick = search(asked).best
        assert pick is not None
        errors, best_s, pick_s = list[float](), float("inf"), 0.0
        draws = drawn(case, cluster, number)
        others = [(plan, "") for plan, _ in zip(draws, range(plans), strict=False)]
        for plan, name in [(pick, f"**{said(pick)}**, the planner's pick"), *others]:
            predicted, measured = simulate(plan).step_s, measured_seconds(plan, virtual, steps)
            cells = f"{predicted * 1e3:.0f} | {measured * 1e3:.0f} | {predicted / measured - 1:+.1%}"
            print(f"| {where} | {name or said(plan)} | {cells} |", flush=True)
            best_s = min(best_s, measured)
            pick_s = pick_s or measured
            errors += [abs(predicted / measured - 1)] * (not name)
    return errors, pick_s / best_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    given = parser.parse_args()
    begun, errors, ratios = time.monotonic(), list[float](), list[float]()
    print("| cluster | plan | predicted ms | measured ms | error |\n|---|---|---|---|---|")
    for number in given.cases:
        found, ratio = run_case(CASES[number], number, given.plans, given.steps)
        errors += found
        ratios.append(ratio)
    middle, high = (float(np.percentile(errors, percent)) for percent in (50, 95))
    print(f"\n{len(errors)} random plans: median error {middle:.1%}, 95th percentile {high:.1%}.")
    good = sum(ratio <= WITHIN for ratio in ratios)
    said = f"in {good} of {len(ratios)} cases, at worst {max(ratios):.3f}"
    print(f"The planner's pick takes at most 1.03 of the time of the best that was measured {said}.")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
