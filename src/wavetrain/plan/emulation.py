"""`Emulation`: a plan's step as times to wait and sizes to exchange. `sim.emulation` finds it, `runtime.emulator` runs.

Times are those of compute alone: what is exchanged takes whatever it takes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Travel:
    """Parameters of a layer that lie cut over a group of replicas and travel together."""

    elements: int  # before cutting
    group: int
    keep: bool = False  # gathered once per step
    collectives: int = 1  # that they travel in, each way
    in_backward: bool = True  # gathered again there; not so where only values of the forward need them
    hidden: bool = False  # behind compute, says the simulator: not sent


@dataclass(frozen=True)
class LayerWork:
    """One layer of a stage, for one microbatch."""

    forward_s: float
    input_s: float  # what is computed again included
    weight_s: float
    sharded: tuple[Travel, ...] = ()
    replicated: int = 0  # parameters that every replica has whole


@dataclass(frozen=True)
class Emulation:
    """What every stage does for a microbatch, layer by layer, and every rank at the end of a step."""

    stages: tuple[tuple[LayerWork, ...], ...]
    optimizer_s: float = 0.0
    host_s: float = 0.0
