"""Parameters that several stages have: tied embeddings, and the second copy of the model where there is one.

Every stage accumulates its own gradient. After the last microbatch those of one parameter are added in the order of
their stages, on every rank that has it, so all copies take the same step, wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def groups_of(names: Mapping[int, Sequence[str]], ties: Mapping[str, str], placement: Placement) -> tuple[Group, ...]:
    """What is shared, from every stage's parameter names and what is tied to what; the same on all ranks."""
    found: dict[str, list[Holder]] = {}
    for stage in range(placement.num_stages):
        for name in names[stage % placement.depth]:
            found.setdefault(ties.get(name, name), []).append(Holder(stage, name))
    several = [tuple(holders) for holders in found.values() if len(holders) > 1]
    return tuple(Group(number, holders) for number, holders in enumerate(several))


def add_shared(
    groups: Sequence[Group], stages: Mapping[int, Stage], placement: Placement, rank: int, transport: Transport
) -> None:
    """Give all holders of each group the sum of their gradients."""
    parameters = {stage: dict(module.named()) for stage, module in stages.items()}
    mine = [group for group in groups if _is_used(group, parameters)]
    awaited = []
    for group in mine:
        own = {h: parameters[h.stage][h.name] for h in group.holders if h.stage in stages}
        like = next(iter(own.values()))
        for stage, name in group.holders:
            if stage not in stages:
                message = Message(GRADIENT, stage, group.number)
                transport.post(message, placement.ranks[stage], torch.empty_like(like))
                awaited.append((Holder(stage, name), message))
        ranks = {placement.ranks[holder.stage] for holder in group.holders} - {rank}
        for holder, parameter in own.items():
            for other in sorted(ranks):
                transport.send(Message(GRADIENT, holder.stage, group.number), other, _gradient(parameter))
    arrived = {(holder, message.microbatch): transport.wait(message) for holder, message in awaited}
    transport.finish()
    for group in mine:
        local = [parameters[h.stage][h.name] if h.stage in stages else None for h in group.holders]
        gradients = [
            arrived[holder, group.number] if parameter is None else _gradient(parameter)
            for holder, parameter in zip(group.holders, local, strict=True)
        ]
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        for mine_too in local:
            if mine_too is not None:
                mine_too.grad = total.clone()


def _is_used(group: Group, parameters: Mapping[int, Mapping[str, Tensor]]) -> bool:
    """Whether this rank has a gradient to share; what a model does not use (an untied BERT's bias) has none."""
    own = (parameters[stage][name] for stage, name in group.holders if stage in parameters)
    return any(parameter.grad is not None for parameter in own)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "the gradients are shared after the last microbatch"
    return parameter.grad
