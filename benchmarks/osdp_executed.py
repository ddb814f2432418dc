"""OSDP's claim, executed: what the planner mixes under a memory limit, beside FSDP2 that shards all of it, and DDP.

Two hosts are network namespaces with one rank each, joined by a link that `tc tbf` limits; compute and messages (gloo)
are real, in float32 on one thread. This machine is measured first and described as a cluster file; the planner is asked
twice: with half of the memory between what all sharded and all replicated need, and with as much as all replicated
needs. A step is forward, backward, the reduction of gradients and AdamW's step. All sides have the same modules, values
and data and alternate step by step in the same processes; a step's time is the latest rank's end minus a common start.
What is held is counted by PyTorch's profiler in one more step: every tensor that is alive, activations and buffers too.

    python benchmarks/osdp_executed.py [--rate 1.5gbit] [--repeats 15] [--hidden 512] [--seq-len 128] [--vocab 8000]

`--record src/wavetrain/study/claims/executed.yaml` puts what was measured beside the claims of `docs/claims.md`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' network is this benchmark's too

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from wavetrain.base.units import DType
from wavetrain.cluster import Cluster
from wavetrain.commands.measure import cluster_of, found_of, on_rank
from wavetrain.model import Architecture, Model
from wavetrain.model.architecture import Stretch
from wavetrain.model.transformer import build
from wavetrain.plan import Layout, Plan, Precision
from wavetrain.plan.stack import Fusion, Stack
from wavetrain.plan.words import sentence
from wavetrain.planner.ask import question
from wavetrain.planner.choose import choose
from wavetrain.planner.mixed import instance, plan_of
from wavetrain.planner.question import Pins, Question
from wavetrain.planner.search import end_groups, search
from wavetrain.runtime.chunk import wait_until
from wavetrain.runtime.composed import compose
from wavetrain.runtime.grid import open_grid
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.report import Limits
from wavetrain.runtime.sharded import run_step
from wavetrain.runtime.stages import Stage, cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.virtual import Network as Hosts
from wavetrain.runtime.virtual import network
from wavetrain.runtime.world import World, gloo_group
from wavetrain.sim.predict import Outline, outline
from wavetrain.study.claims.executed import record

RANKS, MICROBATCH, BLOCKS = 2, 2, 6
FASTER, NO_SLOWER = 1.10, 1.03  # than FSDP2 at least; over DDP's step at most
BETWEEN = 0.5  # where the limit is, from all sharded to all replicated
FULL = Precision(compute=DType.FP32, products=DType.FP32)
EAGER = Stack(elementwise=Fusion.EAGER, norm=Fusion.EAGER)
PATIENT = Limits(floor_s=300.0, start_s=300.0)  # others work on this machine
_PR_SET_PDEATHSIG = 1

Step = Callable[[], object]


# --- this machine as a cluster ---


def measured(hosts: Hosts) -> Cluster:
    """These hosts as `wavetrain measure` finds them: operators, collectives by kind, whole steps."""

    def work(world: World) -> None:
        torch.set_num_threads(1)
        found = on_rank(world, "cpu", quick=False, network_only=False)
        if world.rank == 0:
            world.give(json.dumps(found).encode())

    found = found_of(json.loads(on_hosts(hosts, work)[0]))
    return cluster_of(found, network_only=False)[0]


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    """Of tensors only: the limit is not that of a process."""
    group = cluster.groups[0]
    device = replace(group.node.device, memory_bytes=int(memory_bytes))
    return replace(cluster, groups=(replace(group, node=replace(group.node, device=device)),))


# --- what is asked of the planner ---


@dataclass(frozen=True)
class Asked:
    model: Model
    cluster: Cluster

    def question(self, memory_bytes: float) -> Question:
        return question(
            self.model,
            with_memory(self.cluster, memory_bytes),
            global_batch=RANKS * MICROBATCH,
            precision=FULL,
            stack=EAGER,
        )

    def uniform(self, family: str) -> tuple[Plan, Outline]:
        """All operators alike, whatever that needs."""
        pins = Pins(tp=1, cp=1, pp=1, dp=RANKS, microbatch=MICROBATCH)
        found = search(replace(self.question(2.0**40), only=(family,), pins=pins)).found[0]
        return found.plan, found.outline

    def best(self, memory_bytes: float) -> tuple[Plan, Outline]:
        """The best mixture that fits and that the runtime can run: it shards optimizer states with parameters only.

        That is the planner's inner problem of the one layout; its answer is proven, or this fails.
        """
        one, found = self.question(memory_bytes), list[tuple[Plan, Outline]]()
        layout = Layout(global_batch=one.global_batch, microbatch=MICROBATCH, dp=RANKS)
        for end_shard in end_groups(one, layout):
            made = instance(one, layout, end_shard)
            chosen = choose(made.problem, time_limit_s=60.0)
            if chosen.selection is not None:
                assert chosen.gap == 0, "no proof within a minute"
                plan = plan_of(made, chosen.selection)
                found.append((plan, outline(plan, one.laws)))
        return min(found, key=lambda item: item[1].step_s)


# --- the sides ---


@dataclass(frozen=True)
class Side:
    """Something to be measured: its step, and what stays when no step runs."""

    step: Step
    losses: list[float]
    resident_bytes: Callable[[], int]


Pair = tuple[Tensor, Tensor]


def stage_of(plan: Plan) -> Stage:
    stages = cut_into_stages(parts_of(plan.model), plan.cut, [0])
    materialize(stages, seed=0)
    return stages[0]


def side(stage: Stage, backward: Callable[[], Tensor]) -> Side:
    """With AdamW on what the rank has of the parameters; one by one as in the runtime, without temporaries of all."""
    held = [_local(parameter) for parameter in stage.parameters()]
    optimizer, losses = torch.optim.AdamW(held, foreach=False), list[float]()

    def step() -> None:
        losses.append(backward().item())
        for own, parameter in zip(held, stage.parameters(), strict=True):
            own.grad = None if parameter.grad is None else _local(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        stage.zero_grad()

    def resident_bytes() -> int:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in (*held, *states))

    return Side(step, losses, resident_bytes)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def planned(plan: Plan, world: World, pair: Pair) -> Side:
    stage = stage_of(plan)
    composed = compose(stage, plan, open_grid(plan, rank=world.rank, size=world.size), is_split=False)
    return side(stage, lambda: run_step(composed.sharded, [lambda: stage(*pair)])[0])


def sharded(plan: Plan, _world: World, pair: Pair) -> Side:
    """FSDP2 as its documentation has it: blocks, then the rest."""
    stage = stage_of(plan)
    for module in (*stage.blocks, stage):
        fully_shard(module, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return side(stage, lambda: _backward(stage(*pair)))


def replicated(plan: Plan, _world: World, pair: Pair) -> Side:
    stage = stage_of(plan)
    module = DistributedDataParallel(stage)
    return side(stage, lambda: _backward(module(*pair)))


def alone(plan: Plan, _world: World, pair: Pair) -> Side:
    """Without the other rank: what is left when nothing is sent."""
    stage = stage_of(plan)
    return side(stage, lambda: _backward(stage(*pair)))


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


# --- measuring ---


def timed(step: Step, *, ahead_s: float = 0.01) -> float:
    """Seconds from a common start to the end of the last rank."""
    start = torch.tensor([time.monotonic() + ahead_s], dtype=torch.float64)
    dist.broadcast(start, 0)
    wait_until(start.item())
    step()
    took = torch.tensor([time.monotonic() - start.item()], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def peak_bytes(one: Side) -> int:
    """All tensors alive at the fullest moment of a step."""
    before = one.resident_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        one.step()
    results = found.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(results, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    return before + max(accumulate(changes))


def measure(made: dict[str, tuple[Callable[..., Side], Plan]], repeats: int, world: World) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a root without a gradient for its input
    plan = next(iter(made.values()))[1]
    generator = torch.Generator().manual_seed(world.rank)
    tokens, targets = torch.randint(plan.model.architecture.vocab, (2, MICROBATCH, plan.seq_len), generator=generator)
    sides = {name: make(plan, world, (tokens, targets)) for name, (make, plan) in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 2):
        for name in list(sides) if repeat % 2 else reversed(sides):
            world.progress.computing(repeat, name)
            took = timed(sides[name].step)
            if repeat > 1:  # the first two warm up
                seconds[name].append(took)
    compare({name: one.losses for name, one in sides.items() if name != "alone"})
    return {"seconds": seconds, "peak": {name: peak_bytes(one) for name, one in sides.items()}}


def compare(losses: dict[str, list[float]]) -> None:
    """All sides learnt the same. DDP averages gradients, which AdamW can't tell from their sum."""
    first, *others = losses.values()
    for other in others:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(first), rtol=1e-2, atol=0.0)


