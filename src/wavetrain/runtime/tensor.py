"""Tensor and sequence parallelism: operators cut into parts, hidden states sent around between them.

`cut_parameters` leaves of every column, row and vocabulary operator this part's rows or columns, as a plain module, so
that whatever wraps a module (FSDP2, operator splitting, a split backward) works on top. `connect` then puts the
collectives where hidden states enter and leave a region of cut operators (Shoeybi et al., Megatron-LM, 2019; along the
sequence Korthikanti et al. 2022). After a step's last backward `add_partial` adds gradients of which each part has a
share only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from wavetrain.base.errors import InputError, Problem
from wavetrain.model.architecture import Architecture
from wavetrain.model.model import Model
from wavetrain.model.operator import Axis, Embedding, Operator
from wavetrain.plan.plan import Plan
from wavetrain.runtime.crossings import cutting, entering, joining, leaving
from wavetrain.runtime.cuts import Cut, Range, Segment, part_of, ranges_of, role_of, segments_of
from wavetrain.runtime.grid import Grid
from wavetrain.runtime.hf import Surroundings
from wavetrain.runtime.loss import vocabulary_loss
from wavetrain.runtime.parts import Part
from wavetrain.runtime.spent import charged_change
from wavetrain.runtime.split import (
    EmbeddingSlice,
    LinearSlice,
    Pieces,
    Split,
    can_split,
    is_transposed,
    joined,
    rows_of,
    sizes_of,
)
from wavetrain.runtime.stages import Stage
from wavetrain.runtime.transformer import Attention, TransposedLinear

FUSED = ("Attention", "GPT2Attention", "Phi3Attention")  # queries, then keys, then values: not head by head
CUT = (Axis.COLUMN, Axis.ROW, Axis.VOCAB)


class Share(NamedTuple):
    """Whose gradients of a parameter belong together: those of the parts with the same slot."""

    slots: int = 1
    own: int = 0


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a module is cut; paths are those in the cut module. All but `part` and `partial` is the same on all parts."""

    mesh: DeviceMesh
    part: int
    sequence: bool  # hidden states between regions are cut along the sequence
    vocab: int
    cuts: Mapping[str, Cut]  # every parameter, also where this part has nothing of it
    pieces: Mapping[str, Pieces]  # by the model's own names: where a parameter is, if not at one place
    partial: Mapping[str, Share]  # parameters whose gradients are to be added
    entries: tuple[str, ...] = ()  # modules that read hidden states and go on with cut ones
    exits: tuple[str, ...] = ()  # operators whose outputs are to be added
    embeddings: tuple[str, ...] = ()
    projections: tuple[str, ...] = ()


# --- cutting ---


@dataclass(frozen=True)
class _Place:
    """An operator of the plan's model as a module has it."""

    operator: Operator
    path: str
    parameters: Mapping[str, str]  # path -> the model's name


@dataclass
class _Cutting:
    """What is found out while a module is cut."""

    module: nn.Module
    part: int
    tp: int
    cuts: dict[str, Cut]
    pieces: dict[str, Pieces] = field(default_factory=dict)
    partial: dict[str, Share] = field(default_factory=dict)
    values: dict[object, Tensor] = field(default_factory=dict)
    made: dict[object, nn.Parameter] = field(default_factory=dict)

    def parameter(self, old: nn.Parameter, cut: Cut) -> nn.Parameter:
        """This part's; what shared a Parameter, or its storage, does so afterwards."""
        if (id(old), cut) not in self.made:
            key = (id(old) if old.is_meta else old.data_ptr(), cut)
            if key not in self.values:
                self.values[key] = part_of(cut, old.detach(), self.part)
            self.made[id(old), cut] = nn.Parameter(self.values[key], requires_grad=old.requires_grad)
        return self.made[id(old), cut]


