"""Predicted against measured steps on this machine: real compute, random plans, from a cluster file that it measures.

First `wavetrain measure` for one rank and for two; then models ten times apart, each with random plans of one global
batch: ranks, pipelines, waves, microbatches, sharding by operator, slices, recomputation. Predictions know the cluster
file alone. Ranks are pinned to a core each. `python benchmarks/accuracy_real.py [--plans 36] [--seed 0] [--steps 8]`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # these are read when torch is imported
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np

from wavetrain.base.document import parse_yaml
from wavetrain.base.errors import InputError
from wavetrain.cluster import Cluster, load_cluster
from wavetrain.commands.measure import write_measured
from wavetrain.commands.train_run import job_of
from wavetrain.model import Model
from wavetrain.model.operator import Linear
from wavetrain.model.read import read_model
from wavetrain.plan import Plan, Request, plan_of
from wavetrain.plan.check import check
from wavetrain.plan.layout import Choice
from wavetrain.plan.plan import OperatorChoice
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.measure_compute import lower_quartile
from wavetrain.runtime.report import Limits
from wavetrain.runtime.trainer import train
from wavetrain.runtime.world import World
from wavetrain.sim.predict import simulate

GLOBAL_BATCH = 8
MODELS = {  # parameters ten times apart
    "0.2M": "{name: small, family: gpt, layers: 4, hidden: 64, heads: 2, vocab: 256, seq_len: 64}",
    "2M": "{name: middle, family: llama, layers: 4, hidden: 192, heads: 3, ffn: 512, vocab: 1000, seq_len: 128}",
    "20M": "{name: large, family: gpt, layers: 6, hidden: 512, heads: 8, vocab: 1000, seq_len: 128}",
}
PASSES = 2  # over all plans; of all steps the lower quartile counts, as in `measure`: others only lengthen them
PATIENT = Limits(floor_s=120.0, start_s=120.0)


def measured_clusters(folder: Path) -> dict[int, Cluster]:
    """This machine as one rank finds it, and as two do."""
    found = {}
    for ranks in (1, 2):
        file = folder / f"cluster-{ranks}.yaml"
        if not file.exists():
            write_measured(file, local=ranks)
        found[ranks] = load_cluster(file)
    return found


def drawn(model: Model, clusters: dict[int, Cluster], seed: int) -> Iterator[Plan]:
    """Different plans that the runtime runs, without end."""
    dice, seen = random.Random(seed), set()
    while True:
        ranks = dice.choice((1, 2, 2, 2))
        pp = dice.choice((1, 2)) if ranks == 2 else 1
        dp = ranks // pp
        waves = dice.choice((1, 2)) if pp == 2 else 1
        schedule = dice.choice(("1f1b", "wave", "wave", "gpipe", "wave-zb")) if pp == 2 else "1f1b"
        asked = Request(
            model=model,
            cluster=clusters[ranks],
            global_batch=GLOBAL_BATCH,
            microbatch=dice.choice((1, 2, 4)),
            pp=pp,
            dp=dp,
            schedule=schedule,
            waves=waves if schedule.startswith("wave") else None,
            shard=dice.choice((None, "dp")) if dp > 1 else None,
            keep=dp > 1 and dice.random() < 0.3,
            recompute=dice.choice(("none", "none", "selective", "full")) if schedule != "wave-zb" else "none",
            precision="fp32",
        )
        try:
            plan = plan_of(asked)
        except InputError:
            continue
        if dp > 1 and dice.random() < 0.5:
            plan = mixed(plan, dice)
        key = (plan.layout, plan.choice, plan.choices, plan.recompute)
        if key not in seen and not check(plan):
            seen.add(key)
            yield plan


def mixed(plan: Plan, dice: random.Random) -> Plan:
    """Two operators of all blocks by a choice of their own: replicated or sharded, whole or in slices."""
    layer = plan.model.by_name[plan.blocks[0].layer]
    names = [operator.name for operator in layer.operators if isinstance(operator, Linear)]
    choices = []
    for name in dice.sample(names, 2):
        shard = dice.choice((1, plan.layout.dp))
        slices = dice.choice((1, 2)) if shard > 1 else 1
        choices.append(OperatorChoice(layer.name, name, Choice(shard=shard, slices=slices)))
    return replace(plan, choices=tuple(choices))


def step_seconds(plan: Plan, steps: int) -> list[float]:
    """From the end of one step to the end of the next, without the first two."""
    job = job_of(plan, steps=steps)

    def work(world: World) -> None:
        os.sched_setaffinity(0, {world.rank % (os.cpu_count() or 1)})
        records = train(job, world)
        if world.rank == 0:
            world.give(json.dumps([record.step_ends_s for record in records.values()]).encode())

    ends = json.loads(run_local(work, job.num_ranks, limits=PATIENT).check().results[0])
    latest = [max(each) for each in zip(*ends, strict=True)]
    return [b - a for a, b in pairwise(latest)][1:]


def said(plan: Plan) -> str:
    layout = plan.layout
    words = [f"{layout.num_microbatches} x {layout.microbatch}"]
    if layout.pp > 1:
        words.append(f"{layout.schedule}{f', W = {layout.waves}' if layout.schedule.startswith('wave') else ''}")
    if layout.dp > 1:
        words.append("sharded" if plan.choice.shard > 1 else "replicated")
        words += ["kept"] * plan.choice.keep
    for item in plan.choices:
        short = item.operator.rpartition(".")[2]
        kind = "sharded" if item.choice.shard > 1 else "replicated"
        words.append(f"{short} {kind}{' in 2' if item.choice.slices > 1 else ''}")
    words += [f"recompute {plan.recompute.value}"] * (plan.recompute.value != "none")
    return "; ".join(words)


def spearman(pairs: list[tuple[float, float]]) -> float:
    """The rank correlation of what was predicted with what was measured."""
    first, second = zip(*pairs, strict=True)
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--clusters", type=Path, help="folder for the measured cluster files; those there are used")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clusters = measured_clusters(given.clusters or Path(folder))
    models = {size: read_model(parse_yaml(text, file="model")) for size, text in MODELS.items()}
    draws = {size: drawn(model, clusters, given.seed + at) for at, (size, model) in enumerate(models.items())}
    chosen = [(size, next(draws[size])) for _, size in zip(range(given.plans), cycle(models), strict=False)]
    seconds: list[list[float]] = [[] for _ in chosen]
    for _ in range(PASSES):
        for number, (_, plan) in enumerate(chosen):
            seconds[number] += step_seconds(plan, given.steps)
    rows: dict[str, list[tuple[float, float]]] = {size: [] for size in models}
    print("| model | ranks | plan | predicted ms | measured ms | error |\n|---|---|---|---|---|---|")
    for (size, plan), own in zip(chosen, seconds, strict=True):
        predicted, measured = simulate(plan).step_s, lower_quartile(own)
        rows[size].append((predicted, measured))
        cells = f"{predicted * 1e3:.1f} | {measured * 1e3:.1f} | {predicted / measured - 1:+.1%}"
        print(f"| {size} | {plan.layout.num_devices} | {said(plan)} | {cells} |", flush=True)
    errors = [abs(predicted / measured - 1) for own in rows.values() for predicted, measured in own]
    middle, ninth = (percentile(errors, percent) for percent in (50, 90))
    print(f"\n{len(errors)} plans: median error {middle:.1%}, 90th percentile {ninth:.1%}.")
    for size, own in rows.items():
        print(f"Plans of the {size} model are ranked as measured with a Spearman correlation of {spearman(own):.3f}.")


if __name__ == "__main__":
    main()
