"""OSDP against FSDP as its authors compared them: 48 layers of 1,536, fp32, eight TITAN RTX with 8 and 16 GB.

    python benchmarks/osdp.py

The published figure is 192.26 against 158.05 tokens per second at 8 GB, +21.6 % (OSDP, README). Two of ours: blocks
kept or gathered again over all replicas, which is what OSDP's code does, and all that the planner may choose.
"""

from __future__ import annotations

from dataclasses import replace

import wavetrain as wt
from wavetrain.base.units import DType
from wavetrain.plan.layout import Choice, Layout
from wavetrain.plan.plan import EVERY, OperatorChoice, Plan
from wavetrain.plan.stack import AttentionImpl, Precision, Stack
from wavetrain.planner.ask import question
from wavetrain.planner.question import Question
from wavetrain.planner.search import search
from wavetrain.sim.predict import outline

FULL = Precision(compute=DType.FP32, products=DType.FP32, gradients=DType.FP32)
BATCH, TOKENS, SECONDS = 96, 6, 60.0


def asked(limit_gib: float) -> Question:
    model, cluster = wt.load_model("osdp-gpt-48x1536"), wt.load_cluster("osdp-titan")
    headroom = 1 - limit_gib * 2**30 / cluster.device.memory_bytes
    pins = {"tp": 1, "cp": 1, "pp": 1, "dp": 8, "microbatch": BATCH}
    stack = Stack(attention=AttentionImpl.UNFUSED)
    return question(
        model,
        cluster,
        global_batch=8 * BATCH,
        seq_len=TOKENS,
        precision=FULL,
        stack=stack,
        headroom=headroom,
        **pins,
    )


def two_modes(one: Question) -> float:
    """The fastest step with so many blocks kept as fit, all others gathered again."""
    blocks, best = one.model.num_blocks, float("inf")
    name = next(iter(one.model.block_counts))
    for kept in range(blocks + 1):
        chosen = [OperatorChoice(name, EVERY, Choice(8, keep=True), blocks - kept, kept)] if kept else []
        plan = Plan(
            model=one.model,
            cluster=one.cluster,
            layout=Layout(global_batch=one.global_batch, microbatch=BATCH, dp=8),
            cut=(blocks,),
            seq_len=TOKENS,
            choice=Choice(8),
            choices=tuple(chosen),
            stack=one.stack,
            precision=one.precision,
        )
        seen = outline(plan, one.laws)
        if seen.needed_bytes <= one.capacity_bytes:
            best = min(best, seen.step_s)
    return best


def main() -> None:
    for limit_gib in (8, 16):
        one = asked(limit_gib)
        fsdp = search(replace(one, only=("fsdp",))).found[0].outline.step_s
        two = two_modes(one)
        found = search(one, time_limit_s=SECONDS)
        step_s = found.found[0].outline.step_s
        print(
            f"{limit_gib} GiB: FSDP {fsdp:.3f} s; two modes {two:.3f} s, {fsdp / two - 1:+.1%}; "
            f"any choice {step_s:.3f} s, {fsdp / step_s - 1:+.1%}, gap {found.gap:.2%} after {found.search_s:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
