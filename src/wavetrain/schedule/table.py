"""A schedule as arrays of numbers, for proofs of millions of actions."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavetrain.schedule.action import Actions, Kind

Ints = NDArray[np.int64]
CODE = {kind: number for number, kind in enumerate(Kind)}


@contextmanager
def uncollected() -> Iterator[None]:
    """Millions of small tuples without the cycle collector looking through them again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True)
class Table:
    """Every action of a schedule: its stage, kind and microbatch, its rank and its position there."""

    stage: Ints
    kind: Ints
    microbatch: Ints  # -1 where there is none
    rank: Ints
    position: Ints

    @staticmethod
    def of(actions: Actions) -> Table:
        rows = actions.ranks
        flat = [action for row in rows for action in row]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        size = len(flat)
        return Table(
            stage=np.fromiter((action[0] for action in flat), np.int64, size),
            kind=np.fromiter((CODE[action[1]] for action in flat), np.int64, size),
            microbatch=np.fromiter((-1 if action[2] is None else action[2] for action in flat), np.int64, size),
            rank=np.repeat(np.arange(len(rows)), lengths),
            position=np.arange(size) - starts,
        )

    def positions(self, kind: Kind, num_stages: int, num_microbatches: int) -> Ints | None:
        """Where each stage's and microbatch's action of a kind stands; -1: nowhere; None if one is there twice."""
        chosen = self.kind == CODE[kind]
        cells = self.stage[chosen] * num_microbatches + self.microbatch[chosen]
        found = np.full(num_stages * num_microbatches, -1, dtype=np.int64)
        found[cells] = self.position[chosen]
        if np.count_nonzero(found >= 0) != len(cells):
            return None
        return found.reshape(num_stages, num_microbatches)
