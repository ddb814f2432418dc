"""Any `nn.Module` as a `Model`: exported with symbolic batch and length, no weight touched. The only torch import here.

`torch.export` gives a graph of operators, each with the module it came from and the shapes of its results as formulas
in the batch size and the sequence length. Matrix products become our operators; everything else that a module does is
one `Traced` operator of that module. Parameters come from the module itself, so none is missed.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import sympy
import torch
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from wavetrain.base.errors import InputError, Problem
from wavetrain.model.model import Layer, Model, Run
from wavetrain.model.operator import (
    NOTHING,
    Attention,
    Axis,
    Embedding,
    Linear,
    Norm,
    Operator,
    Parameter,
    Size,
    Term,
    Traced,
)

log = logging.getLogger(__name__)

Sample = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]

# Results that are the same memory seen differently, or shapes and indices: no work, nothing saved.
FREE = {
    *("view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "split"),
    *("chunk", "t", "detach", "alias", "arange", "ones", "zeros", "full", "new_zeros", "new_ones", "empty", "unbind"),
    *("lift_fresh_copy", "contiguous", "flatten", "unflatten", "_assert_tensor_metadata", "numpy_T", "expand_as"),
    *("getitem", "view_as", "split_with_sizes", "narrow", "unsafe_split", "_unsafe_view", "ones_like", "zeros_like"),
    *("full_like", "empty_like"),
}
CASTS = {"to", "_to_copy"}
# Elementwise results whose backward needs none of their inputs.
LINEAR_OPS = {"add", "add_", "sub", "rsub", "neg", "cat", "stack", "clone", "copy", "mean", "sum", "pad"} | CASTS
UNCOUNTED = {"lstm", "gru", "rnn_tanh", "rnn_relu", "cdist", "fft_fft", "bilinear", "_trilinear", "ctc_loss"}


def trace(module: torch.nn.Module, sample: Sample, *, name: str = "") -> Model:
    """Describe a module from one sample input (a tensor, a tuple of arguments, or keyword arguments).

    Dimension 0 of each input is the microbatch, dimension 1 the sequence.
    """
    args, kwargs = _arguments(sample)
    program = _export(module, args, kwargs)
    graph = _Graph(module, program)
    layers, order = _fold(graph.segments())
    return Model(
        name=name or type(module).__name__,
        seq_len=graph.seq_len,
        layers=layers,
        order=order,
        source=f"traced from {type(module).__module__}.{type(module).__qualname__}",
    )


def _arguments(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), {key: _widened(value) for key, value in sample.items()}
    values = sample if isinstance(sample, tuple) else (sample,)
    return tuple(map(_widened, values)), {}


def _widened(value: Any) -> Any:
    """Batch and length at least 2: torch.export takes a 1 for a constant."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    repeats = [2 if dim < 2 and size == 1 else 1 for dim, size in enumerate(value.shape)]
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


# --- sizes: torch's symbolic integers as polynomials in microbatch and sequence length ---


@dataclass
class _Symbols:
    """Which sympy symbols are the microbatch and the length, and what they were in the sample."""

    batch: set[sympy.Symbol] = field(default_factory=set)
    length: set[sympy.Symbol] = field(default_factory=set)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> None:
        for dim, symbols in ((0, self.batch), (1, self.length)):
            if dim < tensor.ndim and isinstance(tensor.shape[dim], torch.SymInt):
                expression = tensor.shape[dim].node.expr  # type: ignore[attr-defined]
                if isinstance(expression, sympy.Symbol):
                    symbols.add(expression)
                    self.hints[expression] = int(tensor.shape[dim].node.hint)  # type: ignore[attr-defined]

    def size(self, expression: Any) -> Size:
        """An integer, symbolic integer or product of them as a polynomial."""
        formula = sympy.sympify(_formula(expression))
        b, s = sympy.symbols("b s")
        formula = formula.subs({**dict.fromkeys(self.batch, b), **dict.fromkeys(self.length - self.batch, s)})
        try:
            polynomial = sympy.Poly(sympy.expand(formula), b, s)
            return Size(tuple(Term(float(c), i, j) for (i, j), c in polynomial.terms() if c))
        except (sympy.PolynomialError, TypeError):  # a rounded division and the like: take the sample's value
            hints = {b: max((self.hints[x] for x in self.batch), default=1)}
            hints[s] = max((self.hints[x] for x in self.length), default=1)
            value = formula.subs(hints).subs(self.hints)
            return Size((Term(float(value), 0, 0),))


