"""Any `nn.Module` as a `Model`: exported with symbolic batch and length, no weight touched. The only torch import here.

`torch.export` gives a graph of operators, each with the module it came from and the shapes of its results as formulas
in the batch size and the sequence length. Matrix products become operators of their own; everything else that a module
does is one `Traced` operator of that module. An operation on a matrix of parameters whose FLOPs we can't tell is
refused. Parameters come from the module itself, so none is missed.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
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
# What may be done to a matrix of parameters without a product; anything else that takes one is refused.
HARMLESS = {
    *(
        "add",
        "add_",
        "sub",
        "rsub",
        "mul",
        "mul_",
        "div",
        "neg",
        "pow",
        "exp",
        "abs",
        "sqrt",
        "rsqrt",
        "sigmoid",
        "tanh",
    ),
    *(
        "softmax",
        "where",
        "cat",
        "stack",
        "clone",
        "copy",
        "index",
        "index_select",
        "gather",
        "mean",
        "sum",
        "std",
        "var",
    ),
    *("linalg_vector_norm", "norm", "dropout", "masked_fill", "tril", "triu", "repeat", "repeat_interleave", "roll"),
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "pad", "gelu", "relu", "silu", "clamp", "detach_", "lerp"),
}
COSTLY = {"lstm", "gru", "rnn_tanh", "rnn_relu", "cdist", "_trilinear"}  # products without a matrix of parameters, too


def trace(module: torch.nn.Module, sample: Sample, *, name: str = "") -> Model:
    """Describe a module from one sample input (a tensor, a tuple of arguments, or keyword arguments).

    Dimension 0 of the first tensor is the microbatch, dimension 1 the sequence.
    """
    args, kwargs = _arguments(sample)
    program = _export(module, args, kwargs)
    graph = _Graph(module, program)
    layers, order = _fold(graph.segments())
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


# --- sizes: torch's symbolic integers as polynomials in microbatch and sequence length ---


class _NotPolynomial(Exception):  # noqa: N818 - caught here
    """A size that does not follow from microbatch and length alone."""


class _Symbols:
    """Which sympy symbols are the microbatch and the length, and what every symbol was in the sample."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self.hints: dict[sympy.Symbol, int] = {}
        for tensor in inputs:
            for size in _symbolic(tensor.shape):
                self.hints |= {symbol: _hint(size, symbol) for symbol in size.node.expr.free_symbols}
        first = next((tensor for tensor in inputs if tensor.ndim), None)
        shape = () if first is None else tuple(first.shape)
        self.batch = self._symbol(shape, 0)
        self.length = self._symbol(shape, 1)
        self.seq_len = self.hints[self.length] if self.length is not None else _static_length(first)

    @staticmethod
    def _symbol(shape: tuple[Any, ...], dim: int) -> sympy.Symbol | None:
        size = shape[dim] if dim < len(shape) else None
        expression = size.node.expr if isinstance(size, torch.SymInt) else None
        return expression if isinstance(expression, sympy.Symbol) else None

    def size(self, expression: Any) -> Size:
        """An integer, symbolic integer or product of them as a polynomial in microbatch and length.

        A rounded division counts as exact, which it is wherever the length divides.
        """
        b, s = sympy.symbols("b s")
        formula = _unrounded(sympy.sympify(_formula(expression)))
        formula = formula.subs({symbol: self._meaning(symbol, b, s) for symbol in formula.free_symbols})
        try:
            polynomial = sympy.Poly(sympy.expand(formula), b, s)
            return Size(tuple(Term(float(c), i, j) for (i, j), c in polynomial.terms() if c))
        except (sympy.PolynomialError, TypeError, ValueError) as error:
            raise _NotPolynomial(str(formula)) from error

    def _meaning(self, symbol: sympy.Symbol, b: sympy.Symbol, s: sympy.Symbol) -> Any:
        """Microbatch, length, or a number; another input's dimension is what it is as long as in the sample."""
        hint = self.hints.get(symbol)
        for known, meaning in ((self.batch, b), (self.length, s)):
            if symbol == known:
                return meaning
        for known, meaning in ((self.length, s), (self.batch, b)):
            if known is not None and hint == self.hints[known]:
                return meaning
        return symbol if hint is None else hint

    def sample_size(self, expression: Any) -> Size:
        """What `size` gives, or where there is no polynomial the sample's value, in proportion to the microbatch."""
        try:
            return self.size(expression)
        except _NotPolynomial:
            value = float(sympy.sympify(_formula(expression)).subs(self.hints))
            if self.batch is None:
                return Size((Term(value, 0, 0),))
            return Size((Term(value / self.hints[self.batch], 1, 0),))


