"""A plan's choices applied to a module: every operator replicated, sharded over all replicas or inside a group of them.

What is sharded, or computed in another format than its values have, is a unit of FSDP2 (`fully_shard`) on the mesh of
its choice; what is replicated otherwise stays a plain parameter (`Replicated`). Gradients are reduced once per step,
and added: the scaling rule has divided each microbatch's loss by the targets of the whole step already. A parameter
that is used at two places has a copy at each; their gradients are added before the optimizer's step, so both take the
same one.

A step: `prepare` before each backward, and `complete` after the last; where backwards are split (gradients are there
later than any hook) none is the last for `prepare`, and `reduce_now` comes after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
import torch._dynamo  # FSDP2's hooks import it: here once for all, or over a second in every forked rank
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import DType
from wavetrain.plan.plan import Plan
from wavetrain.plan.stack import Precision
from wavetrain.runtime.grid import Grid, check_world, open_grid
from wavetrain.runtime.replicated import Replicated
from wavetrain.runtime.spent import charge_sharding
from wavetrain.runtime.split import EmbeddingSlice, LinearSlice
from wavetrain.runtime.stages import Stage
from wavetrain.runtime.units import Members, Sharded, Unit, check_shapes, members_of
from wavetrain.runtime.whole import (
    add_tied,
    gathered_bytes,
    load_whole,
    release,
    resident,
    whole_gradients,
    whole_parameters,
)
from wavetrain.runtime.world import World

__all__ = [
    "Sharded",
    "Unit",
    "accumulate",
    "add_tied",
    "complete",
    "gathered_bytes",
    "let_go",
    "load_whole",
    "policy_of",
    "prepare",
    "reduce_now",
    "release",
    "resident",
    "run_step",
    "shard_module",
    "shard_stage",
    "shard_whole",
    "whole_gradients",
    "whole_parameters",
]

FORMATS = {
    DType.FP32: torch.float32,
    DType.TF32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


def shard_whole(module: nn.Module, plan: Plan, world: World) -> Sharded:
    """Shard, replicate and split the operators of a whole model, in place, as its plan says.

    `module` is a `Stage` with all blocks, or any module that has the plan's operators at the paths of their names. All
    ranks call this, with the default process group made and the parameters' values set. Recomputation is not done here.
    """
    _check_layout(plan)
    check_world(plan.layout, size=world.size, where=f"rank {world.rank}")
    check_shapes(module, plan)
    members = _members(module, plan)  # what can't be done is said before ranks meet
    return _wrapped(module, members, open_grid(plan, rank=world.rank, size=world.size), _policy_for(module, plan))


def shard_module(module: nn.Module, plan: Plan, grid: Grid) -> Sharded:
    """The same for a module whose operators may be this part's share of those that the plan's model has."""
    return _wrapped(module, _members(module, plan), grid, _policy_for(module, plan))


def _members(module: nn.Module, plan: Plan) -> Members:
    ties = module.parts.ties if isinstance(module, Stage) else {}
    return members_of(module, plan, casts=_casts(_policy_for(module, plan)), ties=ties)


def shard_stage(stage: Stage, plan: Plan, grid: Grid) -> Sharded:
    """The same for one stage of a pipeline, whose parameters may be this part's share of operators that are cut.

    All replicas of the stage call this together, each with its stages in the same order. Gradients of parameters that
    several parts of the model have (embedding and head) are not added here, even where one stage has both.
    """
    policy = _policy_for(stage, plan)
    return _wrapped(stage, members_of(stage, plan, casts=_casts(policy), ties={}), grid, policy)


def policy_of(precision: Precision, own: torch.dtype) -> MixedPrecisionPolicy:
    """In which format a plan computes and reduces; nothing is cast where parameters have it already.

    A module in float64 is there for exactness, and stays exact.
    """
    wanted = FORMATS[precision.compute], FORMATS[precision.gradients]
    if own is torch.float64 or wanted == (own, own):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=wanted[0], reduce_dtype=wanted[1])


def _policy_for(module: nn.Module, plan: Plan) -> MixedPrecisionPolicy:
    first = next(module.parameters(), None)
    return policy_of(plan.precision, torch.float32 if first is None else first.dtype)


def _casts(policy: MixedPrecisionPolicy) -> bool:
    return policy.param_dtype is not None


# --- a step ---


def run_step(sharded: Sharded, microbatches: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Forward and backward of every microbatch of this replica; their losses. Gradients are complete afterwards."""
    losses = []
    for number, microbatch in enumerate(microbatches):
        loss = microbatch()
        prepare(sharded, is_last=number == len(microbatches) - 1, scatters=True)
        loss.backward()  # type: ignore[no-untyped-call]
        let_go(sharded)
        losses.append(loss.detach())
    complete(sharded)
    return losses


