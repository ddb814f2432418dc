"""`Outcome`: one row of a table of measurements beside what was predicted for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A measured run and its prediction; None where a table or the model has no value."""

    row_id: str
    file: str  # name of the table, without folder
    line: int  # in the file, the header being line 1
    source: str
    device: str
    workload: str  # equal for runs of the same model, batch, length and number of devices: layouts to be ranked
    scored: bool
    status: str  # ok, OOM, or a failure
    measured_step_s: float | None
    measured_peak_bytes: float | None
    predicted_step_s: float | None = None
    predicted_peak_bytes: float | None = None
    fits: bool | None = None
    reason: str = ""  # why it can't be expressed
    assumptions: tuple[str, ...] = ()  # what was assumed where the table says nothing

    @property
    def expressible(self) -> bool:
        return not self.reason
