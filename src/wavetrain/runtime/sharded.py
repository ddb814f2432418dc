"""A plan's choices applied to a module: every operator replicated, sharded over all replicas or inside a group of them.

Each operator that the plan names, each slice of a split one, and the rest of each layer together is a unit of FSDP2
(`torch.distributed.fsdp.fully_shard`) on the mesh of its choice. Gradients are reduced once per step, and added: the
scaling rule has divided each microbatch's loss by the targets of the whole step already. A parameter that is used at
two places has a copy at each; their gradients are added before the optimizer's step, so both take the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import cast

import torch
import torch._dynamo  # FSDP2's hooks import it: here once for all, or over a second in every forked rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import DType
from wavetrain.model.model import Layer
from wavetrain.model.operator import Operator
from wavetrain.plan.layout import Choice
from wavetrain.plan.plan import Plan, Variant
from wavetrain.plan.stack import Precision
from wavetrain.runtime.split import EmbeddingSlice, LinearSlice, Pieces, Split, can_split, joined, split
from wavetrain.runtime.stages import Stage
from wavetrain.runtime.world import World

FORMATS = {
    DType.FP32: torch.float32,
    DType.TF32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together, released together and reduced together."""

    name: str
    modules: tuple[nn.Module, ...]
    choice: Choice

    @property
    def wrapped(self) -> FSDPModule:
        """What FSDP2 made of them; a setting of one is a setting of all."""
        return cast(FSDPModule, self.modules[0])


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A module as a plan runs it."""

    module: nn.Module
    units: tuple[Unit, ...]
    pieces: Mapping[str, Pieces]  # by the model's own names of its parameters
    ties: tuple[tuple[str, ...], ...]  # names of parameters that are the same one

    @property
    def root(self) -> FSDPModule:
        return cast(FSDPModule, self.module)


def parallelize(module: nn.Module, plan: Plan, world: World) -> Sharded:
    """Shard, replicate and split the operators of a whole model, in place, as its plan says.

    `module` is a `Stage` with all blocks, or any module that has the plan's operators at the paths of their names. All
    ranks call this, with the default process group made and the parameters' values set. Recomputation is not done here.
    """
    _check_layout(plan, world)
    names = _names(module)
    _check_shapes(module, plan, names)
    ties = _untie(module, names)
    members = tuple(_units(module, plan, names))
    pieces = dict(_all_pieces(module, names))
    meshes = _meshes(plan, (unit.choice.shard for unit in members), next(module.parameters()).device.type)
    policy = policy_of(plan.precision, next(module.parameters()).dtype)
    is_unit = any(module in unit.modules for unit in members)
    units = members if is_unit else (*members, Unit("", (module,), plan.choice))  # FSDP2 wants one root
    for unit in units:
        _wrap(unit, meshes[unit.choice.shard], policy)
    return Sharded(module=module, units=units, pieces=pieces, ties=ties)


def policy_of(precision: Precision, own: torch.dtype) -> MixedPrecisionPolicy:
    """In which format a plan computes and reduces; a module in float64 is there for exactness, and stays exact."""
    if own is torch.float64:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=FORMATS[precision.compute], reduce_dtype=FORMATS[precision.gradients])


def run_step(sharded: Sharded, microbatches: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Forward and backward of every microbatch of this replica; their losses. Gradients are complete afterwards."""
    losses = []
    for number, microbatch in enumerate(microbatches):
        prepare(sharded, is_last=number == len(microbatches) - 1)
        loss = microbatch()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    add_tied(sharded)
    return losses


def prepare(sharded: Sharded, *, is_last: bool) -> None:
    """What the next backward does at its end: gradients are reduced, and kept parameters released, by the last only.

    For FSDP2's books (`set_is_last_backward`) every backward is a last one while each follows its own forward: else
    the first unit's backward prefetches the last unit of the microbatch before, which nobody needs.
    """
    sharded.root.set_requires_gradient_sync(is_last)
    for unit in sharded.units:
        unit.wrapped.set_reshard_after_backward(is_last or not unit.choice.keep, recurse=False)


