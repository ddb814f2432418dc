"""Pipelines of small models: run as threads of this process or as real processes, and their one-process reference."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from tests.runtime.plans import small_model
from torch import Tensor

from wavetrain.runtime.chunk import Batch, Computed
from wavetrain.runtime.executor import Boundary, Executor, Moment
from wavetrain.runtime.hf import parts_of_config
from wavetrain.runtime.parts import Parts
from wavetrain.runtime.shared import WholeGradients, add_shared, groups_of
from wavetrain.runtime.stages import IGNORED, Stage, cut_into_stages, materialize
from wavetrain.runtime.transformer import parts_of
from wavetrain.runtime.transport import Mailbox, Post, Transport
from wavetrain.schedule import Actions, Kind
from wavetrain.schedule.action import COMPUTE

HIDDEN, HEADS, VOCAB, SEQ, SEED = 16, 2, 29, 8, 5
BUILT_IN = ("gpt", "llama", "bert")
FROM_TRANSFORMERS = ("hf-gpt2", "hf-llama", "hf-mistral", "hf-qwen2", "hf-bert")
Grads = dict[int, dict[str, Tensor]]  # by stage and name


@lru_cache(maxsize=64)
def small(family: str, blocks: int, tied: bool) -> Parts:
    """A small model of a built-in family or of transformers, on the meta device."""
    if family.startswith("hf-"):
        return parts_of_config(_config(family.removeprefix("hf-"), blocks, tied))
    sizes = {"hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB, "seq_len": SEQ}
    return parts_of(small_model(family=family, blocks=blocks, tied=tied, **sizes))


def _config(family: str, blocks: int, tied: bool) -> Any:
    import transformers

    common = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family == "gpt2":
        return transformers.GPT2Config(n_embd=HIDDEN, n_layer=blocks, n_head=HEADS, n_positions=SEQ, **common)
    kind = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "bert": "BertConfig"}[family]
    more = {"num_key_value_heads": 1} if family != "bert" else {}
    return getattr(transformers, kind)(
        hidden_size=HIDDEN,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        intermediate_size=24,
        max_position_embeddings=SEQ,
        **more,
        **common,
    )


def batch_of(sizes: Sequence[int], seed: int = 0) -> Batch:
    """Microbatches of given sizes; some targets count for nothing."""
    generator = torch.Generator().manual_seed(seed)
    tokens = {m: torch.randint(VOCAB, (size, SEQ), generator=generator) for m, size in enumerate(sizes)}
    targets = {m: torch.randint(VOCAB, (size, SEQ), generator=generator) for m, size in enumerate(sizes)}
    for target in targets.values():
        target[torch.rand(target.shape, generator=generator) < 0.2] = IGNORED
    return Batch(tokens, targets, sum(int((target != IGNORED).sum()) for target in targets.values()))


@dataclass
class Result:
    """What a step gave: the loss of every microbatch, every stage's gradients, what each rank did."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: Grads = field(default_factory=dict)
    moments: dict[int, list[Moment]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A model, cut, and the order it is run in."""

    parts: Parts
    cut: tuple[int, ...]
    actions: Actions
    batch: Batch


def rank_stages(case: Case, rank: int, dtype: torch.dtype = torch.float32) -> dict[int, Stage]:
    stages = cut_into_stages(case.parts, case.cut, case.actions.placement.local[rank])
    materialize(stages, seed=SEED, dtype=dtype)
    return stages


Wrap = Callable[[Executor], None]


def run_rank(case: Case, rank: int, transport: Transport, wrap: Wrap | None = None, *, training: bool = True) -> Result:
    """One rank's step, shared gradients added."""
    actions = case.actions
    stages = rank_stages(case, rank)
    recomputed = {a.stage for row in actions.ranks for a in row if a.kind is Kind.RECOMPUTE}
    chunks = {
        number: Computed(stage, split=actions.is_split, recomputed=number in recomputed, training=training)
        for number, stage in stages.items()
    }
    shapes = {m: (*tokens.shape, HIDDEN) for m, tokens in case.batch.tokens.items()}
    executor = Executor(rank, actions, chunks, transport, Boundary(shapes))
    if wrap is not None:
        wrap(executor)
    moments = executor.step(case.batch)
    if training:
        gradients = {number: WholeGradients(stage) for number, stage in stages.items()}
        add_shared(shared_groups(case), gradients, actions.placement, rank, transport)
    result = Result(moments={rank: moments})
    for number, chunk in chunks.items():
        result.losses |= chunk.losses
        result.gradients[number] = {name: p.grad for name, p in stages[number].named() if p.grad is not None}
    return result


def shared_groups(case: Case) -> Any:
    depth = case.actions.placement.depth
    whole = cut_into_stages(case.parts, case.cut, range(depth))
    names = {number: [name for name, _ in stage.named()] for number, stage in whole.items()}
    return groups_of(names, case.parts.ties, case.actions.placement)


def run_threads(case: Case, wrap: Wrap | None = None, *, training: bool = True) -> Result:
    """The whole pipeline in this process, a thread per rank."""
    post, results, errors = Post(), {}, []

    def work(rank: int) -> None:
        try:
            results[rank] = run_rank(case, rank, Mailbox(rank, post), wrap, training=training)
        except BaseException as error:
            errors.append(error)
            post.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(case.actions.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the pipeline hangs"
    return merged(results.values())


def merged(results: Any) -> Result:
    whole = Result()
    for result in results:
        whole.losses |= result.losses
        whole.gradients |= result.gradients
        whole.moments |= result.moments
    return whole


def reference(case: Case) -> Result:
    """One process: every microbatch through the whole model; per stage, gradients added in the order of the schedule.

    What both ends of a model share has a Parameter of its own at each end, as the rule of shared gradients says.
    """
    depth = case.actions.placement.depth
    stages = cut_into_stages(case.parts, case.cut, range(depth))
    materialize(stages, seed=SEED)
    named = {number: dict(stage.named()) for number, stage in stages.items()}
    flat = [(number, name, p) for number, own in named.items() for name, p in own.items()]
    losses, per_microbatch = {}, {}
    for m, tokens in case.batch.tokens.items():
        hidden = stages[0].embedding(tokens)
        for stage in stages.values():
            for block in stage.blocks:
                hidden = block(hidden)
        logits = stages[depth - 1].head(hidden).flatten(0, 1)
        total = torch.nn.functional.cross_entropy(
            logits, case.batch.targets[m].flatten(), reduction="sum", ignore_index=IGNORED
        )
        loss = total / case.batch.num_targets
        losses[m] = loss.detach()
        gradients = torch.autograd.grad(loss, [p for *_, p in flat], allow_unused=True)
        per_microbatch[m] = {(number, name): g for (number, name, _), g in zip(flat, gradients, strict=True)}
    return Result(losses, shared_sums(case, accumulated(case, per_microbatch)))


def accumulated(case: Case, per_microbatch: Mapping[int, Mapping[tuple[int, str], Tensor | None]]) -> Grads:
    """Each stage's gradients, added microbatch by microbatch in its order."""
    depth, found = case.actions.placement.depth, {}
    for _, (number, kind, m) in case.actions.compute():
        if kind not in (Kind.B, Kind.W):
            continue
        own = found.setdefault(number, {})
        for (stage, name), gradient in per_microbatch[m].items():
            if stage == number % depth and gradient is not None:
                own[name] = own[name] + gradient if name in own else gradient
    return found


def shared_sums(case: Case, gradients: Grads) -> Grads:
    for group in shared_groups(case):
        if group.holders[0].name not in gradients[group.holders[0].stage]:
            continue  # the model does not use it
        total = None
        for stage, name in group.holders:
            one = gradients[stage][name]
            total = one if total is None else total + one
        for stage, name in group.holders:
            gradients[stage][name] = total
    return gradients


def assert_equal(result: Result, expected: Result) -> None:
    """Bit for bit."""
    assert result.losses.keys() == expected.losses.keys()
    for m, loss in expected.losses.items():
        assert torch.equal(result.losses[m], loss), f"loss of microbatch {m}: {result.losses[m]} != {loss}"
    assert result.gradients.keys() == expected.gradients.keys()
    for stage, own in expected.gradients.items():
        assert result.gradients[stage].keys() == own.keys()
        for name, gradient in own.items():
            assert torch.equal(result.gradients[stage][name], gradient), f"gradient of {name} in stage {stage}"


def live_counts(actions: Actions, rank: int) -> list[int]:
    """Activations that a rank holds after each of its compute actions, by the schedule alone."""
    counts, live = [], 0
    for action in actions.ranks[rank]:
        if action.kind in COMPUTE or action.kind is Kind.RECOMPUTE:
            live += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            counts.append(live)
    return counts
