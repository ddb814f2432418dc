"""Any `nn.Module` as a `Model`: exported with symbolic batch and length, no weight touched. The only torch import here.

`torch.export` gives a graph of operators, each with the module it came from and the shapes of its results as formulas
in the batch size and the sequence length. Matrix products become operators of their own; everything else that a module
does is one `Traced` operator of that module. An operation on a matrix of parameters whose FLOPs we can't tell is
refused. Parameters come from the module itself, so none is missed.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from wavetrain.base.errors import InputError, Problem
from wavetrain.model.model import Model
from wavetrain.model.traced.graph import Graph
from wavetrain.model.traced.layers import fold

Sample = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]

__all__ = ["Sample", "trace"]


def trace(module: torch.nn.Module, sample: Sample, *, name: str = "") -> Model:
    """Describe a module from one sample input (a tensor, a tuple of arguments, or keyword arguments).

    Dimension 0 of the first tensor is the microbatch, dimension 1 the sequence.
    """
    args, kwargs = _arguments(sample)
    program = _export(module, args, kwargs)
    graph = Graph(module, program)
    layers, order = fold(graph.segments())
    return Model(
        name=name or type(module).__name__,
        seq_len=graph.symbols.seq_len,
        layers=layers,
        order=order,
        source=f"traced from {type(module).__module__}.{type(module).__qualname__}",
        fixed_length=graph.symbols.length is None,
    )


def _arguments(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample as arguments; a batch or length of 1, which torch.export takes for a constant, is doubled."""
    values = list(
        sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
    )
    first = next((value for value in values if isinstance(value, torch.Tensor) and value.ndim), None)
    if first is not None:
        doubled = [dim for dim in range(min(first.ndim, 2)) if first.shape[dim] == 1]
        values = [_doubled(value, doubled) for value in values]
    if isinstance(sample, Mapping):
        return (), dict(zip(sample, values, strict=True))
    return tuple(values), {}


def _doubled(value: Any, dims: list[int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    repeats = [2 if dim in dims and size == 1 else 1 for dim, size in enumerate(value.shape)]
    return value.repeat(repeats) if 2 in repeats else value


def _export(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    shapes = (tuple(map(_free_dims, args)), {key: _free_dims(value) for key, value in kwargs.items()})
    dynamic: Any = shapes[0] if args else shapes[1]
    training = module.training
    errors = []
    try:
        # A module may branch on random numbers while training (layer drop); then its evaluation form is described.
        for mode in (training, False) if training else (False,):
            module.train(mode)
            try:
                with _quiet():
                    return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
            except Exception as error:  # torch.export raises whatever the module's code does
                errors.append(error)
    finally:
        module.train(training)
    first = str(errors[0]).strip().splitlines()
    rule = f"torch.export can't trace it: {type(errors[0]).__name__}: {first[0] if first else ''}"
    raise InputError(Problem(where=f"{type(module).__module__}.{type(module).__qualname__}", rule=rule)) from errors[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs and prints the whole graph when it fails; our error says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with redirect_stdout(nowhere), redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _free_dims(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return dict.fromkeys(range(min(value.ndim, 2)), Dim.AUTO)
