"""Placements: which rank computes which stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The rank of every stage. Two `chains` are two copies of the model, their stages one after the other."""

    ranks: tuple[int, ...]
    chains: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.ranks, default=-1) + 1

    @cached_property
    def depth(self) -> int:
        """Stages of one copy of the model."""
        return len(self.ranks) // self.chains

    def is_first(self, stage: int) -> bool:
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        return stage % self.depth == self.depth - 1

    def chain_of(self, microbatch: int) -> int:
        """Which copy of the model a microbatch runs through."""
        return microbatch % self.chains

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.ranks):
            if rank >= 0:
                stages[rank].append(stage)
        return tuple(map(tuple, stages))

    def chunks(self, rank: int) -> int:
        """How many pieces one microbatch's activations on a rank come in."""
        return max(1, len(self.local[rank]) // self.chains)


def linear(ranks: int) -> Placement:
    """One stage per rank."""
    return Placement(tuple(range(ranks)))


def loop(ranks: int, chunks: int) -> Placement:
    """The model goes around the ranks `chunks` times, always forward (interleaved)."""
    return Placement(tuple(range(ranks)) * chunks)


def snake(ranks: int, waves: int) -> Placement:
    """The model goes down the ranks and back up, `waves` times (Hanayo, section 3; hanayo-and-pipelines 1.3)."""
    down = tuple(range(ranks))
    return Placement((down + down[::-1]) * waves)


def bidirectional(ranks: int) -> Placement:
    """Two copies of the model, one down the ranks and one up (Chimera)."""
    down = tuple(range(ranks))
    return Placement(down + down[::-1], chains=2)