def reduce_now(sharded: Sharded) -> None:
    """Reduce what all backwards of a step have accumulated, none of which did so (`prepare` with is_last=False).

    For schedules whose last backward is not one call: FSDP2's own end of a backward comes before the last weight
    gradient where the backward is split. As torch's pipelining does it (`perform_reduce_grad`), for every root.
    """
    sharded.root.set_requires_gradient_sync(True)
    sharded.root.set_reshard_after_backward(True)
    sharded.root.set_is_last_backward(True)
    for unit in sharded.units:
        state = unit.wrapped._get_fsdp_state()  # noqa: SLF001 -- no public name for any of these
        if state._is_root:  # noqa: SLF001 -- a block is one where nobody calls the whole module
            state._state_ctx.is_last_backward = True  # noqa: SLF001
            for member in state._state_ctx.all_states:  # noqa: SLF001
                for group in member._fsdp_param_groups:  # noqa: SLF001
                    group.post_backward()
            state._root_post_backward_final_callback()  # noqa: SLF001
    add_tied(sharded)


# --- the whole tensors, by the model's own names ---


def whole_parameters(sharded: Sharded) -> dict[str, Tensor]:
    """Every parameter in full, under its unsplit name; all ranks call this together."""
    release(sharded)
    return {name: _whole(sharded, name, lambda p: p.detach()) for name in sharded.pieces}


def whole_gradients(sharded: Sharded) -> dict[str, Tensor | None]:
    """Every gradient in full, None where there is none; all ranks call this together, after the last backward."""
    return {name: _whole_gradient(sharded, name) for name in sharded.pieces}


def load_whole(sharded: Sharded, values: Mapping[str, Tensor]) -> None:
    """Give every parameter its values by its unsplit name; nothing is sent."""
    release(sharded)
    with torch.no_grad():
        for name, pieces in sharded.pieces.items():
            own = [cast(DTensor, sharded.module.get_parameter(path)) for path in pieces.paths]
            for parameter, value in zip(own, _cut(values[name], own, pieces.dim), strict=True):
                parameter.copy_(value)


def release(sharded: Sharded) -> None:
    """Free all gathered parameters, so that the module's own are the sharded ones."""
    for unit in sharded.units:
        unit.wrapped.reshard()


def gathered_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of parameters that are gathered in full at this moment, copies of replicated ones included."""
    groups = chain.from_iterable(
        module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001 -- no public name says what is allocated
        for module in modules
        if isinstance(module, FSDPModule)
    )
    parameters = chain.from_iterable(group.fsdp_params for group in groups)
    return sum(out.untyped_storage().size() for parameter in parameters for out in parameter.all_gather_outputs)


def add_tied(sharded: Sharded) -> None:
    """Give all copies of a parameter the sum of their gradients, added in the order of the copies."""
    for group in sharded.ties:
        held = [[sharded.module.get_parameter(path) for path in sharded.pieces[name].paths] for name in group]
        if all(_laid_alike(sharded, a, b) for a, b in pairwise(group)):
            for copies in zip(*held, strict=True):
                _share([p.grad for p in copies], copies)
            continue
        total = _sum(_whole_gradient(sharded, name) for name in group)
        for name, own in zip(group, held, strict=True):
            if total is not None:
                parts = _cut(total, cast(list[DTensor], own), sharded.pieces[name].dim)
                for parameter, part in zip(own, parts, strict=True):
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
    pairs = zip(a.paths, b.paths, strict=True)
    get = sharded.module.get_parameter
    return all(_layout_of(get(one)) == _layout_of(get(other)) for one, other in pairs)


def _layout_of(parameter: nn.Parameter) -> tuple[object, ...]:
    tensor = cast(DTensor, parameter)
    return tensor.device_mesh, tensor.placements, tensor.shape


def _cut(whole: Tensor, like: Sequence[DTensor], dim: int) -> list[DTensor]:
    """A whole tensor as pieces that lie as others do; every rank has the whole, so nothing is sent."""
    parts = torch.split_with_sizes(whole, [piece.shape[dim] for piece in like], dim)
    return [
        distribute_tensor(part.contiguous(), piece.device_mesh, piece.placements, src_data_rank=None)
        for part, piece in zip(parts, like, strict=True)
    ]


def _whole(sharded: Sharded, name: str, part: Callable[[nn.Parameter], Tensor]) -> Tensor:
    pieces = sharded.pieces[name]
    full = [_full(part(sharded.module.get_parameter(path))) for path in pieces.paths]
    return full[0] if len(full) == 1 else torch.cat(full, pieces.dim)


def _whole_gradient(sharded: Sharded, name: str) -> Tensor | None:
    own = [sharded.module.get_parameter(path) for path in sharded.pieces[name].paths]
    if any(p.grad is None for p in own):
        return None
    return _whole(sharded, name, lambda p: cast(Tensor, p.grad))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


# --- from a plan to units ---


def _units(module: nn.Module, plan: Plan, names: Mapping[str, str]) -> Iterator[Unit]:
    """Units from the innermost out, operators to be split replaced by their slices."""
    owners = {_owner(name): _owner(path) for path, name in names.items()}
    for position, (layer, number, variant) in enumerate(_layers(plan)):
        alone, rest = dict(variant.named), []
        for operator in (o for o in layer.operators if o.parameters):
            choice = variant.of(operator.name)
            if choice.slices > 1 and operator.slice_dims:
                yield from _slices(module, _found(owners, _numbered(operator.name, number)), operator, choice)
            elif operator.name in alone:
                path = _found(owners, _numbered(operator.name, number))
                yield Unit(path, (module.get_submodule(path),), choice)
            else:
                rest += [owners[_owner(_numbered(p.name, number))] for p in operator.parameters]
        if rest:
            home = _home(module, position, _numbered(layer.path, number))
            yield from _together(module, rest if home is None else [home], variant.choice, plan)


def _together(module: nn.Module, paths: Iterable[str], choice: Choice, plan: Plan) -> Iterator[Unit]:
    """One unit of the outermost of some modules; what the root has itself is left to the root's unit."""
    every = dict.fromkeys(paths)
    if "" in every and choice != plan.choice:
        rule = "parameters of the module itself can be under the plan's own choice only"
        raise InputError(Problem(where=type(module).__name__, key="choice", value=choice, rule=rule))
    outer = [path for path in every if path and not any(path.startswith(f"{other}.") for other in every if other)]
    if outer:
        yield Unit(", ".join(outer), tuple(module.get_submodule(path) for path in outer), choice)


