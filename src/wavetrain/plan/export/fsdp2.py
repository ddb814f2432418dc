"""A Python file that shards a module with PyTorch's `fully_shard`, unit by unit as the plan's choices say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from wavetrain.base.units import DType
from wavetrain.model.model import Layer
from wavetrain.model.operator import Operator
from wavetrain.plan.export.exported import Exported, comments
from wavetrain.plan.export.features import CHOICES, beyond
from wavetrain.plan.layout import Choice, Recompute
from wavetrain.plan.plan import Plan, Variant

EXPRESSED = (
    *CHOICES,
    "devices",
    "choices",
    "rank_order",
    "compute",
    "gradients",
    "operator_recompute",
    "reduced_during",
)
DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32", DType.FP64: "float64"}

Unit = tuple[tuple[str, ...], range, Choice]  # modules of one unit, blocks, what is done with it

HEAD = '''"""Shards a module as its plan says; give `shard` a model (of a pipeline: a stage) with these names."""

import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

'''

BODY = '''

def mesh_of(group: int, device_type: str) -> DeviceMesh:
    """Replicas in groups of `group`: sharded inside, replicated across."""
    sizes, names = [], []
    for name, size in DEGREES.items():
        sizes += [size // group, group] if name == "dp" else [size]
        names += ["replicate", "shard"] if name == "dp" else [name]
    mesh = init_device_mesh(device_type, tuple(sizes), mesh_dim_names=tuple(names))
    return mesh["shard"] if group == DEGREES["dp"] else mesh["replicate", "shard"]


def found(model: nn.Module, names: tuple[str, ...], block: int) -> list[nn.Module]:
    """Modules by name; those of other stages are not here."""
    paths = [name.format(block) for name in names]
    if DEGREES["pp"] > 1:
        inside = {path for path, _ in model.named_modules()}
        paths = [path for path in paths if path in inside]
    return [model.get_submodule(path) for path in paths]


def shard(model: nn.Module, device_type: str = "cuda") -> nn.Module:
    """The same module, recomputed and sharded in place."""
    meshes = {group: mesh_of(group, device_type) for group in sorted({group for _, _, group, _ in UNITS} | {ROOT[0]})}
    for names, blocks in RECOMPUTED:
        for block in blocks:
            for module in found(model, names, block):
                checkpoint(module)
    for names, blocks, group, keep in UNITS:
        for block in blocks:
            if modules := found(model, names, block):
                unit = modules if len(modules) > 1 else modules[0]
                fully_shard(unit, mesh=meshes[group], mp_policy=POLICY, reshard_after_forward=not keep)
    fully_shard(model, mesh=meshes[ROOT[0]], mp_policy=POLICY, reshard_after_forward=not ROOT[1])
    return model
'''


def write_fsdp2(plan: Plan) -> Exported:
    """One unit per block, and one for each operator that has a choice of its own."""
    expressed = (*EXPRESSED, "recompute") if plan.recompute is Recompute.FULL else EXPRESSED
    notes = (*beyond(plan, expressed), *_own_notes(plan))
    units = [*_named(plan), *_blocks(plan), *_ends(plan)]
    table = "".join(f"    {_row(unit)},\n" for unit in units)
    again = "".join(f"    ({names!r}, {blocks!r}),\n" for names, blocks in _recomputed(plan))
    text = (
        f"{comments(f'PyTorch FSDP2: {plan.model.name} on {plan.cluster.name}', notes)}{HEAD}"
        f"DEGREES = {_degrees(plan)!r}  # outermost first\n"
        f"POLICY = MixedPrecisionPolicy({_policy(plan)})\n\n"
        "# modules of one unit ({} is a block's number), blocks, replicas sharing a copy, whether it stays gathered\n"
        f"UNITS = [  # inner ones first\n{table}]\n"
        f"ROOT = ({plan.choice.shard}, {plan.choice.keep})\n"
        f"RECOMPUTED: list[tuple[tuple[str, ...], range]] = [\n{again}]\n"
        f"{BODY}"
    )
    return Exported("fsdp2", text, "sharded.py", notes)


def _row(unit: Unit) -> str:
    names, blocks, choice = unit
    return f"({names!r}, {blocks!r}, {choice.shard}, {choice.keep})"


def _degrees(plan: Plan) -> dict[str, int]:
    layout = plan.layout
    order = ("dp", "cp", "pp", "tp") if layout.pp_inside else ("pp", "dp", "cp", "tp")
    return {name: getattr(layout, name) for name in order}


def _policy(plan: Plan) -> str:
    names = {"param_dtype": plan.precision.compute, "reduce_dtype": plan.precision.gradients}
    return ", ".join(f"{key}=torch.{DTYPES[value]}" for key, value in names.items() if value in DTYPES)


def _runs(plan: Plan) -> Iterator[tuple[Variant, range]]:
    """Blocks in a row that are run alike, by their numbers in the module tree."""
    numbers = [run.first + position for run in plan.model.blocks for position in range(run.count)]
    pairs = zip(plan.blocks, numbers, strict=True)
    keyed = ((variant, number, number - position) for position, (variant, number) in enumerate(pairs))
    for (variant, _), group in groupby(keyed, lambda item: (item[0], item[2])):
        found = [number for _, number, _ in group]
        yield variant, range(found[0], found[-1] + 1)


def _modules(operators: tuple[Operator, ...]) -> tuple[str, ...]:
    """Modules that hold the parameters of some operators, once each."""
    names = (parameter.name.rpartition(".")[0] for operator in operators for parameter in operator.parameters)
    return tuple(dict.fromkeys(name for name in names if name))


def _named(plan: Plan) -> Iterator[Unit]:
    for variant, blocks in _runs(plan):
        yield from _named_of(plan.model.by_name[variant.layer], variant, blocks)
    if not _tied(plan):
        for layer, variant in zip(plan.model.ends, plan.ends, strict=True):
            yield from _named_of(layer, variant, range(1))


def _named_of(layer: Layer, variant: Variant, blocks: range) -> Iterator[Unit]:
    for name, choice in variant.named:
        modules = _modules(tuple(operator for operator in layer.operators if operator.name == name))
        if modules and modules != (layer.path,):
            yield modules, blocks, choice


def _blocks(plan: Plan) -> Iterator[Unit]:
    for variant, blocks in _runs(plan):
        layer = plan.model.by_name[variant.layer]
        names = (layer.path,) if layer.path else _rest(layer, variant)
        if names:
            yield names, blocks, variant.choice


def _ends(plan: Plan) -> Iterator[Unit]:
    """Embedding and head, unless they share a weight: then both belong to the root."""
    if _tied(plan):
        return
    for layer, variant in zip(plan.model.ends, plan.ends, strict=True):
        if names := _rest(layer, variant):
            yield names, range(1), variant.choice


def _rest(layer: Layer, variant: Variant) -> tuple[str, ...]:
    """Modules of a layer that has no module of its own, without those that are units already."""
    named = dict(variant.named)
    return _modules(tuple(operator for operator in layer.operators if operator.name not in named))


def _tied(plan: Plan) -> bool:
    return any(parameter.tied for layer in plan.model.ends for o in layer.operators for parameter in o.parameters)


def _recomputed(plan: Plan) -> Iterator[tuple[tuple[str, ...], range]]:
    for variant, blocks in _runs(plan):
        layer = plan.model.by_name[variant.layer]
        chosen = tuple(o for o in layer.operators if variant.of(o.name).recompute)
        if layer.path and (plan.recompute is Recompute.FULL or len(chosen) == len(layer.operators)):
            yield (layer.path,), blocks
        elif names := _modules(chosen):
            yield names, blocks


def _own_notes(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.cp > 1:
        yield "gradients summed over the context ranks: reduce them there too"
    if layout.num_microbatches > 1:
        yield f"{layout.num_microbatches} microbatches: set_requires_gradient_sync(False) on all but the last"
    if _tied(plan) and {item.layer for item in plan.choices} & {layer.name for layer in plan.model.ends}:
        yield "choices of embedding and head: they share a weight, so they are one unit with the plan's own choice"
    for value in (plan.precision.compute, plan.precision.gradients):
        if value not in DTYPES:
            yield f"numbers in {value.value}"
    if plan.recompute is Recompute.NONE and any(v.of(o).recompute for v, o in _without_module(plan)):
        yield "recomputation of operators that are no modules"


def _without_module(plan: Plan) -> Iterator[tuple[Variant, str]]:
    for variant in dict.fromkeys(plan.blocks):
        layer = plan.model.by_name[variant.layer]
        if not all(variant.of(operator.name).recompute for operator in layer.operators):
            yield from ((variant, operator.name) for operator in layer.operators if not operator.parameters)
