"""`Stage`: the layers that run together on a rank; cutting a model into stages, and giving them values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor, nn

from wavetrain.runtime.initial import distribution, initial
from wavetrain.runtime.parts import Part, Parts, copied

IGNORED = -100  # a target that counts for nothing


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropy over all targets that count."""
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


class Stage(nn.Module):
    """Some blocks of a model, after its embedding if first and before its head if last.

    The last stage has its own Parameter for a weight tied to the embedding's, so that each end accumulates its own
    gradient; `Parts.twins` says which two belong together.
    """

    def __init__(self, parts: Parts, *, number: int, depth: int, blocks: Sequence[Part]) -> None:
        super().__init__()
        self.number = number
        self.chain, place = divmod(number, depth)  # which copy of the model, and where in it
        self.is_first, self.is_last = place == 0, place == depth - 1
        embedding = copied([parts.embedding] if self.is_first else [])
        head = copied([parts.head] if self.is_last else [])
        self.members = (*embedding, *copied(blocks), *head)
        self.embedding = embedding[0].module if self.is_first else None
        self.blocks = nn.ModuleList(part.module for part in self.members[len(embedding) : len(embedding) + len(blocks)])
        self.head = head[0].module if self.is_last else None
        self.parts = parts
        self.loss: Callable[[Tensor, Tensor], Tensor] = sum_of_losses
        self.dtype = self.boundary_dtype = torch.float32  # of parameters and arithmetic; of what is handed over

    def enter(self, tokens: Tensor) -> Tensor:
        """Tokens to hidden states, on the first stage."""
        assert self.embedding is not None
        return self.embedding(tokens)  # type: ignore[no-any-return]

    def run(self, hidden: Tensor) -> Tensor:
        """Through the blocks of this stage, to what it hands over."""
        hidden = hidden.to(self.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.is_last else hidden.to(self.boundary_dtype)

    def leave(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropy over all targets that count, at least in float32, on the last stage."""
        assert self.head is not None
        logits = self.head(hidden.to(self.dtype)).flatten(0, 1)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.loss(exact, targets.flatten())

    def forward(
        self, x: Tensor, targets: Tensor | None = None, *, entered: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """What of entering, running and leaving applies to this stage; `entered` may cut what was embedded."""
        hidden = self.enter(x) if self.is_first else x
        if self.is_first and entered is not None:
            hidden = entered(hidden)
        result = self.run(hidden)
        if self.is_last:
            assert targets is not None
            return self.leave(result, targets)
        return hidden.view_as(hidden) if result is hidden else result  # a stage without blocks

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under the model's own name."""
        for part in self.members:
            yield from part.named()

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Where each member is in this module."""
        first, last = ["embedding"] * self.is_first, ["head"] * self.is_last
        return (*first, *(f"blocks.{number}" for number in range(len(self.blocks))), *last)


def cut_into_stages(parts: Parts, cut: Sequence[int], wanted: Iterable[int]) -> dict[int, Stage]:
    """The wanted stages of a model, still on the meta device; `cut` has the blocks of each.

    Stages beyond the cut are those of a second copy of the model (Chimera), with parameters of their own.
    """
    if sum(cut) != len(parts.blocks) or any(count < 0 for count in cut):
        raise ValueError(f"a cut into {list(cut)} does not deal out {len(parts.blocks)} blocks")
    depth = len(cut)
    ends = [sum(cut[: stage + 1]) for stage in range(depth)]
    stages = {}
    for number in wanted:
        last = ends[number % depth]
        blocks = parts.blocks[last - cut[number % depth] : last]
        stages[number] = Stage(parts, number=number, depth=depth, blocks=blocks)
    return stages


def materialize(
    stages: Mapping[int, Stage],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    boundary_dtype: torch.dtype | None = None,
) -> None:
    """Give the stages of a rank their initial values; nothing else of the model is ever allocated.

    Tied weights share storage where both are here, in stages of the same chain, and are equal elsewhere.
    """
    made: dict[tuple[int, str], Tensor] = {}
    for stage in stages.values():
        num_layers, std, ties = len(stage.parts.blocks), stage.parts.std, stage.parts.ties
        for part in stage.members:
            for owned, parameter in list(part.named()):
                name = ties.get(owned, owned)
                if (stage.chain, name) not in made and not parameter.is_meta:  # a user's module has its values
                    made[stage.chain, name] = parameter.detach().to(device, dtype)
                elif (stage.chain, name) not in made:
                    shape = tuple(parameter.shape)
                    drawn = distribution(name, shape, num_layers=num_layers, std=std)
                    values = initial(name, shape, seed=seed, drawn=drawn, dtype=dtype, device=device)
                    made[stage.chain, name] = values
                _replace(part.module, parameter, nn.Parameter(made[stage.chain, name]))
            _move_buffers(part.module, device)
        stage.dtype, stage.boundary_dtype = dtype, boundary_dtype or dtype


def load(stages: Mapping[int, Stage], values: Mapping[str, Tensor]) -> None:
    """Copy values, by the model's own names, into materialized stages: a state_dict, for instance."""
    with torch.no_grad():
        for stage in stages.values():
            for name, parameter in stage.named():
                parameter.copy_(values[name] if name in values else values[stage.parts.ties[name]])


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Wherever a module refers to a parameter, make it refer to another."""
    for owner in module.modules():
        for leaf, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(owner, leaf, new)


def _move_buffers(module: nn.Module, device: torch.device | str) -> None:
    for owner in module.modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False)):
            assert not buffer.is_meta, f"the buffer {leaf} has no values to materialize"
            setattr(owner, leaf, buffer.to(device))
