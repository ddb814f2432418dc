"""From a plan to units: which parameters of a module are gathered together, and which stay as they are.

An operator that the plan names is a unit, so is each slice of a split one, and the rest of a layer together. Operators
that are replicated and computed in the format of their values are no units: they stay plain parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from wavetrain.base.errors import InputError, Problem, nearest
from wavetrain.model.model import Layer
from wavetrain.model.operator import Operator
from wavetrain.plan.layout import Choice
from wavetrain.plan.plan import Plan, Variant
from wavetrain.runtime.replicated import Replicated
from wavetrain.runtime.split import Pieces, Split, can_split, joined, split
from wavetrain.runtime.stages import Stage

MOST_PROBLEMS = 5  # of one kind that are told


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
    units: tuple[Unit, ...]  # of FSDP2, from the innermost out, the module itself last; none where nothing is gathered
    replicated: Replicated  # plain parameters, whole on every replica
    pieces: Mapping[str, Pieces]  # by the model's own names of its parameters
    ties: tuple[tuple[str, ...], ...]  # names of parameters that are the same one

    @property
    def root(self) -> FSDPModule:
        return cast(FSDPModule, self.module)


@dataclass(frozen=True)
class Members:
    """What a plan makes of a module, before FSDP2 is asked."""

    units: tuple[Unit, ...]
    plain: tuple[nn.Parameter, ...]  # in the module's order
    pieces: Mapping[str, Pieces]
    ties: tuple[tuple[str, ...], ...]


class Placed(NamedTuple):
    """A layer, its number in the module tree, and how it is run."""

    layer: Layer
    number: int
    variant: Variant


def members_of(module: nn.Module, plan: Plan, *, casts: bool, ties: Mapping[str, str]) -> Members:
    """Take a module apart as its plan says; operators to be split are replaced by their slices, in place.

    `casts`: whether parameters are computed in another format than their values have. Replicated ones are then units
    as well, kept for the whole step: their copy in that format is what the plan counts. `ties`: names of parameters
    that have another one's values, beside those that are the same Parameter anyway.
    """
    paths = dict(_paths(module))
    pieces = _pieces(module, paths)
    groups = _untie(module, pieces, ties)
    found = tuple(_units(module, plan, {name: paths[name] for name in pieces}, casts=casts))
    units: list[Unit] = []
    plain: set[nn.Parameter] = set()
    taken: set[nn.Parameter] = set()
    for unit in (*found, Unit("", (module,), plan.choice)):  # the root has what is left
        own = {p for member in unit.modules for p in member.parameters()} - taken
        taken |= own
        if unit.choice.shard == 1 and not casts:
            plain |= own
        elif own:
            units.append(_kept(unit) if unit.choice.shard == 1 else unit)
    if units and units[-1].modules != (module,):
        units.append(Unit("", (module,), plan.choice))  # FSDP2 wants one root, with parameters or without
    pieces = _pieces(module, paths)
    tied = tuple(_joined(module, group, pieces, plain) for group in groups)
    in_order = tuple(p for p in module.parameters() if p in plain)
    return Members(tuple(units), in_order, pieces, tuple(group for group in tied if len(group) > 1))


def _kept(unit: Unit) -> Unit:
    return replace(unit, choice=replace(unit.choice, keep=True))


def layers_of(module: nn.Module, plan: Plan) -> list[Placed]:
    """The layers that a module has: those of its place in the cut if it is a stage, else all."""
    first, last = plan.ends
    variants = (first, *plan.blocks, last) if plan.model.can_be_cut else plan.blocks
    every = [Placed(*item, variant) for item, variant in zip(plan.model.instances(), variants, strict=True)]
    if not isinstance(module, Stage):
        return every
    place = module.number % len(plan.cut)
    before, count = sum(plan.cut[:place]), plan.cut[place]
    assert count == len(module.blocks), f"stage {module.number} has {len(module.blocks)} blocks, its plan says {count}"
    return [*every[:1] * module.is_first, *every[1 + before : 1 + before + count], *every[-1:] * module.is_last]


# --- units ---


def _units(module: nn.Module, plan: Plan, paths: Mapping[str, str], *, casts: bool) -> Iterator[Unit]:
    """Units from the innermost out, those that will stay plain included."""
    owners = {_owner(name): _owner(path) for name, path in paths.items()}
    for position, (layer, number, variant) in enumerate(layers_of(module, plan)):
        alone, rest = dict(variant.named), []
        for operator in (o for o in layer.operators if o.parameters):
            choice, name = variant.of(operator.name), _numbered(operator.name, number)
            names = [_numbered(p.name, number) for p in operator.parameters]
            own = [paths[name] for name in names if name in paths]
            if choice.slices > 1 and operator.slice_dims:
                yield from _slices(module, _found(owners, name), operator, choice)
            elif operator.name in alone and (name in owners or choice.shard > 1 or casts):
                path = _found(owners, name)
                yield Unit(path, (module.get_submodule(path),), choice)
            elif operator.name in alone:  # never a unit of FSDP2, so it needs no module with a forward
                yield Unit(name, (nn.ParameterList(module.get_parameter(path) for path in own),), choice)
            else:
                rest += [_owner(path) for path in own]
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


def _slices(module: nn.Module, path: str, operator: Operator, choice: Choice) -> Iterator[Unit]:
    whole = module.get_submodule(path)
    if not can_split(whole):
        rule = f"is a {type(whole).__name__}, which can't be run in slices"
        raise InputError(Problem(where=operator.name, key="slices", value=choice.slices, rule=rule))
    made = split(whole, slices=choice.slices)
    module.set_submodule(path, made)
    for inner, piece in made.leaves.items():
        yield Unit(joined(path, inner), (piece,), choice)


def _home(module: nn.Module, position: int, path: str) -> str | None:
    """The module that has a layer's operators and no others; None where the tree has none."""
    return module.prefixes[position] if isinstance(module, Stage) else path or None


