"""The exported graph, read as operators of modules: matrix products, norms, and what is bound by memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from wavetrain.base.errors import InputError, Problem
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
    Traced,
)
from wavetrain.model.traced.layers import segmented
from wavetrain.model.traced.sizes import NotPolynomial, Symbols, is_float, numel_of, shape_of, tensor_of

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


class Graph:
    """The exported graph, read as operators of modules."""

    def __init__(self, module: torch.nn.Module, program: ExportedProgram) -> None:
        self.nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        signature = program.graph_signature
        given = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in signature.user_inputs]
        self.symbols = Symbols([tensor for node in given if (tensor := tensor_of(node)) is not None])
        self.names, self.shapes = _names_of(module)
        self.parameter_of: dict[str, str] = dict(signature.inputs_to_parameters)  # by node name
        self.seen: set[str] = set()

    def segments(self) -> list[tuple[str, list[Operator]]]:
        """Operators in order of execution, cut where the numbered layer changes; what no layer used comes last."""
        found: list[tuple[str, Operator]] = []
        for path, nodes in groupby(self._working_nodes(), key=_module_path):
            found += [(layer_of(path), operator) for operator in self._operators(path, list(nodes))]
        unused = [name for name in self.names if self.names[name] == name and name not in self.seen]
        for name in unused:
            parameters = (Parameter(name, self.shapes[name]),)
            found.append(("", Traced(f"{name}:unused", "unused", parameters, NOTHING, NOTHING, NOTHING)))
        return segmented(found)

    def _working_nodes(self) -> Iterator[Node]:
        for node in self.nodes:
            inputs = [n for n in node.all_input_nodes if tensor_of(n) is not None]
            owners = {self.parameter_of[n.name] for n in inputs if n.name in self.parameter_of}
            if _op(node) in FREE | CASTS and len(owners) == len(inputs) == 1:
                self.parameter_of[node.name] = owners.pop()  # a view of a parameter is the parameter
            if tensor_of(node) is not None and _op(node) not in FREE:
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
        except NotPolynomial as error:
            rule = f"the size of {node.target} is {error}, which is no polynomial in microbatch and length"
            raise InputError(Problem(where=path or "(top)", rule=rule)) from None

    def _memory_bound(self, path: str, nodes: list[Node]) -> Operator:
        parameters = self.claim(path, nodes)
        ops = sorted({_op(node) for node in nodes})
        floats = [node for node in nodes if is_float(node)]
        elements = self.symbols.sample_size(sum((numel_of(node) for node in floats), sympy.Integer(0)))
        is_norm = bool(parameters) and ("rsqrt" in ops or "layer_norm" in ops or "rms_norm" in ops)
        if is_norm and all(len(p.shape) == 1 for p in parameters):
            function = "layernorm" if "layer_norm" in ops else "rmsnorm"
            return Norm(path, parameters, function, self.symbols.sample_size(numel_of(floats[-1])))
        saved = sum((numel_of(node) for node in floats if _op(node) not in LINEAR_OPS), sympy.Integer(0))
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


def layer_of(path: str) -> str:
    """The path down to its first number: model.layers.3.mlp -> model.layers.3; empty where there is none."""
    parts = path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: numbered + 1]) if numbered is not None else ""


# --- matrix products ---


def _linear(graph: Graph, path: str, node: Node) -> Operator:
    x, weight = node.all_input_nodes[0], node.all_input_nodes[1]
    if weight.name not in graph.parameter_of:
        return _product(graph, path, node)
    inputs, outputs = int(shape_of(weight)[1]), int(shape_of(weight)[0])
    return _as_linear(graph, path, node, x, inputs, outputs)


def _addmm(graph: Graph, path: str, node: Node) -> Operator:
    x, weight = [n for n in node.args if isinstance(n, Node)][-2:]
    if weight.name not in graph.parameter_of:
        return _product(graph, path, node)
    inputs, outputs = (int(size) for size in shape_of(weight))
    return _as_linear(graph, path, node, x, inputs, outputs)


def _as_linear(graph: Graph, path: str, node: Node, x: Node, inputs: int, outputs: int) -> Linear:
    rows = graph.size(path, node, numel_of(x) / inputs)
    saves = not any(user < node and _op(user) == _op(node) for user in x.users)
    return Linear(path, graph.claim(path, [node]), inputs, outputs, saves_input=saves, rows=rows)


def _attention(graph: Graph, path: str, node: Node) -> Operator:
    query, key = node.args[0], node.args[1]
    assert isinstance(query, Node)
    assert isinstance(key, Node)
    length = graph.symbols.length
    q, k = shape_of(query), shape_of(key)
    if length is None or len(q) != 4 or len(k) != 4 or q[2] != length or k[2] != length:
        return _product(graph, path, node)
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    heads, kv_heads, head_dim = int(q[1]), int(k[1]), int(q[3])
    return Attention(path, heads, kv_heads, head_dim, bool(causal), dropout=bool(dropout))


def _embedding(graph: Graph, path: str, node: Node) -> Operator:
    table, indices = node.all_input_nodes[0], node.all_input_nodes[1]
    rows, width = (int(size) for size in shape_of(table))
    looked_up = graph.size(path, node, numel_of(indices))
    return Embedding(path, graph.claim(path, [node]), rows, width, Axis.VOCAB, rows, looked_up)


def _product(graph: Graph, path: str, node: Node) -> Operator:
    flops = graph.size(path, node, FLOPS[_op(node)](node))
    saved = sum((numel_of(n) for n in node.all_input_nodes if n.name not in graph.parameter_of), sympy.Integer(0))
    elements = graph.size(path, node, numel_of(node))
    return Traced(path, _op(node), graph.claim(path, [node]), flops, elements, graph.size(path, node, saved))


def _matmul_flops(node: Node) -> Any:
    """2 x results x the length summed over."""
    left = [n for n in node.args if isinstance(n, Node)][-2]
    return 2 * numel_of(node) * shape_of(left)[-1]


def _attention_flops(node: Node) -> Any:
    query, key, value = (shape_of(n) for n in node.args[:3] if isinstance(n, Node))
    scores = sympy.prod(query[:-1]) * key[-2]
    return 2 * scores * (query[-1] + value[-1])


def _convolution_flops(node: Node) -> Any:
    weight = shape_of(node.all_input_nodes[1])  # outputs, inputs per group, kernel
    return 2 * numel_of(node) * sympy.prod(weight[1:])


def _transposed_convolution_flops(node: Node) -> Any:
    x, weight = node.all_input_nodes[0], node.all_input_nodes[1]  # weight: inputs, outputs per group, kernel
    return 2 * numel_of(x) * sympy.prod(shape_of(weight)[1:])


def _tensordot_flops(node: Node) -> Any:
    left, summed = shape_of(node.all_input_nodes[0]), node.args[2]
    assert isinstance(summed, list | tuple)
    return 2 * numel_of(node) * sympy.prod(left[int(dim)] for dim in summed)  # type: ignore[arg-type]


def _summed_batches_flops(node: Node) -> Any:
    left, right = [n for n in node.args if isinstance(n, Node)][-2:]
    return 2 * numel_of(left) * shape_of(right)[-1]


def _grouped_flops(node: Node) -> Any:
    left, right = shape_of(node.all_input_nodes[0]), shape_of(node.all_input_nodes[1])
    return 2 * left[-2] * left[-1] * right[-1] if len(right) == 3 else 2 * numel_of(node) * left[-1]


def _einsum_flops(node: Node) -> Any:
    equation, operands = str(node.args[0]), node.args[1]
    assert isinstance(operands, list | tuple)
    sizes: dict[str, Any] = {}
    for letters, operand in zip(equation.partition("->")[0].replace(" ", "").split(","), operands, strict=True):
        before, dots, after = letters.partition("...")
        shape = shape_of(operand)
        hidden = len(shape) - len(before) - len(after)  # dimensions behind the dots, counted from the last
        middle = [f"...{hidden - i}" for i in range(hidden)] if dots else []
        sizes |= dict(zip([*before, *middle, *after], shape, strict=True))
    return 2 * sympy.prod(sizes.values())


FLOPS: dict[str, Callable[[Node], Any]] = {
    "linear": lambda node: 2 * numel_of(node) * shape_of(node.all_input_nodes[0])[-1],
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "dot"), _matmul_flops),
    "addbmm": _summed_batches_flops,
    "tensordot": _tensordot_flops,
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution_flops),
    "scaled_dot_product_attention": _attention_flops,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution_flops),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped_flops),
    "einsum": _einsum_flops,
}
PRODUCTS: dict[str, Callable[[Graph, str, Node], Operator]] = {
    **dict.fromkeys(FLOPS, _product),
    "linear": _linear,
    "addmm": _addmm,
    "mm": _addmm,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
}
