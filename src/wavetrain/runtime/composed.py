"""A stage as a plan runs it: cut by tensor parallelism, in slices, sharded and recomputed; and what it learns with.

The order matters. Tensor parallelism comes first, since everything after it deals with this rank's part as if it were
the whole; then slices and shards; then the connections between parts; and around it all the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wavetrain.base.errors import InputError, Problem
from wavetrain.plan.layout import Choice
from wavetrain.plan.plan import Plan
from wavetrain.runtime.cuts import Cut, joined_parts
from wavetrain.runtime.grid import Grid
from wavetrain.runtime.places import Place, place_in_whole
from wavetrain.runtime.recompute import chosen_operators, recompute_stage
from wavetrain.runtime.sharded import (
    Sharded,
    accumulate,
    complete,
    gathered_bytes,
    let_go,
    policy_of,
    prepare,
    reduce_now,
    resident,
    shard_module,
    shard_stage,
)
from wavetrain.runtime.shared import Group
from wavetrain.runtime.spent import spending
from wavetrain.runtime.stages import Stage
from wavetrain.runtime.tensor import Parallel, add_partial, connect, cut_parameters
from wavetrain.runtime.units import check_shapes
from wavetrain.runtime.whole import cut_like, release, whole_gradient, whole_of


@dataclass(frozen=True)
class Leaf:
    """A tensor that this rank trains: a parameter, or the part, slice or shard of it that is here."""

    name: str  # of the parameter
    key: str  # its own on this rank
    parameter: nn.Parameter
    counts: bool  # of equal copies on all ranks one does: for the norm of all gradients, for a checkpoint
    shape: tuple[int, ...]  # of the whole parameter
    place: Place  # of this in it

    @property
    def values(self) -> Tensor:
        return local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        return None if self.parameter.grad is None else local(self.parameter.grad)


@dataclass(frozen=True)
class Composed:
    """A stage, or a whole module, and everything that was done to it."""

    module: nn.Module
    number: int  # of the stage
    grid: Grid
    sharded: Sharded
    parallel: Parallel | None
    names: tuple[str, ...]  # of all its parameters, also those of which this part has nothing
    cuts: Mapping[str, Cut]  # what parts have of each
    dtype: torch.dtype  # of their values
    ties: Mapping[str, str]  # a name -> the name whose values it has
    apart: frozenset[str]  # shared parameters that do not lie alike wherever they are: whole ones travel
    is_split: bool = False  # its backwards

    @property
    def is_plain(self) -> bool:
        """Whether nothing was done to it that other ranks take part in."""
        return self.parallel is None and not self.sharded.units and self.grid.layout.dp == 1

    # --- gradients of one step ---

    def before_backward(self, *, is_last: bool) -> None:
        prepare(self.sharded, is_last=is_last, scatters=not self.is_split)

    def after_backward(self, *, is_last: bool, is_split: bool) -> None:
        if is_split:
            accumulate(self.sharded)
        else:
            let_go(self.sharded)
        if not is_last:
            return
        if is_split:
            reduce_now(self.sharded)
        else:
            complete(self.sharded)
        if self.parallel is not None:
            with spending("tensor"):
                add_partial(self.module, self.parallel)

    def held_bytes(self) -> int:
        return gathered_bytes(self.module.modules())

    def resident(self) -> Iterable[Tensor]:
        return resident(self.sharded)

    # --- gradients that stages share ---

    def get(self, name: str) -> Tensor | None:
        if name not in self.sharded.pieces:  # another part has it
            return None
        if name in self.apart:
            return whole_gradient(self.sharded, name)
        found = [None if p.grad is None else local(p.grad).reshape(-1) for p in self._parameters(name)]
        return None if any(g is None for g in found) else torch.cat(cast(list[Tensor], found))

    def put(self, name: str, total: Tensor) -> None:
        for one in (name, *self._twins(name)):
            self._put(one, total)

    def _put(self, name: str, total: Tensor) -> None:
        own = self._parameters(name)
        if name in self.apart:
            for parameter, part in zip(own, cut_like(total, own, self.sharded.pieces[name].dim), strict=True):
                parameter.grad = part
            return
        sizes = [local(cast(Tensor, p.grad)).numel() for p in own]
        for parameter, part in zip(own, torch.split_with_sizes(total, sizes), strict=True):
            gradient = local(cast(Tensor, parameter.grad))
            gradient.copy_(part.view_as(gradient))

    def _twins(self, name: str) -> tuple[str, ...]:
        """Other names of the same parameter in this stage, where it has a copy under each."""
        groups = (group for group in self.sharded.ties if name in group)
        return tuple(other for group in groups for other in group if other != name)

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return [self.module.get_parameter(path) for path in self.sharded.pieces[name].paths]

    # --- what is trained ---

    def leaves(self) -> Iterator[Leaf]:
        known: set[str] = set()
        seen: set[nn.Parameter] = set()  # what is referred to twice is learnt once, under the name that is no tie
        for name in sorted(self.sharded.pieces, key=lambda name: name in self.ties):
            own, dim, cut = self._parameters(name), self.sharded.pieces[name].dim, self.cuts.get(name)
            for number, (path, parameter) in enumerate(zip(self.sharded.pieces[name].paths, own, strict=True)):
                counts = self._is_first_replica(parameter) and self._counts_here(path) and name not in known
                shape, place = place_in_whole(own, number, dim, cut, self.grid.part)
                if parameter not in seen:
                    yield Leaf(name, f"{self.number}/{path}", parameter, counts, shape, place)
                seen.add(parameter)
            known.update(self._twins(name))

    def _is_first_replica(self, parameter: nn.Parameter) -> bool:
        if not isinstance(parameter, DTensor):
            return self.grid.replica == 0
        mesh = parameter.device_mesh
        return mesh.ndim == 1 or mesh.get_local_rank(0) == 0  # shards are apart in the last dimension

    def _counts_here(self, path: str) -> bool:
        """Whether no earlier part has the same values."""
        cut = self._cut_at(path)
        if cut is None or not cut.ranges:
            return self.grid.part == 0
        return cut.ranges[self.grid.part] not in cut.ranges[: self.grid.part]

    def _cut_at(self, path: str) -> Cut | None:
        """What parts have of a parameter; slices of it are cut like it."""
        while self.parallel is not None:
            if path in self.parallel.cuts:
                return self.parallel.cuts[path]
            outer, found, inner = path.rpartition(".slices.")
            assert found, f"nobody knows how {path} is cut"
            path = f"{outer}.{inner.partition('.')[2]}"
        return None

    # --- whole tensors ---

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter of the stage in full, by the model's own name; all replicas and parts call this together."""
        release(self.sharded)
        return dict(self._wholes(lambda parameter: parameter.detach()))

    def whole_gradients(self) -> dict[str, Tensor]:
        """The same of gradients, after the last backward; without those that there are none of."""
        return dict(self._wholes(lambda parameter: parameter.grad))

    def _wholes(self, of: Callable[[nn.Parameter], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        has = [
            name in self.sharded.pieces and all(of(parameter) is not None for parameter in self._parameters(name))
            for name in self.names
        ]
        anywhere = torch.tensor(has, dtype=torch.uint8)
        if self.parallel is not None:
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.grid.tp.get_group())
        for name, here, there in zip(self.names, has, anywhere.tolist(), strict=True):
            own = whole_of(self.sharded, name, lambda p: cast(Tensor, of(p))) if here else None
            if there:
                yield name, cast(Tensor, own) if self.parallel is None else self._over_parts(self.cuts[name], own)

    def _over_parts(self, cut: Cut, own: Tensor | None) -> Tensor:
        """A whole tensor from what all parts have of it."""
        group, tensors = self.grid.tp.get_group(), list[Tensor | None]()
        if not cut.ranges:
            return cast(Tensor, own)
        for part, ranges in enumerate(cut.ranges):
            size = sum(last - first for first, last in ranges)
            shape = (*cut.shape[: cut.dim], size, *cut.shape[cut.dim + 1 :])
            given = own.contiguous() if part == self.grid.part and own is not None else None
            if size:
                given = torch.empty(shape, dtype=self.dtype) if given is None else given
                dist.broadcast(given, group=group, group_src=part)
            tensors.append(given)
        return joined_parts(cut, tensors)


def compose(stage: Stage, plan: Plan, grid: Grid, *, is_split: bool, apart: frozenset[str] = frozenset()) -> Composed:
    """Run a materialized stage as planned; all ranks call this, in the order of their stages."""
    if stage.parts.is_whole:
        assert stage.embedding is not None
        return compose_module(stage.embedding.get_submodule("module"), plan, grid)
    names = tuple(name for part in stage.members for name in dict.fromkeys(part.names.values()))
    dtype = stage.dtype
    parallel = cut_parameters(stage, plan, grid) if plan.layout.tp > 1 else None
    sharded = shard_stage(stage, plan, grid)
    if parallel is not None:
        connect(stage, parallel)
    if not is_split:
        recompute_stage(stage, plan)
    computes = policy_of(plan.precision, stage.dtype).param_dtype
    if computes is not None:
        stage.dtype = stage.boundary_dtype = computes
    ties, number = stage.parts.ties, stage.number
    return Composed(stage, number, grid, sharded, parallel, names, _cuts(parallel, names), dtype, ties, apart, is_split)


def compose_module(module: nn.Module, plan: Plan, grid: Grid) -> Composed:
    """The same for a module that was not taken apart, whose outputs are whole; all ranks call this."""
    _check_whole(plan)
    check_shapes(module, plan)
    names = tuple(name for name, _ in module.named_parameters(remove_duplicate=False))
    ties = ties_of(module)
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    parallel = cut_parameters(module, plan, grid) if plan.layout.tp > 1 else None
    sharded = shard_module(module, plan, grid)
    if parallel is not None:
        connect(module, parallel)
    return Composed(module, 0, grid, sharded, parallel, names, _cuts(parallel, names), dtype, ties, frozenset())


def ties_of(module: nn.Module) -> dict[str, str]:
    """Names of parameters that are another one, and of that."""
    first: dict[nn.Parameter, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {path: first[p] for path, p in every if first.setdefault(p, path) != path}


def _check_whole(plan: Plan) -> None:
    layout, rule = plan.layout, "a module that was not taken apart runs on replicas and parts only"
    problems = [
        Problem(where="plan", key=f"layout.{key}", value=getattr(layout, key), rule=rule, legal=("1",))
        for key in ("cp", "pp")
        if getattr(layout, key) != 1
    ]
    if layout.shard_optimizer:
        rule = "optimizer states are sharded with their parameters only"
        problems.append(Problem(where="plan", key="layout.shard_optimizer", value=True, rule=rule))
    if any(chosen_operators(plan)):
        rule = "a module that was not taken apart has no blocks to compute again"
        remedy = "torch.utils.checkpoint in the module itself"
        problems.append(Problem(where="plan", key="recompute", value=plan.recompute.value, rule=rule, remedy=remedy))
    if problems:
        raise InputError(problems)


def _cuts(parallel: Parallel | None, names: Iterable[str]) -> dict[str, Cut]:
    return {} if parallel is None else {name: _cut_of(parallel, name) for name in names}


def _cut_of(parallel: Parallel, name: str) -> Cut:
    """What parts have of a parameter that may be at several places."""
    first, *others = (parallel.cuts[path] for path in parallel.pieces[name].paths)
    for other in others:
        size = first.shape[first.dim]
        ranges = tuple(
            (*own, *((a + size, b + size) for a, b in more))
            for own, more in zip(first.ranges, other.ranges, strict=True)
        )
        shape = list(first.shape)
        shape[first.dim] += other.shape[first.dim]
        first = Cut(tuple(shape), first.dim, ranges)
    return first


def choices_of(plan: Plan) -> dict[str, Choice]:
    """What is done with every parameter, by its name."""
    first, last = plan.ends
    variants = (first, *plan.blocks, last) if plan.model.can_be_cut else plan.blocks
    return {
        parameter.name.replace("{}", str(number)): variant.of(operator.name)
        for (layer, number), variant in zip(plan.model.instances(), variants, strict=True)
        for operator in layer.operators
        for parameter in operator.parameters
    }


def laid_apart(groups: Sequence[Group], choices: Mapping[str, Choice]) -> frozenset[str]:
    """Shared parameters whose holders shard or slice them differently."""
    found = set()
    for group in groups:
        names = {holder.name for holder in group.holders}
        ways = {(choices[name].shard, choices[name].slices) for name in names}
        if len(names) > 1 and (len(ways) > 1 or any(slices > 1 for _, slices in ways)):
            found |= names
    return frozenset(found)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
