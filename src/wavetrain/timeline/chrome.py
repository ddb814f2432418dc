"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open; gzip where the name ends in .gz.

Format: "Trace Event Format" (Chromium project): complete events `X` with `ts` and `dur` in microseconds, counters
`C`, names of processes (ranks) and threads (lanes) as metadata `M`. Seconds become microseconds by shifting the
decimal point, not by a floating-point product, so that reading a file gives back exactly the timeline written.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from wavetrain.base.errors import InputError, Problem
from wavetrain.base.units import EXACT
from wavetrain.timeline.timeline import Counter, Event, Timeline

_MICRO = 6  # decimal places between seconds and microseconds
# What a file that is none of ours ends in: other keys and types, numbers beyond all bounds, no end, no end of depth.
_BROKEN = (KeyError, TypeError, ValueError, ArithmeticError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile)


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write the timeline for Perfetto."""
    lines = ",\n".join(_lines(timeline))
    data = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _lines(timeline: Timeline) -> Iterator[str]:
    lanes = sorted({event.lane for event in timeline.events})
    threads = {lane: number for number, lane in enumerate(lanes)}
    for rank in timeline.ranks:
        yield json.dumps({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, thread in threads.items():
            meta = {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}}
            yield json.dumps(meta)
    for event in timeline.events:
        start, end = Decimal(repr(event.start_s)), Decimal(repr(event.end_s))
        yield (
            f'{{"ph": "X", "name": {json.dumps(event.name)}, "cat": {json.dumps(event.lane)}, "pid": {event.rank}, '
            f'"tid": {threads[event.lane]}, "ts": {_micro(start)}, "dur": {_micro(EXACT.subtract(end, start))}}}'
        )
    for counter in timeline.counters:
        yield (
            f'{{"ph": "C", "name": {json.dumps(counter.name)}, "pid": {counter.rank}, '
            f'"ts": {_micro(Decimal(repr(counter.time_s)))}, "args": {{"value": {counter.value!r}}}}}'
        )


def _micro(seconds: Decimal) -> str:
    return str(EXACT.scaleb(seconds, _MICRO))


def _seconds(micro: Decimal | int) -> float:
    return float(EXACT.scaleb(Decimal(micro), -_MICRO))


def read_chrome(path: Path) -> Timeline:
    """Read a timeline that `write_chrome` wrote."""
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        items: list[dict[str, Any]] = json.loads(data, parse_float=Decimal)["traceEvents"]
        events = tuple(_event(item) for item in items if item["ph"] == "X")
        counters = tuple(
            Counter(_seconds(item["ts"]), _rank(item), _text(item, "name"), float(item["args"]["value"]))
            for item in items
            if item["ph"] == "C"
        )
        return Timeline(events, counters)
    except _BROKEN as error:
        rule = f"not a trace that Wavetrain wrote: {type(error).__name__} {error}"
        raise InputError(Problem(where=str(path), rule=rule)) from None


def _event(item: dict[str, Any]) -> Event:
    start = Decimal(item["ts"])
    end = EXACT.add(start, Decimal(item["dur"]))
    return Event(_seconds(start), _seconds(end), _rank(item), _text(item, "cat"), _text(item, "name"))


def _rank(item: dict[str, Any]) -> int:
    rank = item["pid"]
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError("pid must be a whole number")
    return rank


def _text(item: dict[str, Any], key: str) -> str:
    text = item[key]
    if not isinstance(text, str):
        raise TypeError(f"{key} must be text")
    return text