# --- parameters by the model's own names ---


def _pieces(module: nn.Module, paths: Mapping[str, str]) -> dict[str, Pieces]:
    """Where every parameter's values are, by the model's own name; each reference of a shared one by itself."""
    found = {}
    for name, path in paths.items():
        owner, _, leaf = path.rpartition(".")
        holder = module.get_submodule(owner)
        if isinstance(holder, Split) and leaf in holder.pieces:
            found[name] = holder.pieces[leaf].under(owner)
        elif getattr(holder, leaf, None) is not None:  # where an operator is cut, one part only has its bias
            found[name] = Pieces((path,))
    return found


def _paths(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names and paths of all parameters, as they were before any splitting."""
    if isinstance(module, Stage):
        for prefix, part in zip(module.prefixes, module.members, strict=True):
            first: dict[str, str] = {}  # tensor parallelism names the pieces of what it took apart after the whole
            for path, name in part.names.items():
                first.setdefault(name, path)
            yield from ((name, joined(prefix, path)) for name, path in first.items())
        return
    for path, _ in module.named_parameters(remove_duplicate=False):
        yield path, path


def _untie(module: nn.Module, pieces: Mapping[str, Pieces], ties: Mapping[str, str]) -> list[list[str]]:
    """Give each place where a shared parameter is used a copy; the names that belong together."""
    first = {name: module.get_parameter(where.paths[0]) for name, where in pieces.items()}
    groups: dict[nn.Parameter, list[str]] = {}
    seen: set[nn.Parameter] = set()
    for name, where in pieces.items():
        groups.setdefault(first[ties.get(name, name) if ties.get(name) in first else name], []).append(name)
        for path in where.paths:
            parameter = module.get_parameter(path)
            if parameter in seen:
                _put(module, path, nn.Parameter(parameter.detach().clone()))
            seen.add(parameter)
    return [group for group in groups.values() if len(group) > 1]


def _joined(
    module: nn.Module, group: Iterable[str], pieces: Mapping[str, Pieces], plain: Container[nn.Parameter]
) -> tuple[str, ...]:
    """Make one Parameter of copies that stay plain, so that autograd adds their gradients; the names still apart."""
    apart: list[str] = []
    first: list[nn.Parameter] = []
    for name in group:
        own = [module.get_parameter(path) for path in pieces[name].paths]
        if first and all(p in plain for p in own) and _shapes(own) == _shapes(first):
            for path, parameter in zip(pieces[name].paths, first, strict=True):
                _put(module, path, parameter)
            continue
        apart.append(name)
        if all(p in plain for p in own):
            first = first or own
    return tuple(apart)


def _shapes(parameters: Iterable[nn.Parameter]) -> list[torch.Size]:
    return [parameter.shape for parameter in parameters]


def _put(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def check_shapes(module: nn.Module, plan: Plan) -> None:
    """Whether the module has what the plan's model has."""
    check_parameters({name: tuple(module.get_parameter(path).shape) for name, path in _paths(module)}, plan)


def check_parameters(shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> None:
    """Whether parameters, by their names, are those of the plan's model."""
    problems = []
    for parameter in plan.model.parameters():
        found = shapes.get(parameter.name)
        if found != parameter.shape:
            has = "has no such parameter" if found is None else f"has one of shape {found}"
            rule = f"the module {has}; the plan's model {plan.model.name} has one of shape {parameter.shape}"
            near = nearest(parameter.name, shapes) if found is None else ()
            problems.append(Problem(where=parameter.name, rule=rule, nearest=near))
    if problems:
        raise InputError(problems[:MOST_PROBLEMS])


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _numbered(name: str, number: int) -> str:
    return name.replace("{}", str(number))
