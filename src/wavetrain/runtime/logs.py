"""What a run leaves to read: a line of JSON per step, the same for TensorBoard, and where it ran.

TensorBoard's files are written by hand: a record is a length, its checksum, an Event message of protobuf and its
checksum (tensorflow/core/lib/io/record_writer.h); an Event has a time, a step and scalars (core/util/event.proto).
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import math
import os
import platform
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from wavetrain.base.codec import dumps
from wavetrain.base.errors import RunError

LOG = logging.getLogger(__name__)
STEPS_FILE = "log.jsonl"
ENVIRONMENT_FILE = "environment.json"
MOST_LINE = 1 << 16  # bytes; a step's line has a few hundred
PACKAGES = ("wavetrain", "torch", "numpy", "safetensors", "transformers")  # whose versions change what a run does

_POLYNOMIAL = 0x82F63B78  # crc32c (Castagnoli), its bits reversed: RFC 3720, appendix B.4
_MASK_DELTA = 0xA282EAD8
_LARGEST_FLOAT = 3.4028234663852886e38
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known of one step when it ends; None is not known and not written."""

    step: int
    loss: float | None = None
    tokens_per_s: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    peak_bytes: int | None = None
    mfu: float | None = None  # of the devices' peak rate

    def known(self) -> dict[str, float]:
        """Names and values of what is known, without the step."""
        return {name: value for name, value in asdict(self).items() if name != "step" and value is not None}


class RunLog:
    """The files that grow with a run; every step is on disk, and whole, before the next begins."""

    def __init__(self, directory: Path) -> None:
        self._steps_path = directory / STEPS_FILE
        moment = time.time_ns()
        self._events_path = directory / f"events.out.tfevents.{moment // 10**9}.{moment % 10**9:09d}.{os.getpid()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self._steps_path)
            self._steps = self._steps_path.open("ab", buffering=0)
            self._events = self._events_path.open("xb", buffering=0)
        except OSError as error:
            raise _unwritable(directory, error) from None
        self._append(self._events, self._events_path, record(version_event(time.time())))

    def write(self, done: StepRecord) -> None:
        """Add a step to both files; a value that is no number ends the run."""
        known = done.known()
        for name, value in known.items():
            if not math.isfinite(value):
                raise RunError(f"step {done.step}: {name} is {value}")
        line = json.dumps({"step": done.step, **known}, allow_nan=False) + "\n"
        self._append(self._steps, self._steps_path, line.encode())
        self._append(self._events, self._events_path, record(scalar_event(time.time(), done.step, known)))

    def close(self) -> None:
        self._steps.close()
        self._events.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _append(stream: io.FileIO, path: Path, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError as error:
            raise _unwritable(path, error) from None


def read_steps(path: Path) -> list[StepRecord]:
    """The steps of a log; where a run went back to an earlier one, what it did the last time counts."""
    found = [StepRecord(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted({item.step: item for item in found}.values(), key=lambda item: item.step)


def _cut_torn_line(path: Path) -> None:
    """A run that was killed while it wrote leaves half a line, which a further one would spoil."""
    if not path.is_file():
        return
    with path.open("r+b") as stream:
        start = max(0, stream.seek(0, os.SEEK_END) - MOST_LINE)
        stream.seek(start)
        data = stream.read(MOST_LINE)
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            LOG.warning("%s: cut a last line that was not finished (%d bytes)", path, len(data) - whole)
            stream.truncate(start + whole)


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: can't be written: {error.strerror or error}")


# --- TensorBoard ---


def record(data: bytes) -> bytes:
    """One record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def version_event(wall_s: float) -> bytes:
    """What an event file begins with."""
    return _double(1, wall_s) + _bytes(3, b"brain.Event:2")


def scalar_event(wall_s: float, step: int, values: dict[str, float]) -> bytes:
    """An Event with one scalar per name."""
    summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
    return _double(1, wall_s) + _tag(2, _VARINT) + _varint(step) + _bytes(5, summary)


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; the high bit says that more follow."""
    assert value >= 0, "a negative number would need ten bytes"
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _double(field: int, value: float) -> bytes:
    return _tag(field, _FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    fitting = value if abs(value) <= _LARGEST_FLOAT else math.copysign(math.inf, value)
    return _tag(field, _FIXED32) + struct.pack("<f", fitting)


def _bytes(field: int, data: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(data)) + data


def _checksum(data: bytes) -> bytes:
    """Masked: a checksum of data that holds its own checksum would say little."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_table_entry, range(256)))


# --- where it ran ---


def environment() -> dict[str, Any]:
    """Versions and machine, for whoever repeats a run. No variable's value is read: some are secrets."""
    return {
        "schema": "wavetrain.environment/1",
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "packages": versions(),
        "cpu": _cpu(),
        "num_cores": os.cpu_count() or 1,
        "num_usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "num_threads": torch.get_num_threads(),
        "accelerators": accelerators(),
    }


def accelerators() -> list[str]:
    """The names of this machine's."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def write_environment(directory: Path) -> Path:
    """Put it beside the log."""
    path = directory / ENVIRONMENT_FILE
    try:
        path.write_text(dumps(environment()), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def versions() -> dict[str, str]:
    """Of what changes what a run does."""
    return {name: version for name in PACKAGES if (version := _version(name))}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
