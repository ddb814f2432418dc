"""Microbenchmarks of one device: what the runtime's operators take, forward and backward, as training meets them.

An operator is timed as a chain of several, each with weights of its own, under autograd: in training, too, weights have
left the caches when they are used again, outputs are new memory, and a backward visits its nodes one by one. All chains
take turns in several passes, and the lower quartile over passes counts: whatever disturbs a machine makes it slower,
and so does a first time.
Ranks of one host measure at the same time, since that is how they will train.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor, nn

from wavetrain.runtime.learn import AdamW, Held, clip, optimizer_of
from wavetrain.runtime.samples import MODELS, QUICK_MODELS, TRAINED, Sample
from wavetrain.runtime.settle import settle
from wavetrain.runtime.stages import Stage, cut_into_stages, materialize, sum_of_losses
from wavetrain.runtime.transformer import Rotary, parts_of
from wavetrain.runtime.turns import Told, lower_quartile
from wavetrain.runtime.world import World

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LENGTH = 4  # operators in a chain
LEAST_S = 0.004  # of one timed pass of a chain: shorter ones are repeated
LEAST_COPY_S = 0.03  # ranks of a host share its memory: the least of so many copies is one that no other's met
PRODUCTS = ((32, 64), (32, 256), (128, 64), (128, 128), (128, 512), (256, 256), (512, 128), (512, 512), (1024, 256))
MOST_OBLONG = 256 * 256  # inputs of a product with four times as many outputs: larger ones take long
MOST_NARROW = 128 * 128  # inputs of a product in 16 bits: some processors take a hundred times as long as in 32
WIDE_PRODUCTS = ((1024, 1024), (2048, 2048), (4096, 4096))  # what matrix units need to show their rate
# rows, width; on a processor a step's tensors are in caches when they are used next, and larger ones take what other
# programs leave
STREAMS = {
    "cpu": ((64, 64), (64, 256), (128, 256), (256, 256)),
    "cuda": ((64, 64), (64, 256), (256, 256), (256, 512), (1024, 512)),
}
# elements; on a processor copies stay in a core's own caches: the next one out is shared with whatever else runs there
COPIES = {"cpu": (2**15, 2**16), "cuda": (2**23, 2**26)}
ADDED = {"cpu": (2**16, 2**17, 2**18), "cuda": (2**20, 2**22, 2**23, 2**26)}
HEADS = ((1, 4, 64, 32), (2, 4, 128, 64), (1, 8, 256, 64), (1, 8, 512, 64))  # batch, heads, length, head_dim
LOOKUPS = ((128, 64), (512, 128), (1024, 256), (1024, 512))  # rows, width
LOGITS = ((128, 512), (64, 2048), (128, 2048), (128, 4096))  # rows, vocabulary
SMALL_VOCABULARY = 256  # where looking up is not hidden by a gradient as large as the table

Timed = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Something to time: `prepare` makes ready for one `act`, untimed; a sample is the time of one of `count` in it."""

    what: str
    sizes: tuple[int, ...]
    prepare: Callable[[], Timed]
    count: int
    dtype: str = "fp32"
    least_s: float = LEAST_S


def compute_samples(world: World, told: Told, *, device: str, quick: bool, passes: int) -> list[Sample]:
    """All cases on this rank's device, in some passes.

    On rank 0 the lesser median over ranks; what the other ranks return is their own.
    """
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)  # else all ranks of a host share its first
    settle(world.place if device == "cpu" else None)
    cases = _all_cases(device, quick=quick)
    found: list[list[float]] = [[] for _ in cases]
    for number in range(passes):
        for at, case in enumerate(cases):
            world.progress.computing(number, case.what)
            told(case.what, (number * len(cases) + at) / (passes * len(cases)))
            found[at].append(_seconds(case, device) / case.count)
    world.store.set(f"compute/{world.rank}", json.dumps([lower_quartile(took) for took in found]))
    ranks = range(world.size) if world.rank == 0 else [world.rank]
    rows = [json.loads(world.store.get(f"compute/{rank}")) for rank in ranks]
    columns = zip(cases, zip(*rows, strict=True), strict=True)
    return [Sample(case.what, case.sizes, median_low(column), case.dtype) for case, column in columns]