def cut_parameters(module: nn.Module, plan: Plan, grid: Grid) -> Parallel:
    """Leave of a module's operators what this part has of them, in place.

    `module` is a `Stage`, or a module that has the plan's operators at the paths of their names, whose outputs are
    whole logits. Its parameters have their values, and nothing has wrapped it yet. Parameters that are tied inside the
    module stay so; those of two stages become copies.
    """
    tp, model = plan.layout.tp, plan.model
    sequence = plan.layout.sequence_parallel and tp > 1
    _check(module, plan)
    names = _names(module)
    whole = {path: Cut(tuple(module.get_parameter(path).shape)) for path in names}
    old = {path: module.get_parameter(path) for path in names}  # also keeps their ids from being used again
    cutting = _Cutting(module, grid.part, tp, whole, {name: Pieces((path,)) for path, name in names.items()})
    layers = list(_layers(model, names)) if tp > 1 else []
    places = [place for layer in layers for place in layer if place.operator.axis in CUT]
    _check_fused(module, model, places)
    for place in places:
        _cut(cutting, place, segments_of(model, place.operator, tp))
    _check_shared(cutting, old)
    _localize(module, model.architecture, places, tp)
    regions = [region for layer in layers for region in _regions(layer)]
    for path in [*(path for region in regions for path in region.inside), *_on_slices(cutting, sequence)]:
        cutting.partial[path] = Share()
    if isinstance(module, Stage):
        _rename(module, cutting, names)
        for around in module.modules():
            if sequence and isinstance(around, Surroundings):
                around.sequence_parts = tp
    vocabulary = [place for place in places if place.operator.axis is Axis.VOCAB]
    return Parallel(
        mesh=grid.tp,
        part=grid.part,
        sequence=sequence,
        vocab=next((p.operator.units for p in vocabulary), 0),
        cuts=cutting.cuts,
        pieces=cutting.pieces,
        partial=cutting.partial,
        entries=tuple(path for region in regions for path in region.entries),
        exits=tuple(region.exit for region in regions),
        embeddings=tuple(p.path for p in vocabulary if isinstance(p.operator, Embedding)),
        projections=tuple(p.path for p in vocabulary if not isinstance(p.operator, Embedding)),
    )


def _names(module: nn.Module) -> dict[str, str]:
    """The model's own name of every parameter by its path, each reference of a shared one by itself."""
    if not isinstance(module, Stage):
        return {path: path for path, _ in module.named_parameters(remove_duplicate=False)}
    found = {}
    for prefix, part in zip(module.prefixes, module.members, strict=True):
        for path, _ in part.module.named_parameters(remove_duplicate=False):
            found[joined(prefix, path)] = part.names[path]
    return found


def _layers(model: Model, names: Mapping[str, str]) -> Iterator[list[_Place]]:
    """The operators with parameters of every layer that the module has, in the order data crosses them."""
    paths = {name: path for path, name in names.items()}
    for layer, number in model.instances():
        found = []
        for operator in layer.operators:
            own = [name for p in operator.parameters if (name := p.name.replace("{}", str(number))) in paths]
            if own:
                path = paths[own[0]].rpartition(".")[0]
                found.append(_Place(operator, path, {paths[name]: name for name in own}))
        yield found