def _found(owners: Mapping[str, str], operator: str) -> str:
    if operator not in owners:
        rule = "is no module with parameters, so it can't be gathered by itself"
        raise InputError(Problem(where=operator, rule=rule, remedy="no choice of its own, or one for *"))
    return owners[operator]


def _layers(plan: Plan) -> Iterator[tuple[Layer, int, Variant]]:
    """Every layer, its number in the module tree, and how it is run."""
    first, last = plan.ends
    variants = (first, *plan.blocks, last) if plan.model.can_be_cut else plan.blocks
    for (layer, number), variant in zip(plan.model.instances(), variants, strict=True):
        yield layer, number, variant


def _slices(module: nn.Module, path: str, operator: Operator, choice: Choice) -> Iterator[Unit]:
    whole = module.get_submodule(path)
    if not can_split(whole):
        rule = f"is a {type(whole).__name__}, which can't be run in slices"
        raise InputError(Problem(where=operator.name, key="slices", value=choice.slices, rule=rule))
    made = split(whole, slices=choice.slices)
    module.set_submodule(path, made)
    for number, piece in enumerate(made.slices):
        yield Unit(f"{path}.slices.{number}", (piece,), choice)


def _home(module: nn.Module, position: int, path: str) -> str | None:
    """The module that has a layer's operators and no others; None where the tree has none."""
    if isinstance(module, Stage):
        prefixes = _prefixes(module)
        return prefixes[position] if len(prefixes) > position else None
    return path or None


def _prefixes(stage: Stage) -> list[str]:
    """Where a stage has each of its members."""
    first, last = ["embedding"] * stage.is_first, ["head"] * stage.is_last
    return [*first, *(f"blocks.{number}" for number in range(len(stage.blocks))), *last]


def _names(module: nn.Module) -> dict[str, str]:
    """The model's own name of every parameter by its path, each reference of a shared one by itself."""
    if not isinstance(module, Stage):
        return {path: path for path, _ in module.named_parameters(remove_duplicate=False)}
    found = {}
    for prefix, part in zip(_prefixes(module), module.members, strict=True):
        for path, _ in part.module.named_parameters(remove_duplicate=False):
            found[joined(prefix, path)] = part.names[path]
    return found