def _seconds(case: Case, device: str) -> float:
    """One pass of a case: the least of a few, so that an interruption of the process does not count."""
    found, spent = list[float](), 0.0
    while spent < case.least_s:
        act = case.prepare()
        _wait(device)
        start = time.perf_counter()
        act()
        _wait(device)
        found.append(time.perf_counter() - start)
        spent += found[-1]
    return min(found)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# --- what is timed ---


def _all_cases(device: str, *, quick: bool) -> list[Case]:
    with torch.device(device):
        cases = [case for dtype in FORMATS for case in _cases(dtype, device=device, quick=quick)]
        cases += _copies(device, quick=quick)
        if device != "cpu":  # there the runtime's own steps have them
            cases += [*_optimizers(quick=quick), *_models(device=device, quick=quick)]
    return cases


def _cases(dtype: str, *, device: str, quick: bool) -> Iterator[Case]:
    """Streams are bytes, whatever is in them: those of the format that is trained stand for all."""
    for rows, width in product_sizes(dtype, device=device, quick=quick):
        yield from _products(rows, width, dtype)
    for batch, heads, length, dim in ((1, 4, 64, 32), (1, 4, 256, 64)) if quick else HEADS:
        yield from _attention(batch, heads, length, dim, dtype)
    if dtype != TRAINED:
        return
    for rows, width in ((64, 64), (256, 256)) if quick else STREAMS[device]:
        yield from _streams(rows, width, dtype)
    for rows, width in ((128, 64), (512, 128)) if quick else LOOKUPS:
        yield from _lookup(rows, width, dtype)
    for rows, vocab in ((128, 512), (128, 2048)) if quick else LOGITS:
        yield from _logits(rows, vocab, dtype)


def product_sizes(dtype: str, *, device: str, quick: bool) -> list[tuple[int, int]]:
    """Rows and width of the products that are timed in a format."""
    sizes = [(64, 128), (256, 256)] if quick else list(PRODUCTS)
    if dtype == "fp32":
        return sizes
    if device == "cuda":
        return sizes + list(WIDE_PRODUCTS[:2] if quick else WIDE_PRODUCTS)
    return [(rows, width) for rows, width in sizes if rows * width <= MOST_NARROW]


def _chain(
    name: str,
    sizes: tuple[int, ...],
    make: Sequence[Callable[[Tensor], Tensor]],
    start: Tensor,
    dtype: str,
    learnt: Sequence[nn.Parameter] = (),
) -> Iterator[Case]:
    """Forward and backward of functions one after the other; `learnt` are parameters that are no modules'."""
    parameters = [*learnt, *(p for f in make if isinstance(f, nn.Module) for p in f.parameters())]

    def forward() -> Tensor:
        hidden = start
        for f in make:
            hidden = f(hidden)
        return hidden

    def ready() -> Timed:
        for parameter in parameters:
            parameter.grad = None
        start.grad = None
        output = forward()
        gradient = torch.ones_like(output)
        return lambda: torch.autograd.backward(output, gradient)

    yield Case(f"{name}-forward", sizes, lambda: forward, len(make), dtype)
    yield Case(f"{name}-backward", sizes, ready, len(make), dtype)


def _source(*sizes: int, dtype: str) -> Tensor:
    return torch.randn(*sizes, dtype=FORMATS[dtype]).requires_grad_()


