"""Who holds a run up: ranks that take longer for their work than others do, links that take longer for a message.

Pure functions of what ranks recorded. Nobody is named for waiting: a rank's busy time is that inside its computing
actions, and a message's begins when it has been sent and its receiver waits for it. Everything is compared with the
median rank or link, step by step, and named only where it is slow in at least half of the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median, median_low
from typing import TYPE_CHECKING, NamedTuple

from wavetrain.base.codec import Json
from wavetrain.base.units import format_seconds
from wavetrain.schedule.action import Action, Kind

if TYPE_CHECKING:  # executors need torch, the terminal's card does not
    from wavetrain.runtime.executor import Moment

SLOW_RANK = 1.25  # times the median rank's
SLOW_LINK = 2.0  # times the median link's: its receiver's waking up is part of a message's time
LEAST_LINK_S = 2e-3  # more than the median link's: clocks are only known to about that on busy hosts
LEAST_STEPS = 5  # of a rank
LEAST_SAMPLES = 3  # of a link: steps in which its messages were looked at
LEAST_PEERS = 3  # with two, either may be the slow one
LIKE = 0.01  # planned times that differ by less are of the same work
SAMPLED = 8  # microbatches of a step whose messages are looked at
HERE_S = 2e-4  # a message that is found within this time was there before it was asked for

Link = tuple[int, int]  # from, to


class Against(StrEnum):
    """What a rank was compared with."""

    PLAN = "plan"  # the others, each by what the plan predicts for it
    PREDICTED = "prediction"  # that alone: there are fewer than three ranks
    LIKE = "like ranks"  # those that the plan gives the same work
    FIRST = "first steps"  # the others, each by what it took itself when the run began


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a rank says of its last steps."""

    rank: int
    busy_s: tuple[float, ...]  # of each step
    planned_s: float | None = None  # the same as predicted
    first_s: float | None = None  # the least of the run's first steps, without the very first
    host: str = ""
    last_step: int = 0


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that needs more than its share of time; medians over steps."""

    rank: int
    host: str
    busy_s: float
    planned_s: float | None
    ratio: float | None  # busy by planned
    slower_than_median: float  # times
    against: Against
    steps: int  # that were compared
    last_step: int

    @property
    def key(self) -> str:
        return f"rank {self.rank}"

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        peers = {
            Against.PLAN: "the median rank, measured by the plan",
            Against.PREDICTED: "predicted",
            Against.LIKE: "the median of the ranks with the same work",
            Against.FIRST: "the median rank, measured by its first steps",
        }[self.against]
        return (
            f"rank {self.rank}{where} is slow: busy {format_seconds(self.busy_s)} per step, "
            f"{self.slower_than_median:.2f} times as long as {peers} ({self.steps} steps up to {self.last_step})"
        )

    def as_json(self) -> Json:
        return asdict(self) | {"against": self.against.value}


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A directed link whose messages take longer than those of others; medians."""

    source: int
    target: int
    seconds: float
    median_s: float
    ratio: float
    steps: int
    last_step: int

    @property
    def key(self) -> str:
        return f"link {self.source} -> {self.target}"

    def __str__(self) -> str:
        return (
            f"the link from rank {self.source} to rank {self.target} is slow: a message takes "
            f"{format_seconds(self.seconds)}, {self.ratio:.1f} times the median link's {format_seconds(self.median_s)}"
        )

    def as_json(self) -> Json:
        return {
            "from": self.source,
            "to": self.target,
            "seconds": self.seconds,
            "median_s": self.median_s,
            "ratio": self.ratio,
            "steps": self.steps,
            "last_step": self.last_step,
        }


Finding = SlowRank | SlowLink


def as_document(findings: Iterable[Finding]) -> Json:
    """Findings as a run's document has them."""
    rows = list(findings)
    ranks = sorted((one for one in rows if isinstance(one, SlowRank)), key=lambda one: one.rank)
    links = sorted((one for one in rows if isinstance(one, SlowLink)), key=lambda one: (one.source, one.target))
    return {"ranks": [one.as_json() for one in ranks], "links": [one.as_json() for one in links]}


# --- ranks ---


