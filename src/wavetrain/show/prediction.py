"""A prediction, shown: the numbers people ask for first, then where time and memory go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from wavetrain.base.units import format_bytes, format_seconds
from wavetrain.plan.plan import Plan
from wavetrain.show.tables import facts, grid
from wavetrain.sim.advice import Remedy
from wavetrain.sim.breakdown import TERMS
from wavetrain.sim.predict import Prediction

Json = dict[str, Any]
SCHEMA = "wavetrain.prediction/1"
BAR = 12


def prediction_document(plan: Plan, found: Prediction, remedies: Sequence[Remedy]) -> Json:
    """A prediction for machines."""
    low, high = found.error_band
    return {
        "schema": SCHEMA,
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "devices": plan.layout.num_devices,
        "step_s": found.step_s,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_device": found.tokens_per_s_per_device,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "peak_bytes": round(found.peak_bytes),
        "reserve_bytes": round(found.reserve_bytes),
        "capacity_bytes": round(found.capacity_bytes),
        "fits": found.fits,
        "memory": {name: round(value) for name, value in found.memory.items()},
        "breakdown": found.breakdown,
        "algorithms": found.algorithms,
        "bubble_fraction": found.bubble_fraction,
        "power_w_per_device": found.power_w_per_device,
        "tokens_per_joule": found.tokens_per_joule,
        "usd_per_hour": found.usd_per_hour,
        "usd_per_million_tokens": found.usd_per_million_tokens,
        "error_band": {"share": found.error_share, "step_s_low": low, "step_s_high": high},
        "remedies": [
            {"change": remedy.change, "step_s": remedy.step_s, "needed_bytes": round(remedy.needed_bytes)}
            for remedy in remedies
        ],
    }


def prediction_card(plan: Plan, found: Prediction, remedies: Sequence[Remedy]) -> RenderableType:
    """The same for people."""
    parts: list[RenderableType] = [facts(f"{plan.model.name} on {plan.cluster.name}", _facts(plan, found)), ""]
    parts += [_terms(found), "", _memory(found)]
    if not found.fits:
        parts += ["", _advice(found, remedies)]
    return Group(*parts)


def in_words(plan: Plan) -> str:
    """A plan in one line."""
    layout, choice = plan.layout, plan.choice
    said = [f"{layout.num_devices} devices"]
    degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp}
    said += [f"{name} {value}" for name, value in degrees.items() if value > 1]
    if choice.shard > 1:
        said.append(f"parameters sharded over {choice.shard}" + (", kept for the backward" if choice.keep else ""))
    if layout.shard_optimizer:
        said.append("optimizer sharded")
    if layout.pp > 1:
        waves = f", {layout.waves} waves" if layout.schedule.startswith("wave") else ""
        chunks = f", {layout.chunks} chunks" if layout.chunks > 1 else ""
        said.append(f"schedule {layout.schedule}{waves}{chunks}")
    if plan.recompute.value != "none":
        said.append(f"{plan.recompute.value} recompute")
    return ", ".join(said)


def _facts(plan: Plan, found: Prediction) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    low, high = found.error_band
    yield "plan", in_words(plan)
    batch = f"{layout.global_batch} x {plan.seq_len} tokens"
    yield "batch", f"{batch}, {layout.num_microbatches} microbatches of {layout.microbatch}"
    band = f"between {format_seconds(low)} and {format_seconds(high)}"
    yield "step", f"{format_seconds(found.step_s)}; 4 of 5 published runs lie {band}"
    per_device = f"{found.tokens_per_s_per_device:,.0f} per device"
    yield "tokens/s", f"{found.tokens_per_s:,.0f}, {per_device}; MFU {found.mfu:.1%}, HFU {found.hfu:.1%}"
    needed = found.peak_bytes + found.reserve_bytes
    verdict = "fits" if found.fits else f"does NOT fit, {format_bytes(needed - found.capacity_bytes)} too much"
    share = f"{format_bytes(needed)} of {format_bytes(found.capacity_bytes)}"
    yield "memory", f"{share} on the fullest rank: {verdict}"
    watts = f"{found.power_w_per_device:,.0f} W per device"
    yield "power", f"{watts}, {found.tokens_per_joule:,.3g} tokens/J"
    usd = f"${found.usd_per_hour:,.2f} per hour"
    yield "price", f"{usd}, ${found.usd_per_million_tokens:,.4f} per million tokens"


def _terms(found: Prediction) -> RenderableType:
    table = grid("where the time goes", ">seconds", ">share", "", "")
    for name, value in found.breakdown.items():
        share = value / found.step_s
        words = f"{TERMS[name]}, {found.algorithms[name]}" if name in found.algorithms else TERMS[name]
        table.add_row(name, format_seconds(value), f"{share:.1%}", Text(_bar(share), style="cyan"), words)
    return table


def _memory(found: Prediction) -> RenderableType:
    table = grid("what the fullest rank holds", ">bytes", ">share", "")
    parts = found.memory | {"reserve": found.reserve_bytes}
    for name, value in parts.items():
        share = value / found.capacity_bytes
        if value:
            table.add_row(name, format_bytes(value), f"{share:.1%}", Text(_bar(share), style="magenta"))
    return table


def _advice(found: Prediction, remedies: Sequence[Remedy]) -> RenderableType:
    if not remedies:
        return Text("No single change nor two of them would make it fit: more devices, or a smaller model or length.")
    table = grid("what would make it fit", ">needs", ">step", ">slower")
    for remedy in remedies:
        slower = remedy.step_s / found.step_s - 1
        table.add_row(remedy.change, format_bytes(remedy.needed_bytes), format_seconds(remedy.step_s), f"{slower:+.1%}")
    return table


def _bar(share: float) -> str:
    return "#" * min(BAR, max(0, round(share * BAR)))