def _symbolic(shape: Iterable[Any]) -> list[Any]:
    return [size for size in shape if isinstance(size, torch.SymInt)]


def _hint(size: Any, symbol: sympy.Symbol) -> int:
    return int(size.node.shape_env.backed_var_to_val.get(symbol, size.node.hint))


def _static_length(first: torch.Tensor | None) -> int:
    """The length of a sample whose length is fixed: tokens, or vectors in a row; otherwise there is none."""
    if first is None or first.ndim < 2 or (first.is_floating_point() and first.ndim != 3):
        return 1
    return int(first.shape[1])


def _unrounded(formula: Any) -> Any:
    """floor(x) -> x, a // b -> a / b."""
    rounded = [e for e in formula.atoms(sympy.Function) if type(e).__name__ in ("floor", "FloorDiv", "CleanDiv")]
    for expression in sorted(rounded, key=lambda e: -e.count_ops()):
        args = [_unrounded(argument) for argument in expression.args]
        formula = formula.subs(expression, args[0] / args[1] if len(args) > 1 else args[0])
    return formula


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
        signature = program.graph_signature
        given = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in signature.user_inputs]
        self.symbols = _Symbols([tensor for node in given if (tensor := _tensor(node)) is not None])
        self.names, self.shapes = _names_of(module)
        self.parameter_of: dict[str, str] = dict(signature.inputs_to_parameters)  # by node name
        self.seen: set[str] = set()

    def segments(self) -> list[tuple[str, list[Operator]]]:
        """Operators in order of execution, cut where the numbered layer changes; what no layer used comes last."""
        found: list[tuple[str, Operator]] = []
        for path, nodes in groupby(self._working_nodes(), key=_module_path):
            found += [(_layer_of(path), operator) for operator in self._operators(path, list(nodes))]
        unused = [name for name in self.names if self.names[name] == name and name not in self.seen]
        for name in unused:
            parameters = (Parameter(name, self.shapes[name]),)
            found.append(("", Traced(f"{name}:unused", "unused", parameters, NOTHING, NOTHING, NOTHING)))
        return _segmented(found)

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
            build = PRODUCTS.get(op)
            if build is None and (op in COSTLY or (op not in HARMLESS | CASTS and self._takes_matrix(node))):
                raise self._uncountable(path, node)
            if build is None:
                rest.append(node)
                continue
            if rest:
                yield self._memory_bound(path, rest)
                rest = []
            yield build(self, path, node)
        if rest:
            yield self._memory_bound(path, rest)

    def _takes_matrix(self, node: Node) -> bool:
        names = (self.parameter_of.get(n.name) for n in node.all_input_nodes)
        return any(name is not None and len(self.shapes[name]) > 1 for name in names)

    def _uncountable(self, path: str, node: Node) -> InputError:
        rule = f"can't count the FLOPs of {node.target} in module {path or '(top)'}"
        return InputError(Problem(where=path or "(top)", rule=rule))

    def size(self, path: str, node: Node, expression: Any) -> Size:
        """A size that must be known for every microbatch and length."""
        try:
            return self.symbols.size(expression)
        except _NotPolynomial as error:
            rule = f"the size of {node.target} is {error}, which is no polynomial in microbatch and length"
            raise InputError(Problem(where=path or "(top)", rule=rule)) from None

    def _memory_bound(self, path: str, nodes: list[Node]) -> Operator:
        parameters = self.claim(path, nodes)
        ops = sorted({_op(node) for node in nodes})
        floats = [node for node in nodes if _is_float(node)]
        elements = self.symbols.sample_size(sum((_numel(node) for node in floats), sympy.Integer(0)))
        is_norm = bool(parameters) and ("rsqrt" in ops or "layer_norm" in ops or "rms_norm" in ops)
        if is_norm and all(len(p.shape) == 1 for p in parameters):
            function = "layernorm" if "layer_norm" in ops else "rmsnorm"
            return Norm(path, parameters, function, self.symbols.sample_size(_numel(floats[-1])))
        saved = sum((_numel(node) for node in floats if _op(node) not in LINEAR_OPS), sympy.Integer(0))
        return Traced(path, "+".join(ops), parameters, NOTHING, elements, self.symbols.sample_size(saved))

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
            parameters.append(Parameter(local, self.shapes[first], first if again else ""))
            if local == first:
                self.seen.add(first)
        return tuple(parameters)


