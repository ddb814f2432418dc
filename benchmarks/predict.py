"""Predictions per second: the closed form on a sweep of layouts, one plan at a time, and the event simulation.

Absolute figures depend on the machine; the ratios do not much.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from wavetrain.cluster import load_cluster
from wavetrain.cluster.laws import load_laws
from wavetrain.model import load_model
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Layout
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.sim.estimate import SCHEDULE_KINDS, estimate
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import memory
from wavetrain.sim.predict import simulate
from wavetrain.sim.sweep import Layouts, sweep


def layouts_of(devices: int, *, global_batch: int) -> Layouts:
    """Every split of a power-of-two cluster, times schedule, microbatch, recompute and sharding."""
    rows = []
    kinds = [(SCHEDULE_KINDS.index("1f1b"), 1), (SCHEDULE_KINDS.index("interleaved"), 4)]
    kinds += [(SCHEDULE_KINDS.index("wave"), 2 * w) for w in (1, 2)]
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16):
            dp = devices // tp // pp
            for microbatch in (1, 2, 4, 8):
                m = global_batch // dp // microbatch
                if m < 1:
                    continue
                for kind, stages in kinds if pp > 1 else kinds[:1]:
                    for recompute in (0, 1, 2):
                        for shard in {1, min(8, dp), dp}:
                            for keep in (False, True):
                                for zero1 in (False, True):
                                    row = (tp, tp > 1, 1, dp, pp, False, kind, stages, microbatch, m, recompute, shard)
                                    rows.append((*row, keep, zero1))
    columns = np.array(rows).T
    flags = {1, 5, 12, 13}
    return Layouts(*(c.astype(bool) if i in flags else c.astype(np.intp) for i, c in enumerate(columns)))


def timed(action: Callable[[], object], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    model, cluster, laws = load_model("llama2-70b"), load_cluster("dgx-h100:128"), load_laws()
    layouts = layouts_of(1024, global_batch=2048)
    many = Layouts(*(np.tile(getattr(layouts, name), 40) for name in Layouts.__dataclass_fields__))

    def closed() -> None:
        batch = sweep(model, cluster, many, seq_len=4096)
        estimate(batch, laws)
        memory(batch, laws)

    seconds = timed(closed)
    per_s = len(many) / seconds
    print(f"closed form, time and memory: {len(many):,} layouts in {seconds:.2f} s = {per_s:,.0f} per second")

    layout = Layout(global_batch=2048, tp=8, sequence_parallel=True, pp=8, dp=16, schedule="wave", waves=2)
    plan = Plan(model=model, cluster=cluster, layout=layout, cut=even_cut(80, num_stages(layout)), seq_len=4096)
    alone = timed(lambda: estimate(gather([plan]), laws))
    print(f"closed form, one plan: {1 / alone:,.0f} per second; the sweep does {per_s * alone:,.0f} times as many")
    events = timed(lambda: simulate(plan))
    print(f"event simulation of one plan: {events:.3f} s; the sweep prices {per_s * events:,.0f} layouts meanwhile")

    big = Layout(global_batch=2048, tp=8, sequence_parallel=True, pp=16, dp=128, schedule="wave", waves=4)
    huge = load_model("llama3-405b", seq_len=8192)
    cut = even_cut(126, num_stages(big))
    giant = Plan(model=huge, cluster=load_cluster("dgx-h100:2048"), layout=big, cut=cut, seq_len=8192)
    print(f"405B on 16,384 devices, 4 waves: {timed(lambda: simulate(giant)):.2f} s")


if __name__ == "__main__":
    main()
