"""A plan in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from wavetrain.plan.plan import Plan, Variant

NUMBERS = ("no", "one", "two", "three", "four")


def sentence(plan: Plan) -> str:
    """A plan in words."""
    layout = plan.layout
    said = [_devices(plan)]
    if layout.tp > 1:
        said.append(f"tensor parallel {layout.tp}" + (" with sequence parallelism" if layout.sequence_parallel else ""))
    if layout.cp > 1:
        said.append(f"context parallel {layout.cp}")
    said += list(_held(plan))
    if plan.recompute.value != "none":
        said.append(f"{plan.recompute.value} recompute")
    said.append(f"{counted(layout.num_microbatches, 'microbatch', 'microbatches')} of {layout.microbatch}")
    return ", ".join(said)


def _devices(plan: Plan) -> str:
    layout = plan.layout
    devices = counted(layout.num_devices, "device", "devices")
    if layout.pp == 1:
        return devices if layout.dp == 1 else f"{devices} as {layout.dp} replicas"
    pipelines = counted(layout.dp, "pipeline", "pipelines")
    return f"{devices} as {pipelines} of {layout.pp} ranks {_schedule(plan)}"


def _schedule(plan: Plan) -> str:
    layout = plan.layout
    if layout.schedule.startswith("wave"):
        waves = NUMBERS[layout.waves] if layout.waves < len(NUMBERS) else str(layout.waves)
        return f"in {waves} wave{'s' if layout.waves > 1 else ''} ({layout.schedule})"
    return f"({layout.schedule}" + (f", {layout.chunks} stages each)" if layout.chunks > 1 else ")")


def _held(plan: Plan) -> Iterator[str]:
    """How parameters are held: all alike, or so many blocks each way."""
    layout, choice = plan.layout, plan.choice
    if plan.choices:
        ways = Counter(map(_way, plan.blocks))
        yield f"of {len(plan.blocks)} blocks " + ", ".join(f"{count} {way}" for way, count in ways.most_common())
    elif choice.shard > 1:
        where = "over all replicas" if choice.shard == layout.dp else f"in groups of {choice.shard}"
        yield f"parameters sharded {where}" + (", kept for the backward" if choice.keep else "")
    if layout.shard_optimizer:
        yield "optimizer states sharded"


def _way(variant: Variant) -> str:
    """What is done with a block, in words."""
    if variant.named:
        return "chosen by operator"
    choice = variant.choice
    held = "replicated" if choice.shard == 1 else "kept" if choice.keep else "gathered twice"
    sliced = f" in {choice.slices} slices" if choice.slices > 1 else ""
    return held + sliced + (" and recomputed" if choice.recompute else "")


def counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
