"""`Meter`: the bytes of a rank's parameters, gradients, optimizer states and gathered parameters, at every moment.

Every storage that a kernel makes is followed until it is freed, by a weak reference to it, as torch's own memory
tracker does. So the peak is that of all moments, those inside a backward too, and no allocator has a part in it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import partial, wraps
from operator import gt
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wavetrain.runtime.replicated import Replicated


class Kind(StrEnum):
    """What a storage is for."""

    PARAMETERS = "parameters"  # a rank's own: whole, a part, a shard
    GRADIENTS = "gradients"  # of a microbatch, accumulated, on their way through a reduction, and shards of them
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"  # parameters in full, and the buffers they are gathered with
    OTHER = "other"  # activations and temporaries: followed, and not counted


COUNTED = tuple(kind for kind in Kind if kind is not Kind.OTHER)

# What is made while these run. No public name says when FSDP2 gathers and reduces.
_MAKERS: tuple[tuple[type, str, Kind], ...] = (
    (FSDPParamGroup, "unshard", Kind.GATHERED),
    (FSDPParamGroup, "wait_for_unshard", Kind.GATHERED),
    (FSDPParamGroup, "post_backward", Kind.GRADIENTS),
    (FSDPParam, "to_accumulated_grad_if_needed", Kind.GRADIENTS),
    (Replicated, "_joined", Kind.GRADIENTS),
)


_COLLECTIVES = ("all_gather_single", "reduce_scatter_single")  # with which FSDP2 gathers and reduces
_LET_GO_S = 1.0  # far more than a thread takes for it


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is alive now, by kind, and what was at the fullest moment; gathers and reductions of FSDP2 are known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = dict.fromkeys(Kind, 0)
        self.peak = dict(self.now)  # at the moment when the kinds that count were most together
        self.most = dict(self.now)  # of each kind by itself
        self._known: dict[int, _Followed] = {}  # by the storage's id, as long as it lives
        self._making = [Kind.OTHER]

    @property
    def peak_bytes(self) -> int:
        return _counted(self.peak)

    def follow(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Count these from now on, as this."""
        for tensor in tensors:
            self._follow(_local(tensor).untyped_storage(), kind)

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """What is made here is of this kind."""
        self._making.append(kind)
        try:
            yield
        finally:
            self._making.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own part is what is computed with: that comes here again
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._follow(tensor.untyped_storage(), self._making[-1])
        return made

    def resized(self, storage: UntypedStorage) -> None:
        """A storage has another size now; FSDP2 frees and allocates so."""
        found = self._known.get(id(storage))
        if found is None:
            self._follow(storage, self._making[-1])
        else:
            self._change(found, found.kind, storage.nbytes())

    def _follow(self, storage: UntypedStorage, kind: Kind) -> None:
        found = self._known.get(id(storage))
        if found is None:
            found = self._known[id(storage)] = _Followed(kind)
            found.reference = weakref.ref(storage, partial(self._freed, id(storage)))
        self._change(found, kind, storage.nbytes())

    def _freed(self, key: int, _reference: object) -> None:
        found = self._known.pop(key)
        self.now[found.kind] -= found.num_bytes

    def _change(self, found: _Followed, kind: Kind, num_bytes: int) -> None:
        self.now[found.kind] -= found.num_bytes
        self.now[kind] += num_bytes
        found.kind, found.num_bytes = kind, num_bytes
        self.most = {kind: max(value, self.now[kind]) for kind, value in self.most.items()}
        if _counted(self.now) > self.peak_bytes:
            self.peak = dict(self.now)


