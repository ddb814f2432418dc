"""Blocks of a stage that compute again in the backward what their plan does not keep, each as its plan says.

- The whole block: it keeps its input only. The embedding and the head are not computed again, as the cost model has it.
- The attention core: scores, softmax and values, again from q, k and v.
- Chosen operators: what they saved is dropped. It is the result of the operators before them, which therefore run
  again, from what they saved themselves; so do chosen operators that keep more than their inputs. All that other
  operators put out is kept, and not computed twice.

Everything is `torch.utils.checkpoint` around functions inside modules: parameters keep their paths, and hooks of the
modules (FSDP2's) stay around what is computed again. The order is: values, `parallelize` (which replaces operators that
are split), then `recompute_stage`; `fully_shard` alone may come before or after.

A backward in two parts can't be combined with that, as each part would compute again: see `check_recompute`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from wavetrain.base.errors import InputError, Problem, RunError
from wavetrain.model.model import Layer
from wavetrain.model.operator import Attention, Elementwise, Linear, Operator, Work
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan
from wavetrain.runtime import hf
from wavetrain.runtime.parts import Part
from wavetrain.runtime.stages import Stage

CORE = "wavetrain-core"  # our name among transformers' attention functions
Forward = Callable[..., Any]


# --- what a plan computes again ---


def chosen_operators(plan: Plan) -> tuple[frozenset[str], ...]:
    """Of each block of the model, the operators that the plan computes again."""
    return tuple(_chosen(plan, number) for number in range(len(plan.blocks)))


def _chosen(plan: Plan, number: int) -> frozenset[str]:
    variant = plan.blocks[number]
    operators = plan.model.by_name[variant.layer].operators
    if plan.recompute is Recompute.FULL:
        return frozenset(o.name for o in operators)
    if plan.recompute is Recompute.SELECTIVE:
        return frozenset(o.name for o in operators if isinstance(o, Attention))
    return frozenset(o.name for o in operators if variant.of(o.name).recompute)


def recomputes_in_blocks(plan: Plan, *, is_split: bool) -> bool:
    """Whether a rank must call `recompute_stage`, and its order must have no RECOMPUTE actions.

    Where backwards are split it is the other way round: a stage is run again as a whole, by an action.
    """
    return not is_split and any(chosen_operators(plan))


def check_recompute(plan: Plan, *, is_split: bool) -> None:
    """Refuse what can't be run: where backwards are split, all blocks are computed again as a whole, or none is."""
    if not is_split:
        return
    chosen = chosen_operators(plan)
    every = [len(plan.model.by_name[variant.layer].operators) for variant in plan.blocks]
    if not any(chosen) or [len(names) for names in chosen] == every:
        return
    selective = plan.recompute is Recompute.SELECTIVE
    raise InputError(
        Problem(
            where="plan",
            key="recompute" if selective else "choices",
            value="selective" if selective else "recompute: true for some operators",
            rule=f"the schedule {plan.layout.schedule} splits its backwards: stages are recomputed whole or not at all",
            legal=("none", "full"),
            remedy="recompute: full, or a schedule with whole backwards, 1f1b for instance",
        )
    )


# --- a stage ---


def recompute_stage(stage: Stage, plan: Plan) -> None:
    """Make the blocks of a stage compute again what the plan says, in place; once for each stage.

    For whole backwards (`recomputes_in_blocks`). Losses and gradients keep their bits.
    """
    place = stage.number % len(plan.cut)
    first, count = sum(plan.cut[:place]), plan.cut[place]
    parts = stage.members[stage.is_first : len(stage.members) - stage.is_last]
    layers = list(plan.model.instances())[plan.model.can_be_cut :][first : first + count]
    chosen = chosen_operators(plan)[first : first + count]
    for part, (layer, number), names in zip(parts, layers, chosen, strict=True):
        _recompute_block(_Block(part, layer, number), names)


@dataclass(frozen=True)
class _Block:
    """A block's modules and its description, with its number in the module tree."""

    part: Part
    layer: Layer
    number: int

    @property
    def body(self) -> nn.Module:
        """What runs the operators; what surrounds a layer of transformers is made once and not again."""
        block = self.part.module
        return block.layer if isinstance(block, hf.Block) else block

    def path(self, operator: Operator) -> str | None:
        """Where an operator with parameters of its own is; None for the others."""
        if not operator.parameters:
            return None
        wanted = _owner(self._numbered(operator.parameters[0].name))
        for path, name in self.part.names.items():
            if _owner(name) == wanted:
                return _owner(path)
        raise InputError(Problem(where=wanted, rule="the stage has no such operator of the plan's model"))

    @property
    def attention(self) -> nn.Module:
        """The module that has the attention core between its projections."""
        (operator,) = (o for o in self.layer.operators if isinstance(o, Attention))
        prefix = f"{self._numbered(operator.name)}."
        for path, name in self.part.names.items():
            if name.startswith(prefix):
                inside = name.removeprefix(prefix).count(".") + 1
                return self.part.module.get_submodule(path.rsplit(".", inside)[0])
        raise InputError(Problem(where=operator.name, rule="the stage has no such operator of the plan's model"))

    def _numbered(self, name: str) -> str:
        return name.replace("{}", str(self.number))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _recompute_block(block: _Block, chosen: frozenset[str]) -> None:
    operators = block.layer.operators
    again = repeated(operators, chosen)
    if {o.name for o in operators} in (chosen, again):
        _replace_forward(block.body, _checkpointed)
    elif chosen == {o.name for o in operators if isinstance(o, Attention)}:
        _wrap_core(block.attention, _checkpointed)
    elif again:
        _recompute_chosen(block, again)


