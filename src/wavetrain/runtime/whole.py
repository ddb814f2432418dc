"""Whole tensors by the model's own names, however a plan has cut and placed them: parameters and gradients.

Whole means over replicas: where tensor parallelism has cut an operator, a rank's whole is its own part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from wavetrain.runtime.crossings import gather_rows
from wavetrain.runtime.units import Sharded


def whole_parameters(sharded: Sharded) -> dict[str, Tensor]:
    """Every parameter in full, under its unsplit name; all replicas call this together."""
    release(sharded)
    return {name: whole_of(sharded, name, lambda p: p.detach()) for name in sharded.pieces}


def whole_gradients(sharded: Sharded) -> dict[str, Tensor | None]:
    """Every gradient in full, None where there is none; all replicas call this together, after the last backward."""
    return {name: whole_gradient(sharded, name) for name in sharded.pieces}


def whole_gradient(sharded: Sharded, name: str) -> Tensor | None:
    """One parameter's gradient in full; all replicas call this together."""
    if any(parameter.grad is None for parameter in _held(sharded, name)):
        return None
    return whole_of(sharded, name, lambda p: cast(Tensor, p.grad))


def load_whole(sharded: Sharded, values: Mapping[str, Tensor]) -> None:
    """Give every parameter its values by its unsplit name; nothing is sent."""
    release(sharded)
    with torch.no_grad():
        for name, pieces in sharded.pieces.items():
            own = _held(sharded, name)
            for parameter, value in zip(own, cut_like(values[name], own, pieces.dim), strict=True):
                parameter.copy_(value)


def release(sharded: Sharded) -> None:
    """Free all gathered parameters, so that the module's own are the sharded ones."""
    for unit in sharded.units:
        unit.wrapped.reshard()


def gathered_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of parameters that are gathered in full at this moment, copies of replicated ones included."""
    return sum(buffer.untyped_storage().size() for buffer in _gathered(modules))


def resident(sharded: Sharded) -> Iterator[Tensor]:
    """Tensors that are whole or gathered parameters: an activation that shares their storage costs nothing.

    Gathered ones have another place every time, and none before the first.
    """
    yield from _gathered(unit.modules[0] for unit in sharded.units)
    yield from (parameter for parameter in sharded.module.parameters() if not isinstance(parameter, DTensor))


def _gathered(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    states = {module._get_fsdp_state(): None for module in modules if isinstance(module, FSDPModule)}  # noqa: SLF001
    for state in states:
        for group in state._fsdp_param_groups:  # noqa: SLF001 -- no public name says what is allocated
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs


# --- parameters that are used at two places ---


def add_tied(sharded: Sharded) -> None:
    """Give all copies of a parameter the sum of their gradients, added in the order of the copies."""
    for group in sharded.ties:
        held = [_held(sharded, name) for name in group]
        if all(_laid_alike(sharded, a, b) for a, b in pairwise(group)):
            for copies in zip(*held, strict=True):
                _share([p.grad for p in copies], copies)
            continue
        total = _sum(whole_gradient(sharded, name) for name in group)
        for name, own in zip(group, held, strict=True):
            if total is not None:
                for parameter, part in zip(own, cut_like(total, own, sharded.pieces[name].dim), strict=True):
                    parameter.grad = part


def _share(gradients: Sequence[Tensor | None], copies: Sequence[nn.Parameter]) -> None:
    total = _sum(gradients)
    for copy in copies:
        copy.grad = None if total is None else total.clone()


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _laid_alike(sharded: Sharded, first: str, second: str) -> bool:
    """Whether two parameters are cut into the same pieces and those into the same shards."""
    a, b = sharded.pieces[first], sharded.pieces[second]
    if (len(a.paths), a.dim) != (len(b.paths), b.dim):
        return False
    pairs = zip(_held(sharded, first), _held(sharded, second), strict=True)
    return all(_layout_of(one) == _layout_of(other) for one, other in pairs)


def _layout_of(parameter: Tensor) -> tuple[object, ...]:
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements, parameter.shape
    return (parameter.shape,)


# --- between whole tensors and their pieces ---


def _held(sharded: Sharded, name: str) -> list[nn.Parameter]:
    return [sharded.module.get_parameter(path) for path in sharded.pieces[name].paths]


def cut_like(whole: Tensor, like: Sequence[Tensor], dim: int) -> list[Tensor]:
    """A whole tensor as pieces that lie as others do; every rank has the whole, so nothing is sent."""
    parts = torch.split_with_sizes(whole, [piece.shape[dim] for piece in like], dim)
    return [_laid(part, piece) for part, piece in zip(parts, like, strict=True)]


def _laid(part: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return part.clone(memory_format=torch.contiguous_format)
    return distribute_tensor(part.contiguous(), like.device_mesh, like.placements, src_data_rank=None)


def whole_of(sharded: Sharded, name: str, part: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """Something of a parameter in full, over its slices and shards; all replicas call this together."""
    found = [full(part(parameter)) for parameter in _held(sharded, name)]
    return found[0] if len(found) == 1 else torch.cat(found, sharded.pieces[name].dim)


def full(tensor: Tensor) -> Tensor:
    """All of a tensor that is cut over one dimension of its mesh at most; all ranks of that call this together."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            group, at = tensor.device_mesh.get_group(dim), placement.dim
            return gather_rows(tensor.to_local().movedim(at, 0), tensor.shape[at], group).movedim(0, at).contiguous()
    return tensor.to_local().clone()
