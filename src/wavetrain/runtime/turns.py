"""Things that are timed in turns: what a machine's neighbours do comes and goes within seconds, so that whatever is
timed at one moment only would not be the same the next time. Nor would what is timed in one process only, whose memory
lies where it happens to: every turn has new ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from wavetrain.runtime.fork import apart
from wavetrain.runtime.samples import Sample
from wavetrain.runtime.world import World

Told = Callable[[str, float], None]  # what is measured now, and the share that is done


def lesser_half(seconds: Sequence[float]) -> float:
    """The mean of it. Other programs only ever lengthen what they meet."""
    return fmean(sorted(seconds)[: -(-len(seconds) // 2)])


class Part(NamedTuple):
    """Something that all ranks time together; what rank 0 returns of a turn counts."""

    name: str
    work: Callable[[World, Told], list[Sample]]
    most_s: float = inf  # in all turns, after which none begins
    counts: Callable[[Sequence[float]], float] = lesser_half  # of the same thing in several turns


def in_turns(world: World, parts: Sequence[Part], turns: int, told: Told, *, forks: bool) -> list[Sample]:
    """Every part's turn, again and again; a part that is there twice has two of each.

    `forks`: in new processes, each time. CUDA has none.
    """
    found: dict[Part, list[Sample]] = {part: [] for part in parts}
    spent_s = defaultdict[Part, float](float)
    for number, part in enumerate([*parts] * turns):
        name = f"{part.name}, turn {number}"
        if not _agreed(world, name, spent_s[part] < part.most_s):
            continue
        begun_s = time.monotonic()
        world.progress.computing(number, part.name)

        def turn(own: World, part: Part = part, number: int = number) -> list[dict[str, Any]]:
            samples = part.work(own, lambda what, share: told(what, (number + share) / (turns * len(parts))))
            return [sample.row for sample in samples]

        found[part] += map(Sample.of, apart(world, name, turn) if forks else turn(world))
        spent_s[part] += time.monotonic() - begun_s
    return [sample for part, samples in found.items() for sample in usual(samples, part.counts)]


def _agreed(world: World, name: str, wanted: bool) -> bool:
    """What rank 0 wants."""
    key = f"{name}: whether"
    if world.rank == 0:
        world.store.set(key, str(int(wanted)))
    return world.store.get(key) == b"1"


def usual(samples: Sequence[Sample], counts: Callable[[Sequence[float]], float]) -> list[Sample]:
    """One of each thing."""
    alike: dict[Sample, list[float]] = defaultdict(list)
    for sample in samples:
        alike[replace(sample, seconds=0.0)].append(sample.seconds)
    return [replace(thing, seconds=counts(took)) for thing, took in alike.items()]


def lower_quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]