def _formula(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _tensor(node: Node) -> torch.Tensor | None:
    """The tensor a node stands for; of several results the first, which is the one of size."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return value if isinstance(value, torch.Tensor) else None


def _shape(node: Node) -> tuple[Any, ...]:
    tensor = _tensor(node)
    return () if tensor is None else tuple(map(_formula, tensor.shape))


def _numel(node: Node) -> Any:
    return sympy.Integer(0) if _tensor(node) is None else sympy.prod(_shape(node))


def _is_float(node: Node) -> bool:
    tensor = _tensor(node)
    return tensor is not None and tensor.is_floating_point()


# --- the graph ---


class _Graph:
    """The exported graph, read as operators of modules."""

    def __init__(self, module: torch.nn.Module, program: ExportedProgram) -> None:
        self.nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        self.symbols = _Symbols()
        signature = program.graph_signature
        for node in program.graph.nodes:
            given = node.op == "placeholder" and node.name in signature.user_inputs
            tensor = _tensor(node)
            if given and tensor is not None:
                self.symbols.add(tensor)
        self.names = _names_of(module)
        self.parameter_of: dict[str, str] = dict(signature.inputs_to_parameters)  # by node name
        self.seen: set[str] = set()

    @property
    def seq_len(self) -> int:
        lengths = [self.symbols.hints[symbol] for symbol in self.symbols.length]
        if not lengths:
            log.warning("the module fixes its sequence length: the sizes hold for the sample's length only")
        return max(lengths, default=1)

    def segments(self) -> list[tuple[str, list[Operator]]]:
        """Operators in order of execution, cut where the numbered layer changes; what no layer used comes last."""
        found: list[tuple[str, Operator]] = []
        for path, nodes in groupby(self._working_nodes(), key=_module_path):
            found += [(_layer_of(path), operator) for operator in self._operators(path, list(nodes))]
        unused = [name for name in self.names if self.names[name] == name and name not in self.seen]
        for name in unused:
            shape = self._shape_of[name]
            op = Traced(name.rpartition(".")[0] or name, "unused", (Parameter(name, shape),), NOTHING, NOTHING, NOTHING)
            found.append(("", op))
        return _segmented(_merged(found))

    @property
    def _shape_of(self) -> dict[str, tuple[int, ...]]:
        return self.names.shapes

    def _working_nodes(self) -> Iterator[Node]:
        for node in self.nodes:
            inputs = [n for n in node.all_input_nodes if _tensor(n) is not None]
            owners = {self.parameter_of[n.name] for n in inputs if n.name in self.parameter_of}
            if _op(node) in FREE | CASTS and len(owners) == len(inputs) == 1:
                self.parameter_of[node.name] = owners.pop()  # a view of a parameter is the parameter
            if _tensor(node) is not None and _op(node) not in FREE:
                yield node

    def _operators(self, path: str, nodes: list[Node]) -> Iterator[Operator]:
        rest: list[Node] = []
        for node in nodes:
            op = _op(node)
            if op in UNCOUNTED:
                rule = f"can't count the FLOPs of {node.target} in module {path or '(top)'}"
                raise InputError(Problem(where=path or "module", rule=rule))
            build = PRODUCTS.get(op)
            if build is None:
                rest.append(node)
                continue
            if rest:
                yield self._memory_bound(path, rest)
                rest = []
            yield build(self, path, node)
        if rest:
            yield self._memory_bound(path, rest)

    def _memory_bound(self, path: str, nodes: list[Node]) -> Operator:
        parameters = self.claim(path, nodes)
        ops = sorted({_op(node) for node in nodes})
        floats = [node for node in nodes if _is_float(node)]
        elements = self.symbols.size(sum((_numel(node) for node in floats), sympy.Integer(0)))
        is_norm = bool(parameters) and ("rsqrt" in ops or "layer_norm" in ops or "rms_norm" in ops)
        if is_norm and all(len(p.shape) == 1 for p in parameters):
            function = "layernorm" if "layer_norm" in ops else "rmsnorm"
            return Norm(path, parameters, function, self.symbols.size(_numel(floats[-1])))
        saved = sum((_numel(node) for node in floats if _op(node) not in LINEAR_OPS), sympy.Integer(0))
        return Traced(path, "+".join(ops), parameters, NOTHING, elements, self.symbols.size(saved))

    def claim(self, path: str, nodes: Iterable[Node]) -> tuple[Parameter, ...]:
        """The parameters these nodes use, by the name the module knows them; each tensor is counted once."""
        used = dict.fromkeys(
            self.parameter_of[n.name] for node in nodes for n in node.all_input_nodes if n.name in self.parameter_of
        )
        parameters = []
        for name in used:
            first = self.names[name]
            same = [alias for alias in self.names if self.names[alias] == first]
            local = next((alias for alias in same if path and alias.startswith(path + ".")), first)
            again = local != first or first in self.seen
            parameters.append(Parameter(local, self._shape_of[first], first if again else ""))
            if local == first:
                self.seen.add(first)
        return tuple(parameters)


class _Names(dict[str, str]):
    """Every parameter name -> the first name of the same tensor."""

    shapes: dict[str, tuple[int, ...]]


def _names_of(module: torch.nn.Module) -> _Names:
    first: dict[int, str] = {}
    names = _Names()
    names.shapes = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
        names.shapes[name] = tuple(parameter.shape)
    return names


def _op(node: Node) -> str:
    """The operator's short name: aten.linear.default -> linear."""
    parts = str(node.target).split(".") if hasattr(node.target, "overloadpacket") else []
    return parts[1] if len(parts) > 1 else getattr(node.target, "__name__", str(node.target))


def _module_path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"@\d+", "", str(path))