def _replace_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
    module.forward = wrap(module.forward)


def _checkpointed(function: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _checkpoint(partial(function, **kwargs), *args)

    return run


def _checkpoint(function: Forward, *args: Any, **more: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **more)  # there is no dropout


# --- the attention core ---


def _wrap_core(attention: Any, wrap: Callable[[Forward], Forward]) -> None:
    if hasattr(attention, "config"):
        _expose_core(attention)
    attention.core = wrap(attention.core)


def _expose_core(attention: Any) -> None:
    """Let a module of transformers call its own `core`, by a configuration of its own; other models see nothing."""
    functions = import_module("transformers").modeling_utils.ALL_ATTENTION_FUNCTIONS
    name = attention.config._attn_implementation  # noqa: SLF001 -- transformers has no public name for it
    if name == "eager" and getattr(attention, "reorder_and_upcast_attn", False):
        rule = "attention that is upcast has no core of its own that could be computed again"
        raise InputError(
            Problem(where="config", key="reorder_and_upcast_attn", value=True, rule=rule, legal=("false",))
        )
    eager = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    attention.core = partial(functions.get_interface(name, eager), attention)
    attention.config = copy.copy(attention.config)
    functions.register(CORE, _call_core)
    attention.config._attn_implementation = CORE  # noqa: SLF001


def _call_core(attention: Any, *args: Any, **kwargs: Any) -> Any:
    return attention.core(*args, **kwargs)


# --- chosen operators ---


def repeated(operators: Sequence[Operator], chosen: frozenset[str]) -> frozenset[str]:
    """The operators that run again so that nothing of what the chosen ones saved is kept; none where that is nothing.

    Operators of one kind that follow each other (q, k, v) read the same, which the first saves. What saves nothing
    (residual sums, rotary positions) always runs again: its result is as large as what it is made from. So does the
    last operator that saves, or its forward is not even begun: nobody in the block saves its result.
    """
    groups = [list(group) for _, group in groupby(operators, type)]
    savers = [[o.name for o in group if _saves(o)] for group in groups]
    first = next((n for n, names in enumerate(savers) if names), 0)
    again, free = set[str](), set[str]()
    for number, group in enumerate(groups):
        names = {o.name for o in group}
        readers = next((later for later in savers[number + 1 :] if later), [])
        if not readers or not savers[number]:
            free |= names
        elif chosen.issuperset(readers) or (number == first and chosen.issuperset(savers[number])):
            again |= names  # the first reads the block's input, which is kept: its result goes instead
        again |= {o.name for o in group if o.name in chosen and _saves(o) and not isinstance(o, Linear)}
    return frozenset(again | free) if again else frozenset()


def _saves(operator: Operator) -> bool:
    if isinstance(operator, Elementwise):
        return operator.saved_tensors > 0  # its mask is that of a dropout, and there is none
    return operator.saved_bytes(Work(1)) > 0


def _recompute_chosen(block: _Block, again: frozenset[str]) -> None:
    operators = block.layer.operators
    paths = {number: block.path(operator) for number, operator in enumerate(operators)}
    trace = _Trace(
        loose=tuple(number for number, path in paths.items() if path is None),
        again=frozenset(number for number, operator in enumerate(operators) if operator.name in again),
    )
    for number, path in paths.items():
        if path is not None:
            _replace_forward(block.part.module.get_submodule(path), partial(_traced, trace=trace, number=number))
        elif isinstance(operators[number], Attention):
            _wrap_core(block.attention, partial(_traced, trace=trace, number=number))
    _replace_forward(block.body, partial(_with_kept, trace=trace))


@dataclass
class _Trace:
    """Which operator of a block is running, by its position.

    What runs outside all modules of operators belongs to the next operator that is no module.
    """

    loose: tuple[int, ...]
    again: frozenset[int]
    running: list[int] = field(default_factory=list)
    last: int = -1

    @contextmanager
    def within(self, number: int) -> Iterator[None]:
        self.running.append(number)
        try:
            yield
        finally:
            self.last = self.running.pop()

    @property
    def repeats(self) -> bool:
        """Whether what runs now runs again in the backward."""
        if self.running:
            return self.running[-1] in self.again
        return next((number for number in self.loose if number > self.last), self.loose[-1]) in self.again


def _traced(function: Forward, *, trace: _Trace, number: int) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with trace.within(number):
            return function(*args, **kwargs)

    return run


def _with_kept(function: Forward, *, trace: _Trace) -> Forward:
    def begin(*args: Any, **kwargs: Any) -> Any:
        trace.last = -1
        return function(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return begin(*args, **kwargs)
        kept: list[_Result] = []
        modes = _Keeping(trace, kept), _Replaying(trace, kept)
        output = _checkpoint(partial(begin, **kwargs), *args, context_fn=lambda: modes)
        return _Holding.apply(output, *(t for result in kept for t in result.tensors))  # type: ignore[no-untyped-call]

    return run


class _Holding(torch.autograd.Function):
    """The identity; its node holds what a block keeps, so that whoever weighs a graph finds it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.count = len(kept)
        return torch.ops.aten._unsafe_view(output, output.shape)  # type: ignore[no-any-return]  # noqa: SLF001 -- no view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (*gradients, *[None] * ctx.count)


@dataclass
class _Result:
    """What one call of a kernel gave; nothing where it runs again after all."""

    kernel: Any
    tensors: tuple[Tensor, ...]  # without their histories, which would hold the graph that holds them
    is_single: bool


_ATEN = torch.ops.aten
# Cheap, and as a rule no backward reads their results: they always run again.
_PASSING = frozenset(
    {
        *(_ATEN.add.Tensor, _ATEN.add.Scalar, _ATEN.sub.Tensor, _ATEN.sub.Scalar, _ATEN.neg.default),
        *(_ATEN.pow.Tensor_Scalar, _ATEN.cat.default, _ATEN._to_copy.default, _ATEN._unsafe_view.default),  # noqa: SLF001
        *(_ATEN.mul.Scalar, _ATEN.div.Scalar, _ATEN.rsub.Scalar),
    }
)
_PRODUCTS = frozenset({_ATEN.mul.Tensor, _ATEN.div.Tensor})  # passing where one factor is a number


def _can_be_kept(trace: _Trace, kernel: Any, args: Sequence[Any]) -> bool:
    """Whether a kernel's results may be kept; the same in the forward and when it is run again.

    Only what has a gradient is of the block: FSDP2 gathers, tables are made, and not at the same places again. (That is
    why torch's own selective checkpoints don't serve here: they count all kernels, whosever they are.)
    """
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in _tensors(args)):
        return False
    if trace.repeats or kernel.is_view or _changes(kernel) or kernel in _PASSING:
        return False
    return kernel not in _PRODUCTS or all(isinstance(a, Tensor) and a.dim() for a in args)


def _changes(kernel: Any) -> bool:
    """Whether a kernel writes to what it is given."""
    return bool(kernel._schema.is_mutable)  # noqa: SLF001 -- no public name


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        yield from (t for t in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(t, Tensor))


def _place(tensor: Tensor) -> int:
    """Where a tensor's values are; a distributed tensor's are those of its own part."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 -- to_local() has a gradient
    return own.untyped_storage().data_ptr()


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The forward: note what is kept."""

    def __init__(self, trace: _Trace, kept: list[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._kept = trace, kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if _changes(func):
            self._forget([*_tensors(args), *_tensors(given.values())])
        made = func(*args, **given)
        if _can_be_kept(self._trace, func, args):
            tensors = tuple(t.detach() for t in _tensors((made,)))
            self._kept.append(_Result(func, tensors, isinstance(made, Tensor)))
        return made

    def _forget(self, changed: Sequence[Tensor]) -> None:
        """What is changed in place is not what its kernel gave."""
        places = {_place(t) for t in changed}
        for result in self._kept:
            if any(_place(t) in places for t in result.tensors):
                result.tensors = ()


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The forward again: what was kept is not computed a second time."""

    def __init__(self, trace: _Trace, kept: list[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._kept, self._next = trace, kept, 0

    def __enter__(self) -> _Replaying:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _can_be_kept(self._trace, func, args):
            return func(*args, **(kwargs or {}))
        result = self._kept[self._next] if self._next < len(self._kept) else None
        if result is None or result.kernel is not func:
            raise RunError(f"a block was not computed again as before: {func} is new")
        self._next += 1
        if not result.tensors:
            return func(*args, **(kwargs or {}))
        tensors = [t.detach() for t in result.tensors]
        return tensors[0] if result.is_single else tuple(tensors)
