"""What a parameter costs where it lies: linear in parameters, by the laws of `sim.estimate`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from wavetrain.cost.compute import stream_seconds
from wavetrain.cost.memory import state_bytes
from wavetrain.plan.layout import Choice
from wavetrain.planner.question import Question
from wavetrain.sim.batch import Batch, Sharded
from wavetrain.sim.ending import copies_seconds, rank_reduction_seconds


@dataclass(frozen=True)
class Rates:
    """What a parameter costs where it lies, linear in parameters."""

    question: Question
    batch: Batch
    every: float  # parameters of the rank

    def optimizer_s(self, choice: Choice) -> float:
        """Once per step, of one parameter."""
        laws, batch = self.question.laws, self.batch
        ways = float(batch.data_ranks[0]) if batch.shard_optimizer[0] and choice.shard == 1 else float(choice.shard)
        return float(stream_seconds(laws.optimizer_bytes / ways, batch.device))

    def reduction_s(self, choice: Choice) -> tuple[float, float]:
        """Summing its gradient beside the backward, and what is collected after the step."""
        every = np.array([self.every])
        shown = self.question.laws.gradient_exposed if self.batch.stack.gradient_overlap else 1.0
        if choice.shard == 1:
            reduce_s, gather_s = rank_reduction_seconds(self.batch, every)
            return float(reduce_s[0]) / self.every, shown * float(gather_s[0]) / self.every
        group = np.array([[float(choice.shard)]])
        return float(copies_seconds(self.batch, every[:, None], group)[0, 0]) / self.every, 0.0

    def state_bytes(self, choice: Choice) -> float:
        """All through the step, what is kept gathered left out."""
        one, none = np.ones(1), np.zeros(1)
        ways = np.where(self.batch.shard_optimizer, self.batch.data_ranks, 1.0)
        precision = self.batch.precision
        if choice.shard == 1:
            return float(sum(part[0] for part in state_bytes(one, none, precision, ways)))
        parts = state_bytes(none, one / choice.shard, precision, ways)
        accumulated = precision.gradients.num_bytes / choice.shard if self.batch.microbatches[0] > 1 else 0.0
        return float(sum(part[0] for part in parts)) + accumulated


def first_row(batch: Batch) -> Batch:
    """The batch of the first plan alone, for what does not depend on choices."""
    values: dict[str, Any] = {item.name: getattr(batch, item.name) for item in fields(batch)}
    cut: dict[str, Any] = {name: value[:1] for name, value in values.items() if isinstance(value, np.ndarray)}
    parts = [Sharded(*(getattr(part, item.name)[:1] for item in fields(part))) for part in batch.sharded]
    return replace(batch, **cut, sharded=parts)