class _Followed:
    """A storage that lives."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.num_bytes = kind, 0
        self.reference: object = None


def _counted(values: Mapping[Kind, int]) -> int:
    return sum(values[kind] for kind in COUNTED)


@contextmanager
def metering(modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[Meter]:
    """Follow everything that is made meanwhile, beside what the modules and their optimizer have already."""
    meter, handles = Meter(), ExitStack()
    every = list(modules)
    with handles, ExitStack() as patches:
        for owner, name, kind in _MAKERS:
            patches.enter_context(patch.object(owner, name, _within(meter, kind, getattr(owner, name))))
        patches.enter_context(patch.object(UntypedStorage, "resize_", _noting(meter, UntypedStorage.resize_)))
        for name in _COLLECTIVES:
            patches.enter_context(patch.object(dist, name, _sending(meter, getattr(dist, name))))
        hooked = partial(_hook, meter, handles)
        patches.enter_context(
            patch.object(FSDPParam, "init_unsharded_param", _then(FSDPParam.init_unsharded_param, hooked))
        )
        for sharded in _fsdp_parameters(every):
            meter.follow(sharded.all_gather_outputs, Kind.GATHERED)
            hooked(sharded)
        for parameter in {p: None for module in every for p in module.parameters()}:
            meter.follow([parameter.detach()], Kind.PARAMETERS)
            meter.follow([parameter.grad] if parameter.grad is not None else [], Kind.GRADIENTS)
            if not isinstance(parameter, DTensor):
                _hook_gradient(meter, handles, parameter)
        states = tree_leaves(list(optimizer.state.values()))
        meter.follow((state for state in states if isinstance(state, Tensor)), Kind.OPTIMIZER)
        patches.enter_context(meter)
        yield meter


def _fsdp_parameters(modules: Iterable[nn.Module]) -> Iterator[FSDPParam]:
    inner = (module for outer in modules for module in outer.modules())
    states = {m._get_fsdp_state(): None for m in inner if isinstance(m, FSDPModule)}  # noqa: SLF001 -- no public name
    for state in states:
        for group in state._fsdp_param_groups:  # noqa: SLF001
            yield from group.fsdp_params


def _hook(meter: Meter, handles: ExitStack, parameter: FSDPParam) -> None:
    """Know the gradients of a parameter in full, which is made when it is first gathered."""
    full = getattr(parameter, "_unsharded_param", None)
    if full is not None and not hasattr(full, "_metered"):
        full._metered = True  # noqa: SLF001
        handles.callback(delattr, full, "_metered")
        _hook_gradient(meter, handles, full)


def _hook_gradient(meter: Meter, handles: ExitStack, parameter: Tensor) -> None:
    """A gradient counts from when it arrives, beside what has accumulated; that may be a copy of it."""

    def arrived(gradient: Tensor) -> None:
        meter.follow([gradient], Kind.GRADIENTS)

    def added(parameter: Tensor) -> None:
        meter.follow([parameter.grad] if parameter.grad is not None else [], Kind.GRADIENTS)

    for handle in (parameter.register_hook(arrived), parameter.register_post_accumulate_grad_hook(added)):  # type: ignore[no-untyped-call]
        handles.callback(handle.remove)


def _within(meter: Meter, kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with meter.making(kind):
            return function(*args, **kwargs)

    return run


def _noting(meter: Meter, resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.resized(storage)
        return result

    return resize_


def _sending(meter: Meter, collective: Callable[..., Any]) -> Callable[..., Any]:
    """What a transport makes for itself is not counted: gloo, which has no reduce-scatter, copies what is reduced.

    Its thread lets go of tensors a moment after it is done; that is waited for, or chance would say whether a buffer
    that FSDP2 frees at once is still there at the next allocation.
    """

    @wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        before = _holders(tensors)
        with meter.making(Kind.OTHER):
            result = collective(*args, **kwargs)
        end = time.monotonic() + (_LET_GO_S if result is None else 0.0)
        while time.monotonic() < end and any(map(gt, _holders(tensors), before)):
            time.sleep(0)  # the thread needs Python's lock
        return result

    return run


def _holders(tensors: Iterable[Tensor]) -> list[int]:
    """How many hold each of them, threads without Python included."""
    return [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]  # noqa: SLF001 -- no public name


def _then(function: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(function)
    def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(owner, *args, **kwargs)
        after(owner)
        return result

    return run


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 -- to_local() has a gradient