def _names_of(module: torch.nn.Module) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Every parameter name with the first name of the same tensor, and with its shape."""
    first: dict[int, str] = {}
    names, shapes = {}, {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
        shapes[name] = tuple(parameter.shape)
    return names, shapes


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
    rows = graph.size(path, node, _numel(x) / inputs)
    saves = not any(user < node and _op(user) == _op(node) for user in x.users)
    return Linear(path, graph.claim(path, [node]), inputs, outputs, saves_input=saves, rows=rows)


def _attention(graph: _Graph, path: str, node: Node) -> Operator:
    query, key = node.args[0], node.args[1]
    assert isinstance(query, Node)
    assert isinstance(key, Node)
    length = graph.symbols.length
    q, k = _shape(query), _shape(key)
    if length is None or len(q) != 4 or len(k) != 4 or q[2] != length or k[2] != length:
        return _product(graph, path, node)
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    heads, kv_heads, head_dim = int(q[1]), int(k[1]), int(q[3])
    return Attention(path, heads, kv_heads, head_dim, bool(causal), dropout=bool(dropout))


def _embedding(graph: _Graph, path: str, node: Node) -> Operator:
    table, indices = node.all_input_nodes[0], node.all_input_nodes[1]
    rows, width = (int(size) for size in _shape(table))
    looked_up = graph.size(path, node, _numel(indices))
    return Embedding(path, graph.claim(path, [node]), rows, width, Axis.VOCAB, rows, looked_up)


def _product(graph: _Graph, path: str, node: Node) -> Operator:
    flops = graph.size(path, node, FLOPS[_op(node)](node))
    saved = sum((_numel(n) for n in node.all_input_nodes if n.name not in graph.parameter_of), sympy.Integer(0))
    elements = graph.size(path, node, _numel(node))
    return Traced(path, _op(node), graph.claim(path, [node]), flops, elements, graph.size(path, node, saved))


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


def _transposed_convolution_flops(node: Node) -> Any:
    x, weight = node.all_input_nodes[0], node.all_input_nodes[1]  # weight: inputs, outputs per group, kernel
    return 2 * _numel(x) * sympy.prod(_shape(weight)[1:])


def _tensordot_flops(node: Node) -> Any:
    left, summed = _shape(node.all_input_nodes[0]), node.args[2]
    assert isinstance(summed, list | tuple)
    return 2 * _numel(node) * sympy.prod(left[int(dim)] for dim in summed)  # type: ignore[arg-type]


def _summed_batches_flops(node: Node) -> Any:
    left, right = [n for n in node.args if isinstance(n, Node)][-2:]
    return 2 * _numel(left) * _shape(right)[-1]


def _grouped_flops(node: Node) -> Any:
    left, right = _shape(node.all_input_nodes[0]), _shape(node.all_input_nodes[1])
    return 2 * left[-2] * left[-1] * right[-1] if len(right) == 3 else 2 * _numel(node) * left[-1]


def _einsum_flops(node: Node) -> Any:
    equation, operands = str(node.args[0]), node.args[1]
    assert isinstance(operands, list | tuple)
    sizes: dict[str, Any] = {}
    for letters, operand in zip(equation.partition("->")[0].replace(" ", "").split(","), operands, strict=True):
        before, dots, after = letters.partition("...")
        shape = _shape(operand)
        hidden = len(shape) - len(before) - len(after)  # dimensions behind the dots, counted from the last
        middle = [f"...{hidden - i}" for i in range(hidden)] if dots else []
        sizes |= dict(zip([*before, *middle, *after], shape, strict=True))
    return 2 * sympy.prod(sizes.values())


FLOPS: dict[str, Callable[[Node], Any]] = {
    "linear": lambda node: 2 * _numel(node) * _shape(node.all_input_nodes[0])[-1],
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "dot"), _matmul_flops),
    "addbmm": _summed_batches_flops,
    "tensordot": _tensordot_flops,
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution_flops),
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


def _segmented(found: list[tuple[str, Operator]]) -> list[tuple[str, list[Operator]]]:
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


def _fold(segments: list[tuple[str, list[Operator]]]) -> tuple[tuple[Layer, ...], tuple[Run, ...]]:
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
