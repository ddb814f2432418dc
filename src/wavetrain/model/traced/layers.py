"""From operators in order of execution to layers: cut at numbered modules, equal ones folded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from wavetrain.model.model import Layer, Run
from wavetrain.model.operator import Operator, Parameter


def segmented(found: list[tuple[str, Operator]]) -> list[tuple[str, list[Operator]]]:
    """Consecutive operators of one layer together; work between two numbered layers stays with the first."""
    last_numbered = max((i for i, (layer, _) in enumerate(found) if layer), default=-1)
    segments: list[tuple[str, list[Operator]]] = []
    for i, (layer, operator) in enumerate(found):
        between = not layer and segments and segments[-1][0] and i < last_numbered
        if between:  # named after the layer it follows
            operator = replace(operator, name=f"{segments[-1][0]}:{operator.name or 'then'}")  # noqa: PLW2901
        if segments and (between or segments[-1][0] == layer):
            segments[-1][1].append(operator)
        else:
            segments.append((layer, [operator]))
    return [(layer, _unique(operators)) for layer, operators in segments]


def _unique(operators: list[Operator]) -> list[Operator]:
    """Names made unique inside a layer: the second operator of one module gets #2."""
    counts: dict[str, int] = defaultdict(int)
    unique = []
    for operator in operators:
        counts[operator.name] += 1
        suffix = f"#{counts[operator.name]}" if counts[operator.name] > 1 else ""
        unique.append(replace(operator, name=(operator.name or "top") + suffix))
    return unique


def fold(segments: list[tuple[str, list[Operator]]]) -> tuple[tuple[Layer, ...], tuple[Run, ...]]:
    """Equal layers stored once, runs of them with consecutive numbers counted."""
    by_content: dict[tuple[str, tuple[Operator, ...]], Layer] = {}
    order: list[Run] = []
    for layer_path, operators in segments:
        prefix, _, digits = layer_path.rpartition(".")
        pattern, number = (f"{prefix}.{{}}" if prefix else "{}" if digits else ""), int(digits or 0)
        content = tuple(_unnumbered(operator, layer_path, pattern) for operator in operators)
        key = (pattern, content)
        if key not in by_content:
            taken = {layer.name for layer in by_content.values()}
            by_content[key] = Layer(_layer_name(layer_path, taken), pattern, content)
        name = by_content[key].name
        if order and order[-1].layer == name and order[-1].first + order[-1].count == number:
            order[-1] = replace(order[-1], count=order[-1].count + 1)
        else:
            order.append(Run(name, 1, number))
    return tuple(by_content.values()), tuple(order)


def _layer_name(layer_path: str, taken: set[str]) -> str:
    base = layer_path or ("part" if taken else "start")
    numbers = (f"{base}-{number}" for number in range(2, len(taken) + 3))
    return next(name for name in (base, *numbers) if name not in taken)


def _unnumbered(operator: Operator, layer_path: str, pattern: str) -> Operator:
    if not layer_path:
        return operator

    def general(name: str) -> str:
        rest = name.removeprefix(layer_path)
        return pattern + rest if name.startswith(layer_path) and rest[:1] in ("", ".", "#", ":") else name

    parameters = tuple(Parameter(general(p.name), p.shape, general(p.tied)) for p in operator.parameters)
    return replace(operator, name=general(operator.name), parameters=parameters)
