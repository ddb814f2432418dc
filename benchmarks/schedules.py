"""How fast schedules are drawn up, given communication, proven and evaluated."""

import time
from collections.abc import Callable
from typing import TypeVar

from wavetrain.schedule import Costs, add_communication, evaluate, orders, verify

T = TypeVar("T")
LARGE = (64, 4, 512)  # ranks, waves, microbatches


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def large() -> None:
    """The size the verifier must handle in seconds."""
    ranks, waves, microbatches = LARGE
    order, drawn = timed(lambda: orders.wave(ranks, waves, microbatches))
    complete, placed = timed(lambda: add_communication(order))
    proof, proven = timed(lambda: verify(complete))
    _, evaluated = timed(lambda: evaluate(order, Costs.uniform(order.placement.num_stages)))
    total = sum(map(len, complete.ranks))
    print(f"wave, {ranks} ranks, {waves} waves, {microbatches} microbatches: {proof.num_compute:,} compute actions")
    rows = {"draw up": (proof.num_compute, drawn), "place messages": (total, placed)}
    rows |= {"prove": (total, proven), "evaluate": (proof.num_compute, evaluated)}
    for name, (count, seconds) in rows.items():
        rate = f"{count / seconds:>9,.0f} per second, {seconds / drawn:4.1f} x the time of drawing up"
        print(f"  {name:15s} {count:>9,} actions in {seconds:5.1f} s: {rate}")


if __name__ == "__main__":
    large()