def prepare(sharded: Sharded, *, is_last: bool, scatters: bool = False) -> None:
    """What the next backward does at its end: gradients are reduced, and kept parameters released, by the last only.

    `scatters`: gradients of what is sharded are scattered by every backward and added up in shards, as the cost model
    has it, so that none is held whole for longer than the backward of its unit. What remains to be added over groups
    is for the last all the same. Not for backwards that are split.
    """
    for unit in sharded.units:
        unit.wrapped.set_requires_gradient_sync(is_last or (scatters and unit.choice.shard > 1), recurse=False)
        unit.wrapped.set_requires_all_reduce(is_last, recurse=False)
        unit.wrapped.set_reshard_after_backward(is_last or not unit.choice.keep, recurse=False)
    if sharded.units:
        sharded.root.set_is_last_backward(is_last)
    sharded.replicated.prepare(is_last=is_last)


def let_go(sharded: Sharded) -> None:
    """After a backward that scatters: free the last reduction's input; FSDP2 does so at the next one's, or the last."""
    if sharded.units:
        state = sharded.root._get_fsdp_state()  # noqa: SLF001 -- no public name for any of these
        waiting = state._comm_ctx.reduce_scatter_states  # noqa: SLF001
        for item in waiting:
            if item.event is not None:
                state._device_handle.current_stream().wait_event(item.event)  # noqa: SLF001
        waiting.clear()


def reduce_now(sharded: Sharded) -> None:
    """Reduce what all backwards of a step have accumulated, none of which did so (`prepare` with is_last=False).

    For schedules whose last backward is not one call: FSDP2's own end of a backward comes before the last weight
    gradient where the backward is split. As torch's pipelining does it (`perform_reduce_grad`).
    """
    prepare(sharded, is_last=True)
    if sharded.units:
        state = sharded.root._get_fsdp_state()  # noqa: SLF001 -- no public name for any of these
        for member in reversed(state._state_ctx.all_states):  # noqa: SLF001
            for group in member._fsdp_param_groups:  # noqa: SLF001
                group.post_backward()
        state._root_post_backward_final_callback()  # noqa: SLF001
    complete(sharded)


def accumulate(sharded: Sharded) -> None:
    """After the weights' part of a split backward: add its gradients in the format in which they are reduced.

    FSDP2 does so at the end of a backward, which was before; they would add up in the lower format meanwhile.
    """
    states = dict.fromkeys(unit.wrapped._get_fsdp_state() for unit in sharded.units)  # noqa: SLF001 -- as above
    for group in chain.from_iterable(state._fsdp_param_groups for state in states):  # noqa: SLF001
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def complete(sharded: Sharded) -> None:
    """After the last backward: wait for all sums, and add those of tied parameters. The gradients are the step's."""
    sharded.replicated.finish()
    add_tied(sharded)


# --- from units to FSDP2 ---


def _wrapped(module: nn.Module, members: Members, grid: Grid, policy: MixedPrecisionPolicy) -> Sharded:
    plain = set(members.plain)
    for unit in members.units:
        _wrap(unit, grid.sharding(unit.choice.shard), policy, plain)
    group = grid.dp.get_group() if grid.layout.dp > 1 and members.plain else None
    sharded = Sharded(
        module=module,
        units=members.units,
        replicated=Replicated(members.plain, group),
        pieces=members.pieces,
        ties=members.ties,
    )
    if sharded.units:
        # Nothing comes before the first unit: FSDP2 would gather the last one of the microbatch before.
        first = sharded.units[0].wrapped
        first.set_modules_to_backward_prefetch([first])
    return sharded


