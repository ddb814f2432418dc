"""Parameters that several stages have: tied embeddings, and the second copy of the model where there is one.

Every stage accumulates its own gradient. After the last microbatch those of one parameter are added in the order of
their stages, on every rank that has it, so all copies take the same step, wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wavetrain.runtime.stages import Stage
from wavetrain.runtime.transport import GRADIENT, Message, Transport
from wavetrain.schedule.placement import Placement


class Holder(NamedTuple):
    """A parameter as one stage has it."""

    stage: int
    name: str


@dataclass(frozen=True)
class Group:
    """One parameter that several stages have, in the order of the stages."""

    number: int
    holders: tuple[Holder, ...]


class Gradients(Protocol):
    """The gradients of one stage, by the model's own names; alike wherever a parameter is."""

    def get(self, name: str) -> Tensor | None: ...

    def put(self, name: str, total: Tensor) -> None: ...


class WholeGradients:
    """Of a stage whose parameters are whole."""

    def __init__(self, stage: Stage) -> None:
        self._parameters = dict(stage.named())

    def get(self, name: str) -> Tensor | None:
        return self._parameters[name].grad

    def put(self, name: str, total: Tensor) -> None:
        self._parameters[name].grad = total.clone()


def groups_of(names: Mapping[int, Sequence[str]], ties: Mapping[str, str], placement: Placement) -> tuple[Group, ...]:
    """What is shared, from every stage's parameter names and what is tied to what; the same on all ranks."""
    found: dict[str, list[Holder]] = {}
    for stage in range(placement.num_stages):
        for name in names[stage % placement.depth]:
            found.setdefault(ties.get(name, name), []).append(Holder(stage, name))
    several = [tuple(holders) for holders in found.values() if len(holders) > 1]
    return tuple(Group(number, holders) for number, holders in enumerate(several))


def add_shared(
    groups: Sequence[Group], stages: Mapping[int, Gradients], placement: Placement, rank: int, transport: Transport
) -> None:
    """Give all holders of each group the sum of their gradients; `stages` are this rank's."""
    own = {h: stages[h.stage].get(h.name) for group in groups for h in group.holders if h.stage in stages}
    # What a model does not use (an untied BERT's bias) has no gradient anywhere.
    mine = [group for group in groups if any(own.get(holder) is not None for holder in group.holders)]
    awaited = []
    for group in mine:
        here = {holder: _known(own[holder]) for holder in group.holders if holder in own}
        like = next(iter(here.values()))
        for stage, name in group.holders:
            if stage not in stages:
                message = Message(GRADIENT, stage, group.number)
                transport.post(message, placement.ranks[stage], torch.empty_like(like))
                awaited.append((Holder(stage, name), message))
        ranks = {placement.ranks[holder.stage] for holder in group.holders} - {rank}
        for holder, gradient in here.items():
            for other in sorted(ranks):
                transport.send(Message(GRADIENT, holder.stage, group.number), other, gradient)
    arrived = {(holder, message.microbatch): transport.wait(message) for holder, message in awaited}
    transport.finish()
    for group in mine:
        gradients = [
            _known(own[holder]) if holder in own else arrived[holder, group.number] for holder in group.holders
        ]
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        for holder in group.holders:
            if holder in own:
                stages[holder.stage].put(holder.name, total)


def _known(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "the gradients are shared after the last microbatch"
    return gradient
