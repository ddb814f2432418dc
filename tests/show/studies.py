"""Plausible records of a study, made by hand: no planner runs."""

from __future__ import annotations

import math

from wavetrain.base.units import GIB
from wavetrain.study.scaling.record import Record
from wavetrain.study.scaling.spec import Batch, Failures, Published, Strategy, Study
from wavetrain.timeline import Event, Timeline

SCALES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
FAILURES = Failures(
    device_hours=50_700,
    detection_s=60,
    restart_s=300,
    write_bytes_per_s=1e9,
    read_bytes_per_s=1e9,
    copy_bytes_per_s=1e10,
    asynchronous=True,
)
TOKENS = 2e12


def record(strategy="fsdp", devices=128, *, model="llama2-7b", seq_len=4096, node="dgx-h100", slope=0.06, base=1.0):
    """A step whose communication grows with the logarithm of the devices, by `slope` of its compute."""
    doublings = math.log2(devices / 8)
    compute, tensor = 0.80 / base, 0.07 if "tp" in strategy else 0.0
    bubble = 0.05 if "pp" in strategy else 0.0
    sharding = compute * slope * doublings**1.6 / 3
    terms = {
        "compute": compute,
        "tensor": tensor,
        "sharding": sharding,
        "bubble": bubble,
        "reduction": 0.01 * doublings,
    }
    terms = {name: value for name, value in {**terms, "optimizer": 0.012, "host": 0.0008}.items() if value}
    step_s = sum(terms.values())
    tokens = 2 * devices * seq_len / step_s
    watts = 660 * (1 - 0.12 * (1 - compute / step_s))
    share = 1 / (1 + 0.00004 * devices)
    return Record(
        model=model,
        seq_len=seq_len,
        node=node,
        devices=devices,
        strategy=strategy,
        objective="throughput",
        batch="2 per device",
        global_batch=2 * devices,
        fits=True,
        plan=f"{strategy} over {devices} devices, microbatches of 1, nothing recomputed",
        tp=2 if "tp" in strategy else 1,
        cp=1,
        pp=2 if "pp" in strategy else 1,
        dp=devices,
        step_s=step_s,
        tokens_per_s=tokens,
        tokens_per_s_per_device=tokens / devices,
        mfu=0.62 * compute / step_s,
        hfu=0.62 * compute / step_s,
        exposed_share=(sharding + tensor) / step_s,
        bubble_share=bubble / step_s,
        needed_bytes=(56 + 40 / devices) * GIB,
        capacity_bytes=80 * GIB,
        power_w_per_device=watts,
        power_w=watts * devices,
        tokens_per_joule=tokens / devices / watts,
        usd_per_hour=2.5 * devices,
        usd_per_million_tokens=2.5 * devices / 3600 / tokens * 1e6,
        train_s=TOKENS / tokens,
        train_usd=TOKENS / tokens / 3600 * 2.5 * devices,
        train_mwh=TOKENS / tokens * watts * devices / 3.6e9,
        goodput_share=share,
        goodput_tokens_per_s=tokens * share,
        bound_by="sharding" if sharding > 0.02 * step_s else "compute",
        terms=terms,
        memory={
            "parameters": 26 * GIB / devices,
            "gradients": 14 * GIB / devices,
            "optimizer": 52 * GIB / devices,
            "gathered": 3 * GIB,
            "activations": 38 * GIB,
            "working": 4 * GIB,
        },
        elasticity={
            "peak": 0.9 * compute / step_s,
            "memory_rate": 0.1 * compute / step_s,
            "link_bandwidth": tensor / step_s,
            "network_bandwidth": 0.4 * sharding / step_s,
            "network_latency": -0.6 * sharding / step_s,
        },
        what_if={
            "network_bandwidth x2": 1 + 0.3 * sharding / step_s,
            "latency /2": 1 + 0.4 * sharding / step_s,
            "peak x2": 1.7,
        },
        gap=0.01,
        space=1234,
        error_share=0.15,
    )


def unfitting(strategy, devices, why="the plan that comes nearest needs 112 GiB of 80 GiB (optimizer 78 GiB)", **where):
    return Record(
        model=where.get("model", "llama2-7b"),
        seq_len=where.get("seq_len", 4096),
        node=where.get("node", "dgx-h100"),
        devices=devices,
        strategy=strategy,
        objective="throughput",
        batch="2 per device",
        global_batch=2 * devices,
        fits=False,
        why=why,
        capacity_bytes=80.0 * GIB,
    )


def study(**over):
    given = {
        "name": "weak-scaling",
        "title": "Weak scaling of a 7B model",
        "models": ("llama2-7b",),
        "seq_lens": (4096,),
        "nodes": ("dgx-h100",),
        "devices": SCALES,
        "batches": (Batch(per_device=2),),
        "strategies": (
            Strategy("fsdp", only=("fsdp",)),
            Strategy("tp 2", pins={"tp": 2}),
            Strategy("ddp", only=("ddp",)),
        ),
        "tokens": TOKENS,
        "failures": FAILURES,
        "published": (
            Published("FSDP 7B", "arXiv 2411.13055", "tokens_per_s_per_device", ((128, 9500.0), (2048, 5960.0))),
        ),
    }
    return Study(**{**given, **over})


def records(*, scales=SCALES, names=("fsdp", "tp 2", "ddp"), **where):
    """Three strategies at nine scales: one that loses, one that loses less, one that fits at two scales only."""
    sharded, tensor, replicated = names
    found = []
    for devices in scales:
        found.append(record(sharded, devices, slope=0.16, **where))
        found.append(record(tensor, devices, slope=0.05, **where))
        fits = devices in (16, 32)
        found.append(
            record(replicated, devices, slope=0.4, **where) if fits else unfitting(replicated, devices, **where)
        )
    return found


def timeline(ranks=4, microbatches=8):
    events = []
    for rank in range(ranks):
        for number in range(microbatches):
            start = rank + 3 * number
            events.append(Event(start, start + 1, rank, "compute", f"{rank}F{number}"))
            events.append(Event(start + 1, start + 3, rank, "compute", f"{rank}B{number}"))
    return Timeline(tuple(events))
