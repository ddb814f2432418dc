"""A backward in two parts: the gradient of the input now, the gradients of the weights later, nothing computed twice.

The graph of a stage is a chain from its output to its input with the weights hanging off it. Where a weight's branch
leaves the chain, at the backward node of a linear layer, say, the gradient that arrives there is all the weight needs.
So the first part runs the chain and keeps what arrives at those nodes, and the second runs each node's branch from what
was kept. A node runs in both, but PyTorch computes in each only what is asked for. The kernels are those of a whole
backward, hence the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(frozen=True)
class Branch:
    """Weights that hang off one node of the chain, and the gradients that arrived there."""

    edges: tuple[GradientEdge, ...]
    gradients: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


@dataclass(frozen=True)
class Deferred:
    """Weight gradients still to be computed. `repeated` weights hang off several nodes: theirs take the chain again."""

    branches: tuple[Branch, ...]
    repeated: tuple[Tensor, ...]
    output: GradientEdge
    gradient: Tensor

    def finish(self) -> None:
        """Add the weights' gradients to what they have accumulated."""
        again = bool(self.repeated)
        for branch in self.branches:
            torch.autograd.backward(branch.edges, branch.gradients, inputs=branch.weights, retain_graph=again)
        if self.repeated:
            torch.autograd.backward((self.output,), (self.gradient,), inputs=self.repeated)


def backward_input(output: GradientEdge, gradient: Tensor, source: Tensor) -> tuple[Tensor, Deferred]:
    """The gradient of a stage's input `source`, and what remains to be done for its weights."""
    chain = _chain(output.node, get_gradient_edge(source).node)
    arrived: dict[int, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(_keeper(arrived, at)) for at, (node, _) in enumerate(chain)]
    (result,) = torch.autograd.grad((output,), (source,), (gradient,), retain_graph=True)
    for handle in handles:
        handle.remove()
    return result, _deferred(chain, arrived, output, gradient)


def _keeper(arrived: dict[int, tuple[Tensor | None, ...]], at: int) -> Callable[[tuple[Tensor | None, ...]], None]:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[at] = tuple(gradients)

    return keep


def _deferred(
    chain: list[tuple[Node, list[Tensor]]],
    arrived: dict[int, tuple[Tensor | None, ...]],
    output: GradientEdge,
    gradient: Tensor,
) -> Deferred:
    uses: dict[Tensor, int] = {}
    for _, weights in chain:
        for weight in weights:
            uses[weight] = uses.get(weight, 0) + 1
    repeated = tuple(weight for weight, count in uses.items() if count > 1)
    branches = []
    for at, (node, weights) in enumerate(chain):
        own = tuple(weight for weight in weights if uses[weight] == 1)
        kept = [(GradientEdge(node, slot), g) for slot, g in enumerate(arrived.get(at, ())) if g is not None]
        if own and kept:
            branches.append(Branch(tuple(edge for edge, _ in kept), tuple(g for _, g in kept), own))
    return Deferred(tuple(branches), repeated, output, gradient)


def _chain(root: Node, leaf: Node) -> list[tuple[Node, list[Tensor]]]:
    """The nodes between output and input that weights hang off, with those weights."""
    leads: dict[Node, bool] = {}  # whether a node leads to the input
    found: list[tuple[Node, list[Tensor]]] = []
    stack = [(root, False)]
    while stack:
        node, entered = stack.pop()
        after = [child for child, _ in node.next_functions if child is not None]
        if not entered and node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((child, False) for child in after if child not in leads)
        elif entered:
            leads[node] = node is leaf or any(leads[child] for child in after)
            beside = [child for child in after if not leads[child]] if leads[node] else []
            weights = [weight for child in beside for weight in _leaves(child)]
            if weights:
                found.append((node, weights))
    return found


def _leaves(node: Node) -> Iterator[Tensor]:
    """The tensors that gradients are accumulated in below a node."""
    variable = getattr(node, "variable", None)
    if variable is not None:
        yield variable
        return
    for child, _ in node.next_functions:
        if child is not None:
            yield from _leaves(child)
