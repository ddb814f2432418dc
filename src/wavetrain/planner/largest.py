"""The largest batch that a step can take at once: no pipeline, no gradient accumulation."""

from __future__ import annotations

import time
from dataclasses import replace

from wavetrain.model.limits import divisors
from wavetrain.planner.question import Question
from wavetrain.planner.search import Answer, search

MOST_PER_REPLICA = 2**20
MOST_PROBE_S = 5.0  # to see whether one more fits when blocks and operators are chosen one by one


def largest_batch(question: Question, *, time_limit_s: float | None = None) -> Answer:
    """The answer for the largest batch of which every replica runs its part as one microbatch.

    Memory grows with the microbatch, so for every number of replicas the largest that fits is found by doubling and
    halving, among uniform plans; then, for the best of them, blocks and operators may be chosen one by one.
    """
    started = time.perf_counter()
    total = question.pins.devices or question.cluster.num_devices
    best, replicas, size = 0, 1, 1
    for dp in divisors(total):
        if question.pins.dp not in (None, dp):
            continue
        first = best // dp + 1
        found = _largest(replace(question, mixed=False), dp, first, total, time_limit_s)
        if found * dp > best:
            best, replicas, size = found * dp, dp, found
    if best and question.is_free:
        limit = MOST_PROBE_S if time_limit_s is None else min(MOST_PROBE_S, time_limit_s)
        size = max(size, _largest(question, replicas, size + 1, total, limit))
    answer = search(_pinned(question, replicas, size, total), time_limit_s=time_limit_s)
    return replace(answer, search_s=time.perf_counter() - started)


def _largest(question: Question, dp: int, first: int, devices: int, time_limit_s: float | None) -> int:
    """The largest microbatch, from `first` on, that fits; 0 if none does."""

    def fits(size: int) -> bool:
        return bool(search(_pinned(question, dp, size, devices), time_limit_s=time_limit_s).found)

    pinned = question.pins.microbatch
    if pinned is not None:
        return pinned if pinned >= first and fits(pinned) else 0
    if not fits(first):
        return 0
    low, high = first, 2 * first
    while high < MOST_PER_REPLICA and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _pinned(question: Question, dp: int, size: int, devices: int) -> Question:
    pins = replace(question.pins, pp=1, dp=dp, microbatch=size, devices=devices)
    return replace(question, pins=pins, global_batch=dp * size)
