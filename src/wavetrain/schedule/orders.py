"""One order function per schedule: the compute actions of every rank, nothing else.

`P` ranks, `M` microbatches, `v` chunks per rank, `W` waves; a wave has 2W chunks. Orders that fill gaps with weight
gradients depend on how long things take and come from the list scheduler in `listing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.placement import Placement, bidirectional, snake

Row = Iterable[Action]


def gpipe(ranks: int, microbatches: int) -> Actions:
    """All forwards, then all backwards (Huang et al. 2019)."""
    kinds = (Kind.F, Kind.B)
    return _rows([Action(rank, kind, m) for kind in kinds for m in range(microbatches)] for rank in range(ranks))


def forward_only(ranks: int, waves: int, microbatches: int) -> Actions:
    """Evaluation: the forwards of a wave."""
    return _rows([action for action in row if action.kind is Kind.F] for row in wave(ranks, waves, microbatches).ranks)


def one_f_one_b(ranks: int, microbatches: int) -> Actions:
    """Warm up, then one forward and one backward in turn (PipeDream-flush; DAPPLE, Fan et al. 2021)."""
    return interleaved(ranks, 1, microbatches)


def interleaved(ranks: int, chunks: int, microbatches: int) -> Actions:
    """1F1B over `chunks` stages per rank (Narayanan et al. 2021, section 2.2); at v = 1 plain 1F1B."""

    def row(rank: int) -> Iterator[Action]:
        forwards = _looped(rank, ranks, chunks, microbatches, Kind.F)
        backwards = _looped(rank, ranks, chunks, microbatches, Kind.B)
        units = _units(ranks, microbatches)
        steps = 1 if chunks == 1 else 2  # forwards between neighbours: a chunk's results return a lap later
        warm = min(len(forwards), (chunks - 1) * max(units) + steps * (ranks - 1 - rank))
        yield from forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - warm :]

    return _rows(map(row, range(ranks)))


def looped_bfs(ranks: int, chunks: int, microbatches: int) -> Actions:
    """Every chunk runs all microbatches before the next one starts (Lamy-Poirier 2023, breadth-first)."""

    def row(rank: int) -> Iterator[Action]:
        for chunk in range(chunks):
            yield from (Action(chunk * ranks + rank, Kind.F, m) for m in range(microbatches))
        for chunk in reversed(range(chunks)):
            yield from (Action(chunk * ranks + rank, Kind.B, m) for m in range(microbatches))

    return _rows(map(row, range(ranks)))


def wave(ranks: int, waves: int, microbatches: int) -> Actions:
    """Hanayo's wave, extended to any number of microbatches (hanayo-and-pipelines 1.5)."""
    return _by_slot(snake(ranks, waves), microbatches, unit=ranks)


def chimera(ranks: int, microbatches: int) -> Actions:
    """Two copies of the model in opposite directions (Li and Hoefler 2021): the slots of a wave of half the ranks."""
    return _by_slot(bidirectional(ranks), microbatches, unit=ranks // 2)


def interleaved_zb(ranks: int, chunks: int, microbatches: int) -> Actions:
    """Interleaved 1F1B with split backward; rank r defers its weight gradients by r steps (ZB1P on v chunks)."""
    return _deferred(ranks, chunks, microbatches, steps=1)


def zb_h1(ranks: int, microbatches: int) -> Actions:
    """Zero-bubble H1 (Qi et al. 2023): the memory of 1F1B, a third of its bubble."""
    return _deferred(ranks, 1, microbatches, steps=1)


def zb_h2(ranks: int, microbatches: int) -> Actions:
    """Zero-bubble H2 (Qi et al. 2023): twice the warm-up, no idle time between a rank's first and last action.

    It takes 2P - 1 microbatches to warm up so; with fewer it is H1.
    """
    return _deferred(ranks, 1, microbatches, steps=2 if microbatches >= 2 * ranks - 1 else 1)


# --- the keys and sequences behind them ---


def wave_slot(stage: int, kind: Kind, microbatch: int, *, depth: int, unit: int) -> int:
    """The slot of an action in a wave; every dependency goes to the next slot, so the order can't deadlock.

    On a rank the two legs of the snake have opposite parity, and units of P microbatches tile time with period S.
    """
    number, index = divmod(microbatch, unit)
    start = number * depth + 2 * index
    return start + stage if kind is Kind.F else start + 2 * (depth - 1) - stage


def _by_slot(placement: Placement, microbatches: int, *, unit: int) -> Actions:
    depth, chains = placement.depth, placement.chains

    def row(stages: tuple[int, ...]) -> list[Action]:
        keyed = []
        for stage in stages:
            chain, inner = divmod(stage, depth)
            for index, m in enumerate(range(chain, microbatches, chains)):
                for tie, kind in enumerate((Kind.F, Kind.B)):
                    slot = wave_slot(inner, kind, index, depth=depth, unit=unit)
                    keyed.append((slot, tie, Action(stage, kind, m)))
        keyed.sort(key=lambda item: item[:2])  # on a tie forward first, then as listed
        return [action for _, _, action in keyed]

    return _rows(map(row, placement.local))


def _looped(rank: int, ranks: int, chunks: int, microbatches: int, kind: Kind) -> list[Action]:
    """A rank's forwards (or backwards) of a loop: units of microbatches, each through all chunks in turn."""
    laps = range(chunks) if kind is Kind.F else range(chunks - 1, -1, -1)
    actions: list[Action] = []
    start = 0
    for size in _units(ranks, microbatches):
        actions += (Action(chunk * ranks + rank, kind, m) for chunk in laps for m in range(start, start + size))
        start += size
    return actions


def _units(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches in units of `ranks`; where they do not come out even, in fewer and larger ones.

    Smaller ones would return from a lap before the ranks are ready for them, and could wait in a circle.
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    return (size + 1,) * longer + (size,) * (count - longer)


def _deferred(ranks: int, chunks: int, microbatches: int, *, steps: int) -> Actions:
    """1F1B with split backward: the weight gradient follows `steps * rank` input gradients later."""

    def row(rank: int) -> Iterator[Action]:
        forwards = _looped(rank, ranks, chunks, microbatches, Kind.F)
        inputs = _looped(rank, ranks, chunks, microbatches, Kind.I)
        weights = [Action(action.stage, Kind.W, action.microbatch) for action in inputs]
        lap = (chunks - 1) * max(_units(ranks, microbatches))
        warm = min(len(forwards), lap + steps * (ranks - 1 - rank))
        yield from forwards[:warm]
        for number, action in enumerate(inputs):
            yield from forwards[warm + number : warm + number + 1]
            yield action
            yield from weights[number - steps * rank : number - steps * rank + 1] if number >= steps * rank else ()
        yield from weights[max(0, len(inputs) - steps * rank) :]

    return _rows(map(row, range(ranks)))


def _rows(rows: Iterable[Row]) -> Actions:
    return Actions(tuple(tuple(row) for row in rows))
