"""A model, described: totals, layers, operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from wavetrain.base.codec import encode
from wavetrain.base.units import format_bytes, format_count, format_rate, printable
from wavetrain.model import Layer, Model, Operator, Work, slice_counts
from wavetrain.model.operator import num_active_parameters, num_parameters
from wavetrain.show.tables import facts, grid

Json = dict[str, Any]
SCHEMA = "wavetrain.description.model/1"


def model_document(model: Model, work: Work) -> Json:
    """Everything understood of a model, for machines; sizes are those of one microbatch."""
    forward, backward = model.forward_flops(work), model.backward_flops(work)
    attention = 3 * int(model.total(lambda o: o.forward_flops(work) if o.kind == "attention" else 0))
    return {
        "schema": SCHEMA,
        "kind": "model",
        "name": model.name,
        "source": model.source,
        "num_layers": model.num_layers,
        "num_parameters": model.num_parameters,
        "num_active_parameters": model.num_active_parameters,
        "architecture": encode(model.architecture) if model.architecture else None,
        "work": encode(work),
        "forward_flops": forward,
        "backward_flops": backward,
        "forward_flops_per_token": forward / work.tokens,
        "training_flops_per_token": (forward + backward) / work.tokens,
        "attention_training_flops_per_token": attention / work.tokens,
        "six_n_flops_per_token": 6 * model.num_active_parameters,
        "saved_bytes": model.saved_bytes(work),
        "parameter_bytes": model.num_parameters * work.bytes_per_element,
        "layers": [_layer_document(model, layer, work) for layer in model.layers],
        "order": [encode(run) for run in model.order],
    }


def _layer_document(model: Model, layer: Layer, work: Work) -> Json:
    return {
        "name": layer.name,
        "path": layer.path,
        "count": model.counts[layer.name],
        "num_parameters": sum(map(num_parameters, layer.operators)),
        "forward_flops": sum(o.forward_flops(work) for o in layer.operators),
        "backward_flops": sum(sum(o.backward_flops(work)) for o in layer.operators),
        "saved_bytes": sum(o.saved_bytes(work) for o in layer.operators),
        "operators": [_operator_document(operator, work) for operator in layer.operators],
    }


def _operator_document(operator: Operator, work: Work) -> Json:
    by_input, by_weight = operator.backward_flops(work)
    return {
        "name": operator.name,
        "kind": operator.kind,
        "num_parameters": num_parameters(operator),
        "num_active_parameters": num_active_parameters(operator),
        "parameters": [encode(parameter) for parameter in operator.parameters],
        "forward_flops": operator.forward_flops(work),
        "backward_input_flops": by_input,
        "backward_weight_flops": by_weight,
        "saved_bytes": operator.saved_bytes(work),
        "output_bytes": operator.output_elements(work) * work.bytes_per_element,
        "tensor_axis": operator.axis.value,
        "tensor_units": operator.units,
        "slices": list(slice_counts(operator)),
    }


def model_card(model: Model, work: Work) -> RenderableType:
    """The same for people."""
    heading = facts(printable(model.name), _facts(model, work))
    return Group(heading, "", _layer_table(model, work), "", _operator_table(model, work))


def _facts(model: Model, work: Work) -> Iterator[tuple[str, str]]:
    if model.source:
        yield "source", printable(model.source, most=200)
    if model.architecture:
        a = model.architecture
        heads = _heads(a.heads, a.kv_heads, a.head_dim)
        yield "shape", f"{a.family}: {a.num_layers} layers, hidden {a.hidden}, {heads}"
        mixture = f", {a.experts} experts of {a.expert_ffn}, {a.experts_per_token} per token" if a.experts else ""
        yield "", f"ffn {a.ffn} {a.mlp} {a.activation}{mixture}, vocabulary {a.vocab}, {a.positions} positions"
    yield "parameters", f"{model.num_parameters:,}  ({format_count(model.num_parameters)})"
    if model.num_active_parameters != model.num_parameters:
        yield "per token", f"{model.num_active_parameters:,}  ({format_count(model.num_active_parameters)})"
    yield "microbatch", f"{work.microbatch} x {work.seq_len} tokens, {work.dtype}, {work.attention} attention"
    tokens = work.tokens
    forward, backward = model.forward_flops(work) / tokens, model.backward_flops(work) / tokens
    yield "FLOPs per token", f"{format_rate(forward, 'FLOP')} forward, {format_rate(backward, 'FLOP')} backward"
    yield "saved for backward", f"{format_bytes(model.saved_bytes(work))} without recomputation"


def _heads(heads: int, kv_heads: int, head_dim: int) -> str:
    shared = f" on {kv_heads} keys" if kv_heads != heads else ""
    return f"{heads} heads of {head_dim}{shared}"


def _layer_table(model: Model, work: Work) -> Table:
    table = grid("layer", ">count", ">parameters each", ">forward FLOPs", ">saved")
    for layer in model.layers:
        table.add_row(
            printable(layer.name),
            str(model.counts[layer.name]),
            f"{sum(map(num_parameters, layer.operators)):,}",
            format_rate(sum(o.forward_flops(work) for o in layer.operators), ""),
            format_bytes(sum(o.saved_bytes(work) for o in layer.operators)),
        )
    return table


def _operator_table(model: Model, work: Work) -> Table:
    """The operators of the layer that repeats most."""
    layer = max(model.layers, key=lambda item: model.counts[item.name])
    table = grid(f"in {printable(layer.name)}", "kind", ">parameters", ">FLOPs", ">saved", "split")
    for operator in layer.operators:
        table.add_row(
            printable(operator.name.removeprefix(layer.path + ".")),
            operator.kind,
            format_count(num_parameters(operator)),
            format_rate(operator.forward_flops(work), ""),
            format_bytes(operator.saved_bytes(work)),
            operator.axis.value,
        )
    return table
