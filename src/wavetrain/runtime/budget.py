"""A rank's memory against what it may hold: tensors, counted exactly, not what an allocator makes of them.

Checked when a rank is built (what stays for the whole run), when parameters are gathered, and after every action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from wavetrain.base.errors import RunError
from wavetrain.base.units import format_bytes
from wavetrain.runtime.executor import Moment
from wavetrain.runtime.units import Unit


@dataclass(frozen=True)
class Budget:
    """`limit` bytes for one rank, of which `static` are taken by parameters, gradients and optimizer states."""

    rank: int
    limit: int
    static: int

    def check_static(self, by_name: Iterable[tuple[str, int]]) -> None:
        """Whether a rank can begin; `by_name` is what each of its parameters takes with all that belongs to it."""
        if self.static > self.limit:
            name, most = max(by_name, key=lambda item: item[1])
            largest = f"{name} alone takes {format_bytes(most)}"
            raise self._error(self.static, "before the first step", f"all of it for parameters: {largest}")

    def check_moments(self, moments: Sequence[Moment]) -> None:
        """Whether all actions of a step kept to it."""
        fullest = max(moments, key=lambda moment: moment.held_bytes, default=None)
        if fullest is not None and self.static + fullest.held_bytes > self.limit:
            held = f"{format_bytes(fullest.held_bytes)} of it for activations and gathered parameters"
            raise self._error(self.static + fullest.held_bytes, f"after {fullest.name}", held)

    def watch(self, units: Iterable[Unit], held: Callable[[], int]) -> None:
        """Look whenever a unit has been gathered for its forward; `held` says what there is beside `static`."""
        for unit in units:
            unit.modules[0].register_forward_pre_hook(self._looker(unit.name or "the rest of the model", held))

    def _looker(self, name: str, held: Callable[[], int]) -> Callable[[nn.Module, object], None]:
        def look(_module: nn.Module, _inputs: object) -> None:
            total = self.static + held()
            if total > self.limit:
                raise self._error(total, f"with {name} gathered", "more slices, or a larger shard, would gather less")

        return look

    def _error(self, total: int, when: str, why: str) -> RunError:
        return RunError(
            f"rank {self.rank} holds {format_bytes(total)} {when}, {format_bytes(total - self.limit)} more than its"
            f" limit of {format_bytes(self.limit)}; {why}"
        )
