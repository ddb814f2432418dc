"""`Study`: what a study sweeps, as values. `read` makes one from a file, `points` draws it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Strategy:
    """A part of all plans: a family, values that are pinned, or nothing but the best."""

    name: str
    only: tuple[str, ...] = ()  # families of `planner.question.FAMILIES`; none: all plans
    pins: Mapping[str, Any] = field(default_factory=dict)  # as `planner.question.Pins` has them
    mixed: bool = False  # whether blocks and operators may be chosen one by one


@dataclass(frozen=True)
class Batch:
    """Sequences per step: so many per device (weak scaling), or so many whatever the devices (strong)."""

    per_device: float | None = None
    total: int | None = None

    def at(self, devices: int) -> int:
        if self.total is not None:
            return self.total
        assert self.per_device is not None
        return max(1, round(self.per_device * devices))

    @property
    def words(self) -> str:
        return f"{self.total} in all" if self.total is not None else f"{self.per_device:g} per device"


@dataclass(frozen=True)
class Published:
    """A series that somebody measured, to stand beside ours."""

    name: str
    source: str
    quantity: str  # a number of `Record`
    points: tuple[tuple[int, float], ...]  # devices, value
    relative_to: int | None = None  # devices whose value the values are shares of; None: they are plain


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What interrupts a run, and what that costs; sources in `failures.yaml`."""

    device_hours: float  # between interruptions, of one device
    detection_s: float
    restart_s: float  # processes, groups, compilation; without reading the checkpoint
    write_bytes_per_s: float  # to storage, per node
    read_bytes_per_s: float
    copy_bytes_per_s: float  # to host memory, per device
    asynchronous: bool  # a step waits for the copy only


@dataclass(frozen=True, kw_only=True)
class Study:
    """What to sweep: the product of all lists."""

    name: str
    title: str
    models: tuple[str, ...]  # names or files
    seq_lens: tuple[int | None, ...]  # None: the model's own
    nodes: tuple[str, ...]  # cluster names or files, without a number of nodes
    device_kinds: tuple[str | None, ...] = (None,)  # devices of the catalog instead of the nodes' own
    memories: tuple[float | None, ...] = (None,)  # bytes of a device that may be used; None: all
    devices: tuple[int, ...]
    batches: tuple[Batch, ...]
    strategies: tuple[Strategy, ...]
    objectives: tuple[str, ...] = ("throughput",)
    tokens: float | None = None  # to train on
    stop_below: float = 0.5  # a further device must give this share of the first ones'
    failures: Failures | None = None
    what_if: tuple[str, ...] = ()  # changes of the cluster that are planned again, of `whatif.CHANGES`
    published: tuple[Published, ...] = ()
    time_limit_s: float = 60.0  # of one search
    precision: str | None = None  # bf16, fp16, fp32, fp8; None: what the device has
