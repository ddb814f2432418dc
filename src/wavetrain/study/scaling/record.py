"""`Record`: what a study found at one point, a line of its results; plain values that any reader of tables takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

Json = dict[str, Any]
RAN_OUT = "no plan was found in"  # how `why` begins where time was up before it was known whether anything fits


@dataclass(frozen=True, kw_only=True)
class Record:
    """One point of a study: where it is, whether anything fits, and what the best plan of its strategy does there."""

    # where
    model: str
    seq_len: int
    node: str
    devices: int
    strategy: str
    objective: str
    batch: str  # how sequences per step grow: "2 per device", "1024 in all"
    global_batch: int
    # whether
    fits: bool
    why: str = ""  # where nothing fits: in words
    # the plan
    plan: str = ""  # in words
    tp: int = 0
    cp: int = 0
    pp: int = 0
    dp: int = 0
    schedule: str = ""
    microbatch: int = 0
    num_microbatches: int = 0
    shard: int = 0  # ranks that share a block's parameters
    recompute: str = ""
    plan_file: str = ""  # beside the records
    # what it does
    step_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    exposed_share: float | None = None  # of a step, communication beside which nothing is computed
    bubble_share: float | None = None  # of a step, waiting for other stages
    needed_bytes: float | None = None
    capacity_bytes: float | None = None
    power_w_per_device: float | None = None
    power_w: float | None = None
    tokens_per_joule: float | None = None
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    # the target number of tokens, without failures
    train_s: float | None = None
    train_usd: float | None = None
    train_mwh: float | None = None
    # failures
    checkpoint_bytes: float | None = None
    checkpoint_s: float | None = None  # that a step waits for a checkpoint
    interval_s: float | None = None  # between checkpoints, the best
    goodput_share: float | None = None  # of the time, steps that need not be done again
    goodput_tokens_per_s: float | None = None
    # why it is no faster
    bound_by: str = ""  # the term of `terms` that costs most beside computing; "compute" where none costs 2 %
    terms: Mapping[str, float] = field(default_factory=dict)  # seconds by name, they sum to the step
    memory: Mapping[str, float] = field(default_factory=dict)  # bytes by kind on the fullest rank
    elasticity: Mapping[str, float] = field(default_factory=dict)  # percent of throughput per percent of a parameter
    what_if: Mapping[str, float] = field(default_factory=dict)  # throughput over the present, planned again
    # how sure
    gap: float | None = None  # no plan of the strategy is better by more than this share
    space: int = 0  # layouts that there are
    error_share: float | None = None  # of predictions of published runs, four of five are nearer

    def as_json(self) -> Json:
        return asdict(self)

    @property
    def ran_out(self) -> bool:
        """Whether it is not known that nothing fits."""
        return self.why.startswith(RAN_OUT)

    @property
    def where(self) -> str:
        return f"{self.model}, {self.seq_len} tokens, {self.devices} devices of {self.node}, {self.strategy}"


def record_of(data: Mapping[str, Any]) -> Record:
    """A record from its JSON; keys that it has no use for are refused."""
    names = {item.name for item in fields(Record)}
    unknown = sorted(set(data) - names)
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    return Record(**data)


def flat(record: Record) -> dict[str, str | int | float | bool | None]:
    """One value per column: what is by name gets a column per name, `terms.compute`."""
    row: dict[str, str | int | float | bool | None] = {}
    for name, value in asdict(record).items():
        if isinstance(value, dict):
            row |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            row[name] = value
    return row