def busy_of(moments: Sequence[Moment]) -> float:
    """Seconds that a step's computing takes: of each stage's actions of a kind the lower quartile, times their number.

    Not the sum: some take longer for no fault of the rank's, as the last backward of a stage, in which replicas wait
    for each other's gradients, or those in which a core was not to be had.
    """
    durations: dict[str, list[float]] = defaultdict(list)
    for moment in moments:
        if moment.lane == "compute":
            durations[moment.name.rstrip("0123456789")].append(moment.end_s - moment.start_s)
    return sum(len(alike) * sorted(alike)[(len(alike) - 1) // 4] for alike in durations.values())


def slow_ranks(told: Sequence[Told], *, is_own_device: bool) -> list[SlowRank]:
    """Ranks that are slow. `is_own_device`: whether what was planned was planned for the device they run on."""
    steps = min((len(one.busy_s) for one in told), default=0)
    if steps < LEAST_STEPS:
        return []
    told = [replace(one, busy_s=one.busy_s[-steps:]) for one in told]
    found: dict[int, SlowRank] = {}
    for against, rows in _comparisons(told, is_own_device=is_own_device):
        for one in _slower(rows, against):
            found.setdefault(one.rank, one)
    return [found[rank] for rank in sorted(found)]


def _comparisons(told: Sequence[Told], *, is_own_device: bool) -> Iterator[tuple[Against, list[tuple[Told, float]]]]:
    """Ranks that can be compared, each with the time that is its measure."""
    planned = [(one, one.planned_s) for one in told if one.planned_s]
    if is_own_device and len(planned) == len(told):
        yield (Against.PLAN if len(told) >= LEAST_PEERS else Against.PREDICTED), planned
        return
    while planned:  # times on another device say little, except that equal work takes equally long
        least = min(seconds for _, seconds in planned)
        alike = [(one, seconds) for one, seconds in planned if seconds <= least * (1 + LIKE)]
        if len(alike) >= LEAST_PEERS:
            yield Against.LIKE, alike
        planned = [(one, seconds) for one, seconds in planned if seconds > least * (1 + LIKE)]
    first = [(one, one.first_s) for one in told if one.first_s]
    if len(first) == len(told):
        yield Against.FIRST, first


def _slower(rows: Sequence[tuple[Told, float]], against: Against) -> Iterator[SlowRank]:
    ratios = [[busy / measure for busy in one.busy_s] for one, measure in rows]
    middle = [1.0 if against is Against.PREDICTED else median_low(step) for step in zip(*ratios, strict=True)]
    for (one, _), own in zip(rows, ratios, strict=True):
        times = [ratio / usual for ratio, usual in zip(own, middle, strict=True)]
        if 2 * sum(ratio > SLOW_RANK for ratio in times) < len(times):
            continue
        busy_s = median(one.busy_s)
        yield SlowRank(
            rank=one.rank,
            host=one.host,
            busy_s=busy_s,
            planned_s=one.planned_s,
            ratio=busy_s / one.planned_s if one.planned_s else None,
            slower_than_median=median(times),
            against=against,
            steps=len(times),
            last_step=one.last_step,
        )


# --- links ---


class Mark(NamedTuple):
    """A send, or an action that may have waited for a message."""

    name: str
    began_s: float  # when the rank was ready for it
    at_s: float  # when it began


def marks_of(moments: Sequence[Moment]) -> list[Mark]:
    """What a step says of messages. When a rank became ready for its first action of a step is not known."""
    found = []
    for before, moment in pairwise(moments):
        kind, microbatch = Action.parse(moment.name)[1:]
        if kind in _SENT and (microbatch or 0) < SAMPLED:
            found.append(Mark(moment.name, before.end_s, moment.start_s))
    return found


_SENT = {  # the send that an action needs: from which stage, of which kind
    Kind.F: (-1, "SEND_F"),
    Kind.B: (1, "SEND_B"),
    Kind.I: (1, "SEND_B"),
    Kind.SEND_F: (0, ""),
    Kind.SEND_B: (0, ""),
}


def message_seconds(marks: Mapping[int, Iterable[Mark]]) -> dict[Link, float]:
    """What a message takes on each link of a pipeline, the median of one step; `marks` by rank, on one clock.

    Only of messages that were waited for: one that came earlier has kept nobody waiting. One that seems to have come
    before it was sent shows by how much the clocks of both ends are apart, at least.
    """
    sent = {mark.name: (rank, mark.at_s) for rank, row in marks.items() for mark in row if "SEND" in mark.name}
    took: dict[Link, list[float]] = defaultdict(list)
    apart: dict[Link, float] = defaultdict(float)
    for rank, row in marks.items():
        for mark in row:
            stage, kind, microbatch = Action.parse(mark.name)
            offset, name = _SENT[kind]
            source, sent_s = sent.get(f"{stage + offset}{name}{microbatch}", (rank, 0.0))
            if source == rank:
                continue
            apart[source, rank] = max(apart[source, rank], sent_s - mark.at_s)
            if mark.began_s <= sent_s or mark.at_s - mark.began_s > HERE_S:
                took[source, rank].append(mark.at_s - max(sent_s, mark.began_s))
    return {
        (source, target): max(0.0, median_low(row) + apart[source, target] - apart[target, source])
        for (source, target), row in took.items()
    }


def slow_links(samples: Mapping[int, Mapping[Link, float]], hosts: Mapping[int, str]) -> list[SlowLink]:
    """Links that are slow, from `message_seconds` of several steps.

    All messages have one size. Links within hosts are compared with each other, those between hosts likewise.
    """
    seen: dict[Link, list[tuple[int, float, float]]] = defaultdict(list)
    for step, took in samples.items():
        for outside in (False, True):
            alike = {link: s for link, s in took.items() if (hosts.get(link[0]) != hosts.get(link[1])) is outside}
            if len(alike) >= LEAST_PEERS:
                usual = median_low(alike.values())
                for link, seconds in alike.items():
                    seen[link].append((step, seconds, usual))
    return [_link(link, rows) for link, rows in sorted(seen.items()) if _is_slow(rows)]


def _is_slow(rows: Sequence[tuple[int, float, float]]) -> bool:
    slow = [seconds > max(SLOW_LINK * usual, usual + LEAST_LINK_S) for _, seconds, usual in rows]
    return len(rows) >= LEAST_SAMPLES and 2 * sum(slow) >= len(rows)


def _link(link: Link, rows: Sequence[tuple[int, float, float]]) -> SlowLink:
    steps, seconds, usual = zip(*rows, strict=True)
    took_s, usual_s = median(seconds), median(usual)
    return SlowLink(
        source=link[0],
        target=link[1],
        seconds=took_s,
        median_s=usual_s,
        ratio=took_s / max(usual_s, HERE_S),
        steps=len(rows),
        last_step=max(steps),
    )
