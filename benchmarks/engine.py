"""How fast a schedule is simulated, and how that compares with evaluating its order."""

import time
from collections.abc import Callable
from typing import TypeVar

from wavetrain.schedule import Actions, Costs, add_communication, evaluate, orders
from wavetrain.sim import engine
from wavetrain.sim.engine import Messages, Rules, StageBytes, StageTimes, run

T = TypeVar("T")
CASES = {"large": (64, 4, 512), "405B-like": (16, 4, 64)}  # ranks, waves, microbatches
RUNS = 3
TIMES = StageTimes(f=1.0, i=1.0, w=1.0, send_f=0.01, send_b=0.01)
LAUNCHED = StageTimes(f=1.0, i=1.0, w=1.0, send_f=0.01, send_b=0.01, message_s=0.001)
SIZES = StageBytes(saved=2.0, saved_for_w=1.0, transient_f=1.0, transient_b=1.0, message=1.0)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def case(name: str, ranks: int, waves: int, microbatches: int) -> None:
    order = orders.wave(ranks, waves, microbatches)
    complete = add_communication(order)
    num_stages = order.placement.num_stages
    _, evaluated = timed(lambda: evaluate(complete, Costs.uniform(num_stages, transfer=0.01)))
    print(f"{name}: wave, {ranks} ranks, {waves} waves, {microbatches} microbatches: {complete.size:,} actions")
    report("evaluate", complete.size, evaluated, evaluated)
    fresh = Actions(complete.ranks)  # nothing known of it yet
    program, compiled = timed(lambda: engine.compile(fresh))
    report("compile", complete.size, compiled, evaluated)
    _, first = timed(lambda: run(program, [TIMES] * num_stages, [SIZES] * num_stages))
    report("first run", complete.size, first, evaluated)
    report("compile and run", complete.size, compiled + first, evaluated)
    for what, times, sizes in (
        ("again", TIMES, SIZES),
        ("times only", TIMES, StageBytes()),
        ("launches", LAUNCHED, SIZES),
    ):
        work = [
            timed(lambda t=times, s=sizes: run(program, [t] * num_stages, [s] * num_stages))[1] for _ in range(RUNS)
        ]
        report(what, complete.size, min(work), evaluated)
    blocking = Rules(Messages.BLOCKING)
    work = [timed(lambda: run(program, [TIMES] * num_stages, rules=blocking))[1] for _ in range(RUNS)]
    report("blocking, first", complete.size, work[0], evaluated)
    report("blocking, again", complete.size, min(work), evaluated)


def report(what: str, count: int, seconds: float, evaluated: float) -> None:
    rate, ratio = count / seconds, evaluated / seconds
    print(f"  {what:16s} {seconds:6.2f} s: {rate:>10,.0f} actions/s, {ratio:5.1f} x as fast as evaluate")


if __name__ == "__main__":
    for name, shape in CASES.items():
        case(name, *shape)