# --- hosts ---


@contextmanager
def limited_hosts(rate: str) -> Iterator[Hosts]:
    """Namespaces whose links send at most so much; removed whatever ends this."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    with network(RANKS) as hosts:
        for host in hosts.hosts:
            words = f"-n {host.name} qdisc add dev {host.interface} root tbf rate {rate} burst 256kb latency 50ms"
            subprocess.run(["tc", *words.split()], check=True, timeout=20)
        yield hosts


def on_hosts(hosts: Hosts, work: Callable[[World], None]) -> list[bytes]:
    """What ranks gave, one on each host."""
    with tempfile.NamedTemporaryFile() as file:

        def act() -> int:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            outcome = run_local(work, RANKS, host=hosts.address, prepare=hosts.prepare, limits=PATIENT)
            Path(file.name).write_text(json.dumps([given.decode() for given in outcome.results]), encoding="utf-8")
            return outcome.exit_code

        code = hosts.run(act)
        if code:
            raise SystemExit(code)
        return [given.encode() for given in json.loads(file.read())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="1.5gbit", help="of each host's link, as tc has it")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--record", type=Path, help="file to write what was measured to")
    given = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: sudo python benchmarks/osdp_executed.py")
    architecture = Architecture(
        family="llama",
        layers=(Stretch(BLOCKS),),
        hidden=given.hidden,
        heads=8,
        kv_heads=8,
        head_dim=given.hidden // 8,
        ffn=given.hidden * 11 // 4,
        vocab=given.vocab,
        seq_len=given.seq_len,
    )
    model = build(architecture, name="small")
    with limited_hosts(given.rate) as hosts:
        values, load = report(hosts, Asked(model, measured(hosts)), given.rate, given.repeats)
    if given.record:
        sizes = f"--hidden {given.hidden} --seq-len {given.seq_len} --vocab {given.vocab}"
        options = f"--rate {given.rate} --repeats {given.repeats} {sizes} --record {given.record}"
        how = f"{RANKS} hosts as network namespaces, link of {given.rate}; median of {given.repeats}"
        told = f"{how}; load of the machine before: {load:.1f}"
        record(given.record, "osdp", f"python benchmarks/osdp_executed.py {options}", told, values)


def report(hosts: Hosts, asked: Asked, rate: str, repeats: int) -> tuple[dict[str, float], float]:
    """Print all that was measured; what the claims ask for, and the machine's load before."""
    model, device, network = asked.model, asked.cluster.device, asked.cluster.node.network
    assert network is not None
    print(
        f"{model.num_parameters / 1e6:.1f} M parameters, {MICROBATCH} x {model.seq_len} tokens per rank, {RANKS} hosts;"
        f" measured: {(device.peak.fp32 or 0) / 1e9:.1f} GFLOP/s, {device.memory_bytes_per_s / 1e9:.1f} GB/s,"
        f" link of {rate}: {network.nic_bytes_per_s * 8 / 1e9:.2f} Gbit/s after {network.latency_s * 1e6:.0f} us.\n",
        flush=True,
    )
    (all_sharded, least), (all_replicated, most) = asked.uniform("fsdp"), asked.uniform("ddp")
    limit = least.needed_bytes + BETWEEN * (most.needed_bytes - least.needed_bytes)
    mix, mixed = asked.best(limit)
    roomy, roomily = asked.best(most.needed_bytes)
    if roomy == mix:
        raise SystemExit("both limits have the same plan: nothing to compare")
    rows = {
        "alone": (alone, all_replicated, None, None),
        "fsdp2": (sharded, all_sharded, limit, least),
        "mix": (planned, mix, limit, mixed),
        "ddp": (replicated, all_replicated, most.needed_bytes, most),
        "roomy": (planned, roomy, most.needed_bytes, roomily),
        "replicated": (planned, all_replicated, most.needed_bytes, most),
    }
    for name in ("mix", "roomy"):
        print(f"{TITLES[name]}: {sentence(rows[name][1])}.")
    load = os.getloadavg()[0]
    found = run(hosts, {name: row[:2] for name, row in rows.items()}, repeats)
    print(f"\nLoad of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after, {RANKS} of it ours.\n\n{HEAD}")
    for name, (_, _, bytes_allowed, said) in rows.items():
        cells = [TITLES[name], *(f"{at(found['seconds'][name]) * 1e3:.0f}" for at in (statistics.median, min))]
        cells += [f"{said.step_s * 1e3:.0f}" if said else "", f"{found['peak'][name] / 1e6:.0f}"]
        cells += [f"{said.needed_bytes / 1e6:.0f}" if said else "", f"{bytes_allowed / 1e6:.0f}" if said else ""]
        print(f"| {' | '.join(cells)} |")
    print("\n" + "\n".join(verdicts(found, limit, most.needed_bytes)))
    taken = {name: statistics.median(seconds) for name, seconds in found["seconds"].items()}
    said_s = {name: said.step_s for name, (_, _, _, said) in rows.items() if said}
    limits = {"tight": ("mix", limit, mixed), "roomy": ("roomy", most.needed_bytes, roomily)}
    values = compared(taken) | {f"predicted {name}": value for name, value in compared(said_s).items()}
    for name, (key, allowed, said) in limits.items():
        values[f"{name}, of its limit"] = 100 * found["peak"][key] / allowed
        values[f"predicted {name}, of its limit"] = 100 * said.needed_bytes / allowed
    return values, load


