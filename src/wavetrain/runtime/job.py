"""`Job`: what all ranks of a run know before they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wavetrain.plan.emulation import Emulation
from wavetrain.plan.plan import Plan
from wavetrain.runtime.chunk import Durations
from wavetrain.runtime.grid import place_of
from wavetrain.runtime.inject import Fault
from wavetrain.runtime.learn import AdamW, Rate
from wavetrain.runtime.parts import Parts
from wavetrain.runtime.transformer import parts_of
from wavetrain.schedule.action import Actions

CARRIERS = ("auto", "memory", "gloo")
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan and how it is run. What ranks must compare themselves with comes with it: they predict nothing."""

    plan: Plan
    actions: Actions  # of one pipeline, messages included
    steps: int
    seed: int = 0
    rate: Rate = field(default_factory=lambda: Rate(peak=1e-3))
    adamw: AdamW = field(default_factory=AdamW)
    clip: float = NEVER  # the most that the norm of all gradients may be
    build: Callable[[], Parts] | None = None  # the model's modules; None: the built-in ones
    source: str = ""  # where those are from, for whoever repeats the run
    dtype: torch.dtype = torch.float32  # of parameters and what they learn with; float64 is for exactness
    emulated: tuple[Durations, ...] | None = None  # of every stage, where nothing is computed
    emulation: Emulation | None = None  # beside it, where all ranks are emulated and not one pipeline only
    step_s: float = 0.0  # as predicted
    data: Path | None = None  # tokens, or any file as bytes; None: sequences that count
    transport: str = "auto"  # of CARRIERS
    faults: tuple[Fault, ...] = ()  # on purpose
    timeout_s: float = 600.0  # of a single message; the launcher's watch is far quicker
    logs: Path | None = None  # where rank 0 writes what each step came to
    save: Path | None = None  # where the trained model goes
    load: Path | None = None  # a model as transformers writes it, whose values the run begins with
    config: Path | None = None  # transformers' description of it, to go with it
    checkpoints: Path | None = None  # where the state of a run is kept, and found again
    save_every: int = 0  # steps; 0: after the last only
    keep: int = 2  # checkpoints
    memory_every: int = 0  # steps between copies in the hosts' memory; 0: none
    memory_dir: Path | None = None  # where a host's files are memory; None: /dev/shm
    memory_limit: int | None = None  # bytes that a rank may hold
    step_flops: float = 0.0  # of the model, forward and backward, in one step
    peak_flops: float | None = None  # of all devices together, per second, where known
    planned_busy: tuple[float, ...] = ()  # seconds that each rank of a pipeline computes in a step, as predicted

    def parts(self) -> Parts:
        return parts_of(self.plan.model) if self.build is None else self.build()

    @property
    def num_ranks(self) -> int:
        return self.actions.num_ranks if self.is_one_pipeline else self.plan.layout.num_devices

    @property
    def is_one_pipeline(self) -> bool:
        """Emulated, one may stand for all."""
        return self.emulated is not None and self.emulation is None

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """Replica, rank in the pipeline and part of a rank."""
        return (0, rank, 0) if self.is_one_pipeline else place_of(self.plan.layout, rank)
