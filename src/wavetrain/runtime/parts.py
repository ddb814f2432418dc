"""`Parts`: a model taken apart for a pipeline, on the meta device, its parameters under the model's own names."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from wavetrain.runtime.initial import STD


@dataclass(frozen=True)
class Part:
    """A piece of a model and the model's name of each of its parameters, by their path in the piece."""

    module: nn.Module
    names: Mapping[str, str]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under the model's name."""
        for path, parameter in self.module.named_parameters():
            yield self.names[path], parameter

    def references(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under each of its names: one that is used twice comes twice."""
        for path, parameter in self.module.named_parameters(remove_duplicate=False):
            yield self.names[path], parameter


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Embedding (tokens -> hidden), blocks (hidden -> hidden) and head (hidden -> logits) of one model."""

    embedding: Part
    blocks: tuple[Part, ...]
    head: Part
    hidden: int
    vocab: int
    ties: Mapping[str, str]  # a name -> the name whose values it has
    std: float = STD  # of the initial values of matrices
    is_whole: bool = False  # a user's module that was not taken apart: it is the embedding, and its outputs are logits

    @property
    def twins(self) -> tuple[tuple[str, str], ...]:
        """(embedding's name, head's name) of the parameters that the two ends of the model share."""
        first = {name for name, _ in self.embedding.references()}
        last = {name for name, _ in self.head.references()}
        return tuple((shared, name) for name, shared in self.ties.items() if name in last and shared in first)

    def references(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every (name, Parameter) of the whole model, under each of its names."""
        for part in (self.embedding, *self.blocks, self.head):
            yield from part.references()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every (name, Parameter) of the whole model; what the ends share comes once per end."""
        for part in (self.embedding, *self.blocks, self.head):
            yield from part.named()


def copied(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts with parameters of their own; what is no parameter and common to several of them stays common."""
    modules = copy.deepcopy([part.module for part in parts])
    return tuple(Part(module, part.names) for module, part in zip(modules, parts, strict=True))


def boundary_shape(parts: Parts, *, microbatch_size: int, seq_len: int) -> tuple[int, int, int]:
    """The shape of what one stage hands to the next."""
    return microbatch_size, seq_len, parts.hidden


def join(module: nn.Module, names: Mapping[str, str], ties: Mapping[str, str]) -> None:
    """Make one Parameter of those inside a module that are tied to each other (BERT's two names of one bias)."""
    by_name = {name: path for path, name in names.items()}
    for name, shared in ties.items():
        if name in by_name and shared in by_name:
            owner, _, leaf = by_name[name].rpartition(".")
            setattr(module.get_submodule(owner), leaf, module.get_parameter(by_name[shared]))
