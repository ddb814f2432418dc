"""A user's own module and loop under a plan:

    plan = wt.search(wt.trace(module, sample), cluster, global_batch=64).best
    module = wt.parallelize(module, plan)
    optimizer = torch.optim.AdamW(groups(module))

After `loss.backward()` every rank's gradients are the mean over all replicas, whatever the plan did with each operator,
unless more microbatches are to come (`accumulating`). `clip` and `whole_state` look at all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from wavetrain.base.errors import InputError, Problem
from wavetrain.plan.plan import Plan
from wavetrain.runtime.composed import Composed, compose_module, local
from wavetrain.runtime.grid import open_grid
from wavetrain.runtime.learn import Held
from wavetrain.runtime.learn import clip as clip_held

_RUN = "_wavetrain_run"


def parallelize(module: nn.Module, plan: Plan) -> nn.Module:
    """Run a module as a plan says, in place; the module itself is what comes back.

    All ranks call this with equal values, after `torch.distributed.init_process_group`.
    """
    if not dist.is_initialized():
        rule, remedy = "there is no process group", "torch.distributed.init_process_group() first, on every rank"
        raise InputError(Problem(where="parallelize", rule=rule, remedy=remedy))
    device = next((p.device.type for p in module.parameters()), "cpu")
    grid = open_grid(plan, rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    run = _Run(compose_module(module, plan, grid))
    object.__setattr__(module, _RUN, run)  # no submodule, no buffer: it is in no state_dict
    module.register_forward_hook(run.after_forward)
    return module


@contextmanager
def accumulating(module: nn.Module) -> Iterator[None]:
    """Backwards in here only add to gradients; the next one outside completes them."""
    run = _run_of(module)
    run.accumulates = True
    try:
        yield
    finally:
        run.accumulates = False


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """The parameters for an optimizer, sharded and whole ones apart: some take one sort at a time only."""
    run_of = _run_of(module)
    parameters = [leaf.parameter for leaf in run_of.composed.leaves()]
    sorts = ([p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False))
    return [{"params": sort} for sort in sorts if sort]


def clip(module: nn.Module, most: float) -> float:
    """Scale gradients so that the norm of all of them, over all ranks, is at most `most`; the norm before."""
    leaves = list(_run_of(module).composed.leaves())
    held = [Held(leaf.name, leaf.gradient, leaf.counts) for leaf in leaves if leaf.gradient is not None]
    names = sorted(_run_of(module).composed.names)
    return clip_held(held, names=names, most=most, add_over_ranks=dist.all_reduce)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter in full under its own name, as if nothing had been done to the module; all ranks call this."""
    return _run_of(module).composed.whole_parameters()


class _Run:
    """Knows when a backward begins and ends."""

    def __init__(self, composed: Composed) -> None:
        self.composed = composed
        self.accumulates = False
        self._is_running = False

    def after_forward(self, module: nn.Module, _inputs: object, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        found = [made for made in _pytree.tree_leaves(output) if isinstance(made, Tensor) and made.requires_grad]
        if not found:
            rule = "puts out no tensor that a backward could begin with; tensors may be in lists, tuples and dicts"
            raise InputError(Problem(where=type(module).__name__, value=type(output).__name__, rule=rule))
        for tensor in found:
            tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, _gradient: Tensor) -> None:
        if self._is_running:
            return
        self._is_running = True
        self.composed.before_backward(is_last=not self.accumulates)
        # After FSDP2's own, which its hook on the same output has put there before.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001 -- as FSDP2 and DDP do

    def _end(self) -> None:
        self._is_running = False
        self.composed.after_backward(is_last=not self.accumulates, is_split=False)
        replicas = self.composed.grid.layout.dp
        if not self.accumulates and replicas > 1:
            for leaf in self.composed.leaves():
                if leaf.parameter.grad is not None:
                    local(leaf.parameter.grad).div_(replicas)


def _run_of(module: nn.Module) -> _Run:
    run = getattr(module, _RUN, None)
    if not isinstance(run, _Run):
        rule = "was not given to parallelize"
        raise InputError(Problem(where=type(module).__name__, rule=rule, remedy="module = parallelize(module, plan)"))
    return run