def _wrap(unit: Unit, mesh: DeviceMesh, policy: MixedPrecisionPolicy, plain: set[nn.Parameter]) -> None:
    modules = list(unit.modules)
    for module in modules:
        module.register_forward_hook(_by_itself)  # runs before FSDP2's own, which comes next
    if not unit.choice.keep:
        _hold_norms(modules)
    what = modules[0] if len(modules) == 1 else modules
    fully_shard(what, mesh=mesh, reshard_after_forward=not unit.choice.keep, mp_policy=policy, ignored_params=plain)
    # Only sums: a division in the collective (AVG, PREMUL_SUM) is unknown to gloo, and none is wanted.
    unit.wrapped.set_gradient_divide_factor(1.0)
    unit.wrapped.set_force_sum_reduction_for_comms(True)
    charge_sharding(unit.wrapped, has_copies=mesh.ndim > 1)
    if isinstance(modules[0], LinearSlice | EmbeddingSlice):
        # A unit prefetches its predecessor unless told what to prefetch; itself is nothing, as it is gathered already.
        unit.wrapped.set_modules_to_backward_prefetch([unit.wrapped])
    if isinstance(modules[0], EmbeddingSlice):
        # Its gradient needs no values; gathered, they would stay to the end, as no input asks for a gradient.
        unit.wrapped.set_unshard_in_backward(False)


def _hold_norms(modules: Sequence[nn.Module]) -> None:
    """Let norms save a copy of their weight for the backward, not the gathered one, which is freed in between.

    The kernel of a norm's backward asks for the weight's values even where it is to compute the weight's gradient only,
    in the second part of a split backward. It is a single row; larger weights are not asked for.
    """
    norms = chain.from_iterable(module.modules() for module in modules)
    for norm in norms:
        if type(norm) is nn.LayerNorm and norm.weight is not None:
            norm.forward = partial(_layer_norm, norm)  # type: ignore[method-assign]
        elif type(norm) is nn.RMSNorm and norm.weight is not None:
            norm.forward = partial(_rms_norm, norm)  # type: ignore[method-assign]


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight.clone(), norm.bias, norm.eps)


def _rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, list(norm.normalized_shape), norm.weight.clone(), norm.eps)


def _by_itself(_module: nn.Module, _inputs: object, output: object) -> object:
    """An output of a node of its own, which FSDP2's hook can't be lost with, nor called for too often.

    Lost: with an in-place operation, if autograd knows the output as a view (a linear of three dimensions gives a view
    of its product). Too often: by the weights' part of a split backward, which starts at the node that has the weights
    and needs no values of theirs. Nobody else has the output, so nothing is copied.
    """
    if isinstance(output, Tensor):
        return _node(output)
    return _pytree.tree_map_only(Tensor, _node, output)


def _node(made: Tensor) -> Tensor:
    if not made.requires_grad:
        return made
    return torch.ops.aten._unsafe_view(made, made.shape)  # type: ignore[no-any-return]  # noqa: SLF001 -- no public name


# --- what can't be run ---


def _check_layout(plan: Plan) -> None:
    layout, problems = plan.layout, []
    for key in ("tp", "cp", "pp"):  # tp is refused here only: a stage that is cut already can be sharded
        if getattr(layout, key) != 1:
            rule = "operators are sharded over replicas of a whole model only"
            problems.append(Problem(where="plan", key=f"layout.{key}", value=getattr(layout, key), rule=rule))
    if layout.shard_optimizer:
        rule = "optimizer states are sharded with their parameters only"
        problems.append(Problem(where="plan", key="layout.shard_optimizer", value=True, rule=rule))
    if problems:
        raise InputError(problems)
