"""`Pace`: what a rank keeps of its last steps to tell stragglers by, and how rank 0 comes to know of all ranks'.

Every tenth step a rank puts a note of a few kilobytes into the store; rank 0 reads all of them one step later, when
every rank must have written: nobody waits. Only where links are looked at are clocks compared now and then.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import deque
from collections.abc import Sequence
from statistics import median

from wavetrain.runtime.executor import Moment
from wavetrain.runtime.job import Job
from wavetrain.runtime.links import on_one_host
from wavetrain.runtime.record import clock_ahead_s
from wavetrain.runtime.stragglers import (
    Finding,
    Link,
    Mark,
    Told,
    busy_of,
    marks_of,
    message_seconds,
    slow_links,
    slow_ranks,
)
from wavetrain.runtime.world import World

LOG = logging.getLogger(__name__)
EVERY = 10  # steps between notes
ALIGNED = 100  # steps between looks at the clocks, which drift apart
MOST_LINKED = 256  # ranks whose clocks are compared, one after another
KEPT_STEPS = 20  # half of them is what it takes to be named
FIRST_STEPS = 5  # after the very first, in which memory is found and kernels are chosen
KEPT_MARKS, KEPT_SAMPLES = 3, 9  # steps whose messages are in a note; that rank 0 keeps


class Pace:
    """One rank's; rank 0's also has what was found so far."""

    def __init__(self, job: Job, world: World) -> None:
        replica, stage_rank, part = job.place_of(world.rank)
        self._world, self._pipeline = world, (replica, part)
        self._planned_s = job.planned_busy[stage_rank] if job.planned_busy else None
        self._is_own_device = job.emulated is not None or job.peak_flops is not None  # whose peak is known is here
        over_network = job.transport == "gloo" or not on_one_host(world)  # through memory there are no links
        self._has_links = over_network and world.size <= MOST_LINKED
        self._ahead_s = 0.0
        self._steps = 0
        self._busy: deque[float] = deque(maxlen=KEPT_STEPS)
        self._first: list[float] = []
        self._recent: deque[tuple[int, Sequence[Moment]]] = deque(maxlen=KEPT_MARKS)
        self._samples: dict[int, dict[Link, float]] = {}  # by step
        self._found: dict[str, Finding] = {}

    @property
    def busy_s(self) -> float:
        """Of a step, the median of those kept; 0 where there was but the first."""
        return median(self._busy or [0.0])

    def after(self, moments: Sequence[Moment]) -> None:
        """Called by all ranks after each step, with what it recorded."""
        self._steps += 1
        if self._has_links and (self._steps == 1 or self._steps % ALIGNED == 0):
            self._world.progress.together()
            self._ahead_s = clock_ahead_s(self._world.rank, self._world.size)
        if self._steps == 1:
            return
        self._busy.append(busy_of(moments))
        if len(self._first) < FIRST_STEPS:
            self._first.append(self._busy[-1])
        if self._has_links:
            self._recent.append((self._world.progress.step - 1, moments))
        if self._steps % EVERY == 0:
            self.tell(self._ahead_s)
        if self._world.rank == 0 and self._steps % EVERY == 1:
            for found in self._judge():
                LOG.warning("%s", found)

    def tell(self, ahead_s: float) -> None:
        """Put down what is kept, on rank 0's clock, of which this one is so much ahead."""
        first = min(self._first) if len(self._first) == FIRST_STEPS else None
        marks = [
            (step, [(name, began_s - ahead_s, at_s - ahead_s) for name, began_s, at_s in marks_of(moments)])
            for step, moments in self._recent
        ]
        note = {
            "rank": self._world.rank,
            "busy_s": list(self._busy),
            "planned_s": self._planned_s,
            "first_s": first,
            "host": socket.gethostname(),
            "last_step": self._world.progress.step - 1,
        }
        self._world.store.set(
            f"pace/{self._world.rank}", json.dumps({"told": note, "pipeline": self._pipeline, "marks": marks})
        )

    def conclude(self) -> list[Finding]:
        """All that was found in the run, said once more; rank 0 calls this when every rank has told its last."""
        self._judge()
        for found in self._found.values():
            LOG.warning("%s", found)
        return list(self._found.values())

    def _judge(self) -> list[Finding]:
        """What is found in the notes of all ranks, as far as it is new."""
        texts = self._world.store.multi_get([f"pace/{rank}" for rank in range(self._world.size)])
        notes = [json.loads(text) for text in texts]
        told = [Told(**note["told"] | {"busy_s": tuple(note["told"]["busy_s"])}) for note in notes]
        rows: dict[tuple[int, tuple[int, ...]], dict[int, list[Mark]]] = {}  # by step and pipeline, then rank
        for rank, note in enumerate(notes):
            for step, marks in note["marks"]:
                rows.setdefault((step, tuple(note["pipeline"])), {})[rank] = [Mark(*mark) for mark in marks]
        for (step, _), marks in rows.items():
            self._samples.setdefault(step, {}).update(message_seconds(marks))
        self._samples = {step: self._samples[step] for step in sorted(self._samples)[-KEPT_SAMPLES:]}
        links = slow_links(self._samples, {one.rank: one.host for one in told})
        found: list[Finding] = [*slow_ranks(told, is_own_device=self._is_own_device), *links]
        new = [finding for finding in found if finding.key not in self._found]
        self._found |= {finding.key: finding for finding in found}
        return new