def _layer_of(path: str) -> str:
    """The path down to its first number: model.layers.3.mlp -> model.layers.3; empty where there is none."""
    parts = path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: numbered + 1]) if numbered is not None else ""


# --- matrix products ---


def _linear(graph: _Graph, path: str, node: Node) -> Operator:
    x, weight = node.all_input_nodes[0], node.all_input_nodes[1]
    if weight.name not in graph.parameter_of:
        return _product(graph, path, node)
    inputs, outputs = int(_shape(weight)[1]), int(_shape(weight)[0])
    return _as_linear(graph, path, node, x, inputs, outputs)


def _addmm(graph: _Graph, path: str, node: Node) -> Operator:
    x, weight = [n for n in node.args if isinstance(n, Node)][-2:]
    if weight.name not in graph.parameter_of:
        return _product(graph, path, node)
    inputs, outputs = (int(size) for size in _shape(weight))
    return _as_linear(graph, path, node, x, inputs, outputs)


def _as_linear(graph: _Graph, path: str, node: Node, x: Node, inputs: int, outputs: int) -> Linear:
    rows = graph.symbols.size(_numel(x) / inputs)
    saves = not any(user < node and _op(user) == _op(node) for user in x.users)
    return Linear(path, graph.claim(path, [node]), inputs, outputs, saves_input=saves, rows=rows)


def _attention(graph: _Graph, path: str, node: Node) -> Operator:
    query, key = node.args[0], node.args[1]
    assert isinstance(query, Node)
    assert isinstance(key, Node)
    lengths = graph.symbols.length
    q, k = _shape(query), _shape(key)
    if len(q) != 4 or len(k) != 4 or q[2] not in lengths or k[2] not in lengths:
        return _product(graph, path, node)
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    heads, kv_heads, head_dim = int(q[1]), int(k[1]), int(q[3])
    return Attention(path, heads, kv_heads, head_dim, bool(causal), dropout=bool(dropout))


def _embedding(graph: _Graph, path: str, node: Node) -> Operator:
    table, indices = node.all_input_nodes[0], node.all_input_nodes[1]
    rows, width = (int(size) for size in _shape(table))
    looked_up = graph.symbols.size(_numel(indices))
    return Embedding(path, graph.claim(path, [node]), rows, width, Axis.VOCAB, rows, looked_up)


def _product(graph: _Graph, path: str, node: Node) -> Operator:
    flops = graph.symbols.size(FLOPS[_op(node)](node))
    saved = sum((_numel(n) for n in node.all_input_nodes if n.name not in graph.parameter_of), sympy.Integer(0))
    elements = graph.symbols.size(_numel(node))
    return Traced(path, _op(node), graph.claim(path, [node]), flops, elements, graph.symbols.size(saved))


def _matmul_flops(node: Node) -> Any:
    """2 x results x the length summed over."""
    left = [n for n in node.args if isinstance(n, Node)][-2]
    return 2 * _numel(node) * _shape(left)[-1]