def _products(rows: int, width: int, dtype: str) -> Iterator[Case]:
    """Square and oblong linear layers, with and without the gradients of their weights."""
    for outputs in (width, 4 * width) if rows * width <= MOST_OBLONG else (width,):
        shapes = [(width, outputs), (outputs, width)] * (LENGTH // 2)
        for learns in (True, False):
            layers = [nn.Linear(k, n, dtype=FORMATS[dtype]).requires_grad_(learns) for k, n in shapes]
            name = "gemm" if learns else "gemm-fixed"
            forward, backward = _chain(name, (rows, outputs, width), layers, _source(rows, width, dtype=dtype), dtype)
            yield from (forward, backward) if learns else (backward,)


def _streams(rows: int, width: int, dtype: str) -> Iterator[Case]:
    """Memory-bound operators; sizes are elements."""
    made: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "norm": [nn.LayerNorm(width, dtype=FORMATS[dtype]) for _ in range(LENGTH)],
        "rms-norm": [nn.RMSNorm(width, dtype=FORMATS[dtype]) for _ in range(LENGTH)],
        "activation": [F.gelu] * LENGTH,
        "gated": [lambda x: F.silu(x) * x] * LENGTH,
        "residual": [lambda x: x + x] * LENGTH,
    }
    for name, functions in made.items():
        yield from _chain(name, (rows * width,), functions, _source(rows, width, dtype=dtype), dtype)
    rotary = Rotary(64, 10_000.0)
    heads = max(1, width // 64)
    turned = _source(1, heads, rows, 64, dtype=dtype)

    def turn(x: Tensor) -> Tensor:
        q, _ = rotary.turn(x, x)
        return q

    yield from _chain("rotary", (2 * rows * heads * 64,), [turn] * LENGTH, turned, dtype)


def _attention(batch: int, heads: int, length: int, dim: int, dtype: str) -> Iterator[Case]:
    """Fused attention with the views and copies around it: sizes are scores per head and heads x head_dim."""

    def attend(x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, -1)
        q, k, v = (each.view(batch, length, heads, dim).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    x = _source(batch, length, 3 * heads * dim, dtype=dtype)
    yield from _chain("attention", (batch, heads, length, dim), [attend], x, dtype)


def _lookup(rows: int, width: int, dtype: str) -> Iterator[Case]:
    tokens = torch.randint(SMALL_VOCABULARY, (1, rows))
    table = nn.Embedding(SMALL_VOCABULARY, width, dtype=FORMATS[dtype])
    yield from _chain("lookup", (rows, width), [_Looked(table)], tokens, dtype)


def _logits(rows: int, vocab: int, dtype: str) -> Iterator[Case]:
    """The loss of logits."""
    tokens = torch.randint(vocab, (1, rows))
    logits = _source(1, rows, vocab, dtype=dtype)
    yield from _chain(
        "logits", (rows, vocab), [lambda x: sum_of_losses(x.flatten(0, 1).float(), tokens.flatten())], logits, dtype
    )


class _Looked(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)  # type: ignore[no-any-return]


def _models(*, device: str, quick: bool) -> Iterator[Case]:
    """Small models, where every operator meets cold caches."""
    for small in QUICK_MODELS if quick else MODELS:
        stages = cut_into_stages(parts_of(small.model()), (small.layers,), [0])
        materialize(stages, seed=0, device=device)
        stage, tokens = stages[0], torch.randint(small.vocab, (small.batch, small.length))
        target = tokens.clone()

        def run(tokens: Tensor, stage: Stage = stage, target: Tensor = target) -> Tensor:
            return stage(tokens, target)  # type: ignore[no-any-return]

        yield from _chain(small.family, small.sizes, [run], tokens, "fp32", list(stage.parameters()))


def _copies(device: str, *, quick: bool) -> Iterator[Case]:
    """A plain copy, and gradients that are added to: sizes are bytes, elements."""
    for count in COPIES[device]:
        source, target = torch.ones(count), torch.ones(count)
        yield Case("copy", (2 * source.nbytes,), partial(partial, target.copy_, source), 1, least_s=LEAST_COPY_S)
    for count in ADDED[device][-2:] if quick else ADDED[device]:
        source, target = torch.ones(count), torch.ones(count)
        yield Case("accumulate", (count,), partial(partial, target.add_, source), 1, least_s=LEAST_COPY_S)


def _optimizers(*, quick: bool) -> Iterator[Case]:
    """What follows a step's last backward: the norm, clipping, AdamW. Sizes are parameters and tensors."""
    for tensors, each in ((4, 2**19), (48, 2**12)) if quick else ((4, 2**21), (16, 2**18), (32, 2**14), (96, 2**10)):
        shape = (each // 64, 64) if each > 2**11 else (each,)  # matrices decay, vectors do not
        values = {str(number): torch.ones(shape) for number in range(tensors)}
        optimizer = optimizer_of(values, AdamW())

        def ready(values: dict[str, Tensor] = values, step: Timed = optimizer.step) -> Timed:
            for value in values.values():
                value.grad = torch.ones_like(value)
            held = [Held(name, value.grad, counts=True) for name, value in values.items() if value.grad is not None]

            def act() -> None:
                clip(held, names=tuple(values), most=1.0)
                step()

            return act

        yield Case("optimizer", (tensors * each, tensors), ready, 1)