def _cut(cutting: _Cutting, place: _Place, segments: tuple[Segment, ...]) -> None:
    """Cut an operator's parameters, and make of its module one of this part's size."""
    module, axis = cutting.module.get_submodule(place.path), place.operator.axis
    if not can_split(module):
        rule = f"is a {type(module).__name__}, which tensor parallelism can't cut"
        raise InputError(Problem(where=place.path, rule=rule, legal=("Linear", "Conv1D", "Embedding")))
    sizes, ranges = sizes_of(module), ranges_of(segments, cutting.tp)
    dim = sizes.input_dim if axis is Axis.ROW or isinstance(module, nn.Embedding) else sizes.output_dim
    made: dict[str, nn.Parameter | None] = {}
    for path in place.parameters:
        own, shape = ranges, cutting.cuts[path].shape
        if len(shape) == 1 and axis is Axis.ROW:
            own = (((0, shape[0]),), *[()] * (cutting.tp - 1))
        cut = cutting.cuts[path] = Cut(shape, dim if len(shape) > 1 else 0, own)
        parameter = cutting.parameter(cutting.module.get_parameter(path), cut)
        owner, _, leaf = path.rpartition(".")
        made[path] = parameter if own[cutting.part] else None
        setattr(cutting.module.get_submodule(owner), leaf, made[path])
    copies = [segment for segment in segments if segment.copied]
    if isinstance(module, nn.Embedding):
        _put(cutting.module, place.path, _table(module, ranges[cutting.part]))
    elif copies and len(segments) > 1:
        _put(cutting.module, place.path, _queries_apart(cutting, place, segments))
    else:
        _put(cutting.module, place.path, _local(module))
        if copies:
            share = Share(copies[0].units, cutting.part * copies[0].units // cutting.tp)
            cutting.partial |= dict.fromkeys(place.parameters, share)


def _put(module: nn.Module, path: str, made: nn.Module) -> None:
    if module.get_submodule(path) is not made:
        module.set_submodule(path, made)


def _local(module: nn.Module) -> nn.Module:
    """A linear with its cut parameters; transformers' Conv1D, which must have a bias, as ours that need not."""
    sizes = sizes_of(module)
    if isinstance(module, nn.Linear):
        module.in_features, module.out_features = sizes.inputs, sizes.outputs
        return module
    with torch.device("meta"):
        made = TransposedLinear(sizes.inputs, sizes.outputs, bias=False)
    for leaf in ("weight", "bias"):
        setattr(made, leaf, getattr(module, leaf))
    return made


def _table(module: nn.Embedding, ranges: tuple[Range, ...]) -> nn.Module:
    rows, padding, _ = rows_of(module)
    made = EmbeddingSlice(module.weight.detach(), first=ranges[0][0], rows=rows, padding=padding)
    made.weight = cast(nn.Parameter, module.weight)
    return made


def _queries_apart(cutting: _Cutting, place: _Place, segments: tuple[Segment, ...]) -> Split:
    """Queries, and the keys and values that other parts have too, as two slices with parameters of their own."""
    module = cutting.module.get_submodule(place.path)
    queries, *others = segments
    sides = ((queries,), tuple(others))
    counts = [sum(last - first for first, last in ranges_of(side, cutting.tp)[cutting.part]) for side in sides]
    slices: list[dict[str, Tensor]] = [{}, {}]
    pieces = {}
    for path, name in place.parameters.items():
        leaf, whole = path.rpartition(".")[2], cutting.cuts.pop(path)
        paths = tuple(f"slices.{number}.{leaf}" for number in range(2))
        pieces[leaf] = Pieces(paths, whole.dim)
        cutting.pieces[name] = pieces[leaf].under(place.path)
        parts = torch.split_with_sizes(cutting.module.get_parameter(path).detach(), counts, whole.dim)
        for number, side in enumerate(sides):
            slices[number][leaf] = parts[number].clone()
            shape = list(whole.shape)
            shape[whole.dim] = sum(segment.size for segment in side)
            cut = Cut(tuple(shape), whole.dim, ranges_of(side, cutting.tp))
            cutting.cuts[joined(place.path, paths[number])] = cut
        units = others[0].units
        cutting.partial[joined(place.path, paths[1])] = Share(units, cutting.part * units // cutting.tp)
    transposed = is_transposed(module)
    made = [LinearSlice(own["weight"], own.get("bias"), transposed=transposed) for own in slices]
    return Split(made, pieces, counts, Axis.COLUMN)


def _rename(stage: Stage, cutting: _Cutting, names: Mapping[str, str]) -> None:
    """A stage's members are the cut modules; slices have the name of what they are slices of."""
    by_path = dict(names) | {path: name for name, own in cutting.pieces.items() for path in own.paths}
    members = []
    for prefix, part in zip(stage.prefixes, stage.members, strict=True):
        module = stage.get_submodule(prefix)
        paths = [path for path, _ in module.named_parameters(remove_duplicate=False)]
        members.append(Part(module, dict(part.names) | {path: by_path[joined(prefix, path)] for path in paths}))
    stage.members = tuple(members)


def _localize(module: nn.Module, a: Architecture | None, places: Iterable[_Place], tp: int) -> None:
    """Tell attention modules how many heads they have now."""
    if a is None:
        return
    heads, kv_heads = a.heads // tp, max(1, a.kv_heads // tp)
    owners = {place.path.rpartition(".")[0] for place in places if place.operator.axis is Axis.COLUMN}
    attentions: list[Any] = [module.get_submodule(path) for path in owners]
    for owner in attentions:
        if isinstance(owner, Attention):
            owner.sizes = [count * a.head_dim for count in (heads, kv_heads, kv_heads)]
        if hasattr(owner, "num_key_value_groups"):
            owner.num_key_value_groups = heads // kv_heads
        if hasattr(owner, "split_size"):
            owner.split_size = heads * a.head_dim
        if type(owner).__name__ == "Phi3Attention":
            owner.config = copy.copy(owner.config)  # it asks its configuration, which is the whole model's
            owner.config.num_attention_heads, owner.num_key_value_heads = heads, kv_heads


# --- regions ---


@dataclass(frozen=True)
class _Region:
    """Column operators, what is between, and the row operator that ends them."""

    entries: tuple[str, ...]
    inside: tuple[str, ...]  # parameters of whole operators that see this part's heads only
    exit: str


def _regions(layer: Sequence[_Place]) -> Iterator[_Region]:
    columns: list[_Place] = []
    inside: list[_Place] = []
    for place in layer:
        if place.operator.axis is Axis.COLUMN:
            columns.append(place)
        elif place.operator.axis is Axis.ROW:
            around = [other.path for other in layer if other not in (*columns, *inside, place)]
            entries = _common([column.path for column in columns], around)
            yield _Region(entries, tuple(path for one in inside for path in one.parameters), place.path)
            columns, inside = [], []
        elif columns:
            inside.append(place)


def _common(paths: Sequence[str], around: Sequence[str]) -> tuple[str, ...]:
    """The innermost module that has all of them, if it has nothing of what is around; else each by itself."""
    owner = paths[0]
    while owner and not all(f"{path}.".startswith(f"{owner}.") for path in paths):
        owner = owner.rpartition(".")[0]
    alone = owner and not any(f"{path}.".startswith(f"{owner}.") for path in around)
    return (owner,) if alone else tuple(paths)


def _on_slices(cutting: _Cutting, sequence: bool) -> Iterator[str]:
    """Whole parameters that are used on a part of the sequence: all but the embedding's."""
    if sequence:
        yield from (p for p, cut in cutting.cuts.items() if not cut.ranges and not p.startswith("embedding."))


def connect(module: nn.Module, parallel: Parallel) -> None:
    """Put the collectives where hidden states enter and leave what is cut.

    To be called after operators were replaced by slices, if any are; before or after FSDP2.
    """
    group, sequence = parallel.mesh.get_group(), parallel.sequence
    enter = partial(_on_input, _charged(entering(group, sequence=sequence)))
    leave = _charged(leaving(group, sequence=sequence))
    for path in (*parallel.entries, *parallel.projections):
        module.get_submodule(path).register_forward_pre_hook(enter, with_kwargs=True)
    for path in parallel.exits:
        module.get_submodule(path).register_forward_hook(partial(_on_output, leave))
    for path in parallel.embeddings:
        module.get_submodule(path).register_forward_hook(partial(_on_output, _charged(leaving(group, sequence=False))))
    if isinstance(module, Stage):
        if module.is_first and sequence:
            module.get_submodule("embedding").register_forward_hook(partial(_on_output, _charged(cutting(group))))
        if parallel.projections:
            first = Segment(parallel.vocab, parallel.vocab).range(parallel.part, group.size())[0]
            module.loss = partial(vocabulary_loss, first=first, group=group)
        return
    for path in parallel.projections:
        module.get_submodule(path).register_forward_hook(partial(_on_output, _charged(joining(group, parallel.vocab))))


_charged = partial(charged_change, "tensor")


def _on_input(
    change: Callable[[Tensor], Tensor], module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hidden states come first, or under transformers' name for them."""
    if given:
        return (change(given[0]), *given[1:]), named
    assert "hidden_states" in named, f"{type(module).__name__} is called without hidden states"
    return given, named | {"hidden_states": change(named["hidden_states"])}


def _on_output(change: Callable[[Tensor], Tensor], _module: nn.Module, _given: object, output: Tensor) -> Tensor:
    return change(output)


# --- after the last backward ---


def add_partial(module: nn.Module, parallel: Parallel) -> None:
    """Add the gradients that each part has a share of; all parts call this together, once all others are complete.

    Also where FSDP2 has sharded them: parts have the same shards, and a sum of shards is the shard of the sum.
    """
    by_kind: dict[object, list[tuple[Tensor, Share]]] = {}
    for path, share in parallel.partial.items():
        for parameter in _held(module, path):
            if parameter.grad is not None:
                gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                by_kind.setdefault((gradient.dtype, gradient.device), []).append((gradient, share))
    group = parallel.mesh.get_group()
    for gradients in by_kind.values():
        _add(gradients, group)


def _add(gradients: Sequence[tuple[Tensor, Share]], group: dist.ProcessGroup) -> None:
    """One sum of all, each at its place among its slots."""
    sizes = [share.slots * gradient.numel() for gradient, share in gradients]
    buffer = gradients[0][0].new_zeros(sum(sizes))
    places = [
        own.view(share.slots, *gradient.shape)[share.own]
        for own, (gradient, share) in zip(buffer.split_with_sizes(sizes), gradients, strict=True)
    ]
    with torch.no_grad():
        for place, (gradient, _) in zip(places, gradients, strict=True):
            place.copy_(gradient)
        dist.all_reduce(buffer, group=group)
        for place, (gradient, _) in zip(places, gradients, strict=True):
            gradient.copy_(place)


def _held(module: nn.Module, path: str) -> Iterator[nn.Parameter]:
    """A parameter, or the slices that it has become."""
    owner, _, leaf = path.rpartition(".")
    holder = module.get_submodule(owner)
    if isinstance(holder, Split):
        for own in holder.pieces[leaf].under(owner).paths:
            yield from _held(module, own)
    else:
        yield module.get_parameter(path)


# --- what can't be cut ---


def _check(module: nn.Module, plan: Plan) -> None:
    layout, problems = plan.layout, []
    if layout.tp == 1:
        return
    if not plan.stack.logits_parallel:
        rule = "the runtime cuts the vocabulary projection and the loss wherever it cuts operators"
        problems.append(Problem(where="plan", key="stack.logits_parallel", value=False, rule=rule, legal=("true",)))
    if layout.sequence_parallel and not isinstance(module, Stage):
        rule = f"a {type(module).__name__} works on whole sequences between its layers; a stage need not"
        problems.append(Problem(where="plan", key="layout.sequence_parallel", value=True, rule=rule, legal=("false",)))
    if problems:
        raise InputError(problems)


def _check_shared(cutting: _Cutting, old: Mapping[str, nn.Parameter]) -> None:
    """A parameter that is used at two places is cut at both, alike."""
    found: dict[int, tuple[str, Cut | None]] = {}
    for path, parameter in old.items():
        other, cut = found.setdefault(id(parameter), (path, cutting.cuts.get(path)))
        if cut != cutting.cuts.get(path):
            raise InputError(Problem(where=path, rule=f"is the same parameter as {other}, which is cut otherwise"))


def _check_fused(module: nn.Module, model: Model, places: Iterable[_Place]) -> None:
    for place in places:
        owner = type(module.get_submodule(place.path.rpartition(".")[0])).__name__
        if role_of(model, place.operator) == "qkv" and owner not in FUSED:
            rule = f"how a {owner} lays out queries, keys and values is not known, so they can't be cut"
            raise InputError(Problem(where=place.path, rule=rule, legal=FUSED))
