"""Things that are timed in turns: what a machine's neighbours do comes and goes within seconds, so that whatever is
timed at one moment only would not be the same the next time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from wavetrain.runtime.samples import Sample

Told = Callable[[str, float], None]  # what is measured now, and the share that is done


class Turns(Protocol):
    """All ranks take each turn together."""

    def turn(self, told: Told) -> None: ...

    def samples(self) -> list[Sample]:
        """What all turns come to."""
        ...


def in_turns(parts: Sequence[Turns], turns: int, told: Told) -> list[Sample]:
    """Every part's turn, again and again; a part that is there twice has two of each."""
    for number in range(turns):
        for at, part in enumerate(parts):
            begun = number * len(parts) + at

            def told_of_all(what: str, share: float, begun: int = begun) -> None:
                told(what, (begun + share) / (turns * len(parts)))

            part.turn(told_of_all)
    return [sample for part in dict.fromkeys(parts) for sample in part.samples()]


def lower_quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]