def compared(step_s: dict[str, float]) -> dict[str, float]:
    """What the claims ask for of the steps of all sides."""
    gain = 100 * (step_s["fsdp2"] / step_s["mix"] - 1)
    return {"mixture over FSDP": gain, "mixture over DDP, step": step_s["roomy"] / step_s["ddp"]}


TITLES = {
    "alone": "one rank, nothing sent",
    "fsdp2": "FSDP2, all sharded",
    "mix": "planned for the tight limit",
    "ddp": "DistributedDataParallel",
    "roomy": "planned where all replicated fits",
    "replicated": "a plan that replicates all",
}
HEAD = (
    "| side | median ms | least ms | predicted ms | holds MB | predicted MB | limit MB |\n|---|---|---|---|---|---|---|"
)


def run(hosts: Hosts, made: dict[str, tuple[Callable[..., Side], Plan]], repeats: int) -> dict[str, Any]:
    def work(world: World) -> None:
        with gloo_group(world, timeout_s=300):
            found = measure(made, repeats, world)
        if world.rank == 0:
            world.give(json.dumps(found).encode())

    return json.loads(on_hosts(hosts, work)[0])


def verdicts(found: dict[str, Any], tight: float, roomy: float) -> Iterator[str]:
    median = {name: statistics.median(seconds) for name, seconds in found["seconds"].items()}
    yield f"FSDP2 communicates for {1 - median['alone'] / median['fsdp2']:.0%} of its step."
    gain = median["fsdp2"] / median["mix"]
    yield f"The mix is {gain - 1:+.1%} faster than FSDP2; at least {FASTER - 1:.0%}: {_word(gain >= FASTER)}."
    for name in ("roomy", "replicated"):
        ratio = median[name] / median["ddp"]
        said = f"at most {NO_SLOWER}: {_word(ratio <= NO_SLOWER)}"
        yield f"{TITLES[name].capitalize()}: the step is {ratio:.3f} of DDP's; {said}."
    for name, limit in (("mix", tight), ("roomy", roomy)):
        held = found["peak"][name]
        yield f"{TITLES[name].capitalize()}: holds {held / limit:.1%} of its limit; within: {_word(held <= limit)}."


def _word(holds: bool) -> str:
    return "yes" if holds else "NO"


if __name__ == "__main__":
    main()
