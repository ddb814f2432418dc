"""A plan's step beside what PyTorch has for the same: DistributedDataParallel, FSDP2 and `parallelize_module`.

Every rank is a process with one thread; compute and messages (gloo) are real, in float32. A step is forward, backward
and the reduction of gradients, without an optimizer. Both sides have the same modules, values and data, and alternate
step by step in the same processes; a step's time is the latest rank's end minus a common start. What counts is the
ratio of medians: other work on the machine slows both. Losses and gradients are compared at the end.

Operators are cut as in PyTorch's own tutorial: columns, then rows, the vocabulary, and the loss (`loss_parallel`). What
enters a region is wrapped once (`PrepareModuleInput`), and norms' gradients are added at the end, on both sides.

    python benchmarks/parallelize.py [--ranks 2] [--repeats 15] [--microbatches 1,4] [--hidden 512] [--seq-len 128]
                                     [--only replicated,sharded,tensor,sequence]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.model import Architecture
from wavetrain.model.architecture import Stretch
from wavetrain.model.transformer import build
from wavetrain.plan import Choice, Layout, OperatorChoice, Plan, Precision
from wavetrain.runtime.chunk import wait_until
from wavetrain.runtime.grid import open_grid
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.report import Limits
from wavetrain.runtime.sharded import run_step, shard_whole, whole_gradients
from wavetrain.runtime.stages import Stage, cut_into_stages, materialize
from wavetrain.runtime.tensor import add_partial, connect, cut_parameters
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.whole import full
from wavetrain.runtime.world import World, gloo_group

BLOCKS, VOCAB = 6, 8000
ASKED = 1.03  # of PyTorch's step at most
CUT = ("tensor", "sequence")  # kinds whose ranks are parts of one replica
PATIENT = Limits(floor_s=120.0)  # others work on this machine


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    kind: str
    ranks: int
    microbatches: int
    hidden: int
    seq_len: int
    repeats: int

    @property
    def plan(self) -> Plan:
        """Everything alike; sharded ends are kept, as FSDP2 keeps what its root has."""
        architecture = Architecture(
            family="llama",
            layers=(Stretch(BLOCKS),),
            hidden=self.hidden,
            heads=8,
            kv_heads=8,
            head_dim=self.hidden // 8,
            ffn=self.hidden * 11 // 4,
            vocab=VOCAB,
            seq_len=self.seq_len,
        )
        sharded, cut = self.kind == "sharded", self.kind in CUT
        ends = Choice(self.ranks, keep=True)
        degrees = {"tp" if cut else "dp": self.ranks, "sequence_parallel": self.kind == "sequence"}
        replicas = 1 if cut else self.ranks
        return Plan(
            model=build(architecture, name="small"),
            cluster=load_cluster("dgx-h100:1").part(self.ranks),
            layout=Layout(global_batch=2 * replicas * self.microbatches, microbatch=2, **degrees),
            cut=(BLOCKS,),
            seq_len=self.seq_len,
            choice=Choice(self.ranks if sharded else 1),
            choices=tuple(OperatorChoice(layer, "*", ends) for layer in ("embedding", "head")) if sharded else (),
            precision=Precision(compute=DType.FP32, products=DType.FP32),
        )


Step = Callable[[], list[Tensor]]  # the losses of its microbatches
Gradients = Callable[[], dict[str, Tensor]]  # in full, or this part's, by path
Batches = Sequence[tuple[Tensor, Tensor]]


def stage_of(plan: Plan) -> Stage:
    stages = cut_into_stages(parts_of(plan.model), plan.cut, [0])
    materialize(stages, seed=0)
    return stages[0]


def ours(plan: Plan, world: World, batches: Batches) -> tuple[Step, Gradients]:
    sharded = shard_whole(stage_of(plan), plan, world)
    module = sharded.module

    def step() -> list[Tensor]:
        module.zero_grad()
        return run_step(sharded, [lambda pair=pair: module(*pair) for pair in batches])

    paths = {name: pieces.paths[0] for name, pieces in sharded.pieces.items()}
    return step, lambda: {paths[name]: found for name, found in whole_gradients(sharded).items()}


def replicated(plan: Plan, _world: World, batches: Batches) -> tuple[Step, Gradients]:
    stage = stage_of(plan)
    module = DistributedDataParallel(stage)

    def step() -> list[Tensor]:
        module.zero_grad()
        losses = []
        for number, pair in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else module.no_sync():
                losses.append(_backward(module(*pair)))
        return losses

    ranks = plan.layout.dp  # it has divided by them
    return step, lambda: {path: p.grad * ranks for path, p in stage.named_parameters()}


def sharded(plan: Plan, _world: World, batches: Batches) -> tuple[Step, Gradients]:
    stage = stage_of(plan)
    for module in (*stage.blocks, stage):
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def step() -> list[Tensor]:
        stage.zero_grad()
        losses = []
        for number, pair in enumerate(batches):
            stage.set_requires_gradient_sync(number == len(batches) - 1)
            losses.append(_backward(stage(*pair)))
        return losses

    return step, lambda: {path: full(p.grad) for path, p in stage.named_parameters()}


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


# --- operators that are cut ---


def our_parts(plan: Plan, world: World, batches: Batches) -> tuple[Step, Gradients]:
    stage = stage_of(plan)
    parallel = cut_parameters(stage, plan, open_grid(plan, rank=world.rank, size=world.size))
    connect(stage, parallel)

    def step() -> list[Tensor]:
        stage.zero_grad()
        losses = [_backward(stage(*pair)) for pair in batches]
        add_partial(stage, parallel)
        return losses

    return step, lambda: {path: p.grad for path, p in stage.named_parameters()}


def their_parts(plan: Plan, world: World, batches: Batches) -> tuple[Step, Gradients]:
    stage = stage_of(plan)
    mesh = init_device_mesh("cpu", (world.size,))
    parallelize_module(stage, mesh, styles(sequence=plan.layout.sequence_parallel))

    def step() -> list[Tensor]:
        stage.zero_grad()
        with loss_parallel():
            losses = [_backward(stage(*pair)).to_local() for pair in batches]
        for parameter in stage.parameters():  # norms' are shares of sums, the embedding's is whole
            if isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return losses

    return step, lambda: {path: _local(p.grad) for path, p in stage.named_parameters()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def styles(*, sequence: bool) -> dict[str, ParallelStyle]:
    """What PyTorch is told of a Llama's operators."""
    between = Shard(1) if sequence else Replicate()

    def entered() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))

    logits = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    found: dict[str, ParallelStyle] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head.head": logits,
    }
    found |= {f"blocks.*.{path}": entered() for path in ("attention", "mlp")}
    found |= {f"blocks.*.{path}": ColwiseParallel() for path in words("attention.q attention.k attention.v")}
    found |= {f"blocks.*.{path}": ColwiseParallel() for path in words("mlp.gate mlp.up")}
    found |= {f"blocks.*.{path}": RowwiseParallel(output_layouts=between) for path in words("attention.out mlp.down")}
    norms = words("blocks.*.attention_norm blocks.*.mlp_norm head.final_norm") if sequence else ()
    return found | {path: SequenceParallel() for path in norms}