def _attention_flops(node: Node) -> Any:
    query, key, value = (_shape(n) for n in node.args[:3] if isinstance(n, Node))
    scores = sympy.prod(query[:-1]) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


def _convolution_flops(node: Node) -> Any:
    weight = _shape(node.all_input_nodes[1])  # outputs, inputs per group, kernel
    return 2 * _numel(node) * sympy.prod(weight[1:])


def _grouped_flops(node: Node) -> Any:
    left, right = _shape(node.all_input_nodes[0]), _shape(node.all_input_nodes[1])
    return 2 * left[-2] * left[-1] * right[-1] if len(right) == 3 else 2 * _numel(node) * left[-1]


def _einsum_flops(node: Node) -> Any:
    equation, operands = str(node.args[0]), node.args[1]
    assert isinstance(operands, list | tuple)
    sizes: dict[str, Any] = {}
    for letters, operand in zip(equation.partition("->")[0].split(","), operands, strict=True):
        sizes |= dict(zip(letters.replace(" ", ""), _shape(operand), strict=True))
    return 2 * sympy.prod(sizes.values())


FLOPS: dict[str, Callable[[Node], Any]] = {
    "linear": lambda node: 2 * _numel(node) * _shape(node.all_input_nodes[0])[-1],
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul", "addbmm", "mv", "dot"), _matmul_flops),
    "scaled_dot_product_attention": _attention_flops,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution_flops),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_flops),
    "einsum": _einsum_flops,
}
PRODUCTS: dict[str, Callable[[_Graph, str, Node], Operator]] = {
    **dict.fromkeys(FLOPS, _product),
    "linear": _linear,
    "addmm": _addmm,
    "mm": _addmm,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
}


# --- layers ---


def _merged(found: list[tuple[str, Operator]]) -> list[tuple[str, Operator]]:
    """Names made unique inside a layer: two operators of one module get #2, #3."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    unique = []
    for layer, operator in found:
        label = (layer, operator.name)
        counts[label] += 1
        suffix = f"#{counts[label]}" if counts[label] > 1 else ""
        unique.append((layer, replace(operator, name=operator.name + suffix)))
    return unique


def _segmented(found: list[tuple[str, Operator]]) -> list[tuple[str, list[Operator]]]:
    """Consecutive operators of one layer together; work between two numbered layers stays with the first."""
    last_numbered = max((i for i, (layer, _) in enumerate(found) if layer), default=-1)
    segments: list[tuple[str, list[Operator]]] = []
    for i, (layer, operator) in enumerate(found):
        between = not layer and segments and segments[-1][0] and i < last_numbered
        if segments and (between or segments[-1][0] == layer):
            segments[-1][1].append(operator)
        else:
            segments.append((layer, [operator]))
    return segments


def _fold(segments: list[tuple[str, list[Operator]]]) -> tuple[tuple[Layer, ...], tuple[Run, ...]]:
    """Equal layers stored once, runs of them counted."""
    by_content: dict[tuple[str, tuple[Operator, ...]], Layer] = {}
    order: list[Run] = []
    for layer_path, operators in segments:
        prefix, _, number = layer_path.rpartition(".")
        pattern = f"{prefix}.{{}}" if prefix else "{}" if number else ""
        content = tuple(_unnumbered(operator, layer_path, pattern) for operator in operators)
        key = (pattern, content)
        if key not in by_content:
            by_content[key] = Layer(_layer_name(layer_path, len(by_content)), pattern, content)
        name = by_content[key].name
        if order and order[-1].layer == name:
            order[-1] = Run(name, order[-1].count + 1)
        else:
            order.append(Run(name, 1))
    return tuple(by_content.values()), tuple(order)


def _layer_name(layer_path: str, number: int) -> str:
    return layer_path or ("start" if number == 0 else f"part-{number}")


def _unnumbered(operator: Operator, layer_path: str, pattern: str) -> Operator:
    if not layer_path:
        return operator

    def general(name: str) -> str:
        rest = name.removeprefix(layer_path)
        return pattern + rest if name.startswith(layer_path) and rest[:1] in ("", ".", "#") else name

    parameters = tuple(Parameter(general(p.name), p.shape, general(p.tied)) for p in operator.parameters)
    return replace(operator, name=general(operator.name), parameters=parameters)
