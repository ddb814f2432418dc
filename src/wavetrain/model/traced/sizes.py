"""Sizes of a traced graph: torch's symbolic integers as polynomials in microbatch and sequence length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch.fx import Node

from wavetrain.model.operator import Size, Term


class NotPolynomial(Exception):  # noqa: N818 - caught here
    """A size that does not follow from microbatch and length alone."""


class Symbols:
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
            raise NotPolynomial(str(formula)) from error

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
        except NotPolynomial:
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


def tensor_of(node: Node) -> torch.Tensor | None:
    """The tensor a node stands for; of several results the first, which is the one of size."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Node) -> tuple[Any, ...]:
    tensor = tensor_of(node)
    return () if tensor is None else tuple(map(_formula, tensor.shape))


def numel_of(node: Node) -> Any:
    return sympy.Integer(0) if tensor_of(node) is None else sympy.prod(shape_of(node))


def is_float(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_floating_point()