def words(text: str) -> list[str]:
    return text.split()


SIDES = {
    "replicated": (ours, replicated),
    "sharded": (ours, sharded),
    "tensor": (our_parts, their_parts),
    "sequence": (our_parts, their_parts),
}
NAMES = {
    "replicated": "DistributedDataParallel",
    "sharded": "fully_shard",
    "tensor": "parallelize_module",
    "sequence": "parallelize_module, SequenceParallel",
}


def timed(step: Step) -> tuple[float, float]:
    """Seconds from a common start to the end of the last rank, and of processors on all ranks, all threads."""
    start = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
    dist.broadcast(start, 0)
    wait_until(start.item())
    before_s = time.process_time()
    step()
    busy = torch.tensor([time.process_time() - before_s], dtype=torch.float64)
    took = torch.tensor([time.monotonic() - start.item()], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(busy)
    return took.item(), busy.item()


def measure(setting: Setting, world: World) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a root without a gradient for its input
    plan = setting.plan
    generator = torch.Generator().manual_seed(0 if setting.kind in CUT else world.rank)
    shape = (setting.microbatches, 2, 2, setting.seq_len)
    batches = [(tokens, targets) for tokens, targets in torch.randint(VOCAB, shape, generator=generator)]
    makers = zip(("ours", "torch"), SIDES[setting.kind], strict=True)
    both = {name: make(plan, world, batches) for name, make in makers}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for repeat in range(setting.repeats + 2):
        order = list(both) if repeat % 2 else list(reversed(both))
        for name in order:
            world.progress.computing(repeat, name)
            seconds = timed(both[name][0])
            if repeat > 1:  # the first two warm up
                found[name].append(seconds)
    losses = [torch.stack(step()) for step, _ in both.values()]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0.0)
    compare(*(gradients() for _, gradients in both.values()))
    return found


def compare(own: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Both sides computed the same, up to the order of sums in float32."""
    if own.keys() != other.keys():
        raise AssertionError(f"gradients of {own.keys() ^ other.keys()}")
    for path, gradient in other.items():
        torch.testing.assert_close(own[path], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item(), msg=path)


def run(setting: Setting) -> dict[str, list[tuple[float, float]]]:
    def work(world: World) -> None:
        with gloo_group(world, timeout_s=120):
            found = measure(setting, world)
        if world.rank == 0:
            world.give(json.dumps(found).encode())

    outcome = run_local(work, setting.ranks, limits=PATIENT)
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return json.loads(outcome.results[0])


HEAD = (
    "| kind | beside | ranks | microbatches | parameters | PyTorch ms | ours ms | ratio | least | CPU | load | asked |"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--microbatches", default="1,4")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--only", default=",".join(SIDES))
    given = parser.parse_args()
    print(f"{HEAD}\n|{'---|' * 12}", flush=True)
    for kind in given.only.split(","):
        for count in map(int, given.microbatches.split(",")):
            report(Setting(kind, given.ranks, count, given.hidden, given.seq_len, given.repeats))


def report(setting: Setting) -> None:
    """Medians and their ratio; that of the least times and of processor time, which other work lengthens less."""
    before = os.getloadavg()[0]
    found = run(setting)
    took, busy = ({name: [pair[i] for pair in pairs] for name, pairs in found.items()} for i in range(2))
    figures = ((statistics.median, took), (min, took), (statistics.median, busy))
    median, least, cpu = ({name: of(values) for name, values in some.items()} for of, some in figures)
    cells = [setting.kind, NAMES[setting.kind], f"{setting.ranks}", f"{setting.microbatches}"]
    cells += [f"{setting.plan.model.num_parameters / 1e6:.1f} M"]
    cells += [f"{median[name] * 1e3:.0f}" for name in ("torch", "ours")]
    cells += [f"{some['ours'] / some['torch']:.3f}" for some in (median, least, cpu)]
    cells += [f"{before:.1f} to {os.getloadavg()[0]:.1f}", f"{ASKED}"]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
