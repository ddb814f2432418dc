"""Stacks of blocks under torch's FSDP2 on one process: what its memory tracker says a step holds at its peak.

Fake tensors and a fake process group: nothing is computed, allocated or sent. The optimizer's states are made before
the tracked step, as in all steps but the first; with several microbatches, gradients too, as for all but the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from wavetrain.base.units import DType
from wavetrain.cluster import load_cluster
from wavetrain.model.model import Layer, Model, Run
from wavetrain.model.operator import NOTHING, Elementwise, Embedding, Linear, Parameter
from wavetrain.model.traced import trace
from wavetrain.plan.layout import Choice, Layout
from wavetrain.plan.plan import EVERY, OperatorChoice, Plan
from wavetrain.plan.stack import Precision

WIDTH = 1024
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Block:
    """One block of a stack, an FSDP module of its own."""

    attention: bool = False
    ffn: int = 4 * WIDTH
    keep: bool = False  # reshard_after_forward=False


@dataclass(frozen=True)
class Stack:
    """A model, its batch, and how many ranks its parameters are cut over."""

    blocks: tuple[Block, ...]
    ranks: int
    tokens: int
    half: bool  # bf16 parameters and activations, fp32 reduction; otherwise fp32 throughout
    microbatches: int = 1  # one is tracked, not the first if there are several
    vocab: int = 0  # with an embedding and a head, FSDP modules too


def stack(kept: str = "", *, num: int = 4, attention: bool = False, **options: object) -> Stack:
    """Equal blocks; `kept` is none, the first or the last half, or all of them."""
    flags = {"": [False] * num, "first": [i < num // 2 for i in range(num)], "all": [True] * num}
    flags["last"] = flags["first"][::-1]
    return Stack(tuple(Block(attention=attention, keep=keep) for keep in flags[kept]), **options)  # type: ignore[arg-type]


# --- torch's side ---


class Mlp(nn.Module):
    def __init__(self, ffn: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, ffn, bias=False), nn.GELU(), nn.Linear(ffn, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Attending(nn.Module):
    """A transformer's block: norms before attention and MLP, residuals around them."""

    def __init__(self, ffn: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Mlp(ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = (t.view(batch, length, 8, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(WIDTH, -1))
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


def module_of(block: Block) -> nn.Module:
    return Attending(block.ffn) if block.attention else Mlp(block.ffn)


@contextmanager
def fake_mesh(ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@cache
def tracked(case: Stack) -> dict[str, float]:
    """Bytes at the peak of a step by the tracker's names; their sum is "Total"."""
    with fake_mesh(case.ranks) as mesh, FakeTensorMode():
        model = sharded(case, mesh)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        x = torch.zeros(1, case.tokens, dtype=torch.long) if case.vocab else torch.zeros(1, case.tokens, WIDTH)
        x = x.bfloat16() if case.half and not case.vocab else x
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        if case.microbatches == 1:
            optimizer.zero_grad()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((x,))
        with tracker:
            model(x).sum().backward()
            optimizer.step()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(name, "value", name)): float(value) for name, value in peak.items()}


def sharded(case: Stack, mesh: DeviceMesh) -> nn.Module:
    ends = [nn.Embedding(case.vocab, WIDTH), nn.Linear(WIDTH, case.vocab, bias=False)] if case.vocab else []
    model = nn.Sequential(*ends[:1], *map(module_of, case.blocks), *ends[1:])
    keeps = [False] * len(ends[:1]) + [block.keep for block in case.blocks] + [False] * len(ends[1:])
    policy = MIXED if case.half else MixedPrecisionPolicy()
    for layer, keep in zip(model, keeps, strict=True):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


# --- Wavetrain's side ---


@cache
def operators(attention: bool, ffn: int) -> tuple:
    """The operators of a block, traced from the module that torch runs."""
    with torch.device("meta"):
        model = trace(nn.Sequential(module_of(Block(attention, ffn))), torch.zeros(2, 64, WIDTH))
    return tuple(operator for layer in model.layers for operator in layer.operators)


def layer_of(block: Block) -> Layer:
    name = f"{'attending' if block.attention else 'mlp'}-{block.ffn}{'-kept' if block.keep else ''}"
    return Layer(name, "{}", operators(block.attention, block.ffn))


def plan_for(case: Stack) -> Plan:
    """The plan that describes a stack as FSDP2 runs it."""
    nothing = Elementwise("nothing", "add", 1, NOTHING)
    first, last = Layer("embedding", "", (nothing,)), Layer("head", "", (nothing,))
    if case.vocab:
        weight = (Parameter("weight", (case.vocab, WIDTH)),)
        first = replace(first, operators=(Embedding("embedding", weight, case.vocab, WIDTH),))
        last = replace(last, operators=(Linear("head", weight, WIDTH, case.vocab),))
    order = [Run(layer_of(block).name, len(list(run))) for block, run in groupby(case.blocks)]
    kinds = {block: layer_of(block) for block in case.blocks}
    kept = [layer for block, layer in kinds.items() if block.keep]
    choice = Choice(case.ranks, keep=True)
    return Plan(
        model=Model(
            "stack", case.tokens, (first, *kinds.values(), last), (Run("embedding", 1), *order, Run("head", 1))
        ),
        cluster=load_cluster("dgx-a100"),
        layout=Layout(global_batch=case.ranks * case.microbatches, dp=case.ranks),
        cut=(len(case.blocks),),
        seq_len=case.tokens,
        choice=Choice(case.ranks),
        choices=tuple(OperatorChoice(layer.name, EVERY, choice) for layer in kept),
        precision=Precision() if case.half else Precision(compute=DType.FP32, products=DType.FP32),
    )