def _untie(module: nn.Module, names: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Give each place where a shared parameter is used a copy; the names that belong together."""
    groups: dict[object, list[str]] = {}
    seen: set[int] = set()
    ties = module.parts.ties if isinstance(module, Stage) else None
    for path, name in names.items():
        parameter = module.get_parameter(path)
        key: object = id(parameter) if ties is None else ties.get(name, name)
        groups.setdefault(key, []).append(name)
        if id(parameter) in seen:
            owner, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _all_pieces(module: nn.Module, names: Mapping[str, str]) -> Iterator[tuple[str, Pieces]]:
    """Where every parameter's values are after splitting, by the model's own name."""
    for path, name in names.items():
        owner, _, leaf = path.rpartition(".")
        holder = module.get_submodule(owner)
        yield name, holder.pieces[leaf].under(owner) if isinstance(holder, Split) else Pieces((path,))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _numbered(name: str, number: int) -> str:
    return name.replace("{}", str(number))


# --- from units to FSDP2 ---


def _meshes(plan: Plan, shards: Iterable[int], device: str) -> dict[int, DeviceMesh]:
    """One mesh per group size, made in ascending order on every rank; neighbouring replicas share a group."""
    dp = plan.layout.dp
    return {shard: _mesh(dp, shard, device) for shard in sorted({plan.choice.shard, *shards})}


def _mesh(dp: int, shard: int, device: str) -> DeviceMesh:
    if shard == dp:
        return init_device_mesh(device, (dp,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (dp // shard, shard), mesh_dim_names=("replicate", "shard"))


def _wrap(unit: Unit, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    modules = list(unit.modules)
    for module in modules:
        module.register_forward_hook(_without_base)  # runs before FSDP2's own, which comes next
    what = modules[0] if len(modules) == 1 else modules
    fully_shard(what, mesh=mesh, reshard_after_forward=not unit.choice.keep, mp_policy=policy)
    # Only sums: a division in the collective (AVG, PREMUL_SUM) is unknown to gloo, and none is wanted.
    unit.wrapped.set_gradient_divide_factor(1.0)
    unit.wrapped.set_force_sum_reduction_for_comms(True)
    if isinstance(modules[0], LinearSlice | EmbeddingSlice):
        # A unit prefetches its predecessor unless told what to prefetch; itself is nothing, as it is gathered already.
        unit.wrapped.set_modules_to_backward_prefetch([unit.wrapped])
    if isinstance(modules[0], EmbeddingSlice):
        # Its gradient needs no values; gathered, they would stay to the end, as no input asks for a gradient.
        unit.wrapped.set_unshard_in_backward(False)


def _without_base(_module: nn.Module, _inputs: object, output: object) -> object:
    """An output that autograd knows as a view, as a tensor of its own: FSDP2's hook would be lost with an in-place op.

    A linear of three dimensions gives a view of its product; nobody else has the product, so nothing is copied.
    """
    if isinstance(output, Tensor) and output._is_view():  # noqa: SLF001 -- torch has no public name for either
        return torch.ops.aten._unsafe_view(output, output.shape)  # noqa: SLF001
    return output


# --- what can't be run ---


def _check_layout(plan: Plan, world: World) -> None:
    layout, problems = plan.layout, []
    for key in ("tp", "cp", "pp"):
        if getattr(layout, key) != 1:
            rule = "operators are sharded over replicas of a whole model only"
            problems.append(Problem(where="plan", key=f"layout.{key}", value=getattr(layout, key), rule=rule))
    if layout.shard_optimizer:
        rule = "optimizer states are sharded with their parameters only"
        problems.append(Problem(where="plan", key="layout.shard_optimizer", value=True, rule=rule))
    if layout.num_devices != world.size:
        rule = f"the plan is for {layout.num_devices} ranks, this run has {world.size} (rank {world.rank} says)"
        problems.append(Problem(where="plan", key="layout.dp", value=layout.dp, rule=rule))
    if problems:
        raise InputError(problems)


def _check_shapes(module: nn.Module, plan: Plan, names: Mapping[str, str]) -> None:
    """Whether the module has what the plan's model has."""
    shapes = {name: tuple(module.get_parameter(path).shape) for path, name in names.items()}
    problems = []
    for parameter in plan.model.parameters():
        found = shapes.get(parameter.name)
        if found != parameter.shape:
            has = "has no such parameter" if found is None else f"has one of shape {found}"
            rule = f"the module {has}; the plan's model {plan.model.name} has one of shape {parameter.shape}"
            problems.append(Problem(where=parameter.name, rule=rule))
    if problems:
        raise InputError(problems)
